"""The letters, the sizes behind them, and the steps that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from config_base import BASES, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, read

from qwenjax.config import ModelConfig
from qwenjax.dims import LEGEND, Block, Step, check_step, dims, shape, size
from qwenjax.errors import InputError
from qwenjax.ops import KV, OPS, WEIGHTS

COUNT = "Give a count of sequences or tokens."


def message(config: ModelConfig, step: Step) -> str:
    with pytest.raises(InputError) as caught:
        check_step(config, step)
    return str(caught.value)


def test_every_letter_in_use_is_in_the_legend_and_has_a_size() -> None:
    used = {letter for op in OPS for letter in op.einsum if letter not in ",->"}
    used |= {letter for letters in (*(w.letters for w in WEIGHTS), *(kv.letters for kv in KV)) for letter in letters}
    assert used - {"1"} <= set(LEGEND)
    assert set(dims(read(QWEN3))) == {*LEGEND, "1"}


@pytest.mark.parametrize(
    ("block", "width"), [("mlp", 128), ("experts", 32), ("shared_expert", 48)]
)  # the width of each block of QWEN2_MOE
def test_sizes_by_letter(block: Block, width: int) -> None:
    sizes = dims(read(QWEN2_MOE), Step(3, 5, 7), block)
    assert sizes == {
        "1": 1, "B": 3, "T": 5, "S": 7, "U": 1, "D": 64, "N": 4, "K": 2, "G": 2, "J": 4, "H": 16, "C": 2, "F": width,
        "E": 4, "A": 2, "V": 256, "L": 2,
    }  # fmt: skip


@pytest.mark.parametrize("model_type", BASES)
def test_grouped_heads_make_all_heads(model_type: str) -> None:
    sizes = dims(read(BASES[model_type], num_attention_heads=12, num_key_value_heads=3, head_dim=6))
    assert sizes["N"] == sizes["K"] * sizes["G"] == 12
    assert sizes["K"] * sizes["J"] == 12 + 2 * 3


def test_positions_that_get_logits() -> None:
    step = Step(2, 5, 9)
    assert dims(read(QWEN3), step)["U"] == 1
    assert dims(read(QWEN3), step, logits="all")["U"] == 5


def test_shapes_and_sizes() -> None:
    sizes = dims(read(QWEN3), Step(3, 5, 7))
    assert shape("BTNH", sizes) == (3, 5, 4, 32)
    assert size("BTNH", sizes) == 3 * 5 * 4 * 32
    assert (shape("", sizes), size("", sizes)) == ((), 1)


def test_steps_by_phase() -> None:
    assert Step.prefill(2, 8) == Step(2, 8, 8)
    assert Step.prefill(2, 8, 20) == Step(2, 8, 20)
    assert Step.decode(2, 20) == Step(2, 1, 20)
    assert Step() == Step(1, 1, 1)
    assert [step.phase for step in (Step.decode(2, 9), Step.prefill(2, 9), Step.prefill(1, 1, 9))] == [
        "decode",
        "prefill",
        "decode",  # a chunk of one token is a decode step
    ]


@pytest.mark.parametrize("step", [Step(), Step(1, 512, 512), Step(2**24, 1, 512), Step(3, 5, 7)])
def test_steps_that_can_run(step: Step) -> None:
    assert check_step(read(QWEN3), step) is step


@pytest.mark.parametrize(("field", "name"), [("batch", "batch"), ("query_len", "query_len"), ("kv_len", "context")])
@pytest.mark.parametrize("value", [1.0, "1", True, None, [1], float("nan")])
def test_what_is_no_count(field: str, name: str, value: Any) -> None:
    shown = "" if value is None else f" = {value!r}"
    assert message(read(QWEN3), Step(**{field: value})) == f"{name}{shown}: must be an integer. {COUNT}"


@pytest.mark.parametrize(("field", "name"), [("batch", "batch"), ("query_len", "query_len"), ("kv_len", "context")])
@pytest.mark.parametrize("value", [0, -1, -(2**70)])
def test_counts_below_one(field: str, name: str, value: int) -> None:
    assert message(read(QWEN3), Step(**{field: value})) == f"{name} = {value}: must be at least 1. {COUNT}"


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (
            Step(1, 8, 7),
            "context = 7: is less than the 8 query tokens, which are attended too. Give past and new tokens together.",
        ),
        (
            Step(1, 1, 513),
            ("context = 513: is beyond the model's 512 positions. "
            "Choose a shorter context, or a config with a RoPE scaling."),
        ),
        (Step(2**24 + 1), "batch = 16777217: is larger than any server's (16777216). Check the number."),
    ],
)  # fmt: skip
def test_steps_that_no_such_model_runs(step: Step, text: str) -> None:
    assert message(read(QWEN2), step) == text


def test_a_stretched_context_is_said_to_be_one() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400}
    config = read(QWEN3_MOE, rope_scaling=scaling)
    check_step(config, Step(1, 1, 1600))
    assert message(config, Step(1, 1, 1601)) == (
        "context = 1601: is beyond the model's 1600 positions (RoPE scaling included; max_position_embeddings 512). "
        "Choose a shorter context, or a config with a RoPE scaling."
    )
