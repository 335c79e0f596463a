"""What a checkpoint's quantization_config (or hf_quant_config.json) says about how its weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwenjax.errors import InputError
from qwenjax.field_reader import plain_integer, wrong_type

SUPPORTED_METHODS = ("fp8", "gptq", "awq", "modelopt")
NVFP4_GROUP = 16  # weights that share a scale, part of the format
INTEGER_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class Quantization:
    """How linear weights are stored. The model code here doesn't run quantised weights; the counts understand them."""

    method: str  # fp8 (block scales), gptq, awq, modelopt
    bits: int  # of one stored weight
    group_size: int | None = None  # weights that share a scale along the input axis (gptq, awq, nvfp4)
    block: tuple[int, int] | None = None  # [out, in] weights that share a scale (fp8)
    modules_to_not_convert: tuple[str, ...] = ()
    algorithm: str = ""  # modelopt's own name: FP8, NVFP4


def read_quantization(value: Any) -> Quantization | None:
    """Reads quantization_config; None stays None. Refuses methods it doesn't know by name."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InputError(
            "quantization_config", value, "must be null or an object", "Remove it for unquantised weights."
        )
    # modelopt names itself under `producer` and its kind under `quant_algo`.
    method = value.get("quant_method") or ("modelopt" if "quant_algo" in value else None)
    if method == "modelopt":
        return _modelopt("quantization_config", value, "ignore")
    kept = _modules("quantization_config.modules_to_not_convert", value.get("modules_to_not_convert"))
    if method == "fp8":
        return Quantization("fp8", 8, block=_block(value.get("weight_block_size")), modules_to_not_convert=kept)
    if method in ("gptq", "awq"):
        bits = _one_of(value, "bits", "w_bit")
        if bits not in INTEGER_BITS or isinstance(bits, bool):
            must = f"must be one of {', '.join(map(str, INTEGER_BITS))}"
            raise wrong_type("quantization_config.bits", bits, must, "Check the file.")
        group = _group_size(_one_of(value, "group_size", "q_group_size"))
        return Quantization(method, bits, group, modules_to_not_convert=kept)
    raise wrong_type(
        "quantization_config.quant_method",
        method,
        "must be a kind that is known here",
        f"Known: {', '.join(SUPPORTED_METHODS)}. Use the unquantised checkpoint.",
    )


def read_hf_quant_config(value: Any) -> Quantization:
    """Reads the hf_quant_config.json that NVIDIA's modelopt writes beside config.json."""
    inner = value.get("quantization") if isinstance(value, Mapping) else None
    if not isinstance(inner, Mapping):
        raise wrong_type("quantization", inner, "must be an object in hf_quant_config.json", "Check the file.")
    return _modelopt("quantization", inner, "exclude_modules")


def _modelopt(field: str, value: Mapping[str, Any], excluded: str) -> Quantization:
    algorithm = value.get("quant_algo")
    bits = {"FP8": 8, "NVFP4": 4}.get(algorithm) if isinstance(algorithm, str) else None
    if bits is None:
        raise wrong_type(f"{field}.quant_algo", algorithm, "must be a kind that is known here", "Known: FP8, NVFP4.")
    kept = _modules(f"{field}.{excluded}", value.get(excluded))
    group = NVFP4_GROUP if algorithm == "NVFP4" else None
    return Quantization("modelopt", bits, group, modules_to_not_convert=kept, algorithm=str(algorithm))


def _one_of(value: Mapping[str, Any], *spellings: str) -> Any:
    """The value under whichever spelling is there (AutoAWQ's own files say w_bit and q_group_size)."""
    stated = {key: value[key] for key in spellings if value.get(key) is not None}
    if len(set(map(repr, stated.values()))) > 1:
        text = " and ".join(f"{key} {number!r}" for key, number in stated.items())
        field = f"quantization_config.{spellings[0]}"
        raise InputError(field, None, f"is given in spellings that disagree ({text})", "Keep one of them.")
    return next(iter(stated.values()), None)


def _modules(field: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(field, value, "must be a list of names", "Check the file.")
    return tuple(value)


def _block(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(plain_integer(v) and v > 0 for v in value):
        raise wrong_type(
            "quantization_config.weight_block_size",
            value,
            "must be two positive integers",
            "Qwen's FP8 checkpoints say [128, 128].",
        )
    return value[0], value[1]


def _group_size(value: Any) -> int | None:
    if plain_integer(value) and value == -1:  # one scale for the whole input axis
        return None
    if not plain_integer(value) or value < 1:
        must = "must be a positive integer, or -1 for the whole input axis"
        raise wrong_type("quantization_config.group_size", value, must, "Qwen's checkpoints say 128.")
    return int(value)
