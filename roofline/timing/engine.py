"""What an engine adds to its kernels: the constants of a profile, and the time of a step that they give.

Each constant has a meaning, a unit and bounds. Factors are on the seconds of the chip's kernels as they were measured
by themselves, so an engine with better ones may have less than 1; but no kind of kernel ever takes less than the
roofline's time of it, and added seconds are at least 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from roofline.timing.step import SECONDS, Terms
from roofline.weight_schemes import SCHEMES

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Constant(NamedTuple):
    """Meaning, unit and bounds of one constant, and where a fit starts and how far it strays without evidence."""

    meaning: str
    unit: str
    low: float
    high: float
    start: float
    spread: float


CONSTANTS: Final[dict[str, Constant]] = {
    "products_memory": Constant("slowdown of matrix products that wait for weights", "1", 0.3, 4, 0.95, 0.08),
    "products_compute": Constant("slowdown of matrix products that wait for arithmetic", "1", 0.3, 8, 1.2, 0.2),
    "attention_decode": Constant("slowdown of attention of decode steps", "1", 0.3, 40, 1.05, 0.3),
    "attention_prefill": Constant("slowdown of attention of prompts", "1", 0.3, 40, 1.05, 0.3),
    "attention_plain": Constant("slowdown of attention of prompts where scores are written out", "1", 0.3, 60, 6, 4),
    "attention_plain_decode": Constant("the same of attention of decode steps", "1", 0.3, 60, 2, 2),
    "experts": Constant("slowdown of the routed experts' products", "1", 0.3, 20, 0.9, 0.4),
    "experts_tuned": Constant("the same with tiles for the shape, as of models with 8 experts", "1", 0.3, 20, 0.9, 0.4),
    "collectives": Constant("slowdown of collectives", "1", 0.3, 20, 1.5, 0.5),
    "collectives_pcie": Constant("the same of collectives over PCIe", "1", 0.3, 20, 1.5, 0.5),
    "collectives_large": Constant("slowdown of collectives of 48 MiB and more", "1", 0.3, 20, 2.5, 1.0),
    "collectives_staged": Constant("slowdown of collectives of 1 MiB and more over PCIe", "1", 0.3, 20, 1.5, 1.0),
    "elementwise": Constant("slowdown of norms, rotations and activations", "1", 0.3, 10, 1.0, 0.3),
    "layer_s": Constant("device idle in each layer of a decode step, between kernels", "s", 0, 1e-3, 4e-6, 6e-6),
    "prefill_layer_s": Constant("device idle in each layer of a step with prompts", "s", 0, 5e-3, 1e-5, 3e-5),
    "step_s": Constant("scheduling, sampling and what else a step waits for", "s", 0, 0.05, 4e-4, 8e-4),
    # Llama-2-7B on two A100s: 12.1 ms a token with remote calls, 8.5 without (vllm-project/vllm pull request 3763).
    "remote_step_s": Constant("remote calls that start a step on the other devices", "s", 0, 0.05, 3.6e-3, 2e-3),
    "hop_s": Constant("a decode step's change from card to card, each with whole layers", "s", 0, 0.01, 2e-4, 2e-4),
    "packed_call_s": Constant("added to each product with quantised weights", "s", 0, 1e-3, 2e-6, 4e-6),
    "sequence_s": Constant("host work for each sequence that gets a token", "s", 0, 1e-3, 1.5e-5, 1.5e-5),
    "collective_call_s": Constant("latency added to each collective", "s", 0, 1e-3, 2e-6, 6e-6),
    "host_layer_s": Constant("least time of a layer of a decode step without CUDA graphs", "s", 0, 1e-2, 4e-4, 2e-4),
    "prefill_host_layer_s": Constant("least time of a layer in a step with prompts", "s", 0, 1e-2, 3e-4, 2e-4),
    "request_s": Constant("once a request, before its first token", "s", 0, 2.0, 2e-3, 1e-2),
    "scheme_experts": Constant("further slowdown of routed experts with quantised weights", "1", 0.3, 8, 1.05, 0.2),
    "scheme_memory": Constant("further slowdown of products that wait for quantised weights", "1", 0.3, 8, 1.1, 0.2),
    "scheme_compute": Constant("further slowdown of compute with quantised weights", "1", 0.3, 12, 1.2, 0.4),
    "scheme_native": Constant("the same where the products are narrow too", "1", 0.3, 12, 0.8, 0.4),
}
UNPACKED: Final = "-unpacked"  # ends the key of a scheme on chips without the narrow type of its products
# Versions from which on an engine is another one: vLLM captures CUDA graphs since 0.3; its V1 (0.8) schedules, captures
# and attends in other ways than V0 did.
REWRITES: Final = {"vllm": ("0.3", "0.8")}
SCHEME_KINDS: Final = ("memory", "compute", "experts")
SHARPNESS: Final = 6.0  # of the smooth maximum of device and host


@dataclass(frozen=True)
class Engine:
    """Values of the constants; those of weight schemes by scheme, `memory` and `compute` slowdown."""

    constants: Mapping[str, float]
    schemes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def of(self, name: str) -> float:
        return float(self.constants.get(name, CONSTANTS[name].start))

    def scheme(self, scheme: str) -> tuple[float, ...]:
        """A weight scheme's slowdown by SCHEME_KINDS; 1 for weights as wide as the activations."""
        if scheme == "":
            return (1.0,) * len(SCHEME_KINDS)
        known = self.schemes.get(scheme) or self._like(scheme)
        return tuple(float(known.get(kind, usual_of(scheme, kind).start)) for kind in SCHEME_KINDS)

    def _like(self, scheme: str) -> Mapping[str, float]:
        """The constants of the nearest scheme that has some: of the same width."""
        return next((kinds for name, kinds in self.schemes.items() if _width(name) == _width(scheme)), {})


