"""Parameter counts in closed form: one function for each part, then sums over a config.

Sizes are plain integers; `layers`, `experts` and so on are counts. Written from the papers and the published configs,
not from the operation inventory, so that the two can check each other. `S000-266` and the like name rows of the seed
ledger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from qwenjax.config import ModelConfig


def matrix_params(in_features: int, out_features: int) -> int:
    """Weights of one linear map without its bias: in x out (S000-010)."""
    return in_features * out_features


def embedding_params(vocab: int, hidden: int) -> int:
    """Weights of the token embedding, V*D (S000-037)."""
    return vocab * hidden


def lm_head_params(vocab: int, hidden: int, *, tied: bool) -> int:
    """Weights that the output head stores of its own: V*D, or 0 where it shares the embedding (S000-042, S000-271)."""
    return 0 if tied else vocab * hidden


def attention_params(hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Weights of q, k, v and o of one layer, D*N*H + 2*D*K*H + N*H*D; biases apart (Ainslie et al. 2023; S001-037,
    S003-009).
    """
    return 2 * hidden * head_dim * (heads + kv_heads)


def attention_bias_params(
    hidden: int, heads: int, kv_heads: int, head_dim: int, *, qkv: bool = True, output: bool = False
) -> int:
    """Biases of one layer: (N + 2K)*H on q, k, v and D on o, each only where asked for (S000-267)."""
    return (heads + 2 * kv_heads) * head_dim * qkv + hidden * output


def qk_norm_params(head_dim: int) -> int:
    """Scales of the query norm and the key norm of one layer, 2*H, shared by all heads of a kind (S002-030)."""
    return 2 * head_dim


def layer_norm_params(hidden: int) -> int:
    """Scales of the two RMSNorms of one layer, 2*D (Zhang and Sennrich 2019; S000-269)."""
    return 2 * hidden


def mlp_params(hidden: int, ffn_width: int, *, matrices: int = 3) -> int:
    """Weights of one feed-forward block: 3*D*F for SwiGLU (Shazeer 2020; S003-010), `matrices=2` for the classic
    one.
    """
    return matrices * hidden * ffn_width


def router_params(hidden: int, experts: int) -> int:
    """Weights of the router of one layer, D*E (S000-192)."""
    return hidden * experts


def shared_expert_gate_params(hidden: int) -> int:
    """Weights of the scalar gate of one shared expert, D*1, no bias (S000-189)."""
    return hidden


def moe_block_params(hidden: int, experts: int, expert_width: int, shared_width: int = 0) -> int:
    """Weights of one sparse block: D*E + E*3*D*F, and 3*D*Fs + D where there is a shared expert (S000-291,
    S001-039).
    """
    shared = mlp_params(hidden, shared_width) + shared_expert_gate_params(hidden) if shared_width else 0
    return router_params(hidden, experts) + experts * mlp_params(hidden, expert_width) + shared


def projection_shapes(
    hidden: int, heads: int, kv_heads: int, head_dim: int, ffn_width: int
) -> dict[str, tuple[int, int]]:
    """(in, out) of the seven weight matmuls of one dense layer, by checkpoint name (S000-014 to S000-020)."""
    return {
        "q_proj": (hidden, heads * head_dim),
        "k_proj": (hidden, kv_heads * head_dim),
        "v_proj": (hidden, kv_heads * head_dim),
        "o_proj": (heads * head_dim, hidden),
        "gate_proj": (hidden, ffn_width),
        "up_proj": (hidden, ffn_width),
        "down_proj": (ffn_width, hidden),
    }


def num_sparse_layers(config: ModelConfig) -> int:
    """Layers whose feed-forward block is a mixture: every `decoder_sparse_step`-th, those in `mlp_only_layers` left
    out.
    """
    if config.num_experts == 0 or config.model_type not in ("qwen2_moe", "qwen3_moe", "mixtral"):
        return 0
    step, dense_only = config.decoder_sparse_step, set(config.mlp_only_layers)
    return sum(1 for layer in range(config.num_hidden_layers) if (layer + 1) % step == 0 and layer not in dense_only)


def shared_expert_width(config: ModelConfig) -> int:
    """Feed-forward width of the shared expert of a sparse layer; only Qwen2-MoE has one, elsewhere 0 (S000-204)."""
    return config.shared_expert_intermediate_size if config.model_type == "qwen2_moe" else 0


