"""Names of checkpoints: a local folder as it is, a hub id through huggingface_hub, anything else refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
from checkpoint_files import assert_same, config_json, tiny_folder

import qwenjax
from qwenjax.checkpoint.hub import SMALL_FILES, WEIGHT_FILES
from qwenjax.errors import InputError

Calls = list[tuple[str, list[str]]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """A hub that has one tiny model in whatever repository it is asked for; what it was asked for."""
    folder, _ = tiny_folder(tmp_path / "snapshots" / "0a1b2c")
    calls: Calls = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        calls.append((repo_id, allow_patterns))
        return str(folder)

    _install(monkeypatch, snapshot_download)
    return calls


def _install(monkeypatch: pytest.MonkeyPatch, snapshot_download: Any) -> None:
    module = ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def failing(error: Exception) -> Any:
    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        raise error

    return snapshot_download


def error_of(source: Any) -> str:
    with pytest.raises(InputError) as caught:
        qwenjax.load(source)
    return str(caught.value)


def test_a_hub_id_is_downloaded_config_first(hub: Calls) -> None:
    config, params = qwenjax.load("someone/Tiny-Qwen")
    assert_same(params, tiny.params(tiny.config()))
    assert config.name == "Tiny-Qwen"
    assert hub == [("someone/Tiny-Qwen", [*SMALL_FILES]), ("someone/Tiny-Qwen", [*SMALL_FILES, *WEIGHT_FILES])]


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "qwen/qwen3-0.6b", "QWEN3-0.6b"])
def test_known_models_are_found_under_their_short_names(hub: Calls, name: str) -> None:
    qwenjax.load(name)
    assert {repo_id for repo_id, _ in hub} == {"Qwen/Qwen3-0.6B"}


def test_weights_of_a_model_that_can_not_be_loaded_are_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128}
    folder, _ = tiny_folder(tmp_path, quantization_config=quantization)
    asked = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder)

    _install(monkeypatch, snapshot_download)
    assert error_of("someone/Tiny-Qwen-AWQ").startswith("quantization_config = 'awq': AWQ checkpoints can't be loaded.")
    assert asked == [[*SMALL_FILES]]


def test_a_folder_wins_over_a_hub_id(hub: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_folder(tmp_path / "Qwen" / "Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    config, _ = qwenjax.load("Qwen/Qwen3-0.6B")
    assert config.hidden_size == config_json("qwen3")["hidden_size"]
    assert config.name == "Qwen3-0.6B"
    assert hub == []


@pytest.mark.parametrize(
    "text", ["./missing", "/missing/model", "~/model", "missing", "a/b/c", "a b/c", "a\\b/c", "", " "]
)
def test_what_is_neither_a_folder_nor_an_id(hub: Calls, text: str) -> None:
    told = text if text.strip() else repr(text)
    assert error_of(text) == f"{told}: no such folder. Name a checkpoint folder, or a model of the hub as owner/name."
    assert hub == []


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    folder, _ = tiny_folder(tmp_path)
    path = folder / "model.safetensors"
    assert error_of(path) == f"{path}: is a file, not a checkpoint folder. Name the folder that holds it."


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert error_of("Qwen/Qwen3-0.6B") == (
        "Qwen/Qwen3-0.6B: isn't a local folder, and downloading it needs huggingface_hub. "
        'Install it with pip install "qwenjax-roofline[hub]", or name a checkpoint folder.'
    )


def test_offline_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class LocalEntryNotFoundError(FileNotFoundError):
        """As huggingface_hub raises it."""

    error = LocalEntryNotFoundError("Got: ConnectError: no name.\nAn error happened.\nCheck it.")
    _install(monkeypatch, failing(error))
    assert error_of("Qwen/Qwen3-0.6B") == (
        "Qwen/Qwen3-0.6B: isn't a local folder and can't be downloaded: the hub can't be reached (offline) and the "
        "cache lacks it (LocalEntryNotFoundError: Got: ConnectError: no name). "
        "Check the name and the connection, or name a checkpoint folder."
    )


@pytest.mark.parametrize("error", [OSError("401 Client Error."), ValueError("bad id"), RuntimeError("read timeout\nx")])
def test_whatever_the_hub_answers_is_passed_on(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    _install(monkeypatch, failing(error))
    first = str(error).splitlines()[0].rstrip(".")
    assert error_of("someone/none") == (
        f"someone/none: isn't a local folder and can't be downloaded ({type(error).__name__}: {first}). "
        "Check the name and the connection, or name a checkpoint folder."
    )


def test_the_real_library_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    message = error_of("someone/none")
    assert message.startswith("someone/none: isn't a local folder and can't be downloaded: the hub can't be reached")
    assert "(offline) and the cache lacks it (" in message
