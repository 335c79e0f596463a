"""Figures: the points are right, every text is clear of the others, and files appear whole or not at all."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
from figure_texts import check_labels, check_page, is_axes, overlaps, shown_texts

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from roofline.hardware import Figure as Number
from roofline.hardware import Hardware, load_hardware
from roofline.plot import plot_compare, plot_roofline, roofline_figure
from roofline.plot_data import Point, Roof, merge_points, roof_of, roofline_points
from roofline.plot_labels import Box, Label, Mark, along, around, place
from roofline.plot_measured import compare_figure
from roofline.predict import predict_step

pytest.importorskip("matplotlib", reason="figures need the `plot` extra")
ROOT = Path(__file__).resolve().parent.parent


def config(name: str) -> ModelConfig:
    return ModelConfig.from_hf(name)


def processor() -> Hardware:
    """A small machine whose ridge lies far to the left of a GPU's."""
    numbers = {
        "peak_bandwidth_bytes_per_s": Number(30e9, "B/s", "measured here", "a test"),
        "memory_bytes": Number(16 * 2**30, "B", "measured here", "a test"),
        "peak_flops_per_s.bfloat16": Number(250e9, "FLOP/s", "measured here", "a test"),
    }
    return Hardware("cpu", "A processor", "nobody", "none", numbers)


def chips(*names: str) -> list[Hardware]:
    return [processor() if name == "cpu" else load_hardware(name) for name in names]


# The points


def test_points_of_a_7b_model_on_a_4090_are_the_hand_computed_ones() -> None:
    (chip,) = roofline_points(config("Qwen2.5-7B"), chips("rtx-4090"), batches=(1, 64, 128), context=2048, prompt=1024)
    assert chip.roof == Roof("rtx-4090", 165.2e12, 1008e9, 887e9)
    assert chip.roof.ridge_intensity == pytest.approx(163.9, abs=0.05)
    # 15.23 GB of weights and 57344 B of cache a token: 24 GiB hold 64 sequences of 2048 tokens, but not 128.
    assert chip.decode_batch == 64
    assert [step.fits for step in chip.decode_steps] == [True, True, False]
    matmul, attention = chip.decode_ops
    assert matmul.ops == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "unembed")
    assert matmul.intensity == pytest.approx(64, rel=1e-3)  # 2 FLOPs for each weight of 2 bytes, 64 times
    assert attention.ops == ("attention",)
    assert attention.intensity == pytest.approx(7)  # 28 query heads share 4 cached ones
    assert chip.prefill_step.time_s == pytest.approx(83.3e-3, rel=1e-3)
    assert chip.prefill_ops[0].ops == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    assert chip.prefill_ops[-1].ops == ("unembed",)  # of the last position alone
    assert chip.prefill_ops[-1].intensity == 1


@pytest.mark.parametrize("model", ["Qwen2.5-0.5B", "Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B"])
def test_ops_lie_on_the_roof_and_steps_under_it(model: str) -> None:
    for chip in roofline_points(config(model), chips("h100-sxm", "cpu"), batches=(4, 1, 256, 4)):
        assert chip.batches == (1, 4, 256)
        for op in (*chip.prefill_ops, *chip.decode_ops):
            assert op.flops_per_s == pytest.approx(chip.roof.attainable_flops_per_s(op.intensity), rel=0.06)
        for step in (chip.prefill_step, *chip.decode_steps):
            assert step.flops_per_s <= chip.roof.attainable_flops_per_s(step.intensity) * (1 + 1e-9)
        for ops in (chip.prefill_ops, chip.decode_ops):
            # What is missing are the ops without matrix products, which move few bytes.
            assert 0.97 < sum(op.time_fraction for op in ops) <= 1 + 1e-9


