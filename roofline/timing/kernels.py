"""Expected seconds of one kernel: tiles over the SMs, bytes through memory or L2, launches, and a smooth maximum.

Sizes may be numpy arrays and need not be whole. What a function returns is never below the roofline's time: FLOPs at
the peak rate, weights and cache at the peak bandwidth. Activations may stay on the chip, as `roofline.count` has it.
Only with resident=True, as in a benchmark that repeats one call, may weights or cache come from L2.
"""

from __future__ import annotations

from typing import Any, Final

from roofline.hardware import Hardware
from roofline.timing.arrays import ceil_div, choose, is_array, least, most, soft_most
from roofline.timing.attention import attention_decode_s, attention_mixed_s, attention_prefill_s, kv_write_s
from roofline.timing.efficiency import Efficiency, Float8GemmEfficiency, GemmEfficiency, MoeEfficiency

__all__ = [
    "allreduce_s",
    "attention_decode_s",
    "attention_mixed_s",
    "attention_prefill_s",
    "elementwise_s",
    "gemm_s",
    "kv_write_s",
    "moe_s",
    "operand_bytes",
    "peak_flops_per_s",
    "sampler_s",
]

_TILES: Final = (
    (256, 128),
    (128, 256),
    (128, 128),
    (128, 64),
    (64, 128),
    (64, 64),
    (64, 32),
    (32, 64),
    (16, 64),
    (128, 32),
)
_SPLITS: Final = (1, 2, 4, 8, 16, 32)
_SPLIT_WAVES: Final = 4  # k isn't split further once its parts fill the SMs this often
_NEVER_S: Final = 1e9
# Of PCIe's rate that is left between cards: what one writes to the host's memory the next takes from there. GeForce
# cards can't read each other; on a server of others (RTX PRO 6000) all-reduces of 10 MB take longer still.
_STAGED: Final = 0.5
_NARROW_ROWS: Final = 16  # of the least matrix instruction
_VECTOR_COLUMNS: Final = 8  # of one thread block of the kernel for a single row
ROWS_APART: Final = 8  # most rows that llama.cpp takes through packed weights without tensor cores (its MMVQ)
# Packed weights that an SM unpacks and multiplies with one more row in a clock, where its int8 dot products alone could
# take 256 (1 to 8 rows on an RTX 3090 in ggml-org/llama.cpp pull request 15802).
_APART_WEIGHTS: Final = 50.0
# What an SM loads in such a kernel: about 8 kB in flight for 0.8 us (llama.cpp's figures of RTX 3090, 4090 and A100).
_APART_SM_BYTES_PER_S: Final = 1e10
_UNKNOWN_CLOCK_HZ: Final = 1.7e9
_FLOAT8_NARROW: Final = 1280  # columns up to which the float8 kernel takes its narrowest tile
_OPERAND_BYTES: Final = {"float4_e2m1fn": 0.5 + 1 / 16}  # of an activation; with NVFP4's float8 scale of 16 of them
_MOE_ROWS: Final = (16, 32, 64, 128)
_MOE_COLUMNS: Final = (32, 64, 128, 256)
TUNED_EXPERTS: Final = 8  # of the models for whose shapes engines had tiles early
_L2_EDGE: Final = 6.0  # how sharply a working set that outgrows L2 starts to miss
_UNKNOWN_SMS: Final = 100  # within a factor of three of every chip that is known
_UNKNOWN_L2_BYTES: Final = 32 * 2**20


def peak_flops_per_s(chip: Hardware, dtype: str = "bfloat16") -> float:
    """The chip's peak for a dtype, that of the other 16-bit type where a chip has only one of the two."""
    if dtype in ("bfloat16", "float16") and dtype not in chip.peak_flops_per_s:
        dtype = "float16" if dtype == "bfloat16" else "bfloat16"
    return chip.flops_per_s(dtype)


def operand_bytes(dtype: str) -> float:
    """Bytes of one activation as an operand of products in a dtype, scales included."""
    return 2.0 if dtype in ("bfloat16", "float16") else _OPERAND_BYTES.get(dtype, 1.0)


def _sms(chip: Hardware) -> int:
    return chip.sm_count or _UNKNOWN_SMS


def _l2_bytes(chip: Hardware) -> int:
    return chip.l2_bytes or _UNKNOWN_L2_BYTES