def usual_of(scheme: str, kind: str) -> Constant:
    """What is usual of a weight scheme. Narrow products were measured at a card's power limit, with their quantising.

    So the engine's slowdown of compute, which is of 16-bit products, is in them once already.
    """
    stored = SCHEMES.get(scheme)
    native = kind == "compute" and stored is not None and any(name.startswith("float") for name in stored.compute)
    return CONSTANTS["scheme_native" if native else f"scheme_{kind}"]


def _width(scheme: str) -> str:
    """Bits of a scheme's weights, and whether its kernels unpack them for want of a narrow product."""
    bits = "16" if scheme.endswith("-f16") else "4" if "4" in scheme or scheme.startswith("awq") else "8"
    return bits + (UNPACKED if scheme.endswith(UNPACKED) else "")


def step_seconds(
    terms: Terms, engine: Engine, memory: Any = 1.0, compute: Any = 1.0, experts: Any = 1.0
) -> NDArray[Any]:
    """Seconds of one run of each kind of step on this engine, never below the roofline's time of it.

    memory, compute and experts: the weight scheme's own slowdown of products that wait for weights or for arithmetic,
    and of routed experts.
    """
    import numpy as np

    values = terms.values
    scheme = {"products_memory": memory, "products_compute": compute, "experts": experts, "experts_tuned": experts}
    device: Any = 0.0
    for name in SECONDS:
        device = device + np.maximum(engine.of(name) * scheme.get(name, 1.0) * values[name], terms.least[name])
    device = device + engine.of("layer_s") * values["layers"] + engine.of("prefill_layer_s") * values["prefill_layers"]
    device = device + engine.of("collective_call_s") * values["collective_calls"]
    device = device + engine.of("packed_call_s") * values["packed_calls"]
    host = (
        engine.of("host_layer_s") * values["eager_layers"]
        + engine.of("prefill_host_layer_s") * values["prefill_layers"]
    )
    top, low = np.maximum(device, host), np.minimum(device, host)
    busy = top * (1 + (low / np.maximum(top, 1e-12)) ** SHARPNESS) ** (1 / SHARPNESS)
    seconds = busy + engine.of("step_s") + engine.of("sequence_s") * values["sequences"]
    seconds = seconds + engine.of("remote_step_s") * values["remote_steps"] + engine.of("hop_s") * values["hops"]
    return np.asarray(seconds)
