"""The mixture-of-experts models against transformers on torch CPU: logits, bfloat16 blocks, and gradients of all four
architectures."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import os
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import hf_bridge
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from qwenjax import model as qwenjax_model
from qwenjax.cache import init_cache
from qwenjax.config import ModelConfig
from qwenjax.layers import causal_mask, rope_tables
from qwenjax.model import _run_block, decode_step, forward, forward_impl, prefill
from qwenjax.moe import route, run_experts
from qwenjax.weights import Params, layer_scopes

try:
    import torch
    from transformers import AutoConfig, DynamicCache
except ImportError as error:
    if os.environ.get("CI") == "true":
        raise
    pytest.skip(f"needs torch and transformers, the `reference` extra ({error})", allow_module_level=True)

pytestmark = pytest.mark.reference
TOLERANCE = 2e-5  # the contract is 1e-4

MODEL_TYPES = ("qwen2_moe", "qwen3_moe")
LAYERS = 4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn_attention_factor": {**YARN, "attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 0.5, "truncate": False},
}
# qwen2_moe: the rule windows layers 0 and 2, layer_types layers 1 and 2; qwen3_moe windows all of them in both.
WINDOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "rule": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 3},
    "layer_types": {
        "use_sliding_window": True,
        "sliding_window": 13,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "flag_off": {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 4},
}
MIXES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "sparse": ({}, (0, 1, 2, 3)),
    "step": ({"decoder_sparse_step": 2}, (1, 3)),
    "dense_first": ({"mlp_only_layers": [0]}, (1, 2, 3)),
    "step_and_dense_last": ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
}


class Case(NamedTuple):
    rope: str
    window: str
    mix: str
    model_type: str
    tied: bool
    renormalised: bool
    biased: bool  # qwen2_moe: qkv_bias; qwen3_moe: attention_bias
    head_dim: bool  # given, and N*H other than D
    modern: bool  # transformers 5.x spelling

    @property
    def id(self) -> str:
        flags = [name for name in ("tied", "renormalised", "biased", "head_dim", "modern") if getattr(self, name)]
        return "-".join([self.model_type, self.rope, self.window, self.mix, *flags])

    def config_json(self) -> tiny.Json:
        data = tiny.moe_json(
            self.model_type,
            num_hidden_layers=LAYERS,
            tie_word_embeddings=self.tied,
            norm_topk_prob=self.renormalised,
            **copy.deepcopy(WINDOWS[self.window] | MIXES[self.mix][0]),
        )
        data["qkv_bias" if self.model_type == "qwen2_moe" else "attention_bias"] = self.biased
        if not self.head_dim:
            del data["head_dim"]
            data["hidden_size"] = 96
        rope = copy.deepcopy(ROPES[self.rope])
        if not self.modern:
            return data | {"rope_scaling": rope}
        data["dtype"] = data.pop("torch_dtype")
        data["rope_parameters"] = {"rope_type": "default", "rope_theta": data.pop("rope_theta"), **(rope or {})}
        if self.model_type == "qwen3_moe":
            data["num_local_experts"] = data.pop("num_experts")
        return data


def _cases() -> Iterator[Case]:
    """Sixteen cases that hold every pair of settings: an orthogonal array over the field of four elements.

    Its five columns are a, b, a + b, a + xb and a + (x+1)b, addition being xor; the last two give three switches each.
    """
    times_x = (0, 2, 3, 1)
    for a, b in itertools.product(range(4), repeat=2):
        switches = [
            bool(bit)
            for column in (a ^ times_x[b], a ^ times_x[b] ^ b)
            for bit in (column & 1, column >> 1, (column & 1) ^ (column >> 1))
        ]
        names = list(ROPES)[a], list(WINDOWS)[b], list(MIXES)[a ^ b], MODEL_TYPES[switches[0]]
        yield Case(*names, *switches[1:])


CASES = tuple(_cases())
ALL = tuple(itertools.starmap(Case, itertools.product(ROPES, WINDOWS, MIXES, MODEL_TYPES, *[(False, True)] * 5)))


def test_the_cases_hold_every_pair_of_settings() -> None:
    def pairs(cases: tuple[Case, ...]) -> set[Any]:
        fields = [list(zip(Case._fields, case, strict=True)) for case in cases]
        return {pair for case in fields for pair in itertools.combinations(case, 2)}

    assert pairs(CASES) == pairs(ALL)
    assert len(CASES) == len(set(CASES)) == 16


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Torch's threads would fight with XLA's for two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Nearly all the time here is XLA's; the recorded logits of the default suite hold for optimised code."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@cache
def _reference(case: Case) -> Any:
    return hf_bridge.reference_model(case.config_json(), tiny.state_dict(ModelConfig.from_hf(case.config_json())))


def _ids(tokens: Any) -> Any:
    return torch.tensor(np.asarray(tokens)).long()


@torch.no_grad()
def reference_decode(model: Any, tokens_T: Any, prompt_len: int) -> Any:
    """Logits of the last prompt token and of each later one, by transformers' own cache."""
    ids = _ids(tokens_T)[None]
    # transformers 5.24 renamed the argument
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cached = {name: DynamicCache(config=model.config)}
    rows = [model(ids[:, :prompt_len], **cached).logits[0, -1]]
    rows += [model(ids[:, i : i + 1], **cached).logits[0, -1] for i in range(prompt_len, ids.shape[1])]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
