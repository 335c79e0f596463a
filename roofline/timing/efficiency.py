"""What kernels reach of a chip's peaks: few constants, each with unit, bounds and meaning, read from TOML.

Constants come in groups, one for each kind of kernel. A chip without a group of its own takes that of the nearest chip
which has one: by compute capability first, since that fixes the matrix instructions and the shared memory of an SM.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from qwenjax.errors import InputError
from roofline.hardware import Hardware


def constant(unit: str, low: float, high: float, meaning: str) -> Any:
    """A field of a group: unit, bounds and what it says about a kernel. A fraction of a peak never goes above 1."""
    return dataclasses.field(metadata={"unit": unit, "low": low, "high": high, "meaning": meaning})


_SHARPNESS: Final = "exponent p of the smooth maximum (a^p + b^p)^(1/p) of work and memory"
_LAUNCH: Final = "time of a kernel that does nothing, as the source counts it"
_MEMORY: Final = "share of the peak bandwidth that the kernel reaches"
_LOAD: Final = "rate at which one SM loads its tiles"
_START: Final = "filling and draining the pipeline of one tile"
_STORE: Final = "rate at which one SM writes its finished tile"
_OVERLAP: Final = "share of a partly filled last wave's idle time that isn't paid (0: whole waves, 1: no waves)"
_HALF_TILE: Final = "elements of an output tile that reaches half of compute_fraction"
_L2_SHARE: Final = "share of L2 that keeps what the last kernel or call left there"
_L2_SPEED: Final = "reading from L2 against reading from memory"
_MOVING: Final = "exponent of the smooth maximum of launch and movement"


@dataclass(frozen=True)
class GemmEfficiency:
    """Dense matrix products in 16 bits: the library takes the fastest of its tiles, with or without splitting k."""

    launch_s: float = constant("s", 5e-7, 8e-6, _LAUNCH)
    compute_fraction: float = constant("1", 0.5, 1.0, "share of the peak rate of one SM that a very large tile reaches")
    half_tile: float = constant("count", 10.0, 2e4, _HALF_TILE)
    sm_load_bytes_per_s: float = constant("B/s", 1e10, 4e11, _LOAD)
    tile_start_s: float = constant("s", 1e-8, 1e-5, _START)
    sm_store_bytes_per_s: float = constant("B/s", 1e9, 1e12, _STORE)
    split_s: float = constant("s", 1e-8, 1e-5, "the second kernel that adds the parts of a split k")
    split_bytes_per_s: float = constant("B/s", 2e11, 2e13, "rate at which the parts of a split k go through L2")
    memory_fraction: float = constant("1", 0.4, 1.0, _MEMORY + ", up to 16 rows")
    wide_memory_fraction: float = constant("1", 0.4, 1.0, _MEMORY + ", above 16 rows")
    sharpness: float = constant("1", 1.0, 12.0, _SHARPNESS)
    wave_overlap: float = constant("1", 1e-3, 0.95, _OVERLAP)
    vector_launch_s: float = constant("s", 5e-7, 8e-6, "launch of the kernel for a single row")
    vector_sm_bytes_per_s: float = constant("B/s", 2e9, 1e11, "rate at which one SM streams weights for a single row")
    vector_step_s: float = constant("s", 1e-12, 1e-8, "time for each element of k in the sum of a single row")


@dataclass(frozen=True)
class Float8GemmEfficiency:
    """Matrix products in float8 with the tile set by the rows, after a kernel that quantises the activations."""

    launch_s: float = constant("s", 5e-7, 1e-5, _LAUNCH + ", both kernels")
    compute_fraction: float = constant("1", 0.3, 1.0, "share of the peak rate of one SM that a tile reaches")
    sm_load_bytes_per_s: float = constant("B/s", 3e10, 2e12, _LOAD)
    tile_start_s: float = constant("s", 1e-8, 1e-5, _START)
    sm_store_bytes_per_s: float = constant("B/s", 1e9, 1e12, _STORE)
    memory_fraction: float = constant("1", 0.4, 1.0, _MEMORY)
    sharpness: float = constant("1", 1.0, 12.0, _SHARPNESS)
    wave_overlap: float = constant("1", 1e-3, 0.95, _OVERLAP)
    quantise_memory_fraction: float = constant("1", 0.1, 1.0, "share of the peak bandwidth of the quantising kernel")
    quantise_elements_per_s: float = constant("1/s", 1e10, 5e12, "elements of one row that the quantising kernel takes")


@dataclass(frozen=True)
class AttentionEfficiency:
    """Flash attention over a paged cache: thread blocks, each with a block of query rows and the keys they see."""

    launch_s: float = constant("s", 5e-7, 2e-5, _LAUNCH)
    compute_fraction: float = constant("1", 0.2, 1.0, "share of the peak rate with every SM at work")
    block_compute_fraction: float = constant("1", 0.1, 1.0, "share of one SM's peak rate of a thread block by itself")
    block_start_s: float = constant("s", 1e-8, 5e-6, "start and end of a thread block")
    row_s: float = constant("s", 1e-10, 3e-7, "loading and storing one query row in a thread block")
    empty_block_s: float = constant("s", 1e-8, 2e-6, "a thread block that finds nothing to do")
    longest_share: float = constant("1", 1e-3, 1.0, "share of the longest thread block that the other SMs wait for")
    wave_share: float = constant("1", 1e-3, 1.0, "share of a partly filled last wave's idle time that is paid")
    work_sharpness: float = constant("1", 1.0, 12.0, "exponent of the smooth maximum of all blocks and the longest")
    sharpness: float = constant("1", 1.0, 12.0, _SHARPNESS)
    memory_fraction: float = constant("1", 0.5, 1.0, _MEMORY)
    l2_share: float = constant("1", 0.2, 1.3, _L2_SHARE)
    l2_speed: float = constant("1", 1.0, 6.0, _L2_SPEED)
    combine_s: float = constant("s", 1e-7, 1e-5, "the kernel that adds up the parts of split keys")
    combine_part_s: float = constant("s", 1e-9, 1e-6, "each part that it adds up")
    transpose_s: float = constant("s", 1e-7, 1e-5, "two kernels that bring a group's queries together and back")
    transpose_memory_fraction: float = constant("1", 0.2, 1.0, "share of the peak bandwidth of those two")
    cache_write_block_s: float = constant("s", 1e-7, 1e-5, "writing one token's keys and values, one thread block each")
    # How the kernel is built, from its source; not fitted.
    rows_per_block: int = 64
    columns_per_block: int = 128  # at a head_dim of 128; twice that at 64, half at 256
    blocks_per_sm: int = 1
    is_version_3: bool = False  # packs a group's queries in every phase, and splits keys by the load
    includes_cache_write: bool = False  # what the source's times contain


@dataclass(frozen=True)
class MoeEfficiency:
    """Routed experts as two grouped products with sorting, activation and sum around them."""

    launch_s: float = constant("s", 1e-6, 8e-5, "sorting, activation, sum and the launches of all")
    compute_fraction: float = constant("1", 0.1, 1.0, "share of the peak rate of one SM that a very large tile reaches")
    half_tile: float = constant("count", 10.0, 2e4, _HALF_TILE)
    unpack_fraction: float = constant("1", 0.05, 1.0, "share of that rate where narrower weights are unpacked first")
    sm_load_bytes_per_s: float = constant("B/s", 5e9, 4e11, _LOAD)
    tile_start_s: float = constant("s", 1e-8, 2e-5, _START)
    memory_fraction: float = constant("1", 0.4, 1.0, _MEMORY)
    sharpness: float = constant("1", 1.0, 12.0, _SHARPNESS)
    wave_overlap: float = constant("1", 1e-3, 0.95, _OVERLAP)
    elementwise_memory_fraction: float = constant("1", 0.2, 1.0, "share of the peak bandwidth of activation and sum")
    row_s: float = constant("s", 1e-12, 1e-8, "sorting one routed row")
    l2_share: float = constant("1", 0.2, 1.3, _L2_SHARE)
    l2_speed: float = constant("1", 1.0, 6.0, _L2_SPEED)
    has_tuned_tiles: bool = True  # else the engine's two default tiles, by tokens against experts
    crowds_first_rank: bool = False  # the source gives one rank all experts that few tokens choose


@dataclass(frozen=True)
class AllreduceEfficiency:
    """All-reduce: the engine's own kernel in one or two phases for small payloads, a ring or tree above a limit."""

    launch_s: float = constant("s", 1e-6, 2e-5, "launch and first handshake of the engine's kernel")
    device_s: float = constant("s", 1e-9, 5e-6, "handshake with each further device")
    phase_s: float = constant("s", 1e-8, 2e-5, "the second phase")
    link_fraction: float = constant("1", 0.2, 1.0, "share of the link's one-way bandwidth, engine's kernel")
    library_s: float = constant("s", 1e-6, 2e-4, "start of the library's all-reduce")
    library_link_fraction: float = constant("1", 0.2, 1.0, "share of the link's one-way bandwidth, library")
    library_ramp_s: float = constant("s", 1e-9, 1e-4, "start of each further device's share in the library")
    eager_s: float = constant("s", 1e-6, 1e-4, "least time where the host launches, without a captured graph")
    limit_bytes: float = 8 * 2**20  # of the engine's own kernel; from its source


