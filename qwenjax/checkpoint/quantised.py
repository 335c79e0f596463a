"""Quantised tensors by what the files hold: FP8 with block scales loads, the other kinds are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qwenjax.checkpoint.shards import StoredTensor
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError

FP8 = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"  # of the key of the FP8 tensor that it scales
DEFAULT_BLOCK = (128, 128)  # [out, in] of Qwen's FP8 checkpoints, where no config says another
_NAMES = {"gptq": "GPTQ", "awq": "AWQ", "fbgemm_fp8": "FBGEMM"}
_PLAIN = "Use the unquantised checkpoint, or Qwen's FP8 one."
_MARKS = (  # how the keys of other kinds end; the first that is found gives the name
    (".g_idx", "GPTQ"),
    (".weight_packed", "compressed-tensors"),
    (".weight_scale_2", "modelopt NVFP4"),
    (".weight_scale", "modelopt or compressed-tensors"),
    (".input_scale", "modelopt or compressed-tensors"),
    (".absmax", "bitsandbytes"),
)


def block_of(config: ModelConfig) -> tuple[int, int]:
    """[out, in] of the weights that share one FP8 scale."""
    stated = config.quantization.block if config.quantization else None
    return stated or DEFAULT_BLOCK


def scale_shape(stored_shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of an FP8 tensor [..., out, in]; the last block of an axis may be a part of one."""
    *experts, rows, columns = stored_shape
    return (*experts, -(-rows // block[0]), -(-columns // block[1]))


def check_stated(config: ModelConfig) -> None:
    """Refuses a config that says its weights are of a kind that isn't loaded."""
    stated = config.quantization
    if stated is not None and stated.method != "fp8":
        kind = " ".join(filter(None, (_NAMES.get(stated.method, stated.method), stated.algorithm)))
        problem = f"{kind} checkpoints can't be loaded"
        raise InputError("quantization_config", stated.method, problem, _PLAIN)


def check_stored(folder: Path, stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses packed tensors whatever the config says; `shapes` are those of the plain tensors, by bare key."""
    packed = sorted(key for key in stored if key.endswith(".qweight"))
    for mark, name in _MARKS:
        marked = packed + [key for key in stored if key.endswith(mark)]
        if any(key.endswith(mark) for key in stored):
            raise _refusal(folder, marked, stored, name)
    if packed:
        raise _refusal(folder, packed, stored, _packed_kind(stored[packed[0]], packed[0], shapes))


def _packed_kind(tensor: StoredTensor, key: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """GPTQ packs the input axis, [in/n, out], and AWQ the output axis, [in, out/n]."""
    out, into = shapes.get(key.removeprefix("model.").removesuffix(".qweight") + ".weight", (0, 0))
    if tensor.shape[1:] == (out,):
        return "GPTQ"
    return "AWQ" if tensor.shape[:1] == (into,) else "GPTQ or AWQ"


def _refusal(folder: Path, keys: list[str], stored: Mapping[str, StoredTensor], name: str) -> InputError:
    first = stored[keys[0]]
    others = f" and {len(keys) - 1} more" if keys[1:] else ""
    told = f"{keys[0]}, {first.dtype} {list(first.shape)}{others}"
    return InputError(str(folder), None, f"holds {name} weights, which can't be loaded ({told})", _PLAIN)
