"""What one instruction of a compiled program computes, reads and writes, counted at what it touches.

An operand that is only sliced or gathered from counts the slices; a buffer that is updated in place counts the update.
A value computed inside a fusion costs no memory. An operand read twice by one kernel counts once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from roofline.hlo import Array, Computation, Instruction, Module

LARGE_CONSTANT_BYTES = 65536  # constants below stay in the chip's caches and count nothing
UPDATES = ("dynamic-update-slice", "scatter")
_SLICES = ("slice", "dynamic-slice", "gather")
_VIEWS = ("bitcast", "reshape")
_SCRATCH = ("s8", "u8")  # a library call's last results of these types are its workspace
# Each element of the result needs the element of every operand at its own place, or one at another place.
_ELEMENTWISE = frozenset(
    (
        *("abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "complex", "convert", "copy", "cosine"),
        *("divide", "erf", "exponential", "exponential-minus-one", "floor", "imag", "is-finite", "log", "log-plus-one"),
        *("logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "power", "real"),
        *("reduce-precision", "remainder", "reverse", "round-nearest-afz", "round-nearest-even", "rsqrt", "select"),
        *("shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "subtract", "tan"),
        *("tanh", "transpose", "xor"),
    )
)


@dataclass(frozen=True)
class Touched:
    """Bytes that a kernel reads and writes, and FLOPs of matrix products by operand type (two a multiply-add)."""

    read_bytes: int
    write_bytes: int
    flops: dict[str, int]


def count_kernel(instruction: Instruction, within: Computation, module: Module) -> Touched:
    """Counts one kernel of a computation: a fusion, a copy, a library call, whatever runs as one."""
    body = _body(instruction, within, module)
    needed = _needed(body, module)
    reads: Counter[tuple[str, ...]] = Counter()
    sizes: dict[tuple[str, ...], int] = {}
    for operand, parameter in zip(instruction.operands, body.parameters, strict=True):
        source = _buffer(operand, within)
        if _is_small_constant(source, within):
            continue
        reads[source] += needed[parameter.name]
        sizes[source] = max(sizes.get(source, 0), parameter.bytes)
    read_bytes = sum(min(count, sizes[source]) for source, count in reads.items())
    return Touched(read_bytes, _written(body), count_flops(body, module))


def _body(instruction: Instruction, within: Computation, module: Module) -> Computation:
    """The computation that a fusion runs, or one of the instruction alone, its operands as parameters."""
    if instruction.opcode == "fusion":
        return module.computations[instruction.calls[0]]
    names = [f"operand.{i}" for i in range(len(instruction.operands))]
    parameters = tuple(
        Instruction(name, "parameter", within.by_name[operand].arrays, (), str(i), "", False)
        for i, (name, operand) in enumerate(zip(names, instruction.operands, strict=True))
    )
    alone = replace(instruction, operands=tuple(names), is_root=True)
    return Computation(instruction.name, (*parameters, alone))


def _buffer(operand: str, within: Computation) -> tuple[str, ...]:
    """What an operand is a view of, so that two views of one buffer are known as one."""
    found = within.by_name[operand]
    while found.opcode in _VIEWS:
        found = within.by_name[found.operands[0]]
    if found.opcode == "get-tuple-element":
        return found.operands[0], found.attribute("index") or ""
    return (found.name,)


def _is_small_constant(source: tuple[str, ...], within: Computation) -> bool:
    found = within.by_name[source[0]]
    return found.opcode == "constant" and found.bytes <= LARGE_CONSTANT_BYTES


def _needed(body: Computation, module: Module) -> dict[str, int]:
    """Bytes of each instruction's result that the computation's outputs need, from the outputs back."""
    outputs = {output.name for output in _outputs(body)}
    elements: dict[str, int] = {}  # needed of each result
    passed: dict[str, int] = {}  # of that, what an update must get from the buffer that it updates
    for instruction in reversed(body.instructions):
        name = instruction.name
        wanted = sum(_wanted(instruction, user, elements, passed, body, module) for user in body.users[name])
        leaves = name in outputs
        elements[name] = instruction.elements if leaves else min(wanted, instruction.elements)
        stays = leaves and instruction.opcode in UPDATES and _in_place(instruction, body)
        passed[name] = min(wanted, instruction.elements) if stays else elements[name]
    return {name: -(-elements[name] * found.bytes // max(found.elements, 1)) for name, found in body.by_name.items()}


def _wanted(
    of: Instruction,
    user: Instruction,
    elements: dict[str, int],
    passed: dict[str, int],
    body: Computation,
    module: Module,
) -> int:
    """Elements of a result that one of its users needs."""
    if not elements[user.name]:
        return 0
    first_only = user.operands[0] == of.name and of.name not in user.operands[1:]
    if user.opcode in UPDATES and first_only:
        return passed[user.name] + (_update_elements(user, body) if _combines(user, module) else 0)
    if user.opcode in _VIEWS or user.opcode in _ELEMENTWISE or (user.opcode in _SLICES and first_only):
        return min(elements[user.name], of.elements)
    return of.elements


def _update_elements(update: Instruction, body: Computation) -> int:
    """Elements that a dynamic-update-slice (buffer, update, places) or a scatter (buffer, places, update) writes."""
    operand = update.operands[1 if update.opcode == "dynamic-update-slice" else 2]
    return body.by_name[operand].elements


def _combines(update: Instruction, module: Module) -> bool:
    """Whether a scatter adds to what is there, or the like, and doesn't just replace it."""
    region = module.computations.get((update.attribute("to_apply") or "").lstrip("%"))
    return update.opcode == "scatter" and region is not None and region.root.opcode != "parameter"


