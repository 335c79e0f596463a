"""Mixture of experts in the default suite: recorded logits, routing, and three ways through the experts that agree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax import moe
from qwenjax.block import Block
from qwenjax.cache import init_cache
from qwenjax.config import ModelConfig
from qwenjax.known_models import known_model_names
from qwenjax.model import Decoder, decode_step, forward, prefill, step_shapes
from qwenjax.moe import block_rows, choose_way, num_blocks, route, run_experts
from qwenjax.weights import layer_scopes, param_shapes
from roofline.count import count_params

GOLDEN = Path(__file__).parent / "data" / "golden_moe.npz"
TOLERANCE = 2e-5
KNOWN = [name for name in known_model_names() if ModelConfig.from_hf(name).is_moe]


def array(name: str, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(tiny.uniform(name, shape), dtype)


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


# Against transformers, as tests/make_golden.py recorded it


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_logits_equal_the_recorded_ones(name: str) -> None:
    """qwen2_moe with a shared expert, weights as they are and every second layer dense; qwen3_moe renormalised, tied
    and with one dense layer; by forward, prefill and decode."""
    with np.load(GOLDEN) as recorded:
        data = json.loads(str(recorded[f"{name}_config"]))
        tokens_T, positions, logits = (recorded[f"{name}_{part}"] for part in ("tokens", "positions", "logits"))
    config = ModelConfig.from_hf(data)
    assert config.norm_topk_prob == (name == "qwen3_moe")
    params, tokens_BT = tiny.params(config), tokens_T.astype(np.int32)[None]
    assert logits.std() > 0.5
    close(forward(config, params, tokens_BT)[0, positions], logits)
    assert positions[-2:].tolist() == [47, 71]
    cache = init_cache(config, 1, 72, "float32")
    last_BV, cache = prefill(config, params, tokens_BT[:, :48], jnp.array([48]), cache)
    close(last_BV[0], logits[-2])
    for i in range(48, 72):
        last_BV, cache = decode_step(config, params, tokens_BT[:, i], cache)
    close(last_BV[0], logits[-1])


# From here on nearly all the time would be XLA's: what is compared is compiled alike, and unoptimised.


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


quickly = pytest.mark.usefixtures("quick_compilation")


# The router


def exact_probs(x_BTD: Any, router_ED: Any) -> Any:
    logits_BTE = np.asarray(x_BTD, np.float64) @ np.asarray(router_ED, np.float64).T
    powers_BTE = np.exp(logits_BTE - logits_BTE.max(axis=-1, keepdims=True))
    return logits_BTE, powers_BTE / powers_BTE.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(("experts", "per_token"), [(21, 5), (7, 1), (4, 4)])
def test_softmax_over_all_experts_then_the_largest(experts: int, per_token: int) -> None:
    x_BTD, router_ED = array("x", 2, 17, 40), array(f"router {experts}", experts, 40)
    logits_BTE, probs_BTE = exact_probs(x_BTD, router_ED)
    order = np.argsort(-probs_BTE, axis=-1)[..., :per_token]
    picked = np.take_along_axis(probs_BTE, order, axis=-1)
    scores = np.exp(np.take_along_axis(logits_BTE, order, axis=-1))
    softmax_of_the_largest = scores / scores.sum(axis=-1, keepdims=True)

    raw_BTA, chosen_BTA = route(x_BTD, router_ED, per_token, False)
    np.testing.assert_array_equal(chosen_BTA, order)
    np.testing.assert_allclose(raw_BTA, picked, rtol=1e-5)
    whole_BTA, same_BTA = route(x_BTD, router_ED, per_token, True)
    np.testing.assert_array_equal(same_BTA, order)
    np.testing.assert_allclose(whole_BTA, softmax_of_the_largest, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(whole_BTA).sum(axis=-1), 1, rtol=1e-6)
    if per_token < experts:
        assert np.asarray(raw_BTA).sum(axis=-1).max() < 0.999
        assert np.asarray(raw_BTA / softmax_of_the_largest).max() < 0.999
    else:
        np.testing.assert_allclose(raw_BTA, whole_BTA, rtol=1e-6)


@pytest.mark.parametrize("renormalise", [False, True])
def test_the_router_works_in_float32_and_casts_last(renormalise: bool) -> None:
    """Logits are rounded to bfloat16, as a product of bfloat16 is; nothing else before the end."""
    x_BTD, router_ED = array("x", 1, 200, 40, dtype="bfloat16"), array("router", 21, 40, dtype="bfloat16")
    weights_BTA, chosen_BTA = route(x_BTD, router_ED, 5, renormalise)
    assert weights_BTA.dtype == jnp.bfloat16
    logits_BTE = (np.asarray(x_BTD, np.float32) @ np.asarray(router_ED, np.float32).T).astype(ml_dtypes.bfloat16)
    wide = np.exp(logits_BTE.astype(np.float32))
    probs_BTE = wide / wide.sum(axis=-1, keepdims=True)

    def weights(probs_BTE: Any) -> Any:
        picked = np.take_along_axis(probs_BTE, np.asarray(chosen_BTA), axis=-1)
        return (picked / picked.sum(axis=-1, keepdims=True) if renormalise else picked).astype(ml_dtypes.bfloat16)

    assert np.mean(np.asarray(weights_BTA) == weights(probs_BTE)) > 0.97  # a product may round over
    narrow = np.exp(logits_BTE) / np.exp(logits_BTE).sum(axis=-1, keepdims=True)
    assert np.mean(np.asarray(weights_BTA) == weights(narrow)) < 0.9


def test_norm_topk_prob_is_off_unless_the_config_says_otherwise() -> None:
    """Never by model type."""
    for model_type in ("qwen2_moe", "qwen3_moe"):
        assert not tiny.moe_config(model_type).norm_topk_prob
        assert tiny.moe_config(model_type, norm_topk_prob=True).norm_topk_prob


# Three ways through the experts


# Tokens, experts of each, experts: all chosen; fewer rows than experts; many blocks of an expert; one expert of each.
SHAPES = [(6, 5, 5), (2, 3, 11), (70, 3, 7), (13, 1, 3)]
HIDDEN, WIDTH = 12, 10


@cache
def experts_of(experts: int) -> tuple[jax.Array, jax.Array]:
    return array(f"gate up {experts}", experts, 2, WIDTH, HIDDEN), array(f"down {experts}", experts, HIDDEN, WIDTH)


def draw_routing(seed: int, used: int, tokens: int, per_token: int, experts: int) -> Any:
    """Distinct experts of each token, out of `used` of all: used == per_token means that all tokens choose the same."""
    rng = np.random.default_rng(seed)
    pool = rng.permutation(experts)[:used]
    return np.stack([rng.permutation(pool)[:per_token] for _ in range(tokens)]).astype(np.int32)[None]


@partial(jax.jit, static_argnames="way")
def output_and_gradients(way: str, x: Any, weights: Any, gate_up: Any, down: Any, chosen: Any) -> Any:
    """The output, and the gradients of a weighted sum of it with respect to everything but the choice."""

    def score(x: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        out = run_experts(x, weights, chosen, gate_up, down, way)
        return jnp.sum(out * array("cotangent", *out.shape)), out

    (_, out), gradients = jax.value_and_grad(score, argnums=(0, 1, 2, 3), has_aux=True)(x, weights, gate_up, down)
    return out, gradients


def token_by_token(x_TD: Any, weights_TA: Any, chosen_TA: Any, gate_up_ECFD: Any, down_EDF: Any) -> Any:
    x_TD, weights_TA, gate_up_ECFD, down_EDF = (
        np.asarray(values, np.float64) for values in (x_TD, weights_TA, gate_up_ECFD, down_EDF)
    )
    out_TD = np.zeros_like(x_TD)
    for t, (x_D, chosen_A) in enumerate(zip(x_TD, np.asarray(chosen_TA), strict=True)):
        for weight, expert in zip(weights_TA[t], chosen_A, strict=True):
            gate_F, up_F = gate_up_ECFD[expert] @ x_D
            out_TD[t] += weight * down_EDF[expert] @ (gate_F / (1 + np.exp(-gate_F)) * up_F)
    return out_TD


@quickly
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_three_ways_agree_in_output_and_gradients(shape: tuple[int, int, int], data: st.DataObject) -> None:
    """For any routing, one expert chosen by everybody and experts chosen by nobody included."""
    tokens, per_token, experts = shape
    used, seed = data.draw(st.integers(per_token, experts)), data.draw(st.integers(0, 2**16))
    chosen = draw_routing(seed, used, *shape)
    x, weights = array(f"x {seed}", 1, tokens, HIDDEN), array(f"w {seed}", 1, tokens, per_token)
    inputs = x, weights, *experts_of(experts)
    out, gradients = output_and_gradients("dense", *inputs, chosen)
    close(out[0], token_by_token(x[0], weights[0], chosen[0], *experts_of(experts)))
    for way in ("gathered", "grouped"):
        other, others = output_and_gradients(way, *inputs, chosen)
        close(other, out)
        for gradient, expected in zip(others, gradients, strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


@quickly
@pytest.mark.parametrize("way", ["gathered", "grouped"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] < shape[2]], ids=str)
def test_experts_chosen_by_nobody_are_not_touched(shape: tuple[int, int, int], way: str) -> None:
    """Not a number in them reaches neither output nor gradients, though zero times it would be one."""
    tokens, per_token, experts = shape
    chosen = draw_routing(5, per_token + (experts > 3), *shape)
    unused = np.setdiff1d(np.arange(experts), chosen)
    assert unused.size
    stacks = experts_of(experts)
    spoilt = [stack.at[unused].set(jnp.nan) for stack in stacks]
    inputs = array("x", 1, tokens, HIDDEN), array("w", 1, tokens, per_token)
    clean, spoiled = (output_and_gradients(way, *inputs, *each, chosen) for each in (stacks, spoilt))
    assert np.isfinite(clean[0]).all()
    jax.tree.map(np.testing.assert_array_equal, spoiled, clean)


@pytest.mark.parametrize("way", ["dense", "gathered", "grouped"])
def test_bfloat16_stays_bfloat16_and_near(way: str) -> None:
    tokens, per_token, experts = shape = SHAPES[2]
    narrow = [
        values.astype(jnp.bfloat16)
        for values in (array("x", 1, tokens, HIDDEN), array("w", 1, tokens, per_token), *experts_of(experts))
    ]
    chosen = draw_routing(5, experts, *shape)
    out = jax.jit(partial(run_experts, way=way))(*narrow[:2], chosen, *narrow[2:])
    assert out.dtype == jnp.bfloat16
    exact = token_by_token(*(np.asarray(values[0], np.float32) for values in narrow[:2]), chosen[0], *narrow[2:])
    difference = np.asarray(out[0], np.float64) - exact
    assert np.sqrt(np.mean(difference**2)) < 2**-7 * np.sqrt(np.mean(exact**2))


def test_grouped_runs_no_block_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted while it runs: as many blocks as the routing fills, out of as many as any routing may need."""
    runs: Counter[str] = Counter()

    def counted(gate_up: Any) -> Any:
        jax.debug.callback(lambda: runs.update(["block"]))
        return gate_up[..., 0, :] * gate_up[..., 1, :]

    monkeypatch.setattr(moe, "swiglu", counted)
    shape = tokens, per_token, experts = 30, 2, 7
    chosen = draw_routing(3, 3, *shape)
    run_experts(array("x", 1, tokens, 12), array("w", 1, tokens, 2), chosen, *experts_of(experts), "grouped")
    jax.effects_barrier()
    size = block_rows(tokens * per_token, experts)
    filled = sum(-(-count // size) for count in Counter(chosen.ravel().tolist()).values())
    assert runs["block"] == filled < num_blocks(tokens * per_token, experts)


@given(counts=st.lists(st.one_of(st.just(0), st.integers(0, 200)), min_size=1, max_size=140).filter(any))
@settings(max_examples=300, deadline=None)
def test_blocks_suffice_for_any_routing(counts: list[int]) -> None:
    rows, experts = sum(counts), len(counts)
    size = block_rows(rows, experts)
    assert size in (8, 16, 32, 64)
    assert sum(-(-count // size) for count in counts) <= num_blocks(rows, experts)


@pytest.mark.parametrize(("rows", "size"), [(1, 8), (64 * 8, 8), (64 * 9, 16), (64 * 33, 64), (64 * 4096, 64)])
def test_a_block_holds_about_an_experts_average(rows: int, size: int) -> None:
    assert block_rows(rows, 64) == size


def test_the_way_is_chosen_by_rows_per_expert() -> None:
    """Gathered until the chosen experts, with repeats, are half of all: 8 tokens of 8 for 128 experts."""
    assert [choose_way(tokens, 8, 128) for tokens in (1, 8, 9, 4096)] == ["gathered", "gathered", "grouped", "grouped"]
    assert [choose_way(tokens, 4, 60) for tokens in (1, 7, 8)] == ["gathered", "gathered", "grouped"]
    assert choose_way(1, 5, 5) == "grouped"


# In the model


MIXED = {
    "qwen2_moe": tiny.moe_config("qwen2_moe", num_hidden_layers=2, decoder_sparse_step=2),
    "qwen3_moe": tiny.moe_config("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0], norm_topk_prob=True),
}
each_model = pytest.mark.parametrize("name", MIXED)


@quickly
@each_model
def test_prefill_then_decode_equals_forward(name: str) -> None:
    """Two prompts of unequal length in a batch; the grouped way fills the cache and the gathered one goes on."""
    config, at = MIXED[name], np.array([16, 9])
    params, tokens_BT = tiny.params(config), np.asarray(tiny.tokens(name, 2, 20))
    full_BTV = forward(config, params, tokens_BT)
    padded = np.where(np.arange(16) < at[:, None], tokens_BT[:, :16], tiny.tokens("pad", 2, 16))
    logits_BV, cache = prefill(config, params, padded, jnp.asarray(at), init_cache(config, 2, 21, "float32"))
    close(logits_BV, full_BTV[[0, 1], at - 1])
    for step in range(4):
        logits_BV, cache = decode_step(config, params, tokens_BT[[0, 1], at + step], cache)
        close(logits_BV, full_BTV[[0, 1], at + step])


@quickly
@each_model
def test_rows_of_a_batch_do_not_mix(name: str) -> None:
    """Though another row's tokens move this row's places among the blocks."""
    config = MIXED[name]
    params, tokens_BT = tiny.params(config), tiny.tokens(name, 2, 20)
    before = forward(config, params, tokens_BT)
    after = forward(config, params, tokens_BT.at[1].set(tiny.tokens("other", 20)))
    close(after[0], before[0])
    assert np.abs(after[1] - before[1]).max() > 0.1


@quickly
@each_model
def test_a_token_touches_its_own_experts_and_no_other(name: str) -> None:
    """One expert after the other is spoilt: exactly five spoil a token, in a decode step as in a prompt."""
    config = MIXED[name]
    (sparse,) = config.sparse_layers
    assert sparse == config.num_hidden_layers - 1  # a layer after it would mix tokens
    params, tokens_BT = tiny.params(config), tiny.tokens(name, 2, 20)
    _, cache = prefill(config, params, tokens_BT[:, :16], jnp.array([16, 9]), init_cache(config, 2, 21, "float32"))
    alone, whole = [], []
    for expert in range(config.num_experts):
        layer = dict(params["layers"][sparse])
        for leaf in ("experts_gate_up_proj", "experts_down_proj"):
            layer[leaf] = layer[leaf].at[expert].set(jnp.nan)
        spoilt = params | {"layers": params["layers"] | {sparse: layer}}
        step_BV, _ = decode_step(config, spoilt, tokens_BT[:, 16], jax.tree.map(jnp.copy, cache))
        alone.append(np.isnan(step_BV).all(axis=-1))
        whole.append(np.isnan(forward(config, spoilt, tokens_BT)).all(axis=-1))
    assert np.sum(alone, axis=0).tolist() == [5, 5]
    assert (np.sum(whole, axis=0) == 5).all()
    assert len(np.unique(np.stack(whole).reshape(21, -1), axis=1).T) > 20  # tokens differ in their experts


def with_leaves(config: ModelConfig, **leaves: float) -> Any:
    """Parameters with these arrays of the last layer multiplied."""
    params = tiny.params(config)
    last = config.num_hidden_layers - 1
    layer = params["layers"][last]
    layer = layer | {leaf: layer[leaf] * factor for leaf, factor in leaves.items()}
    return params | {"layers": params["layers"] | {last: layer}}


@partial(jax.jit, static_argnums=0)
def mixed(config: ModelConfig, params: Any, x_BTD: Any) -> Any:
    """What the experts of the last layer add to the residual stream, by the block itself."""
    last = config.num_hidden_layers - 1
    block = Block(config, layer_scopes(config, last), params["layers"][last])
    return jax.tree.leaves(block.experts(x_BTD))[0]


def test_the_shared_experts_gate_scales_the_shared_expert_alone() -> None:
    """sigmoid(x w) * shared(x), from the checkpoint's tensors; routed experts come on top, gate or not."""
    config = tiny.moe_config("qwen2_moe", num_hidden_layers=1)
    x_BTD, state = array("x", 2, 9, 40), tiny.state_dict(config)
    weight = {
        name: state[f"model.layers.0.mlp.{name}.weight"].astype(np.float64)
        for name in (
            "shared_expert.gate_proj",
            "shared_expert.up_proj",
            "shared_expert.down_proj",
            "shared_expert_gate",
        )
    }
    x = np.asarray(x_BTD, np.float64)
    gate, up = x @ weight["shared_expert.gate_proj"].T, x @ weight["shared_expert.up_proj"].T
    shared = (gate / (1 + np.exp(-gate)) * up) @ weight["shared_expert.down_proj"].T
    scale = 1 / (1 + np.exp(-(x @ weight["shared_expert_gate"].T)))
    assert 0 < scale.min() < 0.4 < 0.6 < scale.max() < 1

    whole = mixed(config, with_leaves(config), x_BTD)
    shared_alone = mixed(config, with_leaves(config, experts_down_proj=0), x_BTD)
    routed_alone = mixed(config, with_leaves(config, shared_down_proj=0), x_BTD)
    close(shared_alone, scale * shared)
    close(whole, routed_alone + shared_alone)
    half = mixed(config, with_leaves(config, shared_expert_gate=0), x_BTD)
    close(half, routed_alone + shared / 2)


@quickly
@each_model
def test_the_flax_module_is_forward(name: str) -> None:
    config = MIXED[name]
    params, tokens_BT = tiny.params(config), tiny.tokens(name, 2, 20)
    decoder = Decoder(config, params)
    np.testing.assert_array_equal(decoder(tokens_BT), forward(config, params, tokens_BT))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(decoder)), params)


# Shapes


def test_dense_layers_of_a_mixed_model_have_the_dense_width() -> None:
    shapes = param_shapes(tiny.moe_config("qwen2_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]))
    for i in (0, 2, 3):
        layer = shapes["layers"][i]
        assert (layer["gate_up_proj"].shape, layer["down_proj"].shape) == ((2, 56, 40), (40, 56))
        assert not [leaf for leaf in layer if "expert" in leaf or leaf == "router"]
    layer = shapes["layers"][1]
    assert {leaf: layer[leaf].shape for leaf in layer if "expert" in leaf or leaf in ("router", "gate_up_proj")} == {
        "experts_gate_up_proj": (21, 2, 24, 40),
        "experts_down_proj": (21, 40, 24),
        "shared_expert_gate": (40,),
        "router": (21, 40),
    }
    assert (layer["shared_gate_up_proj"].shape, layer["shared_down_proj"].shape) == ((2, 36, 40), (40, 36))


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_have_as_many_parameters_as_are_counted(name: str) -> None:
    config = ModelConfig.from_hf(name)
    sizes = [leaf.size for leaf in jax.tree.leaves(param_shapes(config))]
    assert sum(sizes) == count_params(config).num_params


@pytest.mark.parametrize("name", ["Qwen/Qwen2-57B-A14B", "Qwen/Qwen3-30B-A3B"])
def test_full_size_models_trace_without_memory(name: str) -> None:
    config = ModelConfig.from_hf(name)
    for phase, function in (("prefill", prefill), ("decode", decode_step)):
        params, inputs, cache = step_shapes(config, phase, 4, 512, 4096)
        logits, _ = jax.eval_shape(partial(function, config), params, *inputs, cache)
        assert (logits.shape, logits.dtype) == ((4, config.vocab_size), jnp.bfloat16)
