"""What the device reaches at best, and the rates by shape that `roofline compare` predicts from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_record import DTYPE, Bench, Record, samples_record
from gpu_steps import judge_rows

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, dims, size
from qwenjax.ops import as_product, layers_of, ops_of
from roofline import calibrate
from roofline.measure import Samples, available_memory_bytes, measure_call

if TYPE_CHECKING:
    from jax import Array

_CHAIN = 256  # tiny products in one program; XLA's GPU compiler makes a kernel of each (seen for an H200)


class Sizes(NamedTuple):
    """How large a ceiling is measured: so large that the host's part doesn't show."""

    array_bytes: int
    squares: tuple[int, ...]
    calls: int  # queued one behind another for one sample, since a GPU runs while the host prepares the next


SIZES = {"cpu": Sizes(2**27, (256, 512), 1)}
_GPU_SIZES = Sizes(2**31, (4096, 8192, 16384), 8)


def _sizes() -> Sizes:
    import jax

    sizes = SIZES.get(jax.devices()[0].platform, _GPU_SIZES)
    free = available_memory_bytes() or 2**33
    return sizes._replace(array_bytes=min(sizes.array_bytes, free // 16 // 4096 * 4096))


def measure_bandwidth(bench: Bench, kind: str, sample_s: float) -> None:
    """Bytes/s of summing a large float32 array, or of writing a changed copy of it (both directions counted)."""
    import jax
    import jax.numpy as jnp

    sizes = _sizes()
    array = jnp.ones(sizes.array_bytes // 4, jnp.float32)
    function = jax.jit(jnp.sum if kind == "read" else lambda x: x + 1)
    moved = sizes.array_bytes * (1 if kind == "read" else 2)

    samples = _queued(partial(function, array), sizes.calls, sample_s)
    what = "sum" if kind == "read" else "x + 1 into another array, bytes read and written"
    bench.record["ceilings"].append(
        _ceiling(kind, f"{what}, float32 of {sizes.array_bytes} B", moved, "bytes", samples)
    )


def measure_products(bench: Bench, configs: Sequence[ModelConfig], rows: int, most: int, sample_s: float) -> None:
    """FLOP/s of large square products and of the models' largest weights times `rows` rows, random values.

    Random, because a GPU draws less power on zeros and then runs them faster than any model.
    """
    sizes = _sizes()
    shapes = [(side, side, side) for side in sizes.squares]
    shapes += [(rows, columns, summands) for columns, summands in weight_shapes(configs)[:most]]
    for shape in shapes:
        samples = _product(*shape, sizes.calls, sample_s)
        flops = 2 * math.prod(shape)
        bench.record["ceilings"].append(_ceiling("matmul", " x ".join(map(str, shape)), flops, "flops", samples))


def _product(rows: int, columns: int, summands: int, calls: int, sample_s: float) -> Samples:
    """[rows, summands] times a weight of [columns, summands], as a checkpoint stores it."""
    import jax
    import jax.numpy as jnp

    x, weight = (
        jax.random.normal(jax.random.key(i), shape, jnp.dtype(DTYPE))
        for i, shape in enumerate(((rows, summands), (columns, summands)))
    )
    product = jax.jit(lambda x, weight: jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ()))))
    return _queued(partial(product, x, weight), calls, sample_s)


def _queued(function: Callable[[], Any], calls: int, sample_s: float) -> Samples:
    """Seconds of one call out of so many that are queued before the last is waited for."""

    def call() -> Any:
        for _ in range(calls):
            result = function()
        return result

    return _each(measure_call(call, budget_s=sample_s / 2, least=5), calls)


def measure_launches(bench: Bench) -> None:
    """Seconds of one tiny product in a program of many, and of calling a program of 300 arrays that does nothing."""
    import jax
    import jax.numpy as jnp

    def chain(x: Array, w: Array) -> Array:
        for _ in range(_CHAIN):
            x = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
        return x

    tiny = jnp.ones((1, 16), jnp.float32), jnp.full((16, 16), 0.01, jnp.float32)  # as `roofline calibrate` has it
    launch = _each(calibrate.time_function(chain, tiny), _CHAIN)
    leaves = tuple(jnp.full(8, float(i)) for i in range(300))
    dispatch = calibrate.time_function(lambda *arrays: arrays[0] + arrays[-1], leaves)
    bench.record["ceilings"] += [
        {"name": "launch", "shape": f"one of {_CHAIN} float32 products of 1 x 16 x 16", **samples_record(launch)},
        {"name": "dispatch", "shape": "a call with 300 arrays", **samples_record(dispatch)},
    ]
    _add(bench, "launch_s", launch.median_s)
    _add(bench, "dispatch_s", dispatch.median_s)


def _each(samples: Samples, calls: int) -> Samples:
    return Samples(tuple(seconds / calls for seconds in samples.seconds))


def _ceiling(name: str, shape: str, amount: int, unit: str, samples: Samples) -> Record:
    return {
        "name": name,
        "shape": shape,
        unit: amount,
        f"median_{unit}_per_s": amount / samples.median_s,
        f"best_{unit}_per_s": amount / samples.best_s,
        **samples_record(samples),
    }


def weight_shapes(configs: Sequence[ModelConfig]) -> list[tuple[int, int]]:
    """[columns, summands] of the models' weights, those with most bytes first."""
    totals: dict[tuple[int, int], float] = {}
    for config in configs:
        for op in ops_of(config):
            if op.kind == "matmul":
                product, sizes = as_product(op.einsum), dims(config, block=op.block)
                shape = int(size(product.columns, sizes)), int(size(product.contracted, sizes))
                totals[shape] = totals.get(shape, 0.0) + layers_of(config, op.scope) * math.prod(shape)
    return sorted(totals, key=lambda shape: -totals[shape])


