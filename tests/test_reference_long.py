"""Positions past 4096 against transformers, all four architectures: long prompts, and tokens far from each other."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import torch

from qwenjax.cache import init_cache
from qwenjax.config import ModelConfig
from qwenjax.model import _hidden, _unembed, decode_step, forward, prefill

pytestmark = reference.MARK

LONG_YARN = {**reference.YARN, "original_max_position_embeddings": 2048}
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3-yarn": ("qwen3", {"rope_scaling": LONG_YARN}),
    "qwen2_moe-linear-window": ("qwen2_moe", {"rope_scaling": reference.ROPES["linear"], "window": True}),
    "qwen3_moe-yarn": ("qwen3_moe", {"rope_scaling": {**LONG_YARN, "attention_factor": 0.8}}),
    "qwen3_moe-window": ("qwen3_moe", {"window": True}),
}
PROMPT, STEPS = 4192, 8


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_of_4192_tokens_and_the_steps_after_it(name: str) -> None:
    """Every position in one go, and the last ones through the cache; a window is wider than 4096 tokens, and some are
    out of it. Experts are grouped for the prompt and gathered for a step; no token's choice of experts is nearer than
    1e-5 to another one, ten times what rounding moves."""
    model_type, changes = PROMPTS[name]
    sizes = {"head_dim": 32, "hidden_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "rope_theta": 1e6}
    data = reference.config_json(model_type, **sizes, max_position_embeddings=8192, sliding_window=4100, **changes)
    config = ModelConfig.from_hf(data)
    params, model = tiny.params(config), reference.model_of(data, attention="sdpa")
    tokens_BT = np.asarray(tiny.tokens("long", 1, PROMPT + STEPS))
    theirs_BTV = reference.logits_of(model, tokens_BT)
    reference.assert_near(forward(config, params, tokens_BT), theirs_BTV)

    cache = init_cache(config, 1, PROMPT + STEPS, "float32")
    logits_BV, cache = prefill(config, params, tokens_BT[:, :PROMPT], np.array([PROMPT], np.int32), cache)
    reference.assert_near(logits_BV, theirs_BTV[:, PROMPT - 1])
    for i in range(PROMPT, PROMPT + STEPS):
        logits_BV, cache = decode_step(config, params, tokens_BT[:, i], cache)
        reference.assert_near(logits_BV, theirs_BTV[:, i], f"position {i}")


@pytest.mark.parametrize("rope", ["default", "yarn"])
@pytest.mark.parametrize("model_type", reference.MODEL_TYPES)
def test_tokens_far_from_each_other(model_type: str, rope: str) -> None:
    """An error in the last bit of a frequency is an angle once positions are far apart; a long prompt averages it out.

    Frequencies computed in double precision and rounded once fail this: in qwen3 by 4e-4 at 32768 and 1.9e-3 at 100000.
    """
    data = reference.config_json(model_type, rope=rope, head_dim=128, rope_theta=1e6, max_position_embeddings=2**17)
    config = ModelConfig.from_hf(data)
    params, model = tiny.params(config), reference.model_of(data)
    tokens_BT = tiny.tokens("far", 1, 16)
    mask = torch.triu(torch.full((16, 16), -1e30), diagonal=1)[None, None]
    for gap in (4096, 32768, 100000):
        positions_T = np.concatenate([np.arange(8), gap + np.arange(8)])
        x_BTD, _ = _hidden(
            config, params, tokens_BT, jnp.asarray(positions_T)[None], jnp.asarray(positions_T), None, None
        )
        theirs = reference.logits_of(
            model, tokens_BT, position_ids=torch.tensor(positions_T)[None], attention_mask=mask
        )
        reference.assert_near(_unembed(config, params, x_BTD), theirs, f"gap {gap}")
