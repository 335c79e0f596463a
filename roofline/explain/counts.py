"""The counts of a derivation: a config's integers, weights and their stored bits, FLOPs and bytes of each op of a step.

The numbers are those of `roofline.count`; what is added here is the formula that gives each, by dimension letters.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.dims import LEGEND, Block, Step, dims, size
from qwenjax.ops import KV, WEIGHTS, Op, Scope, Weight, layers_of, leaf_letters
from qwenjax.sharding import Mesh, device_fraction
from roofline.count import Attention, CountRow, DtypePolicy, Experts, Logits, count_weight, distinct_experts, dtype_bits
from roofline.explain.derivation import Derivation, evaluate
from roofline.weight_schemes import Packing, WeightScheme

_FIELDS = {
    "L": "num_hidden_layers",
    "D": "hidden_size",
    "N": "num_attention_heads",
    "K": "num_key_value_heads",
    "H": "head_dim",
    "F": "intermediate_size",
    "V": "vocab_size",
}
_EXPERT_FIELDS = {"E": "num_experts", "A": "num_experts_per_tok", "F_experts": "moe_intermediate_size"}
_WIDTHS: dict[Block, str] = {"mlp": "F", "experts": "F_experts", "shared_expert": "F_shared"}
_SCOPES: dict[Scope, str] = {"layer": "L", "dense": "L_dense", "sparse": "L_sparse", "model": ""}
# What a device's share of some letters can be, see `qwenjax.sharding.device_fraction`; the first that fits is told.
_SHARES = {
    "tp": "1 / tp",
    "ep": "1 / ep",
    "tp_ep": "1 / (tp * ep)",
    "vocabulary": "ceil(V / tp) / V",
    "kv_heads": "1 / K",
    "qkv": "(N / tp + 2) / (N + 2 * K)",
}


@dataclass(frozen=True)
class Ground:
    """What every count of one derivation is counted for, and the derivation that takes them."""

    nodes: Derivation
    config: ModelConfig
    policy: DtypePolicy
    mesh: Mesh
    origin: str  # where the config comes from
    attention: Attention = "causal"
    logits: Logits = "last"
    experts: Experts = "expected"


def explain_config(ground: Ground) -> None:
    """Adds the letters that the config says, and those that follow from them."""
    nodes, config = ground.nodes, ground.config

    def field(letter: str, name: str) -> None:
        text = LEGEND.get(letter, "feed-forward width of these experts")
        nodes.leaf(letter, getattr(config, name), "count", "exact", f"{name}, {text}; {ground.origin}")

    for letter, name in _FIELDS.items():
        field(letter, name)
    if config.is_moe:
        for letter, name in _EXPERT_FIELDS.items():
            field(letter, name)
        if config.has_shared_expert:
            field("F_shared", "shared_expert_intermediate_size")
        nodes.leaf("L_sparse", layers_of(config, "sparse"), "count", "exact", "layers with experts, by the config")
        nodes.derive("L_dense", "L - L_sparse", "count", "layers without experts", layers_of(config, "dense"))
    nodes.derive("G", "N / K", "count", LEGEND["G"], config.num_attention_heads // config.num_key_value_heads)
    nodes.derive("J", "G + 2", "count", LEGEND["J"])
    nodes.leaf("C", 2, "count", "exact", "gate and up projection, side by side")
    nodes.leaf("tp", ground.mesh.tp, "count", "given", "--tp: devices that split heads and widths")
    nodes.leaf("ep", ground.mesh.ep, "count", "given", "--ep: devices that split the experts")
    _bits(ground, "bits.activation", dtype_bits(ground.policy.activation), ground.policy.activation)
    _bits(ground, "bits.kv", dtype_bits(ground.policy.kv), ground.policy.kv)


def _bits(ground: Ground, name: str, bits: Any, dtype: str) -> str:
    return ground.nodes.leaf(name, bits, "bit", "exact", f"an element of {dtype}")


def letters_of(letters: str, prefix: str, block: Block, skip: str = "") -> str:
    """The formula of a product of letters: those of the step by their prefix, F by its block."""
    names = []
    for letter in letters:
        if letter in "1" or letter in skip:
            continue
        names.append(f"{prefix}.{letter}" if letter in "TSU" else _WIDTHS[block] if letter == "F" else letter)
    return " * ".join(names) or "1"


def scoped(ground: Ground, formula: str, scope: Scope) -> str:
    """The same over all layers that have it."""
    if scope == "model":
        return formula
    return f"{formula} * {_SCOPES[scope] if ground.config.is_moe else 'L'}"


def share_of(ground: Ground, letters: str) -> tuple[Fraction, str]:
    """A device's share of a tensor or of a contraction, and what to write behind its formula."""
    share = device_fraction(letters, ground.config, ground.mesh)
    if share == 1:
        return share, ""
    values = ground.nodes.values
    for key, formula in _SHARES.items():
        name = f"share.{key}"
        if ("ep" in key and "E" not in letters) or (key == "vocabulary" and "V" not in letters):
            continue
        if abs(evaluate(formula, values) - share) < 1e-12:
            source = "the part of it that the fullest device holds"
            return share, f" * {ground.nodes.derive(name, formula, '1', source, share)}"
    raise ValueError(f"no formula gives the share {share} of {letters}")


