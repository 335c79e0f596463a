"""From the roof to the clock: a step's time as a sum of named terms, each with where its figure comes from.

The first terms follow from counts: the roof of the whole step, its ops one after another, and what the compiled
program does on top of them. Where the step was measured, what the clock adds is parted into what the calibration
expects of these shapes and a residual. The terms always sum to the total.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.predict import OpTime, StepTime

if TYPE_CHECKING:
    from roofline.kernel_rows import Kernel

_COPIES = frozenset(("copy", "transpose", "copy-start"))


@dataclass(frozen=True)
class Term:
    """Part of a step's time, seconds; below zero where the program does better than the terms before it say."""

    name: str
    time_s: float
    source: str
    note: str


@dataclass(frozen=True)
class Waterfall:
    """A step's time in terms that sum to `total_s`: the measured time, or without one what the program must take."""

    phase: str
    batch: int
    query_len: int
    context: int
    total_s: float
    measured_s: float | None
    terms: tuple[Term, ...]


def program_terms(
    ideal: StepTime, kernels: Sequence[Kernel], launch_s: float | None, peaks: str = "datasheet peaks"
) -> tuple[Term, ...]:
    """What a compiled program must take, from the roof up. `ideal` is the step by the inventory, seconds everywhere.

    launch_s is what one kernel's launch costs; None where nobody knows, and the term is then 0 and says so. Not in any
    term: rates that shapes don't reach (see `measured_terms`), and work between programs.
    """
    roof_s = max(ideal.compute_s, ideal.memory_s)
    ops_s = sum(op.time_s for op in ideal.ops)
    products = [kernel for kernel in kernels if kernel.flops and kernel.collective is None]
    copies = [kernel for kernel in kernels if not kernel.flops and _is_copy(kernel)]
    apart = [kernel for kernel in kernels if not kernel.flops and not _is_copy(kernel) and kernel.collective is None]
    exchanges = [kernel for kernel in kernels if kernel.collective is not None]
    executed_s = _executed(ideal, products)
    products_s = sum(op.time_s for op in ideal.ops if op.row.flops)
    runs = sum(kernel.count for kernel in kernels)
    counted = f"exact counts at {peaks}"
    compiled = f"the compiled program's kernels at {peaks}"
    unpriced = "not priced: no launch cost is known" if launch_s is None else f"{launch_s * 1e6:.3g} us each"
    links = f"collectives ({_runs(exchanges):,}) over the link, none hidden behind other work"
    communication = [Term("communication", sum(map(_time, exchanges)), counted, links)] if exchanges else []
    return (
        Term("roof", roof_s, counted, "all FLOPs at the peak or all bytes at the bandwidth, whichever takes longer"),
        Term("ops in turn", ops_s - roof_s, counted, "memory idles while an op computes, and the other way round"),
        Term("extra FLOPs", executed_s - products_s, compiled, "masked pairs of attention, and rows that fill blocks"),
        Term(
            "extra bytes",
            sum(map(_time, products)) - executed_s,
            compiled,
            "activations and temporaries of products through memory, and what is read again",
        ),
        Term(
            "unfused work",
            sum(map(_time, apart)) - (ops_s - products_s),
            compiled,
            f"kernels without a product ({_runs(apart):,}): norms, rotations, sums of partial results",
        ),
        Term("copies", sum(map(_time, copies)), compiled, f"kernels that only move data ({_runs(copies):,})"),
        *communication,
        Term("launches", runs * (launch_s or 0.0), unpriced, f"{runs:,} kernels, one after another"),
    )


def measured_terms(
    terms: Sequence[Term], calibrated_s: float, dispatch_s: float, measured_s: float
) -> tuple[Term, ...]:
    """The terms of a program and what the clock adds to them; they sum to `measured_s`.

    calibrated_s is the whole prediction from measured rates, in which dispatch_s is the host's share.
    """
    known_s = sum(term.time_s for term in terms)
    return (
        *terms,
        Term("dispatch", dispatch_s, "measured here by calibrate", "the host's part of starting the program"),
        Term(
            "rates of these shapes",
            calibrated_s - dispatch_s - known_s,
            "measured here by calibrate",
            "products of these shapes run below the best rate and bandwidth that calibrate saw",
        ),
        Term("residual", measured_s - calibrated_s, "measured here", "measured less predicted: explained by no term"),
    )


def step_waterfall(where: tuple[str, int, int, int], terms: Iterable[Term], measured_s: float | None) -> Waterfall:
    """Terms of the step (phase, batch, query_len, context) with their sum as the total."""
    terms = tuple(terms)
    return Waterfall(*where, sum(term.time_s for term in terms), measured_s, terms)


def _executed(ideal: StepTime, products: Sequence[Kernel]) -> float:
    """The products' least time at the FLOPs that the program executes and the bytes that it need not exceed."""
    executed: dict[str, int] = {}
    for kernel in products:
        executed[kernel.op] = executed.get(kernel.op, 0) + kernel.count * kernel.flops
    rate = ideal.device.flops_per_s
    return sum(_longer(op, executed.get(op.row.op, 0) / rate) for op in ideal.ops if op.row.flops)


def _longer(op: OpTime, compute_s: float) -> float:
    """A fused product may carry another op's name, so fewer FLOPs under a name than it needs say nothing."""
    return max(float(op.time_s), compute_s)


def _time(kernel: Kernel) -> float:
    return kernel.count * (kernel.time_s or 0.0)


def _runs(kernels: Iterable[Kernel]) -> int:
    return sum(kernel.count for kernel in kernels)


def _is_copy(kernel: Kernel) -> bool:
    return kernel.kind in _COPIES
