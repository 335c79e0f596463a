"""How weights are stored: bits, scales and zero points of each scheme, by name or from a quantization_config.

A scheme says how a matrix of a linear layer is packed, and what of the rest (embedding, output head, norms, biases,
router) it touches. `weight_bits` folds it over the inventory. Stored bytes are those of the checkpoint's tensors; an
engine may lay them out anew as it loads them, with padding or without the zero points of a symmetric format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from qwenjax.config import ModelConfig
from qwenjax.dims import dims, size
from qwenjax.errors import InputError
from qwenjax.ops import Weight, layers_of, ops_of, weights_of
from qwenjax.quantization import Quantization
from qwenjax.sharding import Mesh, device_fraction
from roofline.gguf import GGUF_BITS, gguf_type
from roofline.modules import QUANTISED_GROUPS, is_kept, module_names, weight_layers


@dataclass(frozen=True)
class Packing:
    """How one matrix [out, in] is stored: bits of a weight, and of the scale and zero point that a tile shares."""

    bits: int
    tile: tuple[int | None, int | None] = (None, None)  # [out, in] weights that share a scale; None: the whole axis
    tile_bits: int = 0  # of one tile's scale and zero point together
    column_bits: int = 0  # of each input: GPTQ's group index

    def matrix_bits(self, rows: int, columns: int) -> int:
        """Bits of a matrix of `rows` outputs and `columns` inputs, scales and zero points included."""
        high, wide = self.tile[0] or rows, self.tile[1] or columns
        tiles = -(-rows // high) * -(-columns // wide)
        return rows * columns * self.bits + tiles * self.tile_bits + columns * self.column_bits


@dataclass(frozen=True)
class WeightScheme:
    """How a checkpoint's weights are stored, and in which type its matrix products multiply."""

    name: str
    linear: Packing
    head: Packing = Packing(16)
    embedding: Packing = Packing(16)
    rest_bits: int = 16  # each element of norms, biases, router, and of the linears that are kept
    compute: tuple[str, ...] = ()  # narrow types of the products, widest first; empty: the activations'
    activation: str = "bfloat16"  # the usual one; what people run with it may differ
    kept: tuple[str, ...] = ()  # modules that keep their precision, as quantization_config names them
    gguf: str = ""  # a GGUF file type, whose tensors' types follow llama.cpp's rules

    @property
    def is_weight_only(self) -> bool:
        """Whether weights are turned into the activations' type before they are multiplied."""
        return not self.compute


def _grouped(bits: int, group: int | None, zero_bits: int, column_bits: int = 0) -> Packing:
    return Packing(bits, (1, group), 16 + zero_bits, column_bits)


def _uniform(name: str, bits: int, activation: str = "bfloat16", compute: tuple[str, ...] = ()) -> WeightScheme:
    return WeightScheme(name, Packing(bits), Packing(bits), Packing(bits), bits, compute, activation)


def _gguf(name: str, file_type: str) -> WeightScheme:
    return WeightScheme(name, Packing(16), rest_bits=32, activation="float16", gguf=file_type)


_FP8 = ("float8_e4m3fn",)
# One byte a weight and a scale of a whole tensor, or of each output.
_INT8_CHANNEL = Packing(8, (1, None), 16)

