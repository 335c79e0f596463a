"""qwenjax's own GPU kernels against plain JAX on this device: `python bench/own_kernels.py [--json]`.

A prefill and decode steps of a few layers with random weights, in bfloat16: with no kernel, with each kind alone, and
with all. How far the logits are from those without (in their standard deviations; bfloat16 alone makes some hundredths,
and a mixture's choice may flip), and the time of a step over that without. Nobody has run the kernels on a GPU yet:
this is the first thing to run on one. Elsewhere plain JAX runs in their place, and nothing differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax.cache import init_cache
from qwenjax.config import ModelConfig
from qwenjax.kernels.choice import NAMES, NO_KERNELS, Kernels
from qwenjax.model import decode_step, prefill
from qwenjax.tables import Table, render
from qwenjax.weights import Params, init_params
from roofline.measure import environment, measure_call

MODELS = ("Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B")
CHOICES = {
    "none": NO_KERNELS,
    **{f"{name} alone": Kernels(off=frozenset(NAMES) - {name}) for name in NAMES},
    "all": Kernels(),
}


def compare_model(config: ModelConfig, batch: int, prompt: int, sample_s: float) -> list[dict[str, Any]]:
    """One row for each choice of kernels: differences and times of a prefill and of a decode step after it."""
    params = jax.block_until_ready(init_params(config, 0, "bfloat16"))
    rows = []
    reference: dict[str, Any] = {}
    for name, kernels in CHOICES.items():
        found = _run(config, params, kernels, batch, prompt, sample_s)
        reference = reference or found
        row: dict[str, Any] = {"model": config.name, "layers": config.num_hidden_layers, "kernels": name}
        for phase in ("prefill", "decode"):
            logits, plain = (run[phase][0].astype(jnp.float32) for run in (found, reference))
            row[f"{phase}_difference"] = float(jnp.abs(logits - plain).max() / plain.std())
            row[f"{phase}_s"] = found[phase][1]
            row[f"{phase}_over_plain"] = found[phase][1] / reference[phase][1]
        rows.append(row)
    return rows


def _run(
    config: ModelConfig, params: Params, kernels: Kernels, batch: int, prompt: int, sample_s: float
) -> dict[str, tuple[jax.Array, float]]:
    """Logits and median time of both phases; every row has another length."""
    tokens = jax.random.randint(jax.random.key(1), (batch, prompt), 0, config.vocab_size)
    lengths = jnp.asarray([prompt - i % (prompt // 2) for i in range(batch)], jnp.int32)
    caches = [init_cache(config, batch, prompt + 64, "bfloat16")]

    def first() -> jax.Array:
        logits, caches[0] = prefill(config, params, tokens, lengths, caches[0], kernels=kernels)
        return logits

    def following() -> jax.Array:
        cache = dataclasses.replace(caches[0], lengths=lengths.copy())
        logits, caches[0] = decode_step(config, params, tokens[:, 0], cache, kernels=kernels)
        return logits

    found = {}
    for phase, call in (("prefill", first), ("decode", following)):
        logits = jax.block_until_ready(call())
        found[phase] = logits, measure_call(call, budget_s=sample_s).median_s
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    shown = ("difference", "over_plain")
    columns = ("model", "kernels", *(f"{phase} {name}" for phase in ("prefill", "decode") for name in shown))
    body = [
        [
            row["model"],
            row["kernels"],
            *(f"{row[f'{phase}_{name}']:.3f}" for phase in ("prefill", "decode") for name in shown),
        ]
        for row in rows
    ]
    return Table("Own kernels against plain JAX", columns, body, text=("model", "kernels"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Own kernels against plain JAX on this device.")
    parser.add_argument("--model", action="append", help=f"may be repeated [{', '.join(MODELS)}]")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--sample-s", type=float, default=0.5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for name in options.model or MODELS:
        config = ModelConfig.from_hf(name).with_layers(options.layers)
        for batch in map(int, options.batches.split(",")):
            found = compare_model(config, batch, options.prompt, options.sample_s)
            rows += [{"batch": batch, "prompt": options.prompt, **row} for row in found]
    if not options.json:
        print(render([table(rows)]))
    print(json.dumps({**environment(), "rows": rows}))


if __name__ == "__main__":
    main()
