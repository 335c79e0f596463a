"""Every message about a chip, whole: file, field, value and remedy."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from qwenjax.errors import InputError
from roofline.hardware import Figure, known_ids, load_hardware, write_hardware

GOOD = """\
id = "mine"
name = "My card"
vendor = "me"
architecture = "none"
launch_year = 2024

[links.pcie]
generation = "4.0"
lanes = 16
one_way_bytes_per_s = { value = 31.5e9, unit = "B/s", kind = "datasheet", source = "sheet" }

[figures]
peak_bandwidth_bytes_per_s = { value = 1008e9, unit = "B/s", kind = "datasheet", source = "sheet" }
peak_flops_per_s.bfloat16 = { value = 165.2e12, unit = "FLOP/s", kind = "datasheet", source = "me", sparsity = "dense" }
memory_bytes = { value = 25769803776, unit = "B", kind = "datasheet", source = "sheet" }
reported_memory_bytes = { value = 25254407700, unit = "B", kind = "measured elsewhere", source = "run" }
"""
# Blocks of "old -> new", the change to GOOD, and the whole message that follows the file's name.
SHORT = {
    "$BYTES_PER_S": "Give bytes per second, for instance 1008e9",
    "$BYTES": "Give bytes, for instance 25769803776 (24 GiB)",
    "$RATE": "Give operations per second, for instance 165.2e12",
    "$COMPARE": "Compare with the chips that come with the package",
    "$FORM": "Every figure has value, unit, kind and source: "
    '{ value = 1008e9, unit = "B/s", kind = "datasheet", source = "document, page" }',
    "$PEAK": "peak_bandwidth_bytes_per_s",
    "$BF16": "peak_flops_per_s.bfloat16",
}
BROKEN = """
1008e9 -> 1008
$PEAK = 1008: looks like GB/s. $BYTES_PER_S

165.2e12 -> 165.2
$BF16 = 165.2: looks like TFLOP/s. $RATE

25769803776 -> 24
memory_bytes = 24: looks like GB or GiB. $BYTES

1008e9 -> 1e30
$PEAK = 1e+30: is more than 1e+15 B/s, beyond any chip. $BYTES_PER_S

1008e9 -> 100000000000000000000
$PEAK = 100000000000000000000: is more than 1e+15 B/s, beyond any chip. $BYTES_PER_S

1008e9 -> -1008e9
$PEAK = -1008000000000.0: must be finite and greater than zero. $BYTES_PER_S

1008e9 -> 0
$PEAK = 0: must be finite and greater than zero. $BYTES_PER_S

1008e9 -> nan
$PEAK = nan: must be finite and greater than zero. $BYTES_PER_S

1008e9 -> inf
$PEAK = inf: must be finite and greater than zero. $BYTES_PER_S

1008e9 -> "1008e9"
$PEAK = '1008e9': must be a number. $BYTES_PER_S

1008e9 -> true
$PEAK = True: must be a number. $BYTES_PER_S

25769803776 -> 25769803776.5
memory_bytes = 25769803776.5: must be a whole number. $BYTES

1008e9, unit = "B/s" -> 1008, unit = "GB/s"
$PEAK.unit = 'GB/s': must be B/s. $BYTES_PER_S

"FLOP/s" -> "TFLOP/s"
$BF16.unit = 'TFLOP/s': must be FLOP/s or OP/s. $RATE

"dense" -> "sparse"
$BF16.sparsity = 'sparse': structured sparsity is no peak of dense work. Give the dense rate, which vendors print as
half of it: 8.26e+13

, sparsity = "dense" ->
$BF16.sparsity = '': must say dense. Look up whether the table is "with sparsity", then write sparsity = "dense"
beside the dense rate

"datasheet", source = "me" -> "guess", source = "me"
$BF16.kind = 'guess': is not a kind of figure. Use one of datasheet, measured elsewhere, measured here, reported
elsewhere, derived

source = "run" -> source = " "
reported_memory_bytes.source = ' ': must not be empty. Name the document and where in it

"dense" -> "dense", clock = "turbo"
$BF16.clock = 'turbo': must be boost or base. Leave it out where no clock is meant

, source = "run" ->
reported_memory_bytes.source: is missing. $FORM

source = "run" -> source = "run", page = 3
reported_memory_bytes.page = 3: is not a known field. Known: value, unit, kind, source, date, note, sparsity, clock

source = "run" -> source = 3
reported_memory_bytes.source = 3: must be a text. $COMPARE

{ value = 25254407700, unit = "B", kind = "measured elsewhere", source = "run" } -> 25254407700
reported_memory_bytes = 25254407700: must be a table. $FORM

reported_memory_bytes = -> reported_memory =
reported_memory: is not a known figure. Known: reported_memory_bytes

s.bfloat16 -> s.bf16
peak_flops_per_s.bf16: is not a JAX dtype name. Use one of bfloat16, float16, float32, float64, float8_e4m3fn,
float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz, float4_e2m1fn, int8

peak_bandwidth_bytes_per_s = -> measured_bandwidth_bytes_per_s =
$PEAK: is missing. Add it under [figures]. $BYTES_PER_S

