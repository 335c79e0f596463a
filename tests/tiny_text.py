"""A home-made byte-level tokenizer, and a checkpoint folder's text files around it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = ("the cat sat on the mat, and the dog sat on the cat", "größer, höher, weiter", "日本語 the 日本 👍 that")
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(users=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif %}
    {%- if message.role == 'fail' %}{{ raise_exception('no such role') }}{% endif %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- message.content }}{% if message.note is defined %} ({{ message.note }}){% endif %}{{ '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}
"""


@cache
def tokenizer() -> Tokenizer:
    """Bytes and some merges as Qwen's are built, the special tokens last."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return made


def write_text_files(folder: Path, template: str | None = TEMPLATE, **settings: Any) -> Path:
    """tokenizer.json and tokenizer_config.json, with the template inside the latter."""
    folder.mkdir(exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings), encoding="utf-8")
    return folder
