"""What a roofline figure shows, as values: a chip's roof, and points of ops and steps from `predict_step`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from roofline.count import DtypePolicy, count_kv_bytes_per_token, count_weight_bytes
from roofline.hardware import Hardware
from roofline.predict import StepTime, device_of, predict_step

Kind = Literal["matmul", "attention", "grouped", "step"]

# Ops that share their operands' shapes, hence their intensity, and are read as one thing.
_TOGETHER = {
    "scores": "attention",
    "values": "attention",
    "experts_gate_up_proj": "experts",
    "experts_down_proj": "experts",
    "shared_gate_up_proj": "shared_expert",
    "shared_down_proj": "shared_expert",
    "shared_expert_gate": "shared_expert",
}
_SAME_PLACE = 1.06  # a fortieth of a decade: closer marks can't be told apart on a page


@dataclass(frozen=True)
class Roof:
    """Ceilings of one machine: FLOP/s, bytes/s, and the bandwidth somebody measured where that is known."""

    name: str
    flops_per_s: float
    bandwidth_bytes_per_s: float
    measured_bandwidth_bytes_per_s: float | None = None

    @property
    def ridge_intensity(self) -> float:
        """FLOP/byte above which compute limits rather than memory."""
        return self.flops_per_s / self.bandwidth_bytes_per_s

    def attainable_flops_per_s(self, intensity: float) -> float:
        return min(self.flops_per_s, self.bandwidth_bytes_per_s * intensity)


@dataclass(frozen=True)
class Point:
    """Ops of one kind that share a place, or a whole step; time_fraction is their share of the step's time."""

    ops: tuple[str, ...]
    kind: Kind
    flops: float
    bytes: float
    time_s: float
    time_fraction: float
    fits: bool

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.time_s


@dataclass(frozen=True)
class ChipPoints:
    """All that one chip puts into the figure; decode_steps and batches run in parallel, from small to large."""

    roof: Roof
    prefill_ops: tuple[Point, ...]
    prefill_step: Point
    decode_ops: tuple[Point, ...]
    decode_batch: int  # the one that decode_ops belong to
    batches: tuple[int, ...]
    decode_steps: tuple[Point, ...]

    @property
    def points(self) -> tuple[Point, ...]:
        return (*self.prefill_ops, self.prefill_step, *self.decode_ops, *self.decode_steps)


def roofline_points(
    config: ModelConfig,
    hardware: Sequence[Hardware],
    *,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    batches: Iterable[int] = (1,),
    context: int = 2048,
    prompt: int = 1024,
) -> tuple[ChipPoints, ...]:
    """Points of a prefill of one prompt and of decode steps against batch, each at its least time on each chip.

    Lengths in tokens. Ops of a decode step are those at the largest batch that fits the first chip's memory (at the
    largest of all where none does). Ops without matrix products have no FLOPs and no place on logarithmic axes: they
    are part of the whole step's time only.
    """
    sizes = tuple(sorted(set(batches)))
    if not sizes:
        raise InputError("batches", [], "names no batch size", "Give at least one.")
    fitting = [size for size in sizes if _fits(config, hardware[0], size * context, dtype, kv_dtype)]
    shown = fitting[-1] if fitting else sizes[-1]
    chips = []
    for chip in hardware:

        def points(step: Step, chip: Hardware = chip) -> tuple[tuple[Point, ...], Point]:
            fits = _fits(config, chip, step.batch * step.kv_len, dtype, kv_dtype)
            return _points(predict_step(config, step, chip, dtype=dtype, kv_dtype=kv_dtype), fits)

        prefill_ops, prefill_step = points(Step.prefill(1, prompt))
        steps = tuple(points(Step.decode(size, context))[1] for size in sizes)
        decode_ops = points(Step.decode(shown, context))[0]
        roof = roof_of(chip, dtype, kv_dtype)
        chips.append(ChipPoints(roof, prefill_ops, prefill_step, decode_ops, shown, sizes, steps))
    return tuple(chips)


def roof_of(chip: Hardware, dtype: str = "bfloat16", kv_dtype: str | None = None) -> Roof:
    """The chip's ceilings at these dtypes: peaks, and the measured bandwidth where it is known."""
    device = device_of(chip, DtypePolicy.of(dtype, kv_dtype))
    return Roof(chip.id, device.flops_per_s, device.bandwidth_bytes_per_s, chip.measured_bandwidth_bytes_per_s)


def _fits(config: ModelConfig, chip: Hardware, tokens: int, dtype: str, kv_dtype: str | None) -> bool:
    kv = tokens * count_kv_bytes_per_token(config, DtypePolicy.of(dtype, kv_dtype).kv)
    return count_weight_bytes(config, dtype) + kv <= chip.usable_memory_bytes


def _points(step: StepTime, fits: bool) -> tuple[tuple[Point, ...], Point]:
    whole = Point(("step",), "step", step.flops, step.bytes, step.time_s, 1.0, fits)
    ops = [
        Point(
            (_TOGETHER.get(op.row.op, op.row.op),),
            _kind(op.row.kind),
            op.row.flops,
            op.row.bytes,
            op.time_s,
            op.time_s / step.time_s,
            fits,
        )
        for op in step.ops
        if op.row.flops and op.row.bytes
    ]
    return merge_points(ops), whole


def _kind(kind: str) -> Kind:
    return "grouped" if kind == "grouped" else "attention" if kind == "attention" else "matmul"


def merge_points(points: Iterable[Point]) -> tuple[Point, ...]:
    """One point for those of a kind that lie on top of each other; its ops stay in the order of the step."""
    merged: list[Point] = []
    for point in points:
        near = next((i for i, other in enumerate(merged) if _same_place(point, other)), None)
        if near is None:
            merged.append(point)
        else:
            merged[near] = _sum(merged[near], point)
    return tuple(merged)


def _same_place(a: Point, b: Point) -> bool:
    pairs = ((a.intensity, b.intensity), (a.flops_per_s, b.flops_per_s))
    return a.kind == b.kind and all(max(pair) < _SAME_PLACE * min(pair) for pair in pairs)


def _sum(a: Point, b: Point) -> Point:
    return Point(
        tuple(dict.fromkeys(a.ops + b.ops)),
        a.kind,
        a.flops + b.flops,
        a.bytes + b.bytes,
        a.time_s + b.time_s,
        a.time_fraction + b.time_fraction,
        a.fits and b.fits,
    )
