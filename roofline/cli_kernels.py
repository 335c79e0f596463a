"""The command `kernels`: the real model's step, compiled for a GPU that isn't there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwenjax.command_line import say, say_notes, show
from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from roofline.cli_estimates import read_step
from roofline.cli_options import (
    BatchOption,
    DtypeOption,
    JsonOption,
    LayersOption,
    ModelArgument,
    PhaseOption,
    QueryLenOption,
    check_figure,
    maybe_whole_number,
    positive_number,
)
from roofline.hardware import Hardware, load_hardware

if TYPE_CHECKING:
    from roofline.kernels import KernelReport
    from roofline.waterfall import Waterfall


def kernels(
    model: ModelArgument,
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="HARDWARE", help="An NVIDIA GPU's id such as rtx-4090, or a TOML file.")
    ],
    phase: PhaseOption,
    batch: BatchOption = "1",
    query_len: QueryLenOption = None,
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="TOKENS", help="Tokens that each sequence attends; the cache holds as many."),
    ] = None,
    mesh: Annotated[
        str,
        typer.Option("--mesh", metavar="SxHxD", help="Slices, hosts and devices a host, which split heads and widths."),
    ] = "1x1x1",
    layers: LayersOption = None,
    dtype: DtypeOption = None,
    every: Annotated[bool, typer.Option("--all", help="List every kernel, not sums by op.")] = False,
    launch_us: Annotated[
        str | None,
        typer.Option(
            "--launch-us", metavar="US", help="Cost of launching one kernel, microseconds [default: unknown]."
        ),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Also draw it beside the other phase: .png, .svg, .pdf."),
    ] = None,
    hlo: Annotated[str | None, typer.Option("--hlo", metavar="FILE", help="Also keep the compiled program.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a step for a GPU that isn't there: its kernels, bytes and temporaries.

    XLA's CUDA compiler runs in a process of its own. It takes seconds, tens of seconds for many experts, and needs the
    extra `gpu-compile`, but no GPU and no driver.

    \b
    roofline kernels Qwen2.5-7B --hardware rtx-4090 --phase decode --batch 1 --context 2048
    roofline kernels Qwen3-8B --hardware h100-sxm --phase decode --mesh 1x1x8 --layers 2
    roofline kernels Qwen3-8B --hardware l4 --phase decode --context 1024 --launch-us 2 --plot kernels.png
    """
    from roofline.gpu_compile import CompileJob, check_compiler, check_job

    config = ModelConfig.from_hf(model)
    step, defaults = read_step(config, phase, batch, query_len, context)
    cut = maybe_whole_number("--layers", layers)
    run = config if cut is None else config.with_layers(cut)
    job = check_job(CompileJob(run, step, load_hardware(hardware), mesh, dtype or "bfloat16"))
    launch_s = _launch_s(job.hardware, launch_us)
    check_compiler()
    if hlo is not None:
        _check_writable(Path(hlo))
    if plot is not None:
        check_figure(plot)
    say_notes((*config.notes, *defaults))
    from roofline.kernels import compile_jobs, kernels_waterfall
    from roofline.report.kernels import kernels_record, kernels_text

    jobs = [job] if plot is None else [job, check_job(replace(job, step=_other_step(step)))]
    say(f"compiling for {job.hardware.id}{f' x {job.num_devices}' if job.num_devices > 1 else ''} ...")
    reports = compile_jobs(jobs)
    report, waterfalls = reports[0], [kernels_waterfall(made, launch_s) for made in reports]
    if hlo is not None:
        Path(hlo).write_text(report.compiled.hlo, encoding="utf-8")
    if plot is not None:
        _plot(reports, waterfalls, plot)
    notes = (*config.notes, *defaults)
    record = {**kernels_record(report, waterfalls[0], config.num_hidden_layers), "plot": plot, "notes": notes}
    show(record, partial(kernels_text, every=every), as_json)


def _launch_s(hardware: Hardware, microseconds: str | None) -> float | None:
    """What was given, or what `roofline calibrate` measured on that card; else nobody knows."""
    if microseconds is not None:
        return positive_number("--launch-us", microseconds, "2.5") * 1e-6
    measured = hardware.measured.get("launch_s")
    return None if measured is None else float(measured)


def _other_step(step: Step) -> Step:
    """The step to show beside this one: the prefill that fills a decode's context, the decode after a prefill."""
    return Step.prefill(1, step.kv_len) if step.phase == "decode" else Step.decode(step.batch, step.kv_len)


def _plot(reports: Sequence[KernelReport], waterfalls: Sequence[Waterfall], path: str) -> None:
    """Prefill left, decode right."""
    from roofline.plot_data import roof_of
    from roofline.plot_kernels import KernelPanel, plot_kernels

    panels = []
    for report, waterfall in zip(reports, waterfalls, strict=True):
        step = report.job.step
        size = f"{step.query_len} tokens" if step.phase == "prefill" else f"context {step.kv_len}"
        count = f"{report.totals.num_kernels} kernels"
        panels.append(KernelPanel(f"{step.phase}, batch {step.batch}, {size}: {count}", report.kernels, waterfall))
    panels.sort(key=lambda panel: panel.waterfall.phase, reverse=True)
    job = reports[0].job
    title = (
        f"{job.config.name or job.config.model_type}, {job.config.num_hidden_layers} layers, {job.dtype}, compiled for "
        f"{job.hardware.name}\nKernels of one device at their least times, with shares of the sum; not autotuned"
    )
    plot_kernels(panels, roof_of(job.hardware, job.dtype), path, title)


def _check_writable(path: Path) -> None:
    """Before the compiler runs: a path that can't take its text."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError("--hlo", str(path), "can't be written there", "Name a file in a folder that exists.")
