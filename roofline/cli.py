"""The `roofline` command. Each subcommand reads its options, calls the same functions as Python does, and prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from qwenjax.command_line import print_version, run, show
from qwenjax.config import ModelConfig
from qwenjax.known_models import known_model_names
from roofline import cli_check, cli_estimates, cli_kernels, cli_measure, cli_plot, cli_reconcile
from roofline.cli_options import DtypeOption, JsonOption, KvDtypeOption, known_facts
from roofline.count import DtypePolicy
from roofline.hardware import list_hardware, load_hardware
from roofline.report import (
    chip_record,
    chip_text,
    hardware_record,
    hardware_text,
    model_list_text,
    models_record,
    models_text,
)

app = typer.Typer(
    help="What a step of a Qwen decoder must cost on a GPU: parameters, FLOPs, bytes, memory and times.",
    epilog="`roofline COMMAND --help` has examples. The estimates need no GPU, no weights and no network.",
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


def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Names or paths; none lists the known models, several are compared."),
    ] = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Known models, all facts of one, or several side by side.

    \b
    roofline models
    roofline models Qwen2.5-7B
    roofline models Qwen2-57B-A14B Qwen3-30B-A3B
    """
    chosen = [(ModelConfig.from_hf(name), known_facts(name)) for name in names or known_model_names(runnable=False)]
    record = models_record(chosen, DtypePolicy.of(dtype or "bfloat16", kv_dtype))
    show(record, models_text if names else model_list_text, as_json)


def hardware(
    chip: Annotated[str | None, typer.Argument(metavar="ID", help="An id, a TOML file, or `here`.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Known chips, or every figure of one with its source.

    \b
    roofline hardware
    roofline hardware rtx-4090
    """
    if chip is None:
        show(hardware_record(list_hardware()), hardware_text, as_json)
    else:
        show(chip_record(load_hardware(chip)), chip_text, as_json)


# A command imports JAX, matplotlib and what no other needs inside its function, so that the others start fast.
app.command()(cli_estimates.params)
app.command()(cli_estimates.step)
app.command()(cli_estimates.predict)
app.command()(cli_estimates.memory)
app.command()(cli_estimates.experts)
app.command()(models)
app.command()(hardware)
app.command()(cli_kernels.kernels)
app.command()(cli_check.check)
app.command()(cli_reconcile.reconcile)
app.command()(cli_measure.calibrate)
app.command()(cli_measure.compare)
app.command()(cli_plot.plot)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line; args default to the process's own."""
    run(app, "roofline", args)
