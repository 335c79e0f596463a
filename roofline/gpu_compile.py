"""Compiling the real model's step for a GPU that isn't there: XLA's CUDA compiler, told what the chip is.

Fusions, copies, aliasing, custom calls and temporaries are what the chip would run. Not real is what a chip's own
timings decide: nothing is autotuned, so tilings of matrix products, and whether Triton or cuBLAS runs them, can differ.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, check_step
from qwenjax.errors import InputError
from qwenjax.hf_writer import to_hf
from qwenjax.sharding import Mesh, check_mesh
from roofline.count import count_kv_bytes_per_token, count_weight_bytes
from roofline.gpu_target import DNN_VERSION, check_target, target_config
from roofline.gpu_worker import JOBS
from roofline.hardware import Hardware, load_hardware

INSTALL = 'pip install "qwenjax-roofline[gpu-compile]"'
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
_CUDNN = "nvidia-cudnn-cu13"
_AMPLE = 4  # times its arguments, the memory of a card that is taken to be large enough for a model that doesn't fit
DTYPES = ("bfloat16", "float16", "float32")  # what the model's weights, activations and cache run in
MOST_DEVICES = 1024  # of one mesh; more is a slip of the pen


@dataclass(frozen=True)
class CompileJob:
    """One step for one chip, or for a mesh of them that split heads, widths and vocabulary: "1x1x8" is one host's 8."""

    config: ModelConfig
    step: Step
    hardware: Hardware
    mesh: str = "1x1x1"
    dtype: str = "bfloat16"

    @property
    def num_devices(self) -> int:
        return prod(mesh_sizes(self.mesh))


@dataclass(frozen=True)
class Compiled:
    """What the compiler made for one device: its HLO text, and the bytes that it set aside."""

    hlo: str
    compile_s: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int  # outputs that lie where arguments lay
    jax: str
    assumed_memory_bytes: int | None  # in place of the card's, where weights and cache don't fit it

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries of one device at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def mesh_sizes(mesh: str) -> tuple[int, int, int]:
    """Slices, hosts and devices of each host out of "1x2x8"."""
    parts = mesh.lower().split("x")
    remedy = "Give slices x hosts x devices of a host, such as 1x1x8."
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise InputError("--mesh", mesh, "is no mesh of three sizes", remedy)
    sizes = tuple(map(int, parts))
    if prod(sizes) > MOST_DEVICES:
        raise InputError("--mesh", mesh, f"has more than {MOST_DEVICES} devices", remedy)
    return sizes[0], sizes[1], sizes[2]


def check_job(job: CompileJob) -> CompileJob:
    """Refuses what no compiler need be asked: an unknown chip, a step or a split that the model doesn't have."""
    check_target(job.hardware)
    check_step(job.config, job.step)
    if job.dtype not in DTYPES:
        raise InputError("--dtype", job.dtype, "is not a dtype that the model runs in", f"Use {', '.join(DTYPES)}.")
    devices = job.num_devices
    check_mesh(job.config, Mesh(tp=devices))
    vocabulary = job.config.vocab_size
    if vocabulary % devices:
        problem = f"{devices} devices don't divide the {vocabulary} rows of the vocabulary"
        raise InputError("--mesh", job.mesh, problem, "Use a divisor of it.")
    return job


def check_compiler() -> str:
    """The version of cuDNN to name to the compiler; refuses an installation that can't compile for a GPU."""
    jax = metadata.version("jax")
    for package in _PLUGINS:
        version = _version(package)
        if version is None:
            problem = "isn't installed, and it is what compiles for NVIDIA GPUs (Linux only; no GPU or driver needed)"
            raise InputError(package, None, problem, f"Install it: {INSTALL}")
        if version != jax:
            remedy = f'Install the same version: pip install "jax=={version}", or {package}=={jax}.'
            raise InputError(package, version, f"doesn't fit jax {jax}", remedy)
    return ".".join((_version(_CUDNN) or DNN_VERSION).split(".")[:2])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def compile_steps(jobs: Sequence[CompileJob]) -> list[Compiled]:
    """Compiles every job in one process beside this one, whose own JAX stays as it is; a refusal is an InputError."""
    for job in jobs:
        check_job(job)
    dnn_version = check_compiler()
    assumed = [_ample_memory(job) for job in jobs]
    with tempfile.TemporaryDirectory(prefix="roofline-") as name:
        folder = Path(name)
        requests = [_request(job, memory, dnn_version) for job, memory in zip(jobs, assumed, strict=True)]
        (folder / JOBS).write_text(json.dumps(requests))
        log = _run(folder)
        return [_result(folder, i, job, memory, log) for i, (job, memory) in enumerate(zip(jobs, assumed, strict=True))]


