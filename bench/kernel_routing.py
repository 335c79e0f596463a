"""How many rows and distinct experts one rank gets in the routings that the kernel tables name.

balanced: every expert the same. power_law_A: each expert's share drawn from x^-A between 1 and 0.8 of the tokens (from
0.01 to 2 where there are fewer choices than experts), then rounded; of several ranks the one with the most rows counts.
So ai-dynamo/aiconfigurator draws them; here a few draws of a fixed seed are averaged.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Final

from qwenjax.errors import InputError

_DRAWS: Final = 8


@cache
def routed(tokens: int, per_token: int, experts: int, ranks: int, distribution: str) -> tuple[float, float]:
    """Rows and distinct experts of the fullest of `ranks` ranks, which share the experts evenly."""
    local = max(1, experts // ranks)
    if distribution == "balanced":
        return _fullest(_balanced(tokens * per_token, experts), local)
    name, _, exponent = distribution.rpartition("_")
    if name != "power_law" or not exponent.replace(".", "", 1).isdigit() or float(exponent) == 1:
        raise InputError("distribution", distribution, "is not a routing that is known", "Known: balanced, power_law_A")
    source = random.Random(0)
    draws = [_fullest(_power_law(tokens, per_token, experts, float(exponent), source), local) for _ in range(_DRAWS)]
    return sum(rows for rows, _ in draws) / _DRAWS, sum(distinct for _, distinct in draws) / _DRAWS


def _fullest(counts: list[int], local: int) -> tuple[float, float]:
    ranks = [counts[start : start + local] for start in range(0, len(counts) - local + 1, local)]
    fullest = max(ranks, key=sum)
    return float(sum(fullest)), float(sum(count > 0 for count in fullest))


def _balanced(choices: int, experts: int) -> list[int]:
    counts = [choices // experts] * experts
    for index in range(choices % experts):
        counts[index * experts // (choices % experts)] += 1
    return counts


def _power_law(tokens: int, per_token: int, experts: int, exponent: float, source: random.Random) -> list[int]:
    choices = tokens * per_token
    low, high = (1.0, 0.8 * tokens) if choices > experts else (0.01, 2.0)
    high, power = max(high, low * 1.001), 1 - exponent
    shares = [(low**power + (high**power - low**power) * source.random()) ** (1 / power) for _ in range(experts)]
    scale = choices / sum(shares)
    counts = [min(tokens, round(share * scale)) for share in shares]
    order = sorted(range(experts), key=lambda index: -shares[index])
    left, place = choices - sum(counts), 0
    while left:  # what rounding and the limit left over goes to the most wanted experts in turn
        index, change = order[place % experts], 1 if left > 0 else -1
        if 0 <= counts[index] + change <= tokens:
            counts[index] += change
            left -= change
        place += 1
    return counts
