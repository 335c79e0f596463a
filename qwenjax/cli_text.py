"""`qwenjax generate` and `qwenjax score`: text from a checkpoint, and how likely it finds a text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qwenjax.command_line import say, show
from qwenjax.errors import InputError
from qwenjax.hf_reader import DTYPES
from qwenjax.progress import FEW_LINES_S, shown
from qwenjax.recommended import FILE, recommended_sampling, told
from qwenjax.session import Checkpoint, Session, check_number, speed_text
from qwenjax.tables import Table

if TYPE_CHECKING:
    from qwenjax.generation import Options
    from qwenjax.text import Text

FolderArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="A checkpoint folder, or a model of the hub as owner/name.")
]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the config's.")]
KvDtypeOption = Annotated[
    str | None, typer.Option(help="Of keys and values in the cache, such as float8_e4m3fn; default: the weights'.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def generate(
    folder: FolderArgument,
    prompt: Annotated[list[str], typer.Option(help="What to continue; may be given several times.")],
    max_new_tokens: Annotated[int, typer.Option(min=0, help="The most tokens to generate.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0, the default, takes the most likely token.", show_default=False)
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the most likely that hold this share.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop what is less likely than this share of the best.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: repeat less.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first prompt; each further one takes the next.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a user, in the checkpoint's chat template.")] = False,
    checkpoint_sampling: Annotated[
        bool, typer.Option("--checkpoint-sampling", help="Sample as generation_config.json says, where no option does.")
    ] = False,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Text that continues each prompt, as it comes; then tokens/s and bytes/s.

    \b
    qwenjax generate path/to/Qwen3-0.6B --prompt "Once upon a time"
    qwenjax generate path/to/Qwen3-0.6B --chat --prompt "Who are you?" --temperature 0.7 --top-p 0.8 --json
    """
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    path = _checked(folder, dtype, kv_dtype)
    sampling = _sampling(path, given, checkpoint_sampling, seed, len(prompt))
    checkpoint = _load(path, dtype)
    encoded = [_encode(checkpoint.text, text, chat) for text in prompt]
    options = _options(checkpoint, encoded, sampling, max_new_tokens, seed, kv_dtype)
    session = Session(checkpoint, encoded, options, stop or [], loud=not as_json)
    session.run()
    record = {**session.record(prompt), "sampling": sampling}
    _say_full(record, checkpoint.config.context_length)
    if as_json:
        show(record, lambda _: (), as_json=True)
    else:
        say(speed_text(record))


def score(
    folder: FolderArgument,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text to score, in UTF-8.")],
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Log-probability of each token of a text given those before it, and the perplexity.

    \b
    qwenjax score path/to/Qwen3-0.6B --text story.txt
    """
    words = _read_text(text)
    record = _score_record(_load(_checked(folder, dtype, kv_dtype), dtype), words, text, kv_dtype)
    show(record, _score_text, as_json)


def _checked(folder: str, dtype: str | None, kv_dtype: str | None) -> Path:
    """The folder on this machine, once the dtypes are known to be some."""
    # Here and below, so that other commands start without JAX.
    from qwenjax.cache import check_cache_dtype
    from qwenjax.checkpoint.hub import local_folder

    if dtype is not None and dtype not in DTYPES:
        raise InputError("--dtype", dtype, "is not a dtype of weights", f"Known: {', '.join(DTYPES)}.")
    if kv_dtype is not None:
        check_cache_dtype(kv_dtype, "--kv-dtype")
    return local_folder(folder)


def _load(folder: Path, dtype: str | None) -> Checkpoint:
    from qwenjax.checkpoint.loading import load, running_dtype
    from qwenjax.text import eos_ids, load_text

    text, eos = load_text(folder), eos_ids(folder)  # the small files first: their errors come before the long read
    with shown("load", FEW_LINES_S) as progress:
        config, params = load(folder, dtype or running_dtype(), progress=progress)
    own = params["embed_tokens"].dtype.name
    if dtype is None and config.dtype not in (None, own):
        why = f"many times faster on a CPU; --dtype {config.dtype} keeps them"
        print(f"{config.dtype} weights are widened to {own}, {why}", file=sys.stderr)
    return Checkpoint(config, params, text, eos)


def _sampling(folder: Path, given: dict[str, Any], wanted: bool, seed: int, rows: int) -> dict[str, Any]:
    """The settings in force: options, then the checkpoint's own if wanted; says on stderr what has no effect."""
    from qwenjax.sampling import sampling_of

    stated = {name: value for name, value in given.items() if value is not None}
    recommended = {name: value for name, value in recommended_sampling(folder).items() if name not in stated}
    sampling = {"temperature": 0.0, **(recommended if wanted else {}), **stated}
    sampling_of(rows, seed=seed, **sampling)  # what can't be is refused before the weights are read
    if recommended and wanted:
        say(f"from {FILE}: {told(recommended)}")
    elif recommended:
        say(f"ignored: {FILE} recommends {told(recommended)}; --checkpoint-sampling takes them")
    idle = [f"--{name.replace('_', '-')}" for name in ("top_k", "top_p", "min_p") if name in stated]
    if idle and sampling["temperature"] == 0:
        say(f"ignored: {', '.join(idle)}: at temperature 0 the most likely token is taken")
    return sampling


def _options(
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    sampling: dict[str, Any],
    max_new_tokens: int,
    seed: int,
    kv_dtype: str | None,
) -> Options:
    """Options that keep every row within the model's context length."""
    from qwenjax.generation import Options

    limit, longest = checkpoint.config.context_length, max(map(len, prompts))
    if longest > limit:
        problem = f"has {longest} tokens, and the model's context length is {limit}"
        raise InputError("--prompt", None, problem, "Shorten it, or let rope_scaling in config.json stretch the model.")
    options = Options(max_new_tokens, seed=seed, eos=checkpoint.eos, kv_dtype=kv_dtype, **sampling)
    beyond = longest + max_new_tokens - 1 > limit  # the last token isn't run, and needs no place
    return replace(options, max_new_tokens=min(max_new_tokens, limit + 1), capacity=limit) if beyond else options


def _say_full(record: dict[str, Any], limit: int) -> None:
    full = [str(i) for i, row in enumerate(record["rows"], 1) if row["stopped_by"] == "cache_full"]
    if full:
        say(f"ended: the model's context length of {limit} tokens is reached in row {', '.join(full)}")


def _encode(text: Text, prompt: str, chat: bool) -> list[int]:
    ids = text.encode_chat([{"role": "user", "content": prompt}]) if chat else text.encode(prompt)
    if not ids:
        raise InputError("--prompt", prompt, "has no tokens", "Write something to continue.")
    return ids


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), None, f"can't be read ({error.strerror})", "Name a text file.") from None
    except UnicodeDecodeError as error:
        raise InputError(str(path), None, f"isn't UTF-8 text ({error.reason})", "Save it as UTF-8.") from None


def _score_record(checkpoint: Checkpoint, words: str, file: Path, kv_dtype: str | None) -> dict[str, Any]:
    from qwenjax.scoring import perplexity, score_tokens

    config, params, text, _ = checkpoint
    ids = text.encode(words)
    if len(ids) < 2:
        problem = f"has {len(ids)} tokens, and the first one has no probability"
        raise InputError(str(file), None, problem, "Give a longer text.")
    if len(ids) > config.context_length:
        say(f"beyond the model: {len(ids)} tokens, and its context length is {config.context_length}")
    log_probs = score_tokens(config, params, ids, kv_dtype=kv_dtype)
    check_number(sum(log_probs))
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
