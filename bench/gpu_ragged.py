"""Is `jax.lax.ragged_dot` dense here? It against a product with every expert, and against the model's own ways."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gpu_record import DTYPE, Bench, Record, samples_record

from qwenjax.config import ModelConfig
from qwenjax.dims import dims
from roofline.measure import Samples, measure_call

if TYPE_CHECKING:
    from jax import Array

TOKENS = (1, 64)  # times experts per token: 8 and 512 rows for Qwen3-30B-A3B
_ROUTINGS = 8  # taken in turn, so that no expert's weights wait in a cache
_QUEUED = 8
_METADATA = re.compile(r"metadata=\{[^}]*\}")  # it names the JAX function, whatever became of it
_DENSE_SHARE = 0.5  # of the dense product's time or FLOPs, from which on it counts as dense


def measure_ragged(bench: Bench, config: ModelConfig) -> None:
    """Times one product and a whole expert layer by each way, for few and for many rows, and judges ragged_dot."""
    import jax
    import jax.numpy as jnp

    sizes = dims(config, block="experts")
    experts, hidden, width, per_token = (int(sizes[letter]) for letter in "EDFA")

    def normal(i: int, *shape: int) -> Array:
        values: Array = jax.jit(lambda: (jax.random.normal(jax.random.key(i), shape) * 0.02).astype(DTYPE))()
        return values

    stacks = normal(0, experts, 2, width, hidden), normal(1, experts, hidden, width)
    turned = normal(2, experts, hidden, 2 * width), normal(3, experts, width, hidden)  # as ragged_dot takes them
    singles = normal(4, experts, hidden, width), normal(4, experts, width, hidden)
    for tokens in TOKENS:
        x = normal(5, tokens, hidden)
        routings = [_chosen(i, tokens, experts, per_token) for i in range(_ROUTINGS)]
        chosen = [jnp.asarray(one) for one in routings]
        counts = [jnp.asarray(np.bincount(one.reshape(-1), minlength=experts).astype(np.int32)) for one in routings]
        rows = jnp.repeat(x, per_token, axis=0)
        products: list[tuple[str, Any, Array]] = [
            ("ragged_dot", jax.lax.ragged_dot, singles[0]),
            ("dense", _dense_product, singles[1]),
        ]
        cases: list[Any] = [("product", way, run, (rows, held), counts, hidden * width) for way, run, held in products]
        layers: list[tuple[str, Any, Sequence[Array]]] = [("ragged_dot", _ragged_layer, turned)]
        layers += [(way, _layer_by(way), stacks) for way in ("dense", _way(tokens, per_token, experts))]
        cases += [("layer", way, run, (x, *both), chosen, 3 * hidden * width) for way, run, both in layers]
        for what, way, run, arguments, turns, multiplies in cases:
            needed = 2 * tokens * per_token * multiplies
            entry = {"what": what, "way": way, "tokens": tokens, "rows": tokens * per_token, "experts": experts}
            entry |= {"hidden": hidden, "width": width, "needed_flops": needed}
            bench.record["ragged_dot"].append(entry | _run(run, arguments, turns))
    bench.record["answers"]["ragged_dot"] = verdicts(bench.record["ragged_dot"])


def _way(tokens: int, per_token: int, experts: int) -> str:
    from qwenjax.moe_blocks import choose_way

    return choose_way(tokens, per_token, experts)


def _chosen(seed: int, tokens: int, experts: int, per_token: int) -> npt.NDArray[np.int32]:
    """Different experts for each token, any as likely as another, [tokens, experts per token]."""
    everyone = np.tile(np.arange(experts, dtype=np.int32), (tokens, 1))
    return np.random.default_rng(seed).permuted(everyone, axis=1)[:, :per_token]


def _dense_product(x_RD: Array, w_EFD: Array, counts_E: Array) -> Array:
    """Every row with every expert, whatever the counts say.

    One plain product, on weights that lie as it wants them: XLA copies the whole stack of [E, D, F] first.
    """
    import jax

    product: Array = jax.lax.dot_general(x_RD, w_EFD.reshape(-1, x_RD.shape[1]), (((1,), (1,)), ((), ())))
    return product


def _ragged_layer(x_ND: Array, gate_up_EDX: Array, down_EFD: Array, chosen_NA: Array) -> Array:
    """A layer of experts from two ragged products: rows sorted by expert, and each back in its place."""
    import jax
    import jax.numpy as jnp

    from qwenjax.layers import swiglu

    tokens, per_token = chosen_NA.shape
    chosen_R = chosen_NA.reshape(-1)
    order_R = jnp.argsort(chosen_R)
    counts_E = jnp.bincount(chosen_R, length=gate_up_EDX.shape[0]).astype(jnp.int32)
    gate_up_RX = jax.lax.ragged_dot(x_ND[order_R // per_token], gate_up_EDX, counts_E)
    out_RD = jax.lax.ragged_dot(swiglu(gate_up_RX.reshape(len(chosen_R), 2, -1)), down_EFD, counts_E)
    placed_RD = jnp.zeros_like(out_RD).at[order_R].set(out_RD)
    summed: Array = placed_RD.reshape(tokens, per_token, -1).sum(axis=1) / per_token
    return summed


def _layer_by(way: str) -> Callable[..., Any]:
    import jax.numpy as jnp

    from qwenjax.moe import run_experts

    def layer(x_ND: Array, gate_up_ECFD: Array, down_EDF: Array, chosen_NA: Array) -> Array:
        weights = jnp.full((1, *chosen_NA.shape), 1 / chosen_NA.shape[1], x_ND.dtype)
        out: Array = run_experts(x_ND[None], weights, chosen_NA[None], gate_up_ECFD, down_EDF, way)  # type: ignore[arg-type]
        return out[0]

    return layer


def _run(function: Callable[..., Any], arguments: Sequence[Array], routings: Sequence[Array]) -> Record:
    """Seconds of one call, from several queued, and what the compiler says of the program."""
    import jax

    jitted, turn = jax.jit(function), itertools.cycle(routings)
    samples = measure_call(lambda: [jitted(*arguments, next(turn)) for _ in range(_QUEUED)][-1], budget_s=0.3)
    compiled = jitted.lower(*arguments, routings[0]).compile()
    cost: Any = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    return {
        "compiled_flops": cost.get("flops"),
        "compiled_bytes": cost.get("bytes accessed"),
        "temp_bytes": None if memory is None else memory.temp_size_in_bytes,
        "keeps_ragged": "ragged" in _METADATA.sub("", compiled.as_text() or ""),
        **samples_record(Samples(tuple(seconds / _QUEUED for seconds in samples.seconds))),
    }


def verdicts(entries: Sequence[Record]) -> list[Record]:
    """For each number of rows: ragged_dot's product against the dense one, by time and by the compiler's FLOPs."""
    found = []
    for rows in dict.fromkeys(entry["rows"] for entry in entries):
        mine = {(entry["what"], entry["way"]): entry for entry in entries if entry["rows"] == rows}
        ragged, dense = mine["product", "ragged_dot"], mine["product", "dense"]
        layers = {way: entry["median_s"] for (what, way), entry in mine.items() if what == "layer"}
        time_ratio = ragged["median_s"] / dense["median_s"]
        flops = ragged["compiled_flops"]  # none, or less than none, where the compiler doesn't count a kernel
        flops_ratio = flops / (ragged["needed_flops"] * ragged["experts"]) if flops and flops > 0 else None
        answers = [ratio >= _DENSE_SHARE for ratio in (time_ratio, flops_ratio) if ratio is not None]
        verdict = "dense" if all(answers) else "unclear" if any(answers) else "not dense"
        found.append(
            {
                "rows": rows,
                "verdict": verdict,
                "time_of_dense": time_ratio,
                "flops_of_dense": flops_ratio,
                "layer_s": layers,
            }
        )
    return found
