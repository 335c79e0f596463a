"""vLLM's counters over some requests beside its own formulas and beside what the work must cost.

The formulas are exact for given requests; a /metrics page only has sums. So ours is worked out for requests of equal
length, and the counter must lie between what the shortest possible attention gives and what the longest does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from roofline.findings import Finding
from roofline.vllm_counters import Account, Work, corrected_terms, counter_terms, mean_work, total_of
from roofline.vllm_metrics import FLOPS, OPTION, READ_BYTES, WRITE_BYTES, CounterDelta

TOLERANCE = 0.005  # logits of chunks that end no prompt, requests cut by the pages
_FORMULA = "vllm/v1/metrics/perf.py of 0.26"
_PARTS = {
    "attention": "the causal mask halves a prompt's attention",
    "experts": "distinct experts, not min(tokens x k, E)",
    "shared_expert": "the shared expert isn't counted",
    "shared_expert_gate": "its gate neither",
    "router": "the router isn't counted",
    "unembed": "logits of sampled tokens only",
    "mlp": "the dense layers of a mixture are taken for sparse ones",
}


@dataclass(frozen=True)
class PartRow:
    """One part of the model in a counter: by vLLM's formula and corrected, per GPU."""

    part: str
    counter_flops: float
    corrected_flops: float
    counter_read_bytes: float
    corrected_read_bytes: float
    counter_write_bytes: float
    corrected_write_bytes: float


@dataclass(frozen=True)
class CounterReport:
    """Findings of the three counters, and the parts that ours are sums of."""

    findings: tuple[Finding, ...]
    parts: tuple[PartRow, ...]
    work: Work
    requests: int
    prompt_tokens: int  # of a request, on average
    output_tokens: int


def reconcile_counters(
    config: ModelConfig,
    delta: CounterDelta,
    *,
    tp: int = 1,
    kv_dtype: str = "bfloat16",
    chunk: int | None = None,
    max_model_len: int | None = None,
) -> CounterReport:
    """Sets what an engine counted beside its own formulas and the corrected count; FLOPs and bytes per GPU.

    chunk: tokens of the largest step, at which prompts are split (default: whole prompts). Requests are taken as of
    equal length; experts are those of the mean step.
    """
    _check_tokens(delta)
    work = mean_work(
        delta.requests,
        delta.prompt_tokens,
        delta.output_tokens,
        chunk=chunk,
        steps=delta.steps or None,
        cached_tokens=delta.cached_tokens,
    )
    counted = counter_terms(config, work, tp=tp, kv_dtype=kv_dtype)
    corrected = corrected_terms(config, work, tp=tp, kv_dtype=kv_dtype)
    findings = (
        *_flops(delta, work, counted, max_model_len or config.context_length),
        *_bytes(delta, work, counted),
        *_corrected(delta, counted, corrected),
    )
    return CounterReport(
        findings,
        tuple(_part_rows(counted, corrected)),
        work,
        delta.requests,
        delta.prompt_tokens // delta.requests,
        delta.output_tokens // delta.requests,
    )


def _check_tokens(delta: CounterDelta) -> None:
    for name, count in (("prompt", delta.prompt_tokens), ("generation", delta.output_tokens)):
        if count < delta.requests:
            problem = f"has {count:,} {name} tokens for {delta.requests:,} finished requests"
            raise InputError(OPTION, None, problem, "Take both pages while no request is running.")


def _flops(delta: CounterDelta, work: Work, counted: dict[str, Account], max_model_len: int) -> Iterator[Finding]:
    ours, tokens = total_of(counted).flops, delta.output_tokens
    least, most = _bounds(work, counted, max_model_len)
    bounds = least * (1 - TOLERANCE), most * (1 + TOLERANCE)
    cause, source = _flops_cause(delta, ours, bounds), f"{FLOPS}; {_FORMULA}"
    yield Finding("estimated FLOPs", "FLOP", delta.flops, ours, cause, source, "exact", bounds=bounds)
    per_token = delta.flops / tokens, ours / tokens
    yield Finding("estimated FLOPs an output token", "FLOP", *per_token, f"the same over {tokens:,} tokens", source)


