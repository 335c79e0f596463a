"""The dense models against transformers on torch CPU: float32 end to end, bfloat16 block by block."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import hf_bridge
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from qwenjax.cache import init_cache
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.layers import rms_norm, rope_frequencies, rope_tables
from qwenjax.model import _hidden, _run_block, _unembed, decode_step, forward, prefill
from qwenjax.rope_config import SUPPORTED_TYPES
from qwenjax.weights import layer_scopes

try:
    import torch
    from transformers import AutoConfig, DynamicCache
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
except ImportError as error:
    if os.environ.get("CI") == "true":
        raise
    pytest.skip(f"needs torch and transformers, the `reference` extra ({error})", allow_module_level=True)

pytestmark = pytest.mark.reference
TOLERANCE = 2e-5  # the contract is 1e-4

MODEL_TYPES = ("qwen2", "qwen3")
LAYERS = 2
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn_attention_factor": {**YARN, "attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 0.5, "truncate": False},
    "yarn_mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
}
WINDOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "max_window_layers": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "layer_types": {
        "use_sliding_window": True,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "flag_off": {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0},
}


class Case(NamedTuple):
    rope: str
    window: str
    model_type: str
    tied: bool
    explicit: bool  # qwen3: attention_bias; qwen2: head_dim given, and N*H other than D
    modern: bool  # transformers 5.x spelling

    @property
    def id(self) -> str:
        flags = [name for name in ("tied", "explicit", "modern") if getattr(self, name)]
        return "-".join([self.model_type, self.rope, self.window, *flags])

    def config_json(self) -> tiny.Json:
        data = tiny.config_json(
            self.model_type,
            num_hidden_layers=LAYERS,
            tie_word_embeddings=self.tied,
            **copy.deepcopy(WINDOWS[self.window]),
        )
        if self.model_type == "qwen3":
            data["attention_bias"] = self.explicit
        elif not self.explicit:
            del data["head_dim"]
            data["hidden_size"] = 96
        rope = copy.deepcopy(ROPES[self.rope])
        if not self.modern:
            return data | {"rope_scaling": rope}
        data["dtype"] = data.pop("torch_dtype")
        data["rope_parameters"] = {"rope_type": "default", "rope_theta": data.pop("rope_theta"), **(rope or {})}
        return data


def _cases() -> Iterator[Case]:
    """Every pair of a rope and a window once; the other settings vary so that every pair of settings occurs."""
    for (r, rope), (w, window) in itertools.product(enumerate(ROPES), enumerate(WINDOWS)):
        model_type, tied, explicit, modern = (r // 2 + w // 2, r // 2 + w // 2 + r * w, w + r // 2, w + r // 2 + w // 2)
        yield Case(rope, window, MODEL_TYPES[model_type % 2], bool(tied % 2), bool(explicit % 2), bool(modern % 2))


CASES = tuple(_cases())
ALL = tuple(itertools.starmap(Case, itertools.product(ROPES, WINDOWS, MODEL_TYPES, *[(False, True)] * 3)))


def test_the_cases_hold_every_pair_of_settings() -> None:
    def pairs(cases: tuple[Case, ...]) -> set[Any]:
        return {
            (i, case[i], j, case[j]) for case in cases for i, j in itertools.combinations(range(len(Case._fields)), 2)
        }

    assert pairs(CASES) == pairs(ALL)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: threads cost more than they bring
    yield
    torch.set_num_threads(before)


@cache
def _reference(case: Case) -> Any:
    return hf_bridge.reference_model(case.config_json(), tiny.state_dict(ModelConfig.from_hf(case.config_json())))


@torch.no_grad()
def reference_logits(model: Any, tokens: Any, **kwargs: Any) -> Any:
    return model(torch.tensor(np.asarray(tokens)).long(), **kwargs).logits.float().numpy()


@torch.no_grad()
def reference_decode(model: Any, tokens_T: Any, prompt_len: int) -> Any:
    """Logits of the last prompt token and of each later one, by transformers' own cache."""
    ids = torch.tensor(np.asarray(tokens_T)).long()[None]
    # transformers 5.24 renamed the argument
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cached = {name: DynamicCache(config=model.config)}
    rows = [model(ids[:, :prompt_len], **cached).logits[0, -1]]
    rows += [model(ids[:, i : i + 1], **cached).logits[0, -1] for i in range(prompt_len, ids.shape[1])]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_logits_of_forward_prefill_and_decode(case: Case) -> None:
    config = ModelConfig.from_hf(case.config_json())
    params, model = tiny.params(config), _reference(case)
    tokens_BT = np.asarray(tiny.tokens(case.id, 2, 72))
    full_BTV = reference_logits(model, tokens_BT)
    assert full_BTV.std() > 0.5  # logits of nothing would agree too
    np.testing.assert_allclose(forward(config, params, tokens_BT), full_BTV, rtol=0, atol=TOLERANCE)

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
        np.testing.assert_allclose(ours, full_BTV[row, length - 1 : length + 8], rtol=0, atol=TOLERANCE)
        cached = reference_decode(model, tokens_BT[row, : length + 8], int(length))
        np.testing.assert_allclose(ours, cached, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("window", [name for name in WINDOWS if WINDOWS[name].get("use_sliding_window")])
def test_windows_change_the_reference(window: str) -> None:
    """The windowed cases would prove nothing if the window were wider than what the tokens need."""
    case = Case("default", window, "qwen3", False, False, False)
    full = case._replace(window="full")
    tokens_BT = tiny.tokens("windows", 1, 72)
    assert (
        np.abs(reference_logits(_reference(case), tokens_BT) - reference_logits(_reference(full), tokens_BT)).max()
        > 0.05
    )


LONG = {"head_dim": 32, "hidden_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [("qwen2", None), ("qwen3", {**YARN, "original_max_position_embeddings": 2048})],
    ids=["qwen2-default", "qwen3-yarn"],
)
def test_a_prompt_of_4200_tokens(model_type: str, rope: tiny.Json | None) -> None:
    data = tiny.config_json(
        model_type, **LONG, rope_theta=1e6, max_position_embeddings=8192, rope_scaling=copy.deepcopy(rope)
    )
    config = ModelConfig.from_hf(data)
    model = hf_bridge.reference_model(data, tiny.state_dict(config), attention="sdpa")
    tokens_BT = tiny.tokens("long", 1, 4200)
    ours = forward(config, tiny.params(config), tokens_BT)
    np.testing.assert_allclose(ours, reference_logits(model, tokens_BT), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("rope", [None, YARN], ids=["default", "yarn"])
def test_tokens_far_from_each_other(rope: tiny.Json | None) -> None:
    """An error in the last bit of a frequency is an angle once positions are far apart; a long prompt averages it out.

    Frequencies computed in double precision and rounded once fail this by 1.3e-3 at 32768 and 2.6e-3 at 100000.
    """
    data = tiny.config_json(
        "qwen3", head_dim=128, rope_theta=1e6, max_position_embeddings=2**17, rope_scaling=copy.deepcopy(rope)
    )
    config = ModelConfig.from_hf(data)
    params, model = tiny.params(config), hf_bridge.reference_model(data, tiny.state_dict(config))
    tokens_BT = tiny.tokens("far", 1, 16)
    mask = torch.triu(torch.full((16, 16), -1e30), diagonal=1)[None, None]
    for gap in (4096, 32768, 100000):
        positions_T = np.concatenate([np.arange(8), gap + np.arange(8)])
        x_BTD, _ = _hidden(
            config, params, tokens_BT, jnp.asarray(positions_T)[None], jnp.asarray(positions_T), None, None
        )
        reference = reference_logits(
            model, tokens_BT, position_ids=torch.tensor(positions_T)[None], attention_mask=mask
        )
        np.testing.assert_allclose(_unembed(config, params, x_BTD), reference, rtol=0, atol=TOLERANCE, err_msg=str(gap))


FREQUENCY_ROPES = {
    **ROPES,
    "yarn_qwen": {**YARN, "original_max_position_embeddings": 32768},
    "yarn_short": {**YARN, "original_max_position_embeddings": 5, "factor": 2.5},
    "yarn_one_channel": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn_factor_one": {**YARN, "factor": 1.0},
    "yarn_mscale_alone": {**YARN, "mscale": 0.7},
}


@pytest.mark.parametrize("name", FREQUENCY_ROPES)
def test_rope_frequencies(name: str) -> None:
    """Equal but for the last bit of a few, where torch's float32 power isn't rounded correctly."""
    equal, count = 0, 0
    for head_dim, theta in itertools.product((16, 64, 80, 128), (1e4, 1e6, 5e6)):
        data = tiny.config_json(head_dim=head_dim, rope_theta=theta, rope_scaling=copy.deepcopy(FREQUENCY_ROPES[name]))
        config = ModelConfig.from_hf(data)
        ours, scaling = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        reference = Qwen3RotaryEmbedding(AutoConfig.for_model(**data))
        assert scaling == reference.attention_scaling
        np.testing.assert_allclose(ours, reference.inv_freq.numpy(), rtol=2.5e-7, atol=0)
        equal, count = equal + np.sum(ours == reference.inv_freq.numpy()), count + head_dim // 2
    assert equal >= 0.95 * count


def test_every_rope_of_transformers_is_computed_or_refused() -> None:
    assert set(SUPPORTED_TYPES) - {"default"} <= set(ROPE_INIT_FUNCTIONS)
    for name in set(ROPE_INIT_FUNCTIONS) - set(SUPPORTED_TYPES):
        with pytest.raises(InputError) as caught:
            tiny.config(rope_scaling={"rope_type": name, "factor": 4.0})
        assert str(caught.value).startswith(f"rope_scaling.rope_type = '{name}': is not implemented")
        assert str(caught.value).endswith(f" Known: {', '.join(SUPPORTED_TYPES)}.")


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_transformers_writes_is_read_as_the_same_model(model_type: str, rope: str, tmp_path: Path) -> None:
    """Equal configs give equal numbers: nothing else reaches the model. All 80 of a model_type, in four files each."""
    for case in ALL:
        if (case.model_type, case.rope) != (model_type, rope):
            continue
        read = ModelConfig.from_hf(case.config_json())
        assert read == ModelConfig.from_hf(case._replace(modern=not case.modern).config_json()), case.id
        written = AutoConfig.for_model(**case.config_json())
        for use_diff in (True, False):
            data = json.loads(written.to_json_string(use_diff=use_diff))
            assert ModelConfig.from_hf(data) == read, (case.id, use_diff)
        written.save_pretrained(tmp_path)
        assert ModelConfig.from_hf(tmp_path) == read, case.id
        windows = [read.sliding_windows[i] is not None for i in range(LAYERS)]
        assert windows == [kind == "sliding_attention" for kind in written.layer_types], case.id


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


@pytest.mark.parametrize(
    "case",
    [
        Case("default", "max_window_layers", "qwen2", False, True, False),
        Case("yarn", "layer_types", "qwen3", True, True, False),
    ],
    ids=lambda case: case.id,
)
@torch.no_grad()
def test_bfloat16_block_by_block(case: Case) -> None:
    config = ModelConfig.from_hf(case.config_json())
    params, state = tiny.params(config, "bfloat16"), tiny.state_dict(config)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    model = hf_bridge.reference_model(case.config_json(), state, "bfloat16")
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    seen: dict[str, tuple[Any, Any]] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            source = args[0] if args else kwargs["hidden_states"]
            seen[name] = tuple(jnp.asarray(x.float().numpy(), jnp.bfloat16) for x in (source, output))

        return hook

    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(watch(str(i)), with_kwargs=True)
    model.model.norm.register_forward_hook(watch("norm"), with_kwargs=True)
    tokens_BT = tiny.tokens("bf16", 2, 70)
    logits_BTV = reference_logits(model, tokens_BT)

    positions_T = jnp.arange(70)
    np.testing.assert_array_equal(params["embed_tokens"][tokens_BT], seen["0"][0])
    for i, window in enumerate(config.sliding_windows):
        source, output = seen[str(i)]
        outputs = []
        for tree, dtype in ((params, jnp.bfloat16), (wide, jnp.float32)):
            rope = rope_tables(positions_T[None], config.head_dim, config.rope_theta, config.rope_scaling, dtype)
            ahead = positions_T[:, None] - positions_T[None, :]
            mask_BTS = ((ahead >= 0) & (ahead < (window or 10**6)))[None]
            x_BTD, _ = _run_block(
                config, layer_scopes(config, i), tree["layers"][i], source.astype(dtype), rope, mask_BTS, None, None
            )
            outputs.append(x_BTD)
        assert outputs[0].dtype == jnp.bfloat16
        assert_as_exact_as_torch(outputs[0], output, outputs[1])
    source, output = seen["norm"]
    np.testing.assert_array_equal(rms_norm(source, params["final_norm"], config.rms_norm_eps), output)
    truth = _unembed(config, wide, source.astype(jnp.float32))
    assert_as_exact_as_torch(_unembed(config, params, source), logits_BTV, truth)


@pytest.mark.parametrize("rope", [None, YARN], ids=["default", "yarn"])
@torch.no_grad()
def test_bfloat16_rope_tables(rope: tiny.Json | None) -> None:
    data = tiny.config_json(head_dim=128, rope_theta=1e6, rope_scaling=copy.deepcopy(rope))
    config = ModelConfig.from_hf(data)
    reference = Qwen3RotaryEmbedding(AutoConfig.for_model(**data))
    positions = [0, 1, 4095, 100000]
    theirs = reference(torch.zeros(1, dtype=torch.bfloat16), torch.tensor([positions]))
    ours = rope_tables(jnp.asarray([positions]), 128, config.rope_theta, config.rope_scaling, jnp.bfloat16)
    for table, expected in zip(ours, theirs, strict=True):
        expected = expected[..., :64].float().numpy()
        assert np.mean(np.asarray(table, np.float32) == expected) > 0.98  # a last bit before the cast may round over
        np.testing.assert_allclose(np.asarray(table, np.float32), expected, rtol=2**-7, atol=1e-5)