def calibrate_products(
    bench: Bench, configs: Sequence[ModelConfig], steps: Sequence[Step], most: int, limit_s: float
) -> None:
    """Rates of the models' largest weights at the rows of the planned steps; no further shape after `limit_s`."""
    rows = sorted({step.batch * step.query_len for step in steps})
    entries: list[Record] = []
    end = time.perf_counter() + limit_s
    for columns, summands in weight_shapes(configs)[:most]:
        if entries and time.perf_counter() > end:
            break
        entries += [calibrate.measure_product(DTYPE, count, columns, summands) for count in rows]
    _add(bench, "products", {DTYPE: entries})


def calibrate_attention(bench: Bench, configs: Sequence[ModelConfig], steps: Sequence[Step]) -> None:
    """Rates of the model's own attention: decode on a small grid that spans the planned steps, and the prefills."""
    decodes = [step for step in steps if step.phase == "decode"]
    kv_heads = [config.num_key_value_heads for config in configs]
    groups = _ends(config.num_attention_heads // config.num_key_value_heads for config in configs)
    heads = _ends(step.batch * count for step in decodes for count in kv_heads)
    contexts = sorted({step.kv_len for step in decodes})
    shapes = [(head, context, group, 1) for head in heads for context in contexts for group in groups]
    prompts = sorted({step.query_len for step in steps if step.phase == "prefill"})
    shapes += [(max(kv_heads), prompt, groups[0], prompt) for prompt in prompts]
    _add(bench, "attention", [calibrate.measure_attention(DTYPE, *shape) for shape in shapes])


def _ends(values: Iterable[int]) -> list[int]:
    """The least, the geometric middle's nearest and the greatest."""
    levels = sorted(set(values))
    middle = min(levels, key=lambda level: abs(math.log(level * level / (levels[0] * levels[-1]))))
    return sorted({levels[0], middle, levels[-1]})


def calibrate_experts(bench: Bench, most_tokens: int) -> None:
    """Rates of routed experts, gathered and in blocks, up to the tokens of the longest planned step."""
    tokens = sorted({1, 4, *(max(8, min(count, most_tokens)) for count in (64, 1024))})
    _add(bench, "experts", [calibrate.measure_experts(DTYPE, count) for count in tokens])


def calibrate_elementwise(bench: Bench) -> None:
    _add(bench, "elementwise", calibrate.measure_elementwise(DTYPE))


def _add(bench: Bench, table: str, value: Any) -> None:
    """Adds a table; the calibration is complete once all that the planned models need are there."""
    calibration = bench.record["calibration"]
    calibration[table] = value
    calibration["complete"] = all(name in calibration for name in calibration["needed"])
    judge_rows(bench)
