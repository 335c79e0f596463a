"""The arithmetic of errors in groups, which every score here prints and records in one form."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Group:
    """Errors of some rows: their number, median and 90th percentile of |error|, and the share inside the interval."""

    by: str
    key: str
    n: int
    median_abs_error: float | None
    p90_abs_error: float | None
    inside_interval: float | None

    def record(self) -> dict[str, Any]:
        return dict(vars(self))


def group_of(by: str, key: str, errors: Sequence[float], inside: Sequence[bool] = ()) -> Group:
    """A group of rows with these errors (predicted over measured, less one); `inside` for those with an interval."""
    sizes = [abs(error) for error in errors]
    return Group(
        by,
        key,
        len(sizes),
        statistics.median(sizes) if sizes else None,
        percentile(sizes, 0.9) if sizes else None,
        sum(inside) / len(inside) if inside else None,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies, with straight lines between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
