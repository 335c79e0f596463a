"""What the two commands do alike: one JSON object or text on stdout, remarks on stderr, exit statuses 0, 1, 2."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, time
from fractions import Fraction
from importlib.util import find_spec
from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn

from qwenjax.errors import InputError
from qwenjax.tables import Table, render

if TYPE_CHECKING:
    import typer

    from qwenjax.hf_keys import Note

CHECK_FAILED = 1  # exit statuses
UNUSABLE_INPUT = 2
INTERRUPTED = 130
PIPE_CLOSED = 141  # as shells report a command that SIGPIPE ended
_LESS = "Ask for less at once: fewer tokens, prompts or layers, a smaller batch, or a narrower dtype."
NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # where JAX looks too: Linux, containers, WSL2


def run(app: typer.Typer, name: str, args: Sequence[str] | None = None) -> NoReturn:
    """Runs a command to its exit status; input that can't be used is one message on stderr, never a traceback."""
    pass_over_idle_cuda()
    if hasattr(sys.stdout, "reconfigure"):  # names come from files, and a terminal may know fewer letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(args=args, prog_name=name)
        status = 0
    except SystemExit as finished:
        status = int(finished.code or 0)
    except InputError as error:
        say(str(error))
        status = UNUSABLE_INPUT
    except (MemoryError, RuntimeError) as error:  # JAX's is a RuntimeError
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first_line = (str(error).strip().splitlines() or ["out of memory"])[0].rstrip(".")
        say(str(InputError("memory", None, f"isn't enough ({first_line})", _LESS)))
        status = UNUSABLE_INPUT
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def pass_over_idle_cuda(devices: Iterable[str] = NVIDIA_DEVICES) -> None:
    """Keeps JAX from asking its CUDA plugin for a GPU that can't be there.

    Installed for its compiler alone, on a machine without a driver, the plugin writes a traceback to stderr in every
    process that computes. Other plugins, and a JAX_PLATFORMS that is set, are left to decide.
    """
    if "JAX_PLATFORMS" in os.environ or any(map(os.path.exists, devices)):
        return
    plugins = find_spec("jax_plugins")
    folders = plugins.submodule_search_locations if plugins else None
    names = {name for folder in folders or () for name in os.listdir(folder) if not name.startswith("_")}
    if names and all(name.startswith("xla_cuda") for name in names) and find_spec("libtpu") is None:
        os.environ["JAX_PLATFORMS"] = "cpu"


def write_out(text: str) -> None:
    """Writes to stdout at once. If its reader is gone, as after `| head`, ends quietly."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        # What Python still writes at exit goes elsewhere, in silence.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPE_CLOSED)


def print_version(wanted: bool) -> None:
    """Prints the installed version and ends the command: the callback of --version."""
    if wanted:
        from importlib.metadata import version  # about 20 ms, which only those who ask need to pay

        print(version("qwenjax-roofline"))
        sys.exit(0)


def show(record: Mapping[str, Any], text: Callable[[Any], Iterable[str | Table]], as_json: bool) -> None:
    """Prints a record as one JSON object, or as the blocks of text that `text` makes of it."""
    if as_json:
        write_out(f"{to_json(record)}\n")
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    write_out(render(text(record), width))


def say(message: str) -> None:
    print(message, file=sys.stderr)


def say_notes(notes: Iterable[Note]) -> None:
    """What was taken by default, ignored or looks wrong, on stderr."""
    for note in notes:
        say(f"{note.kind}: {note.field}: {note.text}")


def to_json(record: Mapping[str, Any]) -> str:
    """One line of strict JSON: plain numbers, null for what isn't finite."""
    return json.dumps(plain(record), allow_nan=False)


def plain(value: Any) -> Any:
    """The value out of lists, dicts, texts and plain numbers only."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float | Fraction):
        number = float(value)
        return number if isfinite(number) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__} has no form in JSON: {value!r}")
