"""From a published figure's question to its answer: the steps that the timed run takes, and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh, check_mesh
from roofline.count import dtype_bits
from roofline.hardware import Hardware, load_hardware
from roofline.timing.case import UNBOUNDED, Case
from roofline.timing.efficiency import load_efficiency
from roofline.timing.engine import REWRITES, UNPACKED, Engine, step_seconds
from roofline.timing.pools import kv_dtype_of, pool_tokens
from roofline.timing.queueing import queue_groups, spread_lengths
from roofline.timing.scheduling import (
    Group,
    Scheduler,
    as_steps,
    decode_groups,
    mean_wait_groups,
    prefill_groups,
    steady_groups,
)
from roofline.timing.step import Layout, Steps, Terms, step_terms
from roofline.timing.ways import Ways
from roofline.vllm_memory import batch_limits, parse_version
from roofline.weight_schemes import WeightScheme, op_weight_bits, scheme_of

if TYPE_CHECKING:
    from roofline.profile import Profile

Kind = Literal["single", "batched", "prefill"]  # what sort of figure, for the interval of its prediction
_VLLM_V1: Final = parse_version(REWRITES["vllm"][-1]) or ()
_IN_FLIGHT: Final = 4  # chunks of prompts that may be under way in a pipeline at once (llama.cpp's)
_ONE_HOST: Final = ("llama.cpp", "transformers")  # engines that launch all stages of a pipeline from one thread
_LAUNCHES: Final = 55  # of a layer of a prompt, unfused: seven products of four kernels each, attention, norms
_QUEUED: Final = 1024  # launches that a CUDA stream takes before the host has to wait
_RECORDED: Final = 4.0  # the longest answers of ShareGPT, about 900 tokens, over their mean of 200
_LONGEST: Final = 900.0  # those tokens: a subset with longer answers on average has none far above
_LIMITED: Final = 1.5  # of answers that a limit of 512 tokens cuts, over their mean of 350
_PLAIN: Final = ("bf16", "fp16", "bfloat16", "float16")


@dataclass(frozen=True)
class Plan:
    """The steps of the timed span, the requests that start in it, and the figure: tokens over time, or the time."""

    steps: Steps
    requests: float
    tokens: float | None  # None: the figure is the time itself
    kind: Kind


@dataclass(frozen=True)
class CasePrediction:
    """What a profile expects of a case, in the metric's unit, and the interval that 4 of 5 unseen rows fall into."""

    expected: float | None
    low: float | None
    high: float | None
    reason_skipped: str
    provenance: str


def plan_case(case: Case, scheduler: Scheduler) -> Plan:
    """The steps whose times add up to a case's figure. Raises InputError where the case says too little."""
    if case.input_len < 1 and case.output_len < 1:
        problem = "with no output length says that nothing was timed"
        raise InputError("input_len", case.input_len, problem, "State a length.")
    if case.offline and _is_v1(case, scheduler):
        tokens, _ = batch_limits(load_hardware(case.hardware), "offline")
        scheduler = replace(scheduler, max_num_batched_tokens=tokens)
    long = case.input_len + case.output_len > scheduler.long_context
    scheduler = replace(
        scheduler,
        max_num_batched_tokens=case.max_num_batched_tokens
        or (scheduler.long_chunk if long else scheduler.max_num_batched_tokens),
        max_num_seqs=case.max_num_seqs or scheduler.max_num_seqs,
    )
    if case.attention_dp:  # limits are each device's
        scheduler = replace(
            scheduler,
            max_num_batched_tokens=scheduler.max_num_batched_tokens * case.tp,
            max_num_seqs=scheduler.max_num_seqs * case.tp,
        )
    if case.metric in ("prefill_tok_s", "ttft_ms"):
        return _plan_prefill(case, scheduler)
    if case.saturated:
        return _plan_saturated(case, scheduler)
    return _plan_batch(case, scheduler)


def scheduler_for(case: Case, profile: Profile) -> Scheduler:
    """A profile's scheduler; vLLM's own where its version or card isn't the profile's: V1 since 0.8, limits by card."""
    scheduler = profile.scheduler
    version = parse_version(case.engine_version)
    is_v1 = case.engine == "vllm" and (scheduler.mixes if version is None else version >= _VLLM_V1)
    if not is_v1 or (scheduler.mixes and case.hardware in profile.hardware):
        return scheduler
    return vllm_v1_scheduler(load_hardware(case.hardware))


