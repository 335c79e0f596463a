"""Expected seconds of flash attention over a paged cache: thread blocks of query rows and what they read.

A thread block takes a block of query rows of one head through the keys they see, a block of columns at a time. Decodes
by themselves bring the query heads of a KV head together in one block, and split long contexts over more thread blocks;
in version 2 neither holds once a prompt is in the batch, so that every query head reads the keys for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from roofline.hardware import Hardware
from roofline.timing.arrays import ceil_div, choose, is_array, least, most, soft_most
from roofline.timing.efficiency import AttentionEfficiency, Efficiency

_MOST_SPLITS: Final = 128
_GOOD_FILL: Final = 0.85  # of the best fill of the SMs, which the kernel accepts to have fewer parts
_FULL: Final = 0.8  # of the SMs' slots, from which on keys aren't split
_MARGIN: Final = 1.1  # version 3 aims at this much more than an even share of the key blocks for each SM
_UNKNOWN_SMS: Final = 100
_UNKNOWN_L2_BYTES: Final = 32 * 2**20


@dataclass(frozen=True)
class AttentionWork:
    """What a batch gives the SMs to do: thread blocks and bytes, before any constant that is fitted."""

    blocks: Any  # key blocks of all thread blocks
    thread_blocks: Any
    empty_blocks: Any  # thread blocks that find nothing to do
    longest: Any  # key blocks of the longest thread block
    rows: Any  # query rows of all thread blocks
    block_rows: Any  # and of one
    parts: Any  # into which the keys of a decode are split
    apart: Any  # whether a group's queries have to be copied together
    tokens: Any
    query_bytes: Any
    cache_bytes: Any  # read once
    decode_bytes: Any  # of these the decodes' share
    reads: Any  # times that the decodes' keys are read by query heads that don't run together
    sweep_bytes: Any  # keys of one head of all decodes
    block_flops: Any
    kv_heads: Any
    head_dim: Any


def attention_prefill_s(
    batch: Any,
    query_len: Any,
    kv_len: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    *,
    chip: Hardware,
    eff: Efficiency,
    kv_bytes: float = 2.0,
    resident: bool = False,
) -> Any:
    """Seconds of causal attention of query_len new tokens that end a context of kv_len, for each of batch sequences."""
    shape = (heads, kv_heads, head_dim)
    return attention_mixed_s(
        batch, query_len, kv_len, 0, 1, *shape, chip=chip, eff=eff, kv_bytes=kv_bytes, resident=resident
    )


def attention_decode_s(
    batch: Any,
    kv_len: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    *,
    chip: Hardware,
    eff: Efficiency,
    kv_bytes: float = 2.0,
    resident: bool = False,
) -> Any:
    """Seconds of attention of one new token of each of batch sequences over kv_len positions, itself included."""
    shape = (heads, kv_heads, head_dim)
    return attention_mixed_s(0, 0, 0, batch, kv_len, *shape, chip=chip, eff=eff, kv_bytes=kv_bytes, resident=resident)


def attention_mixed_s(
    prefills: Any,
    query_len: Any,
    prefill_kv_len: Any,
    decodes: Any,
    decode_kv_len: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    *,
    chip: Hardware,
    eff: Efficiency,
    kv_bytes: float = 2.0,
    resident: bool = False,
) -> Any:
    """Seconds of one attention kernel over prompts' chunks and decodes together; writing the cache is apart.

    Leaves out the merge of a shared prefix and sliding windows: give the positions that are attended.
    """
    batch = (prefills, query_len, prefill_kv_len, decodes, decode_kv_len)
    work = attention_work(*batch, heads, kv_heads, head_dim, chip=chip, eff=eff.attention, kv_bytes=kv_bytes)
    seconds = attention_work_s(work, chip=chip, eff=eff.attention, resident=resident)
    if resident:
        return seconds
    pairs = prefills * (query_len * prefill_kv_len - query_len * (query_len - 1) / 2) + decodes * decode_kv_len
    flops = 4.0 * heads * head_dim * pairs
    return most(seconds, most(flops / _peak(chip), work.cache_bytes / chip.peak_bandwidth_bytes_per_s))


def kv_write_s(tokens: Any, kv_heads: Any, head_dim: Any, *, chip: Hardware, eff: Efficiency) -> Any:
    """Seconds of writing keys and values of new tokens into the cache, without its launch: a thread block each."""
    return _kv_write_s(tokens, kv_heads, head_dim, chip, eff.attention)


def _kv_write_s(tokens: Any, kv_heads: Any, head_dim: Any, chip: Hardware, eff: AttentionEfficiency) -> Any:
    threads = least(512.0, kv_heads * head_dim * 1.0)  # of 2048 that an SM holds
    slots = _sms(chip) * 2048 / threads
    moved = tokens * kv_heads * head_dim * 8.0 / (chip.peak_bandwidth_bytes_per_s * eff.memory_fraction)
    return most(tokens * eff.cache_write_block_s / slots, moved)


def _peak(chip: Hardware) -> float:
    rates = chip.peak_flops_per_s
    return rates["bfloat16"] if "bfloat16" in rates else chip.flops_per_s("float16")


def _sms(chip: Hardware) -> int:
    return chip.sm_count or _UNKNOWN_SMS


def attention_work(
    prefills: Any,
    query_len: Any,
    prefill_kv_len: Any,
    decodes: Any,
    decode_kv_len: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    *,
    chip: Hardware,
    eff: AttentionEfficiency,
    kv_bytes: float = 2.0,
) -> AttentionWork:
    """Counts thread blocks and bytes of one attention kernel; depends on how the kernel is built, on nothing fitted."""
    group, sms, high = heads / kv_heads, _sms(chip), eff.rows_per_block
    wide = most(64.0, least(256.0, eff.columns_per_block * 128.0 / head_dim))
    has_prompt, has_decode, new = prefills > 0, decodes > 0, query_len * 1.0
    packed = eff.is_version_3
    # Prompts: query blocks of `high` rows; version 3 counts a group's heads among the rows.
    rows = new * (group if packed else 1.0)
    row_blocks = choose(has_prompt, ceil_div(rows, high), 0)
    step = new / most(row_blocks, 1.0)  # tokens of a row block
    seen = ceil_div(prefill_kv_len, wide)
    first = (prefill_kv_len - new) / wide
    many = row_blocks * (first + least(0.5, most(0.0, (1 - step / wide) / 2))) + new * (row_blocks + 1) / 2 / wide
    prompt_heads = prefills * (kv_heads if packed else heads)
    prompt_blocks = prompt_heads * choose(row_blocks <= 1, seen * has_prompt, many)
    # Decodes: a group's heads in one thread block unless a prompt rides along in version 2.
    apart = has_prompt if not packed else has_prompt * 0 > 0
    decode_heads = decodes * choose(apart, heads, kv_heads * ceil_div(group, high))
    decode_seen = ceil_div(decode_kv_len, wide) * has_decode
    parts = _parts(decode_heads, decode_seen, sms, packed)
    parts = choose(has_prompt if packed else has_prompt | (group <= 1), 1.0, parts)
    per_head = most(decodes + prefills * row_blocks, 1.0)
    together = most(1.0, least(group, sms * eff.blocks_per_sm / per_head))
    position = head_dim * 2.0 * kv_bytes
    return AttentionWork(
        blocks=prompt_blocks + decode_heads * decode_seen,
        thread_blocks=prompt_heads * row_blocks + decode_heads * parts,
        empty_blocks=choose(apart, decodes * heads * most(row_blocks - 1, 0), 0.0),
        longest=most(seen * has_prompt, ceil_div(decode_seen, parts)),
        rows=prefills * new * heads + decodes * heads * parts,
        block_rows=most(least(high, rows) * has_prompt, choose(apart, 1.0, least(group, high)) * has_decode),
        parts=parts,
        apart=(group > 1) & (kv_heads > 1) & (decodes > 1) & (not packed) & (prefills <= 0),
        tokens=prefills * new + decodes,
        query_bytes=(prefills * new + decodes) * heads * head_dim * 4.0,
        cache_bytes=(prefills * prefill_kv_len + decodes * decode_kv_len) * kv_heads * position,
        decode_bytes=decodes * decode_kv_len * kv_heads * position,
        reads=choose(apart, group / together, 1.0),
        sweep_bytes=decodes * decode_kv_len * position,
        block_flops=4.0 * high * wide * head_dim,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _parts(thread_blocks: Any, key_blocks: Any, sms: int, by_load: bool) -> Any:
    """Into how many parts the keys of each decode are split, as the kernels of version 3 (by load) or 2 decide."""
    key_blocks = most(key_blocks, 1.0)
    if by_load:
        return ceil_div(key_blocks, most(1.0, ceil_div(thread_blocks * key_blocks * _MARGIN, sms)))
    slots, best, chosen = 2 * sms, 0.0 * key_blocks, 1.0 + 0.0 * key_blocks
    fills = []
    limit = int(min(_MOST_SPLITS, slots, key_blocks.max() if is_array(key_blocks) else key_blocks))
    for parts in range(1, limit + 1):
        waves = thread_blocks * float(parts) / slots
        fill = waves / most(ceil_div(waves, 1), 1e-9)
        new = ceil_div(key_blocks, parts) != ceil_div(key_blocks, max(parts - 1, 1))
        fills.append(choose((parts <= key_blocks) & (new | (parts == 1)), fill, 0.0))
        best = most(best, fills[-1])
    for parts in range(limit, 0, -1):
        chosen = choose((fills[parts - 1] > 0) & (fills[parts - 1] >= _GOOD_FILL * best), float(parts), chosen)
    return choose(thread_blocks >= _FULL * slots, 1.0, chosen)


def attention_work_s(work: AttentionWork, *, chip: Hardware, eff: AttentionEfficiency, resident: bool = False) -> Any:
    """Seconds of counted work: SMs or memory, whichever is slower, then the kernels around it."""
    bandwidth = chip.peak_bandwidth_bytes_per_s
    memory = _memory_bytes(work, chip, eff, resident) / (bandwidth * eff.memory_fraction)
    seconds = eff.launch_s + soft_most(_sm_time_s(work, chip, eff), memory, eff.sharpness)
    seconds = seconds + (work.parts > 1) * (eff.combine_s + eff.combine_part_s * work.parts)
    # Queries and outputs are read and written once more, two bytes each.
    copied = work.query_bytes * 2 / (bandwidth * eff.transpose_memory_fraction)
    return seconds + work.apart * (eff.transpose_s + copied)


def _sm_time_s(work: AttentionWork, chip: Hardware, eff: AttentionEfficiency) -> Any:
    sms = _sms(chip)
    sm_rate = _peak(chip) / sms
    total = work.blocks * work.block_flops / (sm_rate * eff.compute_fraction)
    total = total + work.thread_blocks * eff.block_start_s + work.rows * eff.row_s
    longest = work.longest * work.block_flops / (sm_rate * eff.block_compute_fraction)
    longest = longest + eff.block_start_s + work.block_rows * eff.row_s
    slots = sms * eff.blocks_per_sm
    waves = work.thread_blocks / slots
    one_wave = total * eff.blocks_per_sm / most(work.thread_blocks, 1.0)
    shared = (total + work.empty_blocks * eff.empty_block_s) / sms
    shared = shared + eff.longest_share * longest * most(0.0, least(1.0, waves - 1))
    shared = shared + eff.wave_share * (ceil_div(work.thread_blocks, slots) - waves) * one_wave * (waves > 1)
    return soft_most(shared, longest, eff.work_sharpness)


def _memory_bytes(work: AttentionWork, chip: Hardware, eff: AttentionEfficiency, resident: bool) -> Any:
    capacity = (chip.l2_bytes or _UNKNOWN_L2_BYTES) * eff.l2_share
    missed = 1 - 1 / (1 + (work.sweep_bytes / capacity) ** 3)
    moved = work.cache_bytes + work.decode_bytes * (work.reads - 1) * missed + work.query_bytes
    if not resident:
        return moved
    near = 1 / (1 + (moved / capacity) ** 6)
    return moved * (1 - near * (1 - 1 / eff.l2_speed))
