"""Reads the fields of a Hugging Face config.json: types checked, defaults noted, spellings reconciled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qwenjax import hf_keys, hf_llama
from qwenjax.errors import InputError
from qwenjax.field_reader import REQUIRED, FieldReader, plain_integer, wrong_type
from qwenjax.hf_keys import Note
from qwenjax.quantization import read_quantization
from qwenjax.rope_config import read_rope

DTYPES = ("float32", "bfloat16", "float16")

_LEGACY = {"rotary_emb_base": "rope_theta", "seq_length": "max_position_embeddings"}
_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    hf_keys.FIRST_QWEN: "QWenLMHeadModel",
}
_KV_HEADS_DEFAULT = {"qwen2": 32, "qwen3": 32, "qwen2_moe": 16, "qwen3_moe": 4, hf_keys.FIRST_QWEN: 32}
_NAMES = ("model_type", "architectures", "hidden_act", "dtype", "torch_dtype")  # the keys whose values are text
_MOE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_MOE_SWITCHES = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef")


def read_fields(data: Mapping[str, Any], *, first_generation: bool = False) -> dict[str, Any]:
    """The constructor arguments of ModelConfig that a parsed config.json states or implies.

    first_generation: the data is of a known model of the first Qwen generation, in the keys of the second.
    """
    model_type = hf_keys.FIRST_QWEN if first_generation else _check_model_type(data)
    llama = model_type in hf_keys.COST_TYPES
    _check_refused(data, llama)
    _check_quoted(data)
    notes = _check_architectures(data, model_type)
    reader = FieldReader(data)
    layers = reader.integer("num_hidden_layers", REQUIRED)
    heads = reader.integer("num_attention_heads", REQUIRED)
    hidden = reader.integer("hidden_size", REQUIRED)
    width = reader.integer("intermediate_size", REQUIRED)
    default = hf_llama.POSITIONS_DEFAULT.get(model_type, 32768)
    positions = reader.integer("max_position_embeddings", default, f"missing; the class default {default} taken")
    rope = read_rope(reader.data, positions, llama)
    qkv_bias, o_bias = hf_llama.read_biases(reader, model_type) if llama else _read_biases(reader, model_type)
    read_windows = hf_llama.read_windows if llama else _read_sliding_windows
    fields = dict(
        model_type=model_type,
        vocab_size=reader.integer("vocab_size", REQUIRED),
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=(hf_llama.read_kv_heads if llama else _read_kv_heads)(reader, model_type, heads),
        head_dim=_read_head_dim(reader, model_type, hidden, heads),
        max_position_embeddings=positions,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6, "missing; the class default 1e-06 taken"),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=_read_tied(reader),
        qkv_bias=qkv_bias,
        attention_o_bias=o_bias,
        sliding_windows=read_windows(reader, model_type, layers),
        initializer_range=reader.number("initializer_range", 0.02),
        dtype=_read_dtype(reader),
        bos_token_id=_read_token(reader, "bos_token_id"),
        eos_token_id=_read_tokens(reader, "eos_token_id"),
        pad_token_id=_read_token(reader, "pad_token_id"),
        quantization=read_quantization(data.get("quantization_config")),
        **(hf_llama.read_mixtral(reader, width) if model_type == "mixtral" else _read_moe(reader, model_type)),
    )
    _check_other_values(reader, model_type)
    # Unknown keys last: a wrong value of a known key says more.
    _check_unknown(data, llama)
    fields["notes"] = (*notes, *_check_legacy(data), *rope.remarks, *reader.notes)
    return fields


def _check_model_type(data: Mapping[str, Any]) -> str:
    model_type = data.get("model_type")
    known = ", ".join((*hf_keys.MODEL_TYPES, *hf_keys.COST_TYPES))
    if model_type is None:
        for key, file in hf_keys.OTHER_FILES.items():
            if key in data:
                raise InputError(
                    "model_type", None, f"is missing: this is {file}, not a config.json", "Give the config.json."
                )
        raise InputError("model_type", None, "is missing", f"A config.json must state it. Known here: {known}.")
    if not isinstance(model_type, str):
        raise InputError("model_type", model_type, "must be a string", f"Known here: {known}.")
    if model_type not in (*hf_keys.MODEL_TYPES, *hf_keys.COST_TYPES):
        reason = next(
            (text for prefix, text in hf_keys.FOREIGN_TYPES if model_type.startswith(prefix)), "is not implemented"
        )
        raise InputError("model_type", model_type, reason, f"Known here: {known}.")
    return model_type


def _check_refused(data: Mapping[str, Any], llama: bool) -> None:
    """Refuses keys that change the model in ways nothing here implements."""
    for key, value in data.items():
        if llama and key in hf_keys.LLAMA_HARMLESS:
            continue
        if key in hf_keys.REFUSED and value:
            raise InputError(
                key, value, hf_keys.REFUSED[key], "Use a plain text checkpoint of the four Qwen architectures."
            )
        if key in hf_keys.HARMLESS_ONLY and value is not None and value != hf_keys.HARMLESS_ONLY[key].value:
            only = hf_keys.HARMLESS_ONLY[key]
            raise InputError(
                key, value, f"{only.meaning} is not implemented", f"Only {json.dumps(only.value)} is supported."
            )


def _check_quoted(data: Mapping[str, Any]) -> None:
    """Refuses "False" or "None" in quotes, which a test of truth would read as yes."""
    spellings = {key for keys in hf_keys.ALIASES.values() for key in keys}
    typed = (hf_keys.USED | spellings).difference(_NAMES)
    quoted = {}
    for key, value in data.items():
        word = value.lower().replace("none", "null") if key in typed and isinstance(value, str) else ""
        if word in ("true", "false", "null"):
            quoted[key] = word
    if quoted:
        (key, word), *others = quoted.items()
        literal = "JSON null" if word == "null" else f"the JSON boolean {word}"
        also = f" (quoted too: {', '.join(other for other, _ in others)})" if others else ""
        raise InputError(key, data[key], f"is a string, not {literal}{also}", f"Write {word} without quotes.")


def _check_architectures(data: Mapping[str, Any], model_type: str) -> tuple[Note, ...]:
    architectures = data.get("architectures")
    expected = _ARCHITECTURES[model_type]
    if not isinstance(architectures, list) or not architectures or architectures[0] == expected:
        return ()
    if architectures[0] in _ARCHITECTURES.values():
        raise InputError("architectures", architectures, f"disagrees with model_type {model_type}", "Correct one.")
    text = f"{architectures[0]} where {expected} is usual; model_type decides"
    return (Note("warning", "architectures", text),)


def _check_unknown(data: Mapping[str, Any], llama: bool) -> None:
    spellings = {key for keys in hf_keys.ALIASES.values() for key in keys}
    passed = hf_keys.USED | spellings | hf_keys.HARMLESS | {*hf_keys.HARMLESS_ONLY, *hf_keys.REFUSED, *_LEGACY}
    passed |= hf_keys.LLAMA_HARMLESS if llama else frozenset()
    unknown = sorted(set(data) - passed, key=str)
    if unknown:
        others = f" (also unknown: {', '.join(map(str, unknown[1:]))})" if unknown[1:] else ""
        raise InputError(
            str(unknown[0]),
            data[unknown[0]],
            f"is not a key that is known here{others}",
            "Remove it if it has no effect on the model, or report it.",
        )


def _check_legacy(data: Mapping[str, Any]) -> tuple[Note, ...]:
    for legacy, modern in _LEGACY.items():
        if legacy in data and modern in data and data[legacy] != data[modern]:
            raise InputError(legacy, data[legacy], f"disagrees with {modern} {data[modern]!r}", f"Keep {modern}.")
    return tuple(
        Note("ignored", legacy, f"an older spelling of {modern}")
        for legacy, modern in _LEGACY.items()
        if legacy in data
    )


def _read_tied(reader: FieldReader) -> bool:
    if "tie_word_embeddings" not in reader.data:
        text = "missing; the class default false taken: lm_head is a matrix of its own"
        reader.note("warning", "tie_word_embeddings", text)
    return reader.boolean("tie_word_embeddings", False)


def _read_kv_heads(reader: FieldReader, model_type: str, heads: int) -> int:
    key, default = "num_key_value_heads", _KV_HEADS_DEFAULT[model_type]
    if key in reader.data and reader.data[key] is None:
        reader.note("default", key, f"null; the {heads} attention heads, as transformers takes it")
        return heads
    if key not in reader.data and heads % default:
        problem = f"is missing, and the class default {default} doesn't divide num_attention_heads {heads}"
        raise InputError(key, None, problem, "State it; null means the number of attention heads.")
    value: int = reader.integer(key, default, f"missing; the class default {default} taken, not the head count")
    return value


def _read_head_dim(reader: FieldReader, model_type: str, hidden: int, heads: int) -> int:
    if reader.stated("head_dim"):
        value: int = reader.integer("head_dim")
        return value
    absent = "null" if "head_dim" in reader.data else "missing"
    if model_type == "qwen3":
        reader.note("default", "head_dim", f"{absent}; the class default 128 taken")
        return 128
    if hidden % heads:
        raise InputError(
            "head_dim",
            None,
            f"is {absent}, and hidden_size {hidden} isn't a multiple of num_attention_heads {heads}",
            "State head_dim.",
        )
    if model_type == "qwen3_moe":  # every published one states it, and it isn't hidden_size / heads
        text = f"{absent}; hidden_size / num_attention_heads = {hidden // heads} taken, as transformers takes it"
        reader.note("default", "head_dim", text)
    return hidden // heads


def _read_biases(reader: FieldReader, model_type: str) -> tuple[bool, bool]:
    """Whether q, k and v have biases, and whether o has one."""
    qkv_bias = _read_qkv_bias(reader, model_type)
    return qkv_bias, model_type.startswith("qwen3") and reader.boolean("attention_bias", False)


def _read_qkv_bias(reader: FieldReader, model_type: str) -> bool:
    if model_type in ("qwen2", hf_keys.FIRST_QWEN):  # no such switch: q, k and v always have biases
        for key in ("attention_bias", "qkv_bias"):
            if not reader.boolean(key, True):
                raise InputError(key, False, f"{model_type} always has biases on q, k and v", "Remove the key.")
        return True
    own, other = ("qkv_bias", "attention_bias") if model_type == "qwen2_moe" else ("attention_bias", "qkv_bias")
    bias = reader.boolean(own, own == "qkv_bias")
    if reader.boolean(other, bias) != bias:
        stated = json.dumps(bias) if own in reader.data else f"{json.dumps(bias)} by default"
        problem = f"disagrees with {own}, which is {stated}"
        raise InputError(other, not bias, problem, f"Keep {own}, the one that {model_type} reads.")
    return bias


def _read_sliding_windows(reader: FieldReader, model_type: str, layers: int) -> tuple[int | None, ...]:
    """One window for each layer. A `sliding_window` number counts only when use_sliding_window is true."""
    kinds = _read_layer_types(reader, layers)
    # `max_window_layers` may exceed the layer count in real files, and 0 means that every layer is windowed.
    first = reader.integer("max_window_layers", minimum=0) if reader.stated("max_window_layers") else 28
    used = reader.boolean("use_sliding_window", False)
    window = reader.integer("sliding_window", minimum=0) if reader.stated("sliding_window") else None
    if used and "sliding_window" not in reader.data:
        window = 4096
        reader.note("default", "sliding_window", "missing; the class default 4096 taken")
    if used and window == 0:
        raise InputError("sliding_window", 0, "leaves nothing to attend", "Set use_sliding_window to false, or a size.")
    if not used or window is None:
        why = "sliding_window is null" if used else "use_sliding_window is false"
        if window:
            reader.note("ignored", "sliding_window", f"{window} has no effect: {why}")
        if kinds and "sliding_attention" in kinds:
            reader.note("ignored", "layer_types", f"sliding_attention has no effect: {why}")
        return (None,) * layers
    if model_type == "qwen3_moe":
        if kinds and "full_attention" in kinds:
            reader.note("ignored", "layer_types", "qwen3_moe windows every layer, as transformers does")
        return (window,) * layers
    if kinds is None and not reader.stated("max_window_layers"):
        absent = "null" if "max_window_layers" in reader.data else "missing"
        reader.note("default", "max_window_layers", f"{absent}; the class default 28 taken")
    if kinds is None and model_type == "qwen2_moe":
        kinds = ["sliding_attention" if (i + 1) % 2 and i < first else "" for i in range(layers)]
    if kinds is None:
        kinds = ["sliding_attention" if i >= first else "" for i in range(layers)]
    if "sliding_attention" not in kinds:
        reader.note("ignored", "sliding_window", f"{window} has no effect: none of the {layers} layers is windowed")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_layer_types(reader: FieldReader, layers: int) -> list[str] | None:
    kinds: list[str] | None = reader.data.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise InputError(
            "layer_types", kinds, f"must be a list of num_hidden_layers ({layers}) entries", "Correct or remove it."
        )
    for kind in kinds or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise InputError("layer_types", kind, "is not implemented", "Known: full_attention, sliding_attention.")
    return kinds


def _read_moe(reader: FieldReader, model_type: str) -> dict[str, Any]:
    if model_type not in hf_keys.MOE_TYPES:
        _check_dense(reader, model_type)
        return {}
    experts = reader.integer("num_experts", REQUIRED, minimum=0)
    size = REQUIRED if experts else 0
    return {
        "num_experts": experts,
        "num_experts_per_tok": reader.integer("num_experts_per_tok", size, minimum=1 if experts else 0),
        "moe_intermediate_size": reader.integer("moe_intermediate_size", size, minimum=1 if experts else 0),
        "shared_expert_intermediate_size": _read_shared_width(reader, model_type),
        "norm_topk_prob": reader.boolean("norm_topk_prob", False, "missing; the class default false taken"),
        "decoder_sparse_step": reader.integer("decoder_sparse_step", 1),
        "mlp_only_layers": reader.integers("mlp_only_layers"),
        "router_aux_loss_coef": reader.number("router_aux_loss_coef", 0.001, positive=False),
    }


def _check_dense(reader: FieldReader, model_type: str) -> None:
    sparse = f"{model_type}_moe"
    remedy = f"Set model_type to {sparse} or remove the field." if sparse in _ARCHITECTURES else "Remove the field."
    for key in _MOE_SIZES:
        if reader.data.get(key):
            raise InputError(
                key,
                reader.data[key],
                f"is a mixture-of-experts field in a dense {model_type}",
                remedy,
            )
    for key in _MOE_SWITCHES:
        if key in reader.data:
            reader.note("ignored", key, f"a mixture-of-experts field; {model_type} is dense")


def _read_shared_width(reader: FieldReader, model_type: str) -> int:
    key = "shared_expert_intermediate_size"
    if model_type == "qwen3_moe" and reader.data.get(key):
        raise InputError(key, reader.data[key], "qwen3_moe has no shared expert", "Set it to 0 or remove it.")
    if model_type == "qwen2_moe" and not reader.stated(key):
        absent = "null" if key in reader.data else "missing"
        reader.note("default", key, f"{absent}; no shared expert, although transformers' class default is 5632")
    value: int = reader.integer(key, minimum=0) if reader.stated(key) else 0
    return value


def _read_dtype(reader: FieldReader) -> str | None:
    value = reader.data.get("dtype")
    if value is None:
        reader.note("default", "dtype", "missing; estimates take bfloat16 unless told otherwise")
        return None
    if not isinstance(value, str) or value.removeprefix("torch.") not in DTYPES:
        raise InputError("dtype", value, "is not a dtype that is known here", f"Known: {', '.join(DTYPES)}.")
    return value.removeprefix("torch.")


def _read_tokens(reader: FieldReader, key: str) -> tuple[int, ...]:
    value = reader.data.get(key)
    ids: tuple[int, ...]
    if plain_integer(value):
        ids = (reader.integer(key, minimum=-1),)
    else:
        ids = reader.integers(key, "an integer or a list of integers")
    return tuple(i for i in ids if i != -1)  # -1: none


def _read_token(reader: FieldReader, key: str) -> int | None:
    value: int | None = reader.integer(key, minimum=-1) if reader.stated(key) else None
    return None if value == -1 else value


def _check_other_values(reader: FieldReader, model_type: str) -> None:
    act = reader.data.get("hidden_act", "silu")
    if act != "silu":
        raise wrong_type("hidden_act", act, "must be silu", "No other activation is implemented.")
    reader.number("attention_dropout", 0.0, positive=False)  # only training would use it, and no Qwen config sets it
    reader.boolean("output_router_logits", False)
    normed = model_type.startswith("qwen3")
    if reader.boolean("use_qk_norm", normed) != normed:
        problem = f"{model_type} {'always' if normed else 'never'} normalises queries and keys"
        raise InputError("use_qk_norm", not normed, problem, "Remove the key.")