def vllm_v1_scheduler(chip: Hardware) -> Scheduler:
    """How vLLM's server since 0.8 fills a step on a card: decodes join prompts, and a prompt enters if it fits."""
    return Scheduler(*batch_limits(chip), mixes=True, charged_output=0.0, one_attention=True)


def _is_v1(case: Case, scheduler: Scheduler) -> bool:
    return case.engine == "vllm" and scheduler.mixes


def _plan_prefill(case: Case, scheduler: Scheduler) -> Plan:
    batch, lead = 1 if case.saturated else case.concurrency, int(scheduler.last_token_decoded)
    groups = _pipelined(prefill_groups(batch, case.input_len - lead, scheduler, case.prior_len), case)
    if case.metric == "prefill_tok_s":
        return Plan(as_steps(groups), 0.0, float(batch * case.input_len), "prefill")
    if case.ttft_has_queueing and batch > 1:
        groups = mean_wait_groups(groups)
        # On average half of the step that runs when a request comes is left.
        groups += decode_groups(batch, case.prior_len + case.input_len, 1, 0.5)
    groups += decode_groups(batch, case.prior_len + case.input_len, lead)
    if batch > 1 and not case.static_batch:
        groups += _earlier_waves(case, scheduler)
    # The requests of a static batch were there before its clock started.
    return Plan(as_steps(groups), 0.0 if case.static_batch else 1.0, None, "prefill")


def _earlier_waves(case: Case, scheduler: Scheduler) -> list[Group]:
    """What a request waits for on average where the KV pool holds only some of the batch: the waves before its own."""
    output = max(1, case.output_len)
    fitting = _fitting(case, scheduler)
    if fitting >= case.concurrency:
        return []
    waves = case.concurrency / fitting
    return _scaled(decode_groups(fitting, case.input_len + 1, output - 1), (waves - 1) / 2)


def _pipelined(groups: Sequence[Group], case: Case) -> list[Group]:
    """Chunks that follow each other through the stages of a pipeline: each enters a period after the one before it."""
    chunks = sum(group.times for group in groups)
    if case.pp == 1 or chunks <= 1:
        return list(groups)
    share = (1 + (chunks - 1) * _period(case.pp, case.config.num_hidden_layers, case.engine in _ONE_HOST)) / chunks
    return [replace(group, times=group.times * share) for group in groups]


def _period(stages: int, layers: int, one_host: bool) -> float:
    """Between two chunks that follow each other, as a part of one chunk's way through all stages.

    The stage with most layers, of which the output counts as one; but only so many chunks are under way. one_host: one
    thread launches stage after stage. Where a stage has more launches than a stream's queue takes, the thread waits for
    the device, so that it comes to the next chunk's first stage only once the rest of the last stage's is queued.
    """
    device = min(1.0, max(math.ceil((layers + 1) / stages) / layers, 1 / _IN_FLIGHT))
    if not one_host:
        return device
    launches = layers / stages * _LAUNCHES
    ahead = math.floor(_QUEUED / launches) + 1  # chunks, of which the last doesn't fit the queue
    host = (stages - 1 + (ahead * launches - _QUEUED) / launches) / stages / ahead
    return max(device, host)


