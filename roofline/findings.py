"""One figure of an engine beside ours: the difference, what it most likely comes from, and whether it may be there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A term as the engine says it and as it is computed here, in one unit: B, tokens, FLOP, sequences or a fraction.

    kind `exact`: both must agree within `tolerance` (a fraction of the engine's figure, from how finely it was printed
    and what the definition leaves open), and `agrees` says whether they do. kind `estimate`: ours is a prediction, and
    a difference is no contradiction.
    """

    term: str
    unit: str
    engine: float | None
    ours: float | None
    cause: str
    source: str
    kind: str = "estimate"
    tolerance: float | None = None
    bounds: tuple[float, float] | None = None  # between which the engine's figure must lie, where ours is one of many

    @property
    def delta(self) -> float | None:
        """Ours less the engine's, in the unit."""
        return None if self.engine is None or self.ours is None else self.ours - self.engine

    @property
    def delta_fraction(self) -> float | None:
        return None if self.delta is None or not self.engine else self.delta / self.engine

    @property
    def agrees(self) -> bool | None:
        """Whether an exact figure is within its tolerance or bounds; None where nothing is claimed."""
        if self.bounds is not None and self.engine is not None:
            return self.bounds[0] <= self.engine <= self.bounds[1]
        if self.kind != "exact" or self.delta is None or self.engine is None or self.tolerance is None:
            return None
        return abs(self.delta) <= self.tolerance * abs(self.engine)


def all_agree(findings: Iterable[Finding]) -> bool:
    return all(finding.agrees is not False for finding in findings)
