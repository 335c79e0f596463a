"""Measured steps of a tiny model against a made-up calibration: bookkeeping, cuts, commands; never wall times."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from measured_box import box
from typer.testing import CliRunner

from qwenjax import ModelConfig, param_shapes
from roofline import InputError, Step, predict_step
from roofline.calibrate import calibrate
from roofline.calibrated import predict_calibrated
from roofline.cli import app
from roofline.compare import GROUPS, OTHER_GROUP, compare, cut_to_memory, default_steps
from roofline.hardware import load_hardware, write_hardware
from roofline.measure import Samples, environment, fill_params, measure_call, step_call

TINY = ModelConfig(
    "qwen3", vocab_size=384, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, name="tiny",
)  # fmt: skip


def test_the_harness_leaves_the_first_call_out() -> None:
    calls = []
    samples = measure_call(lambda: calls.append(1), budget_s=0, least=4)
    assert len(calls) == 5
    assert len(samples.seconds) == 4
    assert Samples((3.0, 1.0, 2.0)).median_s == 2.0
    assert Samples((3.0, 1.0, 2.0)).best_s == 1.0


def test_a_step_call_repeats_the_same_step() -> None:
    call = step_call(TINY, fill_params(TINY, "float32"), Step.decode(2, 16), "float32")
    first, cache = call()
    again, _ = call()
    assert first.shape == (2, TINY.vocab_size)
    np.testing.assert_array_equal(np.asarray(first), np.asarray(again))
    assert bool(np.isfinite(np.asarray(first)).all())
    assert cache.is_deleted() if hasattr(cache, "is_deleted") else cache.keys[0].is_deleted()


def test_made_up_weights_have_the_models_shapes_and_a_plain_spread() -> None:
    params, shapes = fill_params(TINY, "float32"), param_shapes(TINY, "float32")
    assert jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), params) == jax.tree.map(
        lambda leaf: (leaf.shape, str(leaf.dtype)), shapes
    )
    table = np.asarray(params["embed_tokens"])
    assert abs(table.mean()) < 0.002
    assert table.std() == pytest.approx(0.02, rel=0.05)


def test_rows_hold_what_the_parts_say() -> None:
    chip = box()
    result = compare(TINY, chip, batches=(1, 2), prompts=(16, 32), budget_s=0.0)
    steps = default_steps(TINY, (1, 2), (16, 32))
    assert [(row.phase, row.batch, row.query_len, row.context) for row in result.rows] == [
        (step.phase, step.batch, step.query_len, step.kv_len) for step in steps
    ]
    for row, step in zip(result.rows, steps, strict=True):
        bound = predict_step(TINY, step, chip, dtype="float32")
        assert row.bound_s == bound.time_s
        assert row.predicted_s == sum(op.time_s for op in predict_calibrated(TINY, step, chip, "float32"))
        assert row.error == row.predicted_s / row.measured_s - 1
        assert row.mfu == pytest.approx(bound.flops / row.measured_s / 1e12)
        assert row.mbu == pytest.approx(bound.bytes / row.measured_s / 1e12)
        assert min(row.samples) == row.best_s <= row.measured_s
    assert result.layers == 3
    assert result.notes == ()
    assert result.environment["jax"] == environment()["jax"]
    assert [(fall.phase, fall.context) for fall in result.waterfalls] == [("prefill", 32), ("decode", 32)]
    for fall in result.waterfalls:
        (row,) = (row for row in result.rows if (row.phase, row.batch, row.context) == (fall.phase, 1, fall.context))
        terms = {term.name: term.time_s for term in fall.terms}
        assert fall.measured_s == row.measured_s == pytest.approx(sum(terms.values()))
        assert terms["roof"] + terms["ops in turn"] == pytest.approx(row.bound_s)
        assert terms["residual"] == row.measured_s - row.predicted_s
    for phase in ("prefill", "decode"):
        parts = [part for part in result.ops if part.phase == phase]
        dense = [group for group in dict.fromkeys(GROUPS.values()) if "expert" not in group]
        assert [part.op for part in parts] == [*dense, OTHER_GROUP]
        row = next(row for row in result.rows if (row.phase, row.batch, row.context) == (phase, 1, 32))
        assert sum(part.measured_s for part in parts) == pytest.approx(row.measured_s)
        assert sum(part.predicted_s for part in parts) == pytest.approx(row.predicted_s)


def test_a_mixture_of_experts_is_compared_too() -> None:
    mixture = dataclasses.replace(
        TINY,
        model_type="qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        mlp_only_layers=(1,),
    )
    result = compare(mixture, box(), batches=(1,), prompts=(32,), budget_s=0.0)
    groups = {part.op for part in result.ops if part.phase == "prefill"}
    assert {"experts", "MLP", "attention projections"} <= groups
    for phase in ("prefill", "decode"):
        shares = [part.measured_s for part in result.ops if part.phase == phase and part.op == "experts"]
        assert len(shares) == 1
        assert shares[0] > 0


def test_the_depth_is_cut_when_asked_and_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Step.decode(1, 32)]
    cut, notes = cut_to_memory(TINY, steps, 2, "float32")
    assert cut.num_hidden_layers == 2
    assert notes == ["depth cut to 2 of 3 layers, as asked"]
    monkeypatch.setattr("roofline.compare.available_memory_bytes", lambda: 900_000)
    cut, notes = cut_to_memory(TINY, steps, None, "float32")
    assert cut.num_hidden_layers == 1
    assert notes == ["depth cut to 1 of 3 layers: 0.0 GB of memory are free"]
    monkeypatch.setattr("roofline.compare.available_memory_bytes", lambda: 1000)
    with pytest.raises(InputError) as raised:
        cut_to_memory(TINY, steps, None, "float32")
    assert str(raised.value) == (
        "model = 'tiny': one layer doesn't fit in the 0.0 GB that are free here. Use a smaller model."
    )


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({
            "model_type": "qwen3", "vocab_size": 384, "hidden_size": 96, "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
            "rope_theta": 1e6, "tie_word_embeddings": True,
        })
    )  # fmt: skip
    return path


def test_the_command_prints_one_object_and_draws(tiny_model: Path, tmp_path: Path) -> None:
    write_hardware(box(flops_per_s=1e14, bytes_per_s=1e14), tmp_path / "box.toml")
    arguments = [
        "compare",
        str(tiny_model),
        "--hardware",
        str(tmp_path / "box.toml"),
        "--batch",
        "1,2",
        "--prompt",
        "16",
    ]
    done = CliRunner().invoke(app, [*arguments, "--plot", str(tmp_path / "out.svg"), "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert {"environment", "rows", "ops", "notes", "layers", "median_abs_error"} <= record.keys()
    names = {"phase", "batch", "query_len", "context", "measured_s", "predicted_s", "bound_s", "error", "mfu", "mbu"}
    assert all(names <= row.keys() for row in record["rows"])
    assert (tmp_path / "out.svg").stat().st_size > 10_000


def test_steps_above_the_roof_fail_the_check(tiny_model: Path, tmp_path: Path) -> None:
    write_hardware(box(flops_per_s=1e9, bytes_per_s=1e9), tmp_path / "box.toml")
    arguments = ["compare", str(tiny_model), "--hardware", str(tmp_path / "box.toml"), "--batch", "8", "--prompt", "64"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "steps ran above the calibrated roof, which no step can: the calibration is too low." in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--hardware", "rtx-4090"],
            "--hardware = 'rtx-4090': has no measured rates. Use `here`, or a file of `roofline calibrate`.",
        ),
        (
            ["--plot", "out.txt"],
            "path = 'out.txt': has no suffix of a known figure format. Use .png, .svg or .pdf",
        ),
        (["--batch", "0"], "batch = 0: must be at least 1. Give a count of sequences or tokens."),
        (
            ["--prompt", "513"],
            "context = 513: is beyond the model's 512 positions. "
            "Choose a shorter context, or a config with a RoPE scaling.",
        ),
        (["--layers", "3"], "layers = 3: must be from 1 to num_hidden_layers 2. Choose fewer."),
        (["--dtype", "float16"], "dtype = 'float16': was not measured on here. Measured: float32."),
    ],
)
def test_bad_input_is_one_message(tiny_model: Path, tmp_path: Path, options: list[str], message: str) -> None:
    write_hardware(box(), tmp_path / "box.toml")
    default = [] if "--hardware" in options else ["--hardware", str(tmp_path / "box.toml")]
    with pytest.raises(InputError) as raised:
        CliRunner().invoke(app, ["compare", str(tiny_model), *default, *options], catch_exceptions=False)
    assert str(raised.value) == message


def test_calibrate_measures_and_keeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole calibration on few and small shapes: what it writes is read back and predicts."""
    import roofline.calibrate as module

    small = {
        "_SHAPES": ((64, 64), (128, 64), (64, 128)),
        "_ROWS": (1, 8),
        "_CONTEXTS": (32,),
        "_GROUPS": (1, 2),
        "_HEADS": (2, 4),
        "_EXPERT_SHAPE": (24, 16),
        "_EXPERT_TOKENS": (1, 64),
        "_ROTATING_BYTES": 2**16,
        "_CALL_FLOPS": {"cpu": 1e6, "gpu": 1e6},
    }
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "measure_call", lambda call, **_: measure_call(call, budget_s=0))
    told: list[float] = []
    chip = calibrate(lambda _what, share: told.append(share))
    assert told == sorted(told)
    assert told[-1] == 1.0
    write_hardware(chip, tmp_path / "here.toml")
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    again = load_hardware("here")
    assert again == chip
    assert sum(op.time_s for op in predict_calibrated(TINY, Step.decode(1, 32), again, "float32")) > 0
    assert all(figure.kind == "measured here" for figure in again.figures.values())
