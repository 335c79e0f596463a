"""Least squares of an engine's constants: a profile's rows at once, with bounds and a leaning to the usual values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from roofline.hardware import load_hardware
from roofline.timing.case import Case
from roofline.timing.engine import CONSTANTS, SCHEME_KINDS, Engine, step_seconds, usual_of
from roofline.timing.scheduling import Scheduler
from roofline.timing.serving import Plan, case_terms, figure, plan_case, scheme_key
from roofline.timing.step import Terms

ERROR: Final = 0.05  # of a row that fits well, on log scale
TURN: Final = 2.0  # errors from which on a row pulls ever less
ROUNDS: Final = 25


@dataclass(frozen=True)
class Row:
    """A case with its plan and kernel seconds: all that the constants don't change."""

    case: Case
    plan: Plan
    terms: Terms
    scheme: str

    @property
    def measured_s(self) -> float:
        """The span that the figure stands for, seconds."""
        return self.case.measured / 1e3 if self.plan.tokens is None else self.plan.tokens / self.case.measured


def make_row(case: Case, scheduler: Scheduler) -> Row:
    """Plans a case; raises InputError where it can't be."""
    plan = plan_case(case, scheduler)
    return Row(case, plan, case_terms(case, plan, scheduler), scheme_key(case.weights, load_hardware(case.hardware)))


def _weight(case: Case) -> float:
    """How much a row counts in a fit; prompts of one token repeated are scored but tell nothing of others."""
    if case.repeated_token:
        return 0.0
    return 1.0 if case.grade == "A" else 0.7


class Stack:
    """Rows side by side, so that one call times all their steps."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        lengths = [len(row.plan.steps.times) for row in rows]
        self.starts = np.cumsum([0, *lengths[:-1]])
        self.times = np.concatenate([row.plan.steps.times for row in rows])
        values = {name: np.concatenate([row.terms.values[name] for row in rows]) for name in rows[0].terms.values}
        least = {name: np.concatenate([row.terms.least[name] for row in rows]) for name in rows[0].terms.least}
        self.terms = Terms(values, least)
        self.requests = np.array([row.plan.requests for row in rows])
        self.measured = np.array([row.measured_s for row in rows])
        self.schemes = tuple(sorted({row.scheme for row in rows if row.scheme}))
        names = np.array(["", *self.schemes])
        index = {name: place for place, name in enumerate(names)}
        self.scheme_of_step = np.repeat([index[row.scheme] for row in rows], lengths)
        self.weights = np.array([_weight(row.case) for row in rows])

    def seconds(self, engine: Engine) -> Any:
        """Seconds of each row's span on an engine."""
        factors = np.array([engine.scheme(name) for name in ("", *self.schemes)])[self.scheme_of_step]
        steps = step_seconds(self.terms, engine, *factors.T)
        return np.add.reduceat(steps * self.times, self.starts) + self.requests * engine.of("request_s")

    def residuals(self, engine: Engine) -> Any:
        """log(predicted / measured) time of each row."""
        return np.log(self.seconds(engine) / self.measured)


def fit_engine(
    stack: Stack,
    free: Sequence[str],
    usual: Mapping[str, tuple[float, float]] | None = None,
    near: Engine | None = None,
) -> Engine:
    """Constants `free` and those of the stack's weight schemes, by damped Gauss-Newton steps within their bounds.

    Squares of log errors, of which large ones count less (Cauchy), plus the squared distance of each constant from its
    usual value in units of its spread, so that what the rows don't tell stays usual. `usual` gives other values and
    spreads by constant, `near` an engine whose constants are the usual ones instead.
    """
    usual = usual or {}
    names = [*free, *(f"{scheme}/{kind}" for scheme in stack.schemes for kind in SCHEME_KINDS)]
    facts = [usual_of(*name.split("/")) if "/" in name else CONSTANTS[name] for name in names]
    low, high = (np.array([getattr(fact, side) for fact in facts]) for side in ("low", "high"))
    leaning = [usual.get(name, (fact.start, fact.spread)) for name, fact in zip(names, facts, strict=True)]
    if near is not None:
        leaning = [(_value(near, name), spread) for name, (_, spread) in zip(names, leaning, strict=True)]
    start, spread = np.array(leaning).T
    values, damping = start.copy(), 1e-3

    def cost(at: Any) -> tuple[float, Any]:
        errors = stack.residuals(_engine(names, at)) / ERROR
        pulls = TURN**2 * np.log1p((errors / TURN) ** 2)
        return float((stack.weights * pulls).sum() + (((at - start) / spread) ** 2).sum()), errors

    best, errors = cost(values)
    for _ in range(ROUNDS):
        slopes = _slopes(stack, names, values, errors, spread)
        pull = stack.weights / (1 + (errors / TURN) ** 2)
        matrix = slopes.T @ (slopes * pull[:, None]) + np.eye(len(names))
        gradient = slopes.T @ (pull * errors) + (values - start) / spread
        moved = False
        while damping < 1e6:
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -gradient)
            trial = np.clip(values + step * spread, low, high)
            reached, trial_errors = cost(trial)
            if reached < best - 1e-9:
                moved = best - reached > 1e-6 * best
                values, best, errors, damping = trial, reached, trial_errors, max(damping / 10, 1e-6)
                break
            damping *= 10
        if not moved:
            break
    return _engine(names, values)


def _slopes(stack: Stack, names: Sequence[str], values: Any, errors: Any, spread: Any) -> Any:
    """Change of each row's error with each constant, in units of the constant's spread."""
    columns = []
    for place in range(len(names)):
        moved = values.copy()
        moved[place] += 1e-4 * spread[place]
        columns.append((stack.residuals(_engine(names, moved)) / ERROR - errors) / 1e-4)
    return np.stack(columns, axis=1)


def _value(engine: Engine, name: str) -> float:
    if "/" not in name:
        return engine.of(name)
    scheme, kind = name.split("/")
    return engine.scheme(scheme)[SCHEME_KINDS.index(kind)]


def _engine(names: Sequence[str], values: Any) -> Engine:
    constants = {name: float(value) for name, value in zip(names, values, strict=True) if "/" not in name}
    schemes: dict[str, dict[str, float]] = {}
    for name, value in zip(names, values, strict=True):
        if "/" in name:
            scheme, kind = name.split("/")
            schemes.setdefault(scheme, {})[kind] = float(value)
    return Engine(constants, schemes)


def predicted(row: Row, engine: Engine) -> float:
    """The figure that an engine's constants expect, in the metric's unit."""
    return figure(row.plan, float(Stack([row]).seconds(engine)[0]))
