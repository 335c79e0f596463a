"""What XLA's cost analysis must say of a training step's other work, by hand: there, back, and the update.

Counted as in `compiled`. Each op's derivative is written out: what its forward pass keeps for it, and what its backward
pass multiplies and adds. One loss (next token) and one optimiser: AdamW after clipping by the global norm to 1, with a
cosine schedule, as `TrainConfig()` has them.

P parameters in `leaves` arrays, of which `decayed` are matrices; m = B*(T - 1) labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from roofline.formulas.compiled import (
    INDEX_FLOPS,
    LOGISTIC_FLOPS,
    UNSCOPED,
    CompiledStep,
    Elementwise,
    add_up,
    block_indices,
    expert_blocks,
    is_gathered,
    norm_cost,
    rope_amplitude,
    search_turns,
    softmax_cost,
)
from roofline.formulas.params import num_params, num_sparse_layers, shared_expert_width

if TYPE_CHECKING:
    from qwenjax.config import ModelConfig

SCHEDULE_FLOPS, SCHEDULE_TRANSCENDENTALS = 35, 6  # rate, bias corrections, step counts: numbers, not arrays


def training_costs(config: ModelConfig, step: CompiledStep) -> tuple[Elementwise, ...]:
    """All work of a training step beside its products, by op and class."""
    parts = (_frame, _norms, _rope, _attention, _projections, _mlps, _routers, _experts, _shared, _loss, _optimizer)
    return add_up(cost for part in parts for cost in part(config, step))


def forward_runs(step: CompiledStep) -> int:
    """How often what stands before the last product of a block is computed: twice where the way back recomputes it."""
    return 1 if step.remat == "none" else 2


def _frame(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    hidden, layers = config.hidden_size, config.num_hidden_layers
    yield Elementwise("embed", "index", INDEX_FLOPS * step.tokens)
    joined = config.vocab_size * hidden if config.tie_word_embeddings else 0  # to the output head's gradient
    yield Elementwise("embed", "gradient", step.tokens * hidden + joined)
    yield Elementwise("attention_residual", "residual", layers * forward_runs(step) * step.tokens * hidden)
    yield Elementwise("mlp_residual", "residual", layers * step.tokens * hidden)


def _norms(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    """RMSNorm keeps its root's derivative; back, a product for each factor, and two sums, over rows and over widths."""
    layers, hidden, tokens, head_dim = config.num_hidden_layers, config.hidden_size, step.tokens, config.head_dim
    places = [("input_norm", layers, tokens, hidden), ("post_norm", layers, tokens, hidden)]
    places.append(("final_norm", 1, tokens, hidden))
    if config.model_type.startswith("qwen3"):
        of_kinds = (config.num_attention_heads, config.num_key_value_heads)
        places += [("qk_norm", layers, tokens * heads, head_dim) for heads in of_kinds]
    for op, times, rows, width in places:
        forward, roots = norm_cost(rows, width)
        backward = 10 * rows * width + rows - width
        joined = rows * width if op in ("input_norm", "post_norm") else 0  # the residual stream's gradient is added
        runs = 1 if op == "final_norm" else forward_runs(step)
        yield Elementwise(op, "norm", times * (runs * forward + 2 * rows + backward + joined), times * runs * roots)
        yield Elementwise(op, "cast", 2 * (runs + 1) * step.casts * times * rows * width)


