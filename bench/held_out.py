"""Rows predicted by profiles that saw none like them, with intervals that didn't see them either.

A fold is the rows of one model, source or GPU. Its predictions are `fit.hold_out`'s; its intervals are made as
`fit_write` makes them, from the held-out errors of all other folds. The fits behind those errors had seen the fold, and
those of the profiles' own rows had too: to fit all again without it for each would change them little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from fit import ANY, Fitted, Rows, fit_all, hold_out, read_groups
from fit_groups import GROUPS
from fit_write import Held, any_intervals, group_intervals, in_sample
from fold_keys import model_name, setting_fold, source_name
from scored import Scored

from roofline.profile import KINDS, Choice, Profile
from roofline.timing.case import Case
from roofline.timing.serving import figures

KEYS: Final[Mapping[str, Callable[[Case], str]]] = {
    "setting": setting_fold,
    "model": model_name,
    "source": source_name,
    "gpu": lambda case: case.hardware,
}
ELSEWHERE: Final = "elsewhere"
_OF_INTERVALS: Final = ("model", "source", "gpu")  # folds whose errors intervals are made from
Interval = tuple[float, float]


def score_held_out(path: Path, by: str) -> dict[str, list[Scored]]:
    """The rows of a file by kind of figure, `elsewhere` for those without a profile of their own; skipped under ""."""
    rows, left = read_groups(path)
    fitted = fit_all(rows)
    errors = {name: hold_out(rows, fitted, KEYS[name]) for name in dict.fromkeys((by, *_OF_INTERVALS))}
    scored = scored_folds(rows, fitted, errors, by)
    skipped = [line.partition(": ") for line in left]
    return {**scored, "": [Scored(name, skipped=reason) for name, _, reason in skipped]}


def scored_folds(rows: Rows, fitted: Fitted, errors: Mapping[str, Sequence[Held]], by: str) -> dict[str, list[Scored]]:
    """Held-out rows by kind of figure, each with the interval that the other folds' errors make."""
    key, seen = KEYS[by], in_sample(rows, fitted)
    found: dict[str, list[Scored]] = {kind: [] for kind in (*KINDS, ELSEWHERE)}
    for value in sorted({key(held.row.case) for held in errors[by]}):
        fold = [held for held in errors[by] if key(held.row.case) == value]
        others = {name: [held for held in of if key(held.row.case) != value] for name, of in errors.items()}
        own = [held for held in seen if key(held.row.case) != value]
        made = {name: intervals_of(name, own, others) for name in {held.profile for held in fold}}
        for held in fold:
            kind = held.row.plan.kind
            found[ELSEWHERE if held.nearest else kind].append(_scored(held, made[held.profile]))
    return found


def intervals_of(profile: str, seen: Sequence[Held], errors: Mapping[str, Sequence[Held]]) -> dict[str, Interval]:
    """What `fit_write` would write as a profile's intervals, had it only these rows."""
    if profile == ANY:
        return any_intervals(errors["source"])
    group = next(group for group in GROUPS if group.name == profile)
    own = [held for held in seen if group.takes(held.row.case)]
    return group_intervals(group, own, errors["model"], errors["gpu"])


def _scored(held: Held, intervals: Mapping[str, Interval]) -> Scored:
    row, usual = held.row, {kind: intervals[kind] for kind in KINDS}
    profile = Profile(held.profile, "", "", intervals=usual, elsewhere=intervals[ELSEWHERE])
    interval = Choice(profile, held.nearest, "").interval(row.plan.kind)
    expected, low, high = figures(row.plan, row.terms, row.measured_s * math.exp(held.error), interval)
    origin = f"profile {held.profile} without it" + (", the nearest" if held.nearest else "")
    return Scored(row.case.id, row.case, expected, low, high, provenance=origin)
