"""How many tokens an engine's KV pool holds in a case, by the rules of its version or of its kind."""

from __future__ import annotations

import re
from typing import Final

from qwenjax.errors import InputError
from qwenjax.sharding import Mesh
from roofline.count import count_kv_bytes_per_token
from roofline.hardware import Hardware, load_hardware
from roofline.memory import peak_activation_bytes, plan_memory
from roofline.timing.case import Case
from roofline.timing.scheduling import Scheduler
from roofline.weight_schemes import op_weight_bits, scheme_of, stored_weight_bytes

_RESERVED_BYTES: Final = 2**30  # beside weights, activations and the KV pool: CUDA context and graphs, a round estimate
_UTILIZATION: Final = 0.9
_MOST_PROFILED: Final = 8192  # tokens of the step that memory is set aside for, at most; TensorRT-LLM's are its limit
# Engines that take a share of what weights and activations leave free. TensorRT-LLM: free_gpu_memory_fraction of its
# KvCacheConfig; lmdeploy since 0.2.1: cache_max_entry_count.
_SHARE_OF_FREE: Final = {"tensorrt-llm": 0.9, "lmdeploy": 0.8}
# SGLang's server_args.py, 0.5: memory below which a row holds, tokens of a chunk, graphs' batch below TP 4 and from it.
_SGLANG_RESERVE: Final = (
    (20 * 2**30, 2048, 8, 8),
    (35 * 2**30, 2048, 24, 80),
    (60 * 2**30, 4096, 32, 160),
    (90 * 2**30, 8192, 256, 512),
    (160 * 2**30, 8192, 256, 512),
    (1 << 50, 16384, 512, 512),
)
_SHORTENED: Final = 8192  # max_model_len where the model's own can't be served and the row doesn't say


def pool_tokens(case: Case, scheduler: Scheduler) -> float:
    """Tokens that the KV pool holds, of all devices together where attention is spread; at least one request's."""
    tokens = _planned_tokens(case) or _estimated_tokens(case, scheduler)
    return max(tokens * case.pp * (case.tp if case.attention_dp else 1), float(case.input_len + case.output_len))


def _planned_tokens(case: Case) -> float | None:
    """The pool by the rules of the case's vLLM version; None for other engines, versions without rules, and PP."""
    if case.engine != "vllm" or not re.match(r"\d+\.\d", case.engine_version) or case.pp > 1:
        return None
    version = re.match(r"[\d.]*\d", case.engine_version)
    try:
        tokens = _kv_tokens(case, version[0] if version else "", case.max_model_len)
        if case.max_model_len is None and tokens < case.config.context_length:
            # The engine wouldn't have started with the model's own length, so a shorter one was asked for.
            tokens = _kv_tokens(case, version[0] if version else "", min(case.config.context_length, _SHORTENED))
    except InputError:
        return None
    return tokens if tokens > case.input_len + case.output_len else None


def _kv_tokens(case: Case, version: str, max_model_len: int | None) -> int:
    return plan_memory(
        case.config,
        load_hardware(case.hardware),
        gpu_memory_utilization=case.gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_batched_tokens=case.max_num_batched_tokens,
        max_num_seqs=case.max_num_seqs,
        kv_dtype=case.kv_dtype,
        weights=scheme_of(case.weights),
        mesh=Mesh(tp=case.tp),
        engine=f"vllm=={version}",
        enforce_eager=case.cuda_graphs is False,
        usage="offline" if case.offline else "server",
    ).kv_tokens


def _estimated_tokens(case: Case, scheduler: Scheduler) -> float:
    """The pool where no rules are known: what weights, activations and a round reserve leave of the engine's share."""
    chip = load_hardware(case.hardware)
    limit = scheduler.max_num_batched_tokens
    profiled = limit if case.engine == "tensorrt-llm" else min(limit, _MOST_PROFILED)
    shards = 1 if case.attention_dp else case.tp
    per_token = count_kv_bytes_per_token(case.config, kv_dtype_of(case), Mesh(tp=shards)) / case.pp
    weights = _device_weight_bytes(case)
    reserved = _RESERVED_BYTES + peak_activation_bytes(case.config, profiled, mesh=Mesh(tp=case.tp))
    pool = _pool_bytes(case, chip, weights, reserved)
    if pool < per_token * (case.input_len + case.output_len):
        pool = chip.usable_memory_bytes * 0.97 - weights - reserved / 3  # it ran, so it fitted somehow
    if pool <= 0:
        raise InputError("hardware", case.hardware, "doesn't hold the weights", "Check tp and the weight scheme.")
    return pool / per_token / case.pp


def _pool_bytes(case: Case, chip: Hardware, weights: float, reserved: float) -> float:
    """What an engine gives its cache: a share of what is free after a step, or what it doesn't hold back."""
    memory, share = chip.usable_memory_bytes, case.gpu_memory_utilization
    if case.engine in _SHARE_OF_FREE:
        return (memory - weights - reserved) * (share or _SHARE_OF_FREE[case.engine])
    if case.engine == "sglang":
        return memory * share - weights if share else memory - _sglang_reserve_bytes(case, chip) - weights
    return memory * (share or _UTILIZATION) - weights - reserved


def _sglang_reserve_bytes(case: Case, chip: Hardware) -> float:
    """What SGLang 0.5 holds back by default, by the card's memory: for a chunk of a prompt, CUDA graphs and more."""
    _, chunk, graphs, wide_graphs = next(row for row in _SGLANG_RESERVE if chip.usable_memory_bytes < row[0])
    graphs = wide_graphs if case.tp >= 4 else graphs
    reserve = 512 + 1.5 * max(case.max_num_batched_tokens or chunk, 2048) + 2 * graphs + 128 * case.tp * case.pp
    return max(reserve, 10 * 1024 if chip.usable_memory_bytes > 60 * 2**30 else 0) * 2**20


def _device_weight_bytes(case: Case) -> float:
    """Weights on one device; where attention is spread by sequences, each holds all of its weights."""
    config, scheme = case.config, scheme_of(case.weights)
    stored = stored_weight_bytes(config, scheme, Mesh(tp=case.tp)) / case.pp
    if not case.attention_dp:
        return stored
    bits = op_weight_bits(config, scheme)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    queries = config.hidden_size * config.head_dim * heads
    keys = config.hidden_size * config.head_dim * kv_heads
    each = (queries + 2 * keys) * bits.get("qkv_proj", 16.0) + queries * bits.get("o_proj", 16.0)
    logits = config.vocab_size * config.hidden_size * bits.get("unembed", 16.0)
    return stored + (each * config.num_hidden_layers + logits) / 8 * (1 - 1 / case.tp)


def kv_dtype_of(case: Case) -> str:
    """The cache's type: as said; FP8 where TensorRT-LLM runs an FP8 checkpoint, as those say; else 16 bits."""
    if case.kv_dtype is None and case.engine == "tensorrt-llm" and scheme_of(case.weights).name.startswith("fp8"):
        return "float8_e4m3fn"
    return case.kv_dtype or "bfloat16"