def _plan_batch(case: Case, scheduler: Scheduler) -> Plan:
    """One request, or a batch or clients in flight: `concurrency` sequences that decode together."""
    batch, prompt = case.concurrency, case.input_len + case.prior_len
    first = (0 if case.empty_context else prompt) + 1
    stages = min(case.pp, batch)
    kind: Kind = "single" if batch == 1 else "batched"
    output = max(1, case.output_len)
    window = not case.time_has_prefill and output == 1  # a moment of decode steps at one context
    if case.metric == "decode_tok_s" or window or (case.metric == "tpot_ms" and (batch == 1 or case.static_batch)):
        steps = output if case.empty_context else max(1, output - 1)
        groups = decode_groups(batch / stages, first, steps)
        if not case.is_rate:
            return Plan(as_steps(_scaled(groups, 1 / steps)), 0.0, None, kind)
        whole = not case.per_request
        return Plan(as_steps(groups), 0.0, float(steps * (batch / stages if whole else 1)), kind)
    fitting = batch if batch == 1 else max(1, min(batch, _fitting(case, scheduler)))
    waves, lead = batch / fitting, int(scheduler.last_token_decoded)
    decodes = _scaled(decode_groups(fitting / stages, first - lead, output - 1 + lead), waves)
    prompts = _pipelined(prefill_groups(batch, case.input_len - lead, scheduler), case) if case.time_has_prefill else []
    chat = batch > 1 and not case.static_batch and _is_chat(case)
    turn = steady_groups(fitting, prompt, output, scheduler) if chat else [*prompts, *decodes]
    if case.metric == "tpot_ms":
        # Equal requests stay in step with each other: a request waits for half of the prompts, and later half of them
        # take steps from it.
        groups = turn if chat else [*_scaled(prompts, 0.5 / waves), *_scaled(decodes, 1 / waves)]
        return Plan(as_steps(_scaled(groups, 1 / max(1, output - 1))), 0.0, None, kind)
    each = output + (case.input_len if case.counts_prompt or case.metric == "throughput_total_tok_s" else 0)
    count = fitting if chat else batch
    return Plan(as_steps(turn), float(count), float(each * (1 if case.per_request else count)), kind)


def _fitting(case: Case, scheduler: Scheduler) -> int:
    """Requests that the KV pool holds at once."""
    length = case.input_len + case.prior_len + _mean_charge(scheduler) * case.output_len
    return max(1, int(pool_tokens(case, scheduler) / max(length, 1)))


def _mean_charge(scheduler: Scheduler) -> float:
    """Part of the output that a running request takes of the KV pool on average: what is reserved, at least half."""
    return max(0.5, scheduler.charged_output)


def _scaled(groups: Sequence[Group], share: float) -> list[Group]:
    return [replace(group, times=group.times * share) for group in groups]


def _plan_saturated(case: Case, scheduler: Scheduler) -> Plan:
    prompt, output = case.input_len, max(1, case.output_len)
    count = case.requests or case.concurrency
    pool = pool_tokens(case, scheduler)
    places = scheduler.max_num_seqs
    charged = prompt + _mean_charge(scheduler) * output
    if case.concurrency >= UNBOUNDED or count > 20_000:
        fitting = max(1.0, min(places, pool / charged))
        groups, count = steady_groups(fitting, prompt, output, scheduler), round(fitting)
    else:
        lengths = spread_lengths(prompt, output, count, _widest(case))
        groups = queue_groups(lengths, places, pool, scheduler)
    if case.metric == "tpot_ms":
        # Each step takes its time from every sequence that runs meanwhile.
        tokens = count * max(1, output - 1)
        running = sum(group.times * group.decodes for group in groups) / sum(group.times for group in groups)
        groups = [replace(group, times=group.times * (group.decodes or running) / tokens) for group in groups]
        return Plan(as_steps(groups), 0.0, None, "batched")
    each = output + (prompt if case.counts_prompt or case.metric == "throughput_total_tok_s" else 0)
    return Plan(as_steps(groups), 0.0, float(count * each), "batched")


def _is_chat(case: Case) -> bool:
    """Whether lengths are those of conversations rather than all equal."""
    return case.lengths != "equal"


def _widest(case: Case) -> float:
    """The longest request over the mean: recorded conversations have some far longer ones; a suite limits outputs."""
    if not _is_chat(case):
        return 1.0
    longest = max(_LIMITED, _LONGEST / max(1, case.output_len))
    return _LIMITED if case.lengths == "limited" else min(_RECORDED, longest)


def compute_dtype_of(scheme: WeightScheme, chip: Hardware) -> str:
    """The type in which a chip multiplies a scheme's weights: the fastest of them that it has, else bfloat16."""
    known = [dtype for dtype in scheme.compute if dtype in chip.peak_flops_per_s]
    return max(known, key=lambda dtype: chip.peak_flops_per_s[dtype], default="bfloat16")


