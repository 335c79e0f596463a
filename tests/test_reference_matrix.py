"""The parity matrix: four architectures against transformers on torch CPU, float32, random tiny weights, in every
combination of settings and of the ways in which a checkpoint states them.

What is compared is the whole path: transformers' model, a checkpoint folder, `load`, prefill of two prompts of unequal
length, eight decode steps. Spellings and key forms of one model share its reference and, as they are read as equal
configs, its compiled functions.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import hf_bridge
import jax
import numpy as np
import pytest
import reference
import tiny
from checkpoint_files import write_file
from reference import LENGTHS, MODEL_TYPES, ROPES, STEPS
from transformers import AutoConfig

from qwenjax import load
from qwenjax.cache import init_cache
from qwenjax.config import ModelConfig
from qwenjax.model import decode_step, forward, prefill

pytestmark = reference.MARK


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Nearly all the time here is XLA's; the recorded logits of the default suite hold for optimised code."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class Reference(NamedTuple):
    """What transformers says of one model."""

    data: tiny.Json  # its config.json, 4.x
    model: Any
    tokens_BT: Any
    full_BTV: Any  # logits of all the tokens in one go
    cached_BTV: Any | None  # of the last prompt token and the eight steps, through transformers' own cache


@cache
def _reference(text: str, own_cache: bool) -> Reference:
    data = json.loads(text)
    model, tokens_BT = reference.model_of(data), np.asarray(tiny.tokens("matrix", 2, LENGTHS[0] + STEPS))
    full_BTV, cached_BTV = reference.logits_of(model, tokens_BT), None
    if own_cache:
        rows = zip(tokens_BT, LENGTHS, strict=True)
        cached_BTV = np.stack([reference.decoded(model, row[: n + STEPS], n) for row, n in rows])
    return Reference(data, model, tokens_BT, full_BTV, cached_BTV)


def reference_of(data: tiny.Json, own_cache: bool = True) -> Reference:
    return _reference(json.dumps(data), own_cache)


def write_checkpoint(folder: Path, of: Reference, spelling: str, keys: str) -> Path:
    """As transformers 5 saves it: config.json in its spelling, an expert a tensor; then what is asked for otherwise."""
    of.model.save_pretrained(folder)
    if spelling == "4.x":
        (folder / "config.json").write_text(json.dumps(of.data))
    if keys == "fused":
        write_file(folder / "model.safetensors", {key: tensor.numpy() for key, tensor in of.model.state_dict().items()})
    return folder


def assert_parity(folder: Path, of: Reference) -> None:
    """Loads the folder, runs prompts and steps, and compares with both of transformers' answers."""
    config, params = load(folder)
    plain = ModelConfig.from_hf(of.data)
    assert (config, hash(config)) == (plain, hash(plain))  # jit knows it from the other spelling
    lengths = np.array(LENGTHS, np.int32)
    padded = of.tokens_BT[:, : LENGTHS[0]].copy()
    padded[1, LENGTHS[1] :] = np.asarray(tiny.tokens("padding", LENGTHS[0] - LENGTHS[1]))  # must not matter
    last_BV, cache = prefill(config, params, padded, lengths, init_cache(config, 2, LENGTHS[0] + STEPS + 3, "float32"))
    rows = [last_BV]
    for i in range(STEPS):
        logits_BV, cache = decode_step(config, params, of.tokens_BT[[0, 1], lengths + i], cache)
        rows.append(logits_BV)
    ours_BTV = np.stack(rows, axis=1)
    full_BTV = np.stack([row[n - 1 : n + STEPS] for row, n in zip(of.full_BTV, LENGTHS, strict=True)])
    reference.assert_near(ours_BTV, full_BTV)
    if of.cached_BTV is not None:
        reference.assert_near(ours_BTV, of.cached_BTV)


# The matrix: 2 x 4 x 2 x 2 x 2 = 64 cases of the dense architectures, and twice as many of the others.


class Case(NamedTuple):
    model_type: str
    rope: str
    tied: bool
    window: bool
    spelling: str  # of config.json: transformers 4.x or 5.x
    keys: str  # of the experts: one by one, or fused

    @property
    def id(self) -> str:
        words = "tied" if self.tied else "untied", "window" if self.window else "full"
        return "-".join([self.model_type, self.rope, *words, self.spelling, self.keys])

    @property
    def reference(self) -> Reference:
        return reference_of(reference.config_json(self.model_type, rope=self.rope, tied=self.tied, window=self.window))