@dataclass(frozen=True)
class ElementwiseEfficiency:
    """Kernels that move bytes: what the kernel before wrote is read from L2 as far as it fits."""

    norm_launch_s: float = constant("s", 5e-7, 8e-6, _LAUNCH)
    norm_sharpness: float = constant("1", 0.7, 12.0, _MOVING)
    norm_l2_share: float = constant("1", 0.2, 4.0, _L2_SHARE)
    norm_l2_speed: float = constant("1", 1.0, 8.0, _L2_SPEED)
    final_norm_launch_s: float = constant("s", 5e-7, 8e-6, _LAUNCH)
    final_norm_sharpness: float = constant("1", 0.7, 12.0, _MOVING)
    final_norm_l2_share: float = constant("1", 0.2, 4.0, _L2_SHARE)
    final_norm_l2_speed: float = constant("1", 1.0, 8.0, _L2_SPEED)
    act_launch_s: float = constant("s", 5e-7, 8e-6, _LAUNCH)
    act_sharpness: float = constant("1", 0.7, 12.0, _MOVING)
    act_l2_share: float = constant("1", 0.2, 4.0, _L2_SHARE)
    act_l2_speed: float = constant("1", 1.0, 8.0, _L2_SPEED)
    rope_launch_s: float = constant("s", 5e-7, 8e-6, _LAUNCH)
    rope_sharpness: float = constant("1", 0.7, 12.0, _MOVING)
    rope_l2_share: float = constant("1", 0.2, 4.0, _L2_SHARE)
    rope_l2_speed: float = constant("1", 1.0, 8.0, _L2_SPEED)
    gather_launch_s: float = constant("s", 5e-7, 8e-6, _LAUNCH)
    gather_sharpness: float = constant("1", 0.7, 12.0, _MOVING)
    gather_l2_share: float = constant("1", 0.2, 4.0, _L2_SHARE)
    gather_l2_speed: float = constant("1", 1.0, 8.0, _L2_SPEED)
    sampler_launch_s: float = constant("s", 1e-6, 1e-4, "all kernels of the sampler")
    sampler_passes: float = constant("1", 0.5, 20.0, "times that the float32 logits are read or written")
    sampler_l2_share: float = constant("1", 0.2, 4.0, _L2_SHARE)
    sampler_l2_speed: float = constant("1", 1.0, 8.0, _L2_SPEED)


