"""Which steps an engine runs for a workload: how many sequences decode, and how prompts are taken, step by step.

Schedules don't depend on the time of a step: requests that wait at the start, or clients that send the next request
when one ends, fill the same slots whatever a step takes. So a schedule is made once for any engine's constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roofline.timing.step import Steps
from roofline.timing.ways import Ways

SAMPLES = 12  # contexts at which a long run of decode steps is timed; between them time is all but linear


@dataclass(frozen=True)
class Scheduler(Ways):
    """How an engine fills a step: tokens of prompts in it, sequences at once, and whether prompts join decodes."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    mixes: bool = True  # chunks of prompts run in the same step as decodes
    charged_output: float = 0.5  # of a request's output for which the KV pool needs room before it enters
    long_context: float = math.inf  # requests longer than this have their prompts cut into chunks of `long_chunk`
    long_chunk: int = 0


@dataclass(frozen=True)
class Group:
    """Equal steps that run `times` times; the fields of `Steps`, one entry."""

    times: float
    decodes: float = 0.0
    context: float = 1.0
    prompts: float = 0.0
    chunk: float = 0.0
    reached: float = 1.0


def as_steps(groups: Sequence[Group]) -> Steps:
    import numpy as np

    def column(name: str) -> Any:
        return np.array([getattr(group, name) for group in groups], dtype=np.float64)

    return Steps(*(column(name) for name in ("times", "decodes", "context", "prompts", "chunk", "reached")))


def decode_groups(batch: float, first: int, steps: int, scale: float = 1.0) -> list[Group]:
    """`steps` decode steps of `batch` sequences, the first attending `first` tokens, as a few equal groups."""
    if steps <= 0:
        return []
    parts = min(SAMPLES, steps)
    length = steps / parts
    return [Group(scale * length, batch, first + (part + 0.5) * length - 0.5) for part in range(parts)]


def prefill_groups(batch: int, prompt: int, scheduler: Scheduler, prior: int = 0) -> list[Group]:
    """Steps that take `batch` prompts: whole ones together up to the token limit, longer ones in chunks."""
    limit = max(1, scheduler.max_num_batched_tokens)
    if prompt <= 0 or batch <= 0:
        return []
    if prompt > limit:
        full, rest = divmod(prompt, limit)
        groups = [
            Group(batch * share, prompts=1, chunk=limit, reached=prior + reached)
            for share, reached in _spread(full, limit)
        ]
        return groups + ([Group(batch, prompts=1, chunk=rest, reached=prior + prompt)] if rest else [])
    together = max(1, limit // prompt)
    full, rest = divmod(batch, together)
    groups = [Group(full, prompts=together, chunk=prompt, reached=prior + prompt)] if full else []
    return groups + ([Group(1, prompts=rest, chunk=prompt, reached=prior + prompt)] if rest else [])


def _spread(count: int, chunk: int) -> list[tuple[float, float]]:
    """Chunk numbers 1..count as at most SAMPLES groups: how many each stands for, and the tokens reached on average."""
    parts = min(SAMPLES, count)
    length = count / parts
    return [(length, chunk * ((part + 0.5) * length + 0.5)) for part in range(parts)]


def steady_groups(concurrency: float, prompt: int, output: int, scheduler: Scheduler) -> list[Group]:
    """One turn of a full house: each of `concurrency` places takes one prompt and makes `output` tokens."""
    decodes = max(0, output - 1)
    context = prompt + output / 2
    prompts = prefill_groups(max(1, round(concurrency)), prompt, scheduler)
    if not scheduler.mixes or concurrency <= 1:
        return [*decode_groups(concurrency, prompt + 1, decodes), *prompts]
    # Prompts come one by one, in steps that decode the others: as many of the turn's steps as there are chunks.
    chunks = max(1, math.ceil(prompt / scheduler.max_num_batched_tokens))
    chunk = prompt / chunks
    carrying = concurrency * chunks
    if carrying > decodes:  # more prompts than steps: several share one, up to the token limit
        room = max(1.0, (scheduler.max_num_batched_tokens - concurrency) / max(chunk, 1.0))
        steps = max(float(decodes), carrying / room)
        share = carrying / max(steps, 1e-9)
        return [Group(steps, concurrency * decodes / max(steps, 1.0), context, share, chunk, (prompt + chunk) / 2)]
    mixed = Group(carrying, concurrency - 1, context, 1, chunk, (prompt + chunk) / 2)
    return [mixed, *decode_groups(concurrency, prompt + 1, round(decodes - carrying))]


def mean_wait_groups(groups: Sequence[Group]) -> list[Group]:
    """The time until a prompt is done, on average over prompts that are taken step after step."""
    left = total = sum(group.times * group.prompts for group in groups)
    waited = []
    for group in groups:
        mine = group.times * group.prompts
        step = mine / group.times
        waited.append(replace(group, times=group.times * (left - (mine - step) / 2) / total))
        left -= mine
    return waited


def merged(groups: Sequence[Group]) -> list[Group]:
    """Groups of about the same size as one, weighted by how often they run: a twentieth of the size is one bin."""
    bins: dict[tuple[int, int], list[Group]] = {}
    for group in groups:
        key = (round(20 * math.log(group.decodes + 1)), round(20 * math.log(group.prompts * group.chunk + 1)))
        bins.setdefault(key, []).append(group)
    return [_mean(bins[key]) for key in sorted(bins)]


def _mean(groups: Sequence[Group]) -> Group:
    """One group that runs as often, decodes as many tokens over as long contexts, and takes as many of prompts."""

    def mean(name: str, weights: Sequence[float]) -> float:
        total = sum(weights)
        values = [float(getattr(group, name)) for group in groups]
        return sum(w * value for w, value in zip(weights, values, strict=True)) / total if total else values[0]

    times = [group.times for group in groups]
    decoded = [group.times * group.decodes for group in groups]
    started = [group.times * group.prompts for group in groups]
    return Group(
        sum(times),
        mean("decodes", times),
        mean("context", decoded),
        mean("prompts", times),
        mean("chunk", started),
        mean("reached", [group.times * group.prompts * group.chunk for group in groups]),
    )
