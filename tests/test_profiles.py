"""The profiles that ship: what they hold, which one is chosen, their figures against measurements, and bad ones."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from score_rows import load_bench

from qwenjax import ModelConfig
from roofline import InputError, predict
from roofline.hardware import known_ids
from roofline.profile import KINDS, Profile, choose_profile, find_profile, known_profiles, load_profile, parse_profile
from roofline.timing.engine import CONSTANTS
from roofline.timing.serving import predict_case

FILES = sorted(path.name for path in (resources.files("roofline") / "data" / "profiles").iterdir())
REMEDY = "Outside, a prediction could be above the roof, or the unit is another."
GOOD = """
name = "made-up"
engine = "vllm"
versions = ["0.6.3"]
hardware = ["rtx-4090"]
source = "a test"
validation = "none"
[intervals]
single = [0.9, 1.1]
elsewhere = [0.7, 1.5]
[scheduler]
source = "a test"
max_num_seqs = 16
[rows]
grade_a = 1
grade_b = 2
[constants]
step_s = { value = 0.001 }
[schemes."awq"]
memory = { value = 1.2 }
"""


def test_every_profile_says_what_it_was_fitted_on() -> None:
    assert len(FILES) == len(known_profiles()) > 20
    for name in FILES:
        data = tomllib.loads((resources.files("roofline") / "data" / "profiles" / name).read_text(encoding="utf-8"))
        rows = data["rows"]
        assert sum(rows["by_source"].values()) == rows["grade_a"] + rows["grade_b"] > 0
        assert data["source"].startswith(f"{rows['grade_a'] + rows['grade_b']} published measurements: ")
        assert "on models it hadn't seen" in data["validation"]
        assert set(data["intervals"]) == {*KINDS, "elsewhere"}
        for low, high in data["intervals"].values():
            assert 0 < low < 1 < high
        assert set(data["constants"]) <= set(CONSTANTS)
        for entry in data["constants"].values():
            assert entry["bounds"][0] <= entry["value"] <= entry["bounds"][1]
            assert entry["unit"] in ("1", "s")
            assert entry["meaning"]
        assert set(data["hardware"]) <= set(known_ids())


def test_no_profile_saw_the_seed_text() -> None:
    for profile in known_profiles():
        assert "61.9" not in profile.source
        assert "seed" not in profile.source.lower()


def test_qwen_2_5_7b_on_a_4090_as_somebody_measured_it() -> None:
    """61.9 tokens/s at batch 1, from constants that saw no row of that text (1024 tokens in, 256 out)."""
    prediction = predict(ModelConfig.from_hf("Qwen2.5-7B"), "rtx-4090", prompt=1024, output=256, profile="vllm")
    [row] = prediction.rows
    assert row.tokens_per_s_per_sequence == pytest.approx(61.9, rel=0.03)
    assert prediction.profile.name == "vllm-0.19-rtx-4090"
    assert prediction.nearest == ""
    assert row.low < row.e2e_s < (row.high or 0)


@pytest.mark.parametrize(
    ("engine", "hardware", "version", "name"),
    [
        ("vllm", "rtx-4090", "", "vllm-0.19-rtx-4090"),
        ("vllm", "rtx-4090", "0.7.3", "vllm-0.7-rtx-4090"),
        ("vllm", "a100-40gb-sxm", "0.6.3", "vllm-0.6-a100"),
        ("vllm", "h100-sxm", "0.7.3", "vllm-0.7-h100"),
        ("vllm", "l40s", "0.19", "vllm-0.19-rtx-4090"),
        ("llama.cpp", "a6000", "", "llama.cpp-2025-rtx-3090"),
        ("llama.cpp", "rtx-4090", "b4567", "llama.cpp-2024-rtx-4090"),
        ("llama.cpp", "rtx-3090", "b3000", "llama.cpp-2024-rtx-3090"),
        ("gpt-fast", "h100-sxm", "", "gpt-fast-2024-a100"),
        ("nobody's engine", "a100-80gb-sxm", "", "any"),
    ],
)
def test_which_profile_is_chosen(engine: str, hardware: str, version: str, name: str) -> None:
    assert choose_profile(known_profiles(), engine, hardware, version).profile.name == name


@pytest.mark.parametrize("engine", sorted({profile.engine for profile in known_profiles()}))
def test_an_engine_has_a_profile_for_every_chip_and_version(engine: str) -> None:
    for chip in known_ids():
        for version in ("", "b4567", "0.6.1", "2031", "main"):
            choice = find_profile(f"{engine}=={version}" if version else engine, chip)
            assert choice.profile.engine == engine
            assert choice.nearest == bool(choice.reason)


def test_the_nearest_profile_says_what_it_is_the_nearest_to() -> None:
    choice = find_profile("gpt-fast", "h100-sxm")
    assert choice.nearest
    near = "a100-80gb-sxm, a100-40gb-sxm, a100-80gb-pcie"
    assert choice.reason == f"nothing was fitted on h100-sxm; by architecture {near} is nearest"
    low, high = choice.interval("single")
    own_low, own_high = choice.profile.intervals["single"]
    assert low <= own_low
    assert high >= own_high
    assert find_profile("gpt-fast-2024-a100", "l4").reason == f"it was fitted on {near}, not on l4"
    assert not find_profile("vllm==0.6.3", "a100-80gb-sxm").nearest


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(
        InputError, match=r"'vlm': is not a profile or engine that is known here\. Known: bound, .*vllm"
    ):
        find_profile("vlm", "rtx-4090")
    with pytest.raises(InputError, match=r"'vllm': is not a profile that is known here\. Known: bound, any,"):
        load_profile("vllm")


def test_a_profile_is_read_from_text() -> None:
    profile = parse_profile(GOOD)
    assert profile.constants == {"step_s": 0.001}
    assert profile.schemes == {"awq": {"memory": 1.2}}
    assert profile.scheduler.max_num_seqs == 16
    assert profile.elsewhere == (0.7, 1.5)
    assert profile.num_rows == 3
    assert profile.scheduler_source == "a test"


def test_a_profile_is_chosen_and_named_whole_though_only_heads_are_read_for_it() -> None:
    for profile in known_profiles():
        assert load_profile(profile.name) == find_profile(profile.name).profile == profile
        assert profile.constants
        assert profile.scheduler_source or profile.name == "any"
    for chip in known_ids():
        for engine in ("vllm", "vllm==0.6.3", "sglang", "any"):
            name, _, version = engine.partition("==")
            assert find_profile(engine, chip) == choose_profile(known_profiles(), name, chip, version)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "step_s = { value = 0.001 }",
            "step_s = { value = 1.2 }",
            f"step_s = 1.2: must be from 0 to 0.05 s. {REMEDY}",
        ),
        (
            "step_s = { value = 0.001 }",
            "stop_s = { value = 0.001 }",
            f"stop_s = 0.001: is not a constant of an engine. Known: {', '.join(CONSTANTS)}.",
        ),
        (
            "memory = { value = 1.2 }",
            'memory = { value = "much" }',
            f"scheme_memory = 'much': must be from 0.3 to 8 1. {REMEDY}",
        ),
    ],
)
def test_a_bad_constant_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_profile(GOOD.replace(old, new))
    assert str(caught.value) == message


def test_intervals_hold_most_published_rows(shared: Path) -> None:
    """Four of five is what they hold of rows that weren't fitted; of these, which were, no fewer."""
    bench = load_bench()
    cases = bench["cases"].read_rows(shared / "measurements" / "published.csv").cases
    inside = []
    for case in cases[::3]:
        made = predict_case(case)
        if made.expected is not None and not case.h20_qwen3_table:
            inside.append(made.low <= case.measured <= made.high)
    assert len(inside) > 200
    assert np.mean(inside) > 0.8


