"""`qwenjax init`: a checkpoint with random weights, for tests, timing and training from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from qwenjax.command_line import say, show
from qwenjax.config import ModelConfig, check_architecture
from qwenjax.errors import InputError
from qwenjax.hf_reader import DTYPES
from qwenjax.inspection import inspection_record
from qwenjax.progress import FEW_LINES_S, shown
from qwenjax.tables import Table

LARGEST_SEED = 2**32 - 1


def init(
    config: Annotated[
        str,
        typer.Argument(metavar="CONFIG", help="A known model's name, a config.json, or a checkpoint folder."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to make.")],
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Same seed, same weights.")] = 0,
    layers: Annotated[int | None, typer.Option(help="Cut the model to its first layers.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: the config's, else bfloat16.")
    ] = None,
    spelling: Annotated[str, typer.Option(help="Of config.json, as transformers 4.x or 5.x writes it.")] = "4.x",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace config and weights in a folder that holds files.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """A checkpoint with random weights, in the Hugging Face layout.

    \b
    qwenjax init Qwen3-0.6B --layers 2 -o tiny-qwen3
    qwenjax init path/to/config.json -o model --seed 7 --dtype float32
    """
    read = check_architecture(ModelConfig.from_hf(config))
    if dtype is not None and dtype not in DTYPES:
        raise InputError("--dtype", dtype, "is not a dtype of weights", f"Known: {', '.join(DTYPES)}.")
    if read.quantization is not None:
        say(f"ignored: quantization_config: random weights aren't quantised ({read.quantization.method})")
    chosen = dtype or read.dtype or "bfloat16"
    model = replace(read if layers is None else read.with_layers(layers), quantization=None, dtype=chosen)
    record = _write(model, output, seed, spelling, overwrite)
    show(record, _text, as_json)


def _write(config: ModelConfig, folder: Path, seed: int, spelling: Any, overwrite: bool) -> dict[str, Any]:
    # Here, so that other commands start without JAX.
    import numpy as np

    from qwenjax.checkpoint.saving import save_leaves
    from qwenjax.weights import random_leaves

    num_params = inspection_record(config)["num_params"]
    weight_bytes = num_params * np.dtype(str(config.dtype)).itemsize
    leaves = random_leaves(config, seed, str(config.dtype))
    with shown("init", FEW_LINES_S) as progress:
        save_leaves(config, leaves, folder, spelling=spelling, overwrite=overwrite, progress=progress)
    return {
        "folder": str(folder),
        "model": config.name,
        "num_hidden_layers": config.num_hidden_layers,
        "num_params": num_params,
        "weight_bytes": weight_bytes,
        "dtype": config.dtype,
        "seed": seed,
        "files": sorted(path.name for path in folder.iterdir()),
    }


def _text(record: dict[str, Any]) -> Iterator[str | Table]:
    yield (
        f"{record['folder']}: {record['num_hidden_layers']} layers, {record['num_params']:,} random parameters "
        f"in {record['dtype']} (seed {record['seed']}), {len(record['files'])} files"
    )
