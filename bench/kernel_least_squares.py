"""Least squares on logarithms that outliers don't lead, for constants within bounds; numpy only and deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

_SCALE: Final = 0.02  # residuals well above this count by their size, not their square
_STEP: Final = 0.02
_ROUNDS: Final = 40
_ENOUGH: Final = 1e-5  # a round that improves the mean residual by less is the last
_EDGE: Final = 0.01  # starting values keep this far from their bounds, of the range's logarithm


class Bounds(NamedTuple):
    low: float
    high: float


def fit_log(
    residuals: Callable[[Sequence[float]], Any],
    start: Sequence[float],
    bounds: Sequence[Bounds],
    weights: Any,
    tie: float = 0.0,
) -> list[float]:
    """The constants that make weighted |residuals| small, by damped Gauss-Newton with reweighting.

    Constants move through the logit of their place between the bounds' logarithms, so they never leave them. tie
    holds those that the data say nothing about near their start.
    """
    low, high = np.log([bound.low for bound in bounds]), np.log([bound.high for bound in bounds])
    place = np.clip((np.log(start) - low) / (high - low), _EDGE, 1 - _EDGE)
    first = np.log(place / (1 - place))
    weights = weights / weights.sum()

    def values(point: Any) -> list[float]:
        return [float(value) for value in np.exp(low + (high - low) / (1 + np.exp(-point)))]

    def cost(point: Any, found: Any) -> float:
        return float(weights @ np.sqrt(found**2 + _SCALE**2) + tie * ((point - first) ** 2).sum())

    point, damping = first.copy(), 1e-2
    found = residuals(values(point))
    best = cost(point, found)
    for _ in range(_ROUNDS):
        slopes = _slopes(lambda at: residuals(values(at)), point, found)
        pull = weights / np.sqrt(found**2 + _SCALE**2)
        matrix = slopes.T @ (slopes * pull[:, None]) + 2 * tie * np.eye(len(point))
        gradient = slopes.T @ (found * pull) + 2 * tie * (point - first)
        moved = _damped(matrix, gradient, point, damping, lambda at: _try(at, residuals, values, cost), best)
        if moved is None:
            break
        gain = best - moved[0]
        best, found, point, damping = moved
        if gain < _ENOUGH:
            break
    return values(point)


def _slopes(residuals: Callable[[Any], Any], point: Any, found: Any) -> Any:
    columns = []
    for index in range(len(point)):
        near = point.copy()
        near[index] += _STEP
        columns.append((residuals(near) - found) / _STEP)
    return np.stack(columns, axis=1)


def _try(point: Any, residuals: Callable[..., Any], values: Callable[..., Any], cost: Callable[..., float]) -> Any:
    found = residuals(values(point))
    return cost(point, found), found


def _damped(
    matrix: Any, gradient: Any, point: Any, damping: float, attempt: Callable[[Any], Any], best: float
) -> tuple[float, Any, Any, float] | None:
    """The first step that improves, with more and more damping; cost, residuals, point and the next damping."""
    scale = np.diag(matrix) + 1e-6 * np.trace(matrix) / len(point) + 1e-12
    for _ in range(6):
        step = -np.linalg.solve(matrix + damping * np.diag(scale), gradient)
        near = np.clip(point + np.clip(step, -1, 1), -6, 6)
        now, found = attempt(near)
        if now < best - 1e-7:
            return now, found, near, max(damping / 3, 1e-4)
        damping *= 4
    return None
