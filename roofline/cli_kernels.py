"""The command `kernels`: the real model's step, compiled for a GPU that isn't there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from qwenjax.command_line import say, say_notes, show
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from roofline.cli_estimates import read_step
from roofline.cli_options import BatchOption, DtypeOption, JsonOption, ModelArgument, maybe_whole_number
from roofline.gpu_compile import CompileJob, check_compiler, check_job
from roofline.hardware import load_hardware


def kernels(
    model: ModelArgument,
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="HARDWARE", help="An NVIDIA GPU's id such as rtx-4090, or a TOML file.")
    ],
    phase: Annotated[str, typer.Option("--phase", metavar="prefill|decode", help="The kind of step.")],
    batch: BatchOption = "1",
    query_len: Annotated[
        str | None,
        typer.Option("--query-len", metavar="TOKENS", help="New tokens of each sequence in a prefill; a decode has 1."),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="TOKENS", help="Tokens that each sequence attends; the cache holds as many."),
    ] = None,
    mesh: Annotated[
        str,
        typer.Option("--mesh", metavar="SxHxD", help="Slices, hosts and devices a host, which split heads and widths."),
    ] = "1x1x1",
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="N", help="Cut the model to its first N layers.")
    ] = None,
    dtype: DtypeOption = None,
    every: Annotated[bool, typer.Option("--all", help="List every kernel, not sums by op.")] = False,
    hlo: Annotated[str | None, typer.Option("--hlo", metavar="FILE", help="Also keep the compiled program.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a step for a GPU that isn't there: its kernels, bytes and temporaries.

    XLA's CUDA compiler runs in a process of its own. It takes seconds, tens of seconds for many experts, and needs the
    extra `gpu-compile`, but no GPU and no driver.

    \b
    roofline kernels Qwen2.5-7B --hardware rtx-4090 --phase decode --batch 1 --context 2048
    roofline kernels Qwen3-8B --hardware h100-sxm --phase decode --mesh 1x1x8 --layers 2
    """
    config = ModelConfig.from_hf(model)
    step, defaults = read_step(config, phase, batch, query_len, context)
    cut = maybe_whole_number("--layers", layers)
    run = config if cut is None else config.with_layers(cut)
    job = check_job(CompileJob(run, step, load_hardware(hardware), mesh, dtype or "bfloat16"))
    check_compiler()
    if hlo is not None:
        _check_writable(Path(hlo))
    say_notes((*config.notes, *defaults))
    from roofline.kernels import compile_jobs
    from roofline.report.kernels import kernels_record, kernels_text

    say(f"compiling for {job.hardware.id}{f' x {job.num_devices}' if job.num_devices > 1 else ''} ...")
    report = compile_jobs([job])[0]
    if hlo is not None:
        Path(hlo).write_text(report.compiled.hlo, encoding="utf-8")
    record = {**kernels_record(report, config.num_hidden_layers), "notes": (*config.notes, *defaults)}
    show(record, partial(kernels_text, every=every), as_json)


def _check_writable(path: Path) -> None:
    """Before the compiler runs: a path that can't take its text."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError("--hlo", str(path), "can't be written there", "Name a file in a folder that exists.")
