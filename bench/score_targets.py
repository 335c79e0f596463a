"""The accuracy to reach, group by group, beside what was reached and what the data themselves scatter."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, Final, NamedTuple

from cases import MemoryCase
from kernel_cases import KernelCase
from scored import Asked, Scored, group, is_quantized, num_params

from roofline.timing.case import Case

_NEAR_LENGTH = 1.25  # lengths within this factor count as nearly the same


class Target(NamedTuple):
    """A group of rows with its goal for the median and 90th percentile of |error|."""

    name: str
    median: float
    p90: float | None
    takes: Callable[[Asked], bool]


class Reached(NamedTuple):
    """What a target's rows came to, and the median difference of nearly equal rows of two sources.

    scatter is that of one engine version, scatter_versions that of two, which a predictor that knows them can't be
    blamed for but one of another version's profile can.
    """

    name: str
    n: int
    median_abs_error: float | None
    p90_abs_error: float | None
    median_target: float
    p90_target: float | None
    reached: bool | None
    scatter: float | None
    pairs: int
    scatter_versions: float | None
    pairs_versions: int

    def record(self) -> dict[str, Any]:
        return self._asdict()


def _time(asked: Asked) -> Case | None:
    return asked if isinstance(asked, Case) and not asked.h20_qwen3_table else None


def _is_prefill(case: Case) -> bool:
    return case.metric in ("prefill_tok_s", "ttft_ms")


def _is_single(asked: Asked) -> bool:
    case = _time(asked)
    if case is None or _is_prefill(case) or case.saturated:
        return False
    return case.concurrency == 1 and num_params(case) > 2.9e9


def _is_batched(asked: Asked) -> bool:
    case = _time(asked)
    return case is not None and not _is_prefill(case) and (case.saturated or case.concurrency > 1)


def _is_clean_prefill(asked: Asked) -> bool:
    case = _time(asked)
    return case is not None and _is_prefill(case) and not case.ttft_has_queueing and not case.host_bound


def _plain(takes: Callable[[Asked], bool]) -> Callable[[Asked], bool]:
    """Of these, the dense models in 16 bits on one GPU, which no other target asks for."""

    def of_these(asked: Asked) -> bool:
        case = _time(asked)
        if case is None or case.num_gpus > 1 or case.config.is_moe or is_quantized(case):
            return False
        return takes(asked)

    return of_these


def _is_kernel(asked: Asked, *chips: str) -> bool:
    return isinstance(asked, KernelCase) and asked.kind != "experts" and asked.hardware.startswith(chips)


def _is_pool(asked: Asked) -> bool:
    return isinstance(asked, MemoryCase) and asked.metric in ("kv_tokens", "kv_gib")


TARGETS: Final = (
    Target("single stream, 3B and more", 0.04, 0.12, _is_single),
    Target("- 16 bits, dense, one GPU", 0.04, 0.12, _plain(_is_single)),
    Target("batched throughput and TPOT", 0.08, 0.20, _is_batched),
    Target("- 16 bits, dense, one GPU ", 0.08, 0.20, _plain(_is_batched)),
    Target("prefill and TTFT, clean", 0.08, 0.20, _is_clean_prefill),
    Target("- 16 bits, dense, one GPU  ", 0.08, 0.20, _plain(_is_clean_prefill)),
    Target("tensor parallel 2 to 8", 0.06, 0.15, lambda asked: (case := _time(asked)) is not None and case.tp > 1),
    Target("quantised weights", 0.08, 0.20, lambda asked: (case := _time(asked)) is not None and is_quantized(case)),
    Target("mixtures of experts", 0.10, 0.25, lambda asked: (case := _time(asked)) is not None and case.config.is_moe),
    Target("GEMM and attention, A100 and H100", 0.08, None, lambda asked: _is_kernel(asked, "a100", "h100")),
    Target("GEMM and attention, RTX 4090", 0.05, None, lambda asked: _is_kernel(asked, "rtx-4090")),
    Target("KV pool of vLLM's logs", 0.03, None, _is_pool),
)


def targets_reached(rows: Sequence[Scored]) -> list[Reached]:
    """Each target with its rows' errors, and with the scatter of nearly equal rows from different sources."""
    return [_reached(target, [row for row in rows if row.asked and target.takes(row.asked)]) for target in TARGETS]


def _reached(target: Target, rows: Sequence[Scored]) -> Reached:
    errors = group("target", target.name, rows)
    median, p90 = errors.median_abs_error, errors.p90_abs_error
    reached = None
    if median is not None and p90 is not None:
        reached = median <= target.median and (target.p90 is None or p90 <= target.p90)
    pairs = like_pairs(row.asked for row in rows if isinstance(row.asked, Case))
    same = [_gap(a, b) for a, b in pairs if a.engine_version == b.engine_version]
    other = [_gap(a, b) for a, b in pairs if a.engine_version != b.engine_version]
    return Reached(
        target.name, errors.n, median, p90, target.median, target.p90, reached,
        statistics.median(same) if same else None, len(same), statistics.median(other) if other else None, len(other),
    )  # fmt: skip


def like_pairs(cases: Iterable[Case]) -> list[tuple[Case, Case]]:
    """Pairs of figures that describe nearly one setting and come from different sources or versions.

    One setting: the model's shape, GPU, engine, weights, parallelism, metric, batch, step and graphs, and lengths
    within 25 %.
    """
    alike: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        alike.setdefault(_setting(case), []).append(case)
    return [
        (a, b)
        for cases_ in alike.values()
        for a, b in combinations(cases_, 2)
        if (a.source, a.engine_version) != (b.source, b.engine_version) and _near(a, b)
    ]


def _gap(a: Case, b: Case) -> float:
    return abs(a.measured - b.measured) / min(a.measured, b.measured)


def _setting(case: Case) -> tuple[Any, ...]:
    config = case.config
    shape = (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_experts)
    load = ("all", case.requests) if case.saturated else ("batch", case.concurrency)
    run = (case.hardware, case.power_limit_watts, case.engine, is_quantized(case) and case.weights, case.tp, case.pp)
    how = (case.metric, case.counts_prompt, case.prior_len, case.cuda_graphs is False, case.max_num_batched_tokens)
    return (*shape, config.vocab_size, *run, *how, *load)


def _near(a: Case, b: Case) -> bool:
    lengths = ((a.input_len, b.input_len), (a.output_len, b.output_len))
    return all(max(pair) <= _NEAR_LENGTH * min(pair) + 64 for pair in lengths)
