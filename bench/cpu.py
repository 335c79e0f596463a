"""Qwen3-0.6B's shape on this CPU in float32: decode and prefill against the machine's own rates and transformers.

`python bench/cpu.py [--json]` measures everything in one run, the two implementations in turns, and prints ratios: they
carry over to another day, times don't. Torch and transformers are left out where they aren't installed.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from qwenjax.checkpoint.loading import load
from qwenjax.checkpoint.saving import save
from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.hf_writer import to_hf
from qwenjax.tables import Table, render
from roofline.calibrate import measure_product, measure_read_bandwidth
from roofline.count import count_step, sum_rows
from roofline.measure import environment, fill_params, step_call

MODEL = "Qwen3-0.6B"
CONTEXT, PROMPT = 1024, 128
_ROUNDS = 8


def measure_steps(config: ModelConfig) -> list[dict[str, Any]]:
    """A decode step and a prefill: the best of the rounds over what the machine reads or multiplies at best."""
    params = fill_params(config, "float32")
    steps = {"decode": Step.decode(1, CONTEXT), "prefill": Step.prefill(1, PROMPT)}
    ours = {name: step_call(config, params, step, "float32") for name, step in steps.items()}
    theirs = dict(_torch_calls(config))
    rates: dict[str, list[float]] = {"decode": [], "prefill": []}
    seconds: dict[str, list[float]] = {name: [] for name in (*ours, *(f"torch {name}" for name in theirs))}
    for _ in range(_ROUNDS):  # all of them in turns, as a machine that others use changes by the minute
        rates["decode"].append(measure_read_bandwidth(2**30))
        best = measure_product("float32", PROMPT, config.hidden_size, config.intermediate_size)
        rates["prefill"].append(best["flops_per_s"])
        for name, call in ours.items():
            seconds[name].append(_timed(call))
        for name, call in theirs.items():
            seconds[f"torch {name}"].append(_timed(call))
    return [_row(config, name, step, max(rates[name]), seconds) for name, step in steps.items()]


def _row(config: ModelConfig, name: str, step: Step, rate: float, seconds: dict[str, list[float]]) -> dict[str, Any]:
    ideal = sum_rows(count_step(config, step, dtype="float32"))
    work = ideal["bytes"] if name == "decode" else ideal["flops"]
    torch = seconds.get(f"torch {name}")
    return {
        "step": name,
        "seconds": seconds[name],
        "rate": rate,
        "share_of_rate": work / min(seconds[name]) / rate,
        "torch_seconds": torch,
        "over_torch": statistics.median(seconds[name]) / statistics.median(torch) if torch else None,
    }


def _timed(call: Callable[[], Any]) -> float:
    jax.block_until_ready(call())  # once more than needed: what ran before has emptied the caches
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def _torch_calls(config: ModelConfig) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The same steps in transformers with its default attention; the cache is cut back after each decode step."""
    try:
        import torch
        import transformers
    except ImportError:
        return
    torch.set_grad_enabled(False)
    stated = transformers.AutoConfig.for_model(**to_hf(config))
    model = transformers.AutoModelForCausalLM.from_config(stated, dtype=torch.float32).eval()
    prompt = torch.randint(0, config.vocab_size, (1, PROMPT))
    cache = transformers.DynamicCache(config=stated)
    model(torch.randint(0, config.vocab_size, (1, CONTEXT - 1)), past_key_values=cache, use_cache=True)
    token = torch.randint(0, config.vocab_size, (1, 1))

    def decode() -> None:
        model(token, past_key_values=cache, use_cache=True)
        cache.crop(-1)  # drops the new token

    yield "decode", decode
    yield "prefill", lambda: model(prompt, use_cache=True, logits_to_keep=1).logits.numpy()


def measure_loading(config: ModelConfig) -> dict[str, Any]:
    """A checkpoint of 2.4 GB, loaded here and read with plain safetensors, in turns from the page cache."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder, stored = Path(name) / "checkpoint", replace(config, dtype="float32")
        save(stored, fill_params(config, "float32"), folder)
        files = sorted(folder.glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        plain: list[float] = []
        ours: list[float] = []
        for _ in range(4):
            start = time.perf_counter()
            read = [load_file(path) for path in files]
            plain.append(time.perf_counter() - start)
            del read
            start = time.perf_counter()
            _, params = load(folder)
            jax.block_until_ready(params)
            ours.append(time.perf_counter() - start)
            del params
    return {
        "bytes": size,
        "seconds": ours,
        "safetensors_seconds": plain,
        "over_safetensors": min(ours) / min(plain),
    }


def record() -> dict[str, Any]:
    config = ModelConfig.from_hf(MODEL)
    return {**environment(), "model": MODEL, "steps": measure_steps(config), "loading": measure_loading(config)}


def table(found: dict[str, Any]) -> Table:
    body = [
        [row["step"], f"{1e3 * min(row['seconds']):,.1f}", f"{row['share_of_rate']:.1%}", _ratio(row["over_torch"])]
        for row in found["steps"]
    ]
    loading = found["loading"]
    body.append(["load", f"{1e3 * min(loading['seconds']):,.0f}", "-", _ratio(loading["over_safetensors"])])
    columns = ("step", "ms", "of the machine's rate", "time over the other's")
    return Table(f"{found['model']} in float32 on {found.get('device', 'this CPU')}", columns, body, text=("step",))


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> None:
    found = record()
    if "--json" not in sys.argv[1:]:
        print(render([table(found)]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
