"""Two checkpoints' tokenizers: the same whatever padding their models have, and told apart by what they do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from config_base import QWEN2, Json

pytest.importorskip("tokenizers", reason="needs the `text` extra")
import tiny_text

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.text import tokenizer_differences


def folder_of(folder: Path, vocab_size: int, change: Any = None, **settings: Any) -> Path:
    tiny_text.write_text_files(folder, **settings)
    (folder / "config.json").write_text(json.dumps({**QWEN2, "vocab_size": vocab_size}))
    if change:
        file = folder / "tokenizer.json"
        data = json.loads(file.read_text(encoding="utf-8"))
        change(data)
        file.write_text(json.dumps(data), encoding="utf-8")
    return folder


def test_tokenizers_are_compared_and_not_rows(tmp_path: Path) -> None:
    draft = folder_of(tmp_path / "draft", 320)
    target = folder_of(tmp_path / "target", 384, template=None, eos_token="<|endoftext|>")
    assert ModelConfig.from_hf(draft).vocab_size != ModelConfig.from_hf(target).vocab_size
    assert tokenizer_differences(draft, target) == tokenizer_differences(target, draft) == ()


def _older_merges(data: Json) -> None:
    data["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]


def _not_special(data: Json) -> None:
    data["added_tokens"][-1]["special"] = False


@pytest.mark.parametrize("change", [_older_merges, _not_special])
def test_the_same_tokenizer_written_otherwise(tmp_path: Path, change: Any) -> None:
    one, other = folder_of(tmp_path / "one", 320), folder_of(tmp_path / "other", 320, change)
    assert tokenizer_differences(one, other) == ()


def _one_more(data: Json) -> None:
    last = max(token["id"] for token in data["added_tokens"])
    data["added_tokens"].append({**data["added_tokens"][-1], "content": "<|more|>", "id": last + 1})


def _swapped(data: Json) -> None:
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_swapped, r"vocabulary: 2 tokens have other ids, such as 'a': \d+ and \d+"),
        (_one_more, r"vocabulary: 1 tokens have other ids, such as '<\|more\|>': none and \d+"),
        (lambda data: data["model"]["merges"].pop(), "model: not the same"),
        (lambda data: data.update(normalizer={"type": "NFC"}), "normalizer: not the same"),
        (lambda data: data["pre_tokenizer"].update(add_prefix_space=True), "pre_tokenizer: not the same"),
        (lambda data: data["added_tokens"][0].update(lstrip=True), "added_tokens: not the same"),
    ],
)
def test_tokenizers_that_differ_say_in_what(tmp_path: Path, change: Any, told: str) -> None:
    one, other = folder_of(tmp_path / "one", 320), folder_of(tmp_path / "other", 320, change)
    differences = tokenizer_differences(one, other)
    assert re.fullmatch(told, differences[0])
    assert {text.split(":")[0] for text in differences[1:]} <= {"added_tokens"}
    with pytest.raises(InputError):
        tokenizer_differences(one, tmp_path)
