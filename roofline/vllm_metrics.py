"""Counters of vLLM's /metrics page: the Prometheus text before and after some work, and the difference between them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final

from qwenjax.errors import InputError
from roofline.vllm_log import read_text

FLOPS: Final = "vllm:estimated_flops_per_gpu_total"
READ_BYTES: Final = "vllm:estimated_read_bytes_per_gpu_total"
WRITE_BYTES: Final = "vllm:estimated_write_bytes_per_gpu_total"
OPTION: Final = "--vllm-metrics"
# What the difference needs, under the names of several versions.
_COUNTERS: Final[dict[str, tuple[str, ...]]] = {
    "flops": (FLOPS,),
    "read_bytes": (READ_BYTES,),
    "write_bytes": (WRITE_BYTES,),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "output_tokens": ("vllm:generation_tokens_total",),
    "cached_tokens": (
        "vllm:prompt_tokens_cached_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
    ),
    "requests": ("vllm:request_success_total", "vllm:e2e_request_latency_seconds_count"),
    "steps": ("vllm:iteration_tokens_total_count",),
    "preemptions": ("vllm:num_preemptions_total",),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
}
_NEEDED: Final = ("flops", "prompt_tokens", "output_tokens", "requests")
_WHOLE: Final = ("prompt_tokens", "output_tokens", "requests", "cached_tokens", "preemptions", "draft_tokens")
_SAMPLE = re.compile(
    r'^([A-Za-z_:][\w:.]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+([-+.\w]+)(?:\s+-?[\d.]+)?(?:\s+#.*)?$'
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class CounterDelta:
    """What an engine counted between two pages; FLOPs and bytes are per GPU, tokens and requests of all engines.

    None where a version doesn't have the counter. `engines` are the data-parallel engines that counted something.
    """

    flops: float
    read_bytes: float | None
    write_bytes: float | None
    prompt_tokens: int
    output_tokens: int
    requests: int
    steps: int | None
    cached_tokens: int
    preemptions: int
    draft_tokens: int
    engines: tuple[str, ...]
    model_name: str


def load_counter_delta(before: str | Path, after: str | Path, model: str = "") -> CounterDelta:
    """Reads two /metrics pages and subtracts them; `model` chooses among several that one server holds.

    Raises InputError where a file isn't such a page, lacks the counters, or doesn't follow the other.
    """
    pages = [read_samples(read_text(OPTION, path), str(path)) for path in (before, after)]
    for page, path in zip(pages, (before, after), strict=True):
        _check_page(page, str(path))
    return _subtract(pages[0], pages[1], str(before), str(after), model)


def read_samples(text: str, path: str = "the page") -> Samples:
    """Samples of a Prometheus page by name and labels; raises InputError for a line that can't be one."""
    samples: Samples = {}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _SAMPLE.match(stripped)
        try:
            value = float(match[3]) if match else None
        except ValueError:
            value = None
        if match is None or value is None:
            raise InputError(
                f"{OPTION} {path}",
                stripped,
                f"line {number} is not a sample of a Prometheus page",
                "Give what `curl http://HOST:PORT/metrics` prints.",
            )
        samples[match[1], tuple(sorted(_LABEL.findall(match[2] or "")))] = value
    return samples


def _check_page(samples: Samples, path: str) -> None:
    names = {name for name, _ in samples}
    if not any(name.startswith("vllm:") for name in names):
        problem = "has no counters of vLLM's"
        raise InputError(f"{OPTION} {path}", None, problem, "Give what `curl http://HOST:PORT/metrics` prints.")
    for field in _NEEDED:
        if not names.intersection(_COUNTERS[field]):
            remedy = "Start vLLM with --enable-mfu-metrics." if field == "flops" else "Give the whole page."
            raise InputError(f"{OPTION} {path}", None, f"has no counter {_COUNTERS[field][0]}", remedy)


def _subtract(before: Samples, after: Samples, before_path: str, after_path: str, model: str) -> CounterDelta:
    name = _model_of(after, after_path, model)
    deltas = {field: _delta(before, after, field, name) for field in _COUNTERS}
    _check_deltas(deltas, f"{OPTION} {before_path} {after_path}")
    whole = {field: int(deltas[field] or 0) for field in _WHOLE}
    steps = deltas["steps"]
    return CounterDelta(
        flops=deltas["flops"] or 0.0,
        read_bytes=deltas["read_bytes"],
        write_bytes=deltas["write_bytes"],
        steps=None if steps is None else int(steps),
        engines=tuple(sorted({dict(labels).get("engine", "") for counter, labels in after if counter == FLOPS})),
        model_name=name,
        **whole,
    )


def _check_deltas(deltas: dict[str, float | None], paths: str) -> None:
    """Refuses pages that don't follow each other, or between which nothing was counted."""
    changes = {field: change for field, change in deltas.items() if change is not None}
    for field, change in changes.items():
        if not isfinite(change):
            problem = f"{_COUNTERS[field][0]} is not a finite number"
            raise InputError(paths, None, problem, "Take the pages again.")
    back = {field: change for field, change in changes.items() if change < 0}
    if back and all(change <= 0 for change in changes.values()):
        raise InputError(paths, None, "every counter goes backwards", "Give BEFORE first, then AFTER.")
    if back:
        field, change = next(iter(back.items()))
        problem = f"{_COUNTERS[field][0]} falls by {-change:,.0f}: the server started anew between them"
        raise InputError(paths, None, problem, "Take both pages from one run of the server.")
    for field in ("output_tokens", "requests"):
        if not changes[field]:
            problem = f"{_COUNTERS[field][0]} doesn't move: nothing finished between them"
            raise InputError(paths, None, problem, "Take AFTER once some requests are done.")
    if not changes["flops"]:
        remedy = "Start vLLM with --enable-mfu-metrics, without which it stays where it is."
        raise InputError(paths, None, f"{FLOPS} doesn't move although tokens were made", remedy)


def _model_of(samples: Samples, path: str, model: str) -> str:
    """The model_name label of the samples to add up."""
    names = sorted({dict(labels).get("model_name", "") for name, labels in samples if name == FLOPS})
    if len(names) == 1:
        return names[0]
    wanted = model.rpartition("/")[2].lower()
    matching = [name for name in names if wanted and name.rpartition("/")[2].lower() == wanted]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(names)
    raise InputError(f"{OPTION} {path}", None, f"holds several models ({listed})", "Give MODEL as one of these names.")


def _delta(before: Samples, after: Samples, field: str, model: str) -> float | None:
    """A counter's increase over all engines of a model, under the first of its names that the later page has."""
    for name in _COUNTERS[field]:
        found = {labels: value for (counter, labels), value in after.items() if counter == name}
        ours = {labels: value for labels, value in found.items() if dict(labels).get("model_name", model) == model}
        if ours:
            return sum(value - before.get((name, labels), 0.0) for labels, value in ours.items())
    return None
