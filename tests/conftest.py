"""Fixtures of the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwenjax.errors import InputError
from roofline.gpu_compile import check_compiler

# Linux gives a process 65530 memory maps, and each program that XLA compiles for a CPU takes dozens: a whole suite
# would end in an abort.
MOST_MAPS = 15_000
MAPS = Path("/proc/self/maps")
SHARED = Path(__file__).resolve().parent.parent.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real configs and published measurements that lies beside a developer's checkout."""
    if not SHARED.is_dir():
        message = f"{SHARED} isn't there: real configs and measurements can't be checked"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return SHARED


@pytest.fixture(scope="session")
def gpu_compiler() -> None:
    """XLA's CUDA compiler, which the extra `gpu-compile` brings; no GPU is needed."""
    try:
        check_compiler()
    except InputError as missing:
        message = f"nothing can be compiled for a GPU here: {missing}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """After a file of tests, drops compiled programs where they have taken many memory maps."""
    yield
    jax = sys.modules.get("jax")
    if jax is not None and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
