"""The one exception for input that can't be used."""

from __future__ import annotations


class InputError(ValueError):
    """A field, file or option that can't be used, with its value, what is wrong and what to do.

    Commands print the message and exit with status 2. `field` is a config key, an option or a path.
    """

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        shown = "" if value is None else f" = {_short(value)}"
        # A file can hold half a surrogate pair, which no terminal can print.
        super().__init__(f"{field}{shown}: {problem}. {remedy}".encode("utf-8", "backslashreplace").decode())


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
