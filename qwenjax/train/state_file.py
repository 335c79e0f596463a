"""A run's state in one file, replaced whole or not at all, and read back bit for bit."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.train.settings import TrainConfig
from qwenjax.train.step import TrainState, init_state
from qwenjax.weights import param_shapes

STATE_FILE = "train_state.npz"
_ABOUT = "about"  # the entry with the settings and the dtypes, as JSON
_START_AFRESH = "Go on with the settings of the run, or start afresh in another folder."


def save_state(folder: Path, config: ModelConfig, settings: TrainConfig, state: TrainState) -> None:
    """Writes the state beside its place and then renames it there: a run that is cut off keeps the state before."""
    arrays = {name: np.asarray(leaf) for name, leaf in _named(state).items()}
    about = _about(config, settings) | {"dtypes": {name: array.dtype.name for name, array in arrays.items()}}
    stored = {name: array.view(_bits_of(array.dtype)) for name, array in arrays.items()}
    path = folder / STATE_FILE
    partial = folder / f".{STATE_FILE}.{os.getpid()}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            np.savez(file, allow_pickle=False, **{_ABOUT: np.array(json.dumps(about))}, **stored)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        problem = f"the training state can't be written ({error.strerror})"
        raise InputError(str(path), None, problem, "Make room there or name another folder.") from error
    finally:
        partial.unlink(missing_ok=True)


def load_state(folder: Path, config: ModelConfig, settings: TrainConfig) -> TrainState | None:
    """The state that a run of this config and these settings left in the folder, or None where there is none yet."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            about = json.loads(str(stored[_ABOUT]))
            arrays = {name: stored[name] for name in stored.files if name != _ABOUT}
        dtypes: Mapping[str, str] = about["dtypes"]
        arrays = {name: array.view(np.dtype(dtypes[name])) for name, array in arrays.items()}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        problem = f"is no training state ({type(error).__name__}: {error})"
        raise InputError(str(path), None, problem, "Remove it to start afresh.") from error
    _check_same_run(path, about, config, settings)
    dtype = dtypes.get(".params['embed_tokens']", "float32")
    shapes = jax.eval_shape(lambda: init_state(config, settings, _zeros(config, dtype)))
    _check_shapes(path, arrays, _named(shapes))
    leaves = [jax.numpy.asarray(arrays[name]) for name in _named(shapes)]
    state: TrainState = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return state


def _zeros(config: ModelConfig, dtype: str) -> Any:
    return jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), param_shapes(config, dtype))


def _named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _bits_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """numpy's files don't know bfloat16: it goes as the integers of the same bits."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")


def _about(config: ModelConfig, settings: TrainConfig) -> dict[str, Any]:
    compared = {field.name for field in fields(config) if field.compare}
    about = {
        "model": {name: value for name, value in asdict(config).items() if name in compared},
        "settings": asdict(settings),
    }
    plain: dict[str, Any] = json.loads(json.dumps(about, default=str))
    return plain


def _check_same_run(path: Path, about: Mapping[str, Any], config: ModelConfig, settings: TrainConfig) -> None:
    for part, ours in _about(config, settings).items():
        theirs = about.get(part, {})
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                problem = f"the run in {path} has {theirs.get(name)!r}"
                raise InputError(name, ours.get(name), problem, _START_AFRESH)


def _check_shapes(path: Path, arrays: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    wrong = [
        name
        for name in sorted(arrays.keys() | expected.keys())
        if name not in arrays
        or name not in expected
        or (arrays[name].shape, arrays[name].dtype) != (expected[name].shape, expected[name].dtype)
    ]
    if wrong:
        problem = f"arrays that are missing, unknown or of another shape or dtype: {', '.join(wrong)}"
        raise InputError(str(path), None, problem, "Remove it to start afresh.")
