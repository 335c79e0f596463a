"""What the note of a measurement row says: how the metric is defined, and how the engine was set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from roofline.timing.case import Lengths
from roofline.vllm_memory import parse_version

SETTINGS: Final = ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "cuda_graphs")

_RANDOM_PROMPTS: Final = (0, 6, 5)  # the vLLM from which on its throughput benchmark draws the tokens of prompts
_FLASH_PULL: Final = 15434  # llama.cpp's (August 2025) from which on FlashAttention is used wherever it can


@dataclass(frozen=True)
class Notes:
    """Definitions and settings in a row's note; None is what it leaves unsaid."""

    counts_prompt: bool = False
    time_has_prefill: bool = True
    ttft_has_queueing: bool = False
    per_request: bool = False
    static_batch: bool = False
    expert_parallel: bool = False
    attention_dp: bool = False
    host_bound: bool = False
    micro_batch: bool = False
    in_program: bool = False  # the engine's class was called, not its server
    repeated_token: bool = False
    is_offline: bool = False  # the batch is the engine's limit in a run of more requests
    lengths: Lengths = "equal"
    requests: int | None = None
    prior_len: int = 0
    pp: int | None = None
    cuda_graphs: bool | None = None
    torch_compile: bool | None = None
    flash_attention: bool | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    non_torch_gib: float | None = None
    activation_gib: float | None = None
    budget_gib: float | None = None
    assumed: tuple[str, ...] = ()


def read_notes(row: Mapping[str, str], engine: str, metric: str) -> Notes:
    """The definitions and settings of a row, from its note and, where that is silent, its source and batch column."""
    note = row["note"]
    setup = f"{row['batch_or_concurrency']} {note}"
    micro = _number(r"micro-batch (\d+)", note)
    step_tokens = _number(r"max[-_]num[-_](?:batched[-_])?tokens[ =]+(\d+)", note)
    queueing, assumed = _queueing(note, metric)
    if _says("TP assumed", note):
        assumed = (*assumed, "tp = number of GPUs, which the source doesn't say")
    return Notes(
        counts_prompt=_counts_prompt(note, row["source"], metric),
        time_has_prefill=_time_has_prefill(note, engine, metric),
        ttft_has_queueing=queueing,
        per_request=_says(r"per (user|request|sequence|stream)\b", note) and metric.endswith("tok_s"),
        static_batch=_says(r"static (batch|concurrency)|token_time: mean decode step|whole-batch|one prefill of", note),
        expert_parallel=_says(r"enable-expert-parallel|use EP as well|MoE: EP\b|--ep(-size)? [2-9]", note),
        attention_dp=_says(r"attention data-parallel|enable[-_]attention[-_]dp|dp attention", note),
        host_bound=_host_bound(row, engine),
        micro_batch=micro is not None,
        in_program=_says(r"LLM\.generate", note),
        repeated_token=_repeats_a_token(note, row["framework_version"], engine),
        is_offline=_says(r"profile_throughput|max batch \d", note),
        lengths=_spread_of(note),
        requests=_number(r"num-prompts[ =](\d+)|(\d+) (?:\S+ )?(?:prompts|requests)\b", note),
        prior_len=_number(r"at depth (\d+)", note) or 0,
        pp=_number(r"\bPP(\d+)\b", note),
        cuda_graphs=False if "Splitwise" in row["framework"] else _cuda_graphs(note, engine),
        torch_compile=True if _says(r"torch\.compile", note) else None,
        flash_attention=_flash_attention(note, row["source"], engine),
        max_num_batched_tokens=micro or step_tokens,
        max_num_seqs=_number(r"max[-_]num[-_]seqs (?:default )?=?(\d+)", setup) or _number(r"max batch (\d+)", note),
        max_model_len=_number(r"(?:max[-_]model[-_]len|max[-_]seq[-_]len|context[-_]length)[ =]+(\d+)", note),
        gpu_memory_utilization=_fraction(note),
        non_torch_gib=_gib(r"non-torch ([\d.]+)", note),
        activation_gib=_gib(r"activation ([\d.]+)", note),
        budget_gib=_gib(r"budget ([\d.]+) GiB|\(([\d.]+) GiB budget\)", note),
        assumed=assumed,
    )


def context_of(note: str) -> int | None:
    """The mean context of a window of pure decode, where a note gives it."""
    return _number(r"mean context about (\d+)", note) if _says("pure decode", note) else None


