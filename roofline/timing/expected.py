"""What a profile expects of requests of equal length that are served together: prefill, then decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qwenjax.config import ModelConfig
from roofline.dtypes import DtypePolicy
from roofline.hardware import Hardware
from roofline.timing.efficiency import load_efficiency
from roofline.timing.engine import step_seconds
from roofline.timing.scheduling import Group, as_steps, decode_groups, prefill_groups
from roofline.timing.serving import layout_of, scheme_key
from roofline.timing.step import step_terms
from roofline.weight_schemes import scheme_of

if TYPE_CHECKING:
    from roofline.profile import Choice


@dataclass(frozen=True)
class Expected:
    """Seconds of the whole batch's prefill and of all its decode steps, and the part of both outside of kernels."""

    prefill_s: float
    decode_s: float
    overhead_s: float


def expect_requests(
    config: ModelConfig,
    chip: Hardware,
    choice: Choice,
    policy: DtypePolicy,
    *,
    batches: Sequence[int],
    prompt: int,
    output: int,
    tp: int = 1,
    experts: float | None = None,
) -> list[Expected]:
    """Times each batch of requests of `prompt` tokens in and `output` tokens out on `tp` devices, seconds.

    Prompts run as the engine's scheduler takes them, whole or in chunks, before the first decode step; it leaves out
    requests that wait because the KV pool is full. experts: distinct experts of a decode step, where counted.
    """
    scheduler, engine = choice.profile.scheduler, choice.profile.engine_constants
    scheme = policy.scheme or scheme_of(policy.weight)
    layout = layout_of(config, chip, scheme, tp=tp, kv_dtype=policy.kv, ways=scheduler)
    eff = load_efficiency(chip)[0]

    def times(each: list[list[Group]], counted: float | None) -> Any:
        """Seconds of each list of steps, and of them those outside of kernels; all steps are timed at once."""
        import numpy as np

        steps = as_steps([group for groups in each for group in groups])
        terms = step_terms(config, steps, replace(layout, experts=counted), chip, eff)
        seconds = step_seconds(terms, engine, *engine.scheme(scheme_key(scheme, chip)))
        starts = np.cumsum([0, *(len(groups) for groups in each[:-1])])
        total, kernels = (np.add.reduceat(steps.times * one, starts) for one in (seconds, terms.kernel_s))
        return zip(total.tolist(), np.maximum(total - kernels, 0.0).tolist(), strict=True)

    once = engine.of("request_s")
    prefills = times([prefill_groups(batch, prompt, scheduler) for batch in batches], None)
    decodes: Any = ((0.0, 0.0) for _ in batches)
    if output > 1:
        decodes = times([decode_groups(batch, prompt + 1, output - 1) for batch in batches], experts)
    return [
        Expected(prefill + once, decode, first + later + once)
        for (prefill, first), (decode, later) in zip(prefills, decodes, strict=True)
    ]