def _bounds(work: Work, counted: dict[str, Account], max_model_len: int) -> tuple[float, float]:
    """The counter's least and most for these sums: one-token chunks of equal requests, and full contexts throughout."""
    attended = work.prefill_products + work.decode_context
    per_pair = counted["attention"].flops / attended
    rest = total_of(counted).flops - counted["attention"].flops
    longest = max(max_model_len, *(span.end for span in work.spans))
    return rest + per_pair * min(attended, work.pairs()), rest + per_pair * work.tokens * longest


def _flops_cause(delta: CounterDelta, ours: float, bounds: tuple[float, float]) -> str:
    off = delta.flops / ours - 1
    if abs(off) <= 1e-9:
        return "the same formula for these requests"
    if not bounds[0] <= delta.flops <= bounds[1]:
        which = "less than any" if delta.flops < bounds[0] else "more than any"
        hint = "another model, --tp, or requests cut by the pages"
        if delta.preemptions or delta.draft_tokens:
            hint = "preempted requests are computed again, and draft tokens too"
        return f"{which} such requests can count: {hint}"
    why = []
    if off > 0:
        why.append("requests of unlike length attend more than equal ones")
    else:
        why.append("prompts in chunks attend less than whole ones (--max-num-batched-tokens)")
    if delta.preemptions:
        why.append(f"{delta.preemptions} preemptions")
    if delta.cached_tokens:
        why.append("prefix cache hits are spread evenly here")
    return "; ".join(why)


def _bytes(delta: CounterDelta, work: Work, counted: dict[str, Account]) -> Iterator[Finding]:
    total = total_of(counted)
    if delta.read_bytes is not None:
        cause = f"weights are read in each of {work.num_steps:,.0f} steps"
        if delta.steps is None:
            cause += ", taken as one request at a time: the page doesn't count steps"
        yield Finding(
            "estimated bytes read", "B", delta.read_bytes, total.read_bytes, cause, f"{READ_BYTES}; {_FORMULA}"
        )
    if delta.write_bytes is not None:
        cause = "every product's output and the cache, for the same tokens"
        source = f"{WRITE_BYTES}; {_FORMULA}"
        yield Finding(
            "estimated bytes written", "B", delta.write_bytes, total.write_bytes, cause, source, "exact", 0.02
        )


def _corrected(delta: CounterDelta, counted: dict[str, Account], corrected: dict[str, Account]) -> Iterator[Finding]:
    """What the same tokens must cost: the engine's counter beside the corrected count, scaled as the counter is."""
    figures = (
        ("FLOPs", "FLOP", delta.flops),
        ("bytes read", "B", delta.read_bytes),
        ("bytes written", "B", delta.write_bytes),
    )
    before, after = total_of(counted), total_of(corrected)
    for index, (name, unit, engine) in enumerate(figures):
        if engine is not None:
            causes = _changes(counted, corrected, index)
            yield Finding(f"corrected {name}", unit, engine, after[index], causes, "counted from the config")
    tokens = delta.output_tokens
    cause = f"corrected less counted: {(after.flops - before.flops) / tokens / 1e9:+,.3f} GFLOP"
    per_token = delta.flops / tokens, after.flops / tokens
    yield Finding("corrected FLOPs an output token", "FLOP", *per_token, cause, "counted from the config")


def _changes(counted: dict[str, Account], corrected: dict[str, Account], index: int) -> str:
    total = total_of(counted)[index]
    changed = {}
    for part in dict.fromkeys((*counted, *corrected)):
        before, after = (terms.get(part, Account(0, 0, 0))[index] for terms in (counted, corrected))
        if abs(after - before) > 1e-6 * total:
            changed[part] = (after - before) / total
    if not changed:
        return "nothing to correct"
    ordered = sorted(changed.items(), key=lambda item: -abs(item[1]))
    return "; ".join(f"{100 * share:+.2f} % {_PARTS.get(part, part)}" for part, share in ordered)


def _part_rows(counted: dict[str, Account], corrected: dict[str, Account]) -> Iterator[PartRow]:
    for part in dict.fromkeys((*counted, *corrected)):
        pairs = zip(*(terms.get(part, Account(0, 0, 0)) for terms in (counted, corrected)), strict=True)
        yield PartRow(part, *(figure for pair in pairs for figure in pair))
