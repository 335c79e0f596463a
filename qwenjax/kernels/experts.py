"""Routed experts by kernels that read the weights of chosen experts and of no others."""

from __future__ import annotations

import jax

from qwenjax.kernels.choice import is_narrow
from qwenjax.kernels.experts_gathered import gathered
from qwenjax.kernels.experts_grouped import grouped

Array = jax.Array


def fits(x_ND: Array, weights_NA: Array, gate_up_ECFD: Array, down_EDF: Array) -> bool:
    return is_narrow(x_ND, weights_NA, gate_up_ECFD, down_EDF) and x_ND.shape[0] > 0


def experts(
    x_ND: Array,
    weights_NA: Array,
    chosen_NA: Array,
    gate_up_ECFD: Array,
    down_EDF: Array,
    *,
    interpret: bool = False,
) -> Array:
    """Sum over each token's experts of weight x expert(token), [N, D], as `qwenjax.moe.run_experts`.

    One token's experts are all different and need no grouping; two tokens may share one, whose weights are then read
    once.
    """
    way = gathered if x_ND.shape[0] == 1 else grouped
    return way(x_ND, weights_NA, chosen_NA, gate_up_ECFD, down_EDF, interpret)
