"""Reads the fields of a Hugging Face config.json: types checked, defaults noted, spellings reconciled."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from qwenjax import hf_keys
from qwenjax.errors import InputError
from qwenjax.hf_keys import Note
from qwenjax.quantization import read_quantization
from qwenjax.rope_config import read_rope

DTYPES = ("float32", "bfloat16", "float16")


class _Reader:
    """Takes typed fields out of a parsed config.json and remembers what was defaulted."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = dict(data)
        self.notes: list[Note] = []
        for name, spellings in hf_keys.ALIASES.items():
            self._merge(name, [key for key in spellings if key in data])

    def _merge(self, name: str, present: list[str]) -> None:
        if len({repr(self.data[key]) for key in present}) > 1:
            text = " and ".join(f"{key} {self.data[key]!r}" for key in present)
            raise InputError(name, None, f"is given in spellings that disagree ({text})", "Keep one of them.")
        if present:
            self.data[name] = self.data[present[0]]

    def _missing(self, key: str, default: Any, reason: str) -> Any:
        if default is _REQUIRED:
            raise InputError(
                key, None, "is missing", "A config.json of this model_type must state it; nothing is guessed."
            )
        if reason:
            self.notes.append(Note("default", key, reason))
        return default

    def integer(self, key: str, default: Any = None, reason: str = "", minimum: int = 1) -> Any:
        if key not in self.data:
            return self._missing(key, default, reason)
        value = self.data[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(key, value, "must be an integer", "Write a JSON number without quotes.")
        if value < minimum:
            raise InputError(key, value, f"must be at least {minimum}", "Check the file.")
        return value

    def number(self, key: str, default: float, reason: str = "", positive: bool = True) -> float:
        if key not in self.data:
            return float(self._missing(key, default, reason))
        value = self.data[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(key, value, "must be a finite number", "Write a JSON number without quotes.")
        if value < 0 or (positive and value == 0):
            raise InputError(key, value, "must be positive", "Check the file.")
        return float(value)

    def boolean(self, key: str, default: bool, reason: str = "") -> bool:
        if key not in self.data:
            return bool(self._missing(key, default, reason))
        value = self.data[key]
        if not isinstance(value, bool):
            raise InputError(key, value, "must be true or false", "Write a JSON boolean without quotes.")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise InputError(key, value, "must be a list of integers", "Write [] for none.")
        return tuple(value)


_REQUIRED = object()


def read_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor arguments of ModelConfig that a parsed config.json states or implies."""
    model_type = _check_model_type(data)
    notes = _check_keys(data, model_type)
    reader = _Reader(data)
    layers = reader.integer("num_hidden_layers", _REQUIRED)
    heads = reader.integer("num_attention_heads", _REQUIRED)
    hidden = reader.integer("hidden_size", _REQUIRED)
    positions = reader.integer("max_position_embeddings", 32768, "missing; the class default 32768 taken")
    rope = read_rope(reader.data, positions)
    fields = dict(
        model_type=model_type,
        vocab_size=reader.integer("vocab_size", _REQUIRED),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size", _REQUIRED),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_read_kv_heads(reader, model_type, heads),
        head_dim=_read_head_dim(reader, model_type, hidden, heads),
        max_position_embeddings=positions,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6, "missing; the class default 1e-06 taken"),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=reader.boolean(
            "tie_word_embeddings", False, "missing; the class default false taken: lm_head is a matrix of its own"
        ),
        qkv_bias=_read_qkv_bias(reader, model_type),
        attention_o_bias=model_type.startswith("qwen3") and reader.boolean("attention_bias", False),
        sliding_windows=_read_sliding_windows(reader, model_type, layers),
        initializer_range=reader.number("initializer_range", 0.02),
        dtype=_read_dtype(reader),
        bos_token_id=_read_token(reader, "bos_token_id"),
        eos_token_id=_read_tokens(reader, "eos_token_id"),
        pad_token_id=_read_token(reader, "pad_token_id"),
        quantization=read_quantization(data.get("quantization_config")),
        **_read_moe(reader, model_type),
    )
    _check_other_values(reader)
    # Last, when every reader has had its say.
    fields["notes"] = (*notes, *rope.remarks, *reader.notes)
    return fields


def _check_model_type(data: Mapping[str, Any]) -> str:
    model_type = data.get("model_type")
    known = ", ".join(hf_keys.MODEL_TYPES)
    if model_type is None:
        raise InputError("model_type", None, "is missing", f"A config.json must state it. Known here: {known}.")
    if not isinstance(model_type, str):
        raise InputError("model_type", model_type, "must be a string", f"Known here: {known}.")
    if model_type not in hf_keys.MODEL_TYPES:
        reason = next(
            (text for prefix, text in hf_keys.FOREIGN_TYPES if model_type.startswith(prefix)), "is not implemented"
        )
        raise InputError("model_type", model_type, reason, f"Known here: {known}.")
    return model_type


def _check_keys(data: Mapping[str, Any], model_type: str) -> tuple[Note, ...]:
    """Refuses keys that change the model in ways nothing here implements; notes those that are set aside."""
    notes = []
    for key, value in data.items():
        if key in hf_keys.REFUSED and value is not None:
            raise InputError(
                key, value, hf_keys.REFUSED[key], "Use a plain text checkpoint of the four Qwen architectures."
            )
        if key in hf_keys.HARMLESS_ONLY and value != hf_keys.HARMLESS_ONLY[key].value:
            only = hf_keys.HARMLESS_ONLY[key]
            raise InputError(
                key, value, f"{only.meaning} is not implemented", f"Only {json.dumps(only.value)} is supported."
            )
    spellings = {key for keys in hf_keys.ALIASES.values() for key in keys}
    passed = (
        hf_keys.USED | spellings | hf_keys.HARMLESS | set(hf_keys.HARMLESS_ONLY) | set(hf_keys.REFUSED) | set(_LEGACY)
    )
    unknown = sorted(set(data) - passed)
    if unknown:
        key = unknown[0]
        others = f" (also unknown: {', '.join(unknown[1:])})" if unknown[1:] else ""
        raise InputError(
            key,
            data[key],
            f"is not a key that is known here{others}",
            "Remove it if it has no effect on the model, or report it.",
        )
    for legacy, modern in _LEGACY.items():
        if legacy in data:
            if modern in data and data[legacy] != data[modern]:
                raise InputError(legacy, data[legacy], f"disagrees with {modern} {data[modern]!r}", f"Keep {modern}.")
            notes.append(Note("ignored", legacy, f"an older spelling of {modern}"))
    architectures = data.get("architectures")
    expected = _ARCHITECTURES[model_type]
    if isinstance(architectures, list) and architectures and architectures[0] != expected:
        notes.append(
            Note("warning", "architectures", f"{architectures[0]} where {expected} is usual; model_type decides")
        )
    return tuple(notes)


_LEGACY = {"rotary_emb_base": "rope_theta", "seq_length": "max_position_embeddings"}
_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_KV_HEADS_DEFAULT = {"qwen2": 32, "qwen3": 32, "qwen2_moe": 16, "qwen3_moe": 4}


def _read_kv_heads(reader: _Reader, model_type: str, heads: int) -> int:
    if "num_key_value_heads" in reader.data and reader.data["num_key_value_heads"] is None:
        reader.notes.append(
            Note("default", "num_key_value_heads", f"null; the {heads} attention heads, as transformers takes it")
        )
        return heads
    default = _KV_HEADS_DEFAULT[model_type]
    value: int = reader.integer(
        "num_key_value_heads", default, f"missing; the class default {default} taken, not the head count"
    )
    return value


def _read_head_dim(reader: _Reader, model_type: str, hidden: int, heads: int) -> int:
    if reader.data.get("head_dim") is not None:
        value: int = reader.integer("head_dim")
        return value
    if model_type == "qwen3":
        reader.notes.append(Note("default", "head_dim", "missing; the class default 128 taken"))
        return 128
    if hidden % heads:
        raise InputError(
            "head_dim",
            None,
            f"is missing, and hidden_size {hidden} isn't a multiple of num_attention_heads {heads}",
            "State head_dim.",
        )
    return hidden // heads


def _read_qkv_bias(reader: _Reader, model_type: str) -> bool:
    if model_type == "qwen2":  # the class has no such switch: q, k and v always have biases
        for key in ("attention_bias", "qkv_bias"):
            if not reader.boolean(key, True):
                raise InputError(key, False, "qwen2 always has biases on q, k and v", "Remove the key.")
        return True
    if model_type == "qwen2_moe":
        return reader.boolean("qkv_bias", reader.boolean("attention_bias", True))
    bias = reader.boolean("attention_bias", False)
    if reader.boolean("qkv_bias", bias) != bias:
        raise InputError("qkv_bias", not bias, f"disagrees with attention_bias {bias}", "Keep attention_bias.")
    return bias


def _read_sliding_windows(reader: _Reader, model_type: str, layers: int) -> tuple[int | None, ...]:
    """One window for each layer. A `sliding_window` number counts only when use_sliding_window is true."""
    kinds = reader.data.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise InputError(
            "layer_types", kinds, f"must be a list of num_hidden_layers ({layers}) entries", "Correct or remove it."
        )
    for kind in kinds or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise InputError("layer_types", kind, "is not implemented", "Known: full_attention, sliding_attention.")
    # `max_window_layers` may exceed the layer count in real files, and 0 means that every layer is windowed.
    first = (
        reader.integer("max_window_layers", 28, minimum=0) if reader.data.get("max_window_layers") is not None else 28
    )
    used = reader.boolean("use_sliding_window", False)
    if reader.data.get("sliding_window") is None:
        window = 4096 if used and "sliding_window" not in reader.data else None
        if window:
            reader.notes.append(Note("default", "sliding_window", "missing; the class default 4096 taken"))
    else:
        window = reader.integer("sliding_window", minimum=0)
    if not used or not window:
        if window:
            reader.notes.append(
                Note("ignored", "sliding_window", f"{window} has no effect: use_sliding_window is false")
            )
        return (None,) * layers
    if model_type == "qwen3_moe":
        return (window,) * layers
    if kinds is None and model_type == "qwen2_moe":
        kinds = ["sliding_attention" if (i + 1) % 2 and i < first else "" for i in range(layers)]
    if kinds is None:
        kinds = ["sliding_attention" if i >= first else "" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_moe(reader: _Reader, model_type: str) -> dict[str, Any]:
    if not model_type.endswith("_moe"):
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"):
            if reader.data.get(key):
                raise InputError(
                    key,
                    reader.data[key],
                    f"is a mixture-of-experts field in a dense {model_type}",
                    f"Set model_type to {model_type}_moe or remove the field.",
                )
        return {}
    shared = reader.data.get("shared_expert_intermediate_size")
    if shared and model_type == "qwen3_moe":
        raise InputError(
            "shared_expert_intermediate_size", shared, "qwen3_moe has no shared expert", "Set it to 0 or remove it."
        )
    missing = (
        "missing; no shared expert, although transformers' class default is 5632" if model_type == "qwen2_moe" else ""
    )
    experts = reader.integer("num_experts", _REQUIRED, minimum=0)
    size = _REQUIRED if experts else 0
    return {
        "num_experts": experts,
        "num_experts_per_tok": reader.integer("num_experts_per_tok", size, minimum=1 if experts else 0),
        "moe_intermediate_size": reader.integer("moe_intermediate_size", size, minimum=1 if experts else 0),
        "shared_expert_intermediate_size": 0
        if shared is None and "shared_expert_intermediate_size" in reader.data
        else reader.integer("shared_expert_intermediate_size", 0, missing, minimum=0),
        "norm_topk_prob": reader.boolean("norm_topk_prob", False, "missing; the class default false taken"),
        "decoder_sparse_step": reader.integer("decoder_sparse_step", 1),
        "mlp_only_layers": reader.integers("mlp_only_layers"),
        "router_aux_loss_coef": reader.number("router_aux_loss_coef", 0.001, positive=False),
    }


def _read_dtype(reader: _Reader) -> str | None:
    value = reader.data.get("dtype")
    if value is None:
        reader.notes.append(Note("default", "dtype", "missing; estimates take bfloat16 unless told otherwise"))
        return None
    if not isinstance(value, str) or value.removeprefix("torch.") not in DTYPES:
        raise InputError("dtype", value, "is not a dtype that is known here", f"Known: {', '.join(DTYPES)}.")
    return value.removeprefix("torch.")


def _read_tokens(reader: _Reader, key: str) -> tuple[int, ...]:
    value = reader.data.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    return reader.integers(key)


def _read_token(reader: _Reader, key: str) -> int | None:
    value: int | None = reader.integer(key, minimum=-1) if reader.data.get(key) is not None else None
    return None if value == -1 else value


def _check_other_values(reader: _Reader) -> None:
    act = reader.data.get("hidden_act", "silu")
    if act != "silu":
        raise InputError("hidden_act", act, "is not implemented", "The Qwen architectures use silu.")
    reader.number("attention_dropout", 0.0, positive=False)  # only training would use it, and no Qwen config sets it
    reader.boolean("output_router_logits", False)
