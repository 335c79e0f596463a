"""Ledger rows of seed 002's toy layer and of one layer's attention, run through the model's own Qwen3 block.

The toy's weights are the ledger's fixture: W_i[a, b] = 0.6*sin(1 + i + 1.7a + 0.9b) for i = 0..6 over q, k, v, o, gate,
up, down, each [in, out]; norms are one. The layer runs with 64-bit arrays, but its norms, softmax and angles are
float32 as the numerics contract has it, so these rows are compared to six digits (see `FLOAT32`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ledger_models import QWEN25_7B, Case, letters, product_of
from ledger_tiny import (
    block_of,
    laid,
    run_block,
)

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.layers import attention, contract, rms_norm, rope_tables
from qwenjax.ops import weights_of
from qwenjax.weights import Params
from roofline import formulas as f
from roofline.hardware import load_hardware
from roofline.memory import plan_memory

TOY = ModelConfig(
    model_type="qwen3", vocab_size=8, hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=2, rope_theta=1e6,
)  # fmt: skip
TOY_NO_QK_NORM = replace(TOY, model_type="qwen2")
X = [[1.0, 0.0, -1.0, 0.5], [0.5, -1.0, 0.25, 1.0], [1.0, 0.5, -0.5, -1.0]]
FLOAT32 = {"S002-074", "S002-076", "S002-078", "S002-079"}


def fixture(i: int, rows: int, columns: int) -> np.ndarray:
    a, b = np.indices((rows, columns))
    return np.asarray(0.6 * np.sin(1 + i + 1.7 * a + 0.9 * b))


def toy_params(config: ModelConfig) -> Params:
    """The fixture in the model's layout: q, k, v joined over the heads of a KV head, gate and up side by side."""
    q, k, v, o = (fixture(i, *shape) for i, shape in enumerate([(4, 4), (4, 2), (4, 2), (4, 4)]))
    gate, up, down = (fixture(i, *shape) for i, shape in enumerate([(4, 6), (4, 6), (6, 4)], 4))
    tree = {
        "input_norm": np.ones(4),
        "qkv_proj": laid("qkv_proj", "DKJH", np.stack([q[:, :2], q[:, 2:], k, v], axis=1)[:, None]),
        "q_norm": np.ones(2),
        "k_norm": np.ones(2),
        "o_proj": laid("o_proj", "KGHD", o.reshape(1, 2, 2, 4)),
        "post_norm": np.ones(4),
        "gate_up_proj": laid("gate_up_proj", "CDF", np.stack([gate, up])),
        "down_proj": laid("down_proj", "FD", down),
    }
    absent = () if config.qk_norm else ("q_norm", "k_norm")
    return {name: jnp.asarray(leaf) for name, leaf in tree.items() if name not in absent}


def toy(x: Any = X, config: ModelConfig = TOY, **switches: Any) -> np.ndarray:
    """Output [3, 4] of the toy layer in 64-bit arrays."""
    with jax.enable_x64(True):
        return np.asarray(run_block(config, toy_params(config), jnp.asarray(x, jnp.float64)[None], **switches)[0])


def changed_input() -> list[list[float]]:
    return [*X[:2], [-3.0, *X[2][1:]]]


def difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.max(np.abs(one - other)))


def mask_experiment() -> list[float]:
    """Change of the last position with the mask; of the first two without it."""
    masked, open_ = (difference_by_row(toy(changed_input(), mask=m), toy(mask=m)) for m in (True, False))
    return [float(masked[2]), float(max(open_[:2]))]


