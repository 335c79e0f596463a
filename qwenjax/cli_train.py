"""`qwenjax train`: a checkpoint trained on the bytes of a text, with a state from which a later call goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from qwenjax.command_line import say, show
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.inspection import inspection_record
from qwenjax.progress import FEW_LINES_S, shown
from qwenjax.tables import Table
from qwenjax.train.settings import TrainConfig

DEFAULT = TrainConfig()
_STATE_COPIES = 4  # the state holds the weights and AdamW's two moments in float32, and the checkpoint the weights


def train(
    model: Annotated[
        str,
        typer.Argument(metavar="CONFIG|DIR", help="A checkpoint folder to go on from, or a config to start afresh."),
    ],
    data: Annotated[Path, typer.Option("--data", help="The text; its bytes are the tokens.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to make, or a run's to go on.")],
    steps: Annotated[int, typer.Option(help="Updates of the whole run.")],
    batch_size: Annotated[int, typer.Option(help="Sequences of one update.")] = DEFAULT.batch_size,
    sequence_len: Annotated[int, typer.Option(help="Tokens of a sequence.")] = DEFAULT.sequence_len,
    accumulation_steps: Annotated[int, typer.Option(help="Parts that a batch runs in.")] = DEFAULT.accumulation_steps,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, at its peak.")] = DEFAULT.learning_rate,
    warmup_steps: Annotated[int, typer.Option(help="Steps in which the rate rises.")] = DEFAULT.warmup_steps,
    weight_decay: Annotated[float, typer.Option(help="Of matrices, not norms or biases.")] = DEFAULT.weight_decay,
    clip_norm: Annotated[float | None, typer.Option(help="Longest gradient; 0 clips none.")] = DEFAULT.clip_norm,
    router_aux_loss_coef: Annotated[float | None, typer.Option(help="Weight of the router's balance.")] = None,
    remat: Annotated[str, typer.Option(help="Recomputed in the backward pass: none, full or dots.")] = DEFAULT.remat,
    seed: Annotated[int, typer.Option(help="Of the weights and the batches.")] = DEFAULT.seed,
    stop_at: Annotated[int | None, typer.Option(help="End this call after that step of the run.")] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saved states.")] = 500,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between lines of progress.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Trains on a text's bytes, in float32; called again with the same options, goes on where it was cut off.

    \b
    qwenjax train config.json --data book.txt -o small-model --steps 2000 --learning-rate 0.002
    qwenjax train some-checkpoint --data book.txt -o tuned --steps 100 --remat dots
    """
    chosen: dict[str, Any] = {name: value for name, value in locals().items() if name in asdict(DEFAULT)}
    settings = TrainConfig(**chosen | {"clip_norm": clip_norm or None})
    config = ModelConfig.from_hf(model)
    record = _run(model, config, settings, data, output, {"stop_at": stop_at, "save": save_every, "log": log_every})
    show(record, _text, as_json)


def _run(
    model: str, config: ModelConfig, settings: TrainConfig, data: Path, output: Path, every: dict[str, Any]
) -> dict[str, Any]:
    # Here, so that other commands start without JAX.
    from qwenjax.checkpoint.saving import check_space, save
    from qwenjax.model import check_runnable
    from qwenjax.train.byte_tokenizer import write_byte_tokenizer
    from qwenjax.train.data import read_bytes
    from qwenjax.train.loop import train as run
    from qwenjax.train.state_file import STATE_FILE

    config = replace(check_runnable(config), dtype="float32")
    tokens = read_bytes(config, data, settings.sequence_len)
    begun = (output / STATE_FILE).exists()
    num_params = inspection_record(config)["num_params"]
    if not begun:
        _check_new(output)
        check_space(output, _STATE_COPIES * 4 * num_params)
    params = None if begun else _weights(model)
    state = run(
        config,
        settings,
        tokens,
        output,
        params,
        stop_at=every["stop_at"],
        log_every=every["log"],
        save_every=every["save"],
    )
    with shown("save", FEW_LINES_S) as progress:
        save(config, state.params, output, overwrite=True, progress=progress)
    write_byte_tokenizer(output)
    return {
        "folder": str(output),
        "step": int(state.step),
        "steps": settings.steps,
        "num_params": num_params,
        "loss_nats_per_token": _loss(config, state.params, tokens, settings),
        "unigram_entropy_nats_per_token": _unigram_entropy(tokens),
        "files": sorted(path.name for path in output.iterdir()),
    }


def _check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = "exists and holds no run to go on with"
        raise InputError(str(folder), None, problem, "Name a new folder, or that of a run.")


def _weights(model: str) -> Any:
    """A checkpoint folder's weights, or None for a config alone."""
    if not any(Path(model).glob("*.safetensors")):
        say(f"starting from random weights: {model} has none")
        return None
    from qwenjax.checkpoint.loading import load

    with shown("load", FEW_LINES_S) as progress:
        return load(model, "float32", progress=progress)[1]


def _loss(config: ModelConfig, params: Any, tokens: Any, settings: TrainConfig, rows: int = 16) -> float:
    """Next-token loss of windows spread evenly over the text."""
    import jax
    import numpy as np

    from qwenjax.train.loss import lm_loss

    starts = np.linspace(0, len(tokens) - settings.sequence_len, rows).astype(int)
    tokens_BT = np.stack([tokens[start : start + settings.sequence_len] for start in starts]).astype(np.int32)
    return float(jax.jit(lm_loss, static_argnums=0)(config, params, tokens_BT).total)


def _unigram_entropy(tokens: Any) -> float:
    import numpy as np

    shares = np.bincount(tokens, minlength=256) / len(tokens)
    return -math.fsum(share * math.log(share) for share in shares.tolist() if share)


def _text(record: dict[str, Any]) -> Iterator[str | Table]:
    yield (
        f"{record['folder']}: {record['num_params']:,} parameters after step {record['step']} of {record['steps']}, "
        f"loss {record['loss_nats_per_token']:.3f} nats per byte on the text itself "
        f"({record['unigram_entropy_nats_per_token']:.3f} from the bytes' frequencies alone)"
    )