SCHEMES: dict[str, WeightScheme] = {
    scheme.name: scheme
    for scheme in (
        _uniform("fp32", 32, "float32"),
        _uniform("bf16", 16),
        _uniform("fp16", 16, "float16"),
        # vLLM's --quantization fp8 and static checkpoints: one float32 scale of each matrix.
        WeightScheme("fp8", Packing(8, tile_bits=32), compute=_FP8),
        # Qwen's and DeepSeek's: one scale of each block of 128 x 128.
        WeightScheme("fp8-block", Packing(8, (128, 128), 16), compute=_FP8),
        WeightScheme("fp8-channel", Packing(8, (1, None), 16), compute=_FP8),
        # AutoGPTQ: float16 scale and packed zero point of a group, int32 group index of each input.
        WeightScheme("gptq-int4", _grouped(4, 128, 4, 32), activation="float16"),
        WeightScheme("gptq-int8", _grouped(8, 128, 8, 32), activation="float16"),
        WeightScheme("awq", _grouped(4, 128, 4), activation="float16"),
        WeightScheme("w4a16", _grouped(4, 128, 0)),  # compressed-tensors, symmetric: no zero points
        WeightScheme("w8a16", _INT8_CHANNEL),
        WeightScheme("w8a8", _INT8_CHANNEL, compute=("int8",)),
        # gpt-fast quantises every linear layer, the output head too: int8 by output; int4 with a bfloat16 scale and
        # zero point of each group.
        WeightScheme("int8-wo", _INT8_CHANNEL, head=_INT8_CHANNEL),
        WeightScheme("int4-wo", _grouped(4, 32, 16), head=_grouped(4, 32, 16)),
        # One float8 scale of 16 weights, and one float32 of a matrix, which is left out.
        WeightScheme("nvfp4", Packing(4, (1, 16), 8), compute=(*_FP8, "float4_e2m1fn")),
        # 4-bit NormalFloat: a scale of 64 weights in 8 bits; the float32 of 256 of these, 0.002 bits, is left out.
        WeightScheme("bnb-nf4", Packing(4, (1, 64), 8)),
        _gguf("q4_0", "Q4_0"),
        _gguf("q4_k_m", "Q4_K_M"),
        _gguf("q8_0", "Q8_0"),
        _gguf("gguf-f16", "F16"),
    )
}
# JAX's names: every weight as narrow as that, without scales.
_JAX = {
    "float64": _uniform("float64", 64, "float32"),
    "float32": _uniform("float32", 32, "float32"),
    "bfloat16": _uniform("bfloat16", 16),
    "float16": _uniform("float16", 16, "float16"),
    "float8_e4m3fn": _uniform("float8_e4m3fn", 8, compute=_FP8),
    "float8_e5m2": _uniform("float8_e5m2", 8, compute=("float8_e5m2",)),
    "int8": _uniform("int8", 8, compute=("int8",)),
    "int4": _uniform("int4", 4, compute=("int4",)),
}

# How people write them: the first pattern that is found in the lower-case text decides.
_SPELLINGS: tuple[tuple[str, str], ...] = (
    (r"nvfp4|fp4", "nvfp4"),
    (r"q4_k", "q4_k_m"),
    (r"q4_0", "q4_0"),
    (r"q8_0", "q8_0"),
    (r"gptq.*(int8|8.?bit)", "gptq-int8"),
    (r"gptq", "gptq-int4"),
    (r"w8a8.?fp8|fp8.?(block|g128)", "fp8-block"),
    (r"fp8.?(channel|dynamic)", "fp8-channel"),
    (r"fp8|float8", "fp8"),
    (r"awq", "awq"),
    (r"w8a8|smoothquant", "w8a8"),
    (r"w8a16", "w8a16"),
    (r"w4a16", "w4a16"),
    (r"bitsandbytes|bnb|nf4", "bnb-nf4"),
    (r"int4", "int4-wo"),
    (r"int8.?(weight|wo)", "int8-wo"),
    (r"^bf16|^bfloat16|^fp16/bf16|^$", "bf16"),
    (r"^f16$", "gguf-f16"),
    (r"^fp16|^float16|^f16|^half", "fp16"),
    (r"^fp32|^f32", "fp32"),
)


