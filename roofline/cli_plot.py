"""The command that draws: rooflines of one or two chips with a model's prefill and decode on them."""

from __future__ import annotations

from typing import Annotated

import typer

from qwenjax.command_line import say_notes, write_out
from qwenjax.config import ModelConfig
from roofline.cli_options import BatchesOption, DtypeOption, KvDtypeOption, ModelArgument, batch_sizes, whole_number
from roofline.hardware import load_hardware


def plot(
    model: ModelArgument,
    hardware: Annotated[
        list[str], typer.Option("--hardware", metavar="HARDWARE", help="An id, a TOML file, or `here`; once or twice.")
    ],
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="A .png, .svg or .pdf file.")],
    batches: BatchesOption = "1,2,4,8,16,32,64,128,256",
    context: Annotated[str, typer.Option("--context", metavar="S", help="Tokens that a decode step attends.")] = "2048",
    prompt: Annotated[str, typer.Option("--prompt", metavar="T", help="Tokens of the prefill.")] = "1024",
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
) -> None:
    """Rooflines with prefill and decode, per op and against batch.

    \b
    roofline plot Qwen2.5-7B --hardware rtx-4090 -o qwen.png
    roofline plot Qwen3-30B-A3B --hardware h100-sxm --hardware rtx-4090 -o moe.svg
    """
    from roofline.plot import plot_roofline

    config = ModelConfig.from_hf(model)
    say_notes(note for note in config.notes if note.kind == "warning")
    plot_roofline(
        config,
        [load_hardware(name) for name in hardware],
        output,
        dtype=dtype or "bfloat16",
        kv_dtype=kv_dtype,
        batches=batch_sizes(batches),
        context=whole_number("--context", context),
        prompt=whole_number("--prompt", prompt),
    )
    write_out(f"{output}\n")
