"""What qwenjax's own GPU kernels compute and read: a compiled program shows of them a name, operands and results.

Weights that a kernel picks from and a cache that it attends count as the inventory has them; every other operand and
result as it is shaped, one that lies where an operand lay not at all but for the new keys and values. Attention counts
the pairs that the mask keeps: a block on the diagonal computes more.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from qwenjax.config import ModelConfig
from qwenjax.moe_blocks import TILE_ROWS
from roofline.count import CountRow
from roofline.hlo import Computation, Instruction
from roofline.hlo_cost import Touched

_CALL = "pallas_call"  # the last part of such a kernel's path, after the kernel's name


@dataclass(frozen=True)
class OwnKernel:
    """`ops`: whose products it computes and whose weights or cache it reads; `apart`: the operands that hold these.

    `multiplies`: it is the product of its first operand's rows, [M, D], with the whole second one. `joins`: every op of
    the inventory that it does, where its path doesn't tell. `tiles_rows`: an expert's rows are rounded up to a tile's.
    """

    ops: tuple[str, ...] = ()
    apart: tuple[int, ...] = ()
    multiplies: bool = False
    joins: tuple[str, ...] = ()
    tiles_rows: bool = False


_ATTENTION, _GATE_UP, _DOWN = ("scores", "values"), ("experts_gate_up_proj",), ("experts_down_proj",)
OWN_KERNELS: Final[Mapping[str, OwnKernel]] = {
    "rms_norm": OwnKernel(),
    "decode_attention": OwnKernel(_ATTENTION, apart=(4, 5), joins=("qk_norm", "rope", "scores", "softmax", "values")),
    "combine_parts": OwnKernel(),
    "rope_fill": OwnKernel(apart=(4, 5), joins=("qk_norm", "rope")),
    "prefill_attention": OwnKernel(_ATTENTION, apart=(1, 2), joins=("scores", "softmax", "values")),
    "choose_experts": OwnKernel(),
    "group_rows": OwnKernel(),
    "gathered_gate_up": OwnKernel(_GATE_UP, apart=(2,)),
    "gathered_down": OwnKernel(_DOWN, apart=(3,)),
    "grouped_gate_up": OwnKernel(_GATE_UP, apart=(4,), tiles_rows=True),
    "grouped_down": OwnKernel(_DOWN, apart=(5,), tiles_rows=True),
    "narrow_product": OwnKernel(multiplies=True),
    "narrow_gated": OwnKernel(multiplies=True),
}


def own_name(path: str) -> str | None:
    """The name of the own kernel that a path of named scopes leads to, None if it leads to none."""
    *_, name, call = ("", "", *path.split("/"))
    return name if call == _CALL and name in OWN_KERNELS else None


def joined_ops(name: str | None, inventory: Mapping[str, CountRow]) -> tuple[str, ...]:
    """The model's ops that an own kernel does, where it joins several."""
    return tuple(op for op in OWN_KERNELS[name].joins if op in inventory) if name else ()


def padded_share(tokens: int, config: ModelConfig) -> float:
    """Rows that the grouped kernels compute over those that were routed, expected under uniform routing.

    Each token chooses an expert with probability A / E, so an expert's rows are binomial.
    """
    chance = config.num_experts_per_tok / config.num_experts
    if chance == 1:
        return -(-tokens // TILE_ROWS) * TILE_ROWS / tokens
    steps = (math.log((tokens - n) / (n + 1) * chance / (1 - chance)) for n in range(tokens))
    logs = itertools.accumulate(steps, initial=tokens * math.log1p(-chance))  # of the chance of n rows, 0 to all
    rows = sum(math.exp(log) * -(-n // TILE_ROWS) * TILE_ROWS for n, log in enumerate(logs))
    return rows / (tokens * chance)


def count_own(
    call: Instruction, within: Computation, name: str, inventory: Mapping[str, CountRow], padded: float
) -> Touched:
    """One run of an own kernel: the inventory's rows are summed over layers, and a kernel runs once a layer.

    `padded` is `padded_share` of the step.
    """
    kernel = OWN_KERNELS[name]
    rows = [inventory[op] for op in kernel.ops]
    shared = _shared(call)
    apart = {call.operands[i] for i in (*kernel.apart, *shared.values())}
    given = [within.by_name[operand] for operand in dict.fromkeys(call.operands)]  # one may be passed twice
    passed = sum(operand.bytes for operand in given if operand.name not in apart)
    stored = sum((row.weight_bytes + row.kv_read_bytes) / row.layers for row in rows)
    made = sum(array.bytes for i, array in enumerate(call.arrays) if i not in shared)
    kept = sum(row.kv_write_bytes / row.layers for row in inventory.values()) if shared else 0
    flops = sum(row.flops // row.layers for row in rows)
    if kernel.tiles_rows:
        flops = round(flops * padded)
    if kernel.multiplies:
        flops += 2 * given[0].arrays[0].dims[0] * given[1].elements
    return Touched(round(stored) + passed, made + round(kept), {"": flops} if flops else {})


def _shared(call: Instruction) -> dict[int, int]:
    """Results that lie where operands lay: numbers of both, out of output_to_operand_aliasing={{3}: (4, {}), ...}."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", call.tail)
    pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}\)", found.group(1)) if found else []
    return {int(result): int(operand) for result, operand in pairs}
