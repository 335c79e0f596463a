"""Steps of whole models: weights made on the device, prefill and decode timed as `roofline compare` does, and loops."""

from __future__ import annotations

import dataclasses
import gc
import os
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from gpu_record import DTYPE, Bench, Record, datasheet, measured_hardware, read_card

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, check_step
from roofline import compare
from roofline.calibrated import predict_calibrated
from roofline.count import count_weight_bytes
from roofline.hardware import Hardware
from roofline.measure import measure_call, step_call
from roofline.predict import StepTime, predict_step

if TYPE_CHECKING:
    from jax.stages import Compiled

    from qwenjax.weights import Params

_LOOP_STEPS = 32


def step_record(config: ModelConfig, step: Step) -> Record:
    return {
        "model": config.name,
        "layers": config.num_hidden_layers,
        "dtype": DTYPE,
        "phase": step.phase,
        "batch": step.batch,
        "query_len": step.query_len,
        "context": step.kv_len,
    }


def load_weights(bench: Bench, config: ModelConfig, steps: Sequence[Step]) -> None:
    """Random weights, one array after another, made on the device; the depth is cut where they don't fit."""
    import jax

    from qwenjax.weights import init_params

    bench.models.clear()
    gc.collect()
    cut, notes = compare.cut_to_memory(config, steps, None, DTYPE)
    bench.record["notes"] += [f"{config.name}: {note}" for note in notes]
    before, start = _memory(), time.perf_counter()
    params = jax.block_until_ready(init_params(cut, 0, DTYPE))
    bench.record["weights"].append(
        {
            "model": cut.name,
            "layers": cut.num_hidden_layers,
            "counted_bytes": count_weight_bytes(cut, DTYPE),
            "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
            "seconds_s": time.perf_counter() - start,
            "before": before,
            "after": _memory(),
        }
    )
    bench.models[config.name] = cut, params
    bench.configs[config.name] = cut


def row_of(bench: Bench, config: ModelConfig, step: Step) -> Record | None:
    """The row of this step, if it has been measured."""
    told = step_record(config, step).items()
    return next((row for row in bench.record["rows"] if told <= row.items()), None)


def _memory() -> Record:
    """Bytes in use on the device and their peak so far, None where it doesn't tell; and the host process's peak."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
    return {
        "device_bytes": stats.get("bytes_in_use"),
        "device_peak_bytes": stats.get("peak_bytes_in_use"),
        "host_peak_bytes": host,
    }


def loaded(bench: Bench, config: ModelConfig) -> tuple[ModelConfig, Params]:
    if config.name not in bench.models:
        raise RuntimeError(f"the weights of {config.name} are not on the device")
    return bench.models[config.name]


def compiled_step(config: ModelConfig, step: Step) -> Compiled:
    """The program that the step's calls run: JAX compiles it once, whoever asks first."""
    from qwenjax.model import decode_step, prefill, step_shapes

    function = prefill if step.phase == "prefill" else decode_step
    tree, arguments, cache = step_shapes(config, step.phase, step.batch, step.query_len, step.kv_len, DTYPE)
    return function.lower(config, tree, *arguments, cache).compile()


def compile_steps(bench: Bench, config: ModelConfig, steps: Sequence[Step]) -> None:
    """Compiles a model's steps side by side, on half of the cores, before any of them is timed."""
    cut, _ = loaded(bench, config)
    for step in steps:
        check_step(cut, step)
    start = time.perf_counter()

    def timed(step: Step) -> Record:
        began = time.perf_counter()
        memory = compiled_step(cut, step).memory_analysis()
        return step_record(cut, step) | {
            "seconds_s": time.perf_counter() - began,
            "temp_bytes": None if memory is None else memory.temp_size_in_bytes,
        }

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        found = list(pool.map(timed, steps))
    bench.record["compiles"] += [entry | {"together_s": time.perf_counter() - start} for entry in found]


def measure_step(bench: Bench, config: ModelConfig, step: Step, sample_s: float) -> None:
    """One prefill or decode step, over and over. What was measured is kept first and judged after."""
    import jax

    cut, params = loaded(bench, config)
    check_step(cut, step)
    call = step_call(cut, params, step, DTYPE)
    start = time.perf_counter()
    jax.block_until_ready(call())
    first_s = time.perf_counter() - start
    samples = measure_call(call, budget_s=sample_s, least=5)
    sheet = datasheet(bench.card)
    bench.record["rows"].append(
        step_record(cut, step)
        | {
            "measured_s": samples.median_s,
            "best_s": samples.best_s,
            "tokens_per_s": step.batch * step.query_len / samples.median_s,
            "samples": list(samples.seconds),
            "first_call_s": first_s,
            "datasheet_bound_s": None if sheet is None else predict_step(cut, step, sheet, dtype=DTYPE).time_s,
            "memory": _memory(),
            "card": read_card(),
        }
    )
    judge_rows(bench)


