"""A tokenizer.json whose ids are byte values, so that other programs read and write what was trained here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_byte_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json in the form of Hugging Face tokenizers; no special tokens."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {letter: byte for byte, letter in enumerate(byte_letters())}, "merges": []},
    }
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, value in {"tokenizer.json": tokenizer, "tokenizer_config.json": about}.items():
        (folder / name).write_text(json.dumps(value) + "\n", encoding="utf-8")


def byte_letters() -> str:
    """The letter that stands for each byte in byte-level vocabularies (since GPT-2): printable Latin-1 as itself, the
    other bytes as the letters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))
