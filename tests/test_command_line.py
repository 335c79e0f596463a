"""What both commands do before any work: leave the CUDA plugin alone where no GPU can be."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from qwenjax.command_line import pass_over_idle_cuda


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of JAX plugins, found before any that is installed; JAX_PLATFORMS isn't set."""
    folder = tmp_path / "packages" / "jax_plugins"
    (folder / "xla_cuda13").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(folder.parent)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return folder


def test_without_a_driver_the_cuda_plugin_alone_is_passed_over(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "x")  # so that the test's own setting is undone after it
    monkeypatch.delenv("JAX_PLATFORMS")
    pass_over_idle_cuda(devices=[])
    assert os.environ.pop("JAX_PLATFORMS") == "cpu"


def test_a_driver_keeps_the_plugin(plugins: Path, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    pass_over_idle_cuda(devices=[str(tmp_path / "nvidia0")])
    assert "JAX_PLATFORMS" not in os.environ


def test_what_the_user_set_stays(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    pass_over_idle_cuda(devices=[])
    assert os.environ["JAX_PLATFORMS"] == "cuda,cpu"


@pytest.mark.parametrize("other", ["jax_plugins/xla_rocm7", "libtpu"])
def test_other_accelerators_stay(plugins: Path, other: str) -> None:
    package = plugins.parent / other
    package.mkdir()
    (package / "__init__.py").touch()
    pass_over_idle_cuda(devices=[])
    assert "JAX_PLATFORMS" not in os.environ


def test_without_any_plugin_nothing_is_set(plugins: Path) -> None:
    (plugins / "xla_cuda13").rmdir()
    plugins.rmdir()
    pass_over_idle_cuda(devices=[])
    assert "JAX_PLATFORMS" not in os.environ