def layout_of(
    config: ModelConfig,
    chip: Hardware,
    scheme: WeightScheme,
    *,
    tp: int = 1,
    kv_dtype: str | None = None,
    dp: bool = False,
    ep: bool = False,
    ways: Ways | None = None,
) -> Layout:
    """How a model in a weight scheme lies on `tp` devices."""
    check_mesh(config, Mesh(tp=tp))
    kv_bytes = dtype_bits(kv_dtype or "bfloat16") / 8
    return Layout(
        tp,
        dp,
        ep,
        op_weight_bits(config, scheme),
        compute_dtype_of(scheme, chip),
        kv_bytes,
        ways=ways or Ways(),
    )


def scheme_key(weights: str | WeightScheme, chip: Hardware) -> str:
    """The name under which a profile keeps a weight scheme's constants; empty for weights of 16 bits.

    GGUF's 16 bits have a name, for llama.cpp multiplies one row with them in a kernel of its own, as it does all types.
    Where the chip lacks the narrow type of a scheme's products, kernels unpack the weights: they are kept apart.
    """
    scheme = scheme_of(weights) if isinstance(weights, str) else weights
    if scheme.name in _PLAIN:
        return ""
    unpacked = scheme.compute and compute_dtype_of(scheme, chip) == "bfloat16"
    return f"{scheme.name}{UNPACKED}" if unpacked else scheme.name


def case_terms(case: Case, plan: Plan, scheduler: Scheduler) -> Terms:
    """Kernel seconds of the kinds of steps of a case's plan."""
    chip = load_hardware(case.hardware)
    captured = 0.0 if case.cuda_graphs is False else scheduler.captured_context
    flash = scheduler.flash_attention if case.flash_attention is None else case.flash_attention
    layout = layout_of(
        case.config,
        chip,
        scheme_of(case.weights),
        tp=case.tp,
        kv_dtype=kv_dtype_of(case),
        dp=case.attention_dp,
        ep=case.ep > 1,
        ways=replace(scheduler, captured_context=captured, flash_attention=flash),
    )
    if case.engine in _ONE_HOST:
        layout = replace(layout, hops=case.pp - 1)
    return step_terms(case.config, plan.steps, layout, chip, load_efficiency(chip)[0])


def plan_seconds(plan: Plan, terms: Terms, engine: Engine, scheme: str) -> float:
    """Seconds of the timed span on an engine."""
    import numpy as np

    seconds: Any = np.dot(plan.steps.times, step_seconds(terms, engine, *engine.scheme(scheme)))
    return float(seconds) + plan.requests * engine.of("request_s")


def figure(plan: Plan, seconds: float) -> float:
    """The metric's value when the timed span takes so many seconds."""
    return seconds * 1e3 if plan.tokens is None else plan.tokens / seconds


def figures(plan: Plan, terms: Terms, seconds: float, interval: tuple[float, float]) -> tuple[float, float, float]:
    """The metric's expected, least and largest value, from the expected seconds and the factors on them."""
    least, (fast, slow) = float(plan.steps.times @ terms.bound_s), interval
    times = (seconds, max(least, seconds * fast), seconds * slow)
    expected, first, second = (figure(plan, value) for value in times)
    return expected, min(first, second), max(first, second)


def predict_case(case: Case, profiles: Sequence[Profile] | None = None) -> CasePrediction:
    """What the best profile for a case's engine, version and GPU expects, in the metric's unit, with its interval.

    Rates and times are never better than the roofline's. A case that can't be predicted has its reason instead.
    """
    from roofline.profile import choose_profile, known_profiles

    try:
        choice = choose_profile(
            known_profiles() if profiles is None else profiles, case.engine, case.hardware, case.engine_version
        )
        scheduler = scheduler_for(case, choice.profile)
        plan = plan_case(case, scheduler)
        terms = case_terms(case, plan, scheduler)
    except InputError as error:
        return CasePrediction(None, None, None, str(error), "")
    engine = choice.profile.engine_constants
    seconds = plan_seconds(plan, terms, engine, scheme_key(case.weights, load_hardware(case.hardware)))
    return CasePrediction(*figures(plan, terms, seconds, choice.interval(plan.kind)), "", choice.provenance)
