"""The training losses, their gradients and the optimizer against transformers and torch, for all four architectures."""

from __future__ import annotations

from typing import Any

import hf_bridge
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import tiny
import torch

from qwenjax.config import ModelConfig
from qwenjax.train.loss import lm_loss, next_token_loss
from qwenjax.train.settings import TrainConfig
from qwenjax.train.step import init_state, optimizer_of, train_step

pytestmark = reference.MARK
TOLERANCE = 1e-4
COEF = 0.37  # so that a tenth of the balance's gradient would show

SMALL: dict[str, Any] = {"num_attention_heads": 6, "head_dim": 8, "vocab_size": 61, "sliding_window": 7}
SPARSE: dict[str, Any] = {**SMALL, "router_aux_loss_coef": COEF}
THREE: dict[str, Any] = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
CASES: dict[str, tiny.Json] = {
    "qwen2": reference.config_json("qwen2", **SMALL, tied=True),
    "qwen2-untied-yarn-window": reference.config_json("qwen2", **SMALL, rope="yarn", window=True),
    "qwen3": reference.config_json("qwen3", **SMALL),
    "qwen3-tied-window-no-bias": reference.config_json("qwen3", **SMALL, tied=True, window=True, attention_bias=False),
    "qwen2_moe": reference.config_json("qwen2_moe", **SPARSE, mlp_only_layers=[]),
    "qwen2_moe-tied-window-renormalised": reference.config_json(
        "qwen2_moe", **SPARSE, tied=True, window=True, norm_topk_prob=True
    ),
    "qwen3_moe": reference.config_json("qwen3_moe", **SPARSE, **THREE),
    "qwen3_moe-tied-yarn-window-not-renormalised": reference.config_json(
        "qwen3_moe", **SPARSE, tied=True, rope="yarn_attention_factor", window=True, norm_topk_prob=False
    ),
}
LENGTHS = (20, 13)


def _batch(name: str) -> tuple[Any, Any]:
    """Tokens of two rows of unequal length, and their mask."""
    tokens_BT = tiny.tokens(name, 2, max(LENGTHS), vocab=61)
    return tokens_BT, jnp.arange(max(LENGTHS))[None] < jnp.array(LENGTHS)[:, None]


def _reference_loss(model: Any, tokens_BT: Any, mask_BT: Any) -> Any:
    ids, mask = reference.ids_of(tokens_BT), reference.ids_of(mask_BT)
    routers = {"output_router_logits": True} if model.config.model_type.endswith("_moe") else {}
    return model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), **routers)


def _assert_close(ours: Any, theirs: dict[str, Any], config: ModelConfig) -> None:
    """Every tensor: the largest difference is at most 1e-4 of its largest value."""
    mine = hf_bridge.fused_experts(hf_bridge.to_state_dict(config, ours))
    assert mine.keys() == theirs.keys()
    for key, expected in theirs.items():
        # A key's bias moves all scores of a query alike, which the softmax ignores: rounding is all there is.
        floor = 1e-4 if key.endswith("k_proj.bias") and not config.qk_norm else 0
        assert np.abs(expected).max() > 1e-6 or floor, key
        assert np.abs(mine[key] - expected).max() <= TOLERANCE * max(np.abs(expected).max(), floor), key


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients(name: str) -> None:
    """Next token and balance of padded rows, with and without a window; of mixed layers only the sparse ones are
    balanced."""
    data = CASES[name]
    config, (tokens_BT, mask_BT) = ModelConfig.from_hf(data), _batch(name)
    model = reference.model_of(data)
    expected = _reference_loss(model, tokens_BT, mask_BT)
    expected.loss.backward()
    coef = config.router_aux_loss_coef if config.num_experts else None

    def loss_of(params: Any) -> Any:
        losses = lm_loss(config, params, tokens_BT, mask_BT, router_aux_loss_coef=coef)
        return losses.total, losses

    gradients, losses = jax.jit(jax.grad(loss_of, has_aux=True))(tiny.params(config))
    np.testing.assert_allclose(losses.total, expected.loss.item(), rtol=1e-5)
    if coef is not None:
        assert coef == COEF
        np.testing.assert_allclose(losses.balance, expected.aux_loss.item(), rtol=1e-5)
        np.testing.assert_allclose(losses.next_token, (expected.loss - COEF * expected.aux_loss).item(), rtol=1e-5)
    _assert_close(gradients, {key: tensor.grad.numpy() for key, tensor in model.named_parameters()}, config)


