"""Measures a GPU and whole models on it in one run of under eight minutes: `python bench/gpu.py -o FILE`.

Ceilings (copy, read, bf16 products, launches), `jax.lax.ragged_dot`, prefill and decode steps of Qwen2.5-7B, Qwen3-8B
and Qwen3-30B-A3B with random weights set against `roofline compare`'s prediction, and the kernels that autotuning chose
against those of the GPU-free compile. Cases run in order of value until the budget ends; the file is written after
each. A GPU isn't needed to try it: `--model tiny.json --prompts 16 --batches 1,2 --budget-s 20`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gpu_ceilings import (
    calibrate_attention,
    calibrate_elementwise,
    calibrate_experts,
    calibrate_products,
    measure_bandwidth,
    measure_launches,
    measure_products,
)
from gpu_kernels import compare_kernels
from gpu_ragged import measure_ragged
from gpu_record import DTYPE, Bench, card_of, describe_machine, read_card
from gpu_report import summary, text
from gpu_split import measure_split
from gpu_steps import compile_steps, load_weights, measure_loop, measure_step

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from qwenjax.tables import render
from roofline.hardware import load_hardware

PARTS = ("ceilings", "steps", "kernels", "ragged_dot", "calibration", "loops", "splits")
_ON_WEIGHTS = ("steps", "kernels", "loops", "splits")
MODELS = ("Qwen3-8B", "Qwen3-30B-A3B", "Qwen2.5-7B")
_CALIBRATION_SHARE = 0.15  # of the budget, for products by shape


class Case(NamedTuple):
    part: str
    name: str
    run: Callable[[Bench], None]


class Plan(NamedTuple):
    """What is asked for: models as read, batches of decode steps, prompt lengths, and the context of decode steps."""

    configs: tuple[ModelConfig, ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    context: int
    budget_s: float
    sample_s: float
    shapes: int

    def decode(self, batch: int) -> Step:
        return Step.decode(batch, self.context)

    def main_steps(self) -> tuple[Step, Step, Step]:
        """Decode of the fewest and of the most rows, and the prefill of as many tokens as decode steps attend."""
        return self.decode(min(self.batches)), self.decode(max(self.batches)), Step.prefill(1, self.context)

    def steps(self) -> list[Step]:
        return [*map(self.decode, self.batches), *(Step.prefill(1, prompt) for prompt in self.prompts)]


def plan_cases(plan: Plan) -> Iterator[Case]:
    """All cases, the most telling first: the roof, each model's main steps, rates to predict by, and the rest."""
    for kind in ("read", "copy"):
        yield Case("ceilings", f"ceiling: {kind}", partial(measure_bandwidth, kind=kind, sample_s=plan.sample_s))
    products = partial(measure_products, configs=plan.configs, rows=max(plan.prompts), most=plan.shapes)
    yield Case("ceilings", "ceiling: matmul", partial(products, sample_s=plan.sample_s))
    yield Case("ceilings", "ceiling: launch", measure_launches)
    for config in plan.configs:
        yield from _main_cases(plan, config)
    yield from _rate_cases(plan)
    # Dense models first: a mixture's prefill compiles for a minute.
    for config in sorted(plan.configs, key=lambda config: config.num_experts):
        yield from _other_cases(plan, config)


def choose_cases(cases: Iterator[Case], parts: Sequence[str]) -> Iterator[Case]:
    """The cases of some parts, and a model's weights where one of them follows that runs it."""
    weights: Case | None = None
    for case in cases:
        if case.part == "weights":
            weights = case
        elif case.part in parts:
            if weights is not None and case.part in _ON_WEIGHTS:
                yield weights
                weights = None
            yield case


def _rate_cases(plan: Plan) -> Iterator[Case]:
    configs, steps = plan.configs, plan.steps()
    sparse = [config for config in configs if config.num_experts]
    if sparse:
        yield Case("ragged_dot", "ragged_dot", partial(measure_ragged, config=sparse[0]))
    limit_s = plan.budget_s * _CALIBRATION_SHARE
    products = partial(calibrate_products, configs=configs, steps=steps, most=plan.shapes, limit_s=limit_s)
    yield Case("calibration", "calibrate: products", products)
    yield Case("calibration", "calibrate: attention", partial(calibrate_attention, configs=configs, steps=steps))
    yield Case("calibration", "calibrate: elementwise", calibrate_elementwise)
    if sparse:
        most = max(step.batch * step.query_len for step in steps)
        yield Case("calibration", "calibrate: experts", partial(calibrate_experts, most_tokens=most))


