"""config.json as it is written: what is read back is the same config, in both spellings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_base import BASES, read
from hypothesis import given
from hypothesis import strategies as st

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.hf_writer import SPELLINGS, Spelling, to_hf
from qwenjax.known_models import known_model_names
from qwenjax.rope_config import RopeScaling

spellings = pytest.mark.parametrize("spelling", SPELLINGS)


def through_json(config: ModelConfig, spelling: Spelling) -> ModelConfig:
    return ModelConfig.from_hf(json.loads(json.dumps(to_hf(config, spelling), allow_nan=False)))


@spellings
@pytest.mark.parametrize("name", known_model_names())
def test_known_models_come_back_equal(name: str, spelling: Spelling) -> None:
    config = ModelConfig.from_hf(name)
    again = through_json(config, spelling)
    assert again == config
    assert {note.kind for note in again.notes} <= {"warning", "default"}


@spellings
def test_real_configs_come_back_equal(shared: Path, spelling: Spelling) -> None:
    count = 0
    for path in sorted((shared / "configs").glob("*.json")):
        try:
            config = ModelConfig.from_hf(path)
        except InputError:
            continue
        assert through_json(config, spelling) == config, path.name
        count += 1
    assert count >= 40


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Configs of the four architectures with every field that a config.json can say."""
    model_type = draw(st.sampled_from(sorted(BASES)))
    layers, window = draw(st.integers(1, 5)), draw(st.integers(1, 600))
    kinds: Any = st.lists(st.sampled_from([None, window]), min_size=layers, max_size=layers).map(tuple)
    if model_type == "qwen3_moe":
        kinds = st.sampled_from([(None,) * layers, (window,) * layers])
    bias = draw(st.booleans())
    changes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "sliding_windows": draw(kinds),
        "head_dim": 2 * draw(st.integers(1, 40)),
        "tie_word_embeddings": draw(st.booleans()),
        "qkv_bias": bias if model_type != "qwen2" else True,
        "attention_o_bias": bias if model_type.startswith("qwen3") else False,
        "rms_norm_eps": draw(st.floats(1e-8, 1e-3)),
        "rope_theta": draw(st.floats(1.0, 1e7)),
        "rope_scaling": draw(st.none() | scalings()),
        "initializer_range": draw(st.floats(1e-4, 1.0)),
        "dtype": draw(st.none() | st.sampled_from(["float32", "bfloat16", "float16"])),
        "bos_token_id": draw(st.none() | st.integers(0, 300)),
        "pad_token_id": draw(st.none() | st.integers(0, 300)),
        "eos_token_id": tuple(draw(st.lists(st.integers(0, 300), max_size=3))),
    }
    if model_type.endswith("_moe"):
        only = draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
        changes |= {
            "mlp_only_layers": tuple(sorted(only)),
            "norm_topk_prob": draw(st.booleans()),
            "router_aux_loss_coef": draw(st.floats(0.0, 1.0)),
            "num_experts_per_tok": draw(st.integers(1, 4)),
        }
    if model_type == "qwen2_moe":
        changes["shared_expert_intermediate_size"] = draw(st.sampled_from([0, 48]))
    return replace(read(BASES[model_type]), **changes)


@st.composite
def scalings(draw: st.DrawFn) -> RopeScaling:
    number = st.none() | st.floats(0.1, 4.0)
    return RopeScaling(
        draw(st.sampled_from(["linear", "yarn"])),
        draw(st.floats(1.0, 32.0)),
        draw(st.sampled_from([128, 512])),
        draw(number),
        draw(st.sampled_from([32.0, 16.0])),
        draw(st.sampled_from([1.0, 0.5])),
        draw(number),
        draw(number),
        draw(st.booleans()),
    )


@spellings
@given(config=configs())
def test_whatever_a_config_can_say_comes_back_equal(spelling: Spelling, config: ModelConfig) -> None:
    assert through_json(config, spelling) == config


def test_the_spellings_differ_where_transformers_do() -> None:
    scaling = RopeScaling("yarn", 4.0, 128)
    config = replace(read(BASES["qwen3_moe"]), rope_scaling=scaling)
    old, new = to_hf(config, "4.x"), to_hf(config, "5.x")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert {key: old[key] for key in old.keys() - new.keys()} == {
        "rope_scaling": yarn, "rope_theta": 1e6, "torch_dtype": "bfloat16", "num_experts": 4,
    }  # fmt: skip
    assert {key: new[key] for key in new.keys() - old.keys()} == {
        "rope_parameters": {**yarn, "rope_theta": 1e6}, "dtype": "bfloat16", "num_local_experts": 4,
    }  # fmt: skip
    assert old == to_hf(config)
    assert all(old[key] == new[key] for key in old.keys() & new.keys())


@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"])
def test_keys_are_those_of_files_that_transformers_5_wrote(shared: Path, name: str) -> None:
    theirs = json.loads((shared / "configs" / f"transformers5-{name}.json").read_text())
    ours = to_hf(ModelConfig.from_hf(theirs), "5.x")
    assert theirs.keys() - ours.keys() <= {"transformers_version"}
    free = {"max_window_layers"}  # says nothing while no window is used
    assert {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]} <= free


@pytest.mark.parametrize(
    ("model_type", "changes", "told"),
    [
        ("qwen2", {"qkv_bias": False}, "qwen2 can say qkv_bias False"),
        ("qwen2_moe", {"attention_o_bias": True}, "qwen2_moe can say attention_o_bias True"),
        ("qwen3", {"qkv_bias": True}, "qwen3 can say qkv_bias True"),
        ("qwen3", {"sliding_windows": (8, 9)}, "qwen3 can say sliding_windows (8, 9)"),
        ("qwen3_moe", {"sliding_windows": (None, 9)}, "qwen3_moe can say sliding_windows (None, 9)"),
        ("qwen3", {"num_experts": 4}, "qwen3 can say num_experts 4"),
    ],
)
def test_what_no_config_json_can_say_is_refused(model_type: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        to_hf(replace(read(BASES[model_type]), **changes))
    assert str(caught.value) == f"config: no config.json of {told}. Use values that this architecture has."


def test_an_unknown_spelling() -> None:
    with pytest.raises(InputError) as caught:
        to_hf(read(BASES["qwen3"]), "6.x")  # type: ignore[arg-type]
    assert str(caught.value) == "spelling = '6.x': is not a spelling of config.json. Known: 4.x, 5.x."
