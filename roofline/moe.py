"""What a batch does to a mixture of experts: how many experts a decode step touches, and the weights that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh
from roofline.count import Experts, count_step, distinct_experts
from roofline.hardware import Hardware
from roofline.predict import Bandwidth, predict_step
from roofline.weight_schemes import WeightScheme


@dataclass(frozen=True)
class ExpertsRow:
    """A decode step of `batch` sequences: distinct experts of a layer, weight bytes and time of the step."""

    batch: int
    distinct_experts: float
    weight_bytes: float  # the looked-up rows of the embedding left out: batch x hidden_size elements
    weight_bytes_per_token: float
    saving: float  # fraction of the bytes that a step with every expert would read
    time_s: float | None


def count_experts(
    config: ModelConfig,
    batches: Sequence[int],
    *,
    context: int = 1,
    hardware: Hardware | None = None,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    weights: str | WeightScheme | None = None,
    tp: int = 1,
    ep: int = 1,
    bandwidth: Bandwidth = "peak",
) -> tuple[ExpertsRow, ...]:
    """Rows by batch under uniform routing; context, in tokens, matters for the times only. Refuses dense models."""
    if not config.is_moe:
        raise InputError(
            "MODEL", config.name or config.model_type, "is dense: it has no experts",
            "Give a mixture-of-experts model, such as Qwen3-30B-A3B.",
        )  # fmt: skip

    kinds: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "weights": weights}

    def row(batch: int) -> ExpertsRow:
        step = Step.decode(batch, context)
        mesh = Mesh(tp, ep)
        read = _weight_bytes(config, step, "expected", kinds, mesh)
        most = _weight_bytes(config, step, "all", kinds, mesh)
        time_s = None
        if hardware is not None:
            time_s = predict_step(config, step, hardware, tp=tp, ep=ep, bandwidth=bandwidth, **kinds).time_s
        return ExpertsRow(batch, distinct_experts(config, step), read, read / batch, max(0.0, 1 - read / most), time_s)

    return tuple(row(batch) for batch in batches)


def _weight_bytes(config: ModelConfig, step: Step, experts: Experts, kinds: dict[str, Any], mesh: Mesh) -> Any:
    rows = count_step(config, step, **kinds, experts=experts, mesh=mesh)
    return sum(row.weight_bytes for row in rows if row.kind != "gather")
