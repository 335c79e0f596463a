"""Fits the engine profiles from the published measurements, and says how well they carry over to the unseen.

    python bench/fit.py [FOLDER] [-o FOLDER] [--check]

FOLDER (default ../shared/measurements) holds published.csv; profiles go to roofline/data/profiles. Grade C rows and the
H20 rows of the Qwen3 tables aren't fitted. The same rows give the same files, byte for byte.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from cases import read_cases
from fit_engine import Row, Stack, fit_engine, make_row
from fit_groups import FREE, GROUPS, Group
from fit_write import Held, in_sample, profile_text
from fold_keys import model_name, setting_fold, source_name
from score_targets import like_pairs

from qwenjax.errors import InputError
from roofline.count import count_params
from roofline.profile import Profile, choose_profile
from roofline.timing.case import Case
from roofline.timing.engine import Engine
from roofline.timing.scheduling import Scheduler

ROOT: Final = Path(__file__).parents[1]
ANY: Final = "any"  # the engine of the profile for engines without one


@dataclass(frozen=True)
class Fitted:
    """The profiles of one set of rows: each group's constants, each kin's over all its groups, and everyone's."""

    groups: dict[str, Engine]
    engines: dict[str, Engine]
    everyone: Engine
    counts: dict[str, int]  # rows by group


Rows = Mapping[str, Sequence[Row]]  # by group name


def read_groups(path: Path) -> tuple[dict[str, list[Row]], list[str]]:
    """Rows by group, and those that no profile is fitted on, with the reason."""
    cases, skipped = read_cases(path)
    rows: dict[str, list[Row]] = {group.name: [] for group in GROUPS}
    left = [f"{row.id}: {row.reason}" for row in skipped]
    for case in cases:
        group = next((group for group in GROUPS if group.takes(case)), None)
        if case.h20_qwen3_table or group is None:
            left.append(f"{case.id}: {'H20, reported apart' if case.h20_qwen3_table else 'no profile takes it'}")
            continue
        try:
            rows[group.name].append(make_row(case, group.scheduler))
        except InputError as error:
            left.append(f"{case.id}: {error}")
    return rows, left


def fit_all(rows: Rows, near: Fitted | None = None, touched: Iterable[str] = ()) -> Fitted:
    """Fits everyone's constants, then each engine's leaning to them, then each group's leaning to its engine's.

    `near` and `touched`: only the named groups have other rows than in `near`, the rest is taken from it.
    """
    names = set(touched) if near else set(rows)
    members = {kin: [g for g in GROUPS if g.kin == kin] for kin in dict.fromkeys(g.kin for g in GROUPS)}
    everyone = near.everyone if near else None
    if everyone is None or _loses_an_engine(rows, names):
        every = [row for group in rows.values() for row in group]
        everyone = fit_engine(Stack(every), FREE) if every else Engine({})
    engines, groups = dict(near.engines) if near else {}, dict(near.groups) if near else {}
    for engine, own in members.items():
        if not names & {group.name for group in own}:
            continue
        together = [row for group in own for row in rows[group.name]]
        shared = {name: at for name, at in own[0].usual.items() if all(g.usual.get(name) == at for g in own)}
        engines.pop(engine, None)
        if together:
            engines[engine] = fit_engine(Stack(together), FREE, shared)
        for group in own:
            groups.pop(group.name, None)
            if rows[group.name]:
                lean = engines[engine] if len(own) > 1 else None
                found = fit_engine(Stack(rows[group.name]), FREE, group.usual, lean)
                # Weight schemes that a group has no rows of are as in its kin.
                schemes = {**lean.schemes, **found.schemes} if lean else found.schemes
                groups[group.name] = Engine(found.constants, schemes)
    return Fitted(groups, engines, everyone, {name: len(group) for name, group in rows.items()})


def _loses_an_engine(rows: Rows, touched: Iterable[str]) -> bool:
    """Whether an engine of the touched groups has no rows left, so that everyone's constants stand in for its own."""
    left = {group.engine for group in GROUPS if rows[group.name]}
    return any(group.engine not in left for group in GROUPS if group.name in touched)


def as_profiles(fitted: Fitted) -> list[Profile]:
    """The fitted groups as profiles to choose from."""
    made = [
        Profile(
            g.name,
            "",
            "",
            g.engine,
            tuple(filter(None, g.versions)),
            g.hardware,
            engine.constants,
            engine.schemes,
            scheduler=g.scheduler,
            num_rows=fitted.counts[g.name],
        )
        for g in GROUPS
        if (engine := fitted.groups.get(g.name)) is not None
    ]
    everyone = fitted.everyone
    return [*made, Profile(ANY, "", "", ANY, (), (), everyone.constants, everyone.schemes, scheduler=Scheduler())]