def judge_rows(bench: Bench) -> None:
    """Sets every row against the roof and the prediction, as far as they have been measured by now."""
    hardware = measured_hardware(bench.record)
    for row in bench.record["rows"]:
        step = Step(row["batch"], row["query_len"], row["context"])
        row |= judge(bench.configs[row["model"]], step, hardware, row["measured_s"])


def judge(config: ModelConfig, step: Step, hardware: Hardware | None, measured_s: float) -> Record:
    """The fields of `roofline compare`'s rows that don't need the device; None for what isn't known."""
    names = ("predicted_s", "error", "bound_s", "bound", "mfu", "mbu", "flops", "bytes")
    found: Record = dict.fromkeys(names)
    if hardware is None:
        return found
    roof: StepTime = predict_step(config, step, hardware, dtype=DTYPE)
    found |= {
        "bound_s": roof.time_s,
        "bound": roof.bound,
        "mfu": roof.flops / (measured_s * roof.device.flops_per_s),
        "mbu": roof.bytes / (measured_s * roof.device.bandwidth_bytes_per_s),
        "flops": roof.flops,
        "bytes": roof.bytes,
    }
    if hardware.measured:
        predicted = sum(op.time_s for op in predict_calibrated(config, step, hardware, DTYPE))
        found |= {"predicted_s": predicted, "error": predicted / measured_s - 1}
    return found


def measure_loop(bench: Bench, config: ModelConfig, step: Step, sample_s: float) -> None:
    """Seconds of a decode step in the generation loop on the device, and of steps queued without waiting for each.

    The single call of `rows` waits for every step; what it takes longer than the loop's is the host's share. The loop
    also chooses the tokens (greedy, with log-probabilities).
    """
    cut, params = loaded(bench, config)
    steps = min(_LOOP_STEPS, step.kv_len - 1)
    queued = measure_call(_queued(cut, params, step, steps), budget_s=sample_s)
    looped = measure_call(_looped(cut, params, step, steps), budget_s=sample_s)
    row = row_of(bench, cut, step)
    single = None if row is None else row["measured_s"]
    loop_s = looped.median_s / steps
    bench.record["loops"].append(
        step_record(cut, step)
        | {
            "steps": steps,
            "loop_step_s": loop_s,
            "queued_step_s": queued.median_s / steps,
            "single_step_s": single,
            "host_share": None if single is None else 1 - loop_s / single,
            "loop_samples": list(looped.seconds),
            "queued_samples": list(queued.seconds),
        }
    )


def _queued(config: ModelConfig, params: Params, step: Step, steps: int) -> Any:
    """A call that queues so many decode steps, each on the cache of the one before."""
    import jax.numpy as jnp

    from qwenjax.cache import init_cache
    from qwenjax.model import decode_step

    caches = [init_cache(config, step.batch, step.kv_len, DTYPE)]
    tokens = jnp.zeros(step.batch, jnp.int32)

    def call() -> Any:
        cache = dataclasses.replace(caches[0], lengths=jnp.full(step.batch, step.kv_len - steps, jnp.int32))
        for _ in range(steps):
            logits, cache = decode_step(config, params, tokens, cache)
        caches[0] = cache
        return logits

    return call


def _looped(config: ModelConfig, params: Params, step: Step, steps: int) -> Any:
    """A call that runs so many steps as `qwenjax.generate` does, in one program."""
    import jax.numpy as jnp

    from qwenjax.cache import init_cache
    from qwenjax.generation import Rules, State, run_to_end
    from qwenjax.sampling import sampling_of

    batch = step.batch
    limits = jnp.full(batch, steps + 1, jnp.int32)  # the first token is there before the loop
    rules = Rules(sampling_of(batch), jnp.zeros(0, jnp.int32), limits)
    caches = [init_cache(config, batch, step.kv_len, DTYPE)]

    def call() -> Any:
        cache = dataclasses.replace(caches[0], lengths=jnp.full(batch, step.kv_len - steps, jnp.int32))
        zeros = jnp.zeros(batch, jnp.int32)
        state = State(cache, zeros, jnp.zeros(batch), zeros + 1, jnp.zeros(batch, bool), None)
        tokens_BN, _, last = run_to_end(config, params, rules, state, steps + 1)
        caches[0] = last.cache
        return tokens_BN, last.counts

    _, counts = call()
    if int(counts.min()) != steps + 1:
        raise RuntimeError(f"the loop ran {int(counts.min()) - 1} steps instead of {steps}")
    return call
