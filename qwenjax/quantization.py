"""What a checkpoint's quantization_config (or hf_quant_config.json) says about how its weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwenjax.errors import InputError
from qwenjax.field_reader import plain_integer, wrong_type

SUPPORTED_METHODS = ("fp8", "gptq", "awq", "modelopt", "compressed-tensors", "bitsandbytes", "fbgemm_fp8")
NVFP4_GROUP = 16  # weights that share a scale, part of the format
INTEGER_BITS = (2, 3, 4, 8)
# compressed-tensors' type and bits: the name of the format, and of the type that activations take (none for int4).
_COMPRESSED: dict[tuple[Any, Any], tuple[str, str]] = {
    ("int", 4): ("INT", ""),
    ("int", 8): ("INT", "int8"),
    ("float", 8): ("FP8", "float8_e4m3fn"),
    ("float", 4): ("NVFP4", "float4_e2m1fn"),
}


@dataclass(frozen=True)
class Quantization:
    """How linear weights are stored. The model code here doesn't run quantised weights; the counts understand them."""

    method: str  # one of SUPPORTED_METHODS
    bits: int  # of one stored weight
    group_size: int | None = None  # weights that share a scale along the input axis (gptq, awq, nvfp4)
    block: tuple[int, int] | None = None  # [out, in] weights that share a scale (fp8)
    modules_to_not_convert: tuple[str, ...] = ()
    algorithm: str = ""  # FP8, NVFP4 as modelopt calls them; INT; nf4 and fp4 of bitsandbytes
    per_channel: bool = False  # one scale of each output; False without groups or blocks: of the whole matrix
    activations: str = ""  # their narrow type, where the method leaves it open; empty: they keep theirs


def read_quantization(value: Any) -> Quantization | None:
    """Reads quantization_config; None stays None. Refuses methods it doesn't know by name."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InputError(
            "quantization_config", value, "must be null or an object", "Remove it for unquantised weights."
        )
    # modelopt names itself under `producer` and its kind under `quant_algo`.
    method = value.get("quant_method") or ("modelopt" if "quant_algo" in value else None)
    if method == "modelopt":
        return _modelopt("quantization_config", value, "ignore")
    kept = _modules("quantization_config.modules_to_not_convert", value.get("modules_to_not_convert"))
    if method == "compressed-tensors":
        return _compressed(value)
    if method == "bitsandbytes":
        return _bitsandbytes(value)
    if method == "fbgemm_fp8":  # Meta's: scales of outputs, activations scaled by token
        return Quantization(method, 8, None, None, kept, "FP8", per_channel=True)
    if method == "fp8" and value.get("weight_block_size") is None and "activation_scheme" in value:
        return Quantization("fp8", 8, None, None, kept)  # one scale of each matrix
    if method == "fp8":
        return Quantization("fp8", 8, block=_block(value.get("weight_block_size")), modules_to_not_convert=kept)
    if method in ("gptq", "awq"):
        bits = _one_of(value, "bits", "w_bit")
        if bits not in INTEGER_BITS or isinstance(bits, bool):
            must = f"must be one of {', '.join(map(str, INTEGER_BITS))}"
            raise wrong_type("quantization_config.bits", bits, must, "Check the file.")
        group = _group_size(_one_of(value, "group_size", "q_group_size"))
        return Quantization(method, bits, group, modules_to_not_convert=kept)
    raise wrong_type(
        "quantization_config.quant_method",
        method,
        "must be a kind that is known here",
        f"Known: {', '.join(SUPPORTED_METHODS)}. Use the unquantised checkpoint.",
    )


def read_hf_quant_config(value: Any) -> Quantization:
    """Reads the hf_quant_config.json that NVIDIA's modelopt writes beside config.json."""
    inner = value.get("quantization") if isinstance(value, Mapping) else None
    if not isinstance(inner, Mapping):
        raise wrong_type("quantization", inner, "must be an object in hf_quant_config.json", "Check the file.")
    return _modelopt("quantization", inner, "exclude_modules")