def param_groups(config: ModelConfig) -> dict[str, int]:
    """Parameters of the whole model by group; they sum to `num_params`. A tied lm_head is 0. Quantisation scales are
    left out.
    """
    layers, hidden, head_dim = config.num_hidden_layers, config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sparse, shared_width = num_sparse_layers(config), shared_expert_width(config)
    experts = config.num_experts * mlp_params(hidden, config.moe_intermediate_size) if sparse else 0
    bias = attention_bias_params(hidden, heads, kv_heads, head_dim, qkv=config.qkv_bias, output=config.attention_o_bias)
    return {
        "embedding": embedding_params(config.vocab_size, hidden),
        "attention": layers * attention_params(hidden, heads, kv_heads, head_dim),
        "attention_bias": layers * bias,
        "qk_norm": layers * qk_norm_params(head_dim) if config.qk_norm else 0,
        "mlp": (layers - sparse) * mlp_params(hidden, config.intermediate_size) if layers > sparse else 0,
        "router": sparse * router_params(hidden, config.num_experts),
        "experts": sparse * experts,
        "shared_expert": sparse * mlp_params(hidden, shared_width) if shared_width else 0,
        "shared_expert_gate": sparse * shared_expert_gate_params(hidden) if shared_width else 0,
        "norm": layers * layer_norm_params(hidden) + hidden,
        "lm_head": lm_head_params(config.vocab_size, hidden, tied=config.tie_word_embeddings),
    }


def num_params(config: ModelConfig) -> int:
    """All parameters stored, a tied matrix once (S000-036, S000-225, S001-043, S002-061)."""
    return sum(param_groups(config).values())


def idle_expert_params(config: ModelConfig) -> int:
    """Parameters of the experts that one token does not use, over all layers: (E - A)*3*D*F each (S001-042)."""
    idle = config.num_experts - config.num_experts_per_tok
    sparse = num_sparse_layers(config)
    return sparse * idle * mlp_params(config.hidden_size, config.moe_intermediate_size) if sparse else 0


def num_active_params(config: ModelConfig, *, embedding: bool = True) -> int:
    """Parameters that one token uses: all but the idle experts (S000-210, S001-041).

    Model cards count both embedding matrices, and so does the default. `embedding=False` leaves out the input table, of
    which a token looks up one row; where it is tied it stays, since the output head multiplies all of it.
    """
    lookup = 0 if embedding or config.tie_word_embeddings else embedding_params(config.vocab_size, config.hidden_size)
    return num_params(config) - idle_expert_params(config) - lookup


def num_backbone_params(config: ModelConfig) -> int:
    """Parameters without the input embedding and without the output head: the vendors' "non-embedding" count
    (S000-040).
    """
    groups = param_groups(config)
    return num_params(config) - groups["embedding"] - groups["lm_head"]


def num_matmul_params(config: ModelConfig, *, experts: Literal["active", "all"] = "all", lm_head: bool = True) -> int:
    """Weights that enter a matrix product: projections, router, experts, shared gate, output head (S000-049).

    Norms, biases and the lookup are left out (0.005% of Qwen2.5-7B apart from the lookup). A tied output head counts,
    as it multiplies. "active" takes the experts of one token, so that twice it is the FLOPs per token.
    """
    groups = param_groups(config)
    matrices = ("attention", "mlp", "router", "experts", "shared_expert", "shared_expert_gate")
    weights = sum(groups[name] for name in matrices)
    idle = idle_expert_params(config) if experts == "active" else 0
    head = embedding_params(config.vocab_size, config.hidden_size) if lm_head else 0
    return weights - idle + head


def block_scale_params(out_features: int, in_features: int, block: int = 128) -> int:
    """Scales of one matrix quantised in block x block tiles: ceil(out/block) * ceil(in/block) (DeepSeek-V3 report,
    3.3).
    """
    return -(-out_features // block) * -(-in_features // block)


def fp8_block_scale_params(config: ModelConfig, block: int = 128) -> int:
    """Scales that a block-quantised FP8 checkpoint stores beside `num_params`, by checkpoint matrix.

    Quantised are q, k, v, o and every gate, up and down; the embedding, output head, norms, router and shared gate stay
    in bfloat16. Gives the published 8,191,159,296 (8B), 32,764,027,904 (32B) and 235,107,904,512 (235B-A22B) with the
    weights.
    """
    hidden, width = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = 2 * block_scale_params(q, hidden, block) + 2 * block_scale_params(kv, hidden, block)
    sparse = num_sparse_layers(config)
    dense = config.num_hidden_layers - sparse
    scales = config.num_hidden_layers * attention
    if dense:
        scales += dense * 3 * block_scale_params(width, hidden, block)
    if sparse:
        scales += sparse * config.num_experts * 3 * block_scale_params(config.moe_intermediate_size, hidden, block)
        scales += sparse * 3 * block_scale_params(shared_expert_width(config), hidden, block)
    return scales