def _hit(num_bytes: Any, capacity_bytes: float, edge: float = _L2_EDGE) -> Any:
    """Share of a working set that is still in L2."""
    return 1 / (1 + (num_bytes / capacity_bytes) ** edge)


def _waves(blocks: Any, sms: int, overlap: float) -> Any:
    """Waves of thread blocks over the SMs; a partly filled last one costs less where blocks overlap."""
    load = blocks / sms
    whole = ceil_div(blocks, sms)
    return most(1.0, whole - overlap * (whole - load))


def gemm_s(
    m: Any,
    n: Any,
    k: Any,
    *,
    chip: Hardware,
    eff: Efficiency,
    weight_bits: float = 16.0,
    dtype: str = "bfloat16",
    resident: bool = False,
    rows_apart: bool = False,
) -> Any:
    """Seconds of [m, k] x [k, n], with weights of `weight_bits` as stored and products in `dtype`.

    Leaves out what unpacking narrow weights costs beyond reading them. In 8-bit dtypes the activations' quantisation
    is included. resident skips the floor, for scoring a benchmark that repeats one call. rows_apart: a few rows are
    multiplied with packed weights one by one, without tensor cores, as llama.cpp does.
    """
    narrow = dtype not in ("bfloat16", "float16", "float32", "float64")
    if narrow:
        seconds = _float8_gemm_s(m, n, k, chip, eff.float8_gemm, weight_bits, dtype)
    else:
        seconds = _gemm_s(m, n, k, chip, eff.gemm, weight_bits, dtype)
    if rows_apart:
        loads = n * k * weight_bits / 8 / (_APART_SM_BYTES_PER_S * _sms(chip))
        seconds = choose(m <= (ROWS_APART if weight_bits < 16 else 1), most(seconds, loads), seconds)
    if rows_apart and weight_bits < 16:
        each = n * k / (_APART_WEIGHTS * _sms(chip) * (chip.boost_clock_hz or _UNKNOWN_CLOCK_HZ))
        first = _gemm_s(m / most(m, 1e-9), n, k, chip, eff.gemm, weight_bits, dtype)
        seconds = choose(m <= ROWS_APART, most(first, loads) + most(m - 1.0, 0.0) * each, seconds)
    if resident:
        return seconds
    # Float8 tiles count padded rows, but the floor is of the work that was asked for.
    floor = most(2.0 * m * n * k / peak_flops_per_s(chip, dtype), n * k * weight_bits / 8 / _bandwidth(chip))
    return most(seconds, floor)


def _bandwidth(chip: Hardware) -> float:
    return chip.peak_bandwidth_bytes_per_s


def _gemm_s(m: Any, n: Any, k: Any, chip: Hardware, eff: GemmEfficiency, weight_bits: float, dtype: str) -> Any:
    sms, sm_rate = _sms(chip), peak_flops_per_s(chip, dtype) / _sms(chip)
    weight = weight_bits / 8
    fraction = choose(m <= _NARROW_ROWS, eff.memory_fraction, eff.wide_memory_fraction)
    memory = (n * k * weight + (m * k + m * n) * 2.0) / (_bandwidth(chip) * fraction)
    best: Any = None
    for rows, columns in _TILES:
        area = rows * columns
        tiles = ceil_div(m, rows) * ceil_div(n, columns)
        compute = 2.0 * area / (sm_rate * eff.compute_fraction * area / (area + eff.half_tile))
        step = max(compute, (rows * 2.0 + columns * weight) / eff.sm_load_bytes_per_s)
        ends = eff.tile_start_s + area * 2.0 / eff.sm_store_bytes_per_s
        for parts in _SPLITS:
            fits = tiles * parts <= _SPLIT_WAVES * sms
            if parts > 1 and not is_array(fits) and not fits:
                break
            depth = ceil_div(k, parts * 32) * 32
            work = _waves(tiles * parts, sms, eff.wave_overlap) * (depth * step + ends)
            seconds = soft_most(work, memory, eff.sharpness)
            if parts > 1:
                seconds = seconds + eff.split_s + m * n * parts * 4.0 / eff.split_bytes_per_s
                seconds = choose(fits, seconds, _NEVER_S)
            best = seconds if best is None else least(best, seconds)
    seconds = best + eff.launch_s
    streams = least(ceil_div(n, _VECTOR_COLUMNS), sms) * eff.vector_sm_bytes_per_s
    single = soft_most(n * k * weight / streams, memory, eff.sharpness) + k * eff.vector_step_s + eff.vector_launch_s
    return choose(m <= 1, least(seconds, single), seconds)


