"""The models that were trained here, in transformers: loaded as any other checkpoint, they write the same text."""

from __future__ import annotations

import json

import pytest
import reference
import torch
from make_trained import FOLDER, MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = reference.MARK


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_greedy_text_and_ids(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / name)
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32).eval()
    assert tokenizer("Zwölf\n")["input_ids"] == list("Zwölf\n".encode())
    for prompt, expected in json.loads((FOLDER / "greedy.json").read_text(encoding="utf-8"))[name].items():
        ids = tokenizer(prompt, return_tensors="pt")
        longer = model.generate(**ids, max_new_tokens=48, do_sample=False, pad_token_id=0)
        assert tokenizer.decode(longer[0, ids["input_ids"].shape[1] :]) == expected