@dataclass(frozen=True)
class Efficiency:
    """All groups that serve one chip; `sources` says for each group which chip it was fitted on."""

    gemm: GemmEfficiency
    float8_gemm: Float8GemmEfficiency
    attention: AttentionEfficiency
    moe: MoeEfficiency
    allreduce: AllreduceEfficiency
    elementwise: ElementwiseEfficiency
    sources: tuple[tuple[str, str], ...] = ()


GROUPS: Final[dict[str, type]] = {
    "gemm": GemmEfficiency,
    "float8_gemm": Float8GemmEfficiency,
    "attention": AttentionEfficiency,
    "moe": MoeEfficiency,
    "allreduce": AllreduceEfficiency,
    "elementwise": ElementwiseEfficiency,
}
FITTED: Final = ("a100-80gb-sxm", "h100-sxm", "rtx-4090", "rtx-pro-6000", "a40")
# Nearest first. 8.6, 8.9 and 12.0 share the small shared memory, warp-level matrix instructions and GDDR memory.
_GEFORCE: Final = ("rtx-4090", "rtx-pro-6000", "a100-80gb-sxm", "h100-sxm")
_NEAREST: Final = {
    "7.0": ("a100-80gb-sxm", "rtx-4090", "h100-sxm"),
    "7.5": _GEFORCE,
    "8.0": ("a100-80gb-sxm", "rtx-4090", "h100-sxm"),
    "8.6": _GEFORCE,
    "8.9": _GEFORCE,
    "9.0": ("h100-sxm", "rtx-4090"),
    "10.0": ("h100-sxm", "rtx-4090"),
    "12.0": ("rtx-pro-6000", "rtx-4090", "a100-80gb-sxm", "h100-sxm"),
}
_OTHERS: Final = ("h100-sxm", "rtx-4090")
# Of one SM and clock: GeForce cards take half the rate of their workstation siblings, which power holds back instead.
_HALF_RATE_FLOPS: Final = 768


