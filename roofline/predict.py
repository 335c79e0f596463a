"""Step, request and sweep times of a model on a device, from counts and peaks, as lower bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, check_step
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh, check_mesh
from roofline.comms import CommRow, count_comms
from roofline.count import (
    Attention,
    CountRow,
    DtypePolicy,
    Experts,
    Logits,
    count_kv_bytes_per_token,
    count_step,
    count_weight_bytes,
    sum_rows,
)
from roofline.hardware import Hardware, load_hardware
from roofline.utilization import compute_mbu, compute_mfu
from roofline.weight_schemes import WeightScheme

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Bandwidth = Literal["peak", "measured"] | float


@dataclass(frozen=True)
class Device:
    """The two numbers of a roofline, and a link: FLOP/s at the working dtype and bytes/s."""

    flops_per_s: float
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float | None


@dataclass(frozen=True)
class OpTime:
    """One op of a step: its counts, its compute and memory time, and the longer one."""

    row: CountRow
    compute_s: Any
    memory_s: Any
    time_s: Any

    @property
    def bound(self) -> str:
        return "compute" if self.compute_s > self.memory_s else "memory"

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte that must cross the memory interface; None where none must."""
        return self.row.flops / self.row.bytes if self.row.bytes else None


@dataclass(frozen=True)
class StepTime:
    """A whole step. Ops run one after another, so their times add; collectives come on top."""

    ops: tuple[OpTime, ...]
    comms: tuple[CommRow, ...]
    flops: Any
    bytes: Any
    compute_s: Any
    memory_s: Any
    communication_s: Any
    overhead_s: Any
    time_s: Any
    device: Device

    @property
    def bound(self) -> str:
        terms = {
            "compute": sum(op.time_s for op in self.ops if op.bound == "compute"),
            "memory": sum(op.time_s for op in self.ops if op.bound == "memory"),
            "communication": self.communication_s,
        }
        return max(terms, key=lambda name: terms[name])

    @property
    def mfu(self) -> float:
        return compute_mfu(self.flops, self.time_s, self.device.flops_per_s)

    @property
    def mbu(self) -> float:
        return compute_mbu(self.bytes, self.time_s, self.device.bandwidth_bytes_per_s)


def device_of(hardware: Hardware, policy: DtypePolicy, bandwidth: Bandwidth = "peak") -> Device:
    """The roof for these dtypes. Narrow weights compute at the faster of their own and the activations' rate.

    Of a weight scheme, that is the activations' where it stores weights only, and its narrow type's otherwise.
    """
    narrow = (policy.weight,) if policy.scheme is None else policy.scheme.compute
    rates = [
        hardware.peak_flops_per_s[dtype] for dtype in (*narrow, policy.activation) if dtype in hardware.peak_flops_per_s
    ]
    flops_per_s = max(rates) if rates else hardware.flops_per_s(policy.activation)
    link = hardware.peer_link
    return Device(flops_per_s, _bandwidth(hardware, bandwidth), None if link is None else link.one_way_bytes_per_s)


def _bandwidth(hardware: Hardware, bandwidth: Bandwidth) -> float:
    if bandwidth == "peak":
        return hardware.peak_bandwidth_bytes_per_s
    if bandwidth == "measured":
        measured = hardware.measured_bandwidth_bytes_per_s
        if measured is None:
            raise InputError(
                "bandwidth",
                "measured",
                f"nobody's measurement is known for {hardware.id}",
                "Use peak, or give bytes per second.",
            )
        return measured
    if not isinstance(bandwidth, int | float) or not 0 < bandwidth <= hardware.peak_bandwidth_bytes_per_s:
        raise InputError(
            "bandwidth",
            bandwidth,
            f"must be peak, measured, or bytes per second up to the peak {hardware.peak_bandwidth_bytes_per_s:g}",
            "Give for instance 887e9.",
        )
    return float(bandwidth)