def _main_cases(plan: Plan, config: ModelConfig) -> Iterator[Case]:
    """A model's steps, the main ones first. Of a mixture only one prefill: it compiles for long and tells enough."""
    least, most, prefill = plan.main_steps()
    others = [plan.decode(batch) for batch in plan.batches]
    others += [] if config.num_experts else [Step.prefill(1, prompt) for prompt in plan.prompts]
    steps = list(dict.fromkeys((least, prefill, most, *others)))
    yield Case("weights", f"{config.name}: weights", partial(load_weights, config=config, steps=steps))
    yield Case(
        "steps", f"{config.name}: compile {len(steps)} steps", partial(compile_steps, config=config, steps=steps)
    )
    for step in steps:
        yield _case("steps", plan, config, step)
    yield _case("kernels", plan, config, least)


def _other_cases(plan: Plan, config: ModelConfig) -> Iterator[Case]:
    least, most, prefill = plan.main_steps()
    steps = [least, most, prefill]
    yield Case("weights", f"{config.name}: weights again", partial(load_weights, config=config, steps=steps))
    yield _case("loops", plan, config, least)
    for step in (least, prefill):
        yield _case("splits", plan, config, step)
    yield _case("kernels", plan, config, prefill)


def _case(part: str, plan: Plan, config: ModelConfig, step: Step) -> Case:
    runs: dict[str, Callable[..., None]] = {
        "steps": partial(measure_step, sample_s=plan.sample_s),
        "loops": partial(measure_loop, sample_s=plan.sample_s),
        "kernels": compare_kernels,
        "splits": measure_split,
    }
    told = f"{step.phase} batch {step.batch}, {step.query_len} new of {step.kv_len}"
    return Case(part, f"{config.name}: {part.removesuffix('s')}, {told}", partial(runs[part], config=config, step=step))


def run_cases(bench: Bench, cases: Sequence[Case], budget_s: float, start: float) -> None:
    """Runs the cases that still start within the budget, keeps what went wrong, and writes the file after each."""
    record = bench.record
    for number, case in enumerate(cases, start=1):
        elapsed = time.perf_counter() - start
        if elapsed >= budget_s:
            record["skipped"].append(case.name)
            continue
        print(f"{elapsed:6.1f} s  {number}/{len(cases)}  {case.name}", file=sys.stderr, flush=True)
        problem = _attempt(case, bench)
        seconds = time.perf_counter() - start - elapsed
        record["cases"].append({"name": case.name, "seconds_s": seconds, "error": problem, "card": read_card()})
        if problem is not None:
            record["failed"].append(case.name)
            print(f"          failed: {problem}", file=sys.stderr, flush=True)
            gc.collect()
        record["elapsed_s"] = time.perf_counter() - start
        bench.write()
    bench.models.clear()


def _attempt(case: Case, bench: Bench) -> str | None:
    """Runs one case; the first line of what it raises, whatever that is: the others still have their turn."""
    try:
        case.run(bench)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        lines = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"
    return None


def read_models(names: Sequence[str]) -> tuple[list[ModelConfig], list[tuple[str, str]]]:
    """The configs that can be read, and the name and problem of each other."""
    configs, problems = [], []
    for name in names:
        try:
            configs.append(ModelConfig.from_hf(name))
        except InputError as error:
            problems.append((name, str(error).splitlines()[0]))
    return configs, problems


