"""Three witnesses of one step's FLOPs set against each other: hand formulas, the jaxpr, and XLA's cost analysis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, check_step
from qwenjax.errors import InputError
from qwenjax.ops import OPS
from roofline.compiler import class_of, count_product_flops, is_product, op_of, trace_sampling, trace_step
from roofline.compiler_cost import Tally, Work, lowered_cost, rounding_bound, tally_program
from roofline.formulas.attention import attention_flops
from roofline.formulas.compiled import (
    UNSCOPED,
    CompiledStep,
    Elementwise,
    Remat,
    elementwise_costs,
    padding_flops,
    product_flops,
    runs_of,
    sampling_costs,
)
from roofline.formulas.compiled_training import training_costs

if TYPE_CHECKING:
    from jax.stages import Traced

Kind = Literal["matmul", "attention", "grouped", "block_padding", "elementwise"]
REMATS: tuple[Remat, ...] = ("none", "full", "dots")
DTYPES = ("bfloat16", "float16", "float32")
_KINDS: dict[str, Kind] = {op.name: op.kind for op in OPS if op.kind in ("matmul", "attention", "grouped")}
_ORDER = {op.name: place for place, op in enumerate(OPS)}
_UNKNOWN = "unknown"  # the class of work that no formula covers


@dataclass(frozen=True)
class CheckRow:
    """One op's products, or its other work of one class, over all layers.

    `difference` is compiler - hand; `jaxpr_flops` is None for elementwise work, which a jaxpr doesn't price.
    `reported_flops` is what cost_analysis says as it stands, each loop's body once. `causal_flops` is what the mask
    keeps of an attention product.
    """

    op: str
    kind: Kind
    work_class: str | None
    hand_flops: int
    jaxpr_flops: int | None
    compiler_flops: int
    reported_flops: int | None
    difference: int
    hand_transcendentals: int = 0
    compiler_transcendentals: int = 0
    causal_flops: int | None = None

    @property
    def unexplained_flops(self) -> int:
        by_shape = 0 if self.jaxpr_flops is None else abs(self.jaxpr_flops - self.hand_flops)
        return max(abs(self.difference), by_shape)

    @property
    def unexplained_transcendentals(self) -> int:
        return abs(self.compiler_transcendentals - self.hand_transcendentals)


@dataclass(frozen=True)
class Remainder:
    """Work of a row that doesn't come out: where it stands in the program and what it is."""

    op: str
    work_class: str
    scope: str
    primitive: str
    flops: int
    transcendentals: int


@dataclass(frozen=True)
class StepCheck:
    """One step's rows, and the lowered program's own figure beside what the rows say that it should be.

    `program_flops` is a float32 sum; it may lie `rounding_bound` (a fraction) from `reported_flops`, the exact sum of
    the same parts.
    """

    step: CompiledStep
    rows: tuple[CheckRow, ...]
    remainders: tuple[Remainder, ...]
    program_flops: float
    reported_flops: int
    program_transcendentals: float
    reported_transcendentals: int
    rounding_bound: float

    @property
    def totals(self) -> dict[str, int]:
        """Sums of the rows. What the program holds beyond its parts, past rounding, is unexplained too."""
        missing = self._missing(self.program_flops, self.reported_flops)
        missed = self._missing(self.program_transcendentals, self.reported_transcendentals)
        return {
            "hand_flops": sum(row.hand_flops for row in self.rows),
            "compiler_flops": sum(row.compiler_flops for row in self.rows),
            "elementwise_flops": sum(row.compiler_flops for row in self.rows if row.kind == "elementwise"),
            "transcendentals": sum(row.compiler_transcendentals for row in self.rows),
            "unexplained_flops": missing + sum(row.unexplained_flops for row in self.rows),
            "unexplained_transcendentals": missed + sum(row.unexplained_transcendentals for row in self.rows),
        }

    @property
    def holds(self) -> bool:
        totals = self.totals
        return not totals["unexplained_flops"] and not totals["unexplained_transcendentals"]

    def _missing(self, program: float, parts: int) -> int:
        difference = abs(program - parts)
        return 0 if difference <= self.rounding_bound * parts else round(difference)


def step_of(
    config: ModelConfig, phase: str, batch: int, query_len: int, context: int, dtype: str, remat: str = "none"
) -> CompiledStep:
    """The step that these numbers mean, checked; a prefill whose context is longer is the last chunk of a prompt."""
    check_step(config, Step(batch, query_len, context))
    recomputed = next((policy for policy in REMATS if policy == remat), None)
    if recomputed is None:
        raise InputError("remat", remat, "is no known policy", f"Use one of {', '.join(REMATS)}.")
    if dtype not in DTYPES:
        raise InputError("dtype", dtype, "isn't one that the model runs in", f"Choose {', '.join(DTYPES)}.")
    if phase == "train":
        if query_len < 2:
            raise InputError("query_len", query_len, "has no next token to train on", "Use 2 or more.")
        return CompiledStep("train", batch, query_len, query_len, dtype, recomputed)
    if phase == "decode":
        return CompiledStep("decode", batch, 1, context, dtype)
    return CompiledStep("prefill" if context == query_len else "chunk", batch, query_len, context, dtype)


