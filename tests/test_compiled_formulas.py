"""Hand formulas of elementwise work against what the compiler counts, for any config and step."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from qwenjax import ModelConfig
from qwenjax.layers import rope_frequencies
from qwenjax.moe_blocks import block_rows, choose_way, num_blocks
from roofline.check import check_program
from roofline.compiler_cost import LARGEST_EXACT
from roofline.formulas.compiled import (
    CompiledStep,
    elementwise_costs,
    expert_blocks,
    is_gathered,
    norm_cost,
    rope_amplitude,
    silu_product_cost,
    softmax_cost,
)
from roofline.formulas.compiled_training import num_arrays, undecayed_params

ROPES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 0.7},
)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any small model of the four architectures; head_dim from 4, as a single frequency of 1 would be folded."""
    model_type = draw(st.sampled_from(["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    changes: dict[str, Any] = {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "hidden_size": draw(st.sampled_from([1, 5, 24])),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([4, 6, 16])),
        "intermediate_size": draw(st.sampled_from([1, 20])),
        "vocab_size": draw(st.sampled_from([1, 33])),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_scaling": draw(st.sampled_from(ROPES)),
    }
    if model_type.startswith("qwen3"):
        changes["attention_bias"] = draw(st.booleans())
    if draw(st.booleans()):
        changes |= {"use_sliding_window": True, "sliding_window": draw(st.sampled_from([1, 3, 9]))}
        changes["max_window_layers"] = draw(st.integers(0, 2))
    if not model_type.endswith("moe"):
        return tiny.config(model_type, **changes)
    experts = draw(st.sampled_from([1, 2, 5, 8, 21, 40]))
    changes |= {
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, min(experts, 8))),
        "moe_intermediate_size": draw(st.sampled_from([1, 9])),
        "norm_topk_prob": draw(st.booleans()),
        "decoder_sparse_step": draw(st.integers(1, changes["num_hidden_layers"])),
    }
    if model_type == "qwen2_moe":
        changes |= {"shared_expert_intermediate_size": draw(st.sampled_from([0, 6])), "qkv_bias": draw(st.booleans())}
    return tiny.moe_config(model_type, **changes)


@st.composite
def steps(draw: st.DrawFn) -> CompiledStep:
    batch, dtype = draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from(["float32", "bfloat16"]))
    length, past = draw(st.sampled_from([1, 2, 7, 33])), draw(st.sampled_from([1, 2, 15]))
    kind = draw(st.sampled_from(["prefill", "chunk", "decode"]))
    if kind == "decode":
        return CompiledStep("decode", batch, 1, past, dtype)
    if kind == "chunk":
        return CompiledStep("chunk", batch, length, length + past, dtype)
    return CompiledStep("prefill", batch, length, length, dtype)


@given(configs(), steps())
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # shrinking would trace and lower for minutes
    suppress_health_check=list(HealthCheck),
)
def test_the_formulas_hold_for_any_model_and_step(config: ModelConfig, step: CompiledStep) -> None:
    check = check_program(config, step)
    wrong = [row for row in check.rows if row.unexplained_flops or row.unexplained_transcendentals]
    assert wrong == []
    assert check.holds
    if check.program_flops < LARGEST_EXACT:
        assert check.program_flops == check.reported_flops
        assert check.program_transcendentals == check.reported_transcendentals


@given(st.integers(1, 10**6), st.integers(1, 512))
def test_blocks_of_experts_equal_the_models(rows: int, experts: int) -> None:
    assert expert_blocks(rows, experts) == (num_blocks(rows, experts), block_rows(rows, experts))
    assert is_gathered(rows, experts) == (choose_way(rows, 1, experts) == "gathered")


@pytest.mark.parametrize("scaling", ROPES)
def test_the_amplitude_of_rope_equals_the_models(scaling: dict[str, Any] | None) -> None:
    config = tiny.config("qwen2", rope_scaling=scaling)
    assert rope_amplitude(config) == rope_frequencies(16, 1e4, config.rope_scaling)[1]


def test_closed_forms_of_one_row() -> None:
    assert norm_cost(1, 3) == (3 + 2 + 1 + 1 + 3 + 3, 1)
    assert softmax_cost(1, 3) == (2 + 1 + 3 + 2 + 3, 3)
    assert silu_product_cost(1) == (5, 1)


def test_a_float32_model_casts_nothing_but_positions() -> None:
    config = tiny.config("qwen3")
    casts = {
        dtype: sum(
            cost.flops
            for cost in elementwise_costs(config, CompiledStep("decode", 2, 1, 9, dtype))
            if cost.kind == "cast"
        )
        for dtype in ("float32", "bfloat16")
    }
    assert casts["float32"] == 2
    assert casts["bfloat16"] > 2


def test_arrays_and_decayed_parameters_are_the_trainers() -> None:
    import jax

    from qwenjax.train.settings import TrainConfig
    from qwenjax.train.step import decay_mask
    from qwenjax.weights import param_shapes

    assert TrainConfig().weight_decay  # the formulas count it
    for config in (tiny.config("qwen2", tie_word_embeddings=True), tiny.config("qwen3"), tiny.moe_config("qwen2_moe")):
        shapes = param_shapes(config)
        assert num_arrays(config) == len(jax.tree.leaves(shapes))
        kept = jax.tree.map(lambda leaf, decays: 0 if decays else leaf.size, shapes, decay_mask(config, shapes))
        assert undecayed_params(config) == sum(jax.tree.leaves(kept))
