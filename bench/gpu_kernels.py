"""Which kernels the compiler made on the device, autotuned, against those of the GPU-free compile of the same step."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from gpu_record import DTYPE, Bench, Record, datasheet, measured_hardware
from gpu_steps import compiled_step, loaded, row_of, step_record

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from roofline.gpu_compile import CompileJob, check_compiler, compile_step
from roofline.gpu_target import check_target
from roofline.hardware import Hardware
from roofline.hlo import Instruction, Module, parse_hlo
from roofline.kernel_rows import read_kernels

if TYPE_CHECKING:
    from roofline.kernel_rows import Kernel

# What a backend's settings say of a kernel, and not of when it runs.
_TUNED = ("fusion_backend_config", "gemm_backend_config", "cudnn_conv_backend_config", "custom_call_config")


class Made(NamedTuple):
    """What a kernel is made as: its op of the inventory, its kind, and the settings that were chosen for it."""

    op: str
    kind: str
    settings: str


class Program(NamedTuple):
    """A compiled step: its kernels as rows, and how often each way of making one runs in it."""

    kernels: tuple[Kernel, ...]
    made: Counter[Made]

    @property
    def num_kernels(self) -> int:
        return self.made.total()

    @property
    def kinds(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for made, count in self.made.items():
            counts[made.kind] += count
        return dict(counts.most_common())


def read_program(module: Module, job: CompileJob) -> Program:
    """The kernels of a compiled program, a loop's as often as it turns, with the settings of those that have some."""
    instructions = {i.name: i for body in module.computations.values() for i in body.instructions}
    kernels = read_kernels(module, job)
    made: Counter[Made] = Counter()
    for kernel in kernels:
        made[Made(kernel.op, kernel.kind, _settings(instructions[kernel.name]))] += kernel.count
    return Program(kernels, made)


def _settings(instruction: Instruction) -> str:
    """Tilings, warps, stages and algorithms as compact JSON, "" where nothing is set."""
    found = {key: value for key, value in instruction.backend_config.items() if key in _TUNED and value}
    return json.dumps(found, separators=(",", ":"), sort_keys=True) if found else ""


def difference(here: Program, there: Program) -> list[Record]:
    """The ways of making a kernel that run more or less often here than there: {op, kind, settings, here, gpu_free}."""
    return [
        made._asdict() | {"here": here.made[made], "gpu_free": there.made[made]}
        for made in sorted({*here.made, *there.made})
        if here.made[made] != there.made[made]
    ]


def kinds_by_op(program: Program) -> Record:
    """Kernels of each op by kind: {"o_proj": {"triton gemm": 36}}."""
    found: Record = {}
    for made, count in program.made.items():
        kinds = found.setdefault(made.op, {})
        kinds[made.kind] = kinds.get(made.kind, 0) + count
    return found


def compare_kernels(bench: Bench, config: ModelConfig, step: Step) -> None:
    """Reads the step's kernels as the device's compiler made them, then the GPU-free compile's, and what differs."""
    cut, _ = loaded(bench, config)
    chip, roof = datasheet(bench.card), measured_hardware(bench.record)
    text = compiled_step(cut, step).as_text() or ""
    name = f"{cut.name}_{step.phase}_{step.batch}_{step.query_len}_{step.kv_len}"
    _keep_text(bench, f"{name}_here", text)
    hardware = chip or roof
    if hardware is None:
        raise RuntimeError("neither the card nor its rates are known, and kernels are timed by them")
    here = read_program(parse_hlo(text), CompileJob(cut, step, hardware, dtype=DTYPE))
    entry = step_record(cut, step) | _program_record(here) | {"gpu_free": None, "problem": _missing(chip)}
    bench.record["kernels"].append(entry)  # kept even where the compile for the absent card fails
    if chip is None or entry["problem"]:
        return
    compiled = compile_step(cut, step, chip, dtype=DTYPE)
    _keep_text(bench, f"{name}_gpu_free", compiled.hlo)
    absent = parse_hlo(compiled.hlo)
    there = read_program(absent, CompileJob(cut, step, chip, dtype=DTYPE))
    row = row_of(bench, cut, step)
    measured_s = None if row is None else row["measured_s"]
    predicted_s = _time_s(there.kernels)
    entry["gpu_free"] = _program_record(there) | {
        "hardware": chip.id,
        "temp_bytes": compiled.temp_bytes,
        "compile_s": compiled.compile_s,
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "error": None if measured_s is None else predicted_s / measured_s - 1,
    }
    if roof is not None:  # the same kernels by the rates that were measured, and a launch for each
        rated = read_program(absent, CompileJob(cut, step, roof, dtype=DTYPE))
        launches = there.num_kernels * bench.record["calibration"].get("launch_s", 0.0)
        at_rates_s = _time_s(rated.kernels) + launches
        error = None if measured_s is None else at_rates_s / measured_s - 1
        entry["gpu_free"] |= {"at_measured_rates_s": at_rates_s, "error_at_measured_rates": error}
    entry["differing"] = difference(here, there)


def _program_record(program: Program) -> Record:
    tuned = [made._asdict() | {"count": count} for made, count in program.made.items() if made.settings]
    return {
        "num_kernels": program.num_kernels,
        "kinds": program.kinds,
        "kinds_by_op": kinds_by_op(program),
        "bytes": sum(kernel.count * kernel.bytes for kernel in program.kernels),
        "settings": tuned,
    }


def _time_s(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.count * (kernel.time_s or 0.0) for kernel in kernels)


def _keep_text(bench: Bench, name: str, text: str) -> None:
    """Adds a program's text to an archive beside the record, for questions that nobody has asked yet."""
    with zipfile.ZipFile(bench.programs, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.hlo", text)


def _missing(chip: Hardware | None) -> str | None:
    """Why no GPU-free compile can be had here, None where it can."""
    if chip is None:
        return "the device is no card of `roofline hardware`; name it with --card"
    try:
        check_compiler()
        check_target(chip)
    except InputError as error:
        return str(error)
    return None
