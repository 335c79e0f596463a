"""Two models that were trained here (make_trained.py): they have learnt, and write the same in every program."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from make_trained import FOLDER, MODELS, PROMPTS, TEXT, greedy

import qwenjax
from qwenjax.text import load_text
from qwenjax.train.loss import lm_loss

each_model = pytest.mark.parametrize("name", MODELS)
RECORDED: dict[str, dict[str, str]] = json.loads((FOLDER / "greedy.json").read_text(encoding="utf-8"))


@each_model
def test_the_config_is_the_script_s(name: str) -> None:
    assert qwenjax.ModelConfig.from_hf(FOLDER / name) == qwenjax.ModelConfig.from_hf(MODELS[name])


@each_model
def test_the_loss_is_clearly_under_the_unigram_entropy(name: str) -> None:
    text = np.frombuffer(TEXT.read_bytes(), np.uint8)
    shares = np.bincount(text) / len(text)
    entropy = -math.fsum(share * math.log(share) for share in shares if share)
    config, params = qwenjax.load(FOLDER / name)
    windows = text[: len(text) // 96 * 96].reshape(-1, 96)[::4].astype(np.int32)
    assert float(lm_loss(config, params, windows).total) < 0.5 * entropy


@each_model
def test_greedy_text_is_as_recorded(name: str) -> None:
    written = greedy(name)
    assert written == RECORDED[name]
    assert list(written) == list(PROMPTS)
    assert len(set(written.values())) == len(PROMPTS)  # it depends on the prompt


@each_model
def test_bytes_are_the_tokens(name: str) -> None:
    text = load_text(FOLDER / name)
    written = "A b\n\tnaïve — 模型 \U0001f600 \x00\x7f"
    assert text.encode(written) == list(written.encode())
    assert text.decode(list(written.encode())) == written