def scheme_of(source: str | Quantization | None) -> WeightScheme:
    """The scheme of a name (awq, GPTQ-Int4, FP8, W8A8, Q4_K_M, bfloat16, ...) or of a checkpoint's quantization.

    A group size in the text ("INT4 g32") is taken. None is bfloat16. Raises InputError that lists the known names.
    """
    if source is None:
        return SCHEMES["bf16"]
    if isinstance(source, Quantization):
        return _stored_scheme(source)
    text = source.strip().lower()
    known = SCHEMES.get(text) or _JAX.get(text)
    if known is None:
        name = next((name for pattern, name in _SPELLINGS if re.search(pattern, text)), None)
        if name is None:
            listed = ", ".join(SCHEMES)
            raise InputError("weights", source, "is not a weight scheme that is known here", f"Known: {listed}.")
        known = SCHEMES[name]
    group = re.search(r"\bg(\d+)\b", text)
    return _with_group(known, int(group[1])) if group else known


def scheme_for(config: ModelConfig, source: str | WeightScheme | Quantization | None) -> WeightScheme:
    """The scheme of a name, where `stored` is the config's own quantization (bfloat16 if it has none)."""
    if isinstance(source, WeightScheme):
        return source
    return scheme_of(config.quantization if source == "stored" else source)


def _with_group(scheme: WeightScheme, group: int) -> WeightScheme:
    high, wide = scheme.linear.tile
    if high != 1 or wide is None or wide == group or group < 1:
        return scheme
    same_head = scheme.head == scheme.linear
    linear = replace(scheme.linear, tile=(1, group))
    return replace(scheme, name=f"{scheme.name}-g{group}", linear=linear, head=linear if same_head else scheme.head)


def _stored_scheme(stored: Quantization) -> WeightScheme:
    """What quantization_config says: bits, groups or blocks, activations, and the modules that it leaves out."""
    bits, group = stored.bits, stored.group_size
    narrow = "float4_e2m1fn" if stored.algorithm == "NVFP4" else "float8_e4m3fn"
    implied = narrow if stored.method in ("fp8", "fbgemm_fp8", "modelopt") else ""
    compute = (stored.activations or implied,) if stored.activations or implied else ()
    activation = "float16" if stored.method in ("gptq", "awq") else "bfloat16"
    if stored.method in ("gptq", "awq"):
        packing = _grouped(bits, group, bits, 32 if stored.method == "gptq" else 0)
    elif stored.method == "bitsandbytes" and group:
        packing = Packing(bits, (1, group), 8 if "double" in stored.algorithm else 32)
    elif stored.algorithm == "NVFP4":
        packing = Packing(bits, (1, group), 8)
    elif stored.block:
        packing = Packing(bits, stored.block, 16)
    elif group or stored.per_channel:
        wide = stored.method in ("fbgemm_fp8", "bitsandbytes")  # float32 scales
        packing = Packing(bits, (1, group), 32 if wide else 16)
    else:
        packing = Packing(bits, tile_bits=32)
    kept = stored.modules_to_not_convert
    return WeightScheme(_stored_name(stored), packing, compute=compute, activation=activation, kept=kept)


def _stored_name(stored: Quantization) -> str:
    """The name in SCHEMES that a quantization_config comes nearest to."""
    if stored.method == "gptq":
        return f"gptq-int{stored.bits}"
    if stored.method == "bitsandbytes":
        return "bnb-nf4" if stored.bits == 4 else "bnb-int8"
    if stored.algorithm == "NVFP4":
        return "nvfp4"
    if stored.algorithm == "INT":
        return f"w{stored.bits}a{'8' if stored.activations else '16'}"
    if stored.method == "awq":
        return "awq"
    return "fp8-block" if stored.block else "fp8-channel" if stored.per_channel else "fp8"


def weight_bits(config: ModelConfig, scheme: WeightScheme) -> dict[str, int]:
    """Bits of each checkpoint tensor's kind over all layers that have it and all experts, scales included."""
    return dict(_weight_bits(config, scheme))


@lru_cache(maxsize=64)
def _weight_bits(config: ModelConfig, scheme: WeightScheme) -> tuple[tuple[str, int], ...]:
    return tuple((weight.name, _bits_of(config, weight, scheme)) for weight in weights_of(config))


