"""README.md is run: its commands print what it shows, its Python works, its set-up lines name what exists."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from measured_box import box

from roofline.hardware import write_hardware

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONSOLE = re.findall(r"```console\n\$ (.*)\n([\s\S]*?)```", README)
PYTHON = re.findall(r"```python\n([\s\S]*?)```", README)


def _marked(name: str) -> str:
    block = re.search(rf"<!-- {name} -->\n```sh\n(.*)\n```\n<!-- end -->", README)
    assert block, f"README.md has no {name} block"
    return block.group(1)


def _run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    return subprocess.run(
        [sys.executable, "-m", program, *arguments], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | environment, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("command", "shown"), CONSOLE, ids=[command for command, _ in CONSOLE])
def test_commands_print_what_is_shown(command: str, shown: str) -> None:
    done = _run(command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip() == shown.rstrip()


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_runs(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_set_up_lines_name_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("main command", "test command"):
        install, run = _marked(name).split(" && ")
        named = re.fullmatch(r'pip install "\.\[(.*)\]"', install)
        assert named, install
        assert set(named.group(1).split(",")) <= extras.keys()
        assert run.split()[0] in ("roofline", "pytest")


def test_the_main_command_runs(tmp_path: Path) -> None:
    """The command as it stands, made short: one layer, one small step, and a calibration that is already there."""
    command = _marked("main command").split(" && ")[1]
    from roofline.measure import environment

    chip = box(flops_per_s=1e14, bytes_per_s=1e14)
    here = dict(chip.measured["environment"]) | {k: v for k, v in environment().items() if v is not None}
    chip = dataclasses.replace(chip, measured={**chip.measured, "environment": here})
    write_hardware(chip, tmp_path / "here.toml")
    plot = tmp_path / "compare.png"
    short = command.replace("compare.png", str(plot)) + " --layers 1 --batch 1 --prompt 16 --json"
    done = _run(short, ROOFLINE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["model"] == "Qwen3-0.6B"
    assert record["notes"] == ["depth cut to 1 of 28 layers, as asked"]
    assert plot.stat().st_size > 10_000
