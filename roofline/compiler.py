"""FLOPs of the real model's matrix products, read off its jaxpr and joined to the inventory by named scope."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from qwenjax.ops import OPS

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn

_NAMES = frozenset(op.name for op in OPS)


def count_jaxpr_flops(config: ModelConfig, step: Step, dtype: str = "bfloat16") -> dict[str, int]:
    """FLOPs of each op's matrix products as the traced prefill or decode step holds them, without allocating weights.

    Attention's are dense: a plain product computes every pair and masks afterwards. A product outside every op's named
    scope is an error, not a remainder.
    """
    import jax

    from qwenjax.model import check_runnable, decode_step_impl, prefill_impl, step_shapes

    check_runnable(config)
    params, arguments, cache = step_shapes(config, step.phase, step.batch, step.query_len, step.kv_len, dtype)
    function: Callable[..., Any] = prefill_impl if step.phase == "prefill" else decode_step_impl
    traced = jax.make_jaxpr(function, static_argnums=0)(config, params, *arguments, cache)
    flops: Counter[str] = Counter()
    for scope, count in _dots(traced.jaxpr, "", 1):
        op = next((part for part in reversed(scope.split("/")) if part in _NAMES), None)
        if op is None:
            raise InputError(
                "jaxpr", scope, "a matrix product runs outside every op of the inventory", "Give it a named scope."
            )
        flops[op] += count
    return dict(flops)


def _dots(jaxpr: Jaxpr, outer: str, times: int) -> Iterator[tuple[str, int]]:
    """Scope and FLOPs of every dot_general, inner programs included; a scan's body counts once for each turn."""
    for equation in jaxpr.eqns:
        scope = f"{outer}/{equation.source_info.name_stack}"
        if equation.primitive.name == "dot_general":
            yield scope, times * _dot_flops(equation)
            continue
        if equation.primitive.name == "while":
            raise InputError("jaxpr", scope, "a while loop's trip count can't be read off its jaxpr", "Use a scan.")
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in _inner(equation):
            yield from _dots(inner, scope, times * turns)


def _inner(equation: JaxprEqn) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            program: Any = getattr(item, "jaxpr", item)
            if hasattr(program, "eqns"):
                yield program


def _dot_flops(equation: JaxprEqn) -> int:
    """Two for each multiply-add: the result's elements times the contracted length."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left: Any = equation.invars[0].aval
    result: Any = equation.outvars[0].aval
    summed: int = math.prod(left.shape[axis] for axis in contracted)
    return 2 * int(math.prod(result.shape)) * summed
