"""The FLOPs of one whole request, P tokens in and O tokens out, under three accounts that are all in use.

| convention | tokens through the backbone | output heads | prefill pairs | keys of the decode steps | weights counted |
|---|---|---|---|---|---|
| exact | P + O - 1 | O | P*(P+1)/2 | P+1 .. P+O-1 | matmul weights |
| seed | P + O | O + 1 | P^2/2 | P .. P+O-1 | norms and biases too |
| vllm-0.26 | P + O - 1 | O, and 1 for each further chunk | of a chunk tokens * context | P+1 .. P+O-1 | see below |

The prefill's last position gives output 1, so O - 1 decode steps follow and the last output is never fed back. vLLM's
counter (`vllm:estimated_flops_per_gpu_total`) is an estimate from the configuration too; it has no causal half, and in
a mixture it takes every layer as sparse and sees neither the router nor a shared expert that is given by
`shared_expert_intermediate_size`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from qwenjax.errors import InputError
from roofline.formulas.attention import (
    attention_flops,
    attention_flops_per_pair,
    causal_pairs,
    half_square_attention_flops,
)
from roofline.formulas.flops import flops_per_token, linear_flops
from roofline.formulas.params import (
    attention_params,
    idle_expert_params,
    mlp_params,
    num_backbone_params,
    num_sparse_layers,
)

if TYPE_CHECKING:
    from qwenjax.config import ModelConfig

Convention = Literal["exact", "seed", "vllm-0.26"]


class RequestFlops(NamedTuple):
    """FLOPs of one request by term, with the counts of tokens and heads behind them."""

    backbone_tokens: int
    lm_head_runs: int
    backbone: int
    lm_head: int
    prefill_attention: int
    decode_attention: int

    @property
    def total(self) -> int:
        return self.backbone + self.lm_head + self.prefill_attention + self.decode_attention


def request_flops(
    config: ModelConfig,
    prompt: int,
    output: int,
    *,
    convention: Convention = "exact",
    chunk: int | None = None,
) -> RequestFlops:
    """FLOPs of a request of `prompt` tokens in and `output` tokens out (S000-057, S000-059, S000-062).

    Qwen2.5-7B at 1024/256: 17,299.303 GFLOP exact, 17,314.502 seed, 17,509.551 vllm-0.26. `chunk` cuts the prefill into
    pieces of that many tokens; only vLLM's account depends on it. "exact" follows sliding windows, "seed" knows none.
    """
    if prompt < 1 or output < 1:
        field, value = ("prompt", prompt) if prompt < 1 else ("output", output)
        raise InputError(field, value, "a request has at least one token in and one out", "Give a positive number.")
    if convention == "exact":
        return _exact(config, prompt, output)
    if convention == "seed":
        return _seed(config, prompt, output)
    return _vllm(config, prompt, output, chunk or prompt)


def written_kv_rows(prompt: int, output: int) -> int:
    """KV rows that a request writes, P + O - 1: the last output is never fed back; engines reserve P + O (S000-158)."""
    return prompt + output - 1


def _exact(config: ModelConfig, prompt: int, output: int) -> RequestFlops:
    tokens, per_token = written_kv_rows(prompt, output), flops_per_token(config)
    return RequestFlops(
        backbone_tokens=tokens,
        lm_head_runs=output,
        backbone=tokens * per_token.backbone,
        lm_head=output * per_token.lm_head,
        prefill_attention=attention_flops(config, prompt),
        decode_attention=attention_flops(config, output - 1, tokens),
    )


def _seed(config: ModelConfig, prompt: int, output: int) -> RequestFlops:
    heads, head_dim, layers = config.num_attention_heads, config.head_dim, config.num_hidden_layers
    tokens, runs = prompt + output, output + 1
    keys = causal_pairs(output, tokens - 1)  # P .. P+O-1
    return RequestFlops(
        backbone_tokens=tokens,
        lm_head_runs=runs,
        backbone=linear_flops(num_backbone_params(config) - idle_expert_params(config), tokens),
        lm_head=linear_flops(config.vocab_size * config.hidden_size, runs),
        prefill_attention=half_square_attention_flops(heads, head_dim, layers, prompt),
        decode_attention=attention_flops_per_pair(heads, head_dim, layers) * keys,
    )


def _vllm(config: ModelConfig, prompt: int, output: int, chunk: int) -> RequestFlops:
    heads, hidden, head_dim = config.num_attention_heads, config.hidden_size, config.head_dim
    tokens = written_kv_rows(prompt, output)
    starts = range(0, prompt, chunk)
    runs = len(starts) + output - 1
    per_pair = attention_flops_per_pair(heads, head_dim)
    prefill_pairs = sum(
        _chunk_pairs(start, min(start + chunk, prompt), window) for start in starts for window in config.sliding_windows
    )
    sparse_width = config.num_experts_per_tok * config.moe_intermediate_size
    width = sparse_width if num_sparse_layers(config) else config.intermediate_size
    layer = attention_params(hidden, heads, config.num_key_value_heads, head_dim) + mlp_params(hidden, width)
    return RequestFlops(
        backbone_tokens=tokens,
        lm_head_runs=runs,
        backbone=linear_flops(config.num_hidden_layers * layer, tokens),
        lm_head=linear_flops(config.vocab_size * hidden, runs),
        prefill_attention=per_pair * prefill_pairs,
        decode_attention=attention_flops(config, output - 1, tokens),
    )


def _chunk_pairs(start: int, end: int, window: int | None) -> int:
    """A chunk's tokens times its whole context, cut at the window: no token of it gets the causal discount."""
    return (end - start) * (end if window is None else min(end, window))
