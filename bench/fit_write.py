"""A fitted profile as a TOML text: constants with unit, bounds and meaning, rows by source, errors and intervals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from fit_engine import Row, Stack
from fit_groups import GROUPS, Group
from fold_keys import model_name

from roofline.profile import KINDS
from roofline.timing.engine import CONSTANTS, Engine
from roofline.timing.scheduling import Scheduler

if TYPE_CHECKING:
    from fit import Fitted

DIGITS: Final = 4
ENOUGH: Final = 8  # held-out rows of a kind, from which on a profile has an interval of its own
ENOUGH_MODELS: Final = 4  # the same, of different models
UNKNOWN: Final = (0.6, 1.8)  # where no row of the kind was held out
COVERED: Final = 0.8
LEAST: Final = 0.03  # half width of an interval on log scale, whatever the rows say


class Held(NamedTuple):
    """A row's error when it, and all rows like it, were held out: log of predicted over measured time."""

    row: Row
    error: float
    nearest: bool
    profile: str = ""  # whose constants predicted it


def profile_text(
    rows: Mapping[str, Sequence[Row]],
    fitted: Fitted,
    by_model: Sequence[Held],
    by_source: Sequence[Held],
    by_gpu: Sequence[Held],
) -> dict[str, str]:
    """Every profile's file by its name."""
    texts = {}
    for group in GROUPS:
        if not rows[group.name]:
            continue
        engine = fitted.groups[group.name]
        own = [held for held in by_model if group.takes(held.row.case)]
        seen = [held for held in in_sample(rows, fitted) if group.takes(held.row.case)]
        sources = [held for held in by_source if group.takes(held.row.case)]
        intervals = group_intervals(group, seen, by_model, by_gpu)
        texts[group.name] = _text(group, engine, rows[group.name], intervals, own, sources)
    everyone = Group("any", (), "a100", Scheduler(), "an engine with continuous batching")
    everything = [row for group in rows.values() for row in group]
    wide = any_intervals(by_source)
    texts["any"] = _text(everyone, fitted.everyone, everything, wide, by_model, by_source, name="any", hardware=())
    return texts


def group_intervals(
    group: Group, seen: Sequence[Held], by_model: Sequence[Held], by_gpu: Sequence[Held]
) -> dict[str, tuple[float, float]]:
    """Intervals by kind of figure of a group's profile, from its rows' own errors and from held-out ones."""
    away = [held for held in by_gpu if held.nearest and held.row.case.engine == group.engine]
    everywhere = [held for held in by_gpu if held.nearest]
    same = [held for held in by_model if held.row.case.engine == group.engine and not held.nearest]
    unseen = [held for held in by_model if group.takes(held.row.case) and not held.nearest]
    intervals = {
        kind: _wider(_unseen(_kind(unseen, kind), _kind(same, kind), _kind(by_model, kind)), _own(_kind(seen, kind)))
        for kind in KINDS
    }
    return {**intervals, "elsewhere": _unseen(away, everywhere)}


def any_intervals(by_source: Sequence[Held]) -> dict[str, tuple[float, float]]:
    """Intervals of the profile for engines without one."""
    return {kind: _unseen(_kind(by_source, kind)) for kind in (*KINDS, "elsewhere")}


def in_sample(rows: Mapping[str, Sequence[Row]], fitted: Fitted) -> list[Held]:
    """Every row's error under the constants that were fitted on it."""
    return [
        Held(row, float(error), False)
        for name, group in rows.items()
        if group
        for row, error in zip(group, Stack(group).residuals(fitted.groups[name]), strict=True)
    ]


