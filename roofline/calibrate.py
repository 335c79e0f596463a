"""Measures the device that JAX sees: read bandwidth, matrix-product rates by shape, elementwise rates, launch costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from qwenjax.progress import Progress, silent
from roofline.hardware import Figure, Hardware
from roofline.measure import Samples, available_memory_bytes, environment, measure_call

if TYPE_CHECKING:
    from jax import Array

# Weights are taken in turn from a set of about this size, so that none is still in a cache when its turn comes; no
# more than so many of them, since a long chain compiles slowly.
_ROTATING_BYTES = 2**28
_MOST_ARRAYS = 32
# One timed call does about this much work, and no product more than ten times as much: by then its rate is level.
_CALL_FLOPS = {"cpu": 3e9, "gpu": 1e12}
# [columns, summands] of the products: small and large, wide and deep, as decoder layers have them.
_SHAPES = ((1024, 1024), (1024, 3072), (4096, 1024), (6144, 2048), (4096, 4096), (65536, 1024))
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_HEAD_DIM = 128
_CONTEXTS = (128, 512, 2048)
_HEADS = (8, 64)  # KV heads of a whole batch
_GROUPS = (1, 2, 4, 8)  # query heads of one KV head
_EXPERTS, _PER_TOKEN, _EXPERT_SHAPE = 32, 4, (1024, 2048)  # a stack of 805 MB in float32: more than a cache holds
_EXPERT_TOKENS = (1, 4, 64, 128, 256, 1024)  # a few that gather their experts, then one for each size of block


def calibrate(progress: Progress = silent) -> Hardware:
    """Measures this device in under two minutes on a small CPU; the result is the hardware `here`.

    Peaks are the best figures seen (the roof of this machine); the tables under `measured` hold medians by shape, for
    predictions.
    """
    import jax

    platform = jax.devices()[0].platform
    dtypes = ("float32", "bfloat16") if platform == "cpu" else ("bfloat16", "float32")
    progress("read bandwidth", 0.0)
    reads = [measure_read_bandwidth(size) for size in (2**28, 2**30)]
    products: dict[str, list[dict[str, float]]] = {}
    for i, dtype in enumerate(dtypes):
        # The second dtype is for the record; the first is what runs here by default.
        plan = list(_product_plan(platform, dtype, thorough=i == 0))
        products[dtype] = []
        for n, (rows, columns, summands) in enumerate(plan):
            progress(
                f"{dtype} product {rows} x {columns} x {summands}",
                0.02 + (0.68 if i == 0 else 0.08) * n / len(plan) + 0.68 * i,
            )
            products[dtype].append(measure_product(dtype, rows, columns, summands))
    progress("attention products", 0.78)
    decodes = [(heads, context, group, 1) for heads in _HEADS for context in _CONTEXTS for group in _GROUPS]
    prefills = [(_HEADS[0], context, 2, context) for context in _CONTEXTS]
    attention = [measure_attention(dtypes[0], *shape) for shape in (*decodes, *prefills)]
    progress("routed experts", 0.92)
    experts = [measure_experts(dtypes[0], tokens) for tokens in _EXPERT_TOKENS]
    progress("elementwise ops and launches", 0.97)
    measured = {
        "environment": {key: value for key, value in environment().items() if value is not None},
        "dtype": dtypes[0],
        "products": products,
        "attention": attention,
        "experts": experts,
        "elementwise": measure_elementwise(dtypes[0]),
        "launch_s": _launch_s(),
        "dispatch_s": _dispatch_s(),
    }
    progress("done", 1.0)
    return _as_hardware(measured, reads, platform)


def _as_hardware(measured: dict[str, Any], reads: list[float], platform: str) -> Hardware:
    env = measured["environment"]
    date = env["date"][:10]

    def figure(value: float, unit: str, note: str) -> Figure:
        return Figure(value, unit, "measured here", f"roofline calibrate on {env['device']}", date, note)

    streamed = [
        entry["bytes_per_s"] for table in measured["products"].values() for entry in table if entry["rows"] <= 2
    ]
    figures = {
        "peak_bandwidth_bytes_per_s": figure(
            max(reads + streamed), "B/s", "best read, of a large array or of weights in turn"
        )
    }
    for dtype, table in measured["products"].items():
        best = max(entry["best_flops_per_s"] for entry in table)
        figures[f"peak_flops_per_s.{dtype}"] = figure(best, "FLOP/s", "best of the matrix products measured")
    memory = available_memory_bytes()
    figures["memory_bytes"] = figure(
        memory or 2**33, "B", "memory free for this process" if memory else "not told by the system; 8 GiB taken"
    )
    for table in measured["products"].values():
        for entry in table:
            del entry["best_flops_per_s"], entry["bytes_per_s"]
    return Hardware("here", str(env["device"]), "as JAX reports it", platform, figures, measured=measured)


def measure_read_bandwidth(num_bytes: int) -> float:
    """Bytes/s of summing a large array, the best of several runs."""
    import jax
    import jax.numpy as jnp

    array = jnp.ones(num_bytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    return num_bytes / measure_call(lambda: total(array), budget_s=1.0, least=5).best_s


def _product_plan(platform: str, dtype: str, thorough: bool) -> Iterator[tuple[int, int, int]]:
    limit = 10 * _call_flops(platform)
    if platform == "cpu" and dtype != "float32":
        limit /= 20  # XLA widens 16-bit products on CPU: many times slower
    shapes = _SHAPES if thorough else _SHAPES[-2:-1]
    rows = (*_ROWS, 2048, 4096, 8192) if platform != "cpu" else _ROWS
    for columns, summands in shapes:
        for count in rows if thorough else rows[::3]:
            if 2.0 * count * columns * summands <= limit:
                yield count, columns, summands


def _call_flops(platform: str) -> float:
    return _CALL_FLOPS.get(platform, _CALL_FLOPS["gpu"])


def _rotating(shape: tuple[int, ...], dtype: str, most: float) -> list[Array]:
    import jax.numpy as jnp

    each = math.prod(shape) * jnp.dtype(dtype).itemsize
    count = min(_MOST_ARRAYS, max(2, -(-_ROTATING_BYTES // each)), max(2, int(most)))
    return [jnp.full(shape, 0.01 + 0.001 * i, dtype) for i in range(count)]


def measure_product(dtype: str, rows: int, columns: int, summands: int) -> dict[str, float]:
    """FLOP/s of [rows, summands] times [columns, summands] transposed, one weight after another."""
    import jax
    import jax.numpy as jnp

    from qwenjax.layers import precision_of

    each_flops = 2.0 * rows * columns * summands
    weights = _rotating((columns, summands), dtype, _call_flops(jax.devices()[0].platform) / each_flops)

    @jax.jit
    def chain(x: Array, weights: list[Array]) -> Array:
        for weight in weights:
            y = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision_of(dtype))
            x = x + y[:, :1] * jnp.asarray(1e-9, dtype)  # so that no product can start before the last is done
        return x

    start = jnp.ones((rows, summands), dtype)
    samples = measure_call(lambda: chain(start, weights), budget_s=0.4, least=5)
    flops = each_flops * len(weights)
    num_bytes = sum(weight.nbytes for weight in weights)
    return {
        "rows": rows,
        "columns": columns,
        "summands": summands,
        "flops_per_s": flops / samples.median_s,
        "best_flops_per_s": flops / samples.best_s,
        "bytes_per_s": num_bytes / samples.best_s,
    }


def measure_attention(dtype: str, heads: int, context: int, group: int, tokens: int) -> dict[str, Any]:
    """FLOP/s of the model's own attention, its softmax's time included, over caches in turn."""
    import jax
    import jax.numpy as jnp

    from qwenjax.layers import attention

    each_flops = 4.0 * heads * group * tokens * context * _HEAD_DIM
    pairs = _call_flops(jax.devices()[0].platform) / each_flops
    shape = (1, heads, context, _HEAD_DIM)
    keys, values = _rotating(shape, dtype, pairs), _rotating(shape, dtype, pairs)
    mask = jnp.tril(jnp.ones((tokens, context), bool), context - tokens)[None]

    @jax.jit
    def chain(q: Array, keys: list[Array], values: list[Array]) -> Array:
        for key, value in zip(keys, values, strict=True):
            q = q + attention(q, key, value, mask) * jnp.asarray(1e-9, dtype)
        return q

    start = jnp.ones((1, tokens, heads, group, _HEAD_DIM), dtype)
    samples = measure_call(lambda: chain(start, keys, values), budget_s=0.4, least=5)
    rate = each_flops * len(keys) / samples.median_s
    return {"heads": heads, "context": context, "group": group, "tokens": tokens, "flops_per_s": rate}


def measure_experts(dtype: str, tokens: int) -> dict[str, Any]:
    """FLOP/s of the rows that the model's own routed experts run, all between router and sum included."""
    import jax
    import jax.numpy as jnp

    from qwenjax.moe import run_experts
    from qwenjax.moe_blocks import block_rows, choose_way

    width, hidden = _EXPERT_SHAPE
    stacks = jnp.full((_EXPERTS, 2, width, hidden), 0.01, dtype), jnp.full((_EXPERTS, hidden, width), 0.01, dtype)
    ranks = jnp.argsort(jax.random.uniform(jax.random.key(0), (1, tokens, _EXPERTS)), axis=-1)
    chosen = ranks[..., :_PER_TOKEN]
    weights = jnp.full(chosen.shape, 1 / _PER_TOKEN, dtype)
    x = jnp.ones((1, tokens, hidden), dtype)
    layers = 8 if tokens <= 4 else 2

    def chain(x: Array, gate_up: Array, down: Array) -> Array:
        for layer in range(layers):
            # Other experts each time, as every layer has its own, and none known before the last layer is done.
            shift = layer * _PER_TOKEN + jnp.isnan(x[0, 0, 0])
            y = run_experts(x, weights, (chosen + shift) % _EXPERTS, gate_up, down)
            x = x + y * jnp.asarray(1e-9, dtype)
        return x

    seconds = time_function(chain, (x, *stacks)).median_s / layers
    rows, block = tokens * _PER_TOKEN, 1
    if choose_way(tokens, _PER_TOKEN, _EXPERTS) == "grouped":
        block = block_rows(rows, _EXPERTS)
        counts = jnp.bincount(chosen.reshape(-1), length=_EXPERTS)
        rows = int((-(-counts // block)).sum()) * block
    return {"block": block, "rows": rows, "flops_per_s": 6.0 * rows * width * hidden / seconds}


def measure_elementwise(dtype: str) -> dict[str, float]:
    """Bytes/s of the model's own elementwise functions, counting what an unfused op would read and write."""
    import jax.numpy as jnp

    from qwenjax.layers import apply_rope, rms_norm, swiglu

    x = jnp.ones((1, 512, 4096), dtype)
    half = jnp.ones((1, 512, 64), dtype)
    pair = jnp.ones((1, 512, 2, 4096), dtype)
    qkv = jnp.ones((1, 512, 8, 4, 128), dtype)

    def rope(qkv: Array) -> tuple[Array, Array]:
        """From the projection's layout to queries and keys as attention takes them."""
        q, k = qkv[..., :-2, :].reshape(1, 512, 16, 128), qkv[..., -2, :]
        return apply_rope(q, half, half), apply_rope(k, half, half).transpose(0, 2, 1, 3)

    weight = jnp.ones(4096, dtype)
    calls: dict[str, tuple[Callable[..., Any], tuple[Array, ...], int]] = {
        "norm": (lambda a: rms_norm(a, weight, 1e-6), (x,), 2 * x.nbytes),
        "rope": (rope, (qkv,), 2 * (qkv.nbytes // 4 * 3)),
        "swiglu": (swiglu, (pair,), pair.nbytes + pair.nbytes // 2),
        "residual": (jnp.add, (x, x + 1), 3 * x.nbytes),
    }
    return {
        name: num_bytes / time_function(function, arguments).median_s
        for name, (function, arguments, num_bytes) in calls.items()
    }


def time_function(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Samples:
    import jax

    jitted = jax.jit(function)
    return measure_call(lambda: jitted(*arguments), budget_s=0.3)


def _launch_s() -> float:
    """Seconds that one small op of a compiled program takes, from a chain of 256 that can't be fused."""
    import jax
    import jax.numpy as jnp

    def chain(x: Array, w: Array) -> Array:
        for _ in range(256):
            x = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
        return x

    return time_function(chain, (jnp.ones((1, 16), jnp.float32), jnp.ones((16, 16), jnp.float32) * 0.01)).median_s / 256


def _dispatch_s() -> float:
    """Seconds to call a compiled function of 300 arrays that does next to nothing: a step's fixed cost on the host."""
    import jax.numpy as jnp

    arrays = [jnp.full(8, float(i)) for i in range(300)]
    return time_function(lambda *leaves: leaves[0] + leaves[-1], tuple(arrays)).median_s
