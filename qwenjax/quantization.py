"""What a checkpoint's quantization_config (or hf_quant_config.json) says about how its weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwenjax.errors import InputError

SUPPORTED_METHODS = ("fp8", "gptq", "awq", "modelopt")


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
    method = value.get("quant_method", "modelopt" if "quant_algo" in value else None)
    if method == "fp8":
        block = _block(value.get("weight_block_size"))
        return Quantization("fp8", 8, block=block, modules_to_not_convert=_modules(value.get("modules_to_not_convert")))
    if method in ("gptq", "awq"):
        bits = _integer("bits", value.get("bits", value.get("w_bit")))
        group = _group_size(value.get("group_size", value.get("q_group_size")))
        return Quantization(method, bits, group, modules_to_not_convert=_modules(value.get("modules_to_not_convert")))
    if method == "modelopt":
        algorithm = value.get("quant_algo")
        return _modelopt(algorithm, value.get("ignore"))
    raise InputError(
        "quantization_config.quant_method",
        method,
        "is not a kind that is known here",
        f"Known: {', '.join(SUPPORTED_METHODS)}. Use the unquantised checkpoint.",
    )


def read_hf_quant_config(value: Any) -> Quantization:
    """Reads the hf_quant_config.json that NVIDIA's modelopt writes beside config.json."""
    inner = value.get("quantization") if isinstance(value, Mapping) else None
    if not isinstance(inner, Mapping):
        raise InputError("quantization", inner, "must be an object in hf_quant_config.json", "Check the file.")
    return _modelopt(inner.get("quant_algo"), inner.get("exclude_modules"))


def _modelopt(algorithm: Any, excluded: Any) -> Quantization:
    bits = {"FP8": 8, "NVFP4": 4}.get(algorithm) if isinstance(algorithm, str) else None
    if bits is None:
        raise InputError("quant_algo", algorithm, "is not a kind that is known here", "Known: FP8, NVFP4.")
    group = 16 if algorithm == "NVFP4" else None
    return Quantization("modelopt", bits, group, modules_to_not_convert=_modules(excluded), algorithm=str(algorithm))


def _modules(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(
            "quantization_config.modules_to_not_convert", value, "must be a list of names", "Check the file."
        )
    return tuple(value)


def _block(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise InputError(
            "quantization_config.weight_block_size",
            value,
            "must be two positive integers",
            "Qwen's FP8 checkpoints say [128, 128].",
        )
    return value[0], value[1]


def _group_size(value: Any) -> int | None:
    return None if value == -1 else _integer("group_size", value)  # -1: one scale for the whole input axis


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"quantization_config.{name}", value, "must be a positive integer", "Check the file.")
    return value
