"""One decoder step, written down once: the weights, the KV cache and the operations, by dimension letters.

The model allocates, loads and contracts from these tables; parameters, FLOPs, bytes, memory, sharding and the compiler
cross-check are folds over them. It is data: rows and the two predicates that select them, nothing else.

Fused execution, said here and nowhere else: a checkpoint's q, k and v projections run as one `qkv_proj`, gate and up
as one `gate_up_proj`. A weight's `leaf` names the array of the parameter tree that it is a slice of; the slices are
joined along the axis where their letters say 1 or G and the leaf's say J or C. Splitting K or F among devices therefore
splits every slice alike.

Matrices lie as checkpoints store them, output axes first: loading is a copy without a transpose, and a decode step on
a CPU reads a row for each output, at twice the bandwidth of the other order (bench/results).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal, NamedTuple

from qwenjax.config import ModelConfig
from qwenjax.dims import Block

Scope = Literal[
    "model", "layer", "dense", "sparse"
]  # once; in every layer; in dense layers; in mixture-of-experts layers
Kind = Literal["matmul", "grouped", "attention", "gather", "elementwise"]
Condition = Callable[[ModelConfig], bool]


def _always(config: ModelConfig) -> bool:
    return True


def _qkv_bias(config: ModelConfig) -> bool:
    return config.qkv_bias


def _o_bias(config: ModelConfig) -> bool:
    return config.attention_o_bias


def _qk_norm(config: ModelConfig) -> bool:
    return config.qk_norm


def _untied(config: ModelConfig) -> bool:
    return not config.tie_word_embeddings


def _shared(config: ModelConfig) -> bool:
    return config.has_shared_expert


class Weight(NamedTuple):
    """A checkpoint tensor. `stored` is its layout on disk: the letters of each axis, axes parted by commas."""

    name: str
    letters: str  # as a slice of its leaf
    stored: str
    key: str  # after `model.` (not lm_head) or `model.layers.N.`; {expert} where each expert is a tensor of its own
    group: str
    scope: Scope
    leaf: str
    init: Literal["normal", "ones", "zeros"] = "normal"
    when: Condition = _always
    block: Block = "mlp"


WEIGHTS: tuple[Weight, ...] = (
    Weight("embed_tokens", "VD", "V,D", "embed_tokens.weight", "embedding", "model", "embed_tokens"),
    Weight("input_norm", "D", "D", "input_layernorm.weight", "norm", "layer", "input_norm", "ones"),
    Weight("q_proj", "KGHD", "KGH,D", "self_attn.q_proj.weight", "attention", "layer", "qkv_proj"),
    Weight("k_proj", "K1HD", "KH,D", "self_attn.k_proj.weight", "attention", "layer", "qkv_proj"),
    Weight("v_proj", "K1HD", "KH,D", "self_attn.v_proj.weight", "attention", "layer", "qkv_proj"),
    Weight("q_bias", "KGH", "KGH", "self_attn.q_proj.bias", "attention_bias", "layer", "qkv_bias", "zeros", _qkv_bias),
    Weight("k_bias", "K1H", "KH", "self_attn.k_proj.bias", "attention_bias", "layer", "qkv_bias", "zeros", _qkv_bias),
    Weight("v_bias", "K1H", "KH", "self_attn.v_proj.bias", "attention_bias", "layer", "qkv_bias", "zeros", _qkv_bias),
    Weight("q_norm", "H", "H", "self_attn.q_norm.weight", "qk_norm", "layer", "q_norm", "ones", _qk_norm),
    Weight("k_norm", "H", "H", "self_attn.k_norm.weight", "qk_norm", "layer", "k_norm", "ones", _qk_norm),
    Weight("o_proj", "DKGH", "D,KGH", "self_attn.o_proj.weight", "attention", "layer", "o_proj"),
    Weight("o_bias", "D", "D", "self_attn.o_proj.bias", "attention_bias", "layer", "o_bias", "zeros", _o_bias),
    Weight("post_norm", "D", "D", "post_attention_layernorm.weight", "norm", "layer", "post_norm", "ones"),
    Weight("gate_proj", "1FD", "F,D", "mlp.gate_proj.weight", "mlp", "dense", "gate_up_proj"),
    Weight("up_proj", "1FD", "F,D", "mlp.up_proj.weight", "mlp", "dense", "gate_up_proj"),
    Weight("down_proj", "DF", "D,F", "mlp.down_proj.weight", "mlp", "dense", "down_proj"),
    Weight("router", "ED", "E,D", "mlp.gate.weight", "router", "sparse", "router"),
    Weight(
        "experts_gate_proj",
        "E1FD",
        "F,D",
        "mlp.experts.{expert}.gate_proj.weight",
        "experts",
        "sparse",
        "experts_gate_up_proj",
        block="experts",
    ),
    Weight(
        "experts_up_proj",
        "E1FD",
        "F,D",
        "mlp.experts.{expert}.up_proj.weight",
        "experts",
        "sparse",
        "experts_gate_up_proj",
        block="experts",
    ),
    Weight(
        "experts_down_proj",
        "EDF",
        "D,F",
        "mlp.experts.{expert}.down_proj.weight",
        "experts",
        "sparse",
        "experts_down_proj",
        block="experts",
    ),
    Weight(
        "shared_gate_proj",
        "1FD",
        "F,D",
        "mlp.shared_expert.gate_proj.weight",
        "shared_expert",
        "sparse",
        "shared_gate_up_proj",
        when=_shared,
        block="shared_expert",
    ),
    Weight(
        "shared_up_proj",
        "1FD",
        "F,D",
        "mlp.shared_expert.up_proj.weight",
        "shared_expert",
        "sparse",
        "shared_gate_up_proj",
        when=_shared,
        block="shared_expert",
    ),
    Weight(
        "shared_down_proj",
        "DF",
        "D,F",
        "mlp.shared_expert.down_proj.weight",
        "shared_expert",
        "sparse",
        "shared_down_proj",
        when=_shared,
        block="shared_expert",
    ),
    Weight(
        "shared_expert_gate",
        "D",
        "1,D",
        "mlp.shared_expert_gate.weight",
        "shared_expert_gate",
        "sparse",
        "shared_expert_gate",
        when=_shared,
    ),
    Weight("final_norm", "D", "D", "norm.weight", "norm", "model", "final_norm", "ones"),
    Weight("lm_head", "VD", "V,D", "lm_head.weight", "lm_head", "model", "lm_head", when=_untied),
)

GROUPS = tuple(
    dict.fromkeys(
        (
            "embedding",
            "attention",
            "attention_bias",
            "qk_norm",
            "mlp",
            "router",
            "experts",
            "shared_expert",
            "shared_expert_gate",
            "norm",
            "lm_head",
        )
    )
)


class KVTensor(NamedTuple):
    """One cached tensor of every layer."""

    name: str
    letters: str


KV: tuple[KVTensor, ...] = (KVTensor("k", "BKSH"), KVTensor("v", "BKSH"))


class Op(NamedTuple):
    """One operation of a step.

    `einsum` is the executed contraction of matmul, grouped and attention ops, and the shapes of the others. For
    `grouped` the letter E selects and doesn't multiply: A experts of each token work. `leaves` are the arrays that it
    reads (its weights' and biases'), `kv_read` and `kv_write` the cached tensors.
    """

    name: str
    einsum: str
    kind: Kind
    scope: Scope
    leaves: tuple[str, ...] = ()
    kv_read: tuple[str, ...] = ()
    kv_write: tuple[str, ...] = ()
    when: Condition = _always
    block: Block = "mlp"


OPS: tuple[Op, ...] = (
    Op("embed", "BT,VD->BTD", "gather", "model", ("embed_tokens",)),
    Op("input_norm", "BTD,D->BTD", "elementwise", "layer", ("input_norm",)),
    Op("qkv_proj", "BTD,KJHD->BTKJH", "matmul", "layer", ("qkv_proj", "qkv_bias")),
    Op("qk_norm", "BTNH,BTKH,H,H->BTNH,BTKH", "elementwise", "layer", ("q_norm", "k_norm"), when=_qk_norm),
    Op("rope", "BTNH,BTKH->BTNH,BTKH", "elementwise", "layer", kv_write=("k", "v")),
    Op("scores", "BTKGH,BKSH->BKGTS", "attention", "layer", kv_read=("k",)),
    Op("softmax", "BKGTS->BKGTS", "elementwise", "layer"),
    Op("values", "BKGTS,BKSH->BTKGH", "attention", "layer", kv_read=("v",)),
    Op("o_proj", "BTKGH,DKGH->BTD", "matmul", "layer", ("o_proj", "o_bias")),
    Op("attention_residual", "BTD,BTD->BTD", "elementwise", "layer"),
    Op("post_norm", "BTD,D->BTD", "elementwise", "layer", ("post_norm",)),
    Op("gate_up_proj", "BTD,CFD->BTCF", "matmul", "dense", ("gate_up_proj",)),
    Op("swiglu", "BTCF->BTF", "elementwise", "dense"),
    Op("down_proj", "BTF,DF->BTD", "matmul", "dense", ("down_proj",)),
    Op("router", "BTD,ED->BTE", "matmul", "sparse", ("router",)),
    Op("top_k", "BTE->BTA", "elementwise", "sparse"),
    Op("experts_gate_up_proj", "BTAD,ECFD->BTACF", "grouped", "sparse", ("experts_gate_up_proj",), block="experts"),
    Op("experts_swiglu", "BTACF->BTAF", "elementwise", "sparse", block="experts"),
    Op("experts_down_proj", "BTAF,EDF->BTAD", "grouped", "sparse", ("experts_down_proj",), block="experts"),
    Op("combine", "BTAD,BTA->BTD", "elementwise", "sparse"),
    Op(
        "shared_gate_up_proj",
        "BTD,CFD->BTCF",
        "matmul",
        "sparse",
        ("shared_gate_up_proj",),
        when=_shared,
        block="shared_expert",
    ),
    Op("shared_swiglu", "BTCF->BTF", "elementwise", "sparse", when=_shared, block="shared_expert"),
    Op(
        "shared_down_proj",
        "BTF,DF->BTD",
        "matmul",
        "sparse",
        ("shared_down_proj",),
        when=_shared,
        block="shared_expert",
    ),
    Op("shared_expert_gate", "BTD,D->BT", "matmul", "sparse", ("shared_expert_gate",), when=_shared),
    Op("mlp_residual", "BTD,BTD->BTD", "elementwise", "layer"),
    Op("final_norm", "BUD,D->BUD", "elementwise", "model", ("final_norm",)),
    Op("unembed", "BUD,VD->BUV", "matmul", "model", ("lm_head",)),
)

EINSUM = {op.name: op.einsum for op in OPS}


def layers_of(config: ModelConfig, scope: Scope) -> int:
    """How many times a row of this scope stands in the model."""
    sparse = len(config.sparse_layers)
    return {
        "model": 1,
        "layer": config.num_hidden_layers,
        "dense": config.num_hidden_layers - sparse,
        "sparse": sparse,
    }[scope]


def weights_of(config: ModelConfig) -> Iterator[Weight]:
    """The weights that this model has, in the order of the step."""
    return (weight for weight in WEIGHTS if weight.when(config) and layers_of(config, weight.scope))


def ops_of(config: ModelConfig) -> Iterator[Op]:
    """The operations that this model runs, in order."""
    return (op for op in OPS if op.when(config) and layers_of(config, op.scope))


def leaf_letters(leaf: str) -> str:
    """Letters of an array of the parameter tree, as the op that reads it writes them."""
    return _LEAF_LETTERS[leaf]


def _leaf_letters() -> dict[str, str]:
    letters = {weight.leaf: weight.letters for weight in WEIGHTS}
    letters |= {
        op.leaves[0]: op.einsum.split(",")[1].split("->")[0]
        for op in OPS
        if op.leaves and op.kind in ("matmul", "grouped")
    }
    return letters | {"qkv_bias": "KJH"}


_LEAF_LETTERS = _leaf_letters()


class Product(NamedTuple):
    """An einsum as one batched matrix product: letters of operands, batch, x's rows, y's columns, the summed."""

    x: str
    y: str
    out: str
    batch: str
    rows: str
    columns: str
    contracted: str


@cache
def as_product(einsum: str) -> Product:
    """Sorts the letters of a two-operand einsum; every contraction of the step is one matrix product a batch entry."""
    inputs, out = einsum.split("->")
    x, y = inputs.split(",")
    batch = "".join(letter for letter in x if letter in y and letter in out)
    rows = "".join(letter for letter in out if letter in x and letter not in y)
    columns = "".join(letter for letter in out if letter in y and letter not in x)
    contracted = "".join(letter for letter in y if letter in x and letter not in out)
    return Product(x, y, out, batch, rows, columns, contracted)