memory_bytes = { value = 25769803776 -> l2_bytes = { value = 25769803776
memory_bytes: is missing. Add it under [figures]. $BYTES

peak_flops_per_s.bfloat16 -> peak_tensorfloat32_flops_per_s
peak_flops_per_s: is missing. Add a dense peak under [figures], for instance $BF16

25769803776 -> 24000000000
reported_memory_bytes = 25254407700: is more than the nominal capacity. Check memory_bytes = 24000000000: a card's GB
is 2**30 bytes, 24 GB are 25769803776

name = "My card" ->
name: is missing or empty. Give the chip a text, name = "..."

name = "My card" -> name = 4090
name = 4090: must be a text. $COMPARE

2024 -> "2024"
launch_year = '2024': must be a year. $COMPARE

launch_year -> notes = [1]\\nlaunch_year
notes = 1: must be a list of texts. $COMPARE

launch_year -> release
release = 2024: is not a known field. Known: id, name, vendor, architecture, compute_capability, memory_type,
launch_year, notes, figures, links, measured

lanes = 16 -> width = 16
links.pcie.width = 16: is not a known field. Known: generation, lanes, one_way_bytes_per_s

lanes = 16 -> lanes = true
links.pcie.lanes = True: must be a whole number. $COMPARE

one_way_bytes_per_s = { value = 31.5e9, unit = "B/s", kind = "datasheet", source = "sheet" } ->
links.pcie.one_way_bytes_per_s: must be a table. $FORM

31.5e9 -> 31.5
links.pcie.one_way_bytes_per_s = 31.5: looks like GB/s. $BYTES_PER_S
"""


def message(call: Any) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


def test_the_example_is_good(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD, encoding="utf-8")
    chip = load_hardware(str(path))
    assert (chip.id, chip.launch_year, chip.flops_per_s("bfloat16")) == ("mine", 2024, 165.2e12)


@pytest.mark.parametrize("case", BROKEN.strip().split("\n\n"), ids=lambda case: case.splitlines()[0])
def test_messages_name_file_field_value_and_remedy(case: str, tmp_path: Path) -> None:
    change, *lines = case.splitlines()
    expected = " ".join(lines)
    for name, words in SHORT.items():
        expected = expected.replace(name, words)
    old, _, new = change.partition(" ->")
    assert GOOD.count(old) == 1
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new.strip().replace("\\n", "\n")), encoding="utf-8")
    assert message(lambda: load_hardware(path)) == f"{path}: {expected}"


def test_the_same_checks_hold_for_chips_made_in_code() -> None:
    chip = load_hardware("a10")
    figures = dict(chip.figures) | {"l2_bytes": Figure(72, "B", "measured here", "x")}
    assert message(lambda: dataclasses.replace(chip, figures=figures)) == (
        "l2_bytes = 72: looks like KiB or MiB. Give bytes, for instance 75497472 (72 MiB)"
    )
    said = message(lambda: dataclasses.replace(chip, vendor=""))
    assert said == 'vendor: is missing or empty. Give the chip a text, vendor = "..."'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"id = ", "is not valid TOML: Invalid value (at end of document)"),
        (b'id = "\xff"', "is not valid TOML: 'utf-8' codec can't decode byte 0xff in position 6: invalid start byte"),
    ],
)
def test_files_that_are_no_toml(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    assert message(lambda: load_hardware(path)) == f"{path}: {problem}. Correct that place in the file"


def test_tables_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("figures = 3", encoding="utf-8")
    assert message(lambda: load_hardware(path)) == f"{path}: figures = 3: must be a table. {SHORT['$COMPARE']}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    remedy = "Give an id (`roofline hardware` lists them) or the path of a TOML file"
    missing = tmp_path / "none.toml"
    assert message(lambda: load_hardware(missing)) == (
        f"hardware = {str(missing)!r}: can't be read: No such file or directory. {remedy}"
    )
    assert message(lambda: load_hardware(f"{tmp_path}/")) == (
        f"hardware = {str(tmp_path)!r}: can't be read: Is a directory. {remedy}"
    )


def test_unknown_ids_get_near_ones() -> None:
    tail = "? `roofline hardware` lists all, or give a TOML file"
    assert message(lambda: load_hardware("H100")) == (
        f"hardware = 'H100': is not a known chip. Did you mean h100-nvl, h100-pcie, h100-sxm{tail}"
    )
    assert message(lambda: load_hardware("4090")) == (
        f"hardware = '4090': is not a known chip. Did you mean rtx-4090, rtx-4090d{tail}"
    )
    assert message(lambda: load_hardware("rtx-409O")).startswith(
        "hardware = 'rtx-409O': is not a known chip. Did you mean rtx-4090"
    )
    for nothing_near in ("zzz", ""):
        assert message(lambda text=nothing_near: load_hardware(text)) == (
            f"hardware = {nothing_near!r}: is not a known chip. Known: {', '.join(known_ids())}; or give a TOML file"
        )


def test_unknown_dtypes_name_the_known() -> None:
    said = "dtype = 'bfloat16': no peak rate is known on t4. Use one of float16, float32, int8"
    assert message(lambda: load_hardware("t4").flops_per_s("bfloat16")) == said
    assert message(lambda: load_hardware("t4").ridge_intensity("bfloat16")) == said
    with pytest.raises(InputError, match="no peak rate is known on mi300x"):
        load_hardware("mi300x").flops_per_s("float8_e4m3fn")


def test_here_without_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    assert message(lambda: load_hardware("Here")) == (
        f"hardware = 'Here': this device isn't calibrated, {tmp_path / 'here.toml'} doesn't exist. "
        "Run `roofline calibrate`, or name a chip (`roofline hardware` lists them)"
    )


def test_a_failed_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    chip = load_hardware("a10")
    write_hardware(chip, path)
    before = path.read_bytes()

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert message(lambda: write_hardware(dataclasses.replace(chip, name="new"), path)) == (
        f"hardware = {str(path)!r}: can't be written: No space left on device. Choose another file"
    )
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_toml_cannot_hold_is_refused(tmp_path: Path) -> None:
    chip = dataclasses.replace(load_hardware("a10"), measured={"runs": [1.5, None]})
    assert message(lambda: write_hardware(chip, tmp_path / "x.toml")) == (
        "measured.runs: TOML has no NoneType. Convert it to a text, number, list or table"
    )
    assert list(tmp_path.iterdir()) == []