def test_labels_that_are_ignored() -> None:
    logits_BTV = tiny.uniform("logits", (2, 9, 31)).astype(np.float32)
    labels_BT = np.array(tiny.tokens("labels", 2, 9, vocab=31))
    labels_BT[0, :4] = labels_BT[1, 8] = -100
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(logits_BTV)[:, :-1].flatten(0, 1), reference.ids_of(labels_BT)[:, 1:].flatten(), ignore_index=-100
    )
    loss = next_token_loss(jnp.asarray(logits_BTV), jnp.asarray(labels_BT))
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-6)


def _torch_adamw(model: Any, settings: TrainConfig, learning_rate: float) -> Any:
    matrices = [tensor for tensor in model.parameters() if tensor.ndim > 1]
    vectors = [tensor for tensor in model.parameters() if tensor.ndim == 1]  # norms and biases
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(settings.beta1, settings.beta2), eps=settings.eps)


def test_adamw_moves_the_weights_as_torch_does() -> None:
    """Three updates with the same gradients, at the default eps."""
    data = CASES["qwen2_moe"]
    config = ModelConfig.from_hf(data)
    settings = TrainConfig(learning_rate=0.01, final_learning_rate_fraction=1.0, weight_decay=0.3, clip_norm=None)
    model = reference.model_of(data)
    torch_optimizer, optimizer = _torch_adamw(model, settings, 0.01), optimizer_of(config, settings)
    params = tiny.params(config)
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    before = {key: tensor.detach().numpy().copy() for key, tensor in model.named_parameters()}
    for step in range(3):
        given = {
            item.key: tiny.uniform(f"{item.key} {step}", item.stored_shape).astype(np.float32)
            for item in hf_bridge.tensors_of(config)
        }
        fused = hf_bridge.fused_experts(given)
        for key, tensor in model.named_parameters():
            tensor.grad = torch.tensor(fused[key])
        torch_optimizer.step()
        updates, state = update(hf_bridge.from_state_dict(config, given), state, params)
        params = optax.apply_updates(params, updates)
    after = {key: tensor.detach().numpy() for key, tensor in model.named_parameters()}
    moved = {key: after[key] - before[key] for key in after}
    _assert_close(jax.tree.map(jnp.subtract, params, tiny.params(config)), moved, config)


def test_a_whole_step_moves_the_weights_as_torch_does() -> None:
    """Loss, accumulated gradient, clipping and AdamW; eps is large, so that rounding isn't magnified to a step."""
    data = CASES["qwen3"]
    config, (tokens_BT, mask_BT) = ModelConfig.from_hf(data), _batch("step")
    settings = TrainConfig(
        batch_size=2, accumulation_steps=2, learning_rate=0.02, weight_decay=0.3, eps=1e-2, clip_norm=0.5, remat="full"
    )
    model = reference.model_of(data)
    before = {key: tensor.detach().numpy().copy() for key, tensor in model.named_parameters()}
    _reference_loss(model, tokens_BT, mask_BT).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    _torch_adamw(model, settings, 0.02).step()
    params = tiny.params(config)
    state, metrics = train_step(config, settings, init_state(config, settings, params), tokens_BT, mask_BT)
    assert norm > 0.5
    np.testing.assert_allclose(metrics.grad_norm, norm.item(), rtol=1e-5)
    np.testing.assert_allclose(metrics.learning_rate, 0.02, rtol=1e-6)
    moved = {key: tensor.detach().numpy() - before[key] for key, tensor in model.named_parameters()}
    _assert_close(jax.tree.map(jnp.subtract, state.params, params), moved, config)