def compile_step(
    config: ModelConfig, step: Step, hardware: Hardware | str, *, mesh: str = "1x1x1", dtype: str = "bfloat16"
) -> Compiled:
    """Compiles one prefill or decode step for a chip, see `compile_steps`."""
    chip = load_hardware(hardware) if isinstance(hardware, str) else hardware
    return compile_steps([CompileJob(config, step, chip, mesh, dtype)])[0]


def _ample_memory(job: CompileJob) -> int | None:
    """Where weights and cache alone don't fit the card: a memory that holds them.

    Short of memory the compiler would compute layers again and again, which helps nobody where nothing fits.
    """
    mesh = Mesh(tp=job.num_devices)
    tokens = job.step.batch * job.step.kv_len
    need = count_weight_bytes(job.config, job.dtype, mesh)
    need += tokens * count_kv_bytes_per_token(job.config, job.dtype, mesh)
    return _AMPLE * need if need > job.hardware.usable_memory_bytes else None


def _request(job: CompileJob, memory_bytes: int | None, dnn_version: str) -> dict[str, Any]:
    return {
        "config": to_hf(job.config),
        "batch": job.step.batch,
        "query_len": job.step.query_len,
        "context": job.step.kv_len,
        "dtype": job.dtype,
        "chip": job.hardware.id,
        "target": target_config(job.hardware, memory_bytes, dnn_version),
        "topology": job.mesh.lower(),
    }


def _run(folder: Path) -> str:
    """Runs the worker to its end; what it and the compiler write goes to a text that only a failure shows."""
    packages = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (packages, os.environ.get("PYTHONPATH")) if part)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-m", "roofline.gpu_worker", str(folder)]
    ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    log = ended.stderr.decode(errors="replace")
    return f"{log}\nFatal: ended by signal {-ended.returncode}\n" if ended.returncode < 0 else log


def _result(folder: Path, number: int, job: CompileJob, memory_bytes: int | None, log: str) -> Compiled:
    told = folder / f"{number}.json"
    figures = json.loads(told.read_text()) if told.exists() else {"refusal": _last_words(log)}
    if "input" in figures:
        raise InputError(*figures["input"])
    if "refusal" in figures:
        raise _refusal(job, figures["refusal"])
    return Compiled(hlo=(folder / f"{number}.hlo").read_text(), assumed_memory_bytes=memory_bytes, **figures)


def _refusal(job: CompileJob, text: str) -> InputError:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "it ended without a word")
    return InputError("--hardware", job.hardware.id, f"the compiler refuses: {first.rstrip('.: ')}", _remedy(text))


def _remedy(text: str) -> str:
    """What to try, by what the compiler's message is about."""
    low = text.lower()
    if "unknown flag" in low or "flags in xla_flags" in low:
        return "Correct the environment variable XLA_FLAGS."
    if any(word in low for word in ("ptxas", "libdevice", "nvjitlink", "cudnn", "no ptx compilation provider")):
        return f"Part of the extra is missing: {INSTALL}"
    if "triton" in low:
        return "Try XLA_FLAGS=--xla_gpu_enable_triton_gemm=false."
    if "memory" in low or "resource_exhausted" in low or "signal 9" in low:
        return "Try fewer --layers, or a smaller batch."
    return "Try --layers 2, another chip, or another version of jax with its plugin."


def _last_words(log: str) -> str:
    """The line of a dead worker's stderr that says why: its last exception, fatal message or line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"F\d{4} |Unknown flag|[\w.]+(Error|Exception)\b|Fatal", line)]
    return (telling or lines or [""])[-1]
