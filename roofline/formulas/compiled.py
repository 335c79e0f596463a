"""What XLA's cost analysis must say of one step, by hand: each op's products, and its other work class by class.

Written from what the architecture computes and from XLA's counting rules (HloCostAnalysis, seen with JAX 0.10): one
FLOP for each element of an add, product, quotient, comparison, selection or cast, of integers too; a reduction of w
elements takes w - 1; a logistic counts 3 and a transcendental; exp, rsqrt, cos and sin are transcendentals alone;
sorting n elements takes n*ceil(log2 n); a running sum is a window over all that went before, n - 1 for each element.
What is known before the step runs (the positions of a single token, the index of a single row) is folded and free.

Letters: B sequences, T new tokens in each, S attended, D hidden, N query heads, K KV heads, H head dimension, F a
feed-forward width, E experts, A of them for a token, V vocabulary; n = B*T tokens, R = n*A routed rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from roofline.formulas.attention import dense_pairs
from roofline.formulas.flops import matmul_flops
from roofline.formulas.params import num_sparse_layers, shared_expert_width

if TYPE_CHECKING:
    from qwenjax.config import ModelConfig

CompiledPhase = Literal["prefill", "chunk", "decode", "train"]
Remat = Literal["none", "full", "dots"]
WorkClass = Literal[
    "norm",
    "rope",
    "softmax",
    "mask",
    "silu",
    "router",
    "gate",
    "bias",
    "residual",
    "cast",
    "index",
    "cache",
    "sampling",
    "gradient",
    "optimizer",
]
UNSCOPED = "unscoped"  # work outside the named ops: positions, the turns of the expert loop
INDEX_FLOPS = 3  # an index below 0 counts from the end: a test, a sum and a selection
FLOOR_DIVISION_FLOPS = 8  # of integers: quotient, sign, remainder, three tests, correction, selection
REMAINDER_FLOPS = 7  # of integers: remainder, three tests, a conjunction, correction, selection
LOGISTIC_FLOPS = 3


class CompiledStep(NamedTuple):
    """One step as it is compiled: a prompt (S = T), a later chunk (S > T), a decode step (T = 1), or training."""

    phase: CompiledPhase
    batch: int
    query_len: int
    kv_len: int
    dtype: str = "bfloat16"
    remat: Remat = "none"  # what a training step computes again on the way back

    @property
    def tokens(self) -> int:
        return self.batch * self.query_len

    @property
    def casts(self) -> int:
        """1 where float32 arithmetic inside a narrower model takes a cast each way, 0 in a float32 model."""
        return int(self.dtype != "float32")

    @property
    def positions_known(self) -> bool:
        """Prompts of one token: their position is 0, and what follows from that alone is folded."""
        return self.phase == "prefill" and self.query_len == 1


class Elementwise(NamedTuple):
    """Work of one class in one op over all its layers, in XLA's count."""

    op: str
    kind: WorkClass
    flops: int
    transcendentals: int = 0


class Blocks(NamedTuple):
    """How routed rows are spread in the grouped way: so many blocks of so many rows, each of one expert."""

    blocks: int
    rows: int


def is_gathered(rows: int, experts: int) -> bool:
    """Whether the experts' weights are taken out of the stack row by row: while twice the rows are at most E."""
    return 2 * rows <= experts


