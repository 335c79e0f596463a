"""`qwenjax generate` and `qwenjax score` against the Python functions, on a checkpoint with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="needs the `text` extra")
import cli_run
import tiny
import tiny_text
from measured_box import box

import qwenjax
from qwenjax.calibration import calibrated_bandwidth_bytes_per_s
from qwenjax.cli_text import kv_token_bytes, step_weight_bytes
from qwenjax.generation import Options, complete
from qwenjax.scoring import score_tokens
from qwenjax.text import load_text
from roofline.hardware import write_hardware

CONFIG = tiny.config("qwen3", num_hidden_layers=2, vocab_size=300, eos_token_id=5)
PROMPTS = ("the cat", "größer")
NEW = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    qwenjax.save(CONFIG, tiny.params(CONFIG), path)
    return tiny_text.write_text_files(path)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    text = load_text(folder)
    rows = [text.encode(prompt) for prompt in PROMPTS]
    return text, complete(CONFIG, tiny.params(CONFIG), rows, Options(max_new_tokens=NEW, eos=[5]))


def generated(folder: Path, *more: str) -> list[str]:
    return ["qwenjax generate", str(folder), "--max-new-tokens", str(NEW), *more]


def refusal(*command: str) -> str:
    result = cli_run.run(*command)
    assert (result.status, result.stdout) == (2, "")
    return result.stderr


def test_json_holds_what_python_generates(folder: Path, expected: Any) -> None:
    text, completions = expected
    record = cli_run.figures(*generated(folder, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1]))
    assert [row["tokens"] for row in record["rows"]] == [row.tokens for row in completions]
    for row, prompt, completion in zip(record["rows"], PROMPTS, completions, strict=True):
        assert (row["prompt"], row["prompt_tokens"]) == (prompt, len(text.encode(prompt)))
        assert row["text"] == text.decode(completion.tokens)
        assert row["stopped_by"] == completion.reason
        np.testing.assert_allclose(row["log_probs"], completion.log_probs, atol=2e-5)
    assert (record["dtype"], record["decode_steps"]) == ("float32", NEW - 2)
    tokens = sum(max(0, len(row.tokens) - 2) for row in completions)
    assert record["tokens_per_s"] == pytest.approx(tokens / record["decode_s"])
    held = len(text.encode(PROMPTS[0])) + len(text.encode(PROMPTS[1]))
    params = tiny.params(CONFIG)
    moved = sum(
        step_weight_bytes(CONFIG, params, 2) + (held + 2 * step) * kv_token_bytes(CONFIG, params)
        for step in range(2, NEW)
    )
    assert record["bytes_per_s"] == pytest.approx(moved / record["decode_s"])


def test_text_is_streamed_row_after_row_and_speed_goes_to_stderr(
    folder: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, completions = expected
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    result = cli_run.run(*generated(folder, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1]))
    assert result.status == 0, result.stderr
    assert result.stdout == "".join(text.decode(row.tokens) + "\n" for row in completions)
    assert result.stderr.startswith(f"{2 * NEW} tokens: the first after ")
    assert result.stderr.endswith(" GB/s, share of the bound unknown: run `roofline calibrate`\n")


def test_the_share_of_the_bound_is_that_of_the_calibrated_bandwidth(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hardware(box(bytes_per_s=2e12), tmp_path / "here.toml")
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    record = cli_run.figures(*generated(folder, "--prompt", PROMPTS[0]))
    assert record["bound_fraction"] == pytest.approx(record["bytes_per_s"] / 2e12)
    for broken in ("", "[figures]", "figures = 3", "peak = ["):
        (tmp_path / "here.toml").write_text(broken, encoding="utf-8")
        assert calibrated_bandwidth_bytes_per_s() is None


def test_stop_strings_end_and_are_left_out(folder: Path, expected: Any) -> None:
    text, completions = expected
    whole = text.decode(completions[0].tokens)
    stop = whole[3:5]
    record = cli_run.figures(*generated(folder, "--prompt", PROMPTS[0], "--stop", stop))
    row = record["rows"][0]
    assert (row["text"], row["stopped_by"]) == (whole[: whole.index(stop)], "stop")
    assert row["tokens"] == completions[0].tokens[: len(row["tokens"])]
    assert len(row["tokens"]) < NEW


def test_eos_is_that_of_both_files(folder: Path, expected: Any) -> None:
    end = expected[1][0].tokens[1]
    file = folder / "generation_config.json"
    before = file.read_bytes() if file.exists() else None
    try:
        file.write_text(json.dumps({"eos_token_id": [299, end]}), encoding="utf-8")
        record = cli_run.figures(*generated(folder, "--prompt", PROMPTS[0]))
    finally:
        file.unlink() if before is None else file.write_bytes(before)
    row = record["rows"][0]
    assert (row["tokens"], row["stopped_by"]) == (expected[1][0].tokens[:2], "eos")
    assert record["tokens_per_s"] is None, "two tokens are too few to time"


def test_chat_uses_the_template_and_sampling_its_options(folder: Path) -> None:
    text = load_text(folder)
    settings = ["--temperature", "1.5", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01", "--seed", "3"]
    record = cli_run.figures(*generated(folder, "--chat", "--prompt", "the cat", *settings))
    ids = text.encode_chat([{"role": "user", "content": "the cat"}])
    options = Options(NEW, temperature=1.5, top_k=40, top_p=0.9, min_p=0.01, seed=3, eos=[5])
    assert record["rows"][0]["tokens"] == complete(CONFIG, tiny.params(CONFIG), [ids], options)[0].tokens
    assert record["rows"][0]["prompt_tokens"] == len(ids)


def test_scores_are_those_of_python(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text(tiny_text.CORPUS[0], encoding="utf-8")
    ids = load_text(folder).encode(tiny_text.CORPUS[0])
    record = cli_run.figures("qwenjax score", str(folder), "--text", str(file))
    scores = score_tokens(CONFIG, tiny.params(CONFIG), ids)
    assert [row["token"] for row in record["rows"]] == ids[1:]
    np.testing.assert_allclose([row["log_prob"] for row in record["rows"]], scores, atol=2e-5)
    assert record["perplexity"] == pytest.approx(np.exp(-np.mean(scores)))
    assert record["num_tokens"] == len(ids)
    assert "".join(row["text"] for row in record["rows"]) == load_text(folder).decode(ids[1:])
    shown = cli_run.text_of("qwenjax score", str(folder), "--text", str(file))
    assert shown.startswith(f"perplexity {record['perplexity']:.4f} over {len(ids) - 1} tokens\n")


def test_what_cannot_be_used_is_one_message(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    assert refusal("qwenjax score", str(folder), "--text", str(file)) == (
        f"{file}: can't be read (No such file or directory). Name a text file.\n"
    )
    file.write_bytes(b"\xff\xfe")
    assert refusal("qwenjax score", str(folder), "--text", str(file)) == (
        f"{file}: isn't UTF-8 text (invalid start byte). Save it as UTF-8.\n"
    )
    assert refusal(*generated(folder, "--prompt", "")) == (
        "--prompt = '': has no tokens. Write something to continue.\n"
    )
    assert refusal(*generated(folder, "--prompt", "a", "--top-p", "2")) == (
        "top_p = 2.0: must be from 0 to 1, or 1 such values, one a row. Change the setting.\n"
    )
    assert refusal(*generated(folder, "--prompt", "a", "--dtype", "int4")) == (
        "--dtype = 'int4': is not a dtype of weights. Known: float32, bfloat16, float16.\n"
    )
    assert refusal(*generated(tmp_path, "--prompt", "a")) == (
        f"{tmp_path}: the folder has no tokenizer.json. Save the tokenizer in its fast form there.\n"
    )


def test_experts_count_by_those_that_rows_can_choose() -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    config = tiny.config("qwen3_moe", tie_word_embeddings=True, **sizes)
    params = qwenjax.param_shapes(config, "bfloat16")
    arrays = {name: np.zeros(leaf.shape, np.float16) for name, leaf in params["layers"][0].items()}
    params = {"embed_tokens": np.zeros(params["embed_tokens"].shape, np.float16), "layers": {0: arrays}}
    expert_bytes = 3 * config.hidden_size * 24 * 2
    one, two, all_ = (step_weight_bytes(config, params, rows) for rows in (1, 2, 9))
    assert (two - one, all_ - one) == (2 * expert_bytes, 6 * expert_bytes)
