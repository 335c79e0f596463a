"""The timing harness: warm-up, block until ready, repeats, and the record of the machine it ran on."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenjax.config import ModelConfig
from qwenjax.dims import Step

if TYPE_CHECKING:
    from jax import Array

    from qwenjax.weights import Params


@dataclass(frozen=True)
class Samples:
    """Wall times of repeated calls, seconds, without the first (which compiles)."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best_s(self) -> float:
        return min(self.seconds)


def measure_call(call: Callable[[], Any], *, budget_s: float = 1.0, least: int = 3, most: int = 50) -> Samples:
    """Times a call that returns arrays: once to compile, then `least` to `most` times within the budget."""
    import jax

    jax.block_until_ready(call())
    seconds: list[float] = []
    end = time.perf_counter() + budget_s
    while len(seconds) < least or (time.perf_counter() < end and len(seconds) < most):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return Samples(tuple(seconds))


def step_call(config: ModelConfig, params: Params, step: Step, dtype: str) -> Callable[[], Any]:
    """A call that runs one prefill or decode step of this size over and over, reusing its donated cache."""
    import jax.numpy as jnp

    from qwenjax.cache import init_cache
    from qwenjax.model import decode_step, prefill

    caches = [init_cache(config, step.batch, step.kv_len, dtype)]
    if step.phase == "prefill":
        tokens = _tokens(config, (step.batch, step.query_len))
        lengths = jnp.full(step.batch, step.query_len, jnp.int32)

        def run_prefill() -> Any:
            logits, caches[0] = prefill(config, params, tokens, lengths, caches[0])
            return logits, caches[0]

        return run_prefill

    token = _tokens(config, (step.batch,))
    full = jnp.full(step.batch, step.kv_len - 1, jnp.int32)  # the new token makes kv_len

    def run_decode() -> Any:
        logits, caches[0] = decode_step(config, params, token, dataclasses.replace(caches[0], lengths=full.copy()))
        return logits, caches[0]

    return run_decode


def _tokens(config: ModelConfig, shape: tuple[int, ...]) -> Array:
    import jax

    tokens: Array = jax.random.randint(jax.random.key(0), shape, 0, config.vocab_size)
    return tokens


def fill_params(config: ModelConfig, dtype: str) -> Params:
    """Parameters of the right size and spread for timing, made at memory speed: a hash of each element's number.

    Speed doesn't depend on the values as long as they are finite and not zero; use `qwenjax.init_params` for a model.
    """
    import jax

    from qwenjax.weights import param_shapes

    filled: Params = jax.tree.map(lambda leaf: _filler(leaf.shape, dtype)(), param_shapes(config, dtype))
    return filled


@cache
def _filler(shape: tuple[int, ...], dtype: str) -> Callable[[], Array]:
    """Makes an array of this shape; compiled once for all layers that have one."""
    import jax
    import jax.numpy as jnp

    def make() -> Array:
        number = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        mixed = number * jnp.uint32(2654435769)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)  # so that rows are unlike: a router must spread tokens
        centred: Array = ((mixed ^ (mixed >> 13)) >> 8).astype(jnp.float32) * 2**-24 - 0.5
        return (centred * 0.07).astype(jnp.dtype(dtype))  # the spread of a normal with 0.02

    return jax.jit(make)


def environment() -> dict[str, Any]:
    """What a measurement depends on: device, host, versions, date, and the commit if this is a checkout."""
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else _cpu_name(),
        "platform": device.platform,
        "num_devices": jax.device_count(),
        "cpu_cores": os.cpu_count(),
        "memory_bytes": available_memory_bytes(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def available_memory_bytes() -> int | None:
    """Bytes that this process may still take on the device JAX sees, None where the system doesn't say."""
    import jax

    device = jax.devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else int(limit) - int(stats.get("bytes_in_use", 0))
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, read from .git without running git."""
    root = Path(__file__).resolve().parent.parent / ".git"
    try:
        head = (root / "HEAD").read_text(encoding="ascii").strip()
        if not head.startswith("ref: "):
            return head
        return (root / head.removeprefix("ref: ")).read_text(encoding="ascii").strip()
    except OSError:
        return None
