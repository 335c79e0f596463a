"""What the usual cost_analysis numbers get wrong, measured on the JAX that is installed here.

Each case is a tiny program whose true count is known by arithmetic. It is set against what
`jit(f).lower(...).cost_analysis()` says, and `.compile().cost_analysis()` where that compiles. Text, and as the last
line one JSON object; `--json` prints that line alone.

    python bench/cost_analysis.py
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

from qwenjax.tables import Table, render

ROWS, INNER, COLUMNS, TURNS, GROUPS = 16, 64, 32, 10, 8


@dataclass(frozen=True)
class Pitfall:
    """One usual error: `true` by arithmetic, `lowered` and `compiled` as reported (None: nothing at all)."""

    name: str
    quantity: str
    true: int
    lowered: float | None
    compiled: float | None
    why: str

    @property
    def lowered_ratio(self) -> float | None:
        return None if self.lowered is None else self.lowered / self.true

    @property
    def compiled_ratio(self) -> float | None:
        return None if self.compiled is None else self.compiled / self.true


def measure(
    name: str, quantity: str, true: int, why: str, function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct
) -> Pitfall:
    """Asks for one program what it costs, before and after XLA's optimisation."""
    lowered = jax.jit(function).lower(*shapes)
    said, compiled = _figure(lowered.cost_analysis(), quantity), _figure(lowered.compile().cost_analysis(), quantity)
    return Pitfall(name, quantity, true, said, compiled, why)


def _figure(figures: Any, quantity: str) -> float | None:
    value = figures.get(quantity) if isinstance(figures, dict) else None
    return None if value is None else float(value)


def pitfalls() -> Iterator[Pitfall]:
    """Every usual error, one after the other."""
    yield from _loops()
    yield from _products()
    yield from _sums()
    yield from _calls()


def _array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _loops() -> Iterator[Pitfall]:
    square = _array(INNER, INNER)

    def scanned(x: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, _: (carry @ carry, None), x, length=TURNS)[0]

    product = 2 * INNER**3
    yield measure(
        "a loop's body counts once",
        "flops",
        TURNS * product,
        f"{TURNS} turns of lax.scan, one counted",
        scanned,
        square,
    )

    def branched(x: jax.Array, choice: jax.Array) -> Any:
        return jax.lax.cond(choice, lambda y: y @ y, lambda y: y + 1, x)

    yield measure(
        "a branch not taken counts",
        "flops",
        INNER**2,
        "one FLOP an element runs where the condition is false; the dearer branch is counted",
        branched,
        square,
        _array(dtype="bool"),
    )


def _products() -> Iterator[Pitfall]:
    lhs, rhs = _array(ROWS, INNER, dtype="bfloat16"), _array(GROUPS, INNER, COLUMNS, dtype="bfloat16")

    def ragged(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, y, sizes)

    yield measure(
        "ragged_dot is counted dense",
        "flops",
        2 * ROWS * INNER * COLUMNS,
        f"each of {ROWS} rows needs one of {GROUPS} groups; all are counted, and masks besides",
        ragged,
        lhs,
        rhs,
        _array(GROUPS, dtype="int32"),
    )

    def attended(q: jax.Array, k: jax.Array) -> jax.Array:
        kept = jnp.tril(jnp.ones((INNER, INNER), bool))
        return jnp.where(kept, q @ k.T, -jnp.inf)

    pairs = INNER * (INNER + 1) // 2
    yield measure(
        "the causal mask isn't seen",
        "flops",
        2 * COLUMNS * pairs,
        "a plain product computes the pairs that the mask throws away, and is counted with the mask's own work",
        attended,
        _array(INNER, COLUMNS),
        _array(INNER, COLUMNS),
    )

    def multiplied(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y

    left, right = _array(ROWS, INNER, dtype="bfloat16"), _array(INNER, COLUMNS, dtype="bfloat16")
    moved = 2 * (ROWS * INNER + INNER * COLUMNS + ROWS * COLUMNS)
    yield measure(
        "bf16 is widened on the CPU",
        "bytes accessed",
        moved,
        "operands and result at two bytes; compiled for the CPU, casts to float32 are added",
        multiplied,
        left,
        right,
    )


def _sums() -> Iterator[Pitfall]:
    big, small = 2**12, 3

    def summed(x: jax.Array, y: jax.Array) -> Any:
        return x + 1, tuple(y + i for i in range(1, 5))

    # Float32 holds whole numbers up to 2**24: what follows one by one is lost.
    yield measure(
        "totals are float32 sums",
        "flops",
        big * big + 4 * small,
        f"{big * big:,} FLOPs, and four times {small}: beyond 2**24 the small ones round",
        summed,
        _array(big, big),
        _array(small),
    )


def _calls() -> Iterator[Pitfall]:
    matrix = _array(INNER, INNER)
    yield measure(
        "a library call is opaque",
        "flops",
        INNER**3 // 3,
        "Cholesky's n^3/3, done by LAPACK: only what surrounds the call is counted",
        jnp.linalg.cholesky,
        matrix,
    )

    def largest(x: jax.Array) -> Any:
        return jax.lax.top_k(x, 8)

    yield measure(
        "top_k is opaque",
        "flops",
        ROWS * INNER,
        "each element is compared at least once (true: that least); nothing is counted",
        largest,
        _array(ROWS, INNER),
    )

    def raised(x: jax.Array) -> jax.Array:
        return jnp.exp(x)

    yield measure(
        "exponentials aren't FLOPs",
        "flops",
        ROWS * INNER,
        "they are counted apart, as `transcendentals` (true: one an element)",
        raised,
        _array(ROWS, INNER),
    )


def record(found: list[Pitfall]) -> dict[str, Any]:
    """All cases as one object, with what they were measured on."""
    rows = [{**asdict(row), "lowered_ratio": row.lowered_ratio, "compiled_ratio": row.compiled_ratio} for row in found]
    return {"jax": jax.__version__, "platform": jax.default_backend(), "rows": rows}


def table(found: list[Pitfall]) -> Table:
    def number(value: float | None) -> str:
        return "nothing" if value is None else f"{value:,.0f}"

    def ratio(value: float | None) -> str:
        # What float32 rounds away is a few parts in a million; the digits must show it.
        return "-" if value is None else f"{value:.7f}" if 0 < abs(value - 1) < 1e-3 else f"{value:.2f}"

    body = [
        [
            row.name,
            row.quantity,
            number(row.true),
            number(row.lowered),
            ratio(row.lowered_ratio),
            number(row.compiled),
            ratio(row.compiled_ratio),
            row.why,
        ]
        for row in found
    ]
    columns = ("usual error", "figure", "true", "lowered", "/ true", "compiled", "/ true ", "why")
    title = f"What cost_analysis says, JAX {jax.__version__} on {jax.default_backend()}"
    return Table(title, columns, body, text=("usual error", "figure", "why"))


def main() -> None:
    found = list(pitfalls())
    if "--json" not in sys.argv[1:]:
        print(render([table(found)]))
    print(json.dumps(record(found)))


if __name__ == "__main__":
    main()