@torch.no_grad()
def test_logits_of_forward_prefill_and_decode(case: Case) -> None:
    """72 tokens in one go and 64 + 8 tokens through the cache: many tokens are grouped, a step of two rows gathers."""
    config = ModelConfig.from_hf(case.config_json())
    assert config.sparse_layers == MIXES[case.mix][1]
    params, model = tiny.params(config), _reference(case)
    tokens_BT = np.asarray(tiny.tokens(case.id, 2, 72))
    full_BTV = model(_ids(tokens_BT)).logits.numpy()
    assert full_BTV.std() > 0.5  # logits of nothing would agree too
    tolerance = TOLERANCE * max(1, full_BTV.std())  # a tied head gives logits five times as large
    np.testing.assert_allclose(forward(config, params, tokens_BT), full_BTV, rtol=0, atol=tolerance)

    # Two prompts of unequal length, right-padded with tokens that must not matter, then eight steps of each.
    lengths = np.array([64, 37], np.int32)
    padded = tokens_BT[:, :64].copy()
    padded[1, 37:] = np.asarray(tiny.tokens("padding", 64 - 37))
    last_BV, cache = prefill(config, params, padded, lengths, init_cache(config, 2, 75, "float32"))
    steps = [last_BV]
    for i in range(8):
        logits_BV, cache = decode_step(config, params, tokens_BT[[0, 1], lengths + i], cache)
        steps.append(logits_BV)
    for row, length in enumerate(lengths):
        ours = np.stack([step[row] for step in steps])
        np.testing.assert_allclose(ours, full_BTV[row, length - 1 : length + 8], rtol=0, atol=tolerance)
        if (case.model_type, case.window) != ("qwen3_moe", "layer_types"):  # transformers' own cache fails on these
            cached = reference_decode(model, tokens_BT[row, : length + 8], int(length))
            np.testing.assert_allclose(ours, cached, rtol=0, atol=tolerance)


PLAIN = Case("default", "full", "step", "qwen2_moe", False, False, True, True, False)