def test_a_fit_is_the_same_each_time_and_finds_constants_that_made_the_rows() -> None:
    load_bench()
    fit_engine, fit_groups = (importlib.import_module(name) for name in ("fit_engine", "fit_groups"))
    made = {"step_s": 0.0021, "layer_s": 9e-6}
    truth = Profile("truth", "", "", "vllm", ("0.6.3",), ("a100-80gb-sxm",), made)
    from test_serving import CASE, CONFIGS, replace

    cases = []
    for config in CONFIGS[::2]:
        for length in (128, 4096, 16384):
            case = replace(CASE, config=config, metric="decode_tok_s", input_len=length)
            cases.append(replace(case, measured=predict_case(case, [truth]).expected))
    scheduler = fit_groups.GROUPS[4].scheduler
    stack = fit_engine.Stack([fit_engine.make_row(case, scheduler) for case in cases])
    first, second = (fit_engine.fit_engine(stack, ("step_s", "layer_s")) for _ in range(2))
    assert first == second
    assert np.abs(stack.residuals(first)).max() < 0.01
    assert first.constants["step_s"] == pytest.approx(0.0021, rel=0.15)
    # Prompts of one token repeated are scored, but move nothing.
    odd = replace(cases[0], measured=cases[0].measured * 3, repeated_token=True)
    more = fit_engine.Stack([*stack.rows, fit_engine.make_row(odd, scheduler)])
    moved = fit_engine.fit_engine(more, ("step_s", "layer_s"))
    assert moved.constants == pytest.approx(first.constants, rel=1e-6)
    assert more.residuals(moved)[-1] == pytest.approx(np.log(3), abs=0.02)


