"""One run of `qwenjax generate`: texts as they come, what ended them, and how fast the steps were."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Any, NamedTuple

from qwenjax.calibration import calibrated_bandwidth_bytes_per_s
from qwenjax.command_line import write_out
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError

if TYPE_CHECKING:
    from qwenjax.generation import Options
    from qwenjax.text import Text
    from qwenjax.weights import Params


class Checkpoint(NamedTuple):
    """A checkpoint in memory, with its text side and the ids that end a text."""

    config: ModelConfig
    params: Params
    text: Text
    eos: tuple[int, ...]


class Session:
    """One run of `generate`: text of each row as it comes, printed row after row, and what it took."""

    def __init__(
        self, checkpoint: Checkpoint, prompts: list[list[int]], options: Options, stop: Sequence[str], loud: bool
    ) -> None:
        from qwenjax.text import TextStream

        self.checkpoint, self.prompts, self.options = checkpoint, prompts, options
        self.streams = [TextStream(checkpoint.text, stop) for _ in prompts]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.log_probs: list[list[float]] = [[] for _ in prompts]
        self.texts = ["" for _ in prompts]
        self.step_ends: list[float] = []
        self.start = 0.0
        self._loud = loud
        self._printed = [0 for _ in prompts]

    def run(self) -> None:
        from qwenjax.generation import stream

        self.start = time.perf_counter()
        for new in stream(self.checkpoint.config, self.checkpoint.params, self.prompts, self.options, self._take):
            self.step_ends.append(time.perf_counter())
            for row, token in enumerate(new):
                if token is not None:
                    check_number(token.log_prob)
                    self.log_probs[row].append(token.log_prob)
            self._print()
        for row, stream_ in enumerate(self.streams):
            self.texts[row] += stream_.finish()
        self._print(whole=True)

    def _take(self, row: int, token: int) -> bool:
        self.tokens[row].append(token)
        self.texts[row] += self.streams[row].push(token)
        return self.streams[row].stopped

    def _print(self, whole: bool = False) -> None:
        """What is new of the first text; the others follow once they are whole, so that texts don't mix."""
        for row in range(len(self.texts) if whole else 1) if self._loud else ():
            if row and not self._printed[row]:
                write_out("\n")
            write_out(self.texts[row][self._printed[row] :])
            self._printed[row] = len(self.texts[row])
        if whole and self._loud:
            write_out("\n")

    def record(self, prompts: Sequence[str]) -> dict[str, Any]:
        rows = [
            {
                "prompt": prompt,
                "prompt_tokens": len(self.prompts[i]),
                "text": self.texts[i],
                "tokens": self.tokens[i],
                "log_probs": self.log_probs[i],
                "stopped_by": self._reason(i),
            }
            for i, prompt in enumerate(prompts)
        ]
        dtype = self.checkpoint.params["embed_tokens"].dtype.name
        return {"rows": rows, "dtype": dtype, "kv_dtype": self.options.kv_dtype or dtype, **self._speed()}

    def _reason(self, row: int) -> str:
        tokens = self.tokens[row]
        if self.streams[row].stopped:
            return "stop"
        if tokens and tokens[-1] in self.checkpoint.eos:
            return "eos"
        return "max_new_tokens" if len(tokens) == self.options.max_new_tokens else "cache_full"

    def _speed(self) -> dict[str, Any]:
        """Time to the first token, and rates of the steps after the second, which compiled the step: null if none."""
        first_s = self.step_ends[0] - self.start if self.step_ends else None
        steps = range(2, len(self.step_ends))
        seconds = self.step_ends[-1] - self.step_ends[1] if steps else 0.0
        tokens = sum(1 for step in steps for row in self.tokens if step < len(row))
        moved = sum(self._step_bytes(step) for step in steps)
        roof = calibrated_bandwidth_bytes_per_s()
        return {
            "ttft_s": first_s,
            "decode_steps": len(steps),
            "decode_s": seconds if steps else None,
            "tokens_per_s": tokens / seconds if steps else None,
            "bytes_per_s": moved / seconds if steps else None,
            # A decode step is bound by what it reads: the share of the bound is that of the bandwidth.
            "bound_fraction": moved / seconds / roof if steps and roof else None,
        }

    def _step_bytes(self, step: int) -> int:
        """What the step that made token number `step` of each row had to read at least: weights, keys and values."""
        config, params = self.checkpoint.config, self.checkpoint.params
        held = [len(prompt) + step for prompt, row in zip(self.prompts, self.tokens, strict=True) if step < len(row)]
        token_bytes = kv_token_bytes(config, params, self.options.kv_dtype)
        return step_weight_bytes(config, params, len(held)) + sum(held) * token_bytes


def check_number(log_prob: float) -> None:
    """Refuses to go on with logits that aren't numbers: the most likely of them would be id 0, for ever."""
    if isnan(log_prob):
        problem = "aren't numbers (NaN): the weights hold NaN or infinity, or the dtype is too narrow for them"
        raise InputError("logits", None, problem, "Check the weights, or try --dtype float32.")


def step_weight_bytes(config: ModelConfig, params: Params, rows: int) -> int:
    """Bytes of the weights that a decode step of so many rows reads; of experts, at the most those it can choose.

    An untied embedding counts by the rows looked up. Whether rows choose the same experts is left out.
    """
    import jax

    table_bytes = int(params["embed_tokens"].nbytes)
    total = sum(int(leaf.nbytes) for leaf in jax.tree.leaves(params))
    if not config.tie_word_embeddings:
        total -= table_bytes - rows * table_bytes // config.vocab_size
    experts = [
        leaf for layer in params["layers"].values() for name, leaf in layer.items() if name.startswith("experts_")
    ]
    chosen = min(config.num_experts, rows * config.num_experts_per_tok)
    return total - sum(int(leaf.nbytes) // config.num_experts * (config.num_experts - chosen) for leaf in experts)


def kv_token_bytes(config: ModelConfig, params: Params, kv_dtype: str | None = None) -> int:
    """Bytes of keys and values that a token leaves in the cache, all layers."""
    from qwenjax.cache import cache_shapes

    shapes = cache_shapes(config, 1, 1, kv_dtype or params["embed_tokens"].dtype.name)
    return sum(int(leaf.size) * int(leaf.dtype.itemsize) for leaf in (*shapes.keys, *shapes.values))


def speed_text(record: dict[str, Any]) -> str:
    """What the run took, in one line."""
    count = sum(len(row["tokens"]) for row in record["rows"])
    if record["tokens_per_s"] is None:
        return f"{count} tokens, too few to time"
    return (
        f"{count} tokens: the first after {record['ttft_s']:.2f} s (compiling included), then "
        f"{record['tokens_per_s']:.1f} tokens/s, {record['bytes_per_s'] / 1e9:.2f} GB/s, {_bound_text(record)}"
    )


def _bound_text(record: dict[str, Any]) -> str:
    share = record["bound_fraction"]
    return "share of the bound unknown: run `roofline calibrate`" if share is None else f"{share:.0%} of the bound"
