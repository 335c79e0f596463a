"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qwenjax.errors import InputError
from roofline.gpu_compile import check_compiler

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
