"""The commands that run something here: `calibrate` and `compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwenjax.command_line import CHECK_FAILED, say, say_notes, show
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.progress import shown
from roofline.cli_options import JsonOption, LayersOption, batch_sizes, check_figure, maybe_whole_number
from roofline.hardware import Hardware, calibration_path, load_hardware, write_hardware
from roofline.report.measured import calibration_record, calibration_text, compare_record, compare_text

if TYPE_CHECKING:
    from roofline.compare import Comparison

DEFAULT_MODEL = "Qwen3-0.6B"  # the smallest Qwen3: 2.4 GB in float32


def calibrate(
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="A TOML file instead of the one for `here`.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the device JAX sees: read bandwidth, matmul rates by size and dtype, launch overhead; and keep it.

    \b
    roofline calibrate
    roofline calibrate -o box.toml && roofline step Qwen3-0.6B --phase decode --batch 1 --hardware box.toml
    """
    path = calibration_path() if output is None else Path(output)
    chip = _calibrate(path)
    show(calibration_record(chip, path), calibration_text, as_json)


def compare(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A known model, a config.json or a folder.")
    ] = DEFAULT_MODEL,
    batches: Annotated[str, typer.Option("--batch", metavar="B|A,B,C", help="Batch sizes.")] = "1,4,8",
    prompts: Annotated[str, typer.Option("--prompt", metavar="T|A,B", help="Prompt lengths and contexts.")] = "128,512",
    layers: LayersOption = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="[default: float32 on a CPU, bfloat16 elsewhere]")
    ] = None,
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="HERE", help="A calibration of this machine.")
    ] = "here",
    recalibrate: Annotated[bool, typer.Option("--recalibrate", help="Measure the device again first.")] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Also draw it: .png, .svg or .pdf.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run jitted prefill and decode steps here and set them against the prediction and the roof.

    Weights are made up: only their sizes matter for time. The first run calibrates the device, which takes a minute or
    two.

    \b
    roofline compare --plot compare.png
    roofline compare Qwen2.5-7B --layers 4 --batch 1,2 --prompt 256
    """
    config = ModelConfig.from_hf(model)
    cut = maybe_whole_number("--layers", layers)
    sizes, lengths = batch_sizes(batches), batch_sizes(prompts, "--prompt")
    if plot is not None:
        check_figure(plot)
    say_notes(note for note in config.notes if note.kind == "warning")
    from roofline.compare import compare as run
    from roofline.compare import default_steps

    # What can't be run is refused before minutes of calibration.
    default_steps(config if cut is None else config.with_layers(cut), sizes, lengths)
    chip = _calibration(hardware, recalibrate)

    with shown("compare") as progress:
        result = run(
            config,
            chip,
            batches=sizes,
            prompts=lengths,
            layers=cut,
            dtype=dtype,
            progress=progress,
        )
    if plot is not None:
        _plot(result, chip, plot)
    show(compare_record(result, chip, plot), compare_text, as_json)
    above = [row for row in result.rows if max(row.mfu, row.mbu) > 1]
    if above:
        say(
            f"{len(above)} steps ran above the calibrated roof, which no step can: the calibration is too low. "
            "Run `roofline calibrate` on a quiet machine."
        )
        sys.exit(CHECK_FAILED)


def _calibrate(path: Path) -> Hardware:
    from roofline.calibrate import calibrate as run

    _check_writable(path)
    with shown("calibrate") as progress:
        chip = run(progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_hardware(chip, path)
    return chip


def _check_writable(path: Path) -> None:
    """Before two minutes of measuring: a path that can't take the result."""
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not parent.is_dir():
        raise InputError("--output", str(path), "can't be written there", "Name a TOML file in a folder.")


def _calibration(hardware: str, again: bool) -> Hardware:
    """The calibration to predict from; `here` is made when missing, or when it speaks of another device or JAX."""
    if hardware.lower() != "here":
        chip = load_hardware(hardware)
        if not chip.measured:
            raise InputError(
                "--hardware", hardware, "has no measured rates", "Use `here`, or a file of `roofline calibrate`."
            )
        return chip
    path = calibration_path()
    if not again and path.is_file():
        chip = load_hardware("here")
        if not _is_stale(chip):
            return chip
        say(f"{path} speaks of another device or JAX version: measuring again")
    return _calibrate(path)


def _is_stale(chip: Hardware) -> bool:
    from roofline.measure import environment

    now, then = environment(), chip.measured.get("environment", {})
    return any(now[key] != then.get(key) for key in ("device", "platform", "jaxlib"))


def _plot(result: Comparison, chip: Hardware, path: str) -> None:
    from roofline.plot_data import roof_of
    from roofline.plot_measured import plot_compare

    title = f"{result.model}, {result.layers} layers, {result.dtype} on {chip.name}"
    plot_compare(result.rows, result.ops, roof_of(chip, result.dtype), path, title, result.waterfalls)
