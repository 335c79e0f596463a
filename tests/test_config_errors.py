"""Configs that can't be used: each kind of fault with its whole message, and that nothing else is ever raised."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from config_base import BASES, DROP, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, Json, changed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwenjax import hf_keys
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from roofline.count import count_params

NAN, INF = math.nan, math.inf
NUMBER = "Write a JSON number without quotes."
INTEGER = "Write a JSON number without quotes or a point."
BOOLEAN = "Write a JSON boolean without quotes."
CHECK = "Check the file."
TYPES = "Known here: qwen2, qwen3, qwen2_moe, qwen3_moe, llama, mistral, mixtral."
UNKNOWN = "Remove it if it has no effect on the model, or report it."
PLAIN = "Use a plain text checkpoint of the four Qwen architectures."
MISSING = "is missing. A config.json of this model_type must state it; nothing is guessed."


def message(source: Any) -> str:
    with pytest.raises(InputError) as caught:
        ModelConfig.from_hf(source)
    error = caught.value
    shown = "" if error.value is None else f" = {error.value!r}"
    if len(shown) < 100:  # longer values are cut
        assert str(error) == f"{error.field}{shown}: {error.problem}. {error.remedy}"
    return str(error)


@pytest.mark.parametrize(
    ("base", "key"),
    [
        (base, key)
        for base in BASES.values()
        for key in (
            "num_hidden_layers",
            "num_attention_heads",
            "hidden_size",
            "vocab_size",
            "intermediate_size",
            *(("num_experts", "num_experts_per_tok", "moe_intermediate_size") if "num_experts" in base else ()),
        )
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_each_required_field_in_turn(base: Json, key: str) -> None:
    assert message(changed(base, **{key: DROP})) == f"{key}: {MISSING}"
    assert message(changed(base, **{key: None})) == f"{key}: is null, but must be an integer. {INTEGER}"


INTEGERS = {
    "num_hidden_layers": 4096,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "hidden_size": 2**20,
    "vocab_size": 2**26,
    "intermediate_size": 2**24,
    "head_dim": 2**14,
    "max_position_embeddings": 2**31,
    "num_experts": 2**16,
    "num_experts_per_tok": 2**16,
    "moe_intermediate_size": 2**24,
}


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", ["64", 64.0, 64.5, True, [64], {"value": 64}, NAN, INF, ""])
def test_what_is_no_integer(key: str, value: Any) -> None:
    assert message(changed(QWEN3_MOE, **{key: value})) == f"{key} = {value!r}: must be an integer. {INTEGER}"


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", [0, -1, -(10**30)])
def test_integers_that_are_too_small(key: str, value: int) -> None:
    if key != "num_experts" or value:
        least = 0 if key == "num_experts" else 1
        assert message(changed(QWEN3_MOE, **{key: value})) == f"{key} = {value}: must be at least {least}. {CHECK}"


@pytest.mark.parametrize(("key", "limit"), INTEGERS.items())
def test_integers_that_are_too_large(key: str, limit: int) -> None:
    for value in (limit + 1, 10**30):
        assert message(changed(QWEN3_MOE, **{key: value})) == (
            f"{key} = {value}: is larger than any model's ({limit}). {CHECK}"
        )


@pytest.mark.parametrize("key", ["rms_norm_eps", "initializer_range", "attention_dropout", "router_aux_loss_coef"])
@pytest.mark.parametrize("value", ["1e-6", True, [1e-6], {}, NAN, INF, -INF, 10**400, None])
def test_what_is_no_number(key: str, value: Any) -> None:
    shown = "is null, but " if value is None else ""
    text = message(changed(QWEN3_MOE, **{key: value}))
    assert text.endswith(f": {shown}must be a finite number. {NUMBER}")
    assert text.startswith(f"{key}:" if value is None else f"{key} = ")


@pytest.mark.parametrize(
    ("key", "value", "must"),
    [
        ("rms_norm_eps", 0, "be positive"),
        ("rms_norm_eps", -1e-6, "be positive"),
        ("initializer_range", 0.0, "be positive"),
        ("attention_dropout", -0.1, "not be negative"),
        ("router_aux_loss_coef", -1, "not be negative"),
    ],
)
def test_numbers_out_of_range(key: str, value: float, must: str) -> None:
    assert message(changed(QWEN3_MOE, **{key: value})) == f"{key} = {value!r}: must {must}. {CHECK}"


BOOLEANS = ["tie_word_embeddings", "attention_bias", "qkv_bias", "use_sliding_window", "norm_topk_prob", "use_qk_norm"]


@pytest.mark.parametrize("key", [*BOOLEANS, "output_router_logits"])
@pytest.mark.parametrize("value", [0, 1, 0.0, [], "yes", {}, None])
def test_what_is_no_boolean(key: str, value: Any) -> None:
    shown = f"{key}: is null, but" if value is None else f"{key} = {value!r}:"
    assert message(changed(QWEN3_MOE, **{key: value})) == f"{shown} must be true or false. {BOOLEAN}"


@pytest.mark.parametrize(
    ("value", "literal", "word"),
    [
        ("False", "the JSON boolean false", "false"),
        ("true", "the JSON boolean true", "true"),
        ("None", "JSON null", "null"),
        ("null", "JSON null", "null"),
    ],
)
def test_literals_in_quotes(value: str, literal: str, word: str) -> None:
    for key in ("tie_word_embeddings", "rope_scaling", "head_dim", "eos_token_id", "num_local_experts"):
        assert message(changed(QWEN3_MOE, **{key: value})) == (
            f"{key} = {value!r}: is a string, not {literal}. Write {word} without quotes."
        )
    assert message(changed(QWEN3, tie_word_embeddings=value, sliding_window="NONE", attention_bias="true")) == (
        f"tie_word_embeddings = {value!r}: is a string, not {literal} (quoted too: sliding_window, attention_bias). "
        f"Write {word} without quotes."
    )


CASES: list[tuple[str, Json, Json, str]] = [
    (
        "model type missing",
        QWEN3,
        {"model_type": DROP},
        f"model_type: is missing. A config.json must state it. {TYPES}",
    ),
    ("model type null", QWEN3, {"model_type": None}, f"model_type: is missing. A config.json must state it. {TYPES}"),
    ("model type a number", QWEN3, {"model_type": 3}, f"model_type = 3: must be a string. {TYPES}"),
    ("model type a list", QWEN3, {"model_type": ["qwen3"]}, f"model_type = ['qwen3']: must be a string. {TYPES}"),
    ("model type unknown", QWEN3, {"model_type": "gemma2"}, f"model_type = 'gemma2': is not implemented. {TYPES}"),
    ("model type empty", QWEN3, {"model_type": ""}, f"model_type = '': is not implemented. {TYPES}"),
    ("model type in capitals", QWEN3, {"model_type": "Qwen3"}, f"model_type = 'Qwen3': is not implemented. {TYPES}"),
    (
        "audio",
        QWEN2,
        {"model_type": "qwen2_audio"},
        f"model_type = 'qwen2_audio': audio models are not implemented. {TYPES}",
    ),
    (
        "omni",
        QWEN2,
        {"model_type": "qwen3_omni_moe"},
        f"model_type = 'qwen3_omni_moe': omni models (vision and audio) are not implemented. {TYPES}",
    ),
    (
        "architecture of another type",
        QWEN3,
        {"architectures": ["Qwen2ForCausalLM"]},
        "architectures = ['Qwen2ForCausalLM']: disagrees with model_type qwen3. Correct one.",
    ),
    (
        "vision part",
        QWEN3,
        {"vision_config": {"depth": 32}},
        f"vision_config = {{'depth': 32}}: vision models are not implemented. {PLAIN}",
    ),
    (
        "audio part",
        QWEN3,
        {"audio_config": {"depth": 32}},
        f"audio_config = {{'depth': 32}}: audio models are not implemented. {PLAIN}",
    ),
    (
        "nested decoder",
        QWEN3,
        {"text_config": {"hidden_size": 8}},
        (
            "text_config = {'hidden_size': 8}: the decoder's fields are nested in a multimodal config; multimodal "
            f"models are not implemented. {PLAIN}"
        ),
    ),
    (
        "hybrid",
        QWEN3,
        {"full_attention_interval": 4},
        f"full_attention_interval = 4: hybrid linear attention is not implemented. {PLAIN}",
    ),
    (
        "hybrid layer type",
        QWEN3,
        {"layer_types": ["linear_attention", "full_attention"]},
        "layer_types = 'linear_attention': is not implemented. Known: full_attention, sliding_attention.",
    ),
    (
        "dual chunk attention",
        QWEN2,
        {"dual_chunk_attention_config": {"chunk_size": 8}},
        (
            "dual_chunk_attention_config = {'chunk_size': 8}: dual chunk attention is not plain causal attention and "
            f"is not implemented. {PLAIN}"
        ),
    ),
    (
        "multi-token prediction",
        QWEN3_MOE,
        {"num_nextn_predict_layers": 1},
        f"num_nextn_predict_layers = 1: multi-token prediction layers are not implemented. {PLAIN}",
    ),
    (
        "MLX quantisation",
        QWEN3,
        {"quantization": {"bits": 4, "group_size": 64}},
        f"quantization = {{'bits': 4, 'group_size': 64}}: weights quantised by MLX are not implemented. {PLAIN}",
    ),
    (
        "partial rotation",
        QWEN3,
        {"partial_rotary_factor": 0.25},
        (
            "partial_rotary_factor = 0.25: rotary embedding of a part of each head is not implemented. "
            "Only 1 is supported."
        ),
    ),
    (
        "cross attention",
        QWEN3,
        {"add_cross_attention": True},
        "add_cross_attention = True: cross attention is not implemented. Only false is supported.",
    ),
    (
        "multimodal rotation",
        QWEN2,
        {"use_mrope": True},
        "use_mrope = True: multimodal rotary embedding is not implemented. Only false is supported.",
    ),
    (
        "unknown key",
        QWEN3,
        {"mask_value": -1e30},
        f"mask_value = -1e+30: is not a key that is known here. {UNKNOWN}",
    ),
    (
        "unknown keys, in the order of the alphabet",
        QWEN3,
        {"zeta": 1, "alpha": None},
        f"alpha: is not a key that is known here (also unknown: zeta). {UNKNOWN}",
    ),
    (
        "a wrong value before an unknown key",
        QWEN3,
        {"alpha": 1, "hidden_size": 0},
        f"hidden_size = 0: must be at least 1. {CHECK}",
    ),
    (
        "kv heads that don't divide",
        QWEN3,
        {"num_attention_heads": 12, "num_key_value_heads": 5},
        "num_key_value_heads = 5: doesn't divide num_attention_heads 12. Dividing: 1, 2, 3, 4, 6, 12.",
    ),
    (
        "more kv heads than heads",
        QWEN3,
        {"num_key_value_heads": 8},
        "num_key_value_heads = 8: doesn't divide num_attention_heads 4. Dividing: 1, 2, 4.",
    ),
    (
        "kv heads missing and the default too many",
        QWEN3,
        {"num_key_value_heads": DROP},
        (
            "num_key_value_heads: is missing, and the class default 32 doesn't divide num_attention_heads 4. "
            "State it; null means the number of attention heads."
        ),
    ),
    (
        "head_dim missing and heads that don't divide",
        QWEN2,
        {"hidden_size": 66},
        "head_dim: is missing, and hidden_size 66 isn't a multiple of num_attention_heads 4. State head_dim.",
    ),
    (
        "head_dim null and heads that don't divide",
        QWEN3_MOE,
        {"hidden_size": 66, "head_dim": None},
        "head_dim: is null, and hidden_size 66 isn't a multiple of num_attention_heads 4. State head_dim.",
    ),
    (
        "odd head_dim",
        QWEN3,
        {"head_dim": 31},
        f"head_dim = 31: must be even: rotary embeddings pair its halves. {CHECK}",
    ),
    (
        "odd head_dim by division",
        QWEN2,
        {"hidden_size": 60},
        f"head_dim = 15: must be even: rotary embeddings pair its halves. {CHECK}",
    ),
    (
        "activation",
        QWEN3,
        {"hidden_act": "gelu"},
        "hidden_act = 'gelu': must be silu. No other activation is implemented.",
    ),
    (
        "activation null",
        QWEN3,
        {"hidden_act": None},
        "hidden_act: is null, but must be silu. No other activation is implemented.",
    ),
    (
        "dtype",
        QWEN3,
        {"torch_dtype": "float8"},
        "dtype = 'float8': is not a dtype that is known here. Known: float32, bfloat16, float16.",
    ),
    (
        "dtype a number",
        QWEN3,
        {"torch_dtype": 16},
        "dtype = 16: is not a dtype that is known here. Known: float32, bfloat16, float16.",
    ),
    (
        "dtypes that disagree",
        QWEN3,
        {"dtype": "float16"},
        "dtype: is given in spellings that disagree (dtype 'float16' and torch_dtype 'bfloat16'). Keep one of them.",
    ),
    (
        "eos a string",
        QWEN3,
        {"eos_token_id": "<|im_end|>"},
        "eos_token_id = '<|im_end|>': must be an integer or a list of integers. Write [] for none.",
    ),
    (
        "eos true",
        QWEN3,
        {"eos_token_id": True},
        "eos_token_id = True: must be an integer or a list of integers. Write [] for none.",
    ),
    (
        "eos list with a null",
        QWEN3,
        {"eos_token_id": [1, None]},
        "eos_token_id = [1, None]: must be an integer or a list of integers. Write [] for none.",
    ),
    ("eos below -1", QWEN3, {"eos_token_id": -2}, f"eos_token_id = -2: must be at least -1. {CHECK}"),
    ("bos a list", QWEN3, {"bos_token_id": [1]}, f"bos_token_id = [1]: must be an integer. {INTEGER}"),
    # Sliding windows
    (
        "layer_types too short",
        QWEN3,
        {"layer_types": ["full_attention"]},
        "layer_types = ['full_attention']: must be a list of num_hidden_layers (2) entries. Correct or remove it.",
    ),
    (
        "layer_types a string",
        QWEN3,
        {"layer_types": "full_attention"},
        "layer_types = 'full_attention': must be a list of num_hidden_layers (2) entries. Correct or remove it.",
    ),
    (
        "layer_types of nulls",
        QWEN3,
        {"layer_types": [None, None]},
        "layer_types: is not implemented. Known: full_attention, sliding_attention.",
    ),
    (
        "window of nothing",
        QWEN3,
        {"sliding_window": 0, "use_sliding_window": True},
        "sliding_window = 0: leaves nothing to attend. Set use_sliding_window to false, or a size.",
    ),
    ("negative window", QWEN3, {"sliding_window": -1}, f"sliding_window = -1: must be at least 0. {CHECK}"),
    ("window a float", QWEN3, {"sliding_window": 4096.0}, f"sliding_window = 4096.0: must be an integer. {INTEGER}"),
    (
        "max_window_layers",
        QWEN3,
        {"max_window_layers": "all"},
        f"max_window_layers = 'all': must be an integer. {INTEGER}",
    ),
    # Biases
    (
        "qwen2 without biases",
        QWEN2,
        {"attention_bias": False},
        "attention_bias = False: qwen2 always has biases on q, k and v. Remove the key.",
    ),
    (
        "qwen2 without biases, in the other spelling",
        QWEN2,
        {"qkv_bias": False},
        "qkv_bias = False: qwen2 always has biases on q, k and v. Remove the key.",
    ),
    (
        "qwen3 with the other spelling",
        QWEN3,
        {"qkv_bias": True},
        (
            "qkv_bias = True: disagrees with attention_bias, which is false by default. Keep attention_bias, the one "
            "that qwen3 reads."
        ),
    ),
    (
        "qwen2_moe with the other spelling",
        QWEN2_MOE,
        {"attention_bias": False},
        (
            "attention_bias = False: disagrees with qkv_bias, which is true by default. Keep qkv_bias, the one that "
            "qwen2_moe reads."
        ),
    ),
    (
        "biases that disagree",
        QWEN3_MOE,
        {"attention_bias": True, "qkv_bias": False},
        (
            "qkv_bias = False: disagrees with attention_bias, which is true. Keep attention_bias, the one that "
            "qwen3_moe reads."
        ),
    ),
    (
        "qwen3 without QK-norm",
        QWEN3,
        {"use_qk_norm": False},
        "use_qk_norm = False: qwen3 always normalises queries and keys. Remove the key.",
    ),
    (
        "qwen2 with QK-norm",
        QWEN2,
        {"use_qk_norm": True},
        "use_qk_norm = True: qwen2 never normalises queries and keys. Remove the key.",
    ),
    (
        "older spellings that disagree",
        QWEN2,
        {"seq_length": 1024},
        "seq_length = 1024: disagrees with max_position_embeddings 512. Keep max_position_embeddings.",
    ),
    # Mixtures
    (
        "more chosen than there are",
        QWEN3_MOE,
        {"num_experts_per_tok": 5},
        f"num_experts_per_tok = 5: is more than num_experts 4. {CHECK}",
    ),
    (
        "experts that disagree",
        QWEN3_MOE,
        {"num_local_experts": 8},
        "num_experts: is given in spellings that disagree (num_experts 4 and num_local_experts 8). Keep one of them.",
    ),
    (
        "experts that disagree without the usual spelling",
        QWEN3_MOE,
        {"num_experts": DROP, "num_local_experts": 8, "n_routed_experts": 4},
        (
            "num_experts: is given in spellings that disagree (num_local_experts 8 and n_routed_experts 4). "
            "Keep one of them."
        ),
    ),
    (
        "no experts",
        QWEN3_MOE,
        {"num_experts": 0, "num_experts_per_tok": 0},
        "num_experts = 0: leaves no mixture-of-experts layer among the 2. Use model_type qwen3, or correct the field.",
    ),
    (
        "a step beyond the layers",
        QWEN2_MOE,
        {"decoder_sparse_step": 3},
        (
            "decoder_sparse_step = 3: leaves no mixture-of-experts layer among the 2. Use model_type qwen2, or "
            "correct the field."
        ),
    ),
    ("a step of 0", QWEN3_MOE, {"decoder_sparse_step": 0}, f"decoder_sparse_step = 0: must be at least 1. {CHECK}"),
    (
        "every layer dense",
        QWEN3_MOE,
        {"mlp_only_layers": [1, 0]},
        (
            "mlp_only_layers = (1, 0): leaves no mixture-of-experts layer among the 2. Use model_type qwen3, or "
            "correct the field."
        ),
    ),
    (
        "stray dense layer",
        QWEN3_MOE,
        {"mlp_only_layers": [0, 2]},
        "mlp_only_layers = 2: is no layer of the 2. Layers count from 0.",
    ),
    (
        "negative dense layer",
        QWEN3_MOE,
        {"mlp_only_layers": [-1]},
        "mlp_only_layers = -1: is no layer of the 2. Layers count from 0.",
    ),
    (
        "dense layers a number",
        QWEN3_MOE,
        {"mlp_only_layers": 1},
        "mlp_only_layers = 1: must be a list of integers. Write [] for none.",
    ),
    (
        "dense layers of booleans",
        QWEN3_MOE,
        {"mlp_only_layers": [True]},
        "mlp_only_layers = [True]: must be a list of integers. Write [] for none.",
    ),
    (
        "a shared expert in qwen3_moe",
        QWEN3_MOE,
        {"shared_expert_intermediate_size": 48},
        "shared_expert_intermediate_size = 48: qwen3_moe has no shared expert. Set it to 0 or remove it.",
    ),
    (
        "shared experts in another spelling",
        QWEN3_MOE,
        {"n_shared_experts": 1},
        f"n_shared_experts = 1: shared experts in the DeepSeek spelling are not implemented. {PLAIN}",
    ),
    (
        "a shared expert of no integer width",
        QWEN2_MOE,
        {"shared_expert_intermediate_size": "48"},
        f"shared_expert_intermediate_size = '48': must be an integer. {INTEGER}",
    ),
    *(
        (
            f"dense with {key}",
            QWEN3,
            {key: 4},
            (
                f"{key} = 4: is a mixture-of-experts field in a dense qwen3. "
                "Set model_type to qwen3_moe or remove the field."
            ),
        )
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    ),
]


@pytest.mark.parametrize(("base", "changes", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_message(base: Json, changes: Json, text: str) -> None:
    assert message(changed(base, **changes)) == text


@pytest.mark.parametrize("key", hf_keys.REFUSED)
def test_refused_keys_are_refused_at_a_value_and_pass_where_they_say_no(key: str) -> None:
    assert message(changed(QWEN3, **{key: 1})) == f"{key} = 1: {hf_keys.REFUSED[key]}. {PLAIN}"
    absents: tuple[Any, ...] = (None, 0, False, {}, [])
    for absent in absents:
        assert ModelConfig.from_hf(changed(QWEN3, **{key: absent})) == ModelConfig.from_hf(QWEN3)


@pytest.mark.parametrize(("key", "only"), hf_keys.HARMLESS_ONLY.items())
def test_keys_that_are_harmless_at_one_value(key: str, only: hf_keys.Only) -> None:
    assert ModelConfig.from_hf(changed(QWEN3, **{key: only.value})) == ModelConfig.from_hf(QWEN3)
    assert message(changed(QWEN3, **{key: 7})) == (
        f"{key} = 7: {only.meaning} is not implemented. Only {json.dumps(only.value)} is supported."
    )


def test_no_key_is_in_two_lists() -> None:
    spellings = {key for keys in hf_keys.ALIASES.values() for key in keys}
    lists = [hf_keys.USED | spellings, hf_keys.HARMLESS, set(hf_keys.HARMLESS_ONLY), set(hf_keys.REFUSED)]
    assert sum(map(len, lists)) == len(set().union(*lists))


# Files


AGAIN = "Correct or download the file again."
BRACE = f"isn't valid JSON (Expecting property name enclosed in double quotes, line 1 column 2). {AGAIN}"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", f"isn't valid JSON (Expecting value, line 1 column 1). {AGAIN}"),
        (b"{", BRACE),
        (b"{'a': 1}", BRACE),
        (b"{} {}", f"isn't valid JSON (Extra data, line 1 column 4). {AGAIN}"),
        (b"[]", "holds a JSON list, not an object. Give a config.json."),
        (b"null", "holds a JSON NoneType, not an object. Give a config.json."),
        (b'"qwen3"', "holds a JSON str, not an object. Give a config.json."),
        (b"\xff\xfe{\x00}\x00", "isn't UTF-8 text (invalid start byte). Give a config.json."),
        (b'{"a": "\xe9"}', "isn't UTF-8 text (invalid continuation byte). Give a config.json."),
        (b"\x1f\x8b\x08\x00", "isn't UTF-8 text (invalid start byte). Give a config.json."),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "holds a number too long to read. Give a config.json."),
        (b"[" * 100_000, "nests too deep. Give a config.json."),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else "",
)
def test_files_that_hold_no_config(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert message(path) == f"{path}: {problem}"


def test_a_key_given_twice_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "qwen3", "hidden_size": 64, "vocab_size": 8, "hidden_size": 128}')
    assert message(path) == f"{path}: hidden_size: is given twice. Keep one of the two."
    path.write_text(json.dumps(QWEN3)[:-1] + ', "rope_scaling": {"type": "yarn", "factor": 2, "factor": 4}}')
    assert message(path) == f"{path}: factor: is given twice. Keep one of the two."


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(QWEN3).encode())
    assert ModelConfig.from_hf(path) == ModelConfig.from_hf(QWEN3)


def test_paths_without_a_config(tmp_path: Path) -> None:
    folder = "the folder has no config.json. Name a Hugging Face checkpoint folder."
    assert message(tmp_path) == f"{tmp_path}: {folder}"
    (tmp_path / "config.json").mkdir()
    assert message(tmp_path) == f"{tmp_path}: {folder}"
    assert message(tmp_path / "config.json") == f"{tmp_path / 'config.json'}: {folder}"
    for missing in (str(tmp_path / "none" / "config.json"), str(tmp_path / "none"), "./none", "~/none"):
        assert message(missing) == (
            f"{missing}: no such file or folder. Give a config.json, a checkpoint folder or a known model: "
            "Qwen/Qwen1.5-0.5B, Qwen/Qwen1.5-0.5B-Chat, Qwen/Qwen1.5-1.8B, ... (`roofline models` lists them)."
        )


@pytest.mark.parametrize("name", ["", "Qwen3", "a" * 5000, "qwen\0", "\ud800"])
def test_names_that_nobody_knows(name: str) -> None:
    text = message(name)
    assert text.startswith("MODEL = ")
    text.encode()  # printable


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    path.chmod(0)
    assert message(path) == f"{path}: can't be read (Permission denied). Check the path and its permissions."


@pytest.mark.parametrize("source", [[QWEN3], 3, b"config.json"])
def test_sources_that_are_neither_path_nor_object(source: Any) -> None:
    problem = "must be a path, a known model's name or the object of a config.json"
    assert message(source).endswith(f": {problem}. Parse text with json.loads first.")


def test_keys_that_json_does_not_have() -> None:
    assert message({**QWEN3, 7: 1, "alpha": 1}) == (
        f"7 = 1: is not a key that is known here (also unknown: alpha). {UNKNOWN}"
    )
    with pytest.raises(InputError, match=r"^\\ud800 = 1: is not a key"):  # what no terminal could print is escaped
        ModelConfig.from_hf({**QWEN3, "\ud800": 1})


# The constructor


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads = 0: must be an integer of at least 1. Check the value."),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0: must be an integer of at least 1. Check the value."),
        ({"num_hidden_layers": 5000}, "num_hidden_layers = 5000: is larger than any model's (4096). Check the value."),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0: must be an integer of at least 1. Check the value."),
        ({"num_experts": -1}, "num_experts = -1: must be an integer of at least 0. Check the value."),
        ({"head_dim": 32.0}, "head_dim = 32.0: must be an integer of at least 1. Check the value."),
        (
            {"sliding_windows": (8,)},
            "sliding_windows = (8,): must have num_hidden_layers (2) entries. Use `with_layers` to change the depth.",
        ),
    ],
)
def test_the_constructor_checks_too(changes: dict[str, Any], text: str) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    with pytest.raises(InputError) as caught:
        ModelConfig("qwen3", **(sizes | changes))
    assert str(caught.value) == text


@pytest.mark.parametrize("layers", [0, 3, -1])
def test_cutting_to_a_depth_that_is_not_there(layers: int) -> None:
    with pytest.raises(InputError) as caught:
        ModelConfig.from_hf(QWEN3).with_layers(layers)
    assert str(caught.value) == f"layers = {layers}: must be from 1 to num_hidden_layers 2. Choose fewer."


# Nothing else is ever raised

KEYS = sorted(
    {
        *hf_keys.USED,
        *(key for keys in hf_keys.ALIASES.values() for key in keys),
        *hf_keys.HARMLESS_ONLY,
        *hf_keys.REFUSED,
        *("use_cache", "use_qk_norm", "rotary_emb_base", "seq_length", "never heard of"),
    }
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([0, 1, -1, 2, 4, 2**31, 2**63, 10**400, 1e308])
    | st.sampled_from(["yarn", "linear", "None", "bfloat16", "torch."])
)
WORDS = [
    *("rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "attention_factor", "beta_fast"),
    *("truncate", "mscale", "attn_factor", "quant_method", "bits", "w_bit", "group_size", "weight_block_size"),
    *("modules_to_not_convert", "quant_algo", "ignore", "partial_rotary_factor"),
]
VALUES = st.recursive(
    SCALARS | st.sampled_from(["default", "fp8", "gptq", "awq", "modelopt", "NVFP4", "sliding_attention"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner),
    max_leaves=6,
)
BLOCKS = st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=5)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(list(BASES.values())),
    st.dictionaries(st.sampled_from(KEYS), VALUES | BLOCKS | st.just(DROP), min_size=1, max_size=4),
)
def test_any_change_of_a_config_is_read_or_refused_by_name(base: Json, changes: Json) -> None:
    try:
        config = ModelConfig.from_hf(changed(base, **changes))
    except InputError as error:
        str(error).encode()  # printable
        return
    # What was read can be counted, and every key that was changed is one that this package knows.
    assert count_params(config).num_params > 0
    assert config.context_length >= 1
    assert len(config.sliding_windows) == config.num_hidden_layers
    assert "never heard of" not in changes or changes["never heard of"] is DROP


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_to_a_file_is_read_or_refused_by_name(tmp_path: Path, data: st.DataObject) -> None:
    text = json.dumps(data.draw(st.sampled_from(list(BASES.values())))).encode()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 12)))
    path = tmp_path / "config.json"
    path.write_bytes(text[:start] + data.draw(st.binary(max_size=8)) + text[end:])
    try:
        ModelConfig.from_hf(path)
    except InputError as error:
        str(error).encode()
