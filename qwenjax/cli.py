"""The `qwenjax` command. Its subcommands import JAX inside their functions, so that reading a config starts fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from qwenjax.cli_init import init
from qwenjax.cli_text import generate, score
from qwenjax.cli_train import train
from qwenjax.cli_verify import verify
from qwenjax.command_line import print_version, run, show
from qwenjax.inspection import inspect_model, inspection_text

app = typer.Typer(
    help="Qwen decoders in JAX, from Hugging Face configs and checkpoints.",
    epilog="`qwenjax COMMAND --help` has examples.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the command itself."""


def inspect(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A known model's name, a config.json, or a checkpoint folder."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The architecture as read, what was taken or ignored, the shapes, and what a folder's files hold.

    \b
    qwenjax inspect Qwen3-30B-A3B
    qwenjax inspect path/to/config.json --json
    """
    show(inspect_model(model), inspection_text, as_json)


app.command()(inspect)
app.command()(init)
app.command()(generate)
app.command()(score)
app.command()(verify)
app.command()(train)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line; args default to the process's own."""
    run(app, "qwenjax", args)
