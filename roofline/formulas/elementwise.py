"""Operations outside the matmuls, by operation counts that are named and can be changed.

No two counters agree on these (is an exponential one operation?), so the counts for each element are arguments. The
defaults are those of seed ledger S000-034, S000-102 and S000-105; with them Qwen2.5-7B spends 4.14 MFLOP on a token,
0.03% of its matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.formulas.params import num_sparse_layers, shared_expert_width

if TYPE_CHECKING:
    from qwenjax.config import ModelConfig


@dataclass(frozen=True)
class OperationCounts:
    """Operations for each element: the convention of an elementwise account."""

    rms_norm: int = 4  # square, add to the sum, times the reciprocal root, times the scale
    rope: int = 3  # two products and a sum for each output element
    bias: int = 1
    silu: int = 4  # negate, exponential, add, divide
    product: int = 1
    residual: int = 1
    softmax: int = 5  # maximum, subtract, exponential, sum, divide
    scale: int = 1


DEFAULT_COUNTS = OperationCounts()


def elementwise_flops_per_token(config: ModelConfig, counts: OperationCounts = DEFAULT_COUNTS) -> dict[str, int]:
    """Elementwise operations of one token by kind, over all layers and the final norm; an absent part is 0.

    Softmax and scaling of the scores grow with the context and are in `softmax_flops_per_pair` and
    `scale_flops_per_pair`.
    """
    layers, hidden, head_dim = config.num_hidden_layers, config.hidden_size, config.head_dim
    query_and_key = (config.num_attention_heads + config.num_key_value_heads) * head_dim
    qkv = query_and_key + config.num_key_value_heads * head_dim
    bias = qkv * config.qkv_bias + hidden * config.attention_o_bias
    return {
        "rms_norm": (2 * layers + 1) * counts.rms_norm * hidden,
        "qk_norm": layers * counts.rms_norm * query_and_key if config.qk_norm else 0,
        "rope": layers * counts.rope * query_and_key,
        "bias": layers * counts.bias * bias,
        "silu_product": (counts.silu + counts.product) * active_ffn_elements(config),
        "residual": layers * counts.residual * 2 * hidden,
        "router_softmax": num_sparse_layers(config) * counts.softmax * config.num_experts,
        "expert_sum": _expert_sum_flops(config, counts),
    }


def active_ffn_elements(config: ModelConfig) -> int:
    """Feed-forward channels that one token fills, over all layers: F where dense, A*F + Fs where sparse (S000-183)."""
    sparse = num_sparse_layers(config)
    if not sparse:
        return config.num_hidden_layers * config.intermediate_size
    sparse_width = config.num_experts_per_tok * config.moe_intermediate_size + shared_expert_width(config)
    return (config.num_hidden_layers - sparse) * config.intermediate_size + sparse * sparse_width


def _expert_sum_flops(config: ModelConfig, counts: OperationCounts) -> int:
    """Weighting and adding A expert outputs, dividing by the sum where weights are renormalised, and the shared
    gate.
    """
    chosen, hidden = config.num_experts_per_tok, config.hidden_size
    per_layer = chosen * counts.product * hidden + (chosen - 1) * counts.residual * hidden
    if config.norm_topk_prob:
        per_layer += 2 * chosen - 1  # A - 1 adds and A divisions
    if shared_expert_width(config):
        sigmoid = counts.silu  # z * sigmoid(z) without its product, which the gate spends on the output below
        per_layer += sigmoid + (counts.product + counts.residual) * hidden
    return num_sparse_layers(config) * per_layer


def softmax_flops_per_pair(heads: int, layers: int = 1, counts: OperationCounts = DEFAULT_COUNTS) -> int:
    """Softmax operations for each (query, key) pair over all heads and layers, 5*N*L (S000-103 is half, by S^2)."""
    return counts.softmax * heads * layers


def scale_flops_per_pair(heads: int, layers: int = 1, counts: OperationCounts = DEFAULT_COUNTS) -> int:
    """Scalings by 1/sqrt(H) for each (query, key) pair over all heads and layers, N*L (S000-105 is half, by S^2)."""
    return counts.scale * heads * layers
