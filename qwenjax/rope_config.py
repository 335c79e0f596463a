"""RoPE scaling as a config.json states it, in the 4.x (rope_scaling) and 5.x (rope_parameters) spellings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwenjax.errors import InputError
from qwenjax.field_reader import finite_number, plain_integer, wrong_type
from qwenjax.hf_keys import LARGEST, Note

SUPPORTED_TYPES = ("default", "linear", "yarn")
LLAMA_TYPES = (*SUPPORTED_TYPES, "llama3")  # where only costs are asked for, which no frequency changes
_REASONS = {
    "dynamic": "its frequencies depend on the longest position seen",
    "mrope": "it is the rotary embedding of vision models",
}
DEFAULT_THETA = 10000.0  # transformers' own default when a config has no rope_theta

_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
)
_LLAMA_KEYS = _KEYS | {"low_freq_factor", "high_freq_factor"}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; fields as in transformers' rope parameters."""

    rope_type: str  # "linear" or "yarn"; "llama3" in models that don't run here
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class RopeReading:
    """What was read: the base, the scaling if any, and remarks."""

    theta: float
    scaling: RopeScaling | None
    remarks: tuple[Note, ...]


def read_rope(config: Mapping[str, Any], max_position_embeddings: int, llama: bool = False) -> RopeReading:
    """Merges rope_theta, rope_scaling and rope_parameters of a config.json; refuses spellings that disagree.

    llama: the config is of Llama's family, which has a scaling of its own and a base of 10000 unless it says otherwise.
    """
    remarks: list[Note] = []
    blocks = {
        key: _block(key, config[key], remarks, llama)
        for key in ("rope_parameters", "rope_scaling")
        if config.get(key) is not None
    }
    theta = _theta(config, blocks, remarks, llama)
    scalings = {key: _scaling(key, block, max_position_embeddings, remarks, llama) for key, block in blocks.items()}
    chosen = {key: scaling for key, scaling in scalings.items() if scaling is not None}
    if len(set(chosen.values())) > 1:
        raise InputError(
            "rope_scaling",
            config["rope_scaling"],
            f"disagrees with rope_parameters ({dict(config['rope_parameters'])!r})",
            "Keep one of the two blocks.",
        )
    scaling = next(iter(chosen.values()), None)
    return RopeReading(theta, scaling, tuple(dict.fromkeys(remarks)))


