"""RoPE scaling as a config.json states it, in the 4.x (rope_scaling) and 5.x (rope_parameters) spellings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwenjax.errors import InputError
from qwenjax.hf_keys import Note

SUPPORTED_TYPES = ("default", "linear", "yarn")
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


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; fields as in transformers' rope parameters."""

    rope_type: str  # "linear" or "yarn"
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


def read_rope(config: Mapping[str, Any], max_position_embeddings: int) -> RopeReading:
    """Merges rope_theta, rope_scaling and rope_parameters of a config.json; refuses spellings that disagree."""
    remarks: list[Note] = []
    blocks = {
        key: _block(key, config[key], remarks)
        for key in ("rope_parameters", "rope_scaling")
        if config.get(key) is not None
    }
    theta = _theta(config, blocks, remarks)
    scalings = {key: _scaling(key, block, max_position_embeddings, remarks) for key, block in blocks.items()}
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


def _block(key: str, value: Any, remarks: list[Note]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(
            key, value, "must be null or an object", 'Write null, or {"rope_type": "yarn", "factor": 4.0}.'
        )
    for name in value:
        if name in _KEYS:
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
        raise InputError(f"{key}.{name}", value[name], "is not implemented", f"Known keys: {', '.join(sorted(_KEYS))}.")
    for name in ("factor", "rope_theta", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if value.get(name) is not None:
            _positive(f"{key}.{name}", value[name])
    return value


def _theta(config: Mapping[str, Any], blocks: Mapping[str, Mapping[str, Any]], remarks: list[Note]) -> float:
    found = {f"{key}.rope_theta": block["rope_theta"] for key, block in blocks.items() if "rope_theta" in block}
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
    key: str, block: Mapping[str, Any], max_position_embeddings: int, remarks: list[Note]
) -> RopeScaling | None:
    types = {name: block[name] for name in ("rope_type", "type") if name in block}
    if len(set(map(repr, types.values()))) > 1:
        raise InputError(
            f"{key}.type", block["type"], f"disagrees with rope_type {block['rope_type']!r}", "Keep rope_type."
        )
    rope_type = next(iter(types.values()), "default")
    if rope_type not in SUPPORTED_TYPES:
        raise InputError(f"{key}.rope_type", rope_type, "is not implemented", f"Known: {', '.join(SUPPORTED_TYPES)}.")
    if rope_type == "default":
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
    original = block.get("original_max_position_embeddings")
    if original is None:
        original = max_position_embeddings
        if rope_type == "yarn":
            remarks.append(
                Note(
                    "default",
                    f"{key}.original_max_position_embeddings",
                    f"missing; max_position_embeddings {original} taken",
                )
            )
    if isinstance(original, bool) or not isinstance(original, int) or original < 1:
        raise InputError(
            f"{key}.original_max_position_embeddings",
            original,
            "must be a positive integer",
            "Give the length the model was trained with, such as 32768.",
        )
    implied = max_position_embeddings / original
    if rope_type == "yarn" and implied > 1 and not math.isclose(implied, factor):
        remarks.append(
            Note(
                "warning",
                f"{key}.factor",
                (
                    f"{factor:g} is used, although max_position_embeddings / "
                    f"original_max_position_embeddings is {implied:g}"
                ),
            )
        )
    truncate = block.get("truncate", True)
    if not isinstance(truncate, bool):
        raise InputError(f"{key}.truncate", truncate, "must be true or false", "Leave it out for the default, true.")
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


def _maybe(block: Mapping[str, Any], name: str) -> float | None:
    value = block.get(name)
    return None if value is None else float(value)


def _positive(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(field, value, "must be a positive number", "Write a JSON number without quotes.")
