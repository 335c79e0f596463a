"""How a vLLM engine was started, from options and from its log: version, devices, cache, weights, lengths, step."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh, check_mesh
from roofline.vllm_log import StartupLog
from roofline.vllm_memory import LATEST, EngineSettings, Usage, forward_bytes, parse_version
from roofline.weight_schemes import WeightScheme, scheme_of

_KV_DTYPES = {"auto": "bfloat16", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_STEPS = (2048, 4096, 8192, 16384, 32768)  # tokens, vLLM's defaults among them
_STEP_TOLERANCE = 0.04


@dataclass(frozen=True)
class EngineRun:
    """What ran, as the options say and else as the log does."""

    version: tuple[int, ...]
    version_text: str
    tp: int
    pp: int
    kv_dtype: str
    weights: WeightScheme | None
    max_model_len: int
    settings: EngineSettings


def run_of_log(
    config: ModelConfig,
    log: StartupLog,
    *,
    tp: int | None = None,
    kv_dtype: str | None = None,
    weights: WeightScheme | str | None = None,
    usage: Usage = "server",
    chunk: int | None = None,
) -> EngineRun:
    """How the engine of a log was started; options go before what the log says, defaults of the version last."""
    pp = log.whole("pp") or 1
    text, devices = log.texts.get("version", ""), tp or log.whole("tp") or max(1, log.least_ranks // pp)
    version = parse_version(text) or LATEST
    runner = log.texts.get("runner", "").upper() or None
    tokens = chunk or log.whole("max_num_batched_tokens") or step_tokens_of(config, log, devices)
    settings = EngineSettings(
        version=version,
        usage=usage,
        gpu_memory_utilization=log.value("gpu_memory_utilization"),
        max_num_batched_tokens=tokens,
        max_num_seqs=log.whole("max_num_seqs"),
        enforce_eager=log.texts.get("enforce_eager", "").lower() == "true",
        runner=runner,
    )
    stated = log.texts.get("kv_cache_dtype", "auto")
    return EngineRun(
        version=version,
        version_text=text,
        tp=devices,
        pp=pp,
        kv_dtype=kv_dtype or _KV_DTYPES.get(stated, "bfloat16"),
        weights=_weights(config, log, weights),
        max_model_len=log.whole("max_model_len") or log.whole("concurrency_len") or config.context_length,
        settings=settings,
    )


def step_tokens_of(config: ModelConfig, log: StartupLog, tp: int) -> int | None:
    """The tokens of the profiled step, where the log's activations are those of one of vLLM's defaults; else None."""
    activations = log.value("activation_bytes")
    if activations is None:
        return None
    one = forward_bytes(config, 1, "bfloat16", check_mesh(config, Mesh(tp)))
    matching = [tokens for tokens in _STEPS if isclose(tokens * one, activations, rel_tol=_STEP_TOLERANCE)]
    return matching[0] if len(matching) == 1 else None


def _weights(config: ModelConfig, log: StartupLog, given: WeightScheme | str | None) -> WeightScheme | None:
    if given is not None:
        return scheme_of(given) if isinstance(given, str) else given
    if config.quantization is not None:
        return scheme_of(config.quantization)
    stated = log.texts.get("quantization", "None")
    if stated.lower() in ("none", "null"):
        return None
    try:
        return scheme_of(stated)
    except InputError:  # a method that isn't known here: the weights' row then shows the difference
        return None
