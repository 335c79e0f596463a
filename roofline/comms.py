"""Collectives that a sharded step implies: a contracted letter that is split leaves partial sums to reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, dims, size
from qwenjax.ops import Op, layers_of, ops_of
from qwenjax.sharding import Mesh, device_fraction
from roofline.count import dtype_bits


@dataclass(frozen=True)
class CommRow:
    """One kind of collective of a step: bytes of one call, how many calls, and what each device sends at least."""

    op: str
    kind: Literal["all-reduce", "all-gather", "all-to-all"]
    devices: int
    count: int
    payload_bytes: Any
    sent_bytes: Any  # one device, all calls, on the best known algorithm


# Where the partial sums of a branch must be whole again: the residual add that closes it.
_BRANCH_END = {
    "o_proj": "attention_residual",
    "down_proj": "mlp_residual",
    "experts_down_proj": "mlp_residual",
    "shared_down_proj": "mlp_residual",
}


def count_comms(
    config: ModelConfig, step: Step, mesh: Mesh, dtype: str = "bfloat16", logits: Literal["last", "all"] = "last"
) -> tuple[CommRow, ...]:
    """Counts the collectives of one step; routed and shared experts are reduced together, after their sum."""
    if mesh.num_devices == 1:
        return ()
    bits = dtype_bits(dtype)
    sizes = dims(config, step, logits=logits)
    rows: list[CommRow] = []
    if mesh.tp > 1:  # each device looks up the rows it has
        rows.append(_row("embed", "all-reduce", mesh.tp, 1, size("BTD", sizes), bits))
    ends = {_BRANCH_END[op.name] for op in ops_of(config) if _leaves_partial_sums(op, config, mesh)}
    layers = config.num_hidden_layers
    rows += [_row(end, "all-reduce", mesh.tp, layers, size("BTD", sizes), bits) for end in sorted(ends)]
    if mesh.ep > 1:
        rows += [
            _row(op.name, "all-to-all", mesh.ep, layers_of(config, op.scope), size("BTAD", sizes), bits)
            for op in ops_of(config)
            if op.kind == "grouped"
        ]
    if mesh.tp > 1:
        rows.append(_row("unembed", "all-gather", mesh.tp, 1, size("BUV", sizes), bits))
    return tuple(rows)


def _leaves_partial_sums(op: Op, config: ModelConfig, mesh: Mesh) -> bool:
    inputs, output = op.einsum.split("->")
    contracted = "".join(letter for letter in inputs.replace(",", "") if letter not in output)
    return op.kind in ("matmul", "grouped") and device_fraction(contracted, config, Mesh(tp=mesh.tp)) != 1


def _row(
    op: str, kind: Literal["all-reduce", "all-gather", "all-to-all"], devices: int, count: int, elements: Any, bits: int
) -> CommRow:
    payload = elements * bits / 8
    # Least traffic of one device: a ring all-reduce sends 2(n-1)/n of the payload, a gather or exchange (n-1)/n.
    share = (2 if kind == "all-reduce" else 1) * (devices - 1) / devices
    if kind == "all-to-all":
        share /= devices  # tokens are spread over the devices to begin with
    return CommRow(op, kind, devices, count, payload, payload * share * count)
