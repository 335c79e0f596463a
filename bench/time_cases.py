"""Rows that time a whole model, as Cases: parallelism, lengths and what the metric counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from case_fields import Batch, batch_of, engine_of, gpu_of, length_of, model_of, positive, version_of, weights_of
from case_notes import Notes, context_of, per_request_tokens, read_notes

from qwenjax.errors import InputError
from qwenjax.sharding import Mesh
from roofline.count import count_kv_bytes_per_token
from roofline.hardware import load_hardware
from roofline.timing.case import Case, Metric
from roofline.weight_schemes import stored_weight_bytes

Run = tuple[str, ...]  # what the rows of one run share
_LLAMA_BENCH: Final = 512, 128  # llama-bench's default prompt and generation
_POOLED: Final = ("vllm", "sglang", "tensorrt-llm", "lmdeploy")  # engines that queue what their cache doesn't hold
# Requests of a run by prompt and output, as TensorRT-LLM's perf-overview.md says below its tables.
_OVERVIEW: Final = "TensorRT-LLM docs/source/performance/perf-overview.md"
_OVERVIEW_REQUESTS: Final = {
    (128, 128): 30000, (128, 2048): 3000, (128, 4096): 1500, (500, 2000): 3000, (1000, 1000): 3000, (1000, 2000): 1500,
    (2048, 128): 3000, (2048, 2048): 1500, (5000, 500): 1500, (20000, 2000): 1000,
}  # fmt: skip
_USABLE: Final = 0.9  # of the card, for weights and cache


def parallelism_of(row: Mapping[str, str], engine: str, notes: Notes) -> tuple[int, int]:
    """(tp, pp): what shards each layer, and how many cards hold whole layers one after the other."""
    gpus, tp = (int(positive(field, row[field].strip() or "1")) for field in ("n_gpus", "tp"))
    if engine in ("llama.cpp", "transformers") and "row split" not in row["note"]:
        return 1, max(gpus, tp)
    if tp > gpus:
        raise InputError("tp", tp, f"is more than the {gpus} GPUs", "Correct one of the two")
    pp = notes.pp or (gpus // tp if notes.pp is None and gpus > tp else 1)
    if gpus % tp or tp * pp > gpus:
        raise InputError("tp", tp, f"doesn't divide the {gpus} GPUs", "Correct one of the two")
    return tp, pp


def time_case(
    name: str,
    grade: str,
    row: Mapping[str, str],
    metric: Metric,
    lengths: Mapping[Run, tuple[int, int]],
) -> Case:
    source, note = row["source"].strip(), row["note"].strip()
    measured = positive("value", row["value"])
    engine = engine_of(row["framework"])
    gpu = gpu_of(row["gpu"], source)
    config = model_of(row["model"])
    weights, kv_dtype, unsaid = weights_of(row["dtype_or_quant"])
    notes = read_notes(row, engine, metric)
    tp, pp = parallelism_of(row, engine, notes)
    batch = batch_of(row["batch_or_concurrency"])
    if notes.requests and notes.is_offline and not batch.saturated:
        batch = Batch(notes.requests, True, notes.requests, None)
    if notes.micro_batch:  # the column then holds the tokens of a step, of one sequence
        batch = batch._replace(concurrency=1)
    input_len, output_len, guessed = _lengths(row, engine, metric, notes, lengths)
    if _OVERVIEW in source and batch.saturated and batch.requests is None:
        requests = _OVERVIEW_REQUESTS.get((input_len, output_len))
        batch = batch._replace(concurrency=requests or batch.concurrency, requests=requests)
    needed = notes.prior_len + input_len + output_len
    if needed > config.context_length:
        config = replace(config, max_position_embeddings=needed, rope_scaling=None)
    is_window = context_of(note) is not None and metric == "throughput_out_tok_s"
    case = Case(
        id=name, grade=grade, model=row["model"].strip(), config=config, hardware=gpu.id, engine=engine,
        engine_version=version_of(row["framework_version"], row["source"]), weights=weights,
        metric="decode_tok_s" if is_window else metric, measured=measured,
        input_len=input_len, output_len=output_len, concurrency=batch.concurrency, saturated=batch.saturated,
        requests=batch.requests, kv_dtype=kv_dtype, tp=tp, pp=pp, ep=tp if notes.expert_parallel else 1,
        attention_dp=notes.attention_dp, counts_prompt=notes.counts_prompt, time_has_prefill=notes.time_has_prefill,
        empty_context=engine == "llama.cpp" and input_len + notes.prior_len == 0 and metric == "decode_tok_s",
        ttft_has_queueing=notes.ttft_has_queueing and batch.concurrency > 1, per_request=notes.per_request,
        prior_len=notes.prior_len, static_batch=notes.static_batch, request_rate_per_s=batch.rate_per_s,
        cuda_graphs=notes.cuda_graphs, torch_compile=notes.torch_compile, flash_attention=notes.flash_attention,
        max_num_batched_tokens=notes.max_num_batched_tokens, max_num_seqs=notes.max_num_seqs,
        max_model_len=notes.max_model_len, gpu_memory_utilization=notes.gpu_memory_utilization,
        offline=notes.in_program, power_limit_watts=gpu.power_limit_watts, source=source, note=note,
        assumed=(*gpu.assumed, *unsaid, *guessed, *notes.assumed),
        h20_qwen3_table=gpu.id == "h20" and "Qwen3" in source and "speed_benchmark" in source,
        host_bound=notes.host_bound, repeated_token=notes.repeated_token, lengths=notes.lengths,
    )  # fmt: skip
    return _queue_what_doesnt_fit(case)


def _queue_what_doesnt_fit(case: Case) -> Case:
    """A batch whose cache is more than the cards hold runs as a queue, and so do arrivals at a rate."""
    if case.request_rate_per_s is not None:
        return replace(case, saturated=True, assumed=(*case.assumed, "requests arrive faster than they are served"))
    is_prefill = case.metric in ("ttft_ms", "prefill_tok_s")
    if case.saturated or is_prefill or case.concurrency == 1 or case.engine not in _POOLED or case.attention_dp:
        return case
    chip, mesh = load_hardware(case.hardware), Mesh(tp=case.tp)
    room = _USABLE * chip.usable_memory_bytes * case.pp - stored_weight_bytes(case.config, case.weights, mesh)
    tokens = case.concurrency * (case.prior_len + case.input_len + case.output_len)
    if tokens * count_kv_bytes_per_token(case.config, case.kv_dtype or "bfloat16", mesh) <= room:
        return case
    waits = f"of {case.concurrency} sequences some wait: their cache is more than the memory"
    return replace(case, saturated=True, requests=case.concurrency, assumed=(*case.assumed, waits))


def _lengths(
    row: Mapping[str, str],
    engine: str,
    metric: str,
    notes: Notes,
    served: Mapping[Run, tuple[int, int]],
) -> tuple[int, int, tuple[str, ...]]:
    """Prompt and output tokens, from the row, its note or the rows of the same run; and what was assumed."""
    given, wanted = length_of("input_len", row["input_len"]), length_of("output_len", row["output_len"])
    context = context_of(row["note"])
    if context is not None and given is None:
        return context, 2, ("input_len is the mean context of the window",)
    if given is None and wanted is None and _run_of(row) in served:
        prompt, output = served[_run_of(row)]
        return prompt, output, (f"lengths {prompt} and {output} from requests/s and tokens/s of the same run",)
    if notes.prior_len and given == notes.prior_len and wanted:
        return (0, wanted, ()) if metric == "decode_tok_s" else (wanted, 0, ())
    if given is None and wanted is not None and notes.counts_prompt:
        return 1, wanted, ("input_len = 1, not stated, and tokens/s count it",)
    if given is None and engine == "llama.cpp" and wanted is None:
        prompt, output = _LLAMA_BENCH if metric == "prefill_tok_s" else (0, _LLAMA_BENCH[1])
        return prompt, 0 if metric == "prefill_tok_s" else output, ("lengths as llama-bench's defaults, not stated",)
    if given is None:
        raise InputError("input_len", None, "is not stated", "The time depends on it")
    if wanted is None and metric in ("ttft_ms", "prefill_tok_s"):
        return given, 1, ()
    if wanted is None:
        raise InputError("output_len", None, "is not stated", "The time depends on it")
    if given + wanted < 1 or (metric in ("ttft_ms", "prefill_tok_s") and given < 1):
        raise InputError("input_len", given, "leaves nothing to time", "Give the tokens of the prompt")
    return given, wanted, ()


def _run_of(row: Mapping[str, str]) -> Run:
    fields = ("source", "model", "framework", "gpu", "n_gpus", "tp", "dtype_or_quant", "batch_or_concurrency", "note")
    return tuple(row[field] for field in fields)


def served_lengths(rows: list[dict[str, str]]) -> dict[Run, tuple[int, int]]:
    """Mean prompt and output of runs whose note gives requests/s and whose rows give output and total tokens/s."""
    seen: dict[Run, dict[str, float]] = {}
    for row in rows:
        tokens = per_request_tokens(row["note"], row["metric"], row["value"])
        if tokens is not None:
            seen.setdefault(_run_of(row), {})[row["metric"].strip()] = tokens
    found = {}
    for run, tokens_of in seen.items():
        total, output = tokens_of.get("throughput_total_tok_s"), tokens_of.get("throughput_out_tok_s")
        if total is not None and output is not None and total > output >= 1:
            found[run] = (round(total - output), round(output))
    return found