def _rope(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    tokens, head_dim = step.tokens, config.head_dim
    scaled = 0 if rope_amplitude(config) == 1 else tokens * head_dim
    yield Elementwise("rope", "rope", tokens * head_dim // 2 + scaled, tokens * head_dim)
    yield Elementwise("rope", "cast", tokens + step.casts * tokens * head_dim)
    pairs = tokens * (config.num_attention_heads + config.num_key_value_heads) * head_dim // 2
    there, back = 6 * forward_runs(step), 7
    yield Elementwise("rope", "rope", config.num_hidden_layers * (there + back) * pairs)


def _attention(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    windows = set(config.sliding_windows)
    pairs = step.tokens * step.query_len
    yield Elementwise("softmax", "mask", sum(pairs * (2 if window is None else 4) for window in windows))
    rows = config.num_hidden_layers * step.tokens * config.num_attention_heads
    scored = rows * step.query_len
    (forward, exponentials), runs = softmax_cost(rows, step.query_len), forward_runs(step)
    yield Elementwise("scores", "softmax", (runs + 1) * scored)
    yield Elementwise("softmax", "mask", (runs + 1) * scored)
    yield Elementwise("softmax", "softmax", runs * forward + 2 * rows + 6 * scored, runs * exponentials)
    yield Elementwise("softmax", "cast", 2 * (runs + 1) * step.casts * scored)


def _projections(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    """Biases, and their gradients summed over the tokens; the gradient of q, k and v put together again."""
    layers, tokens, runs = config.num_hidden_layers, step.tokens, forward_runs(step)
    width = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    yield Elementwise(UNSCOPED, "gradient", layers * 2 * tokens * width)
    if config.qkv_bias:
        yield Elementwise("qkv_proj", "bias", layers * ((runs + 1) * tokens - 1) * width)
    if config.attention_o_bias:
        yield Elementwise("o_proj", "bias", layers * ((runs + 1) * tokens - 1) * config.hidden_size)


def _mlps(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    dense = (config.num_hidden_layers - num_sparse_layers(config)) * step.tokens * config.intermediate_size
    runs, derivative, back = forward_runs(step), 2, 8
    yield Elementwise("swiglu", "silu", (runs * (LOGISTIC_FLOPS + 2) + derivative + back) * dense, runs * dense)


def _routers(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    """The router's softmax and its derivative, and the weighted sum of the experts' outputs."""
    sparse, chosen, experts = num_sparse_layers(config), config.num_experts_per_tok, config.num_experts
    tokens, hidden, runs = sparse * step.tokens, config.hidden_size, forward_runs(step)
    if not sparse:
        return
    (forward, exponentials) = softmax_cost(tokens, experts)
    again, back = (2 * chosen - 1, 5 * chosen + 2) if config.norm_topk_prob else (0, 0)
    yield Elementwise(
        "top_k",
        "router",
        runs * (forward + tokens * again) + 2 * tokens + 6 * tokens * experts + tokens * back,
        runs * exponentials,
    )
    yield Elementwise("top_k", "gradient", tokens * chosen)
    yield Elementwise("top_k", "cast", (runs + 1) * step.casts * tokens * (experts + chosen))
    yield Elementwise("router", "gradient", tokens * hidden)  # joined with the experts'
    rows = tokens * chosen
    # The weighted sum stands last: no gradient needs it, and nothing recomputes it.
    yield Elementwise("combine", "router", tokens * hidden * (2 * chosen - 1) + rows * (3 * hidden - 1))
    yield Elementwise("combine", "cast", 2 * step.casts * tokens * hidden * (chosen + 1))


def _experts(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    """The experts' activation; gradients added where rows came from, and in a loop for blocks' weights."""
    sparse, experts, width = num_sparse_layers(config), config.num_experts, config.moe_intermediate_size
    if not sparse:
        return
    hidden, rows, runs = config.hidden_size, step.tokens * config.num_experts_per_tok, forward_runs(step)
    of_expert, activation = 3 * width * hidden, runs * (LOGISTIC_FLOPS + 2) + 10
    if is_gathered(rows, experts):
        yield Elementwise("experts_swiglu", "silu", sparse * rows * width * activation, sparse * runs * rows * width)
        yield Elementwise("experts_gate_up_proj", "gradient", sparse * rows * 2 * width * hidden)
        yield Elementwise("experts_down_proj", "gradient", sparse * rows * width * hidden)
        for op in ("experts_gate_up_proj", "experts_down_proj"):
            yield Elementwise(op, "index", sparse * runs * INDEX_FLOPS * rows)
        yield Elementwise(UNSCOPED, "gradient", sparse * (rows - step.tokens) * hidden)
        return
    count, block = expert_blocks(rows, experts)
    padded = sparse * count * block
    yield Elementwise("experts_swiglu", "silu", padded * width * activation, runs * padded * width)
    yield Elementwise("experts_gate_up_proj", "gradient", padded * hidden)
    yield Elementwise("combine", "gradient", sparse * rows * hidden)
    for op, kind, flops, _ in block_indices(rows, experts):
        yield Elementwise(op, "gradient" if op == UNSCOPED else kind, sparse * runs * flops)
    if step.remat != "none":  # what doesn't change in the search's loop is then taken out of it
        yield Elementwise("top_k", "index", -sparse * runs * (search_turns(experts) - 1))
    # Back, every turn adds gradients of all tokens and of every expert's weights, though it has those of one block.
    added = step.tokens * hidden + experts * of_expert
    yield Elementwise(UNSCOPED, "gradient", sparse * count * (4 + added))


def _shared(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    sparse, width, hidden = num_sparse_layers(config), shared_expert_width(config), config.hidden_size
    if not sparse or not width:
        return
    tokens, runs = sparse * step.tokens, forward_runs(step)
    activation = runs * (LOGISTIC_FLOPS + 2) + 10
    yield Elementwise("shared_swiglu", "silu", tokens * width * activation, runs * tokens * width)
    there, back = runs * LOGISTIC_FLOPS + 2 * hidden, 3 + 3 * hidden - 1
    yield Elementwise("shared_expert_gate", "gate", tokens * (there + back), runs * tokens)
    for op in ("shared_gate_up_proj", UNSCOPED):  # joined with the other parts' gradients
        yield Elementwise(op, "gradient", tokens * hidden)


def _loss(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    """Cross-entropy in float32 of each position's logits against the next token, and its gradient."""
    labels, vocab = step.batch * (step.query_len - 1), config.vocab_size
    log_softmax, exponentials = labels * (4 * vocab - 1), labels * (vocab + 1)
    picked = labels * (2 + INDEX_FLOPS + 4)  # which count, as indices tested against both ends
    mean = 2 * labels + 3
    yield Elementwise(UNSCOPED, "gradient", step.tokens + log_softmax + picked + mean, exponentials)
    yield Elementwise(UNSCOPED, "gradient", 4 * labels * vocab + 2 * labels + 2)
    yield Elementwise(UNSCOPED, "gradient", 2 * step.casts * labels * vocab)


def _optimizer(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    """Labels counted; the gradient's norm, twice; clipping; AdamW's averages, their corrections, decay and update."""
    labels, elements = step.batch * (step.query_len - 1), num_params(config)
    counted = step.tokens + 3 * labels - 1
    norms = 2 * (2 * elements - 1)
    clipped, averages, corrected, divided = 2 * elements, 7 * elements, 2 * elements, 2 * elements
    decayed = 2 * (elements - undecayed_params(config))
    applied = 2 * elements
    casts = step.casts * (2 * elements + 5 * num_arrays(config))
    flops = norms + clipped + averages + corrected + divided + decayed + applied + casts
    yield Elementwise(
        "optimizer", "optimizer", counted + flops + SCHEDULE_FLOPS, elements + 2 + SCHEDULE_TRANSCENDENTALS
    )


def num_arrays(config: ModelConfig) -> int:
    """Arrays that hold the parameters: q, k and v are one, gate and up are one, a layer's experts are two."""
    sparse = num_sparse_layers(config)
    of_layer = 4 + 2 * config.model_type.startswith("qwen3") + config.qkv_bias + config.attention_o_bias
    of_mixture = 3 + (3 if shared_expert_width(config) else 0)
    dense = config.num_hidden_layers - sparse
    once = 2 if config.tie_word_embeddings else 3
    return once + config.num_hidden_layers * of_layer + 2 * dense + of_mixture * sparse


def undecayed_params(config: ModelConfig) -> int:
    """Scales of norms and biases, which weight decay leaves alone."""
    layers, head_dim, hidden = config.num_hidden_layers, config.head_dim, config.hidden_size
    width = (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
    qk_norm = 2 * head_dim if config.model_type.startswith("qwen3") else 0
    biases = width * config.qkv_bias + hidden * config.attention_o_bias
    return layers * (2 * hidden + qk_norm + biases) + hidden
