"""Numbers that know where they come from: leaves with a kind and a source, and formulas over them by name.

A formula is arithmetic over dotted names, with `min`, `max`, `ceil` and `total(x, first, last, term)`, the sum of a
term over whole x. Whoever has the leaves can compute every derived number again with `evaluate`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from roofline.timing.arrays import least, most

LEAF_KINDS: Final = ("exact", "datasheet", "measured elsewhere", "measured here", "fitted", "estimate", "given")
DERIVED: Final = "derived"  # by its formula
COMPUTED: Final = "computed"  # by the function that its formula calls, too intricate for one formula
_OPERATORS: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_TOTAL: Final = "total"
_WHOLE: Final = ("count", "B", "FLOP", "bit")  # units of what is mostly whole


@dataclass(frozen=True)
class Node:
    """One number of a derivation. Leaves have no formula; `inputs` are the names of the nodes that it follows from."""

    name: str
    value: float
    unit: str
    kind: str
    source: str
    formula: str = ""
    inputs: tuple[str, ...] = ()


def dotted(node: ast.expr) -> str:
    """The name that a Name or a chain of attributes spells."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError(f"not a name: {ast.unparse(node)}")


@cache
def parse(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


def names_of(formula: str) -> tuple[str, ...]:
    """The names that a formula reads, in order; neither functions nor the variable of a total."""
    return tuple(dict.fromkeys(_names(parse(formula), ())))


def _names(node: ast.expr, bound: tuple[str, ...]) -> Iterable[str]:
    if isinstance(node, ast.Name | ast.Attribute):
        return () if dotted(node) in bound else (dotted(node),)
    if isinstance(node, ast.Call):
        inner, arguments = bound, node.args
        if dotted(node.func) == _TOTAL:
            inner, arguments = (*bound, dotted(arguments[0])), arguments[1:]
        given = [*arguments, *(keyword.value for keyword in node.keywords)]
        return [name for argument in given for name in _names(argument, inner)]
    if isinstance(node, ast.BinOp):
        return [*_names(node.left, bound), *_names(node.right, bound)]
    return _names(node.operand, bound) if isinstance(node, ast.UnaryOp) else ()


def evaluate(formula: str, values: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """The number that a formula gives for values by name; `functions` are further ones that it may call."""
    return _evaluate(parse(formula), values, functions or {})


def _evaluate(node: ast.expr, values: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name | ast.Attribute):
        return values[dotted(node)]
    if isinstance(node, ast.BinOp):
        left, right = (_evaluate(side, values, functions) for side in (node.left, node.right))
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, values, functions)
    if isinstance(node, ast.Call):
        return _call(node, values, functions)
    raise ValueError(f"not a formula: {ast.unparse(node)}")


def _call(node: ast.Call, values: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    name = dotted(node.func)
    if name == _TOTAL:
        return _total(node, values, functions)
    arguments = [_evaluate(argument, values, functions) for argument in node.args]
    keywords = {word.arg or "": _evaluate(word.value, values, functions) for word in node.keywords}
    if name in ("min", "max"):
        pick, result = (least if name == "min" else most), arguments[0]
        for argument in arguments[1:]:
            result = pick(result, argument)
        return result
    if name == "ceil":
        return math.ceil(arguments[0])
    return functions[name](*arguments, **keywords)


def _total(node: ast.Call, values: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> float:
    import numpy as np

    variable, first, last, term = node.args
    start, end = (int(_evaluate(side, values, functions)) for side in (first, last))
    steps = np.arange(start, end + 1, dtype=np.float64)
    terms = _evaluate(term, {**values, dotted(variable): steps}, functions)
    return float(np.broadcast_to(terms, steps.shape).sum())


class Derivation:
    """The nodes of one derivation in the order in which they were added; a name that is there already stays."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.values: dict[str, Any] = {}

    def add(self, node: Node) -> str:
        if node.name not in self.nodes:
            self.nodes[node.name] = node
            self.values[node.name] = node.value
        return node.name

    def leaf(self, name: str, value: float, unit: str, kind: str, source: str) -> str:
        """A number from outside; kind is one of LEAF_KINDS."""
        return self.add(Node(name, plain(value), unit, kind, source))

    def derive(self, name: str, formula: str, unit: str, source: str = "", value: Any = None) -> str:
        """A number by its formula; with `value` the one that the package computed, which the formula must give."""
        made = evaluate(formula, self.values) if value is None else value
        if unit in _WHOLE and isinstance(made, float) and made.is_integer():
            made = int(made)
        return self.add(Node(name, plain(made), unit, DERIVED, source or "its formula", formula, names_of(formula)))

    def compute(self, name: str, call: str, value: Any, unit: str, source: str, inputs: Iterable[str] = ()) -> str:
        """A number that a function gave: `call` names it and its arguments, `inputs` the constants that it reads."""
        read = tuple(dict.fromkeys((*names_of(call), *inputs)))
        return self.add(Node(name, plain(value), unit, COMPUTED, source, call, read))

    def same(self, name: str, value: Any, unit: str, candidates: Iterable[str], source: str) -> str:
        """The first of the candidate formulas that gives exactly this value; where none does, the value as counted."""
        for formula in candidates:
            known = all(part in self.values for part in names_of(formula))
            if known and math.isclose(evaluate(formula, self.values), value, rel_tol=1e-12):
                return self.derive(name, formula, unit, source, value)
        return self.leaf(name, plain(value), unit, "exact", source)


def plain(value: Any) -> float:
    """A Python number out of a Fraction or a numpy scalar; whole ones stay whole."""
    if isinstance(value, int):
        return value
    number = float(value)
    return int(number) if getattr(value, "denominator", 0) == 1 else number


def total_of(names: Iterable[str]) -> str:
    """The formula that adds these."""
    return " + ".join(names) or "0"
