"""Parameters, FLOPs and bytes of one step, as folds over the inventory of `qwenjax.ops`. Integers, exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, check_step, dims, size
from qwenjax.errors import InputError
from qwenjax.ops import GROUPS, KV, WEIGHTS, Op, Weight, layers_of, ops_of, weights_of
from qwenjax.sharding import Mesh, check_mesh, device_fraction
from roofline.dtypes import DTYPE_BITS as DTYPE_BITS
from roofline.dtypes import DtypePolicy as DtypePolicy
from roofline.dtypes import dtype_bits as dtype_bits
from roofline.weight_schemes import WeightScheme, stored_weight_bytes

Attention = Literal["causal", "dense"]
Logits = Literal["last", "all"]
Experts = Literal["expected", "all"] | int


@dataclass(frozen=True)
class ParamCounts:
    """What `roofline params` prints: element counts, FLOPs and bytes that no step changes."""

    num_params: int
    num_active_params: int  # of one token, both embedding matrices included, as model cards count
    num_matmul_params: int  # weights of matrix products, every expert and the output head included
    num_active_matmul_params: int
    groups: dict[str, int]
    weight_bytes: int
    kv_bytes_per_token: int
    flops_per_token: dict[str, int]
    attention_flops: dict[str, int]


@dataclass(frozen=True)
class CountRow:
    """One op of one step on the fullest device, summed over the layers that have it.

    flops counts two for each multiply-add of a matrix product (0 for elementwise ops). activation_bytes is what would
    cross between ops if none were fused.
    """

    op: str
    kind: str
    layers: int
    count: int
    flops: Any
    weight_bytes: Any
    kv_read_bytes: Any
    kv_write_bytes: Any
    activation_bytes: Any

    @property
    def bytes(self) -> Any:
        """What must cross the memory interface: weights and KV cache. Activations can stay on the chip."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes


def count_weight(config: ModelConfig, weight: Weight) -> int:
    """Elements of one checkpoint tensor's kind, over all layers that have it."""
    return int(size(weight.letters, dims(config, block=weight.block))) * layers_of(config, weight.scope)


def count_params(
    config: ModelConfig,
    dtype: str | None = "bfloat16",
    kv_dtype: str | None = None,
    weights: str | WeightScheme | None = None,
) -> ParamCounts:
    """Counts parameters by group, bytes at the given dtypes, and the FLOPs that one token costs.

    weights is a scheme (awq, fp8, ..., or `stored`) in place of the dtype, see `DtypePolicy.for_model`.
    A tied output head is 0 parameters and still costs its FLOPs. FLOPs are those of matrix products, two for each
    multiply-add; attention's are apart, since they grow with the context.
    """
    policy = DtypePolicy.for_model(config, dtype, kv_dtype, weights)
    groups = dict.fromkeys(GROUPS, 0)
    for weight in weights_of(config):
        groups[weight.group] += count_weight(config, weight)
    total = sum(groups.values())
    idle = (
        groups["experts"] // config.num_experts * (config.num_experts - config.num_experts_per_tok)
        if config.is_moe
        else 0
    )
    # One row of each matrix product of one token: multiply-adds are the active matmul parameters.
    token = {
        row.op: row.flops
        for row in count_step(config, Step(), attention="dense", check=False)
        if row.kind in ("matmul", "grouped")
    }
    active_matmul = sum(token.values()) // 2
    head = token["unembed"]
    return ParamCounts(
        num_params=total,
        num_active_params=total - idle,
        num_matmul_params=active_matmul + idle,
        num_active_matmul_params=active_matmul,
        groups=groups,
        weight_bytes=_resident_bytes(config, policy, Mesh()),
        kv_bytes_per_token=_kv_bytes(config, policy, Mesh()),
        flops_per_token={"backbone": sum(token.values()) - head, "lm_head": head, "total": sum(token.values())},
        attention_flops=_attention_constants(config),
    )