KEYS = {
    "qwen2": ("plain",),
    "qwen3": ("plain",),
    "qwen2_moe": ("per_expert", "fused"),
    "qwen3_moe": ("per_expert", "fused"),
}
CASES = [
    Case(model_type, *settings, keys)
    for model_type in MODEL_TYPES
    for *settings, keys in itertools.product(ROPES, (False, True), (False, True), ("4.x", "5.x"), KEYS[model_type])
]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_parity(case: Case, tmp_path: Path) -> None:
    assert_parity(write_checkpoint(tmp_path, case.reference, case.spelling, case.keys), case.reference)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_setting_of_the_matrix_changes_the_reference(model_type: str) -> None:
    """The cases would prove nothing of a setting that leaves the logits as they are."""
    models = dict.fromkeys(case._replace(spelling="4.x", keys="") for case in CASES if case.model_type == model_type)
    assert len(models) == 16
    for one, other in itertools.combinations(models, 2):
        assert np.abs(one.reference.full_BTV - other.reference.full_BTV).max() > 0.05, (one.id, other.id)


# Settings that change one thing each


class Variant(NamedTuple):
    model_types: tuple[str, ...]
    changes: tiny.Json
    inert: bool = False  # says in other words what the plain model says
    own_cache: bool = True


ABSENT = object()
DENSE, MOE = MODEL_TYPES[:2], MODEL_TYPES[2:]
WINDOW = {"use_sliding_window": True}
FULL, SLIDING = "full_attention", "sliding_attention"
VARIANTS = {
    # Windows. qwen2 and qwen3 window the layers from max_window_layers on, qwen2_moe every second below it, and
    # qwen3_moe all of them, whatever layer_types say.
    "no_window_keys": Variant(
        MODEL_TYPES, dict.fromkeys(("use_sliding_window", "sliding_window", "max_window_layers"), ABSENT), inert=True
    ),
    # not qwen2_moe: transformers' own layer_types say sliding_attention there, and its model fails to run
    "window_null": Variant(("qwen2", "qwen3", "qwen3_moe"), {**WINDOW, "sliding_window": None}, inert=True),
    "windows_begin_past_the_depth": Variant(DENSE, {**WINDOW, "max_window_layers": 28}, inert=True),
    "windows_end_past_the_depth": Variant(("qwen2_moe",), {**WINDOW, "max_window_layers": 28}),
    "windows_end_at_once": Variant(("qwen2_moe",), {**WINDOW, "max_window_layers": 0}, inert=True),
    "all_windowed": Variant(DENSE, {**WINDOW, "max_window_layers": 0}),
    "windows_from_the_third_of_4_layers": Variant(DENSE, {**WINDOW, "max_window_layers": 2, "num_hidden_layers": 4}),
    "layer_types": Variant(DENSE, {**WINDOW, "sliding_window": 13, "layer_types": [SLIDING, FULL]}),
    "layer_types_moe": Variant(("qwen2_moe",), {**WINDOW, "sliding_window": 13, "layer_types": [FULL, SLIDING]}),
    # transformers' own cache believes the layer_types that its model ignores, and fails
    "layer_types_without_effect": Variant(
        ("qwen3_moe",), {**WINDOW, "layer_types": [FULL, SLIDING]}, own_cache=False
    ),
    # RoPE
    "rope_theta": Variant(MODEL_TYPES, {"rope_theta": 1e6}),
    "rope_type_in_the_old_key": Variant(MODEL_TYPES, {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "yarn_mscale": Variant(
        MODEL_TYPES, {"rope_scaling": {**reference.YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}
    ),
    # Attention
    "no_bias": Variant(("qwen3", "qwen3_moe"), {"attention_bias": False}),
    "no_qkv_bias": Variant(("qwen2_moe",), {"qkv_bias": False}),
    "bias_by_default": Variant(("qwen2_moe",), {"qkv_bias": True}, inert=True),
    "head_dim_absent": Variant(("qwen2", "qwen2_moe", "qwen3_moe"), {"head_dim": ABSENT, "hidden_size": 96}),
    "head_dim_absent_is_128": Variant(("qwen3",), {"head_dim": ABSENT}),
    "head_dim_of_three_pairs": Variant(MODEL_TYPES, {"head_dim": 6}),
    "as_many_kv_heads": Variant(MODEL_TYPES, {"num_key_value_heads": 12}),
    # not the mixtures: transformers 5 refuses to read null there
    "kv_heads_null_is_as_many": Variant(DENSE, {"num_key_value_heads": None}),
    "kv_heads_absent_is_32_16_or_4": Variant(
        MODEL_TYPES, {"num_key_value_heads": ABSENT, "num_attention_heads": 32, "head_dim": 8}
    ),
    "one_kv_head": Variant(MODEL_TYPES, {"num_key_value_heads": 1}),
    "one_head": Variant(MODEL_TYPES, {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "eps": Variant(MODEL_TYPES, {"rms_norm_eps": 0.05}),
    # Experts
    "all_sparse": Variant(MOE, {"mlp_only_layers": []}),
    "all_sparse_windowed": Variant(MOE, {**WINDOW, "mlp_only_layers": [], "max_window_layers": 28}),
    "dense_first": Variant(MOE, {"mlp_only_layers": [0]}),
    "every_second_sparse": Variant(MOE, {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "step_and_dense_last": Variant(MOE, {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 4}),
    "every_third_sparse": Variant(MOE, {"decoder_sparse_step": 3, "mlp_only_layers": [], "num_hidden_layers": 3}),
    "renormalised": Variant(("qwen2_moe",), {"norm_topk_prob": True}),
    "not_renormalised": Variant(("qwen3_moe",), {"norm_topk_prob": False}),
    "not_renormalised_by_default": Variant(("qwen2_moe",), {"norm_topk_prob": ABSENT}, inert=True),
    "one_expert_a_token": Variant(MOE, {"num_experts_per_tok": 1}),
    "every_expert_each_token": Variant(MOE, {"num_experts_per_tok": 21}),
    "one_expert": Variant(MOE, {"num_experts": 1, "num_experts_per_tok": 1}),
}  # fmt: skip
VARIED = [(model_type, name) for name, variant in VARIANTS.items() for model_type in variant.model_types]


def varied(model_type: str, name: str) -> Reference:
    data = reference.config_json(model_type, **VARIANTS[name].changes)
    return reference_of({k: value for k, value in data.items() if value is not ABSENT}, VARIANTS[name].own_cache)


@pytest.mark.parametrize(("model_type", "name"), VARIED)
def test_one_change(model_type: str, name: str, tmp_path: Path) -> None:
    plain, changed = reference_of(reference.config_json(model_type)), varied(model_type, name)
    assert (ModelConfig.from_hf(plain.data) == ModelConfig.from_hf(changed.data)) == VARIANTS[name].inert
    difference = np.abs(plain.full_BTV - changed.full_BTV).max()
    assert difference == 0 if VARIANTS[name].inert else difference > 0.05
    for spelling in ("4.x", "5.x"):
        assert_parity(write_checkpoint(tmp_path / spelling, changed, spelling, KEYS[model_type][0]), changed)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
def test_a_shared_expert_of_width_zero_is_absent() -> None:
    """transformers keeps its empty matrices, so this one comes from no folder that it saved."""
    data = reference.config_json("qwen2_moe", shared_expert_intermediate_size=0)
    config = ModelConfig.from_hf(data)
    state = tiny.state_dict(config)
    assert not [key for key in state if "shared" in key]
    shapes = {"gate_proj": (0, 40), "up_proj": (0, 40), "down_proj": (40, 0)}
    empty = {f"shared_expert.{name}": shape for name, shape in shapes.items()} | {"shared_expert_gate": (1, 40)}
    whole = state | {
        f"model.layers.{i}.mlp.{name}.weight": np.ones(shape, np.float32)
        for i in config.sparse_layers
        for name, shape in empty.items()
    }
    tokens_BT = tiny.tokens("no shared expert", 1, 70)
    theirs = reference.logits_of(hf_bridge.reference_model(data, whole), tokens_BT)
    reference.assert_near(forward(config, tiny.params(config), tokens_BT), theirs)


# What transformers makes of a config.json


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_transformers_writes_is_read_as_the_same_model(model_type: str) -> None:
    """With all its fields and with those that differ from the class; the layers that it windows are those we window."""
    models = {case.id: case.reference for case in CASES if case.model_type == model_type}
    models |= {
        name: varied(model_type, name) for name, variant in VARIANTS.items() if model_type in variant.model_types
    }
    for name, of in models.items():
        read, written = ModelConfig.from_hf(of.data), AutoConfig.for_model(**json.loads(json.dumps(of.data)))
        for use_diff in (True, False):
            again = ModelConfig.from_hf(json.loads(written.to_json_string(use_diff=use_diff)))
            assert again == read, (name, use_diff)
        if model_type != "qwen3_moe":  # its class has no layer_types
            windows = [window is not None for window in read.sliding_windows]
            assert windows == [kind == SLIDING for kind in written.layer_types], name
