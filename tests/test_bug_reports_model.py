"""Reported faults of Qwen models in other engines, each on its own small input against transformers in float32."""

from __future__ import annotations

import hf_bridge
import numpy as np
import pytest
import reference
import tiny
import torch
from config_base import BASES, DROP, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, Json, changed
from reference import TOLERANCE, YARN

from qwenjax.config import ModelConfig
from qwenjax.model import forward, hidden_states

pytestmark = reference.MARK

WINDOW = {"use_sliding_window": True, "sliding_window": 8}
# Row of the reports and what is tried: base and changes.
CASES: dict[str, tuple[Json, Json]] = {
    "1 qwen2_moe, not renormalised": (QWEN2_MOE, {"norm_topk_prob": False}),
    "1 qwen2_moe, renormalised": (QWEN2_MOE, {"norm_topk_prob": True}),
    "3 qwen3_moe without the key": (QWEN3_MOE, {"norm_topk_prob": DROP}),
    "3 qwen2_moe without the key": (QWEN2_MOE, {"norm_topk_prob": DROP}),
    "3 qwen3_moe, renormalised": (QWEN3_MOE, {"norm_topk_prob": True}),
    "7 a dense layer, router logits asked for": (QWEN3_MOE, {"mlp_only_layers": [1], "output_router_logits": True}),
    "11 the factor wins": (QWEN3, {"rope_scaling": {**YARN, "factor": 2.0}}),
    "13 yarn on experts, legacy": (QWEN3_MOE, {"rope_scaling": YARN}),
    "13 yarn on experts, 5.x": (
        QWEN3_MOE,
        {"rope_theta": DROP, "rope_parameters": {**YARN, "rope_theta": 1e6}, "torch_dtype": DROP, "dtype": "bfloat16"},
    ),
    "15 no base": (QWEN2, {"rope_theta": DROP}),
    "15 no base in a 5.x block": (QWEN3, {"rope_theta": DROP, "rope_parameters": {"rope_type": "default"}}),
    "15 the base in a block": (QWEN3, {"rope_theta": DROP, "rope_parameters": {"rope_theta": 5e6}}),
    "17 no head_dim, qwen3": (QWEN3, {"head_dim": DROP}),
    "17 no head_dim, qwen3_moe": (QWEN3_MOE, {"head_dim": DROP}),
    "17 head_dim of its own, qwen2": (QWEN2, {"head_dim": 24}),
    "17 head_dim of its own, qwen2_moe": (QWEN2_MOE, {"head_dim": 24}),
    "19 biases without a key": (QWEN2, {}),
    "19 biases of qwen3": (QWEN3, {"attention_bias": True}),
    "19 no biases in qwen2_moe": (QWEN2_MOE, {"qkv_bias": False}),
    **{
        f"21 the flag is off, {name}": (base, {**WINDOW, "use_sliding_window": False, "max_window_layers": 0})
        for name, base in BASES.items()
    },
    **{f"25 tied, {name}": (base, {"tie_word_embeddings": True}) for name, base in BASES.items()},
    **{f"C1 as many as layers, {name}": (base, {**WINDOW, "max_window_layers": 2}) for name, base in BASES.items()},
    "C1 one less": (QWEN2, {**WINDOW, "max_window_layers": 1}),
    "C1 more than layers": (QWEN3, {**WINDOW, "max_window_layers": 70}),
    "C3 28 by default": (QWEN3, {**WINDOW, "num_hidden_layers": 30}),
    "D1 the least of a block": (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "D1 linear": (QWEN3, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    **{
        f"D3 {positions} positions": (QWEN3, {"rope_scaling": YARN, "max_position_embeddings": positions})
        for positions in (512, 160, 64)
    },
    "D5 attn_factor": (QWEN3, {"rope_scaling": {**YARN, "attn_factor": 0.8782}}),
    "D5 beside attention_factor": (QWEN3, {"rope_scaling": {**YARN, "attn_factor": 0.8782, "attention_factor": 1.5}}),
    "F3 one sparse layer of four": (
        QWEN3_MOE,
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "F3 every third": (QWEN2_MOE, {"num_hidden_layers": 3, "decoder_sparse_step": 3}),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits(case: str) -> None:
    data = changed(CASES[case][0], **CASES[case][1])
    config = ModelConfig.from_hf(data)
    tokens_BT = np.asarray(tiny.tokens(case, 2, 72, vocab=config.vocab_size))
    theirs = hf_bridge.reference_model(data, tiny.state_dict(config))(torch.tensor(tokens_BT).long()).logits.numpy()
    assert theirs.std() > 0.5  # logits of nothing would agree too
    ours = forward(config, tiny.params(config), tokens_BT)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * max(1, theirs.std()))


def test_logits_see_every_setting() -> None:
    """Cases of one base and equal numbers would prove nothing of the setting between them."""
    logits = {}
    for case in ("1 qwen2_moe, not renormalised", "1 qwen2_moe, renormalised", "C1 one less", "19 biases without a key",
                 "D1 the least of a block", "15 no base"):  # fmt: skip
        config = ModelConfig.from_hf(changed(CASES[case][0], **CASES[case][1]))
        logits[case] = np.asarray(forward(config, tiny.params(config), tiny.tokens("same", 1, 72, vocab=256)))
    (a, b), dense = list(logits.values())[:2], list(logits.values())[2:]
    assert np.abs(a - b).max() > 0.05
    assert min(np.abs(dense[i] - dense[j]).max() for i in range(4) for j in range(i)) > 0.05


@pytest.mark.parametrize("model_type", BASES)
@torch.no_grad()
def test_hidden_states_are_those_of_the_base_model(model_type: str) -> None:
    # A5: what an embedding model is asked for
    data = changed(BASES[model_type], rope_scaling=YARN)
    config = ModelConfig.from_hf(data)
    model = hf_bridge.reference_model(data, tiny.state_dict(config)).model
    tokens_BT = np.asarray(tiny.tokens(model_type, 2, 72, vocab=256))
    theirs = model(torch.tensor(tokens_BT).long()).last_hidden_state.numpy()
    params = {leaf: value for leaf, value in tiny.params(config).items() if leaf != "lm_head"}
    np.testing.assert_allclose(hidden_states(config, params, tokens_BT), theirs, rtol=0, atol=TOLERANCE * theirs.std())