def hold_out(rows: Rows, whole: Fitted, key: Callable[[Case], str]) -> list[Held]:
    """Each row predicted from constants that saw none of the rows with its key (model or source)."""
    held: list[Held] = []
    for value in sorted({key(row.case) for group in rows.values() for row in group}):
        kept = {name: [row for row in group if key(row.case) != value] for name, group in rows.items()}
        touched = [name for name, group in rows.items() if len(kept[name]) < len(group)]
        fitted = fit_all(kept, whole, touched)
        profiles = as_profiles(fitted)
        for name in touched:
            group = next(group for group in GROUPS if group.name == name)
            engine, nearest, chosen = _engine_for(group, fitted, profiles)
            out = [row for row in rows[name] if key(row.case) == value]
            errors = Stack(out).residuals(engine)
            held += [Held(row, float(error), nearest, chosen) for row, error in zip(out, errors, strict=True)]
    return held


def _engine_for(group: Group, fitted: Fitted, profiles: Sequence[Profile]) -> tuple[Engine, bool, str]:
    """The group's own constants, or those of the profile that the package would choose instead, and its name."""
    own = fitted.groups.get(group.name)
    if own is not None:
        return own, False, group.name
    version = next((text for text in group.versions if text), "")
    profile = choose_profile(profiles, group.engine, group.hardware[0], version).profile
    return profile.engine_constants, True, profile.name


TARGETS: Final[dict[str, tuple[Callable[[Row], bool], float, float]]] = {
    "single stream, 3B and more": (lambda row: row.plan.kind == "single" and _is_large(row.case), 4, 12),
    "batched throughput and TPOT": (lambda row: row.plan.kind == "batched", 8, 20),
    "prefill and TTFT, clean": (lambda row: row.plan.kind == "prefill" and not row.case.ttft_has_queueing, 8, 20),
    "tensor parallel": (lambda row: row.case.tp > 1, 6, 15),
    "quantised weights": (lambda row: row.scheme not in ("", "gguf-f16"), 8, 20),
    "mixture of experts": (lambda row: row.case.config.is_moe, 10, 25),
}


def _is_large(case: Case) -> bool:
    return count_params(case.config).num_params > 2.9e9


def table(whole: Rows, fitted: Fitted, held_out: Sequence[Sequence[Held]]) -> str:
    """Errors by target group: of rows that were fitted, and of rows held out by setting, model, source and GPU."""
    fit = in_sample(whole, fitted)
    lines = [f"{'median and 90th percentile of |error|, %':32}{'target':>12}"]
    lines[0] += "".join(f"{title:>16}" for title in ("own rows", "new setting", "new model", "new source", "new GPU"))
    sets = (fit, *held_out)
    lines[0] += f"{'like rows differ':>20}"
    rows = [row for group in whole.values() for row in group]
    for name, (wanted, median, tail) in TARGETS.items():
        cells = [_spread([held.error for held in part if wanted(held.row)]) for part in sets]
        scatter = _scatter([row.case for row in rows if wanted(row)])
        line = f"{name:32}{f'{median} / {tail}':>12}" + "".join(f"{cell:>16}" for cell in cells)
        lines.append(f"{line}{scatter:>20}")
    lines.append("")
    for group in GROUPS:
        cells = [_spread([h.error for h in part if group.takes(h.row.case)]) for part in sets]
        lines.append(f"{group.name:32}{len(whole[group.name]):>8} rows" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def _scatter(cases: Sequence[Case]) -> str:
    """How much figures of nearly one setting from two sources or versions differ, and how many pairs there are."""
    gaps = [np.log(one.measured / other.measured) for one, other in like_pairs(cases)]
    return f"{_spread(gaps)} ({len(gaps)})" if gaps else "-"


def _spread(errors: Sequence[float]) -> str:
    if not errors:
        return "-"
    percent = 100 * np.abs(np.expm1(np.array(errors)))
    return f"{np.median(percent):.1f} / {np.quantile(percent, 0.9):.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fit the engine profiles.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT.parent / "shared" / "measurements")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "roofline" / "data" / "profiles")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the files there differ")
    options = parser.parse_args(arguments)
    try:
        rows, left = read_groups(options.folder / "published.csv")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    fitted = fit_all(rows)
    by_setting = hold_out(rows, fitted, setting_fold)
    by_model = hold_out(rows, fitted, model_name)
    by_source = hold_out(rows, fitted, source_name)
    by_gpu = hold_out(rows, fitted, lambda case: case.hardware)
    print(table(rows, fitted, (by_setting, by_model, by_source, by_gpu)))
    print(f"\n{sum(map(len, rows.values()))} rows fitted, {len(left)} left out")
    texts = {f"{name}.toml": text for name, text in profile_text(rows, fitted, by_model, by_source, by_gpu).items()}
    if options.check:
        found = {path.name: path.read_text(encoding="utf-8") for path in options.output.glob("*.toml")}
        return 0 if found == texts else 1
    options.output.mkdir(parents=True, exist_ok=True)
    for path in options.output.glob("*.toml"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (options.output / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