def _outputs(body: Computation) -> tuple[Instruction, ...]:
    """The instructions whose results leave the computation, seen through views."""
    root = body.root
    names = root.operands if root.opcode == "tuple" else (root.name,)
    return tuple(_viewed(body.by_name[name], body) for name in names)


def _viewed(instruction: Instruction, body: Computation) -> Instruction:
    while instruction.opcode in _VIEWS:
        instruction = body.by_name[instruction.operands[0]]
    return instruction


def _in_place(update: Instruction, body: Computation) -> bool:
    """Whether an update's buffer is a parameter, untouched but for other updates: XLA then writes where it lies."""
    source = _viewed(body.by_name[update.operands[0]], body)
    while source.opcode in UPDATES:
        source = _viewed(body.by_name[source.operands[0]], body)
    return source.opcode == "parameter"


def _written(body: Computation) -> int:
    total = 0
    for output in _outputs(body):
        if output.opcode not in UPDATES or not _in_place(output, body):
            total += sum(array.bytes for array in _results(output))
            continue
        while output.opcode in UPDATES:  # one update may go into what another has updated
            total += _update_elements(output, body) * output.bytes // max(output.elements, 1)
            output = _viewed(body.by_name[output.operands[0]], body)
    return total


def _results(output: Instruction) -> tuple[Array, ...]:
    arrays = output.arrays
    if output.opcode == "custom-call":
        while len(arrays) > 1 and arrays[-1].dtype in _SCRATCH:
            arrays = arrays[:-1]
    if output.opcode == "copy-start":
        return arrays[:1]
    return arrays


def count_flops(body: Computation, module: Module) -> dict[str, int]:
    """FLOPs of the matrix products of a computation, by operand type as XLA names it."""
    flops: Counter[str] = Counter()
    for instruction in body.instructions:
        if product := product_flops(instruction, body):
            kind = body.by_name[instruction.operands[0]].arrays[0].dtype if instruction.opcode == "dot" else ""
            flops[kind] += product
        elif instruction.opcode in ("fusion", "call"):
            flops.update(count_flops(module.computations[instruction.calls[0]], module))
        elif instruction.opcode == "custom-call":
            flops.update(_library_flops(instruction, body))
    return dict(flops)


def product_flops(instruction: Instruction, body: Computation) -> int:
    """FLOPs of a matrix product, 0 of anything else.

    XLA makes some products, of a single row say, into a multiplication and a sum; the multiplication keeps the name.
    """
    if instruction.opcode == "multiply" and instruction.op_name.endswith("/dot_general"):
        return 2 * instruction.elements
    if instruction.opcode != "dot":
        return 0
    left = body.by_name[instruction.operands[0]].arrays[0]
    return 2 * instruction.elements * prod(left.dims[axis] for axis in instruction.numbers("lhs_contracting_dims"))


def _library_flops(instruction: Instruction, body: Computation) -> dict[str, int]:
    """cuBLAS's products say their contracted axes; what other libraries do can't be read here."""
    config = instruction.backend_config.get("gemm_backend_config")
    if not config:
        return {}
    left = body.by_name[instruction.operands[0]].arrays[0]
    axes = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])
    summed = prod(left.dims[int(axis)] for axis in axes)
    return {left.dtype: 2 * instruction.arrays[0].elements * summed}
