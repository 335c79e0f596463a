"""How routed rows are spread: which way they run, and the blocks of the grouped way. Arithmetic only, without JAX."""

from __future__ import annotations

from typing import Literal

TILE_ROWS = 16  # the GPU kernels round an expert's rows up to them: the fewest of a Triton product
Way = Literal["dense", "gathered", "grouped"]


def choose_way(num_tokens: int, experts_per_token: int, num_experts: int) -> Way:
    """Gathered while the tokens' experts, counted with repeats, are at most half of all; grouped beyond."""
    return "gathered" if 2 * num_tokens * experts_per_token <= num_experts else "grouped"


def block_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a block in the grouped way: about an expert's average, a power of two from 8 to 64."""
    average = max(1, num_rows // num_experts)
    return int(min(64, max(8, 1 << (average - 1).bit_length())))


def num_blocks(num_rows: int, num_experts: int) -> int:
    """Blocks that any routing of so many rows fits in: whole ones, and a started one for each expert."""
    return num_rows // block_rows(num_rows, num_experts) + min(num_experts, num_rows)
