"""Why a row is likely off, from what the row says of itself and from which constants predicted it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cases import MemoryCase
from kernel_cases import KernelCase
from scored import Scored, is_quantized, num_params

from roofline.hardware import load_hardware
from roofline.timing.case import Case

_SMALL_PARAMS = 2.5e9


def reasons_of(row: Scored) -> tuple[str, ...]:
    """The likely causes of a row's error, the most telling first; empty where nothing in the row hints at one."""
    if row.asked is None:
        return ()
    if isinstance(row.asked, Case):
        found = [*_of_case(row.asked), *_of_profile(row)]
    elif isinstance(row.asked, KernelCase):
        found = [*_of_kernel(row.asked), *_of_profile(row)]
    else:
        found = list(_of_memory(row.asked))
    graded = re.search(r"graded B because: (.*)", row.asked.note)
    return tuple(found + ([graded[1]] if graded else []))


def _of_case(case: Case) -> Iterator[str]:
    chip = load_hardware(case.hardware)
    if case.h20_qwen3_table:
        yield "an H20 row of the Qwen3 tables: a third of the card's bandwidth, cause unknown"
    if case.repeated_token:
        yield "prompts of one token over and over: alike rows draw less power, and all go to the same experts"
    if case.host_bound:
        yield "the note says that the host or launches set the time"
    if case.engine == "transformers" and (num_params(case) < 14e9 or case.config.is_moe):
        yield "transformers launches each kernel from Python: the host sets the time"
    elif num_params(case) < _SMALL_PARAMS:
        yield "a small model: host time a step counts as much as the card's"
    if case.cuda_graphs is False and case.engine != "transformers":
        yield "ran without CUDA graphs"
    throttled = re.search(r"throttle_ratio (0\.\d+)", case.note)
    if throttled and float(throttled[1]) < 0.93:
        yield f"the card throttled to {throttled[1]} of its best rate"
    if case.tp > 1 and (chip.peer_link is None or chip.peer_link.name == "pcie"):
        yield "all-reduces over PCIe, whose topology isn't told"
    if case.ttft_has_queueing:
        yield "first tokens wait for the other requests' prompts"
    if case.saturated:
        yield "a queue with spread lengths: ramp-up, tail and preemption are in the figure"
    if case.power_limit_watts is not None:
        yield f"the card was capped at {case.power_limit_watts:g} W"
    if case.config.is_moe:
        yield "which experts were chosen isn't told"
    if is_quantized(case):
        yield f"the kernel of {case.weights} weights isn't told"
    yield from case.assumed


def _of_kernel(case: KernelCase) -> Iterator[str]:
    l2 = load_hardware(case.hardware).l2_bytes
    if case.repeated and case.kind == "gemm" and l2 and 2 * case.sizes["n"] * case.sizes["k"] < 2 * l2:
        yield "one call repeated: its weights stay in L2 in part"
    if case.kind == "experts":
        yield "routing by a power law, which hits fewer experts and some far more often"
    if is_quantized(case):
        yield f"the kernel of {case.weights} weights"


def _of_memory(case: MemoryCase) -> Iterator[str]:
    if case.metric == "mem_gb":
        yield "the peak also holds the widest activations"
    if case.config.is_moe:
        yield "engines pad or fuse the experts' matrices"
    if is_quantized(case):
        yield "engines lay quantised weights out anew as they load them"


def _of_profile(row: Scored) -> Iterator[str]:
    if re.search(r"nearest|no profile|instead of|stands in", row.provenance):
        yield row.provenance
