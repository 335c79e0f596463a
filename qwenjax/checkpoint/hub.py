"""From what the caller names, a folder or a Hugging Face id, to a folder on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from qwenjax.config import ModelConfig, check_architecture
from qwenjax.errors import InputError
from qwenjax.known_models import known_model_names

WEIGHT_FILES = ("*.safetensors",)
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # config, index, tokenizer, chat template
_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def local_folder(source: str | os.PathLike[str], patterns: tuple[str, ...] = (*SMALL_FILES, *WEIGHT_FILES)) -> Path:
    """A local folder as it is, or the folder into which a hub id's files of these patterns were downloaded."""
    text = os.fspath(source)
    if os.path.isdir(text):
        return Path(text)
    if os.path.exists(text):
        raise InputError(text, None, "is a file, not a checkpoint folder", "Name the folder that holds it.")
    return _download(_hub_id(text), patterns)


def _hub_id(text: str) -> str:
    names = known_model_names(runnable=False)
    known = {spelling.lower(): name for name in names for spelling in (name, name.rpartition("/")[2])}
    if text.lower() in known:
        check_architecture(ModelConfig.from_hf(text))  # before gigabytes are downloaded
        return known[text.lower()]
    if text.startswith((".", "/", "~")) or not _ID.fullmatch(text):
        remedy = "Name a checkpoint folder, or a model of the hub as owner/name."
        raise InputError(text if text.strip() else repr(text), None, "no such folder", remedy)
    return text


def _download(hub_id: str, patterns: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(
            hub_id,
            None,
            "isn't a local folder, and downloading it needs huggingface_hub",
            'Install it with pip install "qwenjax-roofline[hub]", or name a checkpoint folder.',
        ) from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except Exception as error:  # its HTTP library's errors, which differ between versions, come through as they are
        first_line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        offline = any(
            kind.__name__ in ("OfflineModeIsEnabled", "LocalEntryNotFoundError") for kind in type(error).__mro__
        )
        why = ": the hub can't be reached (offline) and the cache lacks it" if offline else ""
        raise InputError(
            hub_id,
            None,
            f"isn't a local folder and can't be downloaded{why} ({type(error).__name__}: {first_line})",
            "Check the name and the connection, or name a checkpoint folder.",
        ) from error
