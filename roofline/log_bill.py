"""From the card's memory to the tokens in its cache: what a log's pool is left of, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roofline.memory import BLOCK_TOKENS
from roofline.reconcile import LogAccount


@dataclass(frozen=True)
class BillRow:
    """One step: the bytes that it adds or takes, what is left, and whose figure it is."""

    step: str
    change_bytes: float
    left_bytes: float
    source: str


def bill_of_log(account: LogAccount) -> tuple[BillRow, ...]:
    """The rows from the device's memory to the KV pool of one rank; empty where the log and options say too little.

    Figures are the log's where it has them and ours elsewhere. What they don't explain has a row of its own.
    """
    pool, total, utilization = account.log.get("kv_pool_bytes"), account.total, account.utilization
    if pool is None or total is None or utilization is None:
        return ()
    rows: list[BillRow] = []
    left = 0.0
    for step, change, source in (*_device(account, total, utilization), *_taken(account)):
        left += change
        rows.append(BillRow(step, change, left, source))
    if abs(pool.value - left) > pool.step / 2:
        what = "rounding of the log's figures" if abs(pool.value - left) <= 4 * pool.step else "not explained"
        rows.append(BillRow(what, pool.value - left, pool.value, "what is left to the log's pool"))
    return (*rows, *_blocks(account, pool.value))


def _device(account: LogAccount, total: float, utilization: float) -> Iterator[tuple[str, float, str]]:
    chip = account.hardware
    if chip is not None and chip.memory_bytes > total:
        yield "memory of the card", chip.memory_bytes, chip.figures["memory_bytes"].source
        yield "kept back from CUDA", total - chip.memory_bytes, "the device's own report"
    else:
        yield "memory as CUDA reports it", total, "the log" if "total_bytes" in account.log.readings else "the device"
    yield "outside the utilisation", -(1 - utilization) * total, f"gpu_memory_utilization {utilization:g}"


def _taken(account: LogAccount) -> Iterator[tuple[str, float, str]]:
    log = account.log
    weights = log.value("weight_bytes")
    yield "weights", -(weights or account.weights), "the log" if weights else "counted"
    consumed, other = log.value("consumed_bytes"), log.value("non_torch_bytes")
    if other is None and consumed is not None:
        other = consumed - (weights or account.weights)
    for step, said, ours in (
        ("non-torch", other, account.term("non-torch")),
        ("activations", log.value("activation_bytes"), account.term("activations")),
    ):
        if said is not None or ours is not None:
            yield step, -(said if said is not None else ours or 0.0), "the log" if said is not None else account.rules
    graphs = account.graph_estimate()
    if graphs and not account.graphs_outside():
        yield "CUDA graphs", -graphs, "the log's estimate"


def _blocks(account: LogAccount, pool: float) -> Iterator[BillRow]:
    """The part of the pool that its whole blocks take."""
    tokens = account.tokens_of_log()
    if tokens is not None and tokens[0] > 0:
        used = tokens[0] * account.per_token
        blocks = tokens[0] // BLOCK_TOKENS
        step = f"{tokens[0]:,} tokens in {blocks:,} blocks"
        yield BillRow(step, used - pool, used, f"{account.per_token:,.0f} B a token, the pool as printed")