def explain_weights(ground: Ground, op: Op) -> str:
    """Adds elements, stored bits and bytes of what an op reads of its weights on one device; the name of the bytes."""
    tensors = {leaf: _tensors(ground.config, leaf) for leaf in op.leaves}
    terms = [term for leaf, own in tensors.items() for term in _terms(ground, leaf, own)]
    if not terms:
        return ""
    formula = f"({' + '.join(terms)}) / 8" if len(terms) > 1 else f"{terms[0]} / 8"
    return ground.nodes.derive(f"weights.{op.name}.bytes", formula, "B", "elements by their stored bits, all layers")


def _tensors(config: ModelConfig, leaf: str) -> list[Weight]:
    stored = "embed_tokens" if leaf == "lm_head" and config.tie_word_embeddings else leaf
    return [weight for weight in WEIGHTS if weight.leaf == stored and weight.when(config)]


def _terms(ground: Ground, leaf: str, tensors: list[Weight]) -> list[str]:
    """One term of bits for the whole array where its tensors are stored and split alike, else one for each tensor."""
    config, widths = ground.config, ground.policy.weight_bits(ground.config)
    kinds = {(device_fraction(weight.letters, config, ground.mesh), widths[weight.name]) for weight in tensors}
    if not tensors:
        return []
    letters, block = leaf_letters(leaf), tensors[0].block
    whole = sum(count_weight(config, weight) for weight in tensors)
    if len(tensors) > 1 and (len(kinds) > 1 or _count(config, letters, tensors[0]) != whole):
        return [_term(ground, weight.name, weight.letters, weight, widths[weight.name]) for weight in tensors]
    return [_term(ground, leaf, letters, tensors[0], widths[tensors[0].name], block)]


def _count(config: ModelConfig, letters: str, weight: Weight) -> int:
    return int(size(letters, dims(config, block=weight.block))) * layers_of(config, weight.scope)


def _term(ground: Ground, name: str, letters: str, weight: Weight, bits: Any, block: Block | None = None) -> str:
    formula = scoped(ground, letters_of(letters, "", block or weight.block), weight.scope)
    source = "elements of " + " x ".join(letters.replace("1", "")) + ("" if weight.scope == "model" else ", all layers")
    elements = ground.nodes.derive(f"weights.{name}.elements", formula, "count", source)
    share = share_of(ground, weight.letters)[1]
    return f"{elements} * {_stored_bits(ground, weight, bits)}{share}"


def _stored_bits(ground: Ground, weight: Weight, bits: Any) -> str:
    scheme = ground.policy.scheme
    if scheme is None:
        return _bits(ground, f"bits.{ground.policy.weight}", bits, ground.policy.weight)
    if not scheme.gguf and bits == scheme.rest_bits:
        text = f"what {scheme.name} doesn't quantise (norms, biases, router and the like)"
        return ground.nodes.leaf("bits.rest", bits, "bit", "exact", text)
    return _packed_bits(ground, scheme, weight, bits)


