"""What qwenjax's own GPU kernels compute and read: a compiled program shows of them a name, operands and results.

Weights that a kernel picks from and a cache that it attends count as the inventory has them; every other operand and
result as it is shaped, one that lies where an operand lay not at all but for the new keys and values. Attention counts
the pairs that the mask keeps: a block on the diagonal computes more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from roofline.count import CountRow
from roofline.hlo import Computation, Instruction
from roofline.hlo_cost import Touched

_CALL = "pallas_call"  # the last part of such a kernel's path, after the kernel's name


@dataclass(frozen=True)
class OwnKernel:
    """`ops`: whose products it computes and whose weights or cache it reads; `apart`: the operands that hold these.

    `multiplies`: it is the product of its first operand's rows, [M, D], with the whole second one. `joins`: every op of
    the inventory that it does, where its path doesn't tell.
    """

    ops: tuple[str, ...] = ()
    apart: tuple[int, ...] = ()
    multiplies: bool = False
    joins: tuple[str, ...] = ()


_ATTENTION = ("scores", "values")
OWN_KERNELS: Final[Mapping[str, OwnKernel]] = {
    "rms_norm": OwnKernel(),
    "decode_attention": OwnKernel(_ATTENTION, apart=(4, 5), joins=("qk_norm", "rope", "scores", "softmax", "values")),
    "combine_parts": OwnKernel(),
    "rope_fill": OwnKernel(apart=(4, 5), joins=("qk_norm", "rope")),
    "prefill_attention": OwnKernel(_ATTENTION, apart=(1, 2), joins=("scores", "softmax", "values")),
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


def count_own(call: Instruction, within: Computation, name: str, inventory: Mapping[str, CountRow]) -> Touched:
    """One run of an own kernel: the inventory's rows are summed over layers, and a kernel runs once a layer."""
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
    if kernel.multiplies:
        flops += 2 * given[0].arrays[0].dims[0] * given[1].elements
    return Touched(round(stored) + passed, made + round(kept), {"": flops} if flops else {})


def _shared(call: Instruction) -> dict[int, int]:
    """Results that lie where operands lay: numbers of both, out of output_to_operand_aliasing={{3}: (4, {}), ...}."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", call.tail)
    pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}\)", found.group(1)) if found else []
    return {int(result): int(operand) for result, operand in pairs}
