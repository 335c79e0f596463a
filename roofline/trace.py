"""Where a measured step's time went, by op: the profiler's events, joined to the inventory by named scope."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenjax.ops import OPS

OTHER = "other"
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\(([^)]*)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_LEAF = re.compile(r"\[\\?'(\w+)\\?'\]")  # the text escapes the quotes of params['name']
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_SCOPES = {op.name: op.name for op in OPS} | {"cache": "rope"}  # the inventory writes the cache in the rope row
_GROUPED = frozenset(op.name for op in OPS if op.kind == "grouped")
# Which product reads a weight; the embedding is one only as a tied output head.
_READERS = {leaf: op.name for op in OPS if op.kind in ("matmul", "grouped") for leaf in op.leaves} | {
    "embed_tokens": "unembed"
}


def measure_time_by_op(call: Callable[[], Any], hlo_text: str, repeats: int = 3) -> dict[str, float]:
    """Share of device time by op name, summing to 1, of a call that is already compiled. Threads' times are added."""
    import jax

    names = instruction_ops(hlo_text)
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


@dataclass(frozen=True)
class _Instruction:
    scope: str  # of its own metadata, "" where it has none
    opcode: str
    operands: tuple[str, ...]
    calls: str
    leaf: str  # of the parameter tree, if it is a parameter


def instruction_ops(hlo_text: str) -> Mapping[str, str]:
    """Op name of each instruction of a compiled program.

    By the weight that a matrix product reads, else by the named scope in the instruction's or its fused body's
    metadata; rewriting passes drop metadata, so what is left takes the name of the operand it works on.
    """
    computations = _parse(hlo_text)
    found: dict[str, str] = {}
    for body in computations.values():
        for name, instruction in body.items():
            if instruction.opcode in ("while", "conditional", "call"):
                continue  # their time is that of the instructions inside
            fused = computations.get(instruction.calls, {})
            found[name] = _op_of(instruction, body, fused, found)
    return found


def _op_of(
    instruction: _Instruction,
    body: Mapping[str, _Instruction],
    fused: Mapping[str, _Instruction],
    found: Mapping[str, str],
) -> str:
    multiplies = instruction.opcode == "dot" or any(inner.opcode == "dot" for inner in fused.values())
    if multiplies:
        leaves = [_leaf(operand, body) for operand in instruction.operands]
        read = next((_READERS[leaf] for leaf in leaves if leaf in _READERS), "")
        if read:
            return read
    inner = [part.scope for part in fused.values() if part.scope]
    if instruction.scope or inner:
        return instruction.scope or inner[-1]  # the last makes the fusion's result
    before = [found[operand] for operand in instruction.operands if found.get(operand, OTHER) != OTHER]
    gathered = next((op for op in before if op in _GROUPED), "")
    if multiplies and gathered:  # on weights taken out of the stack
        return gathered
    if multiplies:  # attention's two products read no weight
        return "values" if "softmax" in before or "values" in before else "scores"
    return before[0] if before else OTHER


def _leaf(name: str, body: Mapping[str, _Instruction]) -> str:
    """The parameter that an operand is, seen through reshapes and copies."""
    instruction = body.get(name)
    while instruction is not None and instruction.opcode in ("bitcast", "copy", "convert", "transpose", "reshape"):
        instruction = body.get(instruction.operands[0])
    return instruction.leaf if instruction is not None else ""


def _parse(hlo_text: str) -> dict[str, dict[str, _Instruction]]:
    """Instructions by name, by computation, in the order of the text (called before calling)."""
    computations: dict[str, dict[str, _Instruction]] = {}
    body: dict[str, _Instruction] = {}
    for line in hlo_text.splitlines():
        opening = _COMPUTATION.match(line)
        if opening:
            body = computations.setdefault(opening.group(1), {})
            continue
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        name, opcode, operands = match.groups()
        called = _CALLS.search(line)
        leaf = _LEAF.findall(line) if opcode == "parameter" else []
        body[name] = _Instruction(
            _scope(line),
            opcode,
            tuple(_NAME.findall(operands)),
            called.group(1) if called else "",
            leaf[-1] if leaf else "",
        )
    return computations


def _scope(line: str) -> str:
    path = _OP_NAME.search(line)
    parts = path.group(1).split("/") if path else []
    return next((_SCOPES[part] for part in reversed(parts) if part in _SCOPES), "")