def expert_blocks(rows: int, experts: int) -> Blocks:
    """Blocks that hold `rows` routed rows whatever the routing: whole ones, and a started one for each expert.

    A block has the average rows of an expert rounded up to a power of two, from 8 to 64.
    """
    block = 8
    while block < 64 and block < rows // experts:
        block *= 2
    return Blocks(rows // block + min(experts, rows), block)


def product_flops(config: ModelConfig, step: CompiledStep) -> dict[str, int]:
    """FLOPs of each op's matrix products, 2*m*k*n each; attention dense, experts at their routed rows.

    The output head sees the last position of each row, and in training every one. Training runs a product once on the
    way there and twice on the way back (for its input and its weight), and once more what it computes again.
    """
    tokens, hidden = step.tokens, config.hidden_size
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layers, sparse = config.num_hidden_layers, num_sparse_layers(config)
    scores = step.batch * heads * 2 * head_dim * dense_pairs(step.query_len, step.kv_len)
    flops = {
        "qkv_proj": layers * matmul_flops(tokens, hidden, (heads + 2 * kv_heads) * head_dim),
        "scores": layers * scores,
        "values": layers * scores,
        "o_proj": layers * matmul_flops(tokens, heads * head_dim, hidden),
        "gate_up_proj": (layers - sparse) * matmul_flops(tokens, hidden, 2 * config.intermediate_size),
        "down_proj": (layers - sparse) * matmul_flops(tokens, config.intermediate_size, hidden),
        "unembed": matmul_flops(step.tokens if step.phase == "train" else step.batch, hidden, config.vocab_size),
    }
    if sparse:
        rows, width, shared = (
            tokens * config.num_experts_per_tok,
            config.moe_intermediate_size,
            shared_expert_width(config),
        )
        flops |= {
            "router": sparse * matmul_flops(tokens, hidden, config.num_experts),
            "experts_gate_up_proj": sparse * matmul_flops(rows, hidden, 2 * width),
            "experts_down_proj": sparse * matmul_flops(rows, width, hidden),
            "shared_gate_up_proj": sparse * matmul_flops(tokens, hidden, 2 * shared),
            "shared_down_proj": sparse * matmul_flops(tokens, shared, hidden),
            "shared_expert_gate": sparse * matmul_flops(tokens, hidden, 1 if shared else 0),
        }
    return {op: runs_of(op, config, step) * count for op, count in flops.items() if count}


def runs_of(op: str, config: ModelConfig, step: CompiledStep) -> int:
    """How often a step runs a product of this size: once; in training three times, and again where it is recomputed.

    `full` recomputes all of a block but its last product, whose result no gradient needs: a dense block's down_proj (a
    mixture's is weighted, and so is needed). `dots` recomputes the products that multiply one batch after another:
    attention's, and the experts' where their weights are gathered.
    """
    if step.phase != "train":
        return 1
    if step.remat == "none" or op in ("unembed", "down_proj"):
        return 3
    batched = op in ("scores", "values")
    if op in ("experts_gate_up_proj", "experts_down_proj"):
        batched = is_gathered(step.tokens * config.num_experts_per_tok, config.num_experts)
    return 4 if step.remat == "full" or batched else 3


def padding_flops(config: ModelConfig, step: CompiledStep) -> dict[str, int]:
    """FLOPs that the grouped way spends on filling blocks, at most: a block that no row needs is skipped as it runs."""
    if not num_sparse_layers(config):
        return {}
    routed = step.tokens * config.num_experts_per_tok
    if is_gathered(routed, config.num_experts):
        return {}
    count, rows = expert_blocks(routed, config.num_experts)
    filling = num_sparse_layers(config) * (count * rows - routed)
    hidden, width = config.hidden_size, config.moe_intermediate_size
    once = {
        "experts_gate_up_proj": matmul_flops(filling, hidden, 2 * width),
        "experts_down_proj": matmul_flops(filling, width, hidden),
    }
    return {op: runs_of(op, config, step) * flops for op, flops in once.items()}


def elementwise_costs(config: ModelConfig, step: CompiledStep) -> tuple[Elementwise, ...]:
    """All other work of a prefill, chunk or decode step, by op and class, in XLA's count."""
    parts = (_frame, _norms, _rope, _attention, _projections, _mlps, _routers, _experts, _cache)
    return add_up(cost for part in parts for cost in part(config, step))


def add_up(costs: Iterable[Elementwise]) -> tuple[Elementwise, ...]:
    """One entry for each op and class; what costs nothing is left out."""
    flops: Counter[tuple[str, WorkClass]] = Counter()
    transcendentals: Counter[tuple[str, WorkClass]] = Counter()
    for op, kind, count, special in costs:
        flops[op, kind] += count
        transcendentals[op, kind] += special
    return tuple(
        Elementwise(op, kind, flops[op, kind], transcendentals[op, kind])
        for op, kind in flops
        if flops[op, kind] or transcendentals[op, kind]
    )


def norm_cost(rows: int, width: int) -> tuple[int, int]:
    """RMSNorm of rows: squares, their sum, the mean, eps, times the root, times the weight; a root for each row."""
    return rows * (4 * width + 1), rows


def softmax_cost(rows: int, width: int) -> tuple[int, int]:
    """Softmax of rows: greatest (against -inf too), subtracted, summed, divided; an exponential for each element."""
    return rows * (4 * width - 1), rows * width


def silu_product_cost(elements: int) -> tuple[int, int]:
    """gate * sigmoid(gate) * up, element by element."""
    return elements * (LOGISTIC_FLOPS + 2), elements


def _frame(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    """What stands once: token ids as indices, positions, the last position of each row, residual sums."""
    batch, hidden = step.batch, config.hidden_size
    yield Elementwise("embed", "index", INDEX_FLOPS * step.tokens)
    if step.phase == "chunk" and step.query_len > 1:
        yield Elementwise(UNSCOPED, "index", step.tokens)  # each row's length plus 0, 1, 2...
    if step.phase != "decode":
        # The last position: length - 1 (at least 0 in a chunk), as an index that may lie outside.
        length = 2 if step.phase == "chunk" else 1
        tests = INDEX_FLOPS + 3  # against both ends
        yield Elementwise("final_norm", "index", batch * (length + tests) + batch * hidden)
    for op in ("attention_residual", "mlp_residual"):
        yield Elementwise(op, "residual", config.num_hidden_layers * step.tokens * hidden)


def _norms(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    layers, hidden, tokens = config.num_hidden_layers, config.hidden_size, step.tokens
    rows_of = {"input_norm": layers * tokens, "post_norm": layers * tokens, "final_norm": step.batch}
    widths = dict.fromkeys(rows_of, hidden)
    if config.model_type.startswith("qwen3"):
        rows_of["qk_norm"] = layers * tokens * (config.num_attention_heads + config.num_key_value_heads)
        widths["qk_norm"] = config.head_dim
    for op, rows in rows_of.items():
        yield Elementwise(op, "norm", *norm_cost(rows, widths[op]))
        yield Elementwise(op, "cast", 2 * step.casts * rows * widths[op])


def _rope(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    """Angles, cosines and sines once; in each layer two products and a sum for each element of queries and keys."""
    tokens, head_dim = step.tokens, config.head_dim
    if not (step.positions_known and step.batch == 1):
        scaled = 0 if rope_amplitude(config) == 1 else tokens * head_dim
        yield Elementwise("rope", "rope", tokens * head_dim // 2 + scaled, tokens * head_dim)
        known = tokens if step.positions_known else 0
        yield Elementwise("rope", "cast", tokens - known + step.casts * tokens * head_dim)
    rotated = (config.num_attention_heads + config.num_key_value_heads) * head_dim
    yield Elementwise("rope", "rope", config.num_hidden_layers * 3 * tokens * rotated)


def rope_amplitude(config: ModelConfig) -> float:
    """YaRN's factor on cos and sin (arXiv 2309.00071, equation 22): 0.1 ln(s) + 1, or as the config states it."""
    from math import log

    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def amplitude(scale: float) -> float:
        return 0.1 * scale * log(scaling.factor) + 1 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return amplitude(scaling.mscale) / amplitude(scaling.mscale_all_dim)
    return amplitude(1.0)


def _attention(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    """Scaling, mask and softmax of all pairs; the mask's own comparisons once for each width of window."""
    pairs = step.batch * dense_pairs(step.query_len, step.kv_len)
    if not step.positions_known:
        subtracted = 0 if step.kv_len == 1 else pairs  # position 0 is subtracted for nothing
        compared = sum(pairs if window is None else 3 * pairs for window in set(config.sliding_windows))
        yield Elementwise("softmax", "mask", len(set(config.sliding_windows)) * subtracted + compared)
    rows = config.num_hidden_layers * step.batch * config.num_attention_heads * step.query_len
    scored = rows * step.kv_len
    yield Elementwise("scores", "softmax", scored)
    yield Elementwise("softmax", "mask", scored)
    yield Elementwise("softmax", "softmax", *softmax_cost(rows, step.kv_len))
    yield Elementwise("softmax", "cast", 2 * step.casts * scored)


def _projections(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    tokens = config.num_hidden_layers * step.tokens
    if config.qkv_bias:
        width = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        yield Elementwise("qkv_proj", "bias", tokens * width)
    if config.attention_o_bias:
        yield Elementwise("o_proj", "bias", tokens * config.hidden_size)


def _mlps(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    tokens, sparse, shared = step.tokens, num_sparse_layers(config), shared_expert_width(config)
    dense = (config.num_hidden_layers - sparse) * tokens * config.intermediate_size
    yield Elementwise("swiglu", "silu", *silu_product_cost(dense))
    if sparse and shared:
        yield Elementwise("shared_swiglu", "silu", *silu_product_cost(sparse * tokens * shared))
        # Its own gate, a logistic of one number, times its output, added to the routed experts'.
        gated = sparse * tokens * (LOGISTIC_FLOPS + 2 * config.hidden_size)
        yield Elementwise("shared_expert_gate", "gate", gated, sparse * tokens)


def _routers(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    """Softmax over all experts, the largest kept (an opaque call without a count), and the weighted sum of outputs."""
    sparse, chosen, hidden = num_sparse_layers(config), config.num_experts_per_tok, config.hidden_size
    tokens = sparse * step.tokens
    if not sparse:
        return
    renormalised = tokens * (2 * chosen - 1) if config.norm_topk_prob else 0
    flops, transcendentals = softmax_cost(tokens, config.num_experts)
    yield Elementwise("top_k", "router", flops + renormalised, transcendentals)
    yield Elementwise("top_k", "cast", step.casts * tokens * (config.num_experts + chosen))
    yield Elementwise("combine", "router", tokens * hidden * (2 * chosen - 1))
    yield Elementwise("combine", "cast", step.casts * tokens * hidden * (chosen + 1))


def _experts(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    """The experts' activation, and the indices that bring rows to their experts and back."""
    sparse, experts, width = num_sparse_layers(config), config.num_experts, config.moe_intermediate_size
    if not sparse:
        return
    rows = step.tokens * config.num_experts_per_tok
    if is_gathered(rows, experts):
        yield Elementwise("experts_swiglu", "silu", *silu_product_cost(sparse * rows * width))
        for op in ("experts_gate_up_proj", "experts_down_proj"):
            yield Elementwise(op, "index", sparse * INDEX_FLOPS * rows)
        return
    count, block = expert_blocks(rows, experts)
    yield Elementwise("experts_swiglu", "silu", *silu_product_cost(sparse * count * block * width))
    for op, kind, flops, _ in block_indices(rows, experts):
        yield Elementwise(op, kind, sparse * flops)


def block_indices(rows: int, experts: int) -> Iterator[Elementwise]:
    """Integer arithmetic of one layer that spreads rows over blocks, runs these in a loop, and brings rows back."""
    count, block = expert_blocks(rows, experts)
    yield Elementwise("top_k", "index", _sorting_flops(rows, experts, count))
    # A turn of the loop: its counter, whether its rows end before it, the rows' places; at most all blocks run.
    yield Elementwise(UNSCOPED, "index", count * (2 + INDEX_FLOPS + 2 + block * (2 + INDEX_FLOPS)))
    token_of_row = block * (FLOOR_DIVISION_FLOPS + INDEX_FLOPS) + 1
    yield Elementwise("experts_gate_up_proj", "index", count * (token_of_row + INDEX_FLOPS))
    yield Elementwise("experts_down_proj", "index", count * INDEX_FLOPS)
    yield Elementwise("combine", "index", _return_flops(rows, experts))


def _sorting_flops(rows: int, experts: int, blocks: int) -> int:
    """Integer arithmetic that sorts rows by expert and gives each block its expert and first row."""
    sort = rows * (rows - 1).bit_length()
    histogram = rows * (1 + INDEX_FLOPS + 1)  # clipped at 0, as an index, added
    running_sums = 2 * experts * (experts - 1)
    # Starts, ceil(rows / size) as -(-rows // size), and the first block of each expert.
    by_expert = experts * (1 + 2 + FLOOR_DIVISION_FLOPS + 1) + 1
    search = search_turns(experts) * (6 * blocks + 1 + 2) + blocks
    placed = blocks * (1 + 2 * INDEX_FLOPS + 3)
    return sort + histogram + running_sums + by_expert + search + placed


def search_turns(experts: int) -> int:
    """Turns of the binary search that finds a block's expert, ceil(log2(E + 1))."""
    return experts.bit_length()


def _return_flops(rows: int, experts: int) -> int:
    """Integer arithmetic that finds each row's result: its place in the order, its block and its row there."""
    indices = 4 * INDEX_FLOPS * rows
    block_and_row = rows * (FLOOR_DIVISION_FLOPS + REMAINDER_FLOPS + 4) + 4
    return indices + block_and_row + experts


def _cache(config: ModelConfig, step: CompiledStep) -> Iterator[Elementwise]:
    """Where new keys and values go: indices of row, head and place for both, and the lengths afterwards."""
    if step.phase == "prefill":
        return  # from position 0 on: nothing is computed
    batch, kv_heads = step.batch, config.num_key_value_heads
    known = (batch if batch > 1 else 0) + (kv_heads if kv_heads > 1 else 0)
    summed = step.tokens if step.query_len > 1 else 0
    places = 2 * config.num_hidden_layers * (summed + INDEX_FLOPS * (known + step.tokens))
    yield Elementwise("cache", "cache", places + 2 * batch)


ARGMAX_FLOPS = 9  # each comparison keeps the greater value and its place: tests of both, of nan, selections


def sampling_costs(config: ModelConfig, step: CompiledStep) -> tuple[Elementwise, ...]:
    """Choosing the likeliest of V tokens for each row, and its log-probability in float32."""
    batch, vocab = step.batch, config.vocab_size
    log_softmax = batch * (4 * vocab - 1)
    picked = batch * (INDEX_FLOPS + 3 + 1)  # an index tested against both ends, and what lies outside replaced
    greatest = ARGMAX_FLOPS * batch * (vocab - 1)
    casts = 2 * step.casts * batch * vocab
    return (Elementwise("sampling", "sampling", log_softmax + picked + greatest + casts, batch * (vocab + 1)),)
