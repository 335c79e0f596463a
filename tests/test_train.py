"""Training on the CPU: losses by hand, what a step does to the weights, and runs that go on bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.model import forward_impl, forward_to_train
from qwenjax.train.data import read_bytes, sample_batch
from qwenjax.train.loop import train
from qwenjax.train.loss import lm_loss, load_balancing_loss, next_token_loss
from qwenjax.train.settings import TrainConfig
from qwenjax.train.state_file import STATE_FILE, load_state, save_state
from qwenjax.train.step import accumulate, decay_mask, init_state, learning_rate_schedule, optimizer_of, train_step

SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "head_dim": 4,
    "hidden_size": 20,
    "intermediate_size": 28,
    "vocab_size": 256,
}
DENSE = tiny.config("qwen3", attention_bias=True, **SMALL)
SPARSE = tiny.moe_config(
    "qwen3_moe", **SMALL | {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 60, "num_experts_per_tok": 2}
)
TEXT = np.frombuffer(b"the same line, again and again. " * 8, np.uint8)
PARAMS = tiny.params(DENSE)


# Losses


def test_the_loss_of_even_logits_is_the_logarithm_of_the_vocabulary() -> None:
    labels_BT = jnp.array([[3, 1, 4, 1], [5, 9, 2, 6]])
    np.testing.assert_allclose(next_token_loss(jnp.zeros((2, 4, 10)), labels_BT), math.log(10), rtol=1e-6)


def test_each_position_is_scored_against_the_next_label() -> None:
    logits_BTV = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]]]))
    labels_BT = jnp.array([[0, 1, 2]])
    np.testing.assert_allclose(next_token_loss(logits_BTV, labels_BT), -(math.log(0.25) + math.log(0.8)) / 2, rtol=1e-6)
    np.testing.assert_allclose(next_token_loss(logits_BTV, labels_BT.at[0, 1].set(-100)), -math.log(0.8), rtol=1e-6)
    assert np.isnan(next_token_loss(logits_BTV, jnp.full((1, 3), -100)))


def test_logits_in_bfloat16_are_widened_first() -> None:
    logits_BTV = jnp.asarray(tiny.uniform("logits", (2, 9, 50)), jnp.bfloat16)
    labels_BT = tiny.tokens("labels", 2, 9, vocab=50)
    loss = next_token_loss(logits_BTV, labels_BT)
    assert loss.dtype == jnp.float32
    assert loss == next_token_loss(logits_BTV.astype(jnp.float32), labels_BT)


def test_balance_by_hand() -> None:
    """E = 4, A = 1: three of four tokens choose expert 0, one expert 1."""
    probs_BTE = jnp.array([[[0.7, 0.1, 0.1, 0.1]] * 3 + [[0.2, 0.6, 0.1, 0.1]]])
    expected = 4 * (3 / 4 * (3 * 0.7 + 0.2) / 4 + 1 / 4 * (3 * 0.1 + 0.6) / 4)
    np.testing.assert_allclose(load_balancing_loss([jnp.log(probs_BTE)], 1), expected, rtol=1e-6)
    mask_BT = jnp.array([[1, 1, 1, 0]])
    np.testing.assert_allclose(load_balancing_loss([jnp.log(probs_BTE)], 1, mask_BT), 4 * 0.7, rtol=1e-6)


def test_balance_of_even_routing_and_of_no_router() -> None:
    rolled_BTE = jnp.stack([jnp.roll(jnp.arange(6.0), i) for i in range(6)])[None]
    np.testing.assert_allclose(load_balancing_loss([rolled_BTE], 2), 2, rtol=1e-6)
    assert load_balancing_loss([], 2) == 0


BALANCED = jax.jit(partial(lm_loss, SPARSE, router_aux_loss_coef=0.5))


@cache
def _sparse_run() -> Any:
    tokens_BT = tiny.tokens("sparse", 2, 7)
    params = tiny.params(SPARSE)
    return tokens_BT, params, *jax.jit(partial(forward_to_train, SPARSE))(params, tokens_BT)


def test_dense_layers_have_no_router_to_balance() -> None:
    """transformers once crashed on mlp_only_layers with router logits; only sparse layers count."""
    tokens_BT, params, logits_BTV, routers_BTE = _sparse_run()
    assert [router.shape for router in routers_BTE] == [(2, 7, 60)] * 2
    np.testing.assert_array_equal(logits_BTV, jax.jit(partial(forward_impl, SPARSE))(params, tokens_BT))
    total, next_token, balance = BALANCED(params, tokens_BT, jnp.ones((2, 7)))
    assert balance > 2  # of even routing
    np.testing.assert_allclose(balance, load_balancing_loss(routers_BTE, 2), rtol=1e-6)
    np.testing.assert_allclose(next_token, next_token_loss(logits_BTV, tokens_BT), rtol=1e-6)
    np.testing.assert_allclose(total, next_token + 0.5 * balance, rtol=1e-6)


def test_the_balance_is_only_there_when_asked_for() -> None:
    tokens_BT, params, logits_BTV, _ = _sparse_run()
    total, next_token, balance = jax.jit(partial(lm_loss, SPARSE))(params, tokens_BT)
    np.testing.assert_allclose(total, next_token_loss(logits_BTV, tokens_BT), rtol=1e-6)
    assert (total, balance) == (next_token, 0)


def test_padding_changes_neither_loss() -> None:
    tokens_BT, params, _, _ = _sparse_run()
    mask_BT = jnp.arange(7)[None] < jnp.array([[4], [7]])
    padded, ones = tokens_BT.at[0, 4:].set(77), jnp.ones((2, 7))
    np.testing.assert_allclose(BALANCED(params, tokens_BT, mask_BT), BALANCED(params, padded, mask_BT), rtol=1e-6)
    assert BALANCED(params, tokens_BT, ones).next_token != BALANCED(params, padded, ones).next_token


# Recomputing


def _equations(jaxpr: jex.Jaxpr) -> list[str]:
    inner = [name for eqn in jaxpr.eqns for sub in jex.jaxprs_in_params(eqn.params) for name in _equations(sub)]
    return [eqn.primitive.name for eqn in jaxpr.eqns] + inner


def test_blocks_are_recomputed_by_the_named_policy() -> None:
    """In the jaxpr: one recomputation for each block; all products again, or those of attention only."""
    config = tiny.config("qwen3", **SMALL | {"num_hidden_layers": 2})
    params, tokens_BT = tiny.params(config), tiny.tokens("remat", 2, 6)
    found, gradients = {}, {}
    for policy in ("none", "full", "dots"):
        gradient = jax.grad(lambda p, policy=policy: lm_loss(config, p, tokens_BT, remat=policy).total)
        names = _equations(jax.make_jaxpr(gradient)(params).jaxpr)
        found[policy] = sum(name in ("checkpoint", "remat", "remat2") for name in names), names.count("dot_general")
        gradients[policy] = jax.jit(gradient)(params)
    plain = found["none"][1]
    # A block's own products: qkv, scores, values, o, gate and up, down; the last one's result nobody needs again.
    assert found == {"none": (0, plain), "full": (2, plain + 2 * 5), "dots": (2, plain + 2 * 2)}
    for policy in ("full", "dots"):
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), gradients[policy], gradients["none"]
        )  # fmt: skip


# The step


def settings(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"steps": 6, "batch_size": 4, "sequence_len": 8, "learning_rate": 0.01} | changes)


def test_parts_of_a_batch_sum_to_the_whole() -> None:
    """Although one part has fewer labels than the other."""
    tokens_BT = tiny.tokens("accumulation", 4, 8)
    mask_BT = jnp.arange(8)[None] < jnp.array([[8], [7], [3], [2]])
    whole, parts = (
        jax.jit(partial(accumulate, DENSE, settings(accumulation_steps=n)))(PARAMS, tokens_BT, mask_BT) for n in (1, 2)
    )
    np.testing.assert_allclose(whole[0], parts[0], rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), whole[1], parts[1])


def _first_update(optimizer: optax.GradientTransformation, gradient: float) -> Any:
    """Updates and state after a gradient that is the same everywhere."""

    @jax.jit
    def update(params: Any) -> Any:
        gradients = jax.tree.map(lambda leaf: jnp.full(leaf.shape, gradient), params)
        return optimizer.update(gradients, optimizer.init(params), params)

    return update(PARAMS)


def test_only_matrices_decay() -> None:
    """With no gradient a step scales them by 1 - rate x decay, and leaves norms and biases alone."""
    chosen = settings(weight_decay=0.5)
    optimizer = optimizer_of(DENSE, chosen)
    updates, _ = _first_update(optimizer, 0.0)
    after = optax.apply_updates(PARAMS, updates)
    shares = jax.tree_util.tree_map_with_path(lambda path, a, b: (path[-1].key, np.asarray(a / b)), after, PARAMS)
    found = jax.tree.leaves(shares, is_leaf=lambda item: isinstance(item, tuple))
    still = {"input_norm", "post_norm", "q_norm", "k_norm", "final_norm", "qkv_bias", "o_bias"}
    assert {name for name, _ in found} == still | {
        "embed_tokens", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"
    }  # fmt: skip
    for name, share in found:
        np.testing.assert_allclose(share, 1 if name in still else 1 - 0.01 * 0.5, rtol=1e-5)


def test_the_experts_and_their_router_decay() -> None:
    sparse = decay_mask(SPARSE, tiny.params(SPARSE))["layers"][0]
    assert sparse["router"] is sparse["experts_gate_up_proj"] is True
    assert sparse["post_norm"] is False


@pytest.mark.parametrize(("clip_norm", "kept"), [(None, 3.0), (0.5, 0.5), (4.0, 3.0)])
def test_the_gradient_is_clipped_by_its_global_norm(clip_norm: float | None, kept: float) -> None:
    chosen = settings(clip_norm=clip_norm)
    count = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    optimizer = optimizer_of(DENSE, chosen)
    _, state = _first_update(optimizer, 3 / math.sqrt(count))
    mean = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose(optax.tree.norm(mean), (1 - chosen.beta1) * kept, rtol=1e-4)


def test_the_rate_rises_and_falls_along_a_cosine() -> None:
    rate = learning_rate_schedule(settings(steps=10, warmup_steps=4, final_learning_rate_fraction=0.2))
    found = [float(rate(step)) for step in (0, 2, 4, 7, 10, 11)]
    np.testing.assert_allclose(found, [0, 0.005, 0.01, 0.006, 0.002, 0.002], rtol=1e-5)
    assert float(learning_rate_schedule(settings())(0)) == pytest.approx(0.01)


# Runs

RUN = settings(steps=40, warmup_steps=2, learning_rate=0.02)


def test_six_steps_equal_three_and_three_more(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = train(DENSE, RUN, TEXT, tmp_path / "whole", PARAMS, stop_at=6, save_every=2)
    told = capfd.readouterr()
    assert told.out == ""
    assert [line.split("  loss")[0] for line in told.err.splitlines()] == ["step 2/40", "step 4/40", "step 6/40"]
    train(DENSE, RUN, TEXT, tmp_path / "parts", PARAMS, stop_at=3)
    resumed = train(DENSE, RUN, TEXT, tmp_path / "parts", stop_at=6)
    assert int(resumed.step) == 6
    for other in (resumed, load_state(tmp_path / "parts", DENSE, RUN), load_state(tmp_path / "whole", DENSE, RUN)):
        assert jax.tree.structure(other) == jax.tree.structure(whole)
        for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(whole), strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert [entry.name for entry in (tmp_path / "parts").iterdir()] == [STATE_FILE]
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), whole.params, PARAMS)
    assert all(jax.tree.leaves(moved))


def test_a_step_reuses_its_state_and_learns() -> None:
    state, losses = init_state(DENSE, RUN, PARAMS), []
    for step in range(40):
        batch = sample_batch(TEXT, np.asarray(state.rng), step, 4, 8)
        before, (state, metrics) = state, train_step(DENSE, RUN, state, batch)
        losses.append(float(metrics.loss))
    assert before.params["embed_tokens"].is_deleted()
    assert before.opt_state[1][0].mu["embed_tokens"].is_deleted()
    assert not PARAMS["embed_tokens"].is_deleted()
    _, counts = np.unique(TEXT, return_counts=True)
    shares = counts / counts.sum()
    assert np.mean(losses[-5:]) < -np.sum(shares * np.log(shares))  # under the unigram entropy
    assert losses[0] > math.log(100)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    broken = PARAMS | {"final_norm": PARAMS["final_norm"] * jnp.nan}
    with pytest.raises(InputError) as caught:
        train(DENSE, RUN, TEXT, tmp_path, broken, stop_at=6)
    assert str(caught.value) == (
        "learning_rate = 0.02: the loss is nan at step 6. "
        "Lower it, warm up for longer, or clip the gradient's norm lower."
    )
    assert list(tmp_path.iterdir()) == []


# The state's file


def _state(dtype: str = "float32") -> Any:
    return init_state(DENSE, RUN, tiny.params(DENSE, dtype))


def test_bfloat16_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = _state("bfloat16")
    save_state(tmp_path, DENSE, RUN, state)
    loaded = load_state(tmp_path, DENSE, RUN)
    assert loaded is not None
    assert loaded.params["embed_tokens"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, loaded, state)


def test_a_save_that_is_cut_off_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, DENSE, RUN, _state())
    before = (tmp_path / STATE_FILE).read_bytes()

    def full_disk(file: Any, **_: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(InputError) as caught:
        save_state(tmp_path, DENSE, RUN, _state())
    path = tmp_path / STATE_FILE
    assert str(caught.value) == (
        f"{path}: the training state can't be written (No space left on device). "
        "Make room there or name another folder."
    )
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    assert load_state(tmp_path, DENSE, RUN) is None
    save_state(tmp_path, DENSE, RUN, _state())
    path = tmp_path / STATE_FILE
    afresh = "Go on with the settings of the run, or start afresh in another folder."
    others: list[tuple[ModelConfig, TrainConfig, str]] = [
        (DENSE, replace(RUN, weight_decay=0.2), f"weight_decay = 0.2: the run in {path} has 0.1. {afresh}"),
        (
            tiny.config("qwen3", attention_bias=True, **SMALL | {"rope_theta": 2e4}),
            RUN,
            f"rope_theta = 20000.0: the run in {path} has 10000.0. {afresh}",
        ),
    ]
    for config, chosen, message in others:
        with pytest.raises(InputError) as caught:
            load_state(tmp_path, config, chosen)
        assert str(caught.value) == message


def test_a_broken_state_is_one_error(tmp_path: Path) -> None:
    save_state(tmp_path, DENSE, RUN, _state())
    path = tmp_path / STATE_FILE
    whole = path.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"not a state"):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=r"train_state\.npz: is no training state \(.*\)\. Remove it to start"):
            load_state(tmp_path, DENSE, RUN)
    with np.load(_written(path, whole)) as stored:
        arrays = {name: stored[name] for name in stored.files if name != ".step"}
    np.savez(path, **arrays)
    with pytest.raises(InputError) as caught:
        load_state(tmp_path, DENSE, RUN)
    assert str(caught.value) == (
        f"{path}: arrays that are missing, unknown or of another shape or dtype: .step. Remove it to start afresh."
    )


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# Data


def test_batches_follow_from_the_seed_and_the_step() -> None:
    text = np.arange(20, dtype=np.uint8)
    rng = np.asarray(init_state(DENSE, settings(), PARAMS).rng)
    other = np.asarray(init_state(DENSE, settings(seed=1), PARAMS).rng)
    batches = [sample_batch(text, rng, step, 5, 8) for step in range(30)]
    np.testing.assert_array_equal(batches[3], sample_batch(text, rng, 3, 5, 8))
    assert (batches[3] != batches[4]).any()
    assert (batches[3] != sample_batch(text, other, 3, 5, 8)).any()
    rows = np.concatenate(batches)
    assert rows.dtype == np.int32
    assert set(rows[:, 0]) == set(range(13))  # every window, the last one included
    np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(8))


def test_text_is_read_as_bytes(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes("aé\n".encode())
    assert read_bytes(DENSE, file, 4).tolist() == [97, 195, 169, 10]


def test_text_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"abc")
    longer = f"{file}: holds 3 bytes, fewer than one sequence of 4. Use a longer text or shorter sequences."
    cases = [
        (DENSE, file, longer),
        (DENSE, tmp_path / "none", f"{tmp_path}/none: can't be read (No such file or directory). Name a file of text."),
        (tiny.config(), file, "vocab_size = 101: has no row for every byte. Use a config with at least 256."),
    ]
    for config, path, message in cases:
        with pytest.raises(InputError) as caught:
            read_bytes(config, path, 4)
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("field", "value", "rest"),
    [
        ("steps", 0, "is below 1. Use 1 or more."),
        ("sequence_len", 1, "has no next token. Use 2 or more."),
        ("learning_rate", math.nan, "is no positive number. Use a value above 0."),
        ("weight_decay", -0.1, "is no number from 0 on. Use 0 or more."),
        ("beta2", 1.0, "is outside [0, 1). Use a value such as 0.9."),
        ("clip_norm", 0.0, "would stop every step. Use None to clip nothing."),
        ("warmup_steps", 6, "isn't from 0 to below the 6 steps. Use fewer warm-up steps, or more steps."),
        ("accumulation_steps", 3, "doesn't divide the batch of 4. Use a divisor of batch_size."),
        ("remat", "some", "is no known policy. Use one of none, full, dots."),
        ("seed", -1, "doesn't fit in 32 bits. Use 0 to 4294967295."),
    ],
)
def test_settings_that_cannot_be_used(field: str, value: Any, rest: str) -> None:
    with pytest.raises(InputError) as caught:
        settings(**{field: value})
    assert str(caught.value) == f"{field} = {value!r}: {rest}"
