"""`qwenjax verify`: a checkpoint here against transformers, layer by layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from qwenjax.command_line import CHECK_FAILED, show
from qwenjax.errors import InputError
from qwenjax.progress import FEW_LINES_S, shown
from qwenjax.tables import Table


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint folder.")],
    tokens: Annotated[int, typer.Option(min=1, help="Made-up tokens to run through both.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of those tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Greatest error of each layer against transformers (an extra) in float32, and how often routers agree.

    \b
    qwenjax verify path/to/checkpoint
    """
    if not folder.is_dir():
        raise InputError("DIR", str(folder), "is no folder", "Name a checkpoint folder; hub ids are for `generate`.")
    from qwenjax import load
    from qwenjax.verification import verify as run

    with shown("load", FEW_LINES_S) as progress:
        config, params = load(folder, "float32", progress=progress)
    if tokens > config.context_length:
        raise InputError("--tokens", tokens, f"is beyond the model's {config.context_length} positions", "Use fewer.")
    result = run(config, params, folder, tokens, seed)
    record = {
        "model": config.name,
        "rows": [asdict(layer) for layer in result.layers],
        "num_tokens": tokens,
        "tolerance": result.tolerance,
        "holds": result.holds,
    }
    show(record, _text, as_json)
    if not result.holds:
        sys.exit(CHECK_FAILED)


def _text(record: dict[str, Any]) -> Iterator[str | Table]:
    logits = record["rows"][-1]["max_abs_difference"]
    verdict = "agrees with" if record["holds"] else "differs from"
    yield (
        f"{record['model']} {verdict} transformers: logits of {record['num_tokens']} tokens are off by {logits:.2e} "
        f"at most, {record['tolerance']:.2e} allowed"
    )
    rows = [
        [
            row["layer"],
            f"{row['max_abs_difference']:.2e}",
            f"{row['reference_std']:.3g}",
            "-" if row["routing_agreement"] is None else f"{100 * row['routing_agreement']:.1f} %",
            "-" if row["ties"] is None else str(row["ties"]),
        ]
        for row in record["rows"]
    ]
    columns = ("output of", "greatest error", "spread", "experts agree", "ties")
    yield Table("Layer by layer, float32", columns, rows, text=("output of",))
