"""The letters of every shape in the project, and the sizes behind them. No other module does arithmetic on a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError

LEGEND = {
    "B": "batch: sequences in the step",
    "T": "query tokens of each sequence",
    "S": "attended length of each sequence, the new tokens included",
    "U": "positions of each sequence that get logits",
    "D": "hidden size",
    "N": "query heads",
    "K": "key/value heads",
    "G": "query heads of one key/value head, N/K",
    "J": "G + 2: the query heads of one key/value head, its key and its value, side by side",
    "H": "head dimension",
    "C": "2: gate and up, side by side",
    "F": "feed-forward width of this block",
    "E": "routed experts",
    "A": "experts of one token",
    "V": "vocabulary rows",
    "L": "layers",
}

Block = Literal["mlp", "experts", "shared_expert"]
# Sizes are integers; a sweep puts numpy arrays in their place, and the same folds run over them.
Size = Any


@dataclass(frozen=True)
class Step:
    """One forward step: `batch` sequences, `query_len` new tokens in each, `kv_len` attended, the new ones included."""

    batch: Size = 1
    query_len: Size = 1
    kv_len: Size = 1

    @property
    def phase(self) -> Literal["prefill", "decode"]:
        return "decode" if not hasattr(self.query_len, "shape") and self.query_len == 1 else "prefill"

    @classmethod
    def prefill(cls, batch: Size, query_len: Size, context: Size | None = None) -> Step:
        """A prompt of `query_len` tokens, or its last chunk when `context` (past and chunk together) is longer."""
        return cls(batch, query_len, query_len if context is None else context)

    @classmethod
    def decode(cls, batch: Size, context: Size) -> Step:
        return cls(batch, 1, context)


def check_step(config: ModelConfig, step: Step) -> Step:
    """Refuses steps that no such model can run."""
    for name, value in (("batch", step.batch), ("query_len", step.query_len), ("context", step.kv_len)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(name, value, "must be an integer", "Give a count of sequences or tokens.")
        if value < 1:
            raise InputError(name, value, "must be at least 1", "Give a count of sequences or tokens.")
    if step.kv_len < step.query_len:
        raise InputError(
            "context",
            step.kv_len,
            f"is less than the {step.query_len} query tokens, which are attended too",
            "Give past and new tokens together.",
        )
    if step.kv_len > config.context_length:
        stretched = (
            f" (RoPE scaling included; max_position_embeddings {config.max_position_embeddings})"
            if config.rope_scaling
            else ""
        )
        raise InputError(
            "context",
            step.kv_len,
            f"is beyond the model's {config.context_length} positions{stretched}",
            "Choose a shorter context, or a config with a RoPE scaling.",
        )
    if step.batch > 2**24:
        raise InputError("batch", step.batch, "is larger than any server's (16777216)", "Check the number.")
    return step


def dims(
    config: ModelConfig, step: Step | None = None, block: Block = "mlp", logits: Literal["last", "all"] = "last"
) -> dict[str, Size]:
    """Sizes by letter for one block of the model in one step."""
    step = step or Step()
    group = config.num_attention_heads // config.num_key_value_heads
    width = {
        "mlp": config.intermediate_size,
        "experts": config.moe_intermediate_size,
        "shared_expert": config.shared_expert_intermediate_size,
    }[block]
    return {
        "1": 1,
        "B": step.batch,
        "T": step.query_len,
        "S": step.kv_len,
        "U": step.query_len if logits == "all" else 1,
        "D": config.hidden_size,
        "N": config.num_attention_heads,
        "K": config.num_key_value_heads,
        "G": group,
        "J": group + 2,
        "H": config.head_dim,
        "C": 2,
        "F": width,
        "E": config.num_experts,
        "A": config.num_experts_per_tok,
        "V": config.vocab_size,
        "L": config.num_hidden_layers,
    }


def size(letters: str, sizes: dict[str, Size]) -> Size:
    """Product of the sizes of some letters: elements of a tensor, or multiply-adds of a contraction."""
    result: Size = 1
    for letter in letters:
        result = result * sizes[letter]
    return result


def shape(letters: str, sizes: dict[str, Size]) -> tuple[int, ...]:
    return tuple(sizes[letter] for letter in letters)