def difference_by_row(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.asarray(np.max(np.abs(one - other), axis=1))


def shift(rope: bool) -> float:
    return difference(toy(positions=(7, 8, 9), rope=rope), toy(rope=rope))


def rope_experiment() -> list[float]:
    """Shift without RoPE; the last row's change when one distance grows; RoPE off against on."""
    spread = difference_by_row(toy(positions=(0, 1, 5)), toy())
    return [shift(rope=False), float(spread[2]), difference(toy(rope=False), toy())]


@cache
def toy_attention() -> tuple[np.ndarray, np.ndarray]:
    """Scores before the mask and probabilities after it of the two heads over their one key head, each [2, 3, 3]."""
    with jax.enable_x64(True):
        layer, x = toy_params(TOY), jnp.asarray(X, jnp.float64)[None]
        block = block_of(TOY, layer)
        tables = rope_tables(jnp.arange(3)[None], 2, TOY.rope_theta, None, x.dtype)
        q, k, _ = block.project(rms_norm(x, layer["input_norm"], TOY.rms_norm_eps), tables)
        keys, mask = k.transpose(0, 2, 1, 3), jnp.tril(jnp.ones((1, 3, 3), bool))
        scores = contract("scores", q, keys)[0, 0] * f.attention_scale(2)
        # Attending the unit vectors returns the probabilities themselves.
        wide_q, wide_k = (jnp.concatenate([a, jnp.zeros_like(a[..., :1])], -1) * (3 / 2) ** 0.25 for a in (q, keys))
        probabilities = attention(wide_q, wide_k, jnp.eye(3)[None, None], mask)[0, :, 0].transpose(1, 0, 2)
        return np.asarray(scores), np.asarray(probabilities)


def heads_experiment() -> list[float]:
    """Greatest score and probability difference between the heads that share K and V; QK-norm off against on."""
    scores, probabilities = toy_attention()
    return [
        difference(scores[0], scores[1]),
        difference(probabilities[0], probabilities[1]),
        difference(toy(config=TOY_NO_QK_NORM), toy()),
    ]


def shared_heads_differ() -> bool:
    scores, probabilities = toy_attention()
    return difference(scores[0], scores[1]) > 0.1 and difference(probabilities[0], probabilities[1]) > 0.1


def mask_hides_the_future() -> bool:
    masked, open_ = (difference_by_row(toy(changed_input(), mask=m), toy(mask=m)) for m in (True, False))
    return bool(max(masked[:2]) == 0 < min(open_[:2]))


def toy_is_computed() -> bool:
    y = toy()
    return y.dtype == np.float64 and difference(toy(changed_input()), y) > 1


def shift_and_distance() -> bool:
    return shift(rope=True) < 1e-6 < 1e-3 < difference(toy(positions=(0, 1, 5)), toy())


def toy_param_counts() -> list[int]:
    sizes = {w.name: product_of(TOY, w.letters) for w in weights_of(TOY) if w.scope != "model"}
    norms = sum(size for name, size in sizes.items() if name.endswith("norm"))
    return [*(sizes[f"{name}_proj"] for name in ("q", "k", "v", "o", "gate", "up", "down")), norms]


def budget_is_weights_cache_and_workspace() -> bool:
    plan = plan_memory(QWEN25_7B, load_hardware("rtx-4090"))
    parts = plan.weight_bytes + plan.kv_pool_bytes + plan.activation_bytes + plan.overhead_bytes
    return parts == plan.budget_bytes and plan.activation_bytes < 0.1 * plan.weight_bytes


CASES: dict[str, Case] = {
    "S002-004": lambda: letters(TOY, "TDNKHF", Step.prefill(1, 3)),
    "S002-005": lambda: [float(toy_params(TOY)["input_norm"][0]), TOY.rms_norm_eps],
    "S002-006": toy_is_computed,
    "S002-009": mask_hides_the_future,
    "S002-039": shift_and_distance,
    "S002-041": shared_heads_differ,
    "S002-047": lambda: f.attention_scale(128) ** -2,
    "S002-073": lambda: difference(toy(changed_input())[:2], toy()[:2]),
    "S002-074": mask_experiment,
    "S002-075": lambda: round(shift(rope=True), 6),
    "S002-076": rope_experiment,
    "S002-077": shared_heads_differ,
    "S002-078": heads_experiment,
    "S002-079": lambda: toy().tolist(),
    "S002-080": toy_param_counts,
    "S002-088": budget_is_weights_cache_and_workspace,
}