@cache
def load_table(chip: str) -> Mapping[str, Any]:
    """The file of constants of a chip that was fitted, as TOML says it."""
    text = (resources.files("roofline") / "data" / "efficiency" / f"{chip}.toml").read_text()
    return tomllib.loads(text)


def load_group(chip: str, group: str) -> Any:
    """One group of a fitted chip, None where it has none; every constant is there and within its bounds."""
    table = load_table(chip).get(group)
    if table is None:
        return None
    values = {}
    for field in dataclasses.fields(GROUPS[group]):
        if "low" in field.metadata:
            values[field.name] = _checked(f"{group}.{field.name}", table["constants"], field)
        elif field.name in table.get("kernel", {}):
            values[field.name] = table["kernel"][field.name]
    return GROUPS[group](**values)


def _checked(name: str, constants: Mapping[str, Any], field: dataclasses.Field[Any]) -> float:
    remedy = "Run bench/fit_kernels.py again"
    if field.name not in constants:
        raise InputError(name, None, "is missing", remedy)
    value = float(constants[field.name]["value"])
    if not field.metadata["low"] <= value <= field.metadata["high"]:
        limits = f"must be from {field.metadata['low']:g} to {field.metadata['high']:g}"
        raise InputError(name, value, limits, remedy)
    return value


@cache
def _compose(order: tuple[str, ...]) -> Efficiency:
    groups: dict[str, Any] = {}
    sources = []
    for group in GROUPS:
        owner = next(chip for chip in order if group in load_table(chip))
        groups[group] = load_group(owner, group)
        sources.append((group, owner))
    return Efficiency(**groups, sources=tuple(sources))


def load_efficiency(chip: Hardware) -> tuple[Efficiency, str]:
    """The constants that serve this chip, and a sentence that says which chips their groups were fitted on."""
    near = _NEAREST.get(chip.compute_capability, _OTHERS)
    if chip.compute_capability == "8.6" and not _is_half_rate(chip):
        near = ("a40", *near)
    order = tuple(dict.fromkeys(((chip.id,) if chip.id in FITTED else ()) + near + FITTED))
    efficiency = _compose(order)
    return efficiency, _told(chip, efficiency)


def _is_half_rate(chip: Hardware) -> bool:
    if not chip.sm_count or not chip.boost_clock_hz:
        return True
    return chip.flops_per_s("bfloat16") / (chip.sm_count * chip.boost_clock_hz) < _HALF_RATE_FLOPS


def _told(chip: Hardware, efficiency: Efficiency) -> str:
    own = [group for group, owner in efficiency.sources if owner == chip.id]
    parts = [f"{', '.join(own)} fitted on this chip"] if own else []
    for owner in dict.fromkeys(owner for _, owner in efficiency.sources if owner != chip.id):
        groups = ", ".join(group for group, at in efficiency.sources if at == owner)
        parts.append(f"{groups} from {owner}, the nearest with such measurements")
    return f"kernel constants for {chip.id}: {'; '.join(parts)}"


def load_interval(owner: str, group: str, chip: str) -> tuple[float, float]:
    """Between which multiples of a predicted time 80 % of the rows lay that the fit didn't see.

    Twice as wide, in logarithms, on a chip that isn't the one the group was fitted on.
    """
    interval = load_table(owner)[group]["interval"]
    low, high = float(interval["low"]), float(interval["high"])
    return (low, high) if owner == chip else (low * low, high * high)