def check_program(config: ModelConfig, step: CompiledStep) -> StepCheck:
    """Sets the hand formulas of one step against its traced and lowered program; needs no weights and no accelerator.

    Products op by op as integers, all other work by op and class. Experts count their routed rows, and what fills their
    blocks is a row of its own, at most: blocks that no row needs are skipped at run time.
    """
    traced = trace_step(config, step)
    tally = tally_program(traced.jaxpr)
    works = {work: _place(step, work) for work in _works(tally)}
    rows = [
        *_product_rows(config, step, traced, tally),
        *_elementwise_rows(_hand(config, step), tally, works),
    ]
    return _checked(step, traced, tally, rows, works)


def _place(step: CompiledStep, work: Work) -> tuple[str, str]:
    """The op and class of work. Outside the ops training has the update, and inside its gradient the loss."""
    op = op_of(work.scope)
    if step.phase == "train" and op == UNSCOPED and not is_product(work):
        return (UNSCOPED, "gradient") if "jvp" in work.scope else ("optimizer", "optimizer")
    if "transpose" in work.scope and "int" not in work.dtype and (op == "embed" or work.primitive == "scatter-add"):
        return op, "gradient"
    backward = "gradient" if step.phase == "train" and "transpose" in work.scope else _UNKNOWN
    return op, class_of(op, work) or backward


def check_sampling(config: ModelConfig, step: CompiledStep) -> StepCheck:
    """The same for the choice of the likeliest token and its log-probability, on a step's logits."""
    traced = trace_sampling(config, step)
    tally = tally_program(traced.jaxpr)
    works = dict.fromkeys(_works(tally), ("sampling", "sampling"))
    rows = list(_elementwise_rows(sampling_costs(config, step), tally, works))
    return _checked(step, traced, tally, rows, works)


def _checked(
    step: CompiledStep, traced: Traced, tally: Tally, rows: list[CheckRow], works: dict[Work, tuple[str, str]]
) -> StepCheck:
    wrong = {(row.op, row.work_class) for row in rows if row.unexplained_flops or row.unexplained_transcendentals}
    remainders = tuple(
        Remainder(op, kind, work.scope, work.primitive, tally.flops[work], tally.transcendentals[work])
        for work, (op, kind) in works.items()
        if (op, None if is_product(work) else kind) in wrong
    )
    program, parts = lowered_cost(traced), tally.total_reported()
    return StepCheck(
        step,
        tuple(sorted(rows, key=lambda row: (row.kind == "elementwise", _ORDER.get(row.op, len(_ORDER))))),
        remainders,
        program["flops"],
        parts.flops,
        program["transcendentals"],
        parts.transcendentals,
        rounding_bound(tally),
    )


def _hand(config: ModelConfig, step: CompiledStep) -> tuple[Elementwise, ...]:
    return training_costs(config, step) if step.phase == "train" else elementwise_costs(config, step)


def _works(tally: Tally) -> Iterator[Work]:
    return iter(dict.fromkeys((*tally.flops, *tally.transcendentals)))


def _product_rows(config: ModelConfig, step: CompiledStep, traced: Traced, tally: Tally) -> Iterator[CheckRow]:
    """Products by op. In the grouped way what exceeds the routed rows is the filling of blocks."""
    hand, padding = product_flops(config, step), padding_flops(config, step)
    by_shape = count_product_flops(traced.jaxpr.jaxpr)
    compiled: Counter[str] = Counter()
    reported: Counter[str] = Counter()
    for work in filter(is_product, _works(tally)):
        compiled[op_of(work.scope)] += tally.flops[work]
        reported[op_of(work.scope)] += tally.reported[work]
    for op in dict.fromkeys((*hand, *by_shape, *compiled)):
        expected, extra = hand.get(op, 0), padding.get(op, 0)
        traced_flops, said = by_shape.get(op, 0), compiled[op]
        own = (min(traced_flops, expected), min(said, expected)) if extra else (traced_flops, said)
        causal = runs_of(op, config, step) * _causal_flops(config, step) if _KINDS.get(op) == "attention" else None
        yield CheckRow(
            op, _KINDS.get(op, "matmul"), None, expected, *own, reported[op], own[1] - expected, causal_flops=causal
        )
        if extra:
            traced_flops, said = traced_flops - own[0], said - own[1]
            yield CheckRow(op, "block_padding", None, extra, traced_flops, said, None, said - extra)


def _causal_flops(config: ModelConfig, step: CompiledStep) -> int:
    """One of the two attention products on the pairs that mask and windows keep."""
    return attention_flops(config, step.query_len, step.kv_len, batch=step.batch, attention="causal") // 2


def _elementwise_rows(
    hand: tuple[Elementwise, ...], tally: Tally, works: dict[Work, tuple[str, str]]
) -> Iterator[CheckRow]:
    expected: dict[tuple[str, str], Elementwise] = {(cost.op, cost.kind): cost for cost in hand}
    counts: dict[tuple[str, str], list[int]] = {place: [0, 0, 0] for place in expected}
    for work, place in works.items():
        if not is_product(work):
            sums = counts.setdefault(place, [0, 0, 0])
            sums[0] += tally.flops[work]
            sums[1] += tally.transcendentals[work]
            sums[2] += tally.reported[work]
    for (op, kind), (flops, transcendentals, reported) in counts.items():
        cost = expected.get((op, kind))
        by_hand, special = (cost.flops, cost.transcendentals) if cost else (0, 0)
        yield CheckRow(
            op, "elementwise", kind, by_hand, None, flops, reported, flops - by_hand, special, transcendentals
        )
