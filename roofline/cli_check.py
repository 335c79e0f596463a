"""The command that sets hand formulas, jaxpr and compiler against each other: check."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from qwenjax.command_line import CHECK_FAILED, say_notes, show
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.hf_keys import Note
from roofline.cli_options import BatchOption, JsonOption, ModelArgument, maybe_whole_number, whole_number

if TYPE_CHECKING:
    from roofline.formulas.compiled import CompiledStep

DEFAULT_LENGTH = 1024  # tokens
PHASES = ("prefill", "decode", "train")


def check(
    model: ModelArgument,
    phase: Annotated[
        str | None,
        typer.Option(
            "--phase", metavar="prefill|decode|train", help="The kind of step.  [default: prefill and decode]"
        ),
    ] = None,
    batch: BatchOption = "1",
    query_len: Annotated[
        str | None,
        typer.Option(
            "--query-len", metavar="TOKENS", help="New tokens of each sequence in a prefill or a training step."
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="TOKENS", help="Tokens that each sequence attends, the new ones included."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="Of weights and cache.")] = "bfloat16",
    remat: Annotated[
        str, typer.Option("--remat", metavar="none|full|dots", help="What a training step recomputes.")
    ] = "none",
    sampling: Annotated[
        bool, typer.Option("--sampling", help="Also the choice of the next token after each step.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Hand formulas against the jaxpr and XLA's cost analysis, op by op, as integers.

    Needs no weights and no accelerator, at any size of model. Exit status 1 unless every FLOP is explained.

    \b
    roofline check Qwen2.5-7B
    roofline check Qwen3-235B-A22B --phase decode --batch 8 --context 4096
    roofline check Qwen3-0.6B --phase prefill --query-len 256 --context 2048 --json
    """
    from roofline.check import check_program, check_sampling, step_of
    from roofline.report.check import check_record, check_text

    config = _unquantised(ModelConfig.from_hf(model))
    if phase is not None and phase not in PHASES:
        raise InputError("--phase", phase, "is not a kind of step", f"Use {', '.join(PHASES)}.")
    sequences = whole_number("--batch", batch)
    new, attended = maybe_whole_number("--query-len", query_len), maybe_whole_number("--context", context)
    steps: list[CompiledStep] = []
    for kind in ("prefill", "decode") if phase is None else (phase,):
        lengths = _lengths(config, kind, phase is None, new, attended)
        steps.append(step_of(config, kind, sequences, *lengths, dtype, remat))
    say_notes(note for note in config.notes if note.kind == "warning")
    checks = [check_program(config, step) for step in steps]
    if sampling:
        checks += [check_sampling(config, step) for step in steps if step.phase != "train"]
    record = check_record(config, checks)
    show(record, check_text, as_json)
    if not record["holds"]:
        raise typer.Exit(CHECK_FAILED)


def _unquantised(config: ModelConfig) -> ModelConfig:
    """The same architecture with plain weights: quantised ones don't run here, and change no product's FLOPs."""
    if config.quantization is None:
        return config
    text = f"{config.quantization.method} weights don't run here: the architecture is checked with plain ones"
    note = Note("warning", "quantization_config", text)
    return replace(config, quantization=None, notes=(*config.notes, note))


def _lengths(
    config: ModelConfig, phase: str, both: bool, query_len: int | None, context: int | None
) -> tuple[int, int]:
    """New and attended tokens of one kind of step; with both kinds a query length is the prefill's."""
    default = min(DEFAULT_LENGTH, config.context_length)
    if phase == "decode":
        if query_len not in (None, 1) and not both:
            remedy = "For a chunk of several, use --phase prefill with --context."
            raise InputError("--query-len", query_len, "but a decode step takes one token of each sequence", remedy)
        return 1, context if context is not None else default
    if phase == "train" and context not in (None, query_len):
        raise InputError("--context", context, "but a training step attends its own tokens", "Use --query-len.")
    if query_len is None:
        query_len = context if context is not None else default
    return query_len, context if context is not None else query_len