def _packed_bits(ground: Ground, scheme: WeightScheme, weight: Weight, bits: Any) -> str:
    """Bits of one element of a quantised matrix, with its share of scales, zero points and group indices."""
    nodes, told = ground.nodes, f"stored by the scheme {scheme.name}"
    heads = {"lm_head": scheme.head, "embed_tokens": scheme.embedding}
    packing: Packing = heads.get(weight.name, scheme.linear)
    sizes = dims(ground.config, block=weight.block)
    rows, columns = ([*(int(size(letters, sizes)) for letters in weight.stored.split(",")), 1])[:2]
    name = f"bits.{weight.name}"
    if scheme.gguf or Fraction(packing.matrix_bits(rows, columns), rows * columns) != bits:
        text = f"mean of one element, {told}: not all of its matrices are stored alike (roofline.weight_schemes)"
        return nodes.leaf(name, float(bits), "bit", "exact", text)
    high, wide = packing.tile[0] or rows, packing.tile[1] or columns
    part = "head" if weight.name == "lm_head" else "embedding" if weight.name == "embed_tokens" else "linear"
    own = nodes.leaf(f"scheme.{part}.bits", packing.bits, "bit", "exact", f"one weight, {told}")
    formula = own
    if packing.tile_bits:
        tile = nodes.leaf(
            f"scheme.{part}.tile_bits", packing.tile_bits, "bit", "exact", f"scale and zero point, {told}"
        )
        text = f"weights that share a scale, {told}"
        area = nodes.leaf(f"scheme.{part}.tile_{high}x{wide}", high * wide, "count", "exact", text)
        formula += f" + {tile} / {area}"
    if packing.column_bits:
        text = f"group index of each input, {told}; outputs share it"
        column = nodes.leaf(f"scheme.{part}.column_bits", packing.column_bits, "bit", "exact", text)
        outputs = nodes.leaf(
            f"outputs.{weight.name}", rows, "count", "exact", f"outputs of one matrix of {weight.name}"
        )
        formula += f" + {column} / {outputs}"
    return nodes.same(name, bits, "bit", (formula,), f"one element with its part of the scales, {told}")


def explain_step_letters(ground: Ground, prefix: str, step: Step) -> None:
    """Adds the letters of a step that no context changes: new tokens, positions with logits, distinct experts."""
    nodes = ground.nodes
    nodes.leaf(f"{prefix}.T", step.query_len, "count", "given", LEGEND["T"])
    positions = step.query_len if ground.logits == "all" else 1
    nodes.leaf(f"{prefix}.U", positions, "count", "exact", f"{LEGEND['U']}: {ground.logits}")
    if ground.config.is_moe:
        _distinct(ground, prefix, step)


def explain_context(ground: Ground, prefix: str, step: Step) -> None:
    """Adds the letters of attention in one step."""
    ground.nodes.leaf(f"{prefix}.T", step.query_len, "count", "given", LEGEND["T"])
    ground.nodes.leaf(f"{prefix}.S", step.kv_len, "count", "given", LEGEND["S"])


def _distinct(ground: Ground, prefix: str, step: Step) -> None:
    nodes, name, value = ground.nodes, f"{prefix}.distinct", distinct_experts(ground.config, step, ground.experts)
    if isinstance(ground.experts, int):
        nodes.leaf(name, value, "count", "given", "--experts: distinct experts of one layer, as counted")
    elif ground.experts == "all":
        nodes.derive(name, "E", "count", "--experts all: every expert is read", value)
    else:
        formula = f"max(A, E * (1 - (1 - A / E) ** (B * {prefix}.T)))"
        nodes.derive(
            name, formula, "count", "distinct experts that a layer is expected to read, uniform routing", value
        )


def windows_of(ground: Ground) -> list[tuple[str, str]]:
    """Names of each window and of its layers; an empty window sees everything."""
    nodes, windows = ground.nodes, Counter(ground.config.sliding_windows)
    if set(windows) == {None}:
        return [("", "L")]
    named = []
    for window, layers in windows.items():
        count = nodes.leaf(f"L_window_{window or 'none'}", layers, "count", "exact", f"layers of {ground.origin}")
        if window is None:
            named.append(("", count))
        else:
            source = f"positions that a query sees, {ground.origin}"
            named.append((nodes.leaf(f"window_{window}", window, "count", "exact", source), count))
    return named


