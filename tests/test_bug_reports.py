"""Public bug reports about Qwen models: which test shows each, and the reports about configs and estimates.

Those about numbers are in test_bug_reports_model.py, those about files in test_bug_reports_checkpoints.py
and beside it, as the index says.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_run import figures, run, text_of
from config_base import BASES, DROP, QWEN2, QWEN3, QWEN3_MOE, Json, changed, notes, read

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.inspection import inspection_record
from roofline.count import count_kv_bytes_per_token, count_params

HERE = Path(__file__).parent
MODEL, FILES, COUNTING, CONFIG = "model", "bug_reports_checkpoints", "checkpoint_counting", "config"
LOGITS = ("bug_reports_model", "logits")
# Each row of the reports: files and tests, without their `test_`.
INDEX: dict[str, tuple[tuple[str, str], ...]] = {
    "1": (LOGITS, ("moe", "softmax_over_all_experts_then_the_largest")),
    "3": (LOGITS, ("moe", "norm_topk_prob_is_off_unless_the_config_says_otherwise"),
          (CONFIG, "renormalising_is_as_stated_whatever_the_type")),
    "5": (("moe", "the_shared_experts_gate_scales_the_shared_expert_alone"),
          (CONFIG, "the_shared_expert_of_qwen2_moe")),
    "7": (LOGITS, ("train", "dense_layers_have_no_router_to_balance")),
    "9": (("layers", "bfloat16_tables_round_once"),),
    "11": (LOGITS, ("rope_config", "the_factor_wins")),
    "13": (LOGITS, ("rope_config", "every_spelling_of_one_scaling")),
    "15": (LOGITS, ("rope_config", "the_base_is_read_wherever_it_is"),
           ("rope_config", "no_base_is_10000_with_a_warning")),
    "17": (LOGITS, (CONFIG, "head_dim_missing"), (CONFIG, "head_dim_stated_wins_also_where_heads_would_not_divide")),
    "19": (LOGITS, (FILES, "a_bias_that_no_key_states_is_loaded_and_never_optional"),
           (CONFIG, "biases_follow_the_class")),
    "21": (LOGITS, (CONFIG, "a_window_counts_only_with_the_flag")),
    "23": (("checkpoint_keys", "a_tied_model_is_the_same_with_a_copy_of_the_head_and_without"),
           ("checkpoint_keys", "an_unequal_head_of_a_tied_model")),
    "25": (LOGITS, ("checkpoint_keys", "a_tied_model_is_the_same_with_a_copy_of_the_head_and_without")),
    "27": (("bug_reports", "the_number_of_experts_in_every_spelling"),
           ("bug_reports", "numbers_of_experts_that_disagree")),
    "29": ((FILES, "a_loaded_config_ends_where_either_file_says"), ("text", "eos_ids_are_those_of_both_files"),
           ("cli_text", "eos_is_that_of_both_files"),
           ("generate", "each_row_ends_at_its_own_eos")),
    "31": (("packed", "packed_sequences_equal_each_alone"), ("packed", "a_neighbour_changes_nothing")),
    "33": (("sampling", "temperature_zero_is_argmax_inside_a_mixed_batch"),
           ("sampling", "a_tiny_temperature_is_greedy_without_nan")),
    "35": (("generate", "lengths_in_one_bucket_compile_once"),
           (MODEL, "one_trace_for_one_shape_and_one_kind_of_layer")),
    "A1": ((FILES, "a_copy_of_a_tied_head_is_told_and_counts_once"),
           ("checkpoint_keys", "a_head_of_a_tied_model_that_is_no_copy_at_all")),
    "A3": ((FILES, "a_copy_of_a_tied_head_is_told_and_counts_once"),
           ("checkpoint_keys", "keys_and_bytes_are_those_of_published_indices")),
    "A5": ((FILES, "an_embedding_model_has_hidden_states_and_no_logits"),
           (FILES, "generating_with_an_embedding_model_names_the_way_out"),
           (FILES, "inspect_tells_the_bytes_that_are_stored"),
           (FILES, "params_counts_the_head_that_the_files_hold"),
           ("bug_reports_model", "hidden_states_are_those_of_the_base_model")),
    "A7": ((FILES, "an_untied_head_is_its_own_matrix"),),
    "B1": (LOGITS, ("checkpoint", "every_architecture_loads_to_its_parameter_tree")),
    "B3": (("bug_reports", "a_token_in_the_cache_costs_what_geometry_says"),),
    "C1": (LOGITS, (CONFIG, "dense_models_are_windowed_from_max_window_layers_on")),
    "C3": (LOGITS, (CONFIG, "max_window_layers_is_28_by_default"),
           ("bug_reports", "a_window_that_takes_no_effect_is_told")),
    "D1": (LOGITS, ("rope_config", "a_minimal_block_takes_the_length_of_the_model")),
    "D3": (LOGITS, ("rope_config", "the_factor_wins")),
    "D5": (LOGITS, ("rope_config", "attn_factor_is_ignored_as_transformers_does_and_the_context_kept")),
    "D7": (("bug_reports", "the_lengths_that_are_quoted_are_all_shown"),),
    "E1": (("rope_config", "the_base_is_read_wherever_it_is"),
           ("bug_reports", "a_file_of_transformers_5_and_its_older_form_are_one_model")),
    "E3": ((CONFIG, "both_spellings_of_the_dtype"), (CONFIG, "no_dtype"),
           ("checkpoint", "the_dtype_is_the_configs_or_that_of_the_files")),
    "F1": (("bug_reports", "the_number_of_experts_in_every_spelling"),
           ("bug_reports", "numbers_of_experts_that_disagree"), ("bug_reports", "fields_nested_in_text_config")),
    "F3": (LOGITS, (CONFIG, "which_layers_are_mixtures"),
           ("checkpoint_keys", "dense_keys_where_the_config_says_experts_and_the_reverse")),
    "F5": ((CONFIG, "an_untied_mixture_is_counted_whole"), ("count", "any_architecture_equals_the_hand_formulas")),
    "G2": (("tokenizer_pairs", "tokenizers_are_compared_and_not_rows"),
           ("tokenizer_pairs", "tokenizers_that_differ_say_in_what")),
    "H1": (LOGITS, (FILES, "a_bias_that_no_key_states_is_loaded_and_never_optional")),
    "I1": (("bug_reports", "a_split_must_leave_whole_groups"), ("sharding", "meshes_that_do_not_fit"),
           ("sharding", "meshes_that_fit")),
    "I3": ((COUNTING, "each_tensor_of_a_quantised_mixture_decides_for_itself"),
           (COUNTING, "an_fp8_router_and_a_plain_expert_load_as_they_lie"),
           ("checkpoint_fp8", "each_tensor_decides_for_itself"),
           ("checkpoint_keys", "packed_tensors_are_refused_by_name_without_a_word_in_the_config")),
    "I5": ((COUNTING, "eight_weights_lie_in_an_integer"), (COUNTING, "the_width_is_that_of_the_neighbours"),
           (COUNTING, "other_kinds_count_their_weights_too")),
    "J1": ((FILES, "one_checkpoint_in_every_layout"), ("checkpoint", "keys_without_the_prefix_of_the_causal_model")),
    "K1": ((FILES, "one_checkpoint_in_every_layout"),),
    "L1": (("bug_reports", "fields_nested_in_text_config"), ("config_files", "refused_with_the_reason")),
    "L3": (("config_errors", "each_required_field_in_turn"),
           (FILES, "a_folder_without_depth_is_refused_by_every_command")),
    "M2": (("bug_reports", "a_token_in_the_cache_costs_what_geometry_says"),
           ("bug_reports", "nothing_but_geometry_changes_the_cache")),
    "N2": (("checkpoint_keys", "weights_of_another_model_say_so"), (FILES, "weights_of_another_architecture")),
}  # fmt: skip


def test_every_report_has_tests_that_are_there(shared: Path) -> None:
    rows = re.findall(r"^\| ([A-Z]?[0-9]+) \|", (shared / "bug_reports.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == set(INDEX)
    for file in {file for tests in INDEX.values() for file, _ in tests}:
        tree = ast.parse((HERE / f"test_{file}.py").read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        named = {f"test_{name}" for tests in INDEX.values() for where, name in tests if where == file}
        assert named <= functions, file


def test_cases_of_logits_are_of_rows_that_point_there() -> None:
    text = (HERE / "test_bug_reports_model.py").read_text(encoding="utf-8")
    cases = set(re.findall(r'[ {]f?"([A-Z]?[0-9]+) ', text))
    said_there = {row for row, tests in INDEX.items() if LOGITS in tests}
    assert cases == said_there - {"B1", "H1"}  # these are 17 and 19 again, as files


def message_of(data: Json) -> str:
    with pytest.raises(InputError) as caught:
        ModelConfig.from_hf(data)
    return str(caught.value)


# F1, 27: the number of experts


SPELLINGS = ("num_experts", "num_local_experts", "n_routed_experts")


@pytest.mark.parametrize("beside", [DROP, None, 4])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_the_number_of_experts_in_every_spelling(model_type: str, spelling: str, beside: Any) -> None:
    base = BASES[model_type]
    config = read(base, **{**dict.fromkeys(SPELLINGS, beside), spelling: 4})
    assert config == ModelConfig.from_hf(base)
    assert config.notes == ()


@pytest.mark.parametrize("other", [0, 3, 8, 4.0])
@pytest.mark.parametrize("pair", [(a, b) for a in SPELLINGS for b in SPELLINGS if a < b])
def test_numbers_of_experts_that_disagree(pair: tuple[str, str], other: Any) -> None:
    text = message_of(changed(QWEN3_MOE, **{"num_experts": DROP, pair[0]: 4, pair[1]: other}))
    first, second = sorted(pair, key=SPELLINGS.index)
    said = {pair[0]: 4, pair[1]: other}
    assert text == (
        f"num_experts: is given in spellings that disagree ({first} {said[first]} and {second} {said[second]}). "
        "Keep one of them."
    )


@pytest.mark.parametrize("key", ["num_hidden_layers", "max_position_embeddings", "num_experts", "rope_theta"])
def test_fields_nested_in_text_config(key: str) -> None:
    """L1, F1: a field that sits a level deeper is never replaced by a default."""
    data = changed(QWEN3_MOE, **{key: DROP, "text_config": {key: QWEN3_MOE[key]}})
    text = message_of(data)
    assert text.startswith(f"text_config = {{{key!r}: ")
    assert "the decoder's fields are nested in a multimodal config; multimodal models are not implemented" in text


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_spellings_that_nobody_reads_are_refused_by_name(base: Json) -> None:
    for key, value in (("n_layer", 2), ("kv_channels", 32), ("moe_num_experts", 4), ("original_max_length", 128)):
        assert message_of({**base, key: value}).startswith(f"{key} = {value}: is not a key that is known here. ")


# C3: a window that takes no effect


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "8 has no effect: none of the 2 layers is windowed"),
        ({"max_window_layers": 2}, "8 has no effect: none of the 2 layers is windowed"),
        ({"max_window_layers": 70}, "8 has no effect: none of the 2 layers is windowed"),
        ({"layer_types": ["full_attention"] * 2}, "8 has no effect: none of the 2 layers is windowed"),
        ({"use_sliding_window": False}, "8 has no effect: use_sliding_window is false"),
        ({"max_window_layers": 1}, None),
        ({"max_window_layers": 0}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("base", [QWEN2, QWEN3], ids=["T", "T3"])
def test_a_window_that_takes_no_effect_is_told(base: Json, changes: Json, told: str | None) -> None:
    config = read(base, **{"use_sliding_window": True, "sliding_window": 8, **changes})
    said = notes(config)
    assert said.get(("ignored", "sliding_window")) == told
    assert any(config.sliding_windows) == (told is None)
    by_default = {} if "max_window_layers" in changes or "layer_types" in changes else {"max_window_layers"}
    if changes.get("use_sliding_window", True):
        assert {field for kind, field in said if kind == "default"} == set(by_default)


# D7: 32K, 40,960 and 128K


@pytest.mark.parametrize(
    ("positions", "scaling", "scaled", "context"),
    [
        (160, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 512),
        (512, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 512),
        (1000, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 1000),
        (160, {"type": "yarn", "factor": 2}, 320, 320),
        (160, {"rope_type": "linear", "factor": 3.0}, 480, 480),
        (160, None, None, 160),
        (160, {"rope_type": "default"}, None, 160),
    ],
)
def test_the_lengths_that_are_quoted_are_all_shown(
    tmp_path: Path, positions: int, scaling: Any, scaled: int | None, context: int
) -> None:
    data = changed(QWEN3, max_position_embeddings=positions, rope_scaling=scaling)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    record = figures("qwenjax inspect", str(path))
    shown, original = record["context"], (scaling or {}).get("original_max_position_embeddings", positions)
    assert (record["context_length"], shown["max_position_embeddings"]) == (context, positions)
    assert shown["scaled_positions"] == scaled
    assert shown["original_max_position_embeddings"] == (original if scaled else None)
    text = " ".join(text_of("qwenjax inspect", str(path)).split())
    assert " ".join(shown["explanation"].split()) in text
    assert {str(positions), *([str(original), str(scaled)] if scaled else [])} <= set(
        re.findall(r"\d+", shown["explanation"])
    )


def test_qwen3_s_own_lengths_are_explained() -> None:
    said = inspection_record(ModelConfig.from_hf("Qwen3-8B"))["context"]["explanation"]
    assert all(length in said for length in ("40960", "32768", "131072"))
    assert "32768" not in inspection_record(read(QWEN3))["context"]["explanation"]


# E1: one model in both spellings


def test_a_file_of_transformers_5_and_its_older_form_are_one_model(shared: Path) -> None:
    data = json.loads((shared / "configs" / "transformers5-qwen3.json").read_text(encoding="utf-8"))
    older = {key: value for key, value in data.items() if key not in ("rope_parameters", "dtype")}
    older |= {"rope_theta": data["rope_parameters"]["rope_theta"], "torch_dtype": data["dtype"], "rope_scaling": None}
    assert "rope_theta" not in data
    assert ModelConfig.from_hf(older) == ModelConfig.from_hf(data)
    assert ("warning", "rope_theta") not in notes(ModelConfig.from_hf(data))


# B3, M2: the KV cache


BYTES = {None: 2, "bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


@pytest.mark.parametrize("kv_dtype", BYTES)
@pytest.mark.parametrize(("base", "head_dim"), [(QWEN2, 16), (QWEN3, 32), (QWEN3_MOE, 32)], ids=["T", "T3", "M3"])
def test_a_token_in_the_cache_costs_what_geometry_says(
    tmp_path: Path, base: Json, head_dim: int, kv_dtype: str | None
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base))
    expected = 2 * 2 * 2 * head_dim * BYTES[kv_dtype]
    options = ["--kv-dtype", kv_dtype] if kv_dtype else []
    assert figures("roofline params", str(path), *options)["kv_bytes_per_token"] == expected
    plan = figures("roofline memory --hardware rtx-4090", str(path), *options)
    assert plan["kv_bytes_per_token"] == expected
    wide = figures("roofline memory --hardware rtx-4090 --kv-pool-bytes 1048576", str(path), *options)
    assert wide["kv_tokens"] == 1048576 // expected // 16 * 16


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_nothing_but_geometry_changes_the_cache(base: Json) -> None:
    plain = count_kv_bytes_per_token(ModelConfig.from_hf(base))
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    for changes in (
        {"vocab_size": 4096},
        {"intermediate_size": 4096},
        {"tie_word_embeddings": True},
        {"quantization_config": quantization},
        {"num_attention_heads": 8, "head_dim": plain // 16},
    ):
        config = read(base, **changes)
        assert count_kv_bytes_per_token(config) == plain, changes
        assert count_params(config, "int4").kv_bytes_per_token == plain
    assert count_kv_bytes_per_token(read(base, num_hidden_layers=6)) == 3 * plain
    assert count_kv_bytes_per_token(read(base, num_key_value_heads=4)) == 2 * plain


def test_a_cache_dtype_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN2))
    result = run("roofline params --kv-dtype fp8", str(path))
    assert (result.status, result.stdout) == (2, "")
    assert result.stderr.startswith("kv_dtype = 'fp8': is not a dtype that is known here. Known: ")


# I1: groups of weights that share a scale, over devices


@pytest.mark.parametrize(
    ("width", "tp", "fits"), [(132, 1, True), (132, 2, False), (160, 2, True), (144, 2, False), (128, 2, True)]
)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_split_must_leave_whole_groups(tmp_path: Path, method: str, width: int, tp: int, fits: bool) -> None:
    """The width is this file's own: later repositories pad it."""
    quantization = {"quant_method": method, "bits": 4, "group_size": 16}
    for base, field in ((QWEN2, "intermediate_size"), (QWEN3_MOE, "moe_intermediate_size")):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**base, field: width, "quantization_config": quantization}))
        result = run(f"roofline memory --hardware rtx-4090 --tp {tp}", str(path))
        assert result.status == (0 if fits else 2)
        if not fits:
            told = f"tp = {tp}: leaves {width // tp} of {field} {width} to a device, not whole groups of 16 that share"
            assert result.stderr.startswith(told)
        plain = tmp_path / "plain.json"
        plain.write_text(json.dumps({**base, field: width}))
        assert run(f"roofline memory --hardware rtx-4090 --tp {tp}", str(plain)).status == 0
