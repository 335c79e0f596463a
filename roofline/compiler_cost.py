"""What XLA's cost analysis says of a traced program, equation by equation, as exact integers.

A program's own figure is a float32 sum: beyond 2**24 it rounds, a loop's body counts once, and nothing says which
operation it belongs to. So the compiler is asked for each equation alone, and the sums are made here: in integers, by
named scope, a loop's body times its turns. A figure beyond 2**24 is rebuilt from the equation's shapes and must round
to what the compiler said; one that can't be rebuilt is an error, not an estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qwenjax.errors import InputError

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn
    from jax.stages import Traced

LARGEST_EXACT = 2**24  # integers above it aren't all float32 numbers
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"}
)
_LOOP_FLOPS = 2  # a turn of a loop outside its body: the counter is tested and moved on
_REVERSE_LOOP_FLOPS = 2  # more where it runs backwards: length - counter - 1
_LEAF_ROUNDINGS = 8  # float32 additions that one equation may take in the compiler's sum, at most


class Cost(NamedTuple):
    """What cost_analysis counts: `flops`, and apart from them `transcendentals` (exponentials, roots, sines...)."""

    flops: int
    transcendentals: int


class Work(NamedTuple):
    """Where work stands and what it is: the path of named scopes, the primitive, and the dtype of its result."""

    scope: str
    primitive: str
    dtype: str


class Tally:
    """Sums by place: `flops` and `transcendentals` have loops times their turns and a ragged product's own rows;
    `reported` is as cost_analysis counts, a body once.

    `roundings` bounds the float32 additions behind the compiler's sum of the same program.
    """

    def __init__(self) -> None:
        self.flops: Counter[Work] = Counter()
        self.transcendentals: Counter[Work] = Counter()
        self.reported: Counter[Work] = Counter()
        self.reported_transcendentals: Counter[Work] = Counter()
        self.roundings = 0

    def add(self, other: Tally, scope: str, turns: int = 1) -> None:
        """Adds another's sums under an outer scope: a loop's body `turns` times, once where XLA counts it once."""
        for name, factor in (("flops", turns), ("transcendentals", turns), *_REPORTED):
            own: Counter[Work] = getattr(self, name)
            for work, count in getattr(other, name).items():
                own[work._replace(scope=joined(scope, work.scope))] += factor * count

    def put(self, work: Work, cost: Cost, reported: Cost) -> None:
        for counter, count in (
            (self.flops, cost.flops),
            (self.transcendentals, cost.transcendentals),
            (self.reported, reported.flops),
            (self.reported_transcendentals, reported.transcendentals),
        ):
            if count:
                counter[work] += count

    def total(self) -> Cost:
        return Cost(self.flops.total(), self.transcendentals.total())

    def total_reported(self) -> Cost:
        return Cost(self.reported.total(), self.reported_transcendentals.total())


_REPORTED = (("reported", 1), ("reported_transcendentals", 1))


def tally_program(program: Any) -> Tally:
    """Costs of a closed jaxpr by named scope and primitive, inner programs included; nothing is compiled or run."""
    import jax

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return _tally(program.jaxpr, program.consts, {})


def rounding_bound(tally: Tally) -> float:
    """How far, relatively, the compiler's float32 sum of the whole program may lie from the integers' sum."""
    return tally.roundings * 2.0**-24


def _tally(jaxpr: Jaxpr, consts: Sequence[Any], known: dict[int, Tally]) -> Tally:
    """`known` keeps the inner programs that were walked: the layers of a model share theirs."""
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    result, deepest = Tally(), 0
    constants = _Constants(jaxpr, consts)
    for equation in _live(jaxpr):
        scope, kind = str(equation.source_info.name_stack), equation.primitive.name
        if constants.fold(equation):
            continue
        if kind in _CALLS or kind in ("scan", "cond"):
            inner = [_tally(program, own, known) for program, own in _inner(equation)]
            _add_inner(result, equation, scope, inner)
            deepest = max(deepest, *(part.roundings for part in inner))
            result.roundings += 2
        elif kind == "while":
            raise InputError("jaxpr", scope, "a while loop's trip count can't be read off its jaxpr", "Use a scan.")
        else:
            _add_leaf(result, equation, scope)
            result.roundings += _LEAF_ROUNDINGS
    result.roundings += deepest
    known[id(jaxpr)] = result
    return result


def _live(jaxpr: Jaxpr) -> Sequence[JaxprEqn]:
    """The equations whose results are used; the others are dropped before anything is lowered."""
    used = {id(variable) for variable in jaxpr.outvars}
    live: list[JaxprEqn] = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(id(variable) in used for variable in equation.outvars):
            used |= {id(variable) for variable in equation.invars}
            live.append(equation)
    return live[::-1]


class _Known(NamedTuple):
    """An array that is known before the program runs: its one value, where that was followed, or several values."""

    value: float | None
    is_several: bool = False


class _Constants:
    """Variables of one program that are known before it runs.

    XLA's import of a program folds arithmetic on what the program itself states: the test 0 < 0 of an index, the
    positions of a batch of one. What is folded costs nothing in the compiler's count. Several values fold only while
    their number stays.
    """

    def __init__(self, jaxpr: Jaxpr, constants: Sequence[Any]) -> None:
        self._known: dict[int, _Known] = {}
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            alone = _elements(variable) == 1
            self._known[id(variable)] = _Known(float(value.reshape(())) if alone else None, not alone)

    def fold(self, equation: JaxprEqn) -> bool:
        """Whether this equation is folded; what it gives is then known, unless it gives an operand back."""
        kind, (out, *_) = equation.primitive.name, equation.outvars
        operands = [self._of(variable) for variable in equation.invars]
        known = [operand for operand in operands if operand is not None]
        if kind == "iota" and _elements(out) == 1:
            self._known[id(out)] = _Known(0.0)
        elif kind in _CALLS or kind in ("scan", "cond", "while") or not known:
            return False
        elif len(known) == len(operands) and not self._spreads(equation, operands):
            several = any(operand.is_several for operand in known)
            self._known[id(out)] = _Known(_value_of(kind, [operand.value for operand in known]), several)
        elif kind == "select_n":
            return operands[0] is not None and not operands[0].is_several
        else:
            return self._is_neutral(kind, operands)
        return True

    def _of(self, variable: Any) -> _Known | None:
        return _Known(float(variable.val)) if hasattr(variable, "val") else self._known.get(id(variable))

    def _is_neutral(self, kind: str, operands: list[_Known | None]) -> bool:
        """Whether an operand changes nothing: + 0, - 0, * 1."""
        values = [None if operand is None else operand.value for operand in operands]
        if kind in ("add", "add_any"):
            return 0 in values
        return 1 in values if kind == "mul" else kind == "sub" and values[1] == 0

    def _spreads(self, equation: JaxprEqn, operands: Sequence[_Known | None]) -> bool:
        """Whether several values are repeated, which isn't folded."""
        size = _elements(equation.outvars[0])
        return any(
            known is not None and known.is_several and _elements(variable) != size
            for known, variable in zip(operands, equation.invars, strict=True)
        )


