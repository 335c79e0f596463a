"""Asks the package for each row's prediction: times from profiles, kernels from efficiencies, sizes from memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from cases import Rows
from kernel_cases import KernelCase, kernel_options
from kernel_routing import routed
from score_memory import predict_memory
from scored import Asked, Scored

from qwenjax.errors import InputError
from roofline.hardware import load_hardware
from roofline.timing.attention import attention_decode_s, attention_prefill_s
from roofline.timing.case import Case
from roofline.timing.efficiency import load_efficiency, load_interval
from roofline.timing.kernels import gemm_s, moe_s
from roofline.timing.scheduling import Scheduler
from roofline.timing.serving import CasePrediction, case_terms, figure, plan_case, predict_case

_IMPOSSIBLE = 1.02  # a figure that beats the roof by more than the rounding of its source
_SUSPECT = 0.5  # |error| from which a row is held against the roof

_GROUPS = {"gemm": "gemm", "experts": "moe", "decode attention": "attention", "prefill attention": "attention"}

Predict = Callable[[Case], CasePrediction]


def predict_rows(rows: Rows, predict: Predict = predict_case) -> list[Scored]:
    """Every row of a file with its prediction or the reason why it has none, in the order of the kinds."""
    asked: Sequence[Asked] = (*rows.cases, *rows.kernels, *rows.memories)
    return [predict_row(one, predict) for one in asked] + [
        Scored(left.id, skipped=left.reason) for left in rows.skipped
    ]


def predict_row(asked: Asked, predict: Predict = predict_case) -> Scored:
    """One row's prediction in its own unit, or the reason why it has none: one bad row doesn't stop the rest."""
    try:
        if isinstance(asked, Case):
            return _time(asked, predict)
        if isinstance(asked, KernelCase):
            return _kernel(asked)
        return predict_memory(asked)
    except InputError as problem:
        return Scored(asked.id, asked, skipped=str(problem))
    except (ValueError, ArithmeticError, LookupError) as problem:
        return Scored(asked.id, asked, skipped=f"the prediction failed: {type(problem).__name__}: {problem}")


def _time(case: Case, predict: Predict) -> Scored:
    made = predict(case)
    if made.expected is None:
        return Scored(case.id, case, skipped=made.reason_skipped or "no profile predicts it")
    scored = Scored(case.id, case, made.expected, made.low, made.high, provenance=made.provenance)
    if abs(scored.error or 0.0) > _SUSPECT and not case.saturated:
        share = roof_share(case)
        if share is not None and share > _IMPOSSIBLE:
            problem = f"can't be: {case.measured:g} is {share:.1f} times the roof of {case.hardware}"
            return Scored(case.id, case, skipped=problem)
    return scored


def roof_of(case: Case) -> float | None:
    """The best figure that the chip's peaks allow for a case, in the metric's unit; None where it can't be planned.

    Of a queue it is that of a usual scheduler: how many sequences are let in at once is the engine's choice.
    """
    scheduler = Scheduler()
    try:
        plan = plan_case(case, scheduler)
        terms = case_terms(case, plan, scheduler)
    except InputError:
        return None
    seconds = float(plan.steps.times @ terms.bound_s)
    return figure(plan, seconds) if seconds > 0 else None


def roof_share(case: Case) -> float | None:
    """What share of the roof a row's figure is; above 1 it can't be."""
    roof = roof_of(case)
    return None if roof is None else case.measured / roof if case.is_rate else roof / case.measured


def _kernel(case: KernelCase) -> Scored:
    chip = load_hardware(case.hardware)
    efficiency, provenance = load_efficiency(chip)
    size, options = case.sizes, kernel_options(case)
    common: dict[str, Any] = {"chip": chip, "eff": efficiency, "resident": case.repeated}
    group = _GROUPS[case.kind]
    if case.kind == "gemm":
        group = "float8_gemm" if options["dtype"] != "bfloat16" else group
        seconds = gemm_s(size["m"], size["n"], size["k"], **options, **common)
    elif case.kind == "experts":
        routing = re.search(r"routing distribution (\w+_?[\d.]*)", case.note)
        named = routing[1].rstrip(".") if routing else "balanced"
        rows, distinct = routed(size["tokens"], size["per_token"], size["experts"], 1, named)
        shape = (size["tokens"], size["hidden"], size["width"], size["per_token"], size["experts"], distinct)
        seconds = moe_s(*shape, weight_bits=options["weight_bits"], rows=rows, **common)
    else:
        heads = (size["heads"], size["kv_heads"], size["head_dim"])
        if case.kind == "decode attention":
            seconds = attention_decode_s(size["batch"], size["kv_len"], *heads, **common)
        else:
            seconds = attention_prefill_s(size["batch"], size["query_len"], size["kv_len"], *heads, **common)
    fast, slow = load_interval(dict(efficiency.sources)[group], group, chip.id)
    expected, high, low = (case.rate(float(seconds) * factor) for factor in (1.0, fast, slow))
    return Scored(case.id, case, expected, low, high, provenance=provenance)