def _float8_gemm_s(
    m: Any, n: Any, k: Any, chip: Hardware, eff: Float8GemmEfficiency, weight_bits: float, dtype: str
) -> Any:
    """Tiles of 64 rows up to 128, above that pairs of 128 rows that share their weights; k isn't split."""
    sms, peak, weight = _sms(chip), chip.flops_per_s(dtype), weight_bits / 8
    operand = _OPERAND_BYTES.get(dtype, 1.0)
    rows = choose(m <= 128, 64.0, 128.0)
    columns = choose(m <= 64, choose(n <= _FLOAT8_NARROW, 16.0, 64.0), 128.0)
    tiles = choose(m <= 64, 1.0, 2.0 * ceil_div(m, 2 * rows)) * ceil_div(n, columns)
    step = soft_most(
        2.0 * rows * columns * sms / (peak * eff.compute_fraction),
        (rows * operand + columns * weight) / eff.sm_load_bytes_per_s,
        4.0,
    )
    ends = eff.tile_start_s + rows * columns * 2.0 / eff.sm_store_bytes_per_s
    work = _waves(tiles, sms, eff.wave_overlap) * (ceil_div(k, 128) * 128 * step + ends)
    memory = (n * k * weight + m * k * operand + m * n * 2.0) / (_bandwidth(chip) * eff.memory_fraction)
    # The quantising kernel reads 16 bits, writes the operand; a thread block has one row, and 8 of them fit an SM.
    moved = m * k * (2.0 + operand) / (_bandwidth(chip) * eff.quantise_memory_fraction)
    quantise = most(moved, ceil_div(m, sms * 8) * k / eff.quantise_elements_per_s)
    return eff.launch_s + soft_most(work, memory, eff.sharpness) + quantise


def moe_s(
    tokens: Any,
    hidden: Any,
    width: Any,
    per_token: Any,
    experts: Any,
    distinct: Any,
    *,
    chip: Hardware,
    eff: Efficiency,
    weight_bits: float = 16.0,
    rows: Any = None,
    resident: bool = False,
) -> Any:
    """Seconds of one layer's routed experts: sorting, gate and up, activation, down, weighted sum.

    `experts` and `distinct` are those of this device; `rows` the tokens x experts routed to it, all where it has all.
    The rows are taken to spread over the distinct experts evenly; a skewed load adds up to one tile for each.
    """
    group = eff.moe
    routed = tokens * per_token
    rows = routed if rows is None else rows
    product = _GroupedProduct(tokens, rows, experts, distinct, chip, group, weight_bits, resident)
    moved = routed * (3.0 * width + hidden) * 2.0 + tokens * hidden * 2.0
    around = moved / (_bandwidth(chip) * group.elementwise_memory_fraction) + routed * group.row_s
    seconds = group.launch_s + product.seconds(2.0 * width, hidden) + product.seconds(hidden, width) + around
    if resident:
        return seconds
    weights = 3.0 * distinct * hidden * width * weight_bits / 8
    return most(seconds, most(6.0 * rows * hidden * width / peak_flops_per_s(chip), weights / _bandwidth(chip)))


