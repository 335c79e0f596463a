"""Generation and text against transformers: greedy ids, log-probabilities, the chain of processors, chat templates."""

from __future__ import annotations

import datetime
import itertools
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import tiny_text
import torch
from transformers import AutoTokenizer, GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qwenjax.generation import Completion, Options, complete
from qwenjax.sampling import process, sampling_of, seen_tokens
from qwenjax.scoring import perplexity, score_tokens
from qwenjax.text import load_text

pytestmark = reference.MARK
WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": tiny.config_json("qwen2", num_hidden_layers=2, tie_word_embeddings=True),
    "qwen3": tiny.config_json("qwen3", num_hidden_layers=2, **WINDOWED),
    "qwen2_moe": tiny.moe_json("qwen2_moe", num_hidden_layers=2),
    "qwen3_moe": tiny.moe_json("qwen3_moe", num_hidden_layers=2, norm_topk_prob=True),
}
LENGTHS, NEW = (9, 3, 14), 12
PROMPTS = [np.asarray(tiny.tokens(f"prompt {length}", length)).tolist() for length in LENGTHS]


@cache
def model_of(name: str) -> Any:
    return reference.model_of(CONFIGS[name])


@cache
def params(name: str) -> Any:
    return tiny.params(tiny.ModelConfig.from_hf(CONFIGS[name]))


def theirs(name: str, prompt: list[int], **settings: Any) -> tuple[list[int], list[float]]:
    """New ids of transformers' generate for one prompt, without padding, and their log-probabilities."""
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW, pad_token_id=0, **settings)
    result = model_of(name).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        generation_config=config,
        return_dict_in_generate=True,
        output_logits=True,
    )
    new = result.sequences[0, len(prompt) :]
    log_probs = torch.log_softmax(torch.stack(result.logits)[:, 0].float(), dim=-1)
    return new.tolist(), log_probs.gather(1, new[:, None])[:, 0].tolist()


def ours(name: str, **settings: Any) -> list[Completion]:
    config = tiny.ModelConfig.from_hf(CONFIGS[name])
    return complete(config, params(name), PROMPTS, Options(max_new_tokens=NEW, **settings))


@pytest.mark.parametrize(("name", "penalty"), [*((name, None) for name in CONFIGS), ("qwen3", 1.4)])
def test_greedy_ids_and_log_probabilities_equal(name: str, penalty: float | None) -> None:
    """A batch of unequal prompts here, each prompt alone there; then with the ends that some rows meet."""
    whole = ours(name, repetition_penalty=penalty)
    for prompt, row in zip(PROMPTS, whole, strict=True):
        tokens, log_probs = theirs(name, prompt, repetition_penalty=penalty)
        assert row.tokens == tokens
        np.testing.assert_allclose(row.log_probs, log_probs, atol=2e-5)
    eos = [whole[0].tokens[3], whole[2].tokens[7]]
    ended = ours(name, repetition_penalty=penalty, eos=eos)
    assert min(len(row.tokens) for row in ended) < NEW
    for prompt, row in zip(PROMPTS, ended, strict=True):
        assert row.tokens == theirs(name, prompt, repetition_penalty=penalty, eos_token_id=eos)[0]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe"])
