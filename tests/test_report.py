"""Numbers as strings, tables that lose nothing, and the texts of records that the usual cases don't reach."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from fractions import Fraction
from pathlib import Path

import pytest
from cli_run import text_of
from config_base import QWEN3_MOE, changed

from qwenjax.command_line import plain, to_json
from qwenjax.hf_keys import Note
from qwenjax.tables import Table, render
from roofline.profile import BOUND
from roofline.report import units

# units


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (15_231_233_024, "B", "15.23 GB"),
        (1.008e12, "B/s", "1.008 TB/s"),
        (999_940_000, "B", "999.9 MB"),
        (512, "B", "512.0 B"),
        (165.2e12, "FLOP/s", "165.2 TFLOP/s"),
        (14_140_571_648, "FLOP", "14.14 GFLOP"),
        (0.01409, "s", "14.09 ms"),
        (83.3e-6, "s", "83.30 us"),
        (2.5e-9, "s", "2.500 ns"),
        (3.6774, "s", "3.677 s"),
        (0, "s", "0 s"),
        (None, "s", "-"),
    ],
)
def test_a_quantity_has_four_digits_and_its_unit(value: float | None, unit: str, text: str) -> None:
    assert units.quantity(value, unit) == text


def test_a_column_has_one_unit_that_shows_its_small_values() -> None:
    unit, write = units.column([7_604_273_152, 200_704, None], "B")
    assert unit == "MB"
    assert [write(v) for v in (7_604_273_152, 200_704, 0, None)] == ["7,604.27", "0.20", "0", "-"]
    assert units.column([], "s")[0] == units.column([None], "s")[0] == "ns"


def test_gib_is_two_to_the_thirtieth_and_gb_is_a_milliard() -> None:
    assert units.gib(24 * 2**30) == "24.00 GiB"
    assert units.quantity(24 * 2**30, "B") == "25.77 GB"


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (units.whole, 7_615_616_512, "7,615,616,512"),
        (units.whole, 64.0, "64"),
        (units.whole, 42.009, "42.01"),
        (units.whole, None, "-"),
        (units.short_count, 7_615_616_512, "7.616 B"),
        (units.short_count, 494_032_768, "494.0 M"),
        (units.short_count, 16_640, "16.64 k"),
        (units.short_count, 7, "7"),
        (units.percent, 0.24820769, "24.8 %"),
        (units.percent, None, "-"),
        (units.rate, 1234.56, "1,234.6 tokens/s"),
        (units.rate, None, "-"),
        (units.decimal, 1023.04, "1,023.0"),
        (units.decimal, None, "-"),
        (units.milliseconds, 0.658964374, "658.964"),
        (units.milliseconds, None, "-"),
    ],
)
def test_other_numbers(function: Callable[[float | None], str], value: float | None, text: str) -> None:
    assert function(value) == text


# JSON


def test_json_has_plain_values_only() -> None:
    record = {
        "profile": BOUND.summary,
        "note": Note("default", "dtype", "missing"),
        "share": Fraction(1, 4),
        "sizes": (1, 2.5, True, None),
        "not": [float("nan"), float("inf"), -float("inf")],
        "measured": {"when": date(2026, 1, 9)},
    }
    assert json.loads(to_json(record)) == {
        "profile": {"name": BOUND.name, "source": BOUND.source, "validation": BOUND.validation},
        "note": {"kind": "default", "field": "dtype", "text": "missing"},
        "share": 0.25,
        "sizes": [1, 2.5, True, None],
        "not": [None, None, None],
        "measured": {"when": "2026-01-09"},
    }
    assert "\n" not in to_json(record)


def test_what_has_no_form_in_json_is_an_error_of_ours() -> None:
    with pytest.raises(TypeError, match="a set has no form in JSON"):
        plain({"a": {1}})


# tables

WORDS = "a source of many words that goes on and on until no terminal of any width holds it in one line"
TABLE = Table(
    "Figures",
    ("figure", "value", "source"),
    [["peak_flops_per_s.bfloat16", "165,200,000,000,000", WORDS], ["[3584, 512]", "7", "[bold]not markup[/bold] :x:"]],
    text=("figure", "source"),
)


def test_a_plain_table_is_aligned_whole_and_uncoloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert render(["first", TABLE, "last"]) == (
        "first\n"
        "\n"
        "Figures\n"
        "figure                                   value  source\n"
        f"peak_flops_per_s.bfloat16  165,200,000,000,000  {WORDS}\n"
        "[3584, 512]                                  7  [bold]not markup[/bold] :x:\n"
        "last\n"
    )


@pytest.mark.parametrize("width", [20, 80, 100])
def test_a_terminal_wraps_prose_and_breaks_no_figure(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = render([TABLE], width)
    assert "\x1b[1mFigures\x1b[0m" in text
    lines = text.splitlines()
    assert any(line.startswith("peak_flops_per_s.bfloat16  165,200,000,000,000  a source of many") for line in lines)
    prose = " ".join(line.split("  ")[-1].strip() for line in lines[3:-1])
    assert prose == WORDS
    least = len("peak_flops_per_s.bfloat16  165,200,000,000,000  ") + 40
    assert max(len(line) for line in lines[3:]) <= max(width, least)


def test_no_color_is_heeded_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in render([TABLE._replace(totals=True)], 80)


# texts of records


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(changed(QWEN3_MOE, tie_word_embeddings=True)))
    return str(path)


def test_the_account_of_parameters_answers_first() -> None:
    lines = text_of("roofline params Qwen2.5-7B").splitlines()
    assert lines[0] == (
        "Qwen2.5-7B: 7,615,616,512 parameters (7.616 B), 15.23 GB (14.19 GiB) in bfloat16, "
        "57,344 B of KV cache a token in bfloat16"
    )
    assert lines[2] == "Where 7.616 B parameters live"
    assert lines[3].split() == ["component", "weights", "share", "FLOP/token", "share", "of", "FLOP", "KV", "B/token"]
    assert "attention         822,083,584   10.8 %   1,644,167,168         11.6 %      57,344" in lines
    assert "mlp             5,703,204,864   74.9 %  11,406,409,728         80.7 %           -" in lines
    assert "total           7,615,616,512  100.0 %  14,140,571,648        100.0 %      57,344" in lines
    assert "gate_proj  [3584, 18944]       1      28  67,895,296  135,790,592" in lines
    assert not any(line.startswith(("experts", "router", "qk_norm")) for line in lines)


def test_a_sparse_model_says_how_much_of_it_is_active() -> None:
    first = text_of("roofline params Qwen3-30B-A3B").splitlines()[0]
    assert ": 30,532,122,624 parameters (30.53 B), 3,353,032,704 (3.353 B, 11.0 %) active a token, 61.06 GB" in first


def test_a_tied_head_weighs_nothing_and_still_computes(small: str) -> None:
    lines = [line.split() for line in text_of("roofline params", small).splitlines()]
    head = next(line for line in lines if line[:1] == ["lm_head"])
    assert head[1:5] == ["0", "0.0", "%", "32,768"]


def test_steps_without_a_device_have_no_columns_of_times() -> None:
    plain_text = text_of("roofline step Qwen2.5-7B --phase decode --batch 2 --context 100")
    assert plain_text.splitlines()[0] == (
        "Qwen2.5-7B decode of batch 2: 28.36 GFLOP and 14.15 GB a step; --hardware gives times and limits"
    )
    assert "bound" not in plain_text
    timed = text_of("roofline step Qwen2.5-7B --phase decode --batch 2 --context 100 --hardware rtx-4090")
    header = next(line for line in timed.splitlines() if line.startswith("op "))
    assert header.split("  ")[-1] == "bound"
    assert "Compute alone takes 171.7 us, memory alone 14.04 ms" in timed
    assert timed.splitlines()[0] == (
        "Qwen2.5-7B decode of batch 2 on rtx-4090: at most 142.4 tokens/s, at least 14.04 ms a step, limited by memory "
        "(mfu 1.2 %, mbu 100.0 %)"
    )


def test_a_split_step_names_its_collectives() -> None:
    text = text_of(
        "roofline step Qwen3-30B-A3B --phase decode --batch 64 --context 100 --tp 2 --ep 2 --hardware h100-sxm"
    )
    assert "one of 4 devices (tp 2, ep 2)" in text
    assert "125.94 distinct experts a layer (expected)" in text
    assert "experts_down_proj     all-to-all        2     48      2.097 MB            25.17 MB" in text


def test_a_model_that_is_too_large_says_what_it_takes() -> None:
    assert text_of("roofline memory Qwen3-30B-A3B --hardware rtx-4090").splitlines()[0] == (
        "Qwen3-30B-A3B on rtx-4090 doesn't fit: weights, activations and overhead take 58.61 GiB of 21.17 GiB"
    )
    assert text_of("roofline memory Qwen2.5-7B --hardware rtx-4090").splitlines()[0] == (
        "Qwen2.5-7B on rtx-4090 doesn't fit: KV pool 4.65 GiB (4.995 GB), 87,088 tokens, less than one sequence of "
        "131,072 tokens"
    )


def test_experts_say_what_is_saved_and_until_when() -> None:
    lines = text_of("roofline experts Qwen2-57B-A14B").splitlines()
    assert lines[0] == (
        "Qwen2-57B-A14B: a decode step of batch 1 reads 27.41 GB of weights, 75.9 % less than with all 64 experts; "
        "from batch 35 on 99.0 % of the experts are touched"
    )
    rows = [line.split() for line in lines]
    assert ["8", "42.01", "65.6", "%", "79.83", "9.98", "70.2", "%", "29.8", "%", "-"] in rows