def test_the_command_prints_low_expected_and_high() -> None:
    arguments = ["predict", "Qwen2.5-7B", "--hardware", "rtx-4090", "--prompt", "1024", "--output", "256"]
    command = [sys.executable, "-m", "roofline", *arguments, "--profile", "vllm"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    data = json.loads(done.stdout)
    [row] = data["rows"]
    assert row["low"] < row["expected"] == row["e2e_s"] < row["high"]
    assert data["profile"]["name"] == "vllm-0.19-rtx-4090"
    assert data["profile"]["nearest"] is None
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Profile vllm-0.19-rtx-4090: " in text
    assert "low" in text
    assert "at least" not in text
    far = subprocess.run([*command[:6], "l40s", *command[7:]], capture_output=True, text=True, check=True).stdout
    assert "The nearest profile, not one fitted here (nothing was fitted on l40s;" in far


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--profile", "vlm"], "profile = 'vlm': is not a profile or engine that is known here."),
        (["--profile", "vllm", "--ep", "2"], "ep = 2: isn't timed by the profile"),
        (["--profile", "vllm", "--bandwidth", "887e9"], "bandwidth = 887000000000.0: can't be set beside the profile"),
    ],
)
def test_what_a_profile_cant_time_is_refused(extra: list[str], message: str) -> None:
    arguments = ["predict", "Qwen3-30B-A3B", "--hardware", "h100-sxm", "--prompt", "64", "--output", "8", *extra]
    done = subprocess.run([sys.executable, "-m", "roofline", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_step_has_the_bound_only() -> None:
    arguments = ["step", "Qwen2.5-7B", "--phase", "decode", "--profile", "vllm-0.6-a100"]
    done = subprocess.run([sys.executable, "-m", "roofline", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--profile = 'vllm-0.6-a100': has no times of single ops; step prints the lower bound." in done.stderr


def test_an_engine_that_was_rewritten_is_farther_than_its_numbers_say() -> None:
    """vLLM 0.11 (V1) is nearer to 0.20 than to 0.4 (V0) on one GPU, though fewer releases lie between the latter."""
    made = [Profile(f"vllm-{v}", "", "", "vllm", (v,), ("a100-80gb-sxm",)) for v in ("0.4", "0.7", "0.20")]
    assert choose_profile(made, "vllm", "a100-80gb-sxm", "0.11.0").profile.name == "vllm-0.20"
    assert choose_profile(made, "vllm", "a100-80gb-sxm", "0.6.3").profile.name == "vllm-0.7"


MEAN = (("0.12", 1.0), ("0.16", 2.0))


def test_where_none_was_fitted_the_mean_of_the_engines_profiles_stands_in_by_nearness() -> None:
    near, far = (Profile(f"vllm-{v}", "", "", "vllm", (v,), ("l4",), {"products_memory": c}) for v, c in MEAN)
    choice = choose_profile((near, far), "vllm", "l4", "0.13")
    assert choice.profile.name == "vllm-0.12"
    share = math.exp(-1)  # 1 and 3 minor versions apart
    assert choice.profile.constants["products_memory"] == pytest.approx((1.0 + 2.0 * share) / (1 + share))
    assert choice.provenance == ("profile vllm-0.12, averaged with 1 of its engine by nearness of GPU and version")
    assert choose_profile((near, far), "vllm", "l4", "0.12.1").profile == near
    assert choose_profile((near, far), "vllm", "l4", "0.16").profile == far