def test_a_point_adds_up_what_it_stands_for() -> None:
    (chip,) = roofline_points(config("Qwen3-30B-A3B"), chips("h200"), batches=(8,), context=512)
    step = predict_step(config("Qwen3-30B-A3B"), Step.decode(8, 512), "h200")
    experts = next(op for op in chip.decode_ops if op.kind == "grouped")
    parts = [op for op in step.ops if op.row.kind == "grouped"]
    assert experts.ops == ("experts",)
    assert experts.flops == sum(op.row.flops for op in parts)
    assert experts.bytes == sum(op.row.bytes for op in parts)
    assert experts.time_s == pytest.approx(sum(op.time_s for op in parts))


def test_points_merge_only_where_kind_and_place_are_the_same() -> None:
    a = Point(("a",), "matmul", 100.0, 10.0, 1.0, 0.2, True)
    near = Point(("b",), "matmul", 103.0, 10.0, 1.0, 0.3, True)
    far = Point(("c",), "matmul", 120.0, 10.0, 1.0, 0.1, True)
    other = Point(("d",), "attention", 100.0, 10.0, 1.0, 0.4, True)
    merged = merge_points([a, near, far, other])
    assert [point.ops for point in merged] == [("a", "b"), ("c",), ("d",)]
    assert (merged[0].flops, merged[0].bytes, merged[0].time_s, merged[0].time_fraction) == (203.0, 20.0, 2.0, 0.5)


def test_a_model_beyond_the_memory_shows_its_ops_at_the_largest_batch() -> None:
    (chip,) = roofline_points(config("Qwen2.5-72B"), chips("rtx-4090"), batches=(1, 16))
    assert chip.decode_batch == 16
    assert not any(point.fits for point in chip.points)


def test_the_roof_is_that_of_the_dtype() -> None:
    assert roof_of(load_hardware("h100-sxm"), "float8_e4m3fn").flops_per_s == 1978.9e12
    assert roof_of(load_hardware("h100-sxm"), "float32").flops_per_s == 66.9e12


# What a reader sees


def test_the_check_for_overlaps_sees_them() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    first = figure.text(0.5, 0.5, "one text", ha="center", va="center")
    second = figure.text(0.52, 0.5, "another", rotation=45, ha="center", va="center")
    third = figure.text(0.1, 0.1, "far away")
    assert overlaps([first, second, third]) == [("one text", "another")]


@pytest.mark.parametrize(
    ("model", "names", "sizes"),
    [
        ("Qwen2.5-7B", ("rtx-4090",), {}),
        ("Qwen3-30B-A3B", ("h100-sxm", "rtx-4090"), {}),
        ("Qwen3-0.6B", ("cpu",), {}),
        ("Qwen1.5-MoE-A2.7B", ("a100-80gb-sxm",), {"context": 128, "prompt": 16}),
        ("Qwen2.5-72B", ("a100-80gb-sxm", "rtx-pro-6000-server"), {"context": 16384, "prompt": 8192}),
        ("Qwen2.5-0.5B", ("l4",), {"batches": (1,), "context": 1, "prompt": 1}),
    ],
)
def test_labels_overlap_nothing_and_stay_inside(model: str, names: tuple[str, ...], sizes: dict[str, Any]) -> None:
    figure = roofline_figure(config(model), chips(*names), **sizes)
    assert check_labels(figure) >= 12 * len(names)
    check_page(figure)


def test_a_figure_names_its_ops_batches_ceilings_and_conventions() -> None:
    figure = roofline_figure(config("Qwen3-30B-A3B"), chips("rtx-4090"), kv_dtype="float8_e4m3fn", batches=(1, 4))
    texts = {text.get_text() for text in shown_texts(figure)}
    joined = "\n".join(texts)
    for part in (
        "qkv_proj",
        "o_proj",
        "router",
        "experts",
        "attention",
        "unembed",
        "batch 1\n",
        "batch 4\n",
        "whole step",
    ):
        assert part in joined
    assert {"1.008 TB/s", "887.0 GB/s measured", "165.2 TFLOP/s", "ridge 164 FLOP/B"} <= texts
    assert "hollow: beyond its memory" in texts
    assert "bytes: weights and KV cache, which must cross memory" in joined
    assert "Qwen3-30B-A3B on NVIDIA GeForce RTX 4090" in joined
    assert "bfloat16 weights and float8_e4m3fn KV cache" in " ".join(joined.split())


