"""Runs the commands inside the test's process, to their exit status, as a shell would."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

import pytest

from qwenjax import cli as qwenjax_cli
from qwenjax.command_line import plain
from roofline import cli as roofline_cli

MAINS = {"roofline": roofline_cli.main, "qwenjax": qwenjax_cli.main}


class Run(NamedTuple):
    status: int
    stdout: str
    stderr: str


def run(command_line: str, *more: str) -> Run:
    """`roofline params Qwen2.5-7B`; arguments with blanks come one by one in `more`."""
    command, *args = command_line.split()
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as finished:
        MAINS[command]([*args, *more])
    assert isinstance(finished.value.code, int)
    return Run(finished.value.code, stdout.getvalue(), stderr.getvalue())


def figures(command_line: str, *more: str, status: int = 0) -> dict[str, Any]:
    """What the command prints with --json: exactly one object, strict JSON, nothing else on stdout."""
    result = run(command_line, *more, "--json")
    assert result.status == status, result.stderr
    assert result.stdout.endswith("}\n")
    assert result.stdout.count("\n") == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(result.stdout, parse_constant=refuse)
    assert isinstance(record, dict)
    return record


def text_of(command_line: str, *more: str) -> str:
    result = run(command_line, *more)
    assert result.status == 0, result.stderr
    return result.stdout


def as_json(value: Any) -> Any:
    """The value after a trip through JSON: tuples are lists, and equal floats stay equal."""
    return json.loads(json.dumps(plain(value)))
