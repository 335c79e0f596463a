"""The bill of one device's memory, with the source of every figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.tables import Table
from roofline.hardware import Hardware
from roofline.memory import MemoryPlan
from roofline.report.units import decimal, gib, quantity, whole

_BYTES = ("capacity", "budget", "weight", "activation", "overhead", "kv_pool")


def memory_record(
    config: ModelConfig, hardware: Hardware, settings: Mapping[str, Any], plan: MemoryPlan
) -> dict[str, Any]:
    return {"model": config.name, "hardware": hardware.id, **settings, **vars(plan)}


def memory_text(record: dict[str, Any]) -> Iterator[str | Table]:
    yield _headline(record)
    sources = record["sources"]
    rows = [
        [name.replace("_", " "), quantity(size, "B"), gib(size), sources[f"{name}_bytes"]]
        for name in _BYTES
        for size in (record[f"{name}_bytes"],)
    ]
    columns = ("memory", "bytes", "of 2^30", "source")
    yield Table("One device's memory", columns, rows, text=("memory", "source"))
    if record["terms"]:
        yield _terms(record)
    concurrency = decimal(record["concurrency_at_max_len"], 2)
    rows = [
        ["KV bytes a token", whole(record["kv_bytes_per_token"]), sources["kv_bytes_per_token"]],
        ["KV tokens", whole(record["kv_tokens"]), sources["kv_tokens"]],
        ["sequences of full length", concurrency, sources["concurrency_at_max_len"]],
    ]
    yield Table("The KV pool", ("cache", "figure", "source"), rows, text=("cache", "source"))


def _terms(record: dict[str, Any]) -> Table:
    """What the engine's version takes, and what it takes outside its budget."""
    rows = [
        [term.name, gib(term.num_bytes), "yes" if term.in_budget else "no", term.kind, term.source]
        for term in record["terms"].values()
    ]
    columns = ("term", "of 2^30", "in the budget", "kind", "source")
    return Table(f"What {record['engine']} takes", columns, rows, text=("term", "in the budget", "kind", "source"))


def _headline(record: dict[str, Any]) -> str:
    on = f"{record['model']} on {record['hardware']}"
    length, pool = whole(record["max_model_len"]), record["kv_pool_bytes"]
    room = f"KV pool {gib(pool)} ({quantity(pool, 'B')}), {whole(record['kv_tokens'])} tokens"
    if record["fits"]:
        return f"{on} fits: {room}, {decimal(record['concurrency_at_max_len'], 2)} sequences of {length} tokens"
    if record["kv_tokens"] and record["kv_tokens"] < record["max_model_len"]:
        return f"{on} doesn't fit: {room}, less than one sequence of {length} tokens"
    resident = sum(record[f"{name}_bytes"] for name in ("weight", "activation", "overhead"))
    return f"{on} doesn't fit: weights, activations and overhead take {gib(resident)} of {gib(record['budget_bytes'])}"
