"""Takes typed fields out of a parsed config.json: types and ranges checked, defaults and their reasons noted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qwenjax import hf_keys
from qwenjax.errors import InputError
from qwenjax.hf_keys import Note

REQUIRED: Any = object()  # a default that says: there is none


def finite_number(value: object) -> bool:
    """Whether a JSON value is a number that a float can hold; true and false aren't numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def plain_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class FieldReader:
    """Fields by their first spelling; `notes` remembers what was defaulted."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = dict(data)
        self.notes: list[Note] = []
        for name, spellings in hf_keys.ALIASES.items():
            self._merge(name, [key for key in spellings if key in data])

    def _merge(self, name: str, present: list[str]) -> None:
        """Puts the value of whichever spellings are there under the first; a null beside a value says nothing."""
        stated = [key for key in present if self.data[key] is not None]
        if len({repr(_bare(self.data[key])) for key in stated}) > 1:
            text = " and ".join(f"{key} {self.data[key]!r}" for key in stated)
            raise InputError(name, None, f"is given in spellings that disagree ({text})", "Keep one of them.")
        if present:
            self.data[name] = self.data[(stated or present)[0]]

    def note(self, kind: str, key: str, text: str) -> None:
        self.notes.append(Note(kind, key, text))

    def stated(self, key: str) -> bool:
        """Whether the key is there with a value; null says nothing."""
        return self.data.get(key) is not None

    def _missing(self, key: str, default: Any, reason: str) -> Any:
        if default is REQUIRED:
            raise InputError(
                key, None, "is missing", "A config.json of this model_type must state it; nothing is guessed."
            )
        if reason:
            self.note("default", key, reason)
        return default

    def integer(self, key: str, default: Any = None, reason: str = "", minimum: int = 1) -> Any:
        if key not in self.data:
            return self._missing(key, default, reason)
        value = self.data[key]
        if not plain_integer(value):
            raise wrong_type(key, value, "must be an integer", "Write a JSON number without quotes or a point.")
        if value < minimum:
            raise InputError(key, value, f"must be at least {minimum}", "Check the file.")
        limit = hf_keys.LIMITS.get(key, hf_keys.LARGEST)
        if value > limit:
            raise InputError(key, value, f"is larger than any model's ({limit})", "Check the file.")
        return value

    def number(self, key: str, default: float, reason: str = "", positive: bool = True) -> float:
        if key not in self.data:
            return float(self._missing(key, default, reason))
        value = self.data[key]
        if not finite_number(value):
            raise wrong_type(key, value, "must be a finite number", "Write a JSON number without quotes.")
        if value < 0 or (positive and value == 0):
            raise InputError(key, value, f"must {'be positive' if positive else 'not be negative'}", "Check the file.")
        return float(value)

    def boolean(self, key: str, default: bool, reason: str = "") -> bool:
        if key not in self.data:
            return bool(self._missing(key, default, reason))
        value = self.data[key]
        if not isinstance(value, bool):
            raise wrong_type(key, value, "must be true or false", "Write a JSON boolean without quotes.")
        return value

    def integers(self, key: str, form: str = "a list of integers") -> tuple[int, ...]:
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(plain_integer(v) and abs(v) <= hf_keys.LARGEST for v in value):
            raise InputError(key, value, f"must be {form}", "Write [] for none.")
        return tuple(value)


def wrong_type(key: str, value: Any, must: str, remedy: str) -> InputError:
    """The error for a value of the wrong type; null has no repr that JSON knows, so the words say it."""
    return InputError(key, value, f"is null, but {must}" if value is None else must, remedy)


def _bare(value: Any) -> Any:
    return value.removeprefix("torch.") if isinstance(value, str) else value