def explain_pairs(ground: Ground, prefix: str) -> str:
    """Adds the query-key pairs of one head of one sequence, over all layers."""
    new, seen = f"{prefix}.T", f"{prefix}.S"
    if ground.attention == "dense":
        return ground.nodes.derive(f"{prefix}.pairs", f"L * {new} * {seen}", "count", "all pairs of the square")
    terms = []
    for window, layers in windows_of(ground):
        full = f"{new} * {seen} - {new} * ({new} - 1) / 2"
        if window:
            full = f"{windowed_pairs(seen, window)} - {windowed_pairs(f'({seen} - {new})', window)}"
        terms.append(f"{layers} * ({full})")
    source = "query-key pairs that the mask keeps, one head, all layers"
    return ground.nodes.derive(f"{prefix}.pairs", " + ".join(terms), "count", source)


def windowed_pairs(positions: str, window: str) -> str:
    """Pairs of the first positions when each query sees a window of keys."""
    short = f"min({positions}, {window})"
    return f"({short} * ({short} + 1) / 2 + ({positions} - {short}) * {window})"


def explain_rows(ground: Ground, prefix: str) -> str:
    """Adds the cache rows of one sequence that the step reads, over all layers."""
    new, seen = f"{prefix}.T", f"{prefix}.S"
    terms = [
        f"{layers} * min({seen}, {new} + {window} - 1)" if window else f"{layers} * {seen}"
        for window, layers in windows_of(ground)
    ]
    source = "cache rows of one sequence that are read, all layers"
    return ground.nodes.derive(f"{prefix}.rows", " + ".join(terms), "count", source)


def explain_op(ground: Ground, op: Op, row: CountRow, prefix: str, letters: str) -> tuple[str, str]:
    """Adds FLOPs and bytes of one op; names of both, empty where it has none.

    prefix: of the op's own nodes; letters: of the step whose letters it reads.
    """
    nodes, name = ground.nodes, f"{prefix}.{op.name}"
    flops = ""
    if row.flops:
        flops = nodes.derive(
            f"{name}.flops", _flops(ground, op, letters), "FLOP", "two for each multiply-add", row.flops
        )
    terms = _weight_terms(ground, op, letters)
    read, written = _kv(ground, op.kv_read, letters, True), _kv(ground, op.kv_write, letters, False)
    terms += [text for text in (read, written) if text]
    if not row.bytes:
        return flops, ""
    source = "what must cross the memory interface: weights and cache; activations can stay on the chip"
    return flops, nodes.derive(f"{name}.bytes", " + ".join(terms), "B", source, row.bytes)


def _flops(ground: Ground, op: Op, prefix: str) -> str:
    letters = "".join(dict.fromkeys(op.einsum.replace(",", "").replace("->", "")))
    share = share_of(ground, letters)[1]
    if op.kind == "attention":
        return f"2 * {letters_of(letters, prefix, op.block, skip='TS')} * {explain_pairs(ground, prefix)}{share}"
    skip = "E" if op.kind == "grouped" else ""
    return scoped(ground, f"2 * {letters_of(letters, prefix, op.block, skip=skip)}", op.scope) + share


def _weight_terms(ground: Ground, op: Op, prefix: str) -> list[str]:
    whole = explain_weights(ground, op)
    if not whole:
        return []
    if op.kind == "gather":  # one row for each token
        table = ground.nodes.nodes[whole].formula.replace("weights.embed_tokens.elements", f"B * {prefix}.T * D")
        return [table]
    return [f"{whole} * {prefix}.distinct / E" if op.kind == "grouped" else whole]


def _kv(ground: Ground, names: tuple[str, ...], prefix: str, reading: bool) -> str:
    if not names:
        return ""
    tensor = next(tensor for tensor in KV if tensor.name in names)
    share = share_of(ground, tensor.letters)[1]
    rows = explain_rows(ground, prefix) if reading else f"{prefix}.T * L"
    times = f"{len(names)} * " if len(names) > 1 else ""
    return f"{times}{letters_of(tensor.letters, prefix, 'mlp', skip='S')} * {rows} * bits.kv / 8{share}"