def _modelopt(field: str, value: Mapping[str, Any], excluded: str) -> Quantization:
    algorithm = value.get("quant_algo")
    bits = {"FP8": 8, "NVFP4": 4}.get(algorithm) if isinstance(algorithm, str) else None
    if bits is None:
        raise wrong_type(f"{field}.quant_algo", algorithm, "must be a kind that is known here", "Known: FP8, NVFP4.")
    kept = _modules(f"{field}.{excluded}", value.get(excluded))
    group = NVFP4_GROUP if algorithm == "NVFP4" else None
    return Quantization("modelopt", bits, group, modules_to_not_convert=kept, algorithm=str(algorithm))


def _compressed(value: Mapping[str, Any]) -> Quantization:
    """compressed-tensors: one config group for all linear layers, with a scale of a matrix, output, group or block."""
    field = "quantization_config.config_groups"
    groups = value.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise wrong_type(field, groups, "must be an object of one group", "Several at once aren't implemented.")
    name, group = next(iter(groups.items()))
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise wrong_type(f"{field}.{name}.weights", weights, "must be an object", "Check the file.")
    bits: Any = weights.get("num_bits")
    kind, strategy = weights.get("type"), weights.get("strategy")
    if not plain_integer(bits) or (kind, bits) not in _COMPRESSED:
        problem = f"and type {kind!r} are no pair that is known here"
        raise InputError(f"{field}.{name}.weights.num_bits", bits, problem, "Known: int of 4 or 8, float of 4 or 8.")
    if strategy not in ("tensor", "channel", "group", "block", "tensor_group"):
        must = "must be tensor, channel, group, block or tensor_group"
        raise wrong_type(f"{field}.{name}.weights.strategy", strategy, must, "Check the file.")
    inputs = group.get("input_activations") or {}
    return Quantization(
        "compressed-tensors",
        bits,
        _group_size(weights.get("group_size")) if strategy in ("group", "tensor_group") else None,
        _block(weights.get("block_structure")) if strategy == "block" else None,
        _modules("quantization_config.ignore", value.get("ignore")),
        _COMPRESSED[kind, bits][0],
        strategy == "channel",
        _COMPRESSED.get((str(inputs.get("type")), inputs.get("num_bits")), ("", ""))[1],
    )


def _bitsandbytes(value: Mapping[str, Any]) -> Quantization:
    """bitsandbytes: NormalFloat or float of 4 bits with a scale of 64 weights, or int8 with a scale of each output."""
    kept = _modules("quantization_config.llm_int8_skip_modules", value.get("llm_int8_skip_modules"))
    if value.get("load_in_4bit") is True:
        kind = "fp4" if value.get("bnb_4bit_quant_type", "fp4") == "fp4" else "nf4"
        twice = value.get("bnb_4bit_use_double_quant") is True  # the scales themselves in 8 bits
        return Quantization("bitsandbytes", 4, 64, None, kept, f"{kind}-double" if twice else kind)
    if value.get("load_in_8bit") is True:
        return Quantization("bitsandbytes", 8, None, None, kept, "INT", per_channel=True, activations="int8")
    problem = "is off, and so is load_in_8bit"
    raise InputError("quantization_config.load_in_4bit", value.get("load_in_4bit"), problem, "Check the file.")


def _one_of(value: Mapping[str, Any], *spellings: str) -> Any:
    """The value under whichever spelling is there (AutoAWQ's own files say w_bit and q_group_size)."""
    stated = {key: value[key] for key in spellings if value.get(key) is not None}
    if len(set(map(repr, stated.values()))) > 1:
        text = " and ".join(f"{key} {number!r}" for key, number in stated.items())
        field = f"quantization_config.{spellings[0]}"
        raise InputError(field, None, f"is given in spellings that disagree ({text})", "Keep one of them.")
    return next(iter(stated.values()), None)


def _modules(field: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(field, value, "must be a list of names", "Check the file.")
    return tuple(value)


def _block(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(plain_integer(v) and v > 0 for v in value):
        raise wrong_type(
            "quantization_config.weight_block_size",
            value,
            "must be two positive integers",
            "Qwen's FP8 checkpoints say [128, 128].",
        )
    return value[0], value[1]


def _group_size(value: Any) -> int | None:
    if plain_integer(value) and value == -1:  # one scale for the whole input axis
        return None
    if not plain_integer(value) or value < 1:
        must = "must be a positive integer, or -1 for the whole input axis"
        raise wrong_type("quantization_config.group_size", value, must, "Qwen's checkpoints say 128.")
    return int(value)