def main(arguments: Sequence[str] | None = None) -> int:
    start = time.perf_counter()
    options = _options().parse_args(arguments)
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu" and not options.model:
        print(
            "gpu.py: device: cpu is no GPU, and 8 billion parameters in bfloat16 would take it hours. Run it on a GPU,"
            " or try it with a small --model.",
            file=sys.stderr,
        )
        return 2
    configs, problems = read_models(options.model or MODELS)
    context = options.context or sorted(options.prompts)[len(options.prompts) // 2]
    plan = Plan(
        tuple(configs), options.batches, options.prompts, context, options.budget_s, options.sample_s, options.shapes
    )
    cases = list(choose_cases(plan_cases(plan), options.only)) if configs else []
    bench = Bench(_empty_record(options, plan, cases), Path(options.output))
    try:
        bench.card = (options.card and load_hardware(options.card).id) or card_of(device.device_kind)
    except InputError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    bench.record["environment"] = describe_machine(options.commit) | {"hardware": bench.card}
    print(_card_text(bench), file=sys.stderr, flush=True)
    for name, problem in problems:
        bench.record["cases"].append({"name": f"model {name}", "seconds_s": 0.0, "error": problem, "card": None})
        bench.record["failed"].append(f"model {name}")
    try:
        bench.write()
        bench.programs.unlink(missing_ok=True)
    except OSError as error:
        print(f"gpu.py: --output: {options.output} can't be written: {error.strerror}", file=sys.stderr)
        return 2
    run_cases(bench, cases, options.budget_s, start)
    bench.record["status"] = "done"
    bench.record["elapsed_s"] = time.perf_counter() - start
    bench.write()
    print(render(text(bench.record)))
    print(json.dumps(summary(bench.record, options.output), allow_nan=False))
    return 1 if bench.record["failed"] else 0


def _empty_record(options: argparse.Namespace, plan: Plan, cases: Sequence[Case]) -> dict[str, object]:
    sparse = any(config.num_experts for config in plan.configs)
    return {
        "status": "running",
        "elapsed_s": 0.0,
        "budget_s": options.budget_s,
        "environment": {},
        "dtype": DTYPE,
        "models": [config.name for config in plan.configs],
        "batches": list(plan.batches),
        "prompts": list(plan.prompts),
        "context": plan.context,
        "plan": [case.name for case in cases],
        "cases": [],
        "skipped": [],
        "failed": [],
        "notes": [],
        "answers": {},
        "ceilings": [],
        "calibration": {
            "dtype": DTYPE,
            "needed": ["products", "attention", "elementwise", "launch_s", *(["experts"] if sparse else [])],
            "complete": False,
        },
        "ragged_dot": [],
        "weights": [],
        "compiles": [],
        "rows": [],
        "loops": [],
        "waterfalls": [],
        "ops": [],
        "kernels": [],
    }


def _card_text(bench: Bench) -> str:
    env = bench.record["environment"]
    card = env["card"] or {}
    return (
        f"{env['device']} ({bench.card or 'no known card'}), driver {card.get('driver_version', '-')},"
        f" jax {env['jax']}, jaxlib {env['jaxlib']}, commit {env['commit']}, {env['date']};"
        f" now {env['at_start'] or 'no nvidia-smi'}"
    )


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default="gpu_bench.json", metavar="FILE", help="[default: gpu_bench.json]")
    parser.add_argument("--budget-s", type=float, default=420.0, help="no case starts after so many seconds [420]")
    parser.add_argument("--model", action="append", metavar="MODEL", help=f"may be repeated [{', '.join(MODELS)}]")
    parser.add_argument("--prompts", type=_counts, default=(128, 1024, 4096), metavar="A,B", help="[128,1024,4096]")
    parser.add_argument("--batches", type=_counts, default=(1, 8, 32), metavar="A,B", help="of decode steps [1,8,32]")
    parser.add_argument("--context", type=int, help="tokens that decode steps attend [the middle one of the prompts]")
    parser.add_argument("--only", type=_parts, default=PARTS, metavar="A,B", help=f"parts to run [{','.join(PARTS)}]")
    parser.add_argument("--sample-s", type=float, default=1.0, help="seconds of repeats of a step [1]")
    parser.add_argument("--shapes", type=int, default=4, metavar="N", help="weights whose products are calibrated [4]")
    parser.add_argument("--card", metavar="ID", help="the card's id in `roofline hardware` [from the device's name]")
    parser.add_argument("--commit", help="of this checkout, where it was copied without .git")
    return parser


def _counts(value: str) -> tuple[int, ...]:
    counts = tuple(sorted({int(part) for part in value.split(",")}))
    if min(counts) < 1:
        raise ValueError(value)
    return counts


def _parts(value: str) -> tuple[str, ...]:
    parts = tuple(value.split(","))
    if not set(parts) <= set(PARTS):
        raise ValueError(value)
    return parts


if __name__ == "__main__":
    sys.exit(main())