def predict_step(
    config: ModelConfig,
    step: Step,
    hardware: Hardware | str,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    weights: str | WeightScheme | None = None,
    attention: Attention = "causal",
    logits: Logits = "last",
    experts: Experts = "expected",
    tp: int = 1,
    ep: int = 1,
    bandwidth: Bandwidth = "peak",
) -> StepTime:
    """Least time of one step: each op takes the longer of FLOPs at the peak and bytes at the bandwidth.

    Bytes are weights and KV cache; activations can stay on the chip, so they are left out, and so are launches. What
    is left out makes real steps slower, never faster. weights: a scheme (awq, fp8, ..., or `stored`) in place of the
    dtype; without both a quantised checkpoint's own.
    """
    check_step(config, step)
    mesh = check_mesh(config, Mesh(tp, ep))
    hardware = load_hardware(hardware) if isinstance(hardware, str) else hardware
    policy = DtypePolicy.for_model(config, dtype, kv_dtype, weights)
    kinds: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "weights": weights}
    rows = count_step(config, step, attention=attention, logits=logits, experts=experts, mesh=mesh, **kinds)
    comms = count_comms(config, step, mesh, policy.activation, logits)
    return time_step(rows, comms, device_of(hardware, policy, bandwidth))


def time_step(rows: tuple[CountRow, ...], comms: tuple[CommRow, ...], device: Device) -> StepTime:
    """Times the counted ops of a step on a device; counts may be numpy arrays."""
    ops = tuple(_op_time(row, device) for row in rows)
    if comms and device.link_bytes_per_s is None:
        raise InputError(
            "tp", comms[0].devices, "no link to another device is known for this hardware", "Use one device."
        )
    communication: Any = (
        sum(comm.sent_bytes for comm in comms) / device.link_bytes_per_s if device.link_bytes_per_s else 0.0
    )
    totals = sum_rows(rows)
    time = sum(op.time_s for op in ops) + communication
    return StepTime(
        ops,
        comms,
        totals["flops"],
        totals["bytes"],
        sum(op.compute_s for op in ops),
        sum(op.memory_s for op in ops),
        communication,
        0.0,
        time,
        device,
    )


def _op_time(row: CountRow, device: Device) -> OpTime:
    compute = row.flops / device.flops_per_s
    memory = row.bytes / device.bandwidth_bytes_per_s
    return OpTime(row, compute, memory, _larger(compute, memory))


def _larger(a: Any, b: Any) -> Any:
    if hasattr(a, "shape") or hasattr(b, "shape"):
        return (a + b + abs(a - b)) / 2
    return max(a, b)


def sweep(
    config: ModelConfig,
    hardware: Sequence[Hardware | str],
    batch: ArrayLike,
    context: ArrayLike,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    weights: str | WeightScheme | None = None,
    bandwidth: Bandwidth = "peak",
) -> dict[str, NDArray[Any]]:
    """Decode steps over every device, batch and context at once: arrays of [device, batch, context].

    Returns time_s, tokens_per_s, flops, bytes and fits. A hundred thousand points take a fraction of a second.
    """
    import numpy as np

    batches, contexts = np.asarray(batch, np.float64).reshape(-1, 1), np.asarray(context, np.float64).reshape(1, -1)
    if batches.min() < 1 or contexts.min() < 1 or contexts.max() > config.context_length:
        raise InputError(
            "context",
            [float(contexts.min()), float(contexts.max())],
            f"batches must be at least 1 and contexts from 1 to {config.context_length}",
            "Choose values within.",
        )
    chips = [load_hardware(item) if isinstance(item, str) else item for item in hardware]
    policy = DtypePolicy.for_model(config, dtype, kv_dtype, weights)
    kinds: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "weights": weights}
    rows = count_step(config, Step.decode(batches, contexts), check=False, **kinds)
    times = [time_step(rows, (), device_of(chip, policy, bandwidth)) for chip in chips]
    resident = count_weight_bytes(config, dtype, weights=weights)
    need = resident + batches * contexts * count_kv_bytes_per_token(config, policy.kv)
    shape = (len(chips), batches.size, contexts.size)
    stacked = np.stack([np.broadcast_to(step.time_s, shape[1:]) for step in times])
    return {
        "time_s": stacked,
        "tokens_per_s": batches / stacked,
        "flops": np.broadcast_to(times[0].flops, shape),
        "bytes": np.broadcast_to(times[0].bytes, shape),
        "fits": np.stack([need <= chip.usable_memory_bytes for chip in chips]),
    }