_SAME_VALUES = ("broadcast_in_dim", "convert_element_type", "expand_dims", "reshape", "squeeze")
_ZERO_OF_ZERO = ("square", "neg", "integer_pow", "div", "mul")


def _value_of(kind: str, values: Sequence[float | None]) -> float | None:
    """The value of folded arithmetic, as far as it is followed: what is passed on, and products of 0."""
    if kind in _SAME_VALUES or (kind in _ZERO_OF_ZERO and values[0] == 0):
        return values[0]
    return 0.0 if kind == "mul" and 0 in values else None


def _add_inner(result: Tally, equation: JaxprEqn, scope: str, inner: list[Tally]) -> None:
    kind = equation.primitive.name
    if kind == "scan":
        turns, counting = equation.params["length"], _LOOP_FLOPS
        if equation.params["reverse"]:
            counting += _REVERSE_LOOP_FLOPS
        result.add(inner[0], scope, turns)
        result.put(Work(scope, kind, "int32"), Cost(turns * counting, 0), Cost(counting, 0))
    elif kind == "cond":
        # The dearest branch stands for what runs: no more can.
        result.add(max(inner, key=Tally.total), scope)
    else:
        for part in inner:
            result.add(part, scope)


def _add_leaf(result: Tally, equation: JaxprEqn, scope: str) -> None:
    kind, reported = equation.primitive.name, cost_of(equation)
    # XLA runs a ragged product over every group and counts that; each row needs one.
    cost = Cost(equation_flops(equation), 0) if kind == "ragged_dot_general" else reported
    out: Any = equation.outvars[0].aval
    result.put(Work(scope, kind, str(out.dtype)), cost, reported)


def inner_programs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs that an equation calls: a jitted function's, a loop's body, a condition's branches."""
    return (program for program, _ in _inner(equation))


def _inner(equation: JaxprEqn) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            program: Any = getattr(item, "jaxpr", item)
            if hasattr(program, "eqns"):
                yield program, getattr(item, "consts", ())