# Where labels go


def test_boxes_know_what_they_overlap_hold_and_cover() -> None:
    level, turned = Box(0, 0, 4, 2), Box(0, 0, 4, 2, math.pi / 4)
    assert level.overlaps(Box(3.9, 0, 4, 2))
    assert not level.overlaps(Box(4, 0, 4, 2))
    beside = Box(2.6, -1.2, 1, 1)  # within the turned box's level frame, but not in the box
    assert not turned.overlaps(beside)
    assert not beside.overlaps(turned)
    assert Box(2, 0, 1, 1).overlaps(Box(2, 0, 8, 0.1, 1.0))
    assert level.covers(((-10, 0), (10, 0))) == pytest.approx(4)
    assert level.covers(((0, 0), (1, 0))) == pytest.approx(1)
    assert level.covers(((-10, 1.5), (10, 1.5))) == 0
    assert turned.covers(((-10, -10), (10, 10))) == pytest.approx(4)
    assert level.distance((5, 5)) == 5
    assert level.distance((1, 0.5)) == 0
    assert turned.within(Box(0, 0, 4.3, 4.3))
    assert not turned.within(Box(0, 0, 4.2, 4.2))


def test_labels_of_marks_in_one_place_part_and_the_room_is_used_up() -> None:
    mark = Mark(Box(50, 50, 6, 6), "both")
    labels = [Label(around((50, 50), 30, 10, 3), "both", (50, 50)) for _ in range(6)]
    chosen = place(labels, [mark], [], Box(50, 50, 100, 100))
    boxes = [candidate.box for candidate in chosen if candidate is not None]
    assert len(boxes) == 6
    assert not any(a.overlaps(b) for a, b in itertools.combinations((*boxes, mark.box), 2))
    assert place(labels[:1], [mark], [], Box(50, 50, 29, 100)) == [None]


def test_a_label_that_may_go_is_left_out_where_it_would_need_a_leader() -> None:
    crowd = [Mark(Box(50 + x, 50 + y, 8, 8), f"{x} {y}") for x in (-12, 0, 12) for y in (-12, 0, 12)]
    around_it = around((50, 50), 20, 8, 4)
    assert place([Label(around_it, "0 0", (50, 50), 10.0)], crowd, [], Box(50, 50, 300, 300)) == [None]
    (kept,) = place([Label(around_it, "0 0", (50, 50))], crowd, [], Box(50, 50, 300, 300))
    assert kept is not None
    assert kept.leader is not None


def test_a_label_along_a_line_is_turned_as_the_line() -> None:
    (chosen,) = place([Label(along(((0, 0), (100, 100)), 30, 8, 0.5, above=True))], [], [], Box(50, 50, 100, 100))
    assert chosen is not None
    assert chosen.box.angle == pytest.approx(math.pi / 4)
    assert chosen.box.y > chosen.box.x  # above
    assert not chosen.box.covers(((0, 0), (100, 100)))


# Files


def small(path: Path, **options: Any) -> None:
    plot_roofline(config("Qwen3-0.6B"), chips("l4"), path, batches=(1, 8), **options)


def test_png_has_the_page_width_at_print_resolution(tmp_path: Path) -> None:
    small(tmp_path / "figure.PNG")
    content = (tmp_path / "figure.PNG").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(content[16:20], "big") >= 7 * 200
    assert list(tmp_path.iterdir()) == [tmp_path / "figure.PNG"]


def test_svg_is_the_same_every_time_whatever_the_caller_has_set(tmp_path: Path) -> None:
    import matplotlib

    small(tmp_path / "a.svg")
    with matplotlib.rc_context({"font.size": 20, "axes.grid": False, "lines.linewidth": 9}):
        small(tmp_path / "b.svg")
        assert matplotlib.rcParams["font.size"] == 20
    first = (tmp_path / "a.svg").read_bytes()
    assert first == (tmp_path / "b.svg").read_bytes()
    assert b"<dc:date>" not in first
    assert b"<image" not in first  # vectors only


