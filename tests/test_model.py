"""The dense model against recorded logits of transformers, against itself, and against the inventory's names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax import model
from qwenjax.cache import init_cache
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.layers import rms_norm
from qwenjax.model import Decoder, check_runnable, decode_step, forward, prefill, step_shapes
from qwenjax.ops import layers_of, ops_of
from qwenjax.weights import init_params, param_shapes

GOLDEN = Path(__file__).parent / "data" / "golden_dense.npz"
TOLERANCE = 2e-5
PROMPT, LENGTH, CAPACITY = 16, 20, 21  # one set of shapes, so that the tests share compiled functions
WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
CONFIGS = {
    "qwen2": tiny.config("qwen2", num_hidden_layers=2, tie_word_embeddings=True),
    "qwen3": tiny.config("qwen3", num_hidden_layers=2, attention_bias=True),
    "windowed": tiny.config("qwen3", num_hidden_layers=2, **WINDOWED),
}
each_config = pytest.mark.parametrize("name", CONFIGS)


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


# Against transformers, as tests/make_golden.py recorded it


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_logits_equal_the_recorded_ones(name: str) -> None:
    """qwen2 tied and with a sliding window, qwen3 with biases and YaRN; by forward, prefill and decode."""
    with np.load(GOLDEN) as recorded:
        data = json.loads(str(recorded[f"{name}_config"]))
        tokens_T, positions, logits = (recorded[f"{name}_{part}"] for part in ("tokens", "positions", "logits"))
    config = ModelConfig.from_hf(data)
    params, tokens_BT = tiny.params(config), tokens_T.astype(np.int32)[None]
    assert logits.std() > 0.5
    close(forward(config, params, tokens_BT)[0, positions], logits)
    cache = init_cache(config, 1, 72, "float32")
    assert positions[-2:].tolist() == [47, 71]
    last_BV, cache = prefill(config, params, tokens_BT[:, :48], jnp.array([48]), cache)
    close(last_BV[0], logits[-2])
    for i in range(48, 72):
        last_BV, cache = decode_step(config, params, tokens_BT[:, i], cache)
    close(last_BV[0], logits[-1])


# Against itself


@each_config
@given(lengths=st.tuples(*[st.integers(1, PROMPT)] * 2))
@settings(max_examples=8, deadline=None)
def test_prefill_then_decode_equals_forward(name: str, lengths: tuple[int, int]) -> None:
    """For any two prompt lengths in one batch, whatever pads the shorter one."""
    config = CONFIGS[name]
    params, tokens_BT = tiny.params(config), np.asarray(tiny.tokens(name, 2, LENGTH))
    full_BTV = forward(config, params, tokens_BT)
    at = np.array(lengths)
    pads = tiny.tokens("pad", 2, PROMPT)
    padded = np.where(np.arange(PROMPT) < at[:, None], tokens_BT[:, :PROMPT], pads)
    logits_BV, cache = prefill(config, params, padded, jnp.asarray(at), init_cache(config, 2, CAPACITY, "float32"))
    close(logits_BV, full_BTV[[0, 1], at - 1])
    for step in range(4):
        logits_BV, cache = decode_step(config, params, tokens_BT[[0, 1], at + step], cache)
        close(logits_BV, full_BTV[[0, 1], at + step])
    np.testing.assert_array_equal(cache.lengths, at + 4)


@each_config
def test_a_padded_row_equals_the_row_alone(name: str) -> None:
    config = CONFIGS[name]
    params, tokens_BT = tiny.params(config), tiny.tokens(name, 2, 16)
    batch_BV, _ = prefill(config, params, tokens_BT, jnp.array([PROMPT, 9]), init_cache(config, 2, CAPACITY, "float32"))
    alone_BV, _ = prefill(config, params, tokens_BT[1:, :9], jnp.array([9]), init_cache(config, 1, 9, "float32"))
    close(batch_BV[1], alone_BV[0])


@each_config
def test_a_later_token_leaves_earlier_logits_as_they_are(name: str) -> None:
    config = CONFIGS[name]
    params, tokens_BT = tiny.params(config), tiny.tokens(name, 2, LENGTH)
    before = forward(config, params, tokens_BT)
    after = forward(config, params, tokens_BT.at[:, -1].add(-1))
    np.testing.assert_array_equal(after[:, :-1], before[:, :-1])
    assert np.abs(after[:, -1] - before[:, -1]).max() > 0.1


def test_a_token_beyond_every_window_has_no_influence() -> None:
    """Three layers of window 5 reach 12 tokens back, and not one further."""
    config = tiny.config("qwen3", **(WINDOWED | {"max_window_layers": 0}))
    params, tokens_BT = tiny.params(config), tiny.tokens("reach", 1, 24)
    difference = forward(config, params, tokens_BT) - forward(config, params, tokens_BT.at[0, 3].add(1))
    changed = np.abs(np.asarray(difference)).max(axis=(0, 2)) > 0
    np.testing.assert_array_equal(np.flatnonzero(changed), np.arange(3, 3 + 12 + 1))


@each_config
def test_rows_of_a_batch_do_not_mix(name: str) -> None:
    config = CONFIGS[name]
    params, tokens_BT = tiny.params(config), tiny.tokens(name, 2, LENGTH)
    before = forward(config, params, tokens_BT)
    after = forward(config, params, tokens_BT.at[1].set(tiny.tokens("other", LENGTH)))
    np.testing.assert_array_equal(after[0], before[0])
    assert np.abs(after[1] - before[1]).max() > 0.1


def at_positions(config: ModelConfig, positions_T: Any) -> tuple[Any, Any, Any]:
    """Logits, and the first layer's keys and values, of eight tokens at these positions."""
    params, tokens_BT = tiny.params(config), tiny.tokens("positions", 1, 8)
    positions_T = jnp.asarray(positions_T)
    x_BTD, kept = model._hidden(config, params, tokens_BT, positions_T[None], positions_T, None, None)
    return model._unembed(config, params, x_BTD), *kept[0]


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_only_distances_between_positions_matter(name: str) -> None:
    """Shifted by 7 the logits stay though the cached keys change; one wider gap moves them."""
    config = CONFIGS[name]
    logits, keys, values = at_positions(config, np.arange(8))
    shifted_logits, shifted_keys, shifted_values = at_positions(config, np.arange(7, 15))
    close(shifted_logits, logits)
    assert np.abs(shifted_keys - keys).max() > 0.1
    np.testing.assert_array_equal(shifted_values, values)
    gap_logits, _, _ = at_positions(config, [0, 1, 2, 3, 5, 6, 7, 8])
    close(gap_logits[:, :4], logits[:, :4])
    assert np.abs(gap_logits[:, 4:] - logits[:, 4:]).max() > 1e-2


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_values_are_projected_and_nothing_else(name: str) -> None:
    """Neither normed nor rotated; keys are rotated, and in Qwen3 normed before."""
    config = CONFIGS[name]
    state = tiny.state_dict(config)
    _, keys_BKTH, values_BKTH = at_positions(config, np.arange(8))
    embedded_TD = state["model.embed_tokens.weight"][np.asarray(tiny.tokens("positions", 1, 8))[0]]
    normed_TD = np.asarray(
        rms_norm(jnp.asarray(embedded_TD), state["model.layers.0.input_layernorm.weight"], config.rms_norm_eps)
    )

    def projected(kind: str) -> Any:
        weight, bias = (state[f"model.layers.0.self_attn.{kind}_proj.{part}"] for part in ("weight", "bias"))
        return (normed_TD @ weight.T + bias).reshape(8, 3, 16).transpose(1, 0, 2)

    np.testing.assert_allclose(values_BKTH[0], projected("v"), atol=1e-5)
    k_KTH = projected("k")
    if config.qk_norm:
        scaled = k_KTH / np.sqrt(np.mean(k_KTH**2, axis=-1, keepdims=True) + config.rms_norm_eps)
        k_KTH = state["model.layers.0.self_attn.k_norm.weight"] * scaled
    np.testing.assert_allclose(keys_BKTH[0, :, 0], k_KTH[:, 0], atol=1e-5)  # position 0 turns by nothing
    assert np.abs(keys_BKTH[0, :, 1:] - k_KTH[:, 1:]).max() > 0.1
    np.testing.assert_allclose(  # a turn keeps the length
        np.linalg.norm(keys_BKTH[0], axis=-1), np.linalg.norm(k_KTH, axis=-1), rtol=1e-5
    )