def _bits_of(config: ModelConfig, weight: Weight, scheme: WeightScheme) -> int:
    sizes = dims(config, block=weight.block)
    axes = weight.stored.split(",")
    copies = config.num_experts if "{expert}" in weight.key else 1
    shape = [int(size(letters, sizes)) for letters in axes]
    elements = copies * shape[0] * (shape[1] if len(shape) == 2 else 1)
    if scheme.gguf:
        layers = weight_layers(config, weight) if weight.scope != "model" else (0,)
        types = (gguf_type(config, weight, layer, shape[-1], scheme.gguf) for layer in layers)
        return sum(int(elements * GGUF_BITS[kind]) for kind in types)
    if weight.name in ("embed_tokens", "lm_head"):
        return (scheme.head if weight.name == "lm_head" else scheme.embedding).matrix_bits(*shape)
    layers_with_it = layers_of(config, weight.scope)
    plain = elements * scheme.rest_bits
    if weight.group not in QUANTISED_GROUPS:
        return plain * layers_with_it
    packed = scheme.linear.matrix_bits(shape[0], shape[1])
    if not scheme.kept:
        return packed * copies * layers_with_it
    left = _count_kept(config, weight, scheme.kept)
    return packed * (copies * layers_with_it - left) + plain // copies * left


def _count_kept(config: ModelConfig, weight: Weight, names: tuple[str, ...]) -> int:
    """How many of a weight's modules keep their precision."""
    kept = is_kept(names)
    if not any("experts" in name or "*" in name or name[:1].isdigit() or name.startswith("re:") for name in names):
        # No name tells one expert from another: the first stands for all.
        copies = config.num_experts if "{expert}" in weight.key else 1
        firsts = (next(module_names(config, weight, layer)) for layer in weight_layers(config, weight))
        return copies * sum(map(kept, firsts))
    return sum(kept(name) for layer in weight_layers(config, weight) for name in module_names(config, weight, layer))


def bits_per_weight(config: ModelConfig, scheme: WeightScheme) -> dict[str, Fraction]:
    """Mean stored bits of one element of each checkpoint tensor's kind, exactly."""
    counts = {
        weight.name: int(size(weight.letters, dims(config, block=weight.block))) * layers_of(config, weight.scope)
        for weight in weights_of(config)
    }
    return {name: Fraction(bits, counts[name]) for name, bits in _weight_bits(config, scheme)}


def op_weight_bits(config: ModelConfig, scheme: WeightScheme) -> dict[str, float]:
    """Mean stored bits of one weight that each matrix product of a step reads, scales included, by op name."""
    leaves: dict[str, list[int]] = {}
    for weight, (_, bits) in zip(weights_of(config), _weight_bits(config, scheme), strict=True):
        count = int(size(weight.letters, dims(config, block=weight.block))) * layers_of(config, weight.scope)
        total = leaves.setdefault(weight.leaf, [0, 0])
        total[0], total[1] = total[0] + bits, total[1] + count
    if config.tie_word_embeddings:
        leaves["lm_head"] = leaves["embed_tokens"]
    products = (op for op in ops_of(config) if op.kind in ("matmul", "grouped"))
    return {op.name: leaves[op.leaves[0]][0] / leaves[op.leaves[0]][1] for op in products}


def stored_weight_bytes(config: ModelConfig, scheme: WeightScheme | str, mesh: Mesh | None = None) -> int:
    """Bytes of all weights on the fullest device, with scales, zero points and what isn't quantised.

    Split matrices take their share of the scales; the few that every device repeats (GPTQ's group index, a scale of a
    whole matrix) are split too, an error below a thousandth.
    """
    chosen, mesh = scheme_for(config, scheme), mesh or Mesh()
    bits = _weight_bits(config, chosen)
    shares = (device_fraction(weight.letters, config, mesh) for weight in weights_of(config))
    total = sum(share * amount for share, (_, amount) in zip(shares, bits, strict=True))
    return int(-(-total // 8))
