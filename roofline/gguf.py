"""Which block format each tensor of a GGUF file has, by llama.cpp's rules for its file types."""

from __future__ import annotations

from fractions import Fraction

from qwenjax.config import ModelConfig
from qwenjax.ops import Weight

# Bits of one weight: bytes of a block over its weights (ggml-common.h: block_q4_0 18 of 32, block_q8_0 34 of 32,
# block_q4_K 144 of 256, block_q5_K 176, block_q6_K 210, and the older block_q5_0 22 of 32, block_q5_1 24).
GGUF_BITS: dict[str, Fraction] = {
    "F32": Fraction(32),
    "F16": Fraction(16),
    "Q4_0": Fraction(18 * 8, 32),
    "Q5_0": Fraction(22 * 8, 32),
    "Q5_1": Fraction(24 * 8, 32),
    "Q8_0": Fraction(34 * 8, 32),
    "Q4_K": Fraction(144 * 8, 256),
    "Q5_K": Fraction(176 * 8, 256),
    "Q6_K": Fraction(210 * 8, 256),
}
# Rows that aren't whole blocks of 256 take an older format of about the same precision.
_SHORT_ROWS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_MATRICES = ("attention", "mlp", "experts", "shared_expert", "embedding", "lm_head")


def gguf_type(config: ModelConfig, weight: Weight, layer: int, columns: int, file_type: str) -> str:
    """The block format of a tensor of one layer with rows of `columns` weights; norms, biases and router are F32."""
    if weight.group not in _MATRICES:
        return "F32"
    kind = {"Q4_K_M": "Q4_K"}.get(file_type, file_type)
    if file_type == "Q4_K_M":
        kind = _mixed_type(config, weight, layer)
    elif file_type == "Q4_0" and _is_head(config, weight):
        kind = "Q6_K"
    if columns % 256 and kind in _SHORT_ROWS:
        kind = _SHORT_ROWS[kind]
    return "F16" if columns % 32 else kind


def _is_head(config: ModelConfig, weight: Weight) -> bool:
    return weight.name == ("embed_tokens" if config.tie_word_embeddings else "lm_head")


def _mixed_type(config: ModelConfig, weight: Weight, layer: int) -> str:
    """llama_tensor_get_type of Q4_K_M: values and down projections of half of the layers, and the head, as Q6_K."""
    more = _use_more_bits(layer, config.num_hidden_layers)
    if _is_head(config, weight):
        return "Q6_K"
    if config.num_experts == 8 and weight.name in ("k_proj", "v_proj"):
        return "Q8_0"
    if config.num_experts == 8 and weight.name == "o_proj":
        return "Q5_K"
    if weight.name == "v_proj":
        # A 70B of 8 KV heads among 64: few and often used, so one step finer.
        coarse = "Q5_K" if config.num_hidden_layers == 80 and config.hidden_size == 8192 else "Q4_K"
        return "Q6_K" if more else coarse
    if weight.name.endswith("down_proj"):
        return "Q6_K" if more else "Q4_K"
    return "Q4_K"


def _use_more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
