"""Rotary position embedding: frequencies and pairs (Su et al. 2021). No parameters."""

from __future__ import annotations


def rope_frequencies(head_dim: int, theta: float) -> list[float]:
    """Radians for each position of the H/2 pairs, theta^(-2i/H) (S000-076, S002-034); without any scaling such as
    YaRN.
    """
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def rope_pair(i: int, head_dim: int) -> tuple[int, int]:
    """Components that pair i turns: (i, i + H/2), the half-split layout of Qwen checkpoints (S000-077, S002-037)."""
    return i, i + head_dim // 2
