"""Rotary frequencies and tables against transformers', number by number."""

from __future__ import annotations

import copy
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.layers import rope_frequencies, rope_tables
from qwenjax.rope_config import SUPPORTED_TYPES

pytestmark = reference.MARK

FREQUENCY_ROPES = {
    **reference.ROPES,
    "yarn_mscale": {**reference.YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn_qwen": {**reference.YARN, "original_max_position_embeddings": 32768},
    "yarn_short": {**reference.YARN, "original_max_position_embeddings": 5, "factor": 2.5},
    "yarn_one_channel": {**reference.YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn_factor_one": {**reference.YARN, "factor": 1.0},
    "yarn_mscale_alone": {**reference.YARN, "mscale": 0.7},
}


@pytest.mark.parametrize("name", FREQUENCY_ROPES)
def test_rope_frequencies(name: str) -> None:
    """Equal but for the last bit of a few, where torch's float32 power isn't rounded correctly."""
    equal, count = 0, 0
    for head_dim, theta in itertools.product((16, 64, 80, 128), (1e4, 1e6, 5e6)):
        data = tiny.config_json(head_dim=head_dim, rope_theta=theta, rope_scaling=copy.deepcopy(FREQUENCY_ROPES[name]))
        config = ModelConfig.from_hf(data)
        ours, scaling = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        theirs = Qwen3RotaryEmbedding(AutoConfig.for_model(**data))
        assert scaling == theirs.attention_scaling
        np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=2.5e-7, atol=0)
        equal, count = equal + np.sum(ours == theirs.inv_freq.numpy()), count + head_dim // 2
    assert equal >= 0.95 * count


def test_every_rope_of_transformers_is_computed_or_refused() -> None:
    assert set(SUPPORTED_TYPES) - {"default"} <= set(ROPE_INIT_FUNCTIONS)
    for name in set(ROPE_INIT_FUNCTIONS) - set(SUPPORTED_TYPES):
        with pytest.raises(InputError) as caught:
            tiny.config(rope_scaling={"rope_type": name, "factor": 4.0})
        assert str(caught.value).startswith(f"rope_scaling.rope_type = '{name}': is not implemented")
        assert str(caught.value).endswith(f" Known: {', '.join(SUPPORTED_TYPES)}.")


@pytest.mark.parametrize("rope", [None, reference.YARN], ids=["default", "yarn"])
@torch.no_grad()
def test_bfloat16_rope_tables(rope: tiny.Json | None) -> None:
    data = tiny.config_json(head_dim=128, rope_theta=1e6, rope_scaling=copy.deepcopy(rope))
    config = ModelConfig.from_hf(data)
    rotary = Qwen3RotaryEmbedding(AutoConfig.for_model(**data))
    positions = [0, 1, 4095, 100000]
    theirs = rotary(torch.zeros(1, dtype=torch.bfloat16), torch.tensor([positions]))
    ours = rope_tables(jnp.asarray([positions]), 128, config.rope_theta, config.rope_scaling, jnp.bfloat16)
    for table, expected in zip(ours, theirs, strict=True):
        expected = expected[..., :64].float().numpy()
        assert np.mean(np.asarray(table, np.float32) == expected) > 0.98  # a last bit before the cast may round over
        np.testing.assert_allclose(np.asarray(table, np.float32), expected, rtol=2**-7, atol=1e-5)