class _GroupedProduct:
    """The grouped product of one layer, for the two shapes that a layer has."""

    def __init__(
        self,
        tokens: Any,
        rows: Any,
        experts: Any,
        distinct: Any,
        chip: Hardware,
        eff: MoeEfficiency,
        weight_bits: float,
        resident: bool,
    ) -> None:
        self.tokens, self.rows, self.experts, self.distinct = tokens, rows, experts, distinct
        self.chip, self.eff, self.weight, self.resident = chip, eff, weight_bits / 8, resident

    def seconds(self, n: Any, k: Any) -> Any:
        weights = self.distinct * n * k * self.weight
        moved = weights + self.rows * n * 2.0
        if self.resident:
            near = _hit(moved, _l2_bytes(self.chip) * self.eff.l2_share)
            moved = moved * (1 - near * (1 - 1 / self.eff.l2_speed))
        memory = moved / (_bandwidth(self.chip) * self.eff.memory_fraction)
        return soft_most(self.work(n, k), memory, self.eff.sharpness)

    def work(self, n: Any, k: Any) -> Any:
        best: Any = None
        for rows in _MOE_ROWS:
            for columns in _MOE_COLUMNS:
                work = self.tile(rows, columns, n, k)
                best = work if best is None else least(best, work)
        if self.eff.has_tuned_tiles:
            return best
        # An engine without tiles for this shape takes one of two; those of models with 8 experts were tuned early.
        default = choose(self.tokens <= self.experts, self.tile(16, 32, n, k), self.tile(64, 64, n, k))
        return choose(self.experts * 1.0 == TUNED_EXPERTS, best, default)

    def tile(self, rows: int, columns: int, n: Any, k: Any) -> Any:
        """Each expert's rows fill whole blocks: on average half a block is empty once there is more than one."""
        sms, area = _sms(self.chip), rows * columns
        full = self.rows / most(self.distinct, 1e-9) / rows
        blocks = self.distinct * most(1.0, full + 0.5 * least(1.0, full))
        rate = peak_flops_per_s(self.chip) / sms * self.eff.compute_fraction * area / (area + self.eff.half_tile)
        if self.weight < 1:
            rate = rate * self.eff.unpack_fraction
        step = max(2.0 * area / rate, (rows * 2.0 + columns * self.weight) / self.eff.sm_load_bytes_per_s)
        each = ceil_div(k, 64) * 64 * step + self.eff.tile_start_s
        return _waves(blocks * ceil_div(n, columns), sms, self.eff.wave_overlap) * each


def allreduce_s(num_bytes: Any, devices: int, *, chip: Hardware, eff: Efficiency, eager: bool = False) -> Any:
    """Seconds of an all-reduce of num_bytes on each of the devices over the chip's fastest peer link.

    Small payloads take the engine's own kernel in one phase or two, large ones the library's; over PCIe the engine's
    is used for two devices only. eager: launched by the host each time, not from a captured graph.
    """
    link = chip.peer_link
    if devices == 1 or link is None:
        return 0.0 * num_bytes
    group, rate = eff.allreduce, link.one_way_bytes_per_s
    if link.name == "pcie":
        rate = rate * _STAGED
    ring = 2.0 * (devices - 1) / devices * num_bytes
    library = group.library_s + group.library_ramp_s * (devices - 2) + ring / (rate * group.library_link_fraction)
    started = group.launch_s + group.device_s * (devices - 2)
    one = (devices - 1) * num_bytes / (rate * group.link_fraction)
    two = group.phase_s + ring / (rate * group.link_fraction)
    seconds = choose(num_bytes <= group.limit_bytes, started + least(one, two), library)
    if link.name == "pcie" and devices > 2:
        seconds = library
    return most(seconds, group.eager_s) if eager else seconds


def elementwise_s(
    num_bytes: Any,
    *,
    chip: Hardware,
    eff: Efficiency,
    kind: str = "norm",
    resident: bool = True,
    blocks: Any = None,
) -> Any:
    """Seconds of a kernel that reads and writes num_bytes of activations in all.

    kind: norm (with the residual added), final_norm, act, rope or gather. resident: what the kernel before wrote is
    read from L2 as far as it fits, as between the ops of a layer. blocks: equal thread blocks of a kernel in which the
    SM with the most of them sets the time (the rotation's, one for each token); None where the bytes alone do.
    """
    if blocks is not None:
        sms = _sms(chip)
        num_bytes = num_bytes / most(blocks, 1.0) * ceil_div(blocks, sms) * sms
    launch, sharpness, share, speed = (
        getattr(eff.elementwise, f"{kind}_{name}") for name in ("launch_s", "sharpness", "l2_share", "l2_speed")
    )
    return soft_most(_moved_s(num_bytes, share, speed if resident else 1.0, chip), launch, sharpness)


def _moved_s(num_bytes: Any, l2_share: float, l2_speed: float, chip: Hardware) -> Any:
    near = _hit(num_bytes, _l2_bytes(chip) * l2_share, 2.0)
    return num_bytes * (1 - near * (1 - 1 / l2_speed)) / _bandwidth(chip)


def sampler_s(sequences: Any, vocabulary: Any, *, chip: Hardware, eff: Efficiency) -> Any:
    """Seconds of picking a token for each sequence from logits over the vocabulary; greedy or plain random sampling."""
    group = eff.elementwise
    moved = _moved_s(sequences * vocabulary * 4.0, group.sampler_l2_share, group.sampler_l2_speed, chip)
    return group.sampler_launch_s + group.sampler_passes * moved
