"""`qwenjax generate` and `qwenjax score`: text from a checkpoint, and how likely it finds a text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from qwenjax.calibration import calibrated_bandwidth_bytes_per_s
from qwenjax.command_line import say, show, write_out
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.hf_reader import DTYPES
from qwenjax.tables import Table

if TYPE_CHECKING:
    from qwenjax.generation import Options
    from qwenjax.text import Text
    from qwenjax.weights import Params

FolderArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="A checkpoint folder, or a model of the hub as owner/name.")
]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the config's.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Checkpoint(NamedTuple):
    """A checkpoint in memory, with its text side and the ids that end a text."""

    config: ModelConfig
    params: Params
    text: Text
    eos: tuple[int, ...]


def generate(
    folder: FolderArgument,
    prompt: Annotated[list[str], typer.Option(help="What to continue; may be given several times.")],
    max_new_tokens: Annotated[int, typer.Option(min=0, help="The most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the most likely that hold this share.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop what is less likely than this share of the best.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: repeat less.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first prompt; each further one takes the next.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a user, in the checkpoint's chat template.")] = False,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Text that continues each prompt, as it comes; then tokens/s and bytes/s.

    \b
    qwenjax generate path/to/Qwen3-0.6B --prompt "Once upon a time"
    qwenjax generate path/to/Qwen3-0.6B --chat --prompt "Who are you?" --temperature 0.7 --top-p 0.8 --json
    """
    from qwenjax.generation import Options

    checkpoint = _load(folder, dtype)
    options = Options(
        max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, eos=checkpoint.eos
    )  # fmt: skip
    encoded = [_encode(checkpoint.text, text, chat) for text in prompt]
    session = Session(checkpoint, encoded, options, stop or [], loud=not as_json)
    session.run()
    record = session.record(prompt)
    if as_json:
        show(record, lambda _: (), as_json=True)
    else:
        say(_speed_text(record))


def score(
    folder: FolderArgument,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text to score, in UTF-8.")],
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Log-probability of each token of a text given those before it, and the perplexity.

    \b
    qwenjax score path/to/Qwen3-0.6B --text story.txt
    """
    words = _read_text(text)
    checkpoint = _load(folder, dtype)
    record = _score_record(checkpoint, words)
    show(record, _score_text, as_json)


def _load(folder: str, dtype: str | None) -> Checkpoint:
    # Here, so that other commands start without JAX.
    from qwenjax.checkpoint.hub import local_folder
    from qwenjax.checkpoint.loading import load
    from qwenjax.text import eos_ids, load_text

    if dtype is not None and dtype not in DTYPES:
        raise InputError("--dtype", dtype, "is not a dtype of weights", f"Known: {', '.join(DTYPES)}.")
    path = local_folder(folder)
    text, eos = load_text(path), eos_ids(path)  # the small files first: their errors come before the long read
    return Checkpoint(*load(path, dtype), text, eos)


def _encode(text: Text, prompt: str, chat: bool) -> list[int]:
    ids = text.encode_chat([{"role": "user", "content": prompt}]) if chat else text.encode(prompt)
    if not ids:
        raise InputError("--prompt", prompt, "has no tokens", "Write something to continue.")
    return ids


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
        return {"rows": rows, "dtype": self.checkpoint.params["embed_tokens"].dtype.name, **self._speed()}

    def _reason(self, row: int) -> str:
        tokens = self.tokens[row]
        if self.streams[row].stopped:
            return "stop"
        return "eos" if tokens and tokens[-1] in self.checkpoint.eos else "max_new_tokens"

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
        return step_weight_bytes(config, params, len(held)) + sum(held) * kv_token_bytes(config, params)


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


def kv_token_bytes(config: ModelConfig, params: Params) -> int:
    """Bytes of keys and values that a token leaves in the cache, all layers."""
    from qwenjax.cache import cache_shapes

    shapes = cache_shapes(config, 1, 1, params["embed_tokens"].dtype.name)
    return sum(int(leaf.size) * int(leaf.dtype.itemsize) for leaf in (*shapes.keys, *shapes.values))


def _speed_text(record: dict[str, Any]) -> str:
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


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), None, f"can't be read ({error.strerror})", "Name a text file.") from None
    except UnicodeDecodeError as error:
        raise InputError(str(path), None, f"isn't UTF-8 text ({error.reason})", "Save it as UTF-8.") from None


def _score_record(checkpoint: Checkpoint, words: str) -> dict[str, Any]:
    from qwenjax.scoring import perplexity, score_tokens

    config, params, text, _ = checkpoint
    ids = text.encode(words)
    if len(ids) > config.context_length:
        say(f"beyond the model: {len(ids)} tokens, and its context length is {config.context_length}")
    log_probs = score_tokens(config, params, ids)
    rows = [
        {"token": token, "text": text.decode([token], skip_special_tokens=False), "log_prob": log_prob}
        for token, log_prob in zip(ids[1:], log_probs, strict=True)
    ]
    mean = sum(log_probs) / len(log_probs)
    return {"rows": rows, "num_tokens": len(ids), "mean_log_prob": mean, "perplexity": perplexity(log_probs)}


def _score_text(record: dict[str, Any]) -> Iterator[str | Table]:
    yield f"perplexity {record['perplexity']:.4f} over {len(record['rows'])} tokens"
    cells = [[str(row["token"]), f"{row['log_prob']:.4f}", repr(row["text"])] for row in record["rows"]]
    yield Table("Tokens", ("id", "log-probability", "text"), cells, text=("text",))
