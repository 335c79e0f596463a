"""The parameter tree: shapes by the inventory, random values by seed, the way from and to a checkpoint's tensors."""

from __future__ import annotations

from typing import Any

import hf_bridge
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from qwenjax.config import ModelConfig
from qwenjax.known_models import known_model_config, known_model_names
from qwenjax.weights import init_params, param_shapes
from roofline.count import count_params

DENSE = [name for name in known_model_names() if not str(known_model_config(name)["model_type"]).endswith("_moe")]
CONFIGS = {
    "qwen2": tiny.config("qwen2", tie_word_embeddings=True),
    "qwen3": tiny.config("qwen3"),
    "qwen3-bias": tiny.config("qwen3", attention_bias=True),
}


def described(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def test_shapes_sum_to_the_counted_parameters_of_every_known_dense_model() -> None:
    assert len(DENSE) > 80
    for name in DENSE:
        config = ModelConfig.from_hf(name)
        total = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(param_shapes(config)))
        assert total == count_params(config).num_params, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_random_parameters_have_the_announced_shapes(name: str, dtype: str) -> None:
    config = CONFIGS[name]
    params = init_params(config, 1, dtype)
    assert described(params) == described(param_shapes(config, dtype))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count_params(config).num_params


def test_shapes_of_a_tiny_model_by_hand() -> None:
    shapes = jax.tree.map(
        lambda leaf: leaf.shape, param_shapes(CONFIGS["qwen3-bias"]), is_leaf=lambda x: hasattr(x, "shape")
    )
    layer = {
        "input_norm": (40,),
        "qkv_proj": (3, 6, 16, 40),
        "qkv_bias": (3, 6, 16),
        "q_norm": (16,),
        "k_norm": (16,),
        "o_proj": (40, 3, 4, 16),
        "o_bias": (40,),
        "post_norm": (40,),
        "gate_up_proj": (2, 56, 40),
        "down_proj": (40, 56),
    }
    model = {"embed_tokens": (101, 40), "final_norm": (40,), "lm_head": (101, 40)}
    assert shapes == {**model, "layers": dict.fromkeys(range(3), layer)}


def test_random_parameters_follow_from_the_seed() -> None:
    config = CONFIGS["qwen3-bias"]
    params = init_params(config, 5)
    jax.tree.map(np.testing.assert_array_equal, params, init_params(config, 5))
    other = init_params(config, 6)
    for name in ("embed_tokens", "lm_head"):
        assert np.all(params[name] != other[name])
    # No two matrices are alike, not even of one shape.
    assert np.all(params["embed_tokens"] != params["lm_head"])
    assert np.all(params["layers"][0]["down_proj"] != params["layers"][1]["down_proj"])


def test_random_parameters_have_the_configured_spread() -> None:
    config = tiny.config("qwen3", attention_bias=True, initializer_range=0.05, vocab_size=2000)
    params = init_params(config, 0)
    for leaves in (params, *params["layers"].values()):
        for name, leaf in leaves.items():
            if name == "layers":
                continue
            if name.endswith("norm"):
                np.testing.assert_array_equal(leaf, 1)
            elif name.endswith("bias"):
                np.testing.assert_array_equal(leaf, 0)
            else:
                assert float(leaf.std()) == pytest.approx(0.05, rel=0.05), name
                assert abs(float(leaf.mean())) < 0.005, name


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_round_trips(name: str) -> None:
    config = CONFIGS[name]
    state = tiny.state_dict(config)
    params = hf_bridge.from_state_dict(config, state)
    assert described(params) == described(param_shapes(config, "float32"))
    back = hf_bridge.to_state_dict(config, params)
    assert list(back) == list(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_checkpoint_rows_lie_where_the_query_head_reads_them() -> None:
    """Row h*H of q_proj is query head h, which reads KV head h // G; its row of k_proj is beside it."""
    config = CONFIGS["qwen3-bias"]
    state = tiny.state_dict(config)
    layer = hf_bridge.from_state_dict(config, state)["layers"][1]
    prefix = "model.layers.1.self_attn."
    for head in range(12):
        rows = slice(head * 16, head * 16 + 16)
        q_HD, k_HD, v_HD = layer["qkv_proj"][head // 4, np.array([head % 4, 4, 5])]
        np.testing.assert_array_equal(q_HD, state[prefix + "q_proj.weight"][rows])
        np.testing.assert_array_equal(layer["o_proj"][:, head // 4, head % 4], state[prefix + "o_proj.weight"][:, rows])
        rows = slice(head // 4 * 16, head // 4 * 16 + 16)
        np.testing.assert_array_equal(k_HD, state[prefix + "k_proj.weight"][rows])
        np.testing.assert_array_equal(v_HD, state[prefix + "v_proj.weight"][rows])
        np.testing.assert_array_equal(layer["qkv_bias"][head // 4, 5], state[prefix + "v_proj.bias"][rows])
    np.testing.assert_array_equal(layer["gate_up_proj"][0], state["model.layers.1.mlp.gate_proj.weight"])
    np.testing.assert_array_equal(layer["gate_up_proj"][1], state["model.layers.1.mlp.up_proj.weight"])


def test_the_bridge_refuses_other_keys_and_shapes() -> None:
    config = CONFIGS["qwen2"]
    state = tiny.state_dict(config)
    key = "model.layers.2.self_attn.k_proj.bias"
    with pytest.raises(KeyError, match=rf"missing \['{key}'\], unknown \[\]"):
        hf_bridge.from_state_dict(config, {k: v for k, v in state.items() if k != key})
    with pytest.raises(ValueError, match=rf"{key} has shape \(1, 48\), not \(48,\)"):
        hf_bridge.from_state_dict(config, state | {key: state[key][None]})


def test_dtype_of_a_loaded_tree() -> None:
    params = tiny.params(CONFIGS["qwen3"], "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