def test_perplexity_equals_that_of_transformers_loss(name: str) -> None:
    config = tiny.ModelConfig.from_hf(CONFIGS[name])
    tokens = np.asarray(tiny.tokens("perplexity", 40)).tolist()
    with torch.no_grad():
        loss = model_of(name)(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss.item()
    for piece in (512, 16):
        found = perplexity(score_tokens(config, params(name), tokens, piece))
        np.testing.assert_allclose(found, np.exp(loss), rtol=2e-5)


# The chain


VOCAB = 211
TEMPERATURES, TOP_KS, TOP_PS = (1.0, 0.6, 1.7), (None, 1, 20, 500), (None, 0.3, 0.9)
MIN_PS, PENALTIES = (None, 0.1), (None, 1.3, 0.8)
CHAIN = list(itertools.product(TEMPERATURES, TOP_KS, TOP_PS, MIN_PS, PENALTIES))


def processed_there(row: int, logits_V: Any, seen: Any) -> Any:
    """transformers' own processors in its own order, as its generate builds them."""
    temperature, top_k, top_p, min_p, penalty = CHAIN[row]
    chain = LogitsProcessorList()
    if penalty is not None:
        chain.append(RepetitionPenaltyLogitsProcessor(penalty))
    if temperature != 1.0:
        chain.append(TemperatureLogitsWarper(temperature))
    if top_k is not None:
        chain.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        chain.append(TopPLogitsWarper(top_p))
    if min_p is not None:
        chain.append(MinPLogitsWarper(min_p))
    return chain(torch.tensor(np.array(seen))[None], torch.tensor(np.array(logits_V))[None])[0]


def test_every_combination_of_processors_equals_the_chain_of_transformers() -> None:
    """One batch, each row with settings of its own; equal sets of ids, and equal log-probabilities of what is left."""
    rows = len(CHAIN)
    logits_BV = jnp.asarray(5 * tiny.uniform("chain", (rows, VOCAB)), jnp.float32)
    seen_BT = tiny.tokens("seen", rows, 12, vocab=VOCAB)
    temperature, top_k, top_p, min_p, penalty = (list(setting) for setting in zip(*CHAIN, strict=True))
    sampling = sampling_of(
        rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    seen_BV = seen_tokens(seen_BT, jnp.full(rows, 12), VOCAB)
    here_BV = np.asarray(jax.nn.log_softmax(process(logits_BV, sampling, seen_BV), axis=-1))
    sizes = set()
    for row in range(rows):
        there_V = torch.log_softmax(processed_there(row, logits_BV[row], seen_BT[row]), dim=-1).numpy()
        np.testing.assert_array_equal(np.isfinite(here_BV[row]), np.isfinite(there_V), str(CHAIN[row]))
        np.testing.assert_allclose(here_BV[row], there_V, rtol=1e-5, atol=1e-5, err_msg=str(CHAIN[row]))
        sizes.add(int(np.isfinite(there_V).sum()))
    assert len(sizes) > 10


def test_transformers_builds_the_chain_in_this_order() -> None:
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.2)
    chain = model_of("qwen2")._get_logits_processor(config, input_ids_seq_length=3, device="cpu")
    assert [type(processor).__name__ for processor in chain] == [
        "RepetitionPenaltyLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]


# Text


TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "the cat"}],
    "several": [
        {"role": "system", "content": "größer <b>"},
        {"role": "user", "content": " 日本\n", "note": "x"},
        {"role": "skip", "content": "not this"},
        {"role": "assistant", "content": "👍", "tool_calls": None},
        {"role": "user", "content": "", "note": None},
    ],
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "thinking": {"enable_thinking": False},
    "tools": {"tools": [{"type": "function", "function": {"name": "größe", "parameters": {"x": [1, None]}}}]},
    "no_prompt": {"add_generation_prompt": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.write_text_files(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("where", ["config", "file"])
def test_chat_templates_give_the_same_text_and_ids(
    folder: Path, tmp_path: Path, talk: str, extras: str, where: str
) -> None:
    if where == "file":
        folder = tiny_text.write_text_files(tmp_path, template=None)
        template = "{{ bos_token }}|{{ pad_token }}|{{ strftime_now('%Y') }}\n" + tiny_text.TEMPLATE
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    own, other = load_text(folder), AutoTokenizer.from_pretrained(str(folder))
    settings = {"add_generation_prompt": True} | EXTRAS[extras]
    messages = TALKS[talk]
    expected = other.apply_chat_template(messages, tokenize=False, **settings)
    assert own.render_chat(messages, **settings) == expected
    assert len(expected) > 20
    assert (str(datetime.datetime.now().year) in expected) == (where == "file")
    ids = other.apply_chat_template(messages, tokenize=True, return_dict=False, **settings)
    assert own.encode_chat(messages, **settings) == list(ids)


@pytest.mark.parametrize("line", [*tiny_text.CORPUS, "", " a<|im_end|>b  ", "\n\t 👩‍👩‍👧"])
def test_ids_and_texts_equal(folder: Path, line: str) -> None:
    own, other = load_text(folder), AutoTokenizer.from_pretrained(str(folder))
    ids = other(line)["input_ids"]
    assert own.encode(line) == ids
    assert own.decode(ids) == other.decode(ids, skip_special_tokens=True)
    assert own.decode(ids, skip_special_tokens=False) == other.decode(ids)
