"""What the cases of bench/gpu.py share: the record that is written after each of them, and what they run on."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenjax.config import ModelConfig
from roofline.hardware import Figure, Hardware, known_ids, load_hardware
from roofline.measure import Samples, environment

if TYPE_CHECKING:
    from qwenjax.weights import Params

DTYPE = "bfloat16"
ROOT = Path(__file__).resolve().parent.parent
Record = dict[str, Any]
# nvidia-smi's name, ours in SI, and the factor between them. XLA's own flags are in the environment's variables.
_CARD_FIGURES = (
    ("memory.total", "memory_bytes", 2**20),
    ("clocks.max.sm", "max_sm_clock_hz", 1e6),
    ("clocks.max.mem", "max_memory_clock_hz", 1e6),
    ("power.limit", "power_limit_watts", 1.0),
)
_READINGS = (
    ("clocks.sm", "sm_clock_hz", 1e6),
    ("clocks.mem", "memory_clock_hz", 1e6),
    ("power.draw", "power_watts", 1.0),
    ("temperature.gpu", "temperature_celsius", 1.0),
)
_PACKAGES = re.compile(r"^(jax|flax|numpy|nvidia-(cublas|cuda-runtime|cuda-nvcc|cudnn)|triton)")
_VARIABLES = ("XLA_", "JAX_", "CUDA_VISIBLE", "NVIDIA_TF32", "TF_GPU")


@dataclass
class Bench:
    """The running record, the card's id if it is known, and the one model whose weights are on the device."""

    record: Record
    path: Path
    card: str | None = None
    models: dict[str, tuple[ModelConfig, Params]] = field(default_factory=dict)
    configs: dict[str, ModelConfig] = field(default_factory=dict)  # as they ran: the depth may be cut

    @property
    def programs(self) -> Path:
        """The archive of compiled programs' texts beside the record."""
        return self.path.with_suffix(".hlo.zip")

    def write(self) -> None:
        """Under another name first, so that the file is whole at every moment."""
        text = json.dumps(self.record, indent=1, allow_nan=False)
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, self.path)


def samples_record(samples: Samples) -> Record:
    return {"median_s": samples.median_s, "best_s": samples.best_s, "samples": list(samples.seconds)}


def describe_machine(commit: str | None) -> Record:
    """Device, card, versions, commit, and the variables that change what XLA does."""
    import jax

    env = environment()
    env["commit"] = commit or env["commit"] or _lines(["git", "-C", str(ROOT), "rev-parse", "HEAD"])[:1] or None
    env["uncommitted"] = len(_lines(["git", "-C", str(ROOT), "status", "--porcelain"]))
    env["packages"] = {
        name: item.version for item in distributions() if _PACKAGES.match(name := item.metadata["Name"].lower())
    }
    env["platform_version"] = str(jax.devices()[0].client.platform_version)
    env["variables"] = {key: value for key, value in sorted(os.environ.items()) if key.startswith(_VARIABLES)}
    env["card"] = _query(_CARD_FIGURES, ("name", "driver_version"))
    env["at_start"] = read_card()
    return env


def read_card() -> Record | None:
    """Clocks, power and temperature of the first card now, None without nvidia-smi."""
    return _query(_READINGS)


def _query(figures: Sequence[tuple[str, str, float]], texts: Sequence[str] = ()) -> Record | None:
    names = [*texts, *(name for name, _, _ in figures)]
    lines = _lines(["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"])
    if not lines:
        return None
    cells = [cell.strip() for cell in lines[0].split(",")]
    found: Record = dict(zip(texts, cells, strict=False))
    for (_, ours, factor), cell in zip(figures, cells[len(texts) :], strict=False):
        found[ours] = float(cell) * factor if re.fullmatch(r"[\d.]+", cell) else None
    return found


def _lines(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def card_of(device: str) -> str | None:
    """The id of the data file that fits a device's name as JAX has it: every word of the id is in the name."""
    words = set(re.split(r"[\s\-_]+", device.lower()))
    fitting = [chip for chip in known_ids() if set(chip.split("-")) <= words]
    return max(fitting, key=lambda chip: len(chip.split("-")), default=None)


def measured_hardware(record: Mapping[str, Any]) -> Hardware | None:
    """The device as the ceilings found it: the best rates are the roof, the tables what `roofline compare` predicts by.

    The tables are left out as long as one of them is missing, and all is None without a bandwidth and a product.
    """
    ceilings, env = record["ceilings"], record["environment"]
    rates = {
        unit: max((entry[key] for entry in ceilings if key in entry), default=None)
        for unit, key in (("B/s", "best_bytes_per_s"), ("FLOP/s", "best_flops_per_s"))
    }
    bandwidth, flops = rates["B/s"], rates["FLOP/s"]
    if bandwidth is None or flops is None:
        return None
    source = f"bench/gpu.py on {env['device']}"
    memory = (env["card"] and env["card"]["memory_bytes"]) or env["memory_bytes"]

    def figure(value: float, unit: str, note: str = "") -> Figure:
        return Figure(value, unit, "measured here", source, env["date"][:10], note)

    figures = {
        "peak_bandwidth_bytes_per_s": figure(bandwidth, "B/s"),
        f"peak_flops_per_s.{DTYPE}": figure(flops, "FLOP/s"),
        "memory_bytes": figure(int(memory or 2**33), "B", "" if memory else "not told by the system; 8 GiB taken"),
    }
    tables = record["calibration"] if record["calibration"].get("complete") else {}
    return Hardware("here", env["device"], "as JAX reports it", env["platform"], figures, measured=tables)


def datasheet(card: str | None) -> Hardware | None:
    return None if card is None else load_hardware(card)
