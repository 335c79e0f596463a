"""The table of known models: sourced, unambiguous, equal to the real config files and to the published counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qwenjax
import roofline
from qwenjax.errors import InputError
from qwenjax.known_models import known_model_config, known_model_facts, known_model_names

NAMES = known_model_names()

# Files of the shared folder whose name isn't the model's, or that say more or less than the repository's config.json.
OTHER_FILES = {
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": "transformers5-qwen2_moe",
    "Qwen/Qwen1.5-32B-Chat-GPTQ-Int4": "Qwen1.5-32B-Chat-GPTQ-Int4.partial",
}
# Bookkeeping, token ids, dropout and defaults, which the table leaves out on purpose.
NOT_FACTS = {
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "hidden_act",
    "initializer_range",
    "max_window_layers",
    "sliding_window",
    "use_sliding_window",
    "transformers_version",
    "use_cache",
    "use_mrope",
    "output_router_logits",
    "router_aux_loss_coef",
    "use_qk_norm",
    "qkv_bias",
    "layer_types",
    "decoder_sparse_step",
    "mlp_only_layers",
    "rope_parameters",
    "rope_type",
}
RENAMED = {"dtype": "torch_dtype", "num_local_experts": "num_experts"}


def stated_facts(config: dict[str, Any]) -> dict[str, Any]:
    """A config's facts in one spelling: transformers 5 renamed some keys, and lists of modules have no order."""
    flat = {**config, **config.get("rope_parameters", {})}
    facts = {RENAMED.get(key, key): value for key, value in flat.items() if key not in NOT_FACTS and value is not None}
    quantization = facts.pop("quantization_config", {})
    for key in ("quant_method", "bits", "group_size", "weight_block_size"):
        facts[key] = quantization.get(key)
    facts["modules_to_not_convert"] = sorted(quantization.get("modules_to_not_convert") or ())
    return facts


def lm_head(config: dict[str, Any]) -> int:
    return int(config["vocab_size"] * config["hidden_size"])


