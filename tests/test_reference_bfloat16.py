"""bfloat16 block by block against transformers on torch CPU: each block on transformers' own input."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import torch

from qwenjax import block as qwenjax_block
from qwenjax.block import PLAIN, run_block
from qwenjax.config import ModelConfig
from qwenjax.layers import causal_mask, rms_norm, rope_tables
from qwenjax.model import _unembed
from qwenjax.moe import route, run_experts
from qwenjax.weights import layer_scopes

pytestmark = reference.MARK

SLIDING, FULL = "sliding_attention", "full_attention"
CASES = {
    "qwen2": reference.config_json("qwen2", window=True),
    "qwen3": reference.config_json("qwen3", rope="yarn", tied=True, window=True, layer_types=[SLIDING, FULL]),
    "qwen2_moe": reference.config_json("qwen2_moe", window=True, mlp_only_layers=[], num_hidden_layers=3),
    "qwen3_moe": reference.config_json("qwen3_moe", rope="yarn", tied=True, mlp_only_layers=[0], num_hidden_layers=3),
}
BATCH, TOKENS = 2, 70


def watch(model: Any) -> dict[str, tuple[Any, ...]]:
    """What each layer, router and the last norm gets and gives, as float32 and integers, after the model has run."""
    seen: dict[str, tuple[Any, ...]] = {}

    def hook_of(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            source = args[0] if args else kwargs["hidden_states"]
            outputs = output if isinstance(output, tuple) else (output,)
            seen[name] = tuple((x.float() if x.is_floating_point() else x).numpy() for x in (source, *outputs))

        return hook

    watched = {"norm": model.model.norm}
    for i, layer in enumerate(model.model.layers):
        watched[f"layer {i}"] = layer
        if hasattr(layer.mlp, "gate"):
            watched[f"router {i}"] = layer.mlp.gate
    for name, module in watched.items():
        module.register_forward_hook(hook_of(name), with_kwargs=True)
    return seen


@pytest.mark.parametrize("model_type", CASES)
@torch.no_grad()
def test_bfloat16_block_by_block(model_type: str) -> None:
    """With the experts and weights that transformers chose: router logits in bfloat16 tie at the border of the chosen
    ones, and libraries break ties differently."""
    config = ModelConfig.from_hf(CASES[model_type])
    params = tiny.params(config, "bfloat16")
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    model = reference.model_of(CASES[model_type], "bfloat16")
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    seen = watch(model)
    tokens_BT = tiny.tokens("bf16", BATCH, TOKENS)
    logits_BTV = reference.logits_of(model, tokens_BT)

    positions_T = jnp.arange(TOKENS)
    np.testing.assert_array_equal(params["embed_tokens"][tokens_BT], seen["layer 0"][0])
    for i, window in enumerate(config.sliding_windows):
        (source, output), outputs = seen[f"layer {i}"], []
        for tree, dtype in ((params, jnp.bfloat16), (wide, jnp.float32)):
            forced = forced_routing(config, *seen[f"router {i}"][2:], dtype) if i in config.sparse_layers else None
            rope = rope_tables(positions_T[None], config.head_dim, config.rope_theta, config.rope_scaling, dtype)
            mask_BTS, x_BTD = causal_mask(positions_T[None], positions_T, window), jnp.asarray(source, dtype)
            x_BTD = forced_block(config, layer_scopes(config, i), tree["layers"][i], x_BTD, rope, mask_BTS, forced)
            outputs.append(x_BTD)
        assert outputs[0].dtype == jnp.bfloat16
        reference.assert_as_exact_as_torch(outputs[0], output, outputs[1])
    for i in config.sparse_layers:
        assert_routed_alike(config, params["layers"][i]["router"], *seen[f"router {i}"])

    source, output = (jnp.asarray(x, jnp.bfloat16) for x in seen["norm"])
    np.testing.assert_array_equal(rms_norm(source, params["final_norm"], config.rms_norm_eps), output)
    truth = _unembed(config, wide, source.astype(jnp.float32))
    reference.assert_as_exact_as_torch(_unembed(config, params, source), logits_BTV, truth)


@partial(jax.jit, static_argnums=(0, 1))
def forced_block(config: ModelConfig, scopes: Any, layer: Any, x: Any, rope: Any, mask: Any, forced: Any) -> Any:
    """The block, with these weights and experts in place of its own choice."""
    with pytest.MonkeyPatch.context() as patch:  # while it is traced
        given = PLAIN._replace(experts=lambda x, weights, chosen, *stacks: run_experts(x, *forced, *stacks))
        patch.setattr(qwenjax_block, "PLAIN", given)
        return run_block.__wrapped__(config, scopes, layer, x, rope, mask, None, None)[0]


def forced_routing(config: ModelConfig, weights_NA: Any, chosen_NA: Any, dtype: Any) -> Any:
    shape = BATCH, TOKENS, config.num_experts_per_tok
    return jnp.asarray(weights_NA, dtype).reshape(shape), jnp.asarray(chosen_NA, jnp.int32).reshape(shape)


def near_ties(logits_NE: Any, count: int) -> Any:
    """Tokens whose last chosen and first unchosen expert have logits that one bfloat16 step may swap."""
    ordered = np.sort(logits_NE, axis=-1)
    last, first = ordered[:, -count], ordered[:, -count - 1]
    return last - first <= 2.0**-6 * np.maximum(1, np.abs(last))


def assert_routed_alike(
    config: ModelConfig, router_ED: Any, x_ND: Any, logits_NE: Any, weights_NA: Any, chosen_NA: Any
) -> None:
    """Our own routing of the same input picks the same experts wherever no tie is near, with weights one step apart."""
    x_BTD = jnp.asarray(x_ND, jnp.bfloat16).reshape(1, -1, config.hidden_size)
    weights, chosen = route(x_BTD, router_ED, config.num_experts_per_tok, config.norm_topk_prob)
    assert weights.dtype == jnp.bfloat16
    near = near_ties(logits_NE, config.num_experts_per_tok)
    assert near.mean() < 0.25
    ours, theirs = (
        [np.take_along_axis(np.asarray(part, np.float32), np.argsort(experts, axis=-1), -1)[~near] for part in pair]
        for experts, pair in ((chosen[0], (chosen[0], weights[0])), (chosen_NA, (chosen_NA, weights_NA)))
    )
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=2**-5)