def test_a_tied_head_is_the_embedding() -> None:
    tied, untied = (tiny.config("qwen2", num_hidden_layers=2, tie_word_embeddings=tied) for tied in (True, False))
    params, tokens_BT = tiny.params(tied), tiny.tokens("tied", 2, LENGTH)
    assert "lm_head" not in params
    head = {"lm_head": params["embed_tokens"]}
    np.testing.assert_array_equal(forward(untied, params | head, tokens_BT), forward(tied, params, tokens_BT))


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_bfloat16_predicts_as_float32_does(name: str) -> None:
    config = CONFIGS[name]
    tokens_BT = tiny.tokens(name, 2, 64)
    narrow = tiny.params(config, "bfloat16")
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    logits, exact = forward(config, narrow, tokens_BT), forward(config, wide, tokens_BT)
    assert (logits.dtype, exact.dtype) == (jnp.bfloat16, jnp.float32)
    log_p, log_q = (jax.nn.log_softmax(x.astype(jnp.float32), axis=-1) for x in (exact, logits))
    divergence_BT = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    assert 0 < float(divergence_BT.mean()) < 1e-3
    top2 = jnp.sort(exact, axis=-1)[..., -2:]
    sure_BT = top2[..., 1] - top2[..., 0] > 0.15
    assert sure_BT.mean() > 0.5
    np.testing.assert_array_equal(exact.argmax(-1)[sure_BT], logits.argmax(-1)[sure_BT])
    step, cache = prefill(config, narrow, tokens_BT, jnp.array([64, 9]), init_cache(config, 2, 70))
    assert (step.dtype, cache.keys[0].dtype, cache.values[0].dtype) == (jnp.bfloat16,) * 3