def _wider(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return min(first[0], second[0]), max(first[1], second[1])


def _kind(held: Sequence[Held], kind: str) -> list[Held]:
    return [item for item in held if item.row.plan.kind == kind or kind == "elsewhere"]


def _unseen(*choices: Sequence[Held]) -> tuple[float, float]:
    """Factors on the predicted time that hold COVERED of the first set with enough held-out rows and models.

    Rows of one model err together, so what a set tells of its tails goes by the number of its models: the interval is
    that of a sample of so few, less one of them that set its place and its width each.
    """
    enough = (held for held in choices if len(held) >= ENOUGH and _models(held) >= ENOUGH_MODELS)
    held = next(enough, choices[-1])
    models = _models(held)
    return _factors(held, max(0, models - 2) / (models + 1))


def _own(held: Sequence[Held]) -> tuple[float, float]:
    """The same of rows that a profile was fitted on."""
    return _factors(held, len(held) / (len(held) + 1)) if held else (1.0, 1.0)


def _factors(held: Sequence[Held], known: float) -> tuple[float, float]:
    """Errors are log(predicted / measured), so a factor on the prediction is what takes the error away."""
    if not held:
        return UNKNOWN
    tail = (1 - COVERED) / 2 * known
    low, high = np.quantile([-item.error for item in held], [tail, 1 - tail])
    return float(np.exp(min(low, -LEAST))), float(np.exp(max(high, LEAST)))


def _models(held: Sequence[Held]) -> int:
    return len({model_name(item.row.case) for item in held})


def _text(
    group: Group,
    engine: Engine,
    rows: Sequence[Row],
    intervals: Mapping[str, tuple[float, float]],
    by_model: Sequence[Held],
    by_source: Sequence[Held],
    name: str = "",
    hardware: Sequence[str] | None = None,
) -> str:
    name = name or group.name
    sources = Counter(_repository(row) for row in rows)
    listed = ", ".join(f"{source} ({count})" for source, count in sorted(sources.items()))
    grades = Counter(row.case.grade for row in rows)
    own = Stack(rows).residuals(engine)
    validation = (
        f"median and 90th percentile of |error|: {_percent(own)} on its own rows, "
        f"{_percent([held.error for held in by_model])} on models it hadn't seen, "
        f"{_percent([held.error for held in by_source])} on sources it hadn't seen"
    )
    lines = [
        "# Written by bench/fit.py; edit the groups there instead.",
        f"name = {json.dumps(name)}",
        f"engine = {json.dumps(group.engine)}",
        f"versions = {json.dumps([text for text in group.versions if text])}",
        f"hardware = {json.dumps(list(group.hardware if hardware is None else hardware))}",
        f"source = {json.dumps(f'{len(rows)} published measurements: {listed}')}",
        f"validation = {json.dumps(validation)}",
        "",
        "[rows]",
        f"grade_a = {grades['A']}",
        f"grade_b = {grades['B']}",
        f"models = {json.dumps(sorted({row.case.model for row in rows}))}",
        f"weights = {json.dumps(sorted({row.case.weights for row in rows}))}",
        "",
        "[rows.by_source]",
        *(f"{json.dumps(source)} = {count}" for source, count in sorted(sources.items())),
        "",
        "# Factors on the expected time that held 4 of 5 held-out rows, by kind of figure; elsewhere: on other GPUs.",
        "[intervals]",
        *(f"{kind} = [{low:.{DIGITS}g}, {high:.{DIGITS}g}]" for kind, (low, high) in intervals.items()),
        "",
        "[scheduler]",
        f"source = {json.dumps(group.scheduler_source)}",
        *_scheduler(group.scheduler),
        "",
        "[constants]",
        *(_constant(key, value, key) for key, value in engine.constants.items()),
    ]
    for scheme, kinds in sorted(engine.schemes.items()):
        lines += ["", f"[schemes.{json.dumps(scheme)}]"]
        lines += [_constant(kind, value, f"scheme_{kind}") for kind, value in kinds.items()]
    return "\n".join(lines) + "\n"


def _repository(row: Row) -> str:
    return row.case.source.split("@")[0].split(" (")[0]


def _constant(key: str, value: float, name: str) -> str:
    facts = CONSTANTS[name]
    text = f"{value:.{DIGITS}g}"
    number = text if any(mark in text for mark in ".e") else f"{text}.0"
    return (
        f'{key} = {{ value = {number}, unit = "{facts.unit}", bounds = [{facts.low:g}, {facts.high:g}], '
        f"meaning = {json.dumps(facts.meaning)} }}"
    )


def _scheduler(scheduler: Scheduler) -> list[str]:
    def text(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else f"{value}"

    return [f"{key} = {text(value)}" for key, value in vars(scheduler).items()]


def _percent(errors: Any) -> str:
    if len(errors) == 0:
        return "none held out"
    share = 100 * np.abs(np.expm1(np.asarray(errors)))
    return f"{np.median(share):.1f} and {np.quantile(share, 0.9):.1f} %"
