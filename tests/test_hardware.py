"""The chips' data against arithmetic and published measurements; loading and the file form."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import string
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline import hardware as module
from roofline.hardware import (
    DTYPES,
    KINDS,
    Figure,
    Hardware,
    Link,
    calibration_path,
    describe_hardware,
    known_ids,
    list_hardware,
    load_hardware,
    to_toml,
    write_hardware,
)

DATA = Path(module.__file__).parent / "data" / "hardware"
CHIPS = list_hardware()
every_chip = pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.id)

# Bandwidth in GB/s and dense bfloat16 TFLOP/s with float32 accumulation, typed apart from the data.
EXPECTED_TEXT = """
rtx-4090 1008 165.2 | rtx-3090 936 71 | rtx-4090d 1008 147.1 | rtx-5090 1792 209.5
rtx-6000-ada 960 364.2 | rtx-pro-6000 1792 503.8 | a6000 768 154.8 | a10 600 125
l4 300 121 | l40s 864 362.05 | a100-40gb-sxm 1555 312 | a100-80gb-sxm 2039 312
a100-80gb-pcie 1935 312 | h100-pcie 2039.04 756 | h100-sxm 3350 989.4 | h200 4800 989.4
h20 4000 148 | b200 7672.32 2250 | mi300x 5300 1307.4
"""
EXPECTED = {row.split()[0]: row.split()[1:] for row in EXPECTED_TEXT.replace("|", "\n").strip().splitlines()}


@pytest.mark.parametrize("chip", EXPECTED)
def test_named_chips_have_the_vendors_numbers(chip: str) -> None:
    bandwidth, peak = EXPECTED[chip]
    hardware = load_hardware(chip)
    assert hardware.peak_bandwidth_bytes_per_s == pytest.approx(float(bandwidth) * 1e9, rel=1e-12)
    assert hardware.flops_per_s("bfloat16") == pytest.approx(float(peak) * 1e12, rel=1e-12)


def test_rtx_4090_exactly() -> None:
    chip = load_hardware("rtx-4090")
    assert (chip.peak_bandwidth_bytes_per_s, chip.measured_bandwidth_bytes_per_s) == (1008e9, 887e9)
    assert dict(chip.peak_flops_per_s) == {
        "bfloat16": 165.2e12,
        "float16": 165.2e12,
        "float32": 82.6e12,
        "float8_e4m3fn": 330.3e12,
        "int8": 660.6e12,
    }
    assert chip.peak_tensorfloat32_flops_per_s == 82.6e12
    assert (chip.memory_bytes, chip.l2_bytes, chip.sm_count, chip.boost_clock_hz) == (
        24 * 2**30,
        72 * 2**20,
        128,
        2.52e9,
    )
    assert (chip.number("shared_memory_per_sm_bytes"), chip.number("shared_memory_per_block_bytes")) == (102400, 101376)
    assert (chip.compute_capability, chip.memory_type, chip.launch_year, chip.number("tdp_watts")) == (
        "8.9",
        "GDDR6X",
        2022,
        450,
    )
    assert round(chip.usable_memory_bytes / 2**30, 2) == 23.52
    assert chip.peer_link is not None
    assert (chip.peer_link.name, chip.peer_link.generation, chip.peer_link.lanes) == ("pcie", "4.0", 16)
    assert chip.peer_link.one_way_bytes_per_s == pytest.approx(16e9 * 16 * 128 / 130 / 8, abs=1)
    assert chip.ridge_intensity("bfloat16") == 165.2e12 / 1008e9
    assert chip.ridge_intensity("int8") == 660.6e12 / 1008e9
    assert "330.3" in chip.notes[0]
    assert "660.6" in chip.notes[0]


def test_ids() -> None:
    ids = known_ids()
    assert len(ids) >= 19
    assert list(ids) == sorted(set(ids))
    assert set(EXPECTED) <= set(ids)
    assert {path.stem for path in DATA.iterdir()} == set(ids)
    assert tuple(chip.id for chip in CHIPS) == ids
    assert all(chip == chip.lower() for chip in ids)
    assert len({chip.name for chip in CHIPS}) == len(ids)


@every_chip
def test_every_figure_has_a_certificate(chip: Hardware) -> None:
    table = tomllib.loads((DATA / f"{chip.id}.toml").read_text(encoding="utf-8"))
    certificates = list(_leaves(table["figures"])) + [link["one_way_bytes_per_s"] for link in table["links"].values()]
    assert len(certificates) == len(chip.figures) >= 12
    for figure in certificates:
        assert figure["unit"] in ("B/s", "FLOP/s", "OP/s", "B", "Hz", "W", "count")
        assert figure["kind"] in KINDS
        assert figure["kind"] != "measured here"
        assert len(figure["source"]) > 15
        assert re.fullmatch(r"(\d{4}(-\d\d-\d\d)?)?", figure.get("date", ""))
        if figure["unit"] in ("FLOP/s", "OP/s"):
            assert figure["sparsity"] == "dense"
            assert figure.get("clock") == "boost" or chip.id == "h20"
        if figure["unit"] == "Hz":
            assert figure["clock"] == "boost"
    assert {"sm_count", "tdp_watts", "peak_bandwidth_bytes_per_s", "memory_bytes"} <= set(chip.figures)
    assert (chip.reported_memory_bytes is None) == any(
        "reported_memory_bytes is missing" in note for note in chip.notes
    )


def _leaves(table: dict[str, Any]) -> Any:
    for value in table.values():
        if "value" in value:
            yield value
        else:
            yield from _leaves(value)


# FLOP per SM and clock of the tensor cores, float32 accumulation: the vendors' architecture papers.
PER_CLOCK = {
    "7.0": 1024,
    "7.5": 1024,
    "8.0": 2048,
    "8.6": 1024,
    "8.9": 1024,
    "9.0": 4096,
    "10.0": 8192,
    "12.0": 1024,
    "gfx942": 2048,
}
HALF_RATE = ("l40",)  # as GeForce; the sheet prints half of what the L40S has
NO_CLOCK = ("h20", "h100-nvl")  # cut down by other means, or no clock known
NOT_FROM_MAX_CLOCK = ("rtx-pro-6000-server",)  # the sheet's peaks need 2.5 % more than the clock that the device offers


@every_chip
def test_peaks_follow_from_sms_and_clock(chip: Hardware) -> None:
    if chip.id in NO_CLOCK:
        assert chip.boost_clock_hz is None
        return
    clock = chip.number("tensor_clock_hz") or chip.boost_clock_hz
    assert clock is not None
    assert chip.sm_count is not None
    geforce = "GeForce" in chip.name
    per_clock = PER_CLOCK[chip.compute_capability] // (2 if geforce or chip.id in HALF_RATE else 1)
    tolerance = 0.03 if chip.id in NOT_FROM_MAX_CLOCK else 0.0125
    assert chip.flops_per_s("float16") == pytest.approx(chip.sm_count * per_clock * clock, rel=tolerance)
    lanes = chip.number("fp32_lanes_per_sm")
    assert lanes is not None
    assert chip.boost_clock_hz is not None
    expected = chip.sm_count * lanes * 2 * chip.boost_clock_hz
    assert chip.flops_per_s("float32") == pytest.approx(expected, rel=0.03 if chip.id in NOT_FROM_MAX_CLOCK else 0.01)


@every_chip
def test_peaks_of_one_chip_fit_each_other(chip: Hardware) -> None:
    peaks, half = chip.peak_flops_per_s, chip.flops_per_s("float16")
    assert set(peaks) <= set(DTYPES)
    assert peaks.get("bfloat16", half) == half
    assert half > peaks["float32"]
    int8_ratio = 4 if "GeForce" in chip.name else 2  # int8 doesn't share GeForce's limit on float32 accumulation
    if "int8" in peaks:
        assert peaks["int8"] / half == pytest.approx(int8_ratio, rel=0.025)
    for dtype in peaks:
        if dtype.startswith("float8"):
            assert peaks[dtype] / half == pytest.approx(2, rel=0.025)
    if "float4_e2m1fn" in peaks:  # nor does float4
        assert peaks["float4_e2m1fn"] / half == pytest.approx(2 * int8_ratio, rel=0.025)
    assert ("float4_e2m1fn" in peaks) == (chip.compute_capability in ("10.0", "12.0"))
    if chip.peak_tensorfloat32_flops_per_s:
        assert chip.peak_tensorfloat32_flops_per_s / half == pytest.approx(0.5, rel=0.02)
    assert ("float8_e4m3fn" in peaks) == (chip.compute_capability in ("8.9", "9.0", "10.0", "12.0"))


@every_chip
def test_memory_and_links_fit_the_chip(chip: Hardware) -> None:
    assert 0.9 * chip.memory_bytes < chip.usable_memory_bytes <= chip.memory_bytes
    assert chip.memory_bytes % 2**30 == 0
    if chip.reported_memory_bytes is None:
        assert chip.usable_memory_source.startswith("nominal capacity")
    else:
        assert chip.usable_memory_source == f"as the device reports it ({chip.figures['reported_memory_bytes'].source})"
    if chip.measured_bandwidth_bytes_per_s is not None:
        assert chip.measured_bandwidth_bytes_per_s < chip.peak_bandwidth_bytes_per_s
    assert chip.peer_link is not None
    assert all(link.one_way_bytes_per_s <= chip.peer_link.one_way_bytes_per_s for link in chip.links)
    assert all(chip.figures[f"links.{link.name}.one_way_bytes_per_s"] is link.figure for link in chip.links)


def test_nvlink_is_one_direction() -> None:
    one_way = {"a100-80gb-sxm": 300e9, "h100-sxm": 450e9, "h100-pcie": 300e9, "b200": 900e9, "v100-32gb-sxm": 150e9}
    for chip, expected in one_way.items():
        link = load_hardware(chip).peer_link
        assert link is not None
        assert (link.name, link.one_way_bytes_per_s) == ("nvlink", expected)
    gpus = load_hardware("gh200").peer_link
    assert gpus is not None
    assert gpus.name == "nvlink"  # not the link to the Grace CPU


# Published data: the totals that CUDA reported, the seed's bandwidth, and kernels that no chip can run above its peak.

MEASURED_CHIPS = {
    "NVIDIA RTX 4090": "rtx-4090",
    "NVIDIA A100-80GB (Azure NC96ads_A100_v4 / DGX)": "a100-80gb-sxm",
    "NVIDIA H100 (DGX)": "h100-sxm",
    "NVIDIA RTX PRO 6000 Blackwell Server": "rtx-pro-6000-server",
}


def test_published_kernels_stay_below_the_peaks(shared: Path) -> None:
    fractions: dict[str, list[float]] = {"bw_gb_s": [], "tflops": []}
    with (shared / "measurements" / "published.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            half = row["dtype_or_quant"].upper().startswith(("BF16", "FP16"))
            if row["gpu"] not in MEASURED_CHIPS or row["metric"] not in fractions or row["grade"] == "C" or not half:
                continue
            chip = load_hardware(MEASURED_CHIPS[row["gpu"]])
            bandwidth = row["metric"] == "bw_gb_s"
            peak = chip.peak_bandwidth_bytes_per_s / 1e9 if bandwidth else chip.flops_per_s("bfloat16") / 1e12
            fractions[row["metric"]].append(float(row["value"]) / peak)
    assert len(fractions["bw_gb_s"]) > 20
    assert len(fractions["tflops"]) > 20
    assert 0.9 < max(fractions["bw_gb_s"]) < 1
    assert 0.9 < max(fractions["tflops"]) < 1.01  # cards may clock a little above the stated boost


def test_reported_totals_are_the_published_ones(shared: Path) -> None:
    text = (shared / "measurements" / "README.md").read_text(encoding="utf-8")
    totals = {"rtx-3090": "3090", "rtx-4090": "4090", "l40s": "L40S", "rtx-pro-6000-server": "RTX PRO 6000"}
    for chip, label in totals.items():
        found = re.search(rf"{label} (\d+\.\d\d)", " ".join(text.split()))
        assert found is not None
        assert f"{load_hardware(chip).usable_memory_bytes / 2**30:.2f}" == found[1]


def test_measured_bandwidth_is_the_seeds(shared: Path) -> None:
    with (shared / "seed_ledger.csv").open(encoding="utf-8", newline="") as file:
        row = next(row for row in csv.reader(file) if row[0] == "S000-284")
    assert ["887", "GB/s"] in (row[i : i + 2] for i in range(len(row)))
    figure = load_hardware("rtx-4090").figures["measured_bandwidth_bytes_per_s"]
    assert (figure.value, figure.kind) == (887e9, "measured elsewhere")
    assert "S000-284" in figure.source


# Loading.


def test_letter_case_and_spaces_do_not_matter() -> None:
    assert load_hardware(" RTX-4090 ") is load_hardware("rtx-4090")
    assert load_hardware("H100-SXM").id == "h100-sxm"


def test_one_id_parses_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    real = tomllib.loads

    def counted(text: str) -> dict[str, Any]:
        parsed.append(text)
        return real(text)

    monkeypatch.setattr(tomllib, "loads", counted)
    module._load_packaged.cache_clear()
    known_ids()
    assert parsed == []
    load_hardware("a10")
    load_hardware("a10")
    assert len(parsed) == 1


def test_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path / "kept"))
    assert calibration_path() == tmp_path / "kept" / "here.toml"
    chip = device()
    write_hardware(chip, calibration_path())
    assert load_hardware("here") == chip
    monkeypatch.delenv("ROOFLINE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert calibration_path() == tmp_path / ".cache" / "roofline" / "here.toml"


def device(**changes: Any) -> Hardware:
    """A device as calibration builds it: nothing but what was measured."""
    here = {"kind": "measured here", "source": "roofline calibrate, jax 0.10", "date": "2026-01-02"}
    figures = {
        "peak_bandwidth_bytes_per_s": Figure(21.5e9, "B/s", **here),
        "peak_flops_per_s.float32": Figure(1.25e11, "FLOP/s", **here),
        "memory_bytes": Figure(16 * 2**30, "B", **here),
    }
    measured = {
        "launch_s": 1e-05,
        "matmul": [{"m": 8, "seconds": [0.1, 2e-7]}, {"m": 16, "seconds": []}],
        "env": {"jax": "0.10"},
    }
    fields: dict[str, Any] = {
        "id": "here",
        "name": "a CPU",
        "vendor": "x",
        "architecture": "y",
        "figures": figures,
        "measured": measured,
    }
    return Hardware(**(fields | changes))


def test_a_calibrated_device_needs_no_datasheet() -> None:
    chip = device()
    assert (chip.sm_count, chip.l2_bytes, chip.boost_clock_hz, chip.peer_link) == (None, None, None, None)
    assert chip.ridge_intensity("float32") == 1.25e11 / 21.5e9
    assert (
        chip.usable_memory_source
        == "nominal capacity, the device's own report is not known (roofline calibrate, jax 0.10)"
    )


def test_values_do_not_change() -> None:
    chip, measured = device(), {"runs": [1]}
    kept = device(measured=measured)
    measured["runs"].append(2)
    assert kept.measured["runs"] == [1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        chip.id = "other"  # type: ignore[misc]
    for mapping in (chip.figures, chip.measured, chip.peak_flops_per_s):
        with pytest.raises(TypeError):
            mapping["x"] = None  # type: ignore[index]
    assert {chip: 1}[device()] == 1
    assert dataclasses.replace(chip, id="copy").figures == chip.figures
    link = Link("pcie", "4.0", Figure(31e9, "B/s", "datasheet", "a sheet"))
    linked = dataclasses.replace(chip, links=(link,))
    assert "links.pcie.one_way_bytes_per_s" in linked.figures
    assert dataclasses.replace(linked, links=()) == chip


def test_describe_gives_every_figure_and_what_follows() -> None:
    chip = load_hardware("rtx-4090")
    rows = {row["name"]: row for row in describe_hardware(chip)}
    assert set(chip.figures) < set(rows)
    for name, figure in chip.figures.items():
        assert rows[name] == {"name": name, **dataclasses.asdict(figure)}
    assert rows["ridge_intensity.bfloat16"]["value"] == chip.ridge_intensity("bfloat16")
    assert rows["ridge_intensity.bfloat16"]["unit"] == "FLOP/B"
    assert rows["usable_memory_bytes"]["value"] == chip.usable_memory_bytes
    json.dumps(list(rows.values()), allow_nan=False)


# Writing.


@every_chip
def test_packaged_files_are_in_the_written_form(chip: Hardware, tmp_path: Path) -> None:
    assert to_toml(chip) == (DATA / f"{chip.id}.toml").read_text(encoding="utf-8")
    write_hardware(chip, tmp_path / "copy.toml")
    assert load_hardware(tmp_path / "copy.toml") == chip


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
filled = text.filter(lambda value: bool(value.strip()))
number = st.floats(1e9, 1e15) | st.integers(10**9, 10**15)
figure = st.builds(Figure, number, st.just("B/s"), st.sampled_from(KINDS), filled, text, text)
rate = st.builds(
    Figure, number, st.sampled_from(["FLOP/s", "OP/s"]), st.sampled_from(KINDS), filled, sparsity=st.just("dense")
)
plain = st.recursive(
    st.none().map(lambda _: True) | text | st.integers() | st.floats(allow_nan=False) | st.dates() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
names = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8)


@st.composite
def hardwares(draw: st.DrawFn) -> Hardware:
    links = draw(st.dictionaries(names, st.tuples(figure, text, st.none() | st.integers(1, 32)), max_size=2))
    rates = draw(st.dictionaries(st.sampled_from(DTYPES), rate, min_size=1))
    figures = {
        "peak_bandwidth_bytes_per_s": draw(figure),
        **{f"peak_flops_per_s.{dtype}": value for dtype, value in rates.items()},
        "memory_bytes": Figure(draw(st.integers(2**27, 2**50)), "B", "derived", "x"),
    }
    return Hardware(
        id=draw(filled),
        name=draw(filled),
        vendor=draw(filled),
        architecture=draw(filled),
        figures=figures,
        links=tuple(Link(name, generation, value, lanes) for name, (value, generation, lanes) in links.items()),
        compute_capability=draw(text),
        launch_year=draw(st.none() | st.integers(1990, 2100)),
        notes=tuple(draw(st.lists(text, max_size=2))),
        measured=draw(st.dictionaries(text, plain, max_size=4)),
    )


@given(hardwares())
def test_any_chip_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, chip: Hardware) -> None:
    path = tmp_path_factory.mktemp("chip") / "chip.toml"
    write_hardware(chip, path)
    again = load_hardware(path)
    assert again == chip
    assert to_toml(again) == to_toml(chip)
    assert hash(again) == hash(chip)
    assert [entry.name for entry in path.parent.iterdir()] == ["chip.toml"]


@given(hardwares())
def test_ridge_separates_memory_from_compute(chip: Hardware) -> None:
    for dtype in chip.peak_flops_per_s:
        flops = 1e6 * chip.ridge_intensity(dtype)
        assert flops / chip.flops_per_s(dtype) == pytest.approx(1e6 / chip.peak_bandwidth_bytes_per_s, rel=1e-9)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_written_without_loss(value: float) -> None:
    (back,) = tomllib.loads(f"x = {module._float(value)}").values()
    assert isinstance(back, float)
    assert math.copysign(1, back) == math.copysign(1, value)
    assert back == value
