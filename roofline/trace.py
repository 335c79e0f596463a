"""Where a measured step's time went, by op: the profiler's events, joined to the inventory by named scope."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qwenjax.ops import OPS
from roofline.hlo import Computation, Instruction, Module
from roofline.kernel_rows import CACHE, OTHER, scope_op

_LEAF = re.compile(r"\['(\w+)'\]")  # of params['layers'][0]['name']
_VIEWS = ("bitcast", "copy", "convert", "transpose", "reshape")
_GROUPED = frozenset(op.name for op in OPS if op.kind == "grouped")
# Which product reads a weight; the embedding is one only as a tied output head.
_READERS = {leaf: op.name for op in OPS if op.kind in ("matmul", "grouped") for leaf in op.leaves} | {
    "embed_tokens": "unembed"
}


def measure_time_by_op(call: Callable[[], Any], program: Module, repeats: int = 3) -> dict[str, float]:
    """Share of device time by op name, summing to 1, of a call that is already compiled. Threads' times are added."""
    import jax

    names = instruction_ops(program)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                jax.block_until_ready(call())
        times: defaultdict[str, float] = defaultdict(float)
        for name, seconds in _events(Path(folder)):
            if name in names:
                times[names[name]] += seconds
    total = sum(times.values())
    return {op: seconds / total for op, seconds in times.items()} if total else {}


def _events(folder: Path) -> Iterator[tuple[str, float]]:
    """Instruction names and seconds of every device event in the profile."""
    from jax.profiler import ProfileData

    for path in folder.rglob("*.xplane.pb"):
        for plane in ProfileData.from_file(str(path)).planes:
            on_device = plane.name.startswith("/device:")
            for line in plane.lines:
                for event in line.events:
                    stats = dict(event.stats) if on_device else {}
                    yield str(stats.get("hlo_op", event.name)), event.duration_ns * 1e-9


def instruction_ops(program: Module) -> Mapping[str, str]:
    """Op name of each instruction of a compiled program.

    By the weight that a matrix product reads, else by the named scope in the instruction's or its fused body's
    metadata; rewriting passes drop metadata, so what is left takes the name of the operand it works on.
    """
    found: dict[str, str] = {}
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode in ("while", "conditional", "call"):
                continue  # their time is that of the instructions inside
            fused = program.computations.get((instruction.attribute("calls") or "").lstrip("%"))
            inner = fused.instructions if fused else ()
            found[instruction.name] = _op_of(instruction, computation, inner, found)
    return found


def _op_of(
    instruction: Instruction, within: Computation, fused: Sequence[Instruction], found: Mapping[str, str]
) -> str:
    multiplies = instruction.opcode == "dot" or any(inner.opcode == "dot" for inner in fused)
    if multiplies:
        leaves = [_leaf(operand, within) for operand in instruction.operands]
        read = next((_READERS[leaf] for leaf in leaves if leaf in _READERS), "")
        if read:
            return read
    own, inner = _scope(instruction), [scope for part in fused if (scope := _scope(part))]
    if own or inner:
        return own or inner[-1]  # the last makes the fusion's result
    before = [found[operand] for operand in instruction.operands if found.get(operand, OTHER) != OTHER]
    gathered = next((op for op in before if op in _GROUPED), "")
    if multiplies and gathered:  # on weights taken out of the stack
        return gathered
    if multiplies:  # attention's two products read no weight
        return "values" if "softmax" in before or "values" in before else "scores"
    return before[0] if before else OTHER


def _leaf(name: str, within: Computation) -> str:
    """The parameter that an operand is, seen through reshapes and copies."""
    instruction = within.by_name[name]
    while instruction.opcode in _VIEWS:
        instruction = within.by_name[instruction.operands[0]]
    leaves = _LEAF.findall(instruction.op_name) if instruction.opcode == "parameter" else []
    return leaves[-1] if leaves else ""


def _scope(instruction: Instruction) -> str:
    """The op whose named scope made it; the inventory writes the cache in the rope row."""
    scope = scope_op(instruction.op_name)
    return "rope" if scope == CACHE else scope or ""