def _attention_constants(config: ModelConfig) -> dict[str, int]:
    """FLOPs of scores and values for each attended position: a decode step's, and half of it for a causal square."""
    sizes = dims(config)
    per_pair = 2 * 2 * int(size("KGH", sizes)) * config.num_hidden_layers
    return {"prefill_causal_per_token_squared": per_pair // 2, "decode_per_context_token": per_pair}


def count_step(
    config: ModelConfig,
    step: Step,
    *,
    dtype: str | None = "bfloat16",
    kv_dtype: str | None = None,
    weights: str | WeightScheme | None = None,
    attention: Attention = "causal",
    logits: Logits = "last",
    experts: Experts = "expected",
    mesh: Mesh | None = None,
    check: bool = True,
) -> tuple[CountRow, ...]:
    """Counts every op of one step, in order, on the fullest device of the mesh.

    weights: a scheme (awq, fp8, ..., or `stored`) in place of the dtype, see `DtypePolicy.for_model`.
    attention: causal counts the pairs that the mask keeps, dense all of them (what a plain matrix product executes).
    logits: how many positions of a prefill reach the output head. experts: distinct experts whose weights a step reads
    in each layer, expected under uniform routing, all, or a measured number. Step sizes may be numpy arrays.
    """
    mesh = mesh or Mesh()
    if check:
        check_step(config, step)
        check_mesh(config, mesh)
    _check_choice("attention", attention, ("causal", "dense"))
    _check_choice("logits", logits, ("last", "all"))
    fold = _Fold(config, step, DtypePolicy.for_model(config, dtype, kv_dtype, weights), attention, logits, mesh)
    distinct = distinct_experts(config, step, experts) if config.is_moe else 0
    return tuple(fold.row(op, distinct) for op in ops_of(config))


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(name, value, "is not a convention that is known here", f"Known: {', '.join(choices)}.")


def distinct_experts(config: ModelConfig, step: Step, experts: Experts = "expected") -> Any:
    """Distinct experts that one layer's tokens choose: E(1-(1-A/E)^tokens) if routing is uniform, all, or measured."""
    total, chosen = config.num_experts, config.num_experts_per_tok
    tokens = step.batch * step.query_len
    if experts == "all":
        return total
    if experts == "expected":
        value = total * (1 - (1 - chosen / total) ** tokens)
        return value if hasattr(value, "shape") else max(float(chosen), value)
    if isinstance(experts, bool) or not isinstance(experts, int):
        raise InputError(
            "experts",
            experts,
            "must be expected, all or a whole number",
            "Give the measured distinct experts of a layer.",
        )
    most = min(total, tokens * chosen)
    if not chosen <= experts <= most:
        raise InputError(
            "experts",
            experts,
            f"must be from {chosen} (one token's) to {most}",
            "Count the distinct experts of one layer.",
        )
    return experts


class _Fold:
    """The folds of one step: every method reads letters off an op and multiplies sizes."""

    def __init__(
        self, config: ModelConfig, step: Step, policy: DtypePolicy, attention: Attention, logits: Logits, mesh: Mesh
    ) -> None:
        self.config, self.step, self.policy, self.mesh = config, step, policy, mesh
        self.attention, self.logits = attention, logits
        self.bits = policy.weight_bits(config)

    def row(self, op: Op, distinct: Any) -> CountRow:
        layers = layers_of(self.config, op.scope)
        sizes = dims(self.config, self.step, op.block, self.logits)
        return CountRow(
            op.name,
            op.kind,
            layers,
            layers,
            self.flops(op, sizes, layers),
            self.weight_bytes(op, sizes, distinct),
            self.kv_bytes(op.kv_read, reading=True),
            self.kv_bytes(op.kv_write, reading=False),
            self.activation_bytes(op, sizes, layers),
        )

    def flops(self, op: Op, sizes: dict[str, Any], layers: int) -> Any:
        if op.kind not in ("matmul", "grouped", "attention"):
            return 0
        letters = "".join(dict.fromkeys(op.einsum.replace(",", "").replace("->", "")))
        share = device_fraction(letters, self.config, self.mesh)
        if op.kind == "attention":
            work = size(letters.replace("T", "").replace("S", ""), sizes) * self.attended_pairs()
        else:
            # Experts select and do not multiply: A of them work for each token.
            work = size(letters.replace("E", "") if op.kind == "grouped" else letters, sizes) * layers
        return _whole(_scaled(2 * work, share))

    def attended_pairs(self) -> Any:
        """Query-key pairs of one head of one sequence, summed over layers."""
        new, total = self.step.query_len, self.step.kv_len
        pairs: Any = 0
        for window, layers in Counter(self.config.sliding_windows).items():
            if self.attention == "dense":
                pairs = pairs + layers * new * total
            elif window is None:
                pairs = pairs + layers * (new * total - new * (new - 1) // 2)
            else:
                pairs = pairs + layers * (_windowed(total, window) - _windowed(total - new, window))
        return pairs

    def weight_bytes(self, op: Op, sizes: dict[str, Any], distinct: Any) -> Any:
        leaves = {
            "embed_tokens" if leaf == "lm_head" and self.config.tie_word_embeddings else leaf for leaf in op.leaves
        }
        bits: Any = 0
        for weight in WEIGHTS:
            if weight.leaf in leaves and weight.when(self.config):
                share = device_fraction(weight.letters, self.config, self.mesh)
                elements: Any = count_weight(self.config, weight)
                if op.kind == "gather":
                    elements = size("BTD", sizes)  # one row for each token
                if op.kind == "grouped":
                    elements = elements // self.config.num_experts * distinct
                bits = bits + _weighed(_scaled(elements, share), self.bits[weight.name])
        return _bytes(bits)

    def kv_bytes(self, names: tuple[str, ...], reading: bool) -> Any:
        elements: Any = 0
        for tensor in KV:
            if tensor.name not in names:
                continue
            sizes = dims(self.config, self.step)
            per_row = size(tensor.letters.replace("S", ""), sizes)
            rows = self.attended_rows() if reading else self.step.query_len * self.config.num_hidden_layers
            elements = elements + _scaled(per_row * rows, device_fraction(tensor.letters, self.config, self.mesh))
        return _bytes(elements * dtype_bits(self.policy.kv))

    def attended_rows(self) -> Any:
        """Cache rows of one sequence that a step must read, summed over layers."""
        rows: Any = 0
        for window, layers in Counter(self.config.sliding_windows).items():
            seen = self.step.kv_len if window is None else _minimum(self.step.kv_len, self.step.query_len + window - 1)
            rows = rows + layers * seen
        return rows

    def activation_bytes(self, op: Op, sizes: dict[str, Any], layers: int) -> Any:
        inputs, outputs = op.einsum.split("->")
        operands = inputs.split(",")
        if op.kind in ("matmul", "grouped", "gather", "attention"):
            operands = operands[:1]  # the second is a weight or the cache
        else:
            operands = operands[: len(operands) - len(op.leaves)]
        elements: Any = 0
        for letters in (*operands, *outputs.split(",")):
            elements = elements + _scaled(size(letters, sizes), device_fraction(letters, self.config, self.mesh))
        return _bytes(elements * layers * dtype_bits(self.policy.activation))


def _kv_bytes(config: ModelConfig, policy: DtypePolicy, mesh: Mesh) -> int:
    sizes = dims(config)
    bits = sum(
        _scaled(size(t.letters.replace("S", "").replace("B", ""), sizes), device_fraction(t.letters, config, mesh))
        for t in KV
    )
    return int(_bytes(bits * config.num_hidden_layers * dtype_bits(policy.kv)))


def count_kv_bytes_per_token(config: ModelConfig, kv_dtype: str = "bfloat16", mesh: Mesh | None = None) -> int:
    """Cache bytes that one token of one sequence occupies on the fullest device, over all layers."""
    dtype_bits(kv_dtype, "kv_dtype")
    return _kv_bytes(config, DtypePolicy(kv=kv_dtype), mesh or Mesh())


def count_weight_bytes(
    config: ModelConfig,
    dtype: str | None = "bfloat16",
    mesh: Mesh | None = None,
    weights: str | WeightScheme | None = None,
) -> int:
    """Resident bytes of all weights on the fullest device; with a scheme, of scales and what isn't quantised too."""
    return _resident_bytes(config, DtypePolicy.for_model(config, dtype, None, weights), mesh or Mesh())


def _resident_bytes(config: ModelConfig, policy: DtypePolicy, mesh: Mesh) -> int:
    if policy.scheme is not None:
        return stored_weight_bytes(config, policy.scheme, mesh)
    elements = sum(
        _scaled(count_weight(config, w), device_fraction(w.letters, config, mesh)) for w in weights_of(config)
    )
    return int(-(-elements * dtype_bits(policy.weight) // 8))


def sum_rows(rows: Iterator[CountRow] | tuple[CountRow, ...]) -> dict[str, Any]:
    """Totals of a step: flops, and bytes by kind."""
    names = ("flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes", "activation_bytes", "bytes")
    rows = tuple(rows)
    return {name: sum(getattr(row, name) for row in rows) for name in names}


def _scaled(value: Any, share: Any) -> Any:
    return (
        value
        if share == 1
        else value * share.numerator / share.denominator
        if hasattr(value, "shape")
        else value * share
    )


def _weighed(elements: Any, bits: Any) -> Any:
    """Bits of some elements; a mean of bits is a fraction, which numpy's arrays can't hold."""
    return elements * (float(bits) if hasattr(elements, "shape") or isinstance(elements, float) else bits)


def _whole(value: Any) -> Any:
    """An exact whole number as int; anything else as a float, or the array it is."""
    if hasattr(value, "shape"):
        return value
    return int(value) if value == int(value) else float(value)


def _bytes(bits: Any) -> Any:
    """Bytes of a number of bits; exact for integers and fractions of any size."""
    if isinstance(bits, int) and bits % 8 == 0:
        return bits // 8
    return _whole(bits / 8)


def _minimum(a: Any, b: Any) -> Any:
    return (a + b - abs(a - b)) // 2  # for integers and arrays alike


def _windowed(positions: Any, window: int) -> Any:
    """Pairs of the first `positions` queries when each sees at most `window` keys."""
    short = _minimum(positions, window)
    return short * (short + 1) // 2 + (positions - short) * window