def _block(key: str, value: Any, remarks: list[Note], llama: bool) -> Mapping[str, Any]:
    known = _LLAMA_KEYS if llama else _KEYS
    if not isinstance(value, Mapping):
        raise InputError(
            key, value, "must be null or an object", 'Write null, or {"rope_type": "yarn", "factor": 4.0}.'
        )
    for name in value:
        if name in known:
            continue
        if name == "attn_factor":  # seen in DeepSeek-R1-0528-Qwen3-8B; transformers ignores it, and so do logits here
            remarks.append(
                Note(
                    "ignored",
                    f"{key}.attn_factor",
                    (
                        "not a key of transformers, which ignores it; "
                        "the attention factor follows attention_factor, mscale or the YaRN default"
                    ),
                )
            )
            continue
        if name == "partial_rotary_factor" and value[name] in (None, 1):
            continue
        raise InputError(f"{key}.{name}", value[name], "is not implemented", f"Known keys: {', '.join(sorted(known))}.")
    for name in ("factor", "rope_theta", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if value.get(name) is not None:
            _positive(f"{key}.{name}", value[name])
    return value


def _theta(
    config: Mapping[str, Any], blocks: Mapping[str, Mapping[str, Any]], remarks: list[Note], llama: bool
) -> float:
    found = {f"{key}.rope_theta": block["rope_theta"] for key, block in blocks.items() if block.get("rope_theta")}
    if config.get("rope_theta") is not None:
        _positive("rope_theta", config["rope_theta"])
        found["rope_theta"] = config["rope_theta"]
    values = {float(value) for value in found.values()}
    if len(values) > 1:
        text = ", ".join(f"{name} {value}" for name, value in found.items())
        raise InputError(
            "rope_theta",
            config.get("rope_theta"),
            f"is given twice with different values ({text})",
            "Keep one of them.",
        )
    if not values and llama:
        remarks.append(Note("default", "rope_theta", f"missing; {DEFAULT_THETA:g} as transformers takes it"))
        return DEFAULT_THETA
    if not values:
        remarks.append(
            Note(
                "warning",
                "rope_theta",
                (
                    f"missing; {DEFAULT_THETA:g} as transformers takes it. "
                    "Qwen2 and later were trained with 1000000: check the file"
                ),
            )
        )
        return DEFAULT_THETA
    return values.pop()


def _scaling(
    key: str, block: Mapping[str, Any], max_position_embeddings: int, remarks: list[Note], llama: bool
) -> RopeScaling | None:
    rope_type = _rope_type(key, block, LLAMA_TYPES if llama else SUPPORTED_TYPES)
    if rope_type == "default":
        if block.get("factor") is not None:
            remarks.append(Note("ignored", f"{key}.factor", "rope_type default doesn't stretch the context"))
        return None
    if block.get("factor") is None:
        raise InputError(
            f"{key}.factor", None, f"is missing for rope_type {rope_type}", "Give the factor, such as 4.0."
        )
    factor = float(block["factor"])
    if factor < 1:
        raise InputError(
            f"{key}.factor", factor, "must be at least 1", "A factor of 4.0 stretches the context fourfold."
        )
    original = _original_length(key, block, rope_type, max_position_embeddings, remarks)
    if factor * original > LARGEST:
        problem = f"stretches {original} positions beyond any model's ({LARGEST})"
        raise InputError(f"{key}.factor", factor, problem, "Check the file.")
    implied = max_position_embeddings / original
    # A ratio of 1 says nothing: max_position_embeddings is then the length before stretching, as Qwen writes it.
    if rope_type == "yarn" and implied != 1 and not math.isclose(implied, factor):
        text = f"max_position_embeddings / original_max_position_embeddings is {implied:g}"
        remarks.append(Note("warning", f"{key}.factor", f"{factor:g} is used, although {text}"))
    truncate = block.get("truncate", True)
    if not isinstance(truncate, bool):
        must = "must be true or false"
        raise wrong_type(f"{key}.truncate", truncate, must, "Leave it out for the default, true.")
    return RopeScaling(
        rope_type,
        factor,
        original,
        _maybe(block, "attention_factor"),
        float(block.get("beta_fast") or 32),
        float(block.get("beta_slow") or 1),
        _maybe(block, "mscale"),
        _maybe(block, "mscale_all_dim"),
        truncate,
    )


def _rope_type(key: str, block: Mapping[str, Any], known: tuple[str, ...]) -> str:
    types = {name: block[name] for name in ("rope_type", "type") if block.get(name) is not None}
    if len(set(map(repr, types.values()))) > 1:
        raise InputError(
            f"{key}.type", block["type"], f"disagrees with rope_type {block['rope_type']!r}", "Keep rope_type."
        )
    if not types and block.get("factor") is not None:
        problem = f"is missing beside the factor {block['factor']!r}"
        raise InputError(f"{key}.rope_type", None, problem, f"Known: {', '.join(known)}.")
    rope_type = next(iter(types.values()), "default")
    if not isinstance(rope_type, str) or rope_type not in known:
        reason = _REASONS.get(rope_type) if isinstance(rope_type, str) else None
        problem = f"is not implemented{f': {reason}' if reason else ''}"
        raise InputError(f"{key}.rope_type", rope_type, problem, f"Known: {', '.join(known)}.")
    return rope_type


def _original_length(
    key: str, block: Mapping[str, Any], rope_type: str, max_position_embeddings: int, remarks: list[Note]
) -> int:
    """The length that the model was trained with, in tokens; max_position_embeddings where the block doesn't say."""
    field = f"{key}.original_max_position_embeddings"
    original = block.get("original_max_position_embeddings")
    if original is None:
        if rope_type == "yarn":
            remarks.append(Note("default", field, f"missing; max_position_embeddings {max_position_embeddings} taken"))
        return max_position_embeddings
    if not plain_integer(original) or not 1 <= original <= LARGEST:
        remedy = "Give the length the model was trained with, such as 32768."
        raise InputError(field, original, f"must be a positive integer up to {LARGEST}", remedy)
    return int(original)


def _maybe(block: Mapping[str, Any], name: str) -> float | None:
    value = block.get(name)
    return None if value is None else float(value)


def _positive(field: str, value: Any) -> None:
    if not finite_number(value) or value <= 0:
        raise InputError(field, value, "must be a positive number", "Write a JSON number without quotes.")