# The Flax module


@each_config
def test_decoder_is_forward(name: str) -> None:
    config = CONFIGS[name]
    params, tokens_BT = tiny.params(config), tiny.tokens(name, 2, LENGTH)
    decoder = Decoder(config, params)
    logits = forward(config, params, tokens_BT)
    np.testing.assert_array_equal(decoder(tokens_BT), logits)

    state = nnx.to_pure_dict(nnx.state(decoder))
    jax.tree.map(np.testing.assert_array_equal, state, params)
    graph, split = nnx.split(decoder)
    np.testing.assert_array_equal(nnx.merge(graph, split)(tokens_BT), logits)
    other = Decoder(config, seed=3)
    assert np.abs(other(tokens_BT) - logits).max() > 0.1
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(other)), init_params(config, 3))
    nnx.update(other, split)
    np.testing.assert_array_equal(other(tokens_BT), logits)


# Tracing


def test_one_trace_for_one_shape_and_one_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls, lengths and values don't retrace; layers share a trace, windowed or not."""
    traced: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            traced[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(model, "_hidden", counted("model", model._hidden))
    monkeypatch.setattr(model.Block, "mlp", counted("layer", model.Block.mlp))
    config, rows = CONFIGS["windowed"], 5  # a batch size that no other test runs
    params = tiny.params(config)
    for lengths in ([4, 1, 2, 3, 4], [1, 1, 1, 1, 1]):
        cache = init_cache(config, rows, 9, "float32")
        _, cache = prefill(config, params, tiny.tokens(str(lengths), rows, 4), jnp.array(lengths), cache)
    assert traced == {"model": 1, "layer": 1}
    for step in range(3):
        _, cache = decode_step(config, params, tiny.tokens(str(step), rows), cache)
    assert traced == {"model": 2, "layer": 2}
    prefill(
        config, params, tiny.tokens("longer", rows, 6), jnp.array([6] * rows), init_cache(config, rows, 9, "float32")
    )
    assert traced == {"model": 3, "layer": 3}


def dots(jaxpr: jex.Jaxpr, outside: str = "") -> Iterator[str]:
    """The named scopes of each dot_general, inner jaxprs included."""
    for equation in jaxpr.eqns:
        scopes = f"{outside}/{equation.source_info.name_stack}"
        if equation.primitive.name == "dot_general":
            yield scopes
        for inner in jex.jaxprs_in_params(equation.params):
            yield from dots(inner, scopes)


@each_config
@pytest.mark.parametrize("phase", ["forward", "prefill", "decode"])
def test_every_dot_runs_under_the_name_of_its_op(name: str, phase: str) -> None:
    """So counts of the compiled program join the inventory; nothing else multiplies matrices."""
    config = CONFIGS[name]
    params, inputs, cache = step_shapes(config, "decode" if phase == "decode" else "prefill", 2, 6, 9)
    if phase == "forward":
        traced = jax.make_jaxpr(partial(model.forward_impl, config))(params, inputs[0])
    else:
        impl = model.prefill_impl if phase == "prefill" else model.decode_step_impl
        traced = jax.make_jaxpr(partial(impl, config))(params, *inputs, cache)
    expected = {op.name: layers_of(config, op.scope) for op in ops_of(config) if op.kind in ("matmul", "attention")}
    assert Counter(scopes.rpartition("/")[2] for scopes in dots(traced.jaxpr)) == expected


BIG = ("Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B")


@pytest.mark.parametrize("name", BIG)
def test_full_size_models_trace_without_memory(name: str) -> None:
    config = check_runnable(ModelConfig.from_hf(name))
    params, inputs, cache = step_shapes(config, "prefill", 4, 2048, 32768)
    logits, filled = jax.eval_shape(partial(prefill, config), params, *inputs, cache)
    assert (logits.shape, logits.dtype) == ((4, config.vocab_size), jnp.bfloat16)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), filled) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), cache
    )
    params, inputs, cache = step_shapes(config, "decode", 4, 1, 32768)
    logits, longer = jax.eval_shape(partial(decode_step, config), params, *inputs, cache)
    assert logits.shape == (4, config.vocab_size)
    assert longer.keys[-1].shape == (4, config.num_key_value_heads, 32768, config.head_dim)
    assert jax.tree.structure(params) == jax.tree.structure(param_shapes(config))


# Refusals


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        check_runnable(ModelConfig.from_hf("Qwen/Qwen3-32B-AWQ"))
    assert str(caught.value) == (
        "quantization_config = 'awq': quantised weights don't run here; only their costs are known. "
        "Use the unquantised checkpoint."
    )
    assert check_runnable(CONFIGS["qwen3"]) is CONFIGS["qwen3"]
