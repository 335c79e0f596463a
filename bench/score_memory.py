"""Predicted sizes for the rows of memory: weights, transformers' peak, and vLLM's KV pool."""

from __future__ import annotations

import re

from cases import MemoryCase
from scored import Scored, is_quantized

from qwenjax.errors import InputError
from qwenjax.sharding import Mesh
from roofline.count import count_kv_bytes_per_token
from roofline.hardware import load_hardware
from roofline.memory import BLOCK_TOKENS, peak_activation_bytes
from roofline.vllm_memory import LATEST, EngineSettings, engine_memory, parse_version
from roofline.weight_schemes import stored_weight_bytes

_QWEN3_TABLES = "getting_started/speed_benchmark"
_LOGIT_BYTES = 4 + 2  # float32 logits beside those in the weights' type


def predict_memory(case: MemoryCase) -> Scored:
    """A size in the row's unit, for one device as logs print it; raises InputError where no rule gives it."""
    if case.metric == "weights_gib":
        provenance = f"exact: {case.scheme.name} weights on one device"
        return Scored(case.id, case, _weight_bytes(case) / 2**30, provenance=provenance)
    return _peak(case) if case.metric == "mem_gb" else _pool(case)


def _weight_bytes(case: MemoryCase) -> float:
    return stored_weight_bytes(case.config, case.scheme, Mesh(tp=case.tp)) / case.pp


def _pool(case: MemoryCase) -> Scored:
    """vLLM's KV pool by the rules of its version, in GiB or tokens; what the row doesn't set is the default."""
    if case.engine != "vllm":
        raise InputError(case.metric, case.measured, f"{case.engine} has no memory rules here", "vLLM's are known")
    if case.hardware is None:
        raise InputError("gpu", None, "is not stated", "The pool depends on it")
    chip, mesh, notes = load_hardware(case.hardware), Mesh(tp=case.tp), case.notes
    runner = re.search(r"\bV[012]\b", case.engine_version)
    settings = EngineSettings(
        version=parse_version(case.engine_version) or LATEST,
        gpu_memory_utilization=notes.gpu_memory_utilization,
        max_num_batched_tokens=notes.max_num_batched_tokens,
        max_num_seqs=notes.max_num_seqs,
        enforce_eager=notes.cuda_graphs is False,
        runner=runner[0] if runner else None,
    )
    length = notes.max_model_len or case.config.context_length
    taken = engine_memory(case.config, chip, settings, max_model_len=length, weights=case.scheme, mesh=mesh)
    elsewhere = taken.term("weights").num_bytes * (1 - 1 / case.pp)  # other stages of a pipeline hold it
    pool = chip.usable_memory_bytes * taken.gpu_memory_utilization - taken.taken_bytes + elsewhere
    if pool <= 0:
        raise InputError(case.metric, case.measured, "no pool is predicted: it wouldn't start", "Check the settings")
    provenance = f"{taken.engine}, runner {taken.runner}, {taken.max_num_batched_tokens} tokens a step"
    if case.metric == "kv_gib":
        return Scored(case.id, case, pool / 2**30, provenance=provenance)
    block = BLOCK_TOKENS * count_kv_bytes_per_token(case.config, case.kv_dtype or "bfloat16", mesh) / case.pp
    return Scored(case.id, case, float(pool // block * BLOCK_TOKENS), provenance=provenance)


def _peak(case: MemoryCase) -> Scored:
    """Peak allocation of transformers: weights and, at most, the prompt's activations or the cache of all tokens.

    AWQ and FP8 checkpoints of models with tied embeddings hold the output head apart while they load, GPTQ ones don't.
    Old releases made float32 logits of every prompt token. The Qwen3 tables print weights and cache, whatever the
    prompt: its activations aren't in them. Leaves out the engine's other buffers.
    """
    config = case.config
    if case.engine != "transformers" or "nvidia-smi" in case.note:
        problem = "is what the engine was told to take, or the card's whole use"
        raise InputError("mem_gb", case.measured, problem, "Score kv_tokens or weights_gib instead")
    if case.output_len is None:
        raise InputError("output_len", None, "is not stated", "The cache depends on it")
    prompt, per_token = case.input_len or 1, count_kv_bytes_per_token(config, case.kv_dtype or "bfloat16")
    logits = case.batch * prompt * config.vocab_size * _LOGIT_BYTES if "fp32 logits" in case.note else 0
    widest = 0 if _QWEN3_TABLES in case.source else max(logits, peak_activation_bytes(config, case.batch * prompt))
    is_apart = config.tie_word_embeddings and is_quantized(case) and "gptq" not in case.weights.lower()
    loading = 2 * config.vocab_size * config.hidden_size if is_apart else 0
    at_prompt = case.batch * prompt * per_token + widest
    at_end = case.batch * (prompt + case.output_len) * per_token
    total = _weight_bytes(case) * case.pp + max(loading, at_prompt, at_end)
    return Scored(case.id, case, total / 2**30, provenance="weights and cache exact, the widest activations estimated")