def fp8_scales(config: dict[str, Any]) -> int:
    """One scale for each started block of [128, 128] of attention and MLP matrices; router and lm_head have none."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    matrices = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]
    matrices += [(width, hidden), (width, hidden), (hidden, width)] * config.get("num_experts", 1)
    block_out, block_in = config["quantization_config"]["weight_block_size"]
    scales: int = config["num_hidden_layers"] * sum(-(-out // block_out) * -(-in_ // block_in) for out, in_ in matrices)
    return scales


def gptq_biases(config: dict[str, Any]) -> int:
    """GPTQ writes a zero bias for o_proj, gate_proj, up_proj and down_proj too."""
    return int(config["num_hidden_layers"] * (2 * config["hidden_size"] + 2 * config["intermediate_size"]))


# What each term of stored_note adds to the parameters of the architecture.
NOTES: dict[str, Callable[[dict[str, Any]], int]] = {
    "lm_head stored although tied": lm_head,
    "no lm_head stored": lambda config: -lm_head(config),
    "fp8 block scales": fp8_scales,
    "gptq zero biases": gptq_biases,
    "counted unpacked": lambda config: 0,
}


def test_there_are_enough_models_of_each_architecture() -> None:
    assert len(NAMES) >= 45
    assert {known_model_config(name)["model_type"] for name in NAMES} == {"qwen2", "qwen3", "qwen2_moe", "qwen3_moe"}


def test_neither_the_full_nor_the_short_names_collide() -> None:
    assert len({name.lower() for name in NAMES}) == len(NAMES)
    assert len({name.rpartition("/")[2].lower() for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_says_where_its_config_and_its_count_come_from(name: str) -> None:
    facts = known_model_facts(name)
    config_source, _, count_source = facts.source.partition("; count: ")
    assert config_source.startswith("config: ")
    assert len(config_source) > 15
    assert (facts.stored_params is None) == (count_source == "")
    # A key that the row lacks is one that the source says it didn't find.
    for key, words in {
        "rope_theta": "rope_theta",
        "rms_norm_eps": "rms_norm_eps",
        "tie_word_embeddings": "tying",
    }.items():
        assert key in known_model_config(name) or words in facts.source


@pytest.mark.parametrize("name", NAMES)
def test_the_published_count_is_the_formula_plus_what_the_note_says(name: str) -> None:
    config, facts = known_model_config(name), known_model_facts(name)
    counted = roofline.count_params(qwenjax.ModelConfig.from_hf(config)).num_params
    terms = [term for term in facts.stored_note.split("; ") if term]
    assert facts.stored_params == counted + sum(NOTES[term](config) for term in terms)


def test_every_kind_of_note_is_in_use() -> None:
    assert {term for name in NAMES for term in known_model_facts(name).stored_note.split("; ") if term} == set(NOTES)


def test_the_facts_equal_the_real_files(shared: Path) -> None:
    files = {name: shared / "configs" / f"{OTHER_FILES.get(name, name.rpartition('/')[2])}.json" for name in NAMES}
    wrong: dict[tuple[str, str], tuple[Any, Any]] = {}
    compared = 0
    for name, path in files.items():
        if path.is_file():
            real, ours = stated_facts(json.loads(path.read_text())), stated_facts(known_model_config(name))
            wrong |= {(name, key): (ours.get(key), value) for key, value in real.items() if ours.get(key) != value}
            compared += 1
    assert wrong == {}
    assert compared >= 57  # the others have no file there


@pytest.mark.parametrize("spelling", ["Qwen/Qwen3-30B-A3B", "qwen/qwen3-30b-a3b", "Qwen3-30B-A3B", "QWEN3-30B-A3B"])
def test_full_and_short_names_work_in_any_letter_case(spelling: str) -> None:
    assert known_model_facts(spelling).hf_id == "Qwen/Qwen3-30B-A3B"
    assert known_model_config(spelling) == known_model_config("Qwen/Qwen3-30B-A3B")


def test_the_config_has_the_types_that_json_has() -> None:
    assert known_model_config("Qwen3-30B-A3B") == {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "torch_dtype": "bfloat16",
        "attention_bias": False,
    }
    assert known_model_config("DeepSeek-R1-0528-Qwen3-8B")["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "attn_factor": 0.8782488562869419,
    }


def test_changing_a_config_leaves_the_table_alone() -> None:
    first = known_model_config("Qwen3-235B-A22B-FP8")
    first["quantization_config"]["modules_to_not_convert"].clear()  # type: ignore[index]
    first["hidden_size"] = 1
    again = known_model_config("Qwen3-235B-A22B-FP8")
    assert again["hidden_size"] == 4096
    assert len(again["quantization_config"]["modules_to_not_convert"]) == 1 + 3 * 94  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        (
            "Qwen2.5-7B-Instrct",
            ["Qwen2.5-7B-Instruct", "Qwen2.5-72B-Instruct", "Qwen2.5-3B-Instruct", "Qwen2-7B-Instruct"],
        ),
        (
            "Qwen/Qwen3-235B",
            [
                "Qwen3-235B-A22B",
                "Qwen3-235B-A22B-Instruct-2507",
                "Qwen3-235B-A22B-Thinking-2507",
                "Qwen3-235B-A22B-FP8",
            ],
        ),
        ("gpt", []),
        ("", []),
    ],
)
def test_an_unknown_name_is_refused_with_the_near_ones(name: str, near: list[str]) -> None:
    listed = "; near: " + ", ".join(f"Qwen/{short}" for short in near) if near else ""
    for look_up in (known_model_config, known_model_facts):
        with pytest.raises(InputError) as caught:
            look_up(name)
        assert caught.value.field == "MODEL"
        assert str(caught.value) == (
            f"MODEL = {name!r}: is not a known model{listed}. `roofline models` lists the known ones; "
            "a path to a config.json or to a checkpoint folder works too."
        )
