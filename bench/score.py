"""Scores predictions against measurement files: `python bench/score.py FILE.csv [FILE.csv ...] [--json]`.

Prints the error by target, kind, metric, engine, GPU, model size, batch, context and source: rows, median and 90th
percentile of |error|, share inside the interval; the worst rows with the likely reason; and what was skipped, by
reason. Grade C is left out, the H20 rows of the Qwen3 tables are a group apart. `--json` prints one object: rows
[{id, predicted, low, high, measured, error, skipped}], groups [{by, key, n, median_abs_error, p90_abs_error,
inside_interval}], total, targets. Profiles that were fitted on a file's own rows look better on it than on others:
`--held-out model` (or source, gpu, setting) predicts each row of one file from profiles fitted on the file without the
rows of its model, and says how many fall inside intervals that didn't see them either, by kind of figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cases import read_rows
from error_groups import Group
from held_out import KEYS, score_held_out
from score_predict import predict_rows, roof_share
from score_reasons import reasons_of
from score_targets import Reached, targets_reached
from scored import APART, Scored, group, groups_of, total_of

from qwenjax.errors import InputError
from qwenjax.tables import Table, render
from roofline.timing.case import Case

_WORST = 20
_NEAR_ROOF = 0.85


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the files, predicts their rows and prints the score; 2 where a file can't be used."""
    parser = argparse.ArgumentParser(description="Score predictions against measurement files.")
    parser.add_argument("files", nargs="+", metavar="CSV", help="files with the columns of published.csv")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--worst", type=int, default=_WORST, metavar="N", help="how many of the worst rows to print")
    parser.add_argument("--held-out", choices=KEYS, help="predict rows from profiles that saw none like them")
    options = parser.parse_args(argv)
    if options.held_out and len(options.files) > 1:
        parser.error("--held-out fits one file: name one")
    try:
        kinds = score_held_out(Path(options.files[0]), options.held_out) if options.held_out else {}
        rows = [row for scored in kinds.values() for row in scored] if kinds else score_files(options.files)
    except InputError as problem:
        print(problem, file=sys.stderr)
        return 2
    covered = [group("figure", kind, of_kind) for kind, of_kind in kinds.items() if kind]
    if options.json:
        shares = {"held_out": [one.record() for one in covered]} if covered else {}
        print(json.dumps({**record(rows), **shares}))
        return 0
    if covered:
        title = f"Held out by {options.held_out}: figures inside intervals of 80 % that didn't see them"
        print(render([_groups_table("figure", covered, total_of(rows), title)]), end="")
    print(text(rows, options.worst), end="")
    return 0


def score_files(files: Sequence[str | Path]) -> list[Scored]:
    """Every row of every file, predicted or skipped with its reason."""
    return [row for file in files for row in predict_rows(read_rows(file))]


def record(rows: Sequence[Scored]) -> dict[str, Any]:
    """The score as the JSON object that `--json` prints."""
    return {
        "rows": [row_record(row) for row in rows],
        "groups": [one.record() for one in groups_of(rows)],
        "total": total_of(rows).record(),
        "targets": [one.record() for one in targets_reached(rows)],
        "skipped": dict(Counter(row.skipped for row in rows if row.skipped).most_common()),
    }


def row_record(row: Scored) -> dict[str, Any]:
    """One row: its figures in the row's unit, or the reason why it was skipped."""
    names = ("id", "predicted", "low", "high", "measured", "error", "skipped")
    return {name: getattr(row, name) for name in names}


def text(rows: Sequence[Scored], worst: int = _WORST) -> str:
    """The score as tables."""
    skipped = Counter(row.skipped for row in rows if row.skipped)
    total = total_of(rows)
    blocks: list[str | Table] = [
        f"{len(rows)} rows: {total.n} scored, {sum(row.is_apart for row in rows if row.error is not None)} apart "
        f"({APART}), {sum(skipped.values())} skipped"
    ]
    blocks.append(_targets_table(targets_reached(rows)))
    groups = groups_of(rows)
    dimensions = dict.fromkeys(one.by for one in groups)
    blocks += [_groups_table(by, [one for one in groups if one.by == by], total) for by in dimensions]
    blocks.append(_worst_table(rows, worst))
    blocks.append(Table("Skipped rows by reason", ("rows", "reason"), _counted(skipped), text=("reason",)))
    return render(blocks)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _figures(one: Group) -> tuple[str, ...]:
    shares = (one.median_abs_error, one.p90_abs_error, one.inside_interval)
    return (str(one.n), *map(_percent, shares))


def _groups_table(by: str, groups: Sequence[Group], total: Group, title: str = "") -> Table:
    columns = (by, "n", "median |error|", "p90 |error|", "inside interval")
    lines = [(one.key, *_figures(one)) for one in groups]
    return Table(title or f"By {by}", columns, [*lines, ("all", *_figures(total))], text=(by,), totals=True)


def _targets_table(targets: Sequence[Reached]) -> Table:
    columns = ("target", "n", "median", "to reach", "p90", "to reach ", "reached",
               "rows' own scatter", "pairs", "across versions", "pairs ")  # fmt: skip
    lines = [
        (
            one.name, str(one.n), _percent(one.median_abs_error), _percent(one.median_target),
            _percent(one.p90_abs_error), _percent(one.p90_target),
            "-" if one.reached is None else "yes" if one.reached else "no", _percent(one.scatter), str(one.pairs),
            _percent(one.scatter_versions), str(one.pairs_versions),
        )
        for one in targets
    ]  # fmt: skip
    return Table("Targets (a row counts for each that its words fit)", columns, lines, text=("target",))


def _worst_table(rows: Sequence[Scored], count: int) -> Table:
    scored = [row for row in rows if row.error is not None and not row.is_apart]
    scored.sort(key=lambda row: -abs(row.error or 0.0))
    lines = [_worst_line(row) for row in scored[:count]]
    columns = ("id", "error", "predicted", "measured", "row", "likely reason")
    return Table("Worst rows", columns, lines, text=("id", "row", "likely reason"))


def _worst_line(row: Scored) -> tuple[str, ...]:
    asked = row.asked
    assert asked is not None  # a row with an error has one
    share = roof_share(asked) if isinstance(asked, Case) else None
    near = (f"at {share:.0%} of the roof, more than such work reaches",) if share and share > _NEAR_ROOF else ()
    what = f"{getattr(asked, 'engine', '') or 'kernel'} {asked.hardware} {getattr(asked, 'model', '')} {asked.metric}"
    reason = "; ".join((*near, *reasons_of(row))[:2]) or "-"
    return (row.id, f"{row.error:+.0%}", f"{row.predicted:.4g}", f"{row.measured:.4g}", what, reason)


def _counted(skipped: Counter[str]) -> list[tuple[str, str]]:
    return [(str(number), reason) for reason, number in skipped.most_common()]


if __name__ == "__main__":
    sys.exit(main())
