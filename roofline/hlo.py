"""Compiled HLO as XLA prints it (`compiled.as_text()`), read line by line into computations of instructions.

Strict: a line inside a computation that isn't understood is an error, since a row left out would be a wrong total.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from qwenjax.errors import InputError

_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
    "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8, "f8e5m2": 8,
    "f8e5m2fnuz": 8, "f8e8m0fnu": 8,
}  # fmt: skip
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[^\]]*)\](?:\{[^}]*\})?")
_OPCODE = re.compile(r" *(?P<opcode>[a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ATTRIBUTE = r"(?:^|, ){name}=(\{{[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*\}}|\"[^\"]*\"|[^,]+)"
_CALLS = ("calls", "to_apply", "body", "condition", "true_computation", "false_computation", "branch_computations")


@dataclass(frozen=True)
class Array:
    """One array's element type and sizes."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.dims)

    @property
    def bytes(self) -> int:
        return -(-self.elements * _BITS[self.dtype] // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. `arrays` are its result's, those of a tuple side by side; `tail` is what follows the
    operands, as printed."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str  # between the parentheses: a parameter's number, a constant's value
    tail: str
    is_root: bool

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def elements(self) -> int:
        return sum(array.elements for array in self.arrays)

    @cached_property
    def _structure(self) -> str:
        """The attributes without metadata and backend_config, whose texts may hold anything."""
        return re.split(r"(?:^|, )(?:metadata|backend_config|frontend_attributes)=", self.tail, maxsplit=1)[0]

    def attribute(self, name: str) -> str | None:
        """An attribute such as `calls` or `dimensions` as printed, without braces or quotes; None where it has none."""
        found = re.search(_ATTRIBUTE.format(name=re.escape(name)), self._structure)
        return found.group(1).strip('{}"') if found else None

    def numbers(self, name: str) -> tuple[int, ...]:
        """The whole numbers of an attribute such as `lhs_contracting_dims`; none where it isn't there."""
        return tuple(map(int, re.findall(r"\d+", self.attribute(name) or "")))

    @property
    def replica_groups(self) -> str:
        found = re.search(
            r"replica_groups=(mesh\[[^\]]*\] \{[^}]*\}|\{\{.*?\}\}|\[[^ ,]*\](?:<=\[[^ ]*\])?(?:T\([\d,]*\))?|\{\})",
            self.tail,
        )
        return found.group(1) if found else ""

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that it runs, a conditional's branches in order."""
        text = (self.attribute(name) or "" for name in _CALLS)
        return tuple(name.strip().lstrip("%") for part in text for name in part.split(",") if name.strip())

    @cached_property
    def op_name(self) -> str:
        """The path of named scopes that JAX gave, "" where the compiler kept none."""
        found = re.search(r'metadata=\{[^{}]*?op_name="((?:[^"\\]|\\.)*)"', self.tail)
        return found.group(1).replace("\\'", "'") if found else ""

    @cached_property
    def backend_config(self) -> dict[str, Any]:
        start = self.tail.find("backend_config={")
        if start < 0:
            return {}
        try:
            value, _ = json.JSONDecoder().raw_decode(self.tail, start + len("backend_config="))
        except ValueError:
            return {}  # a text of the backend's own, not JSON
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they were printed, which is the order in which they run once scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """The instructions that read each one, once each."""
        users: dict[str, list[Instruction]] = {instruction.name: [] for instruction in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return {name: tuple(found) for name, found in users.items()}

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        found = (i for i in self.instructions if i.opcode == "parameter")
        return tuple(sorted(found, key=lambda i: int(i.literal)))


@dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: Computation


def parse_hlo(text: str) -> Module:
    """Reads the text of a compiled module; raises InputError with the line that isn't understood."""
    computations: dict[str, Computation] = {}
    entry = ""
    name, pending = "", list[Instruction]()
    for line in text.splitlines():
        if name and line.startswith("}"):
            computations[name] = Computation(name, tuple(pending))
            name, pending = "", []
        elif name:
            if line.strip():
                pending.append(_instruction(line))
        elif (found := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
            name = found["name"]
            entry = name if found["entry"] else entry
    if entry not in computations:
        raise InputError("HLO", None, "has no whole ENTRY computation", "Give the text of a compiled module.")
    _check_names(computations.values())
    return Module(computations, computations[entry])


def _check_names(computations: Iterator[Computation] | Any) -> None:
    for computation in computations:
        known = computation.by_name
        for instruction in computation.instructions:
            for operand in instruction.operands:
                if operand not in known:
                    raise InputError("HLO", operand, f"is read in {computation.name} and made nowhere there", _REPORT)


_REPORT = "This XLA prints something new: report it with the version of jax."


def _instruction(line: str) -> Instruction:
    found = _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line) if "/*" in line else line)
    if not found:
        raise InputError("HLO", line.strip(), "is not an instruction", _REPORT)
    rest = found["rest"]
    arrays, end = _shape(rest, line)
    opcode = _OPCODE.match(rest, end)
    if not opcode:
        raise InputError("HLO", line.strip(), "has no operation after its shape", _REPORT)
    close = _closing(rest, opcode.end() - 1, line)
    inside = rest[opcode.end() : close]
    operands = () if opcode["opcode"] in ("constant", "parameter") else tuple(_OPERAND.findall(inside))
    tail = rest[close + 1 :].lstrip(", ")
    return Instruction(found["name"], opcode["opcode"], arrays, operands, inside, tail, bool(found["root"]))


def _shape(text: str, line: str) -> tuple[tuple[Array, ...], int]:
    """The arrays of a result's shape, and where it ends; nested tuples side by side."""
    end = _closing(text, 0, line) + 1 if text.startswith("(") else None
    found = list(_ARRAY.finditer(text, 0, end)) if end else [m for m in [_ARRAY.match(text)] if m]
    if end is None and not found:
        raise InputError("HLO", line.strip(), "has no shape", _REPORT)
    arrays = []
    for match in found:
        if match["dtype"] not in _BITS:
            raise InputError("HLO", match["dtype"], "is an unknown element type", _REPORT)
        sizes = re.findall(r"\d+", match["dims"])  # a bounded size prints as <=8
        arrays.append(Array(match["dtype"], tuple(map(int, sizes))))
    return tuple(arrays), end if end else found[0].end()


def _closing(text: str, start: int, line: str) -> int:
    """Where the parenthesis that opens at `start` closes; those in quotes don't count."""
    depth = 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', text[start:]):
        depth += {"(": 1, ")": -1}.get(match.group(), 0)
        if depth == 0:
            return start + match.start()
    raise InputError("HLO", line.strip(), "has a parenthesis that never closes", _REPORT)
