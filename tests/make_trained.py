"""Trains the two small models in tests/data/trained: a Qwen3 and a Qwen3-MoE that know this repository's licence.

    python tests/make_trained.py

takes a few minutes on two cores. Another machine's rounding gives other weights: commit them with their greedy.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import qwenjax
from qwenjax.text import load_text
from qwenjax.train.byte_tokenizer import write_byte_tokenizer
from qwenjax.train.data import read_bytes
from qwenjax.train.loop import train
from qwenjax.train.settings import TrainConfig

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
FOLDER = Path(__file__).resolve().parent / "data" / "trained"
PROMPTS = ("Licensed under the ", "   2. Grant of ", "You may not use ")
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
ROUTED: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **SHAPE},
    "qwen3_moe": {"model_type": "qwen3_moe", **SHAPE, **ROUTED},
}


def settings_of(config: qwenjax.ModelConfig) -> TrainConfig:
    return TrainConfig(
        steps=1200,
        batch_size=8,
        sequence_len=96,
        learning_rate=6e-3,
        warmup_steps=50,
        router_aux_loss_coef=0.01 if config.num_experts else None,
    )


def make(name: str) -> dict[str, str]:
    """Trains and saves one model; its greedy continuations of the prompts."""
    config = qwenjax.ModelConfig.from_hf(MODELS[name])
    settings = settings_of(config)
    with TemporaryDirectory() as folder:
        state = train(config, settings, read_bytes(config, TEXT, settings.sequence_len), Path(folder), save_every=10**6)
    qwenjax.save(config, state.params, FOLDER / name, overwrite=True)
    write_byte_tokenizer(FOLDER / name)
    return greedy(name)


def greedy(name: str) -> dict[str, str]:
    """What the saved model writes after each prompt, 48 bytes of it."""
    config, params = qwenjax.load(FOLDER / name)
    text = load_text(FOLDER / name)
    found = qwenjax.generate(config, params, [text.encode(prompt) for prompt in PROMPTS], max_new_tokens=48)
    return {prompt: text.decode(ids) for prompt, ids in zip(PROMPTS, found, strict=True)}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    written = {name: make(name) for name in MODELS}
    (FOLDER / "greedy.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