def per_request_tokens(note: str, metric: str, value: str) -> float | None:
    """Tokens of one request: the row's tokens/s over the requests/s of its note."""
    rate = re.search(r"([\d.]+) req/s", note)
    if rate is None or not metric.strip().startswith("throughput_"):
        return None
    try:
        return float(value) / float(rate[1])
    except (ValueError, ZeroDivisionError):
        return None


def _says(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.I) is not None


def _spread_of(note: str) -> Lengths:
    """How the lengths of requests spread: a suite's prompts are conversations, but it limits their outputs."""
    if _says("suite", note):
        return "limited"
    return "recorded" if _says("sharegpt", note) else "equal"


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text, re.I)
    return int(next(group for group in found.groups() if group)) if found else None


def _gib(pattern: str, text: str) -> float | None:
    found = re.search(pattern, text, re.I)
    return float(next(group for group in found.groups() if group).rstrip(".")) if found else None


def _fraction(note: str) -> float | None:
    spelled = (
        r"(?:gmu|gpu[-_]memory[-_]utilization|mem[-_]fraction[-_]static|cache[-_]max[-_]entry[-_]count"
        r"|free[-_]gpu[-_]mem(?:ory)?[-_]fraction)[ =]+(0?\.\d+|1\.0)"
    )
    found = re.search(spelled, note, re.I)
    return float(found[1]) if found else None


def _counts_prompt(note: str, source: str, metric: str) -> bool:
    """Whether tokens/s count the prompt: total throughput does; end-to-end rates of the Qwen3 tables say so."""
    if metric == "throughput_total_tok_s":
        return True
    if metric != "e2e_tok_s":
        return False
    return (
        _says(r"\(prompt ?\+|encoded ?(and|\+) ?generated|input ?\+ ?output", note)
        or "getting_started/speed_bench" in source
    )


def _time_has_prefill(note: str, engine: str, metric: str) -> bool:
    """Decode rates leave the prefill out, save gpt-fast's, which divides by the whole call; the rest include it."""
    if _says("pure decode", note):
        return False
    return metric != "decode_tok_s" or engine == "gpt-fast"


def _queueing(note: str, metric: str) -> tuple[bool, tuple[str, ...]]:
    """Whether a first token waits for other requests' prompts, where several are in flight."""
    if metric != "ttft_ms" or _says("one prefill of|whole-batch prefill|single-stream", note):
        return False, ()
    if _says("includes queueing", note):
        return True, ()
    return True, ("first tokens of several requests at once wait for each other",)


def _cuda_graphs(note: str, engine: str) -> bool | None:
    if engine == "transformers" or _says(r"--enforce-eager|enforce-eager,|ran eager|without CUDA graphs", note):
        return False
    return True if _says(r"enforce_eager=False|CUDA graphs( are)? on|\+ CUDA graphs", note) else None


def _repeats_a_token(note: str, version: str, engine: str) -> bool:
    """Whether all prompts are one token over and over, as of vLLM's script until 0.6.4 (see its pull request 10753)."""
    if engine != "vllm" or not _says(r"benchmark_throughput(\.py)? .*--input-len", note):
        return False
    numbers = parse_version(version)
    return numbers is not None and numbers < _RANDOM_PROMPTS


def _flash_attention(note: str, source: str, engine: str) -> bool | None:
    """What a note says; else llama.cpp's pull requests from that on which made it the default."""
    if _says(r"FlashAttention off|without FlashAttention|no FlashAttention(?! flag)", note):
        return False
    if _says(r"WITH FlashAttention|FlashAttention on|FlashAttention,|\bFA2\b", note):
        return True
    return True if engine == "llama.cpp" and (_number(r"llama\.cpp#(\d+)", source) or 0) >= _FLASH_PULL else None


def _host_bound(row: Mapping[str, str], engine: str) -> bool:
    """Whether the note says that the host sets the time; a floor of several GPUs counts from four on."""
    note = row["note"]
    if _says(r"so TP4/TP8 are host-bound", note):
        return row["tp"].strip() not in ("1", "2")
    if engine == "transformers" and _says(r"for <=14B", note):
        size = re.search(r"([\d._]+)B\b", row["model"])
        return size is not None and float(size[1].replace("_", ".")) <= 14.5
    return _says(r"host overhead per step \(~|launch-overhead|launch-bound|CPU-bound|host-bound", note)
