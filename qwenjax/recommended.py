"""Sampling as a checkpoint's generation_config.json recommends it."""

from __future__ import annotations

import os
from pathlib import Path

from qwenjax.errors import InputError
from qwenjax.field_reader import finite_number
from qwenjax.text import optional_json

FILE = "generation_config.json"
_WARM = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # what changes nothing; they count only where tokens are drawn


def recommended_sampling(folder: str | os.PathLike[str]) -> dict[str, float]:
    """The settings by their names in `qwenjax.generation.Options`, those that change something; {} for none.

    As transformers reads the file: do_sample, false unless stated, decides whether tokens are drawn, at temperature 1
    unless stated. Its top_k of 50 where the file states none is left out, and so is what `Options` doesn't know.
    """
    path = Path(folder) / FILE
    data = optional_json(path)
    stated = {name: data[name] for name in ("temperature", *_WARM, "repetition_penalty") if data.get(name) is not None}
    for name, value in stated.items():
        if not finite_number(value):
            raise InputError(f"{path}: {name}", value, "must be a number", "Write a JSON number without quotes.")
    penalty = stated.pop("repetition_penalty", 1.0)
    result = {} if penalty == 1 else {"repetition_penalty": penalty}
    if data.get("do_sample") is True:
        kept = {name: stated[name] for name, off in _WARM.items() if stated.get(name, off) != off}
        result = {"temperature": stated.get("temperature", 1.0), **kept, **result}
    return result


def told(settings: dict[str, float]) -> str:
    """temperature 0.6, top_k 20"""
    return ", ".join(f"{name} {value}" for name, value in settings.items())