def test_pdf_is_written_over_an_older_file(tmp_path: Path) -> None:
    (tmp_path / "figure.pdf").write_text("old")
    small(tmp_path / "figure.pdf")
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF-")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("figure.gif", "has no suffix of a known figure format. Use .png, .svg or .pdf"),
        ("figure", "has no suffix of a known figure format. Use .png, .svg or .pdf"),
        ("figure.html", "HTML figures aren't there yet. Use .png, .svg or .pdf"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        small(tmp_path / name)
    assert str(error.value) == f"path = {str(tmp_path / name)!r}: {message}"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_and_a_folder_in_the_way_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "missing" / "figure.png"
    with pytest.raises(InputError) as error:
        small(target)
    problem = f"is in a folder that doesn't exist. Make {target.parent} first"
    assert str(error.value) == f"path = {str(target)!r}: {problem}"
    folder = tmp_path / "folder.png"
    folder.mkdir()
    with pytest.raises(InputError) as error:
        small(folder)
    assert str(error.value) == f"path = {str(folder)!r}: can't be written: Is a directory. Choose another file"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def fail(self: Figure, file: Any, **options: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    target = tmp_path / "figure.svg"
    target.write_text("old")
    with pytest.raises(InputError) as error:
        small(target)
    message = f"path = {str(target)!r}: can't be written: No space left on device. Choose another file"
    assert str(error.value) == message
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("figure.svg", "old")]


def test_what_no_figure_can_show_is_refused(tmp_path: Path) -> None:
    model, target = config("Qwen3-0.6B"), tmp_path / "figure.png"
    with pytest.raises(InputError) as error:
        plot_roofline(model, chips("l4", "h200", "b200"), target)
    expected = "hardware = ['l4', 'h200', 'b200']: a figure shows one or two chips. Make several figures for more"
    assert str(error.value) == expected
    with pytest.raises(InputError) as error:
        plot_roofline(model, chips("l4"), target, batches=())
    assert str(error.value) == "batches = []: names no batch size. Give at least one."
    with pytest.raises(InputError, match=r"^dtype = 'int9': is not a dtype that is known here\."):
        plot_roofline(model, chips("l4"), target, dtype="int9")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(InputError) as error:
        small(tmp_path / "figure.png")
    assert str(error.value) == (
        'matplotlib: isn\'t installed, and figures are drawn with it. Install it: pip install "qwenjax-roofline[plot]"'
    )


def test_importing_draws_nothing_and_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    script = f"""
import json, sys
import roofline.plot
before = "matplotlib" in sys.modules
from qwenjax.config import ModelConfig
from roofline.hardware import load_hardware
roofline.plot.plot_roofline(ModelConfig.from_hf("Qwen3-0.6B"), [load_hardware("l4")], {str(tmp_path / "a.svg")!r})
print(json.dumps([before, "matplotlib.pyplot" in sys.modules, "jax" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, False, False]


# Measured against predicted

FACTORS = ((1.3, 1.05), (1.5, 0.9), (1.25, 1.0), (2.0, 0.8))  # measured over the bound, predicted over measured
GROUPS = {"attention": 0.3, "MLP": 0.5, "output head": 0.15, "norms, RoPE, residuals": 0.05}
CEILINGS = Roof("here", 250e9, 30e9)


def measured_rows() -> list[dict[str, Any]]:
    steps = (Step.prefill(1, 128), Step.prefill(4, 128), Step.decode(1, 512), Step.decode(8, 512))
    rows = []
    for step, (slower, off) in zip(steps, FACTORS, strict=True):
        bound = predict_step(config("Qwen3-0.6B"), step, processor())
        measured = bound.time_s * slower
        times = {"measured_s": measured, "predicted_s": measured * off, "bound_s": bound.time_s, "error": off - 1}
        used = {"mfu": bound.mfu / slower, "mbu": bound.mbu / slower, "flops": bound.flops, "bytes": bound.bytes}
        place_ = {"batch": step.batch, "query_len": step.query_len, "context": step.kv_len}
        rows.append({"phase": step.phase, **place_, **times, **used})
    return rows


def op_rows() -> list[dict[str, Any]]:
    return [
        {"phase": phase, "op": op, "measured_s": whole * share, "predicted_s": 0.9 * whole * share}
        for phase, whole in (("prefill", 0.4), ("decode", 0.05))
        for op, share in GROUPS.items()
    ]


def panels(figure: Any) -> dict[str, Any]:
    axes = figure.findobj(is_axes)
    return {panel.get_title(loc="left")[:3]: panel for panel in axes}


def test_compare_sets_points_bars_and_parts_side_by_side() -> None:
    rows = measured_rows()
    figure = compare_figure(rows, op_rows(), CEILINGS, "A model, here")
    assert check_labels(figure) == 3 + len(rows)  # two ceilings, the ridge, and the steps by number
    parts = panels(figure)
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in parts["(a)"].lines if line.get_marker() in "os"]
    for row in rows:
        x = row["flops"] / row["bytes"]
        assert (x, row["flops"] / row["measured_s"]) in points
        assert (x, row["flops"] / row["predicted_s"]) in points
    widths = [bar.get_width() for bar in parts["(b)"].patches]
    wanted = [width for slower, off in FACTORS for width in (1, off, 1 / slower)]
    assert widths == pytest.approx(wanted)
    texts = [text.get_text() for text in parts["(b)"].texts]
    assert [text for text in texts if text[0] in "+-"] == ["+5.0 %", "-10.0 %", "+0.0 %", "-20.0 %"]
    stacked = [bar.get_width() for bar in parts["(c)"].patches]
    assert stacked == pytest.approx([scale * share for scale in (1, 0.9, 1, 0.9) for share in GROUPS.values()])


@pytest.mark.parametrize(("count", "split"), [(1, False), (4, True), (12, True)])
def test_every_text_of_a_comparison_is_readable(count: int, split: bool) -> None:
    rows = (measured_rows() * 3)[:count]
    title = "Qwen3-0.6B cut to 4 of 28 layers, float32, on a processor of 2 cores: " * 2 + "\nmedian error 5 %"
    figure = compare_figure(rows, op_rows() if split else [], CEILINGS, title)
    check_labels(figure)
    check_page(figure)


def test_two_steps_of_a_phase_are_not_added_up() -> None:
    ops = [{**row, "batch": batch, "query_len": 1, "context": 64} for batch in (1, 2) for row in op_rows()[4:]]
    parts = panels(compare_figure(measured_rows(), ops, CEILINGS, "A model"))
    stacked = [bar.get_width() for bar in parts["(c)"].patches]
    assert len(stacked) == 2 * 2 * len(GROUPS)
    assert sum(stacked[: len(GROUPS)]) == pytest.approx(1)


def test_objects_and_mappings_make_the_same_file(tmp_path: Path) -> None:
    rows, ops = measured_rows(), op_rows()
    row_type, op_type = make_dataclass("R", list(rows[0])), make_dataclass("O", list(ops[0]))
    plot_compare(rows, ops, CEILINGS, tmp_path / "a.svg", "A model")
    objects = [row_type(**row) for row in rows]
    plot_compare(objects, [op_type(**op) for op in ops], CEILINGS, tmp_path / "b.svg", "A model")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measured_s": None}, "rows.measured_s: is missing. Give the rows that `roofline compare` makes"),
        ({"bytes": 0}, "rows.bytes = 0: must be greater than zero. Leave out steps that didn't run"),
        ({"phase": "mixed"}, "rows.phase = 'mixed': is not a phase of a step. Use prefill or decode"),
    ],
)
def test_rows_that_cannot_be_drawn_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = [{**measured_rows()[0], **change}]
    with pytest.raises(InputError) as error:
        plot_compare(rows, [], CEILINGS, tmp_path / "figure.png", "A model")
    assert str(error.value) == message
    with pytest.raises(InputError) as error:
        plot_compare([], [], CEILINGS, tmp_path / "figure.png", "A model")
    assert str(error.value) == "rows = []: has no measured step. Measure at least one"
    assert list(tmp_path.iterdir()) == []