def joined(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner


PRODUCTS = ("dot_general", "ragged_dot_general")


def equation_flops(equation: JaxprEqn) -> int:
    """FLOPs of a product by its shapes, two a multiply-add: the result's elements times the contracted length."""
    numbers = equation.params.get("dimension_numbers") or equation.params["ragged_dot_dimension_numbers"]
    if equation.primitive.name != "dot_general":
        if numbers.lhs_ragged_dimensions[0] in numbers.dot_dimension_numbers[0][0]:
            # A ragged sum: each row of the operands adds to one group's result.
            right: Any = equation.invars[1].aval
            return 2 * _elements(equation.invars[0]) * int(right.shape[-1])
        numbers = numbers.dot_dimension_numbers
    (contracted, _), _ = numbers
    left: Any = equation.invars[0].aval
    summed: int = math.prod(left.shape[axis] for axis in contracted)
    return 2 * _elements(equation.outvars[0]) * summed


_COSTS: dict[tuple[str, ...], Cost] = {}
# What only moves elements costs no FLOPs at any size: the compiler is asked about the first of each sort.
_MOVES = frozenset({"broadcast_in_dim", "concatenate", "reshape", "slice", "split", "squeeze", "transpose"})


def cost_of(equation: JaxprEqn) -> Cost:
    """The compiler's count of this equation alone, lowered for the CPU, exactly; asked once of equals."""
    key: tuple[str, ...] = (equation.primitive.name,)
    if equation.primitive.name not in _MOVES:
        key += (str(equation.params), *(_described(variable) for variable in equation.invars))
    if key not in _COSTS:
        figures = _asked(equation)
        _COSTS[key] = Cost(*(_exact(equation, figures.get(name, 0.0)) for name in ("flops", "transcendentals")))
    return _COSTS[key]


def _described(variable: Any) -> str:
    return f"{variable.aval} {variable.val!r}" if hasattr(variable, "val") else str(variable.aval)


def _asked(equation: JaxprEqn) -> dict[str, float]:
    import jax

    literal = [hasattr(variable, "val") for variable in equation.invars]
    operands: list[Any] = [variable.val if hasattr(variable, "val") else variable.aval for variable in equation.invars]

    def alone(*arrays: Any) -> Any:
        given = iter(arrays)
        return equation.primitive.bind(
            *(value if fixed else next(given) for value, fixed in zip(operands, literal, strict=True)),
            **equation.params,
        )

    shapes = [
        jax.ShapeDtypeStruct(value.shape, value.dtype)
        for value, fixed in zip(operands, literal, strict=True)
        if not fixed
    ]
    figures: Any = jax.jit(alone).lower(*shapes).cost_analysis()
    return figures or {}


def _exact(equation: JaxprEqn, figure: float) -> int:
    """The integer behind a float32 figure: itself where float32 is exact, else the law that rounds to it."""
    if figure <= LARGEST_EXACT:
        if figure != int(figure):
            raise _unexplained(equation, figure)
        return int(figure)
    for base, rest in _laws(equation):
        rate = round((figure - rest) / base) if base else 0
        if rate >= 1 and _float32(rate * base + rest) == figure:
            return rate * base + rest
    raise _unexplained(equation, figure)


def _laws(equation: JaxprEqn) -> Iterator[tuple[int, int]]:
    """What a figure may be a whole multiple of, and what is added to it, the likeliest first."""
    kind, out = equation.primitive.name, _elements(equation.outvars[0])
    if kind in PRODUCTS:
        yield equation_flops(equation), 0
        return
    shapes: list[Any] = [getattr(variable.aval, "shape", ()) for variable in equation.invars]
    given = math.prod(shapes[0]) if shapes else 0
    if kind.startswith(("reduce_", "argm")):
        yield given - out, 0
    elif kind.startswith("cum"):  # as a window over everything before
        yield given * (shapes[0][equation.params["axis"]] - 1), 0
    elif kind == "sort":
        yield given * (given - 1).bit_length(), 0
    elif kind == "gather":  # its indices are tested against both ends, and what lies outside is replaced
        yield out, math.prod(shapes[1][:-1]) * (4 * shapes[1][-1] - 1)
    elif kind.startswith("scatter"):
        yield math.prod(shapes[2]), 0
    yield out, 0


def _elements(variable: Any) -> int:
    return int(math.prod(variable.aval.shape))


def _float32(value: float) -> float:
    import numpy as np

    return float(np.float32(value))


def _unexplained(equation: JaxprEqn, figure: float) -> InputError:
    shapes = ", ".join(str(variable.aval) for variable in equation.invars)
    return InputError(
        "cost_analysis",
        figure,
        f"no integer is known that {equation.primitive.name} of {shapes} could cost",
        "Report it with this JAX version; smaller sizes may work.",
    )


def lowered_cost(traced: Traced) -> dict[str, float]:
    """What `lowered.cost_analysis()` says of a whole program for the CPU: float32 sums, each loop's body once."""
    import jax

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        figures: Any = traced.lower().cost_analysis()
    return {name: float((figures or {}).get(name, 0.0)) for name in ("flops", "transcendentals")}


def reported_cost(function: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """The same of a function that isn't traced yet."""
    import jax

    return lowered_cost(jax.jit(function).trace(*arguments))
