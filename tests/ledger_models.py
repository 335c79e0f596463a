"""The five models of the seed ledger and short ways to ask the packages about them; ledger cases are written with
these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, dims, size
from roofline import formulas as f
from roofline.count import CountRow, ParamCounts, count_params, count_step, sum_rows

Case = Callable[[], object]

QWEN25_7B = ModelConfig.from_hf("Qwen2.5-7B")
QWEN2_57B = ModelConfig.from_hf("Qwen2-57B-A14B")
QWEN3_8B = ModelConfig.from_hf("Qwen3-8B")
QWEN3_32B = ModelConfig.from_hf("Qwen3-32B")
QWEN3_30B = ModelConfig.from_hf("Qwen3-30B-A3B")
MHA_7B = replace(QWEN25_7B, num_key_value_heads=28)
TIED_7B = replace(QWEN25_7B, tie_word_embeddings=True)

MEASURED_POOL_BYTES = 4_982_964_224  # 86,896 tokens of 57,344 bytes: the vLLM log of S000-165 and S000-166
GIB, GB = 2**30, 1e9


@cache
def params(config: ModelConfig) -> ParamCounts:
    return count_params(config)


def group(config: ModelConfig, *names: str) -> int:
    """Parameters of some groups of the whole model."""
    return sum(params(config).groups[name] for name in names)


def per_layer(config: ModelConfig, *names: str) -> int:
    """Parameters of some groups in one of the layers, which are all alike in the five models."""
    return group(config, *names) // config.num_hidden_layers


def percent_of(part: float, whole: float) -> float:
    return 100 * part / whole


def row(config: ModelConfig, op: str, step: Step, **conventions: Any) -> CountRow:
    """The counted row of one op."""
    return next(r for r in count_step(config, step, **conventions) if r.op == op)


def step_sum(config: ModelConfig, step: Step, field: str, **conventions: Any) -> int:
    return int(sum_rows(count_step(config, step, **conventions))[field])


def in_out(config: ModelConfig, name: str, width: int | None = None) -> list[int]:
    """[in, out] of a projection of one layer, by checkpoint name."""
    shapes = f.projection_shapes(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size if width is None else width,
    )
    return list(shapes[name])


def letters(config: ModelConfig, text: str, step: Step | None = None) -> list[int]:
    """Sizes of some dimension letters."""
    sizes = dims(config, step)
    return [int(sizes[letter]) for letter in text]


def product_of(config: ModelConfig, text: str) -> int:
    """Product of the sizes of some dimension letters."""
    return int(size(text, dims(config)))


def seed_prefill(length: int) -> tuple[int, int]:
    """Attention and other FLOPs of a Qwen2.5-7B prefill as the seed counts them: S^2/2, norms and biases, one output
    head.
    """
    attention = f.half_square_attention_flops(28, 128, 28, length)
    weights = f.linear_flops(f.num_backbone_params(QWEN25_7B), length) + f.flops_per_token(QWEN25_7B).lm_head
    return attention, weights


def causal_attention(config: ModelConfig, step: Step) -> int:
    """Counted FLOPs of scores and values of one step."""
    return int(row(config, "scores", step).flops + row(config, "values", step).flops)
