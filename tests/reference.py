"""What the comparisons with transformers share: its models of tiny configs, their logits, and how near is near.

A test module that says `import reference` before it imports torch is skipped where torch or transformers is missing,
and fails where CI says that they belong there.
"""

from __future__ import annotations

import copy
import inspect
import os
from typing import Any

import hf_bridge
import numpy as np
import pytest
import tiny

from qwenjax.config import ModelConfig

try:
    import torch
    from transformers import DynamicCache
    from transformers.utils import logging
except ImportError as error:
    if os.environ.get("CI") == "true":
        raise
    pytest.skip(f"needs torch and transformers, the `reference` extra ({error})", allow_module_level=True)

torch.set_num_threads(1)  # tiny products: torch's threads cost more than they bring, and fight with XLA's
logging.disable_progress_bar()

MARK = pytest.mark.reference
TOLERANCE = 2e-5  # the contract is 1e-4
MODEL_TYPES = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn_attention_factor": {**YARN, "attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 0.5, "truncate": False},
}
LENGTHS, STEPS = (64, 37), 8  # of the two prompts, and the decode steps after them


def config_json(
    model_type: str, *, rope: str = "default", tied: bool = False, window: bool = False, **changes: Any
) -> tiny.Json:
    """A config.json in the 4.x spelling: every projection that can have a bias has one, head_dim isn't D/N, and a
    mixture of experts has one sparse and one dense layer. With a window one layer of the two has it, and in qwen3_moe,
    where it is all or none, both; without, the number is there and the flag is off."""
    sparse = model_type.endswith("_moe")
    data = (tiny.moe_json if sparse else tiny.config_json)(
        model_type,
        rope_scaling=copy.deepcopy(ROPES[rope]),
        tie_word_embeddings=tied,
        num_hidden_layers=2,
        use_sliding_window=window,
        sliding_window=20,
        max_window_layers=1,
    )
    if model_type.startswith("qwen3"):
        data["attention_bias"] = True
    if sparse:
        data |= {"mlp_only_layers": [1], "norm_topk_prob": model_type == "qwen3_moe"}
    return data | changes


def model_of(data: tiny.Json, dtype: str = "float32", attention: str = "eager") -> Any:
    """transformers' model of a config.json, with the weights of `tiny`."""
    return hf_bridge.reference_model(data, tiny.state_dict(ModelConfig.from_hf(data)), dtype, attention)


def ids_of(tokens: Any) -> Any:
    return torch.tensor(np.asarray(tokens)).long()


@torch.no_grad()
def logits_of(model: Any, tokens_BT: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
    logits_BTV: np.ndarray[Any, Any] = model(ids_of(tokens_BT), **kwargs).logits.float().numpy()
    return logits_BTV


@torch.no_grad()
def decoded(model: Any, tokens_T: Any, prompt_len: int) -> np.ndarray[Any, Any]:
    """Logits of the last prompt token and of each later one, by transformers' own cache."""
    ids = ids_of(tokens_T)[None]
    # transformers 5.24 renamed the argument
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cached = {name: DynamicCache(config=model.config)}
    rows = [model(ids[:, :prompt_len], **cached).logits[0, -1]]
    rows += [model(ids[:, i : i + 1], **cached).logits[0, -1] for i in range(prompt_len, ids.shape[1])]
    logits_TV: np.ndarray[Any, Any] = torch.stack(rows).numpy()
    return logits_TV


def assert_near(ours: Any, theirs: Any, message: str = "") -> None:
    assert theirs.std() > 0.5  # logits of nothing would agree too
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE, err_msg=message)


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def assert_as_exact_as_torch(ours: Any, theirs: Any, truth: Any) -> None:
    """Two roundings of one float32 result: neither is further from it than the other, give or take a quarter."""
    ours, theirs, truth = (np.asarray(x, np.float32) for x in (ours, theirs, truth))
    scale = _rms(truth)
    assert _rms(theirs - truth) > 0  # a comparison in float32 by mistake
    assert _rms(ours - truth) <= 1.25 * _rms(theirs - truth)
    assert _rms(ours - theirs) <= 2**-6 * scale
    assert np.abs(ours - theirs).max() <= 2**-4 * scale
