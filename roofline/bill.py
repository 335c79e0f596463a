"""The bill of materials: what each component of a model weighs, computes for one token and caches of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, dims, size
from qwenjax.known_models import KnownModel
from qwenjax.ops import GROUPS, WEIGHTS, layers_of, ops_of, weights_of
from roofline.count import ParamCounts, count_step
from roofline.stored import StoredCount, count_stored_params


@dataclass(frozen=True)
class BillRow:
    """One component over all layers: weights (elements), FLOPs of its matrix products for one token, cache bytes."""

    component: str
    weights: int
    flops_per_token: int
    kv_bytes_per_token: int


@dataclass(frozen=True)
class LayerMatmul:
    """One weight matrix of one layer: in and out features, `copies` (experts) of it, and FLOPs for one token."""

    name: str
    in_features: int
    out_features: int
    copies: int
    layers: int  # how many layers have it
    weights: int
    flops_per_token: int


def bill_of_materials(config: ModelConfig, counts: ParamCounts) -> tuple[BillRow, ...]:
    """Rows by parameter group, in the order of the step; they sum to the counts' totals.

    FLOPs are of matrix products with weights, two for each multiply-add. Attention over the context and elementwise
    work are left out: the former grows with the context, the latter is below a thousandth.
    """
    groups = {weight.leaf: weight.group for weight in WEIGHTS}
    flops = dict.fromkeys(GROUPS, 0)
    rows = count_step(config, Step(), check=False)
    for op, row in zip(ops_of(config), rows, strict=True):
        if row.kind in ("matmul", "grouped"):
            flops[groups[op.leaves[0]]] += row.flops
    cached = {"attention": counts.kv_bytes_per_token}
    return tuple(BillRow(group, counts.groups[group], flops[group], cached.get(group, 0)) for group in GROUPS)


def layer_matmuls(config: ModelConfig) -> tuple[LayerMatmul, ...]:
    """The weight matrices of a layer by checkpoint name; of the experts, one token uses num_experts_per_tok copies."""
    rows = []
    for weight in weights_of(config):
        axes = weight.stored.split(",")
        if weight.scope == "model" or len(axes) != 2:
            continue
        sizes = dims(config, block=weight.block)
        out_features, in_features = (int(size(letters, sizes)) for letters in axes)
        per_expert = "{expert}" in weight.key
        copies, used = (config.num_experts, config.num_experts_per_tok) if per_expert else (1, 1)
        weights = in_features * out_features
        layers = layers_of(config, weight.scope)
        rows.append(
            LayerMatmul(weight.name, in_features, out_features, copies, layers, copies * weights, 2 * used * weights)
        )
    return tuple(rows)


def published_count(config: ModelConfig, known: KnownModel | None, model: str = "") -> StoredCount:
    """What this model's files hold, by what its config says and, for a known model, by what its stored_note says.

    Where `model` is a checkpoint folder its files say whether they hold an output head.
    """
    terms = known.stored_note.split("; ") if known else []
    stored = True if "lm_head stored although tied" in terms else False if "no lm_head stored" in terms else None
    if stored is None:
        stored = _stores_head(model)
    return count_stored_params(
        config,
        lm_head_stored=stored,
        zero_biases_stored="gptq zero biases" in terms,
        inv_freq_stored="rotary inv_freq stored" in terms,
    )


def _stores_head(model: str) -> bool | None:
    """Whether a folder's safetensors hold an output head; None where there are none to ask."""
    if not model or not os.path.isdir(model) or not any(Path(model).glob("*.safetensors")):
        return None
    from qwenjax.checkpoint.counting import count_tensors
    from qwenjax.checkpoint.shards import find_tensors

    return count_tensors(find_tensors(Path(model))).lm_head_stored