@pytest.mark.parametrize(
    "change",
    [
        {"window": "rule"},
        {"window": "layer_types"},
        {"window": "rule", "model_type": "qwen3_moe"},
        {"mix": "sparse"},
        {"mix": "step_and_dense_last"},
        {"renormalised": True},
        {"rope": "yarn"},
    ],
    ids=str,
)
@torch.no_grad()
def test_each_setting_changes_the_reference(change: dict[str, Any]) -> None:
    """The cases would prove nothing of a setting that leaves the logits as they are."""
    tokens = _ids(tiny.tokens("settings", 1, 72))
    plain = PLAIN._replace(model_type=change.get("model_type", PLAIN.model_type))
    with_it, without = _reference(plain._replace(**change)), _reference(plain)
    assert (with_it(tokens).logits - without(tokens).logits).abs().max() > 0.05


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
@torch.no_grad()
def test_a_shared_expert_of_width_zero_is_absent() -> None:
    data = PLAIN.config_json() | {"shared_expert_intermediate_size": 0}
    config = ModelConfig.from_hf(data)
    state = tiny.state_dict(config)
    assert not [key for key in state if "shared" in key]
    empty = {
        f"model.layers.{i}.mlp.{name}.weight": np.ones(shape, np.float32)
        for i in config.sparse_layers
        for name, shape in {
            "shared_expert.gate_proj": (0, 40),
            "shared_expert.up_proj": (0, 40),
            "shared_expert.down_proj": (40, 0),
            "shared_expert_gate": (1, 40),
        }.items()
    }
    tokens = tiny.tokens("no shared expert", 1, 70)
    reference = hf_bridge.reference_model(data, state | empty)(_ids(tokens)).logits.numpy()
    np.testing.assert_allclose(forward(config, tiny.params(config), tokens), reference, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_what_transformers_writes_is_read_as_the_same_model(case: Case, tmp_path: Path) -> None:
    read = ModelConfig.from_hf(case.config_json())
    assert read == ModelConfig.from_hf(case._replace(modern=not case.modern).config_json())
    written = AutoConfig.for_model(**case.config_json())
    for use_diff in (True, False):
        assert ModelConfig.from_hf(json.loads(written.to_json_string(use_diff=use_diff))) == read, use_diff
    written.save_pretrained(tmp_path)
    assert ModelConfig.from_hf(tmp_path) == read


# Gradients


GRADIENTS: dict[str, tiny.Json] = {
    "qwen2": tiny.config_json("qwen2", num_hidden_layers=2, tie_word_embeddings=True),
    "qwen3": tiny.config_json("qwen3", num_hidden_layers=2, attention_bias=True),
    "qwen2_moe": tiny.moe_json("qwen2_moe", decoder_sparse_step=2, norm_topk_prob=False, num_hidden_layers=2),
    "qwen2_moe-renormalised": tiny.moe_json("qwen2_moe", norm_topk_prob=True, num_hidden_layers=1),
    "qwen3_moe": tiny.moe_json(
        "qwen3_moe", mlp_only_layers=[0], norm_topk_prob=True, tie_word_embeddings=True, num_hidden_layers=2
    ),
    "qwen3_moe-not-renormalised": tiny.moe_json("qwen3_moe", attention_bias=True, num_hidden_layers=1),
}


def next_token_loss(config: ModelConfig, params: Params, tokens_BT: Any) -> jax.Array:
    log_probs_BTV = jax.nn.log_softmax(forward_impl(config, params, tokens_BT)[:, :-1], axis=-1)
    return -jnp.take_along_axis(log_probs_BTV, tokens_BT[:, 1:, None], axis=-1).mean()


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_the_next_token_loss(name: str) -> None:
    """Of every parameter: the largest difference is at most 1e-4 of the tensor's largest gradient."""
    data = GRADIENTS[name]
    config = ModelConfig.from_hf(data)
    tokens_BT, model = tiny.tokens(name, 2, 70), hf_bridge.reference_model(data, tiny.state_dict(config))
    value_and_grad = jax.jit(jax.value_and_grad(next_token_loss, argnums=1), static_argnums=0)
    loss, gradients = value_and_grad(config, tiny.params(config), tokens_BT)
    logits, ids = model(_ids(tokens_BT)).logits, _ids(tokens_BT)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)

    ours = hf_bridge.fused_experts(hf_bridge.to_state_dict(config, gradients))
    theirs = {key: tensor.grad.numpy() for key, tensor in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for key, gradient in theirs.items():
        scale = np.abs(gradient).max()
        # A key's bias moves all scores of a query alike, which the softmax ignores: rounding is all there is.
        floor = 1e-4 if key.endswith("k_proj.bias") and not config.qk_norm else 0
        assert scale > 1e-6 or floor, key
        assert np.abs(ours[key] - gradient).max() <= 1e-4 * max(scale, floor), key


# bfloat16


def near_ties(logits_NE: Any, count: int) -> Any:
    """Tokens whose last chosen and first unchosen expert have logits that one bfloat16 step may swap."""
    ordered = np.sort(logits_NE, axis=-1)
    last, first = ordered[:, -count], ordered[:, -count - 1]
    return last - first <= 2.0**-6 * np.maximum(1, np.abs(last))


@pytest.mark.parametrize(
    "case",
    [
        Case("default", "rule", "step", "qwen2_moe", False, False, True, True, False),
        Case("yarn", "full", "dense_first", "qwen3_moe", True, True, True, True, False),
    ],
    ids=lambda case: case.id,
)
@torch.no_grad()
def test_bfloat16_block_by_block_with_forced_routing(case: Case) -> None:
    """Each block on transformers' own input, with the experts and weights that transformers chose.

    Router logits in bfloat16 tie at the border of the chosen ones, and libraries break ties differently.
    """
    config = ModelConfig.from_hf(case.config_json())
    params = tiny.params(config, "bfloat16")
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    model = hf_bridge.reference_model(case.config_json(), tiny.state_dict(config), "bfloat16")
    seen = watch(model)
    tokens_BT = tiny.tokens("bf16", 2, 70)
    model(_ids(tokens_BT))
    positions_T = jnp.arange(70)
    for i, window in enumerate(config.sliding_windows):
        (source, output), outputs = seen[f"layers.{i}"], []
        for tree, dtype in ((params, jnp.bfloat16), (wide, jnp.float32)):
            routing = seen[f"layers.{i}.gate"][1:] if i in config.sparse_layers else None
            forced = routing and forced_routing(config, *routing, dtype)
            rope = rope_tables(positions_T[None], config.head_dim, config.rope_theta, config.rope_scaling, dtype)
            mask_BTS, x_BTD = causal_mask(positions_T[None], positions_T, window), jnp.asarray(source, dtype)
            x_BTD = forced_block(config, layer_scopes(config, i), tree["layers"][i], x_BTD, rope, mask_BTS, forced)
            outputs.append(x_BTD)
        assert outputs[0].dtype == jnp.bfloat16
        assert_as_exact_as_torch(outputs[0], output, outputs[1])
    for i in config.sparse_layers:
        assert_routed_alike(config, params["layers"][i]["router"], *seen[f"layers.{i}.gate"])


def watch(model: Any) -> dict[str, tuple[Any, ...]]:
    """What each layer and each router gets and gives, as float32 and integer arrays, after the model has run."""
    seen: dict[str, tuple[Any, ...]] = {}

    def hook_of(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            source = args[0] if args else kwargs["hidden_states"]
            outputs = output if isinstance(output, tuple) else (output,)
            seen[name] = tuple(
                (x.float() if x.is_floating_point() else x).numpy() for x in (source, *outputs)
            )  # fmt: skip

        return hook

    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(hook_of(f"layers.{i}"), with_kwargs=True)
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(hook_of(f"layers.{i}.gate"), with_kwargs=True)
    return seen


@partial(jax.jit, static_argnums=(0, 1))
def forced_block(config: ModelConfig, scopes: Any, layer: Any, x: Any, rope: Any, mask: Any, forced: Any) -> Any:
    """The block with these weights and experts in place of its own choice."""
    with pytest.MonkeyPatch.context() as patch:  # while it is traced
        patch.setattr(
            qwenjax_model, "run_experts", lambda x, weights, chosen, *stacks: run_experts(x, *forced, *stacks)
        )
        return _run_block.__wrapped__(config, scopes, layer, x, rope, mask, None, None)[0]


def forced_routing(config: ModelConfig, logits_NE: Any, weights_NA: Any, chosen_NA: Any, dtype: Any) -> Any:
    shape = 2, 70, config.num_experts_per_tok
    return jnp.asarray(weights_NA, dtype).reshape(shape), jnp.asarray(chosen_NA, jnp.int32).reshape(shape)


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


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def assert_as_exact_as_torch(ours: Any, reference: Any, truth: Any) -> None:
    """Two roundings of one float32 result: neither is further from it than the other, give or take a quarter."""
    ours, reference, truth = (np.asarray(x, np.float32) for x in (ours, reference, truth))
    scale = _rms(truth)
    assert _rms(reference - truth) > 0  # a comparison in float32 by mistake
    assert _rms(ours - truth) <= 1.25 * _rms(reference - truth)
    assert _rms(ours - reference) <= 2**-6 * scale
    assert np.abs(ours - reference).max() <= 2**-4 * scale
