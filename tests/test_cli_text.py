"""`qwenjax generate` and `qwenjax score` against the Python functions, on a checkpoint with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="needs the `text` extra")
import cli_run
import tiny
import tiny_text
from measured_box import box

import qwenjax
from qwenjax.calibration import calibrated_bandwidth_bytes_per_s
from qwenjax.cli import app
from qwenjax.errors import InputError
from qwenjax.generation import Options, complete
from qwenjax.recommended import recommended_sampling
from qwenjax.scoring import score_tokens
from qwenjax.session import kv_token_bytes, step_weight_bytes
from qwenjax.text import load_text
from roofline.hardware import write_hardware

CONFIG = tiny.config("qwen3", num_hidden_layers=2, vocab_size=300, eos_token_id=5)
PROMPTS = ("the cat", "größer")
NEW = 9
WARM = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}  # as Qwen3's


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


def test_on_a_cpu_16_bits_are_widened_unless_they_are_asked_for(tmp_path: Path) -> None:
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.params(CONFIG))
    qwenjax.save(CONFIG, narrow, tmp_path / "tiny")
    folder = tiny_text.write_text_files(tmp_path / "tiny")
    told = "bfloat16 weights are widened to float32, many times faster on a CPU; --dtype bfloat16 keeps them\n"
    for option, dtype in (((), "float32"), (("--dtype", "bfloat16"), "bfloat16")):
        result = cli_run.run(*generated(folder, "--prompt", "a", "--json", *option))
        assert json.loads(result.stdout)["dtype"] == dtype
        assert (told in result.stderr) == (not option)


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
    assert refusal(*generated(folder, "--prompt", "a", "--kv-dtype", "int8")) == (
        "--kv-dtype = 'int8': is no dtype of keys and values. "
        "Known: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2.\n"
    )
    assert refusal(*generated(folder, "--prompt", "a", "--prompt", "b", "--seed", str(2**32 - 1))) == (
        f"seed = {2**32 - 1}: must be an integer from 0 to 2**32 - 2, or 2 of them, one a row. Choose another seed.\n"
    )
    assert refusal(*generated(folder, "--prompt", "a\udc80")) == (
        "text = 'a\\udc80': isn't UTF-8, which tokenizers read. Write it in UTF-8.\n"
    )
    for words, count in (("", 0), ("a", 1)):
        file.write_text(words)
        assert refusal("qwenjax score", str(folder), "--text", str(file)) == (
            f"{file}: has {count} tokens, and the first one has no probability. Give a longer text.\n"
        )
    assert refusal(*generated(tmp_path, "--prompt", "a")) == (
        f"{tmp_path}: the folder has no tokenizer.json. Save the tokenizer in its fast form there.\n"
    )


def test_a_text_ends_at_the_context_length(folder: Path) -> None:
    """512 positions: a prompt of 508 tokens leaves four, and the fifth token isn't run; a longer one is refused."""
    ids = load_text(folder).encode("cat " * 600)[:508]
    prompt = load_text(folder).decode(ids)
    assert load_text(folder).encode(prompt) == ids
    asked = ["--prompt", prompt, "--prompt", "a"]
    result = cli_run.run("qwenjax generate", str(folder), *asked, "--max-new-tokens", "9", "--json")
    assert result.status == 0
    assert result.stderr == "ended: the model's context length of 512 tokens is reached in row 1\n"
    rows = json.loads(result.stdout)["rows"]
    assert [(len(row["tokens"]), row["stopped_by"]) for row in rows] == [(5, "cache_full"), (9, "max_new_tokens")]
    record = cli_run.figures("qwenjax generate", str(folder), "--prompt", prompt, "--max-new-tokens", str(10**20))
    assert record["rows"][0]["tokens"] == rows[0]["tokens"]
    assert refusal(*generated(folder, "--prompt", prompt + " cat" * 5)) == (
        "--prompt: has 513 tokens, and the model's context length is 512. "
        "Shorten it, or let rope_scaling in config.json stretch the model.\n"
    )


def test_a_cache_dtype_of_its_own(folder: Path, tmp_path: Path) -> None:
    text, params = load_text(folder), tiny.params(CONFIG)
    record = cli_run.figures(*generated(folder, "--prompt", PROMPTS[0], "--kv-dtype", "float8_e4m3fn"))
    options = Options(max_new_tokens=NEW, eos=[5], kv_dtype="float8_e4m3fn")
    completion = complete(CONFIG, params, [text.encode(PROMPTS[0])], options)[0]
    assert (record["dtype"], record["kv_dtype"]) == ("float32", "float8_e4m3fn")
    assert record["rows"][0]["tokens"] == completion.tokens
    assert kv_token_bytes(CONFIG, params) == 4 * kv_token_bytes(CONFIG, params, "float8_e4m3fn")
    file = tmp_path / "words.txt"
    file.write_text(tiny_text.CORPUS[0], encoding="utf-8")
    narrow, wide = (
        cli_run.figures("qwenjax score", str(folder), "--text", str(file), "--kv-dtype", dtype)["perplexity"]
        for dtype in ("float8_e4m3fn", "float32")
    )
    assert narrow == pytest.approx(wide, rel=0.2)
    assert narrow != wide


@pytest.fixture
def recommending(folder: Path) -> Iterator[Path]:
    file = folder / "generation_config.json"
    stated = {"do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
    file.write_text(json.dumps(stated), encoding="utf-8")
    yield folder
    file.unlink()


def test_what_the_checkpoint_recommends_is_told_and_taken_where_asked(recommending: Path, expected: Any) -> None:
    asked = [*generated(recommending, "--prompt", PROMPTS[0]), "--json"]
    greedy = cli_run.run(*asked)
    assert json.loads(greedy.stdout)["rows"][0]["tokens"] == expected[1][0].tokens
    assert json.loads(greedy.stdout)["sampling"] == {"temperature": 0}
    assert greedy.stderr == (
        "ignored: generation_config.json recommends temperature 1.5, top_k 40, top_p 0.9, repetition_penalty 1.1; "
        "--checkpoint-sampling takes them\n"
    )
    taken = cli_run.run(*asked, "--checkpoint-sampling", "--top-p", "0.7", "--seed", "3")
    assert taken.stderr == "from generation_config.json: temperature 1.5, top_k 40, repetition_penalty 1.1\n"
    sampling = {"temperature": 1.5, "top_k": 40, "top_p": 0.7, "repetition_penalty": 1.1}
    assert json.loads(taken.stdout)["sampling"] == sampling
    ids = load_text(recommending).encode(PROMPTS[0])
    options = Options(max_new_tokens=NEW, seed=3, eos=[5], **sampling)  # type: ignore[arg-type]
    tokens = complete(CONFIG, tiny.params(CONFIG), [ids], options)[0].tokens
    assert json.loads(taken.stdout)["rows"][0]["tokens"] == tokens != expected[1][0].tokens


def test_options_without_an_effect_are_told(folder: Path) -> None:
    result = cli_run.run(*generated(folder, "--prompt", "a", "--top-p", "0.5", "--min-p", "0.1", "--json"))
    assert result.stderr == "ignored: --top-p, --min-p: at temperature 0 the most likely token is taken\n"
    warm = cli_run.run(*generated(folder, "--prompt", "a", "--top-p", "0.5", "--temperature", "1", "--json"))
    assert warm.stderr == ""


@pytest.mark.parametrize(
    ("stated", "settings"),
    [
        ({"do_sample": True, **WARM}, WARM),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "top_k": 0, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"do_sample": True, "temperature": 0.5, "top_p": 1}, {"temperature": 0.5}),
        ({"do_sample": False, **WARM}, {}),
        ({"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"eos_token_id": 3, "repetition_penalty": 1.0}, {}),
        ({}, {}),
    ],
)
def test_recommended_settings_are_read_as_transformers_does(tmp_path: Path, stated: Any, settings: Any) -> None:
    assert recommended_sampling(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    assert recommended_sampling(tmp_path) == settings


def test_recommended_settings_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"top_p": "most"}')
    with pytest.raises(InputError) as caught:
        recommended_sampling(tmp_path)
    assert str(caught.value) == f"{file}: top_p = 'most': must be a number. Write a JSON number without quotes."
    file.write_text("[]")
    with pytest.raises(InputError) as caught:
        recommended_sampling(tmp_path)
    assert str(caught.value) == f"{file}: holds a JSON list, not an object. Correct the file or download it again."


def test_weights_that_give_no_numbers_are_told(folder: Path, tmp_path: Path) -> None:
    params = tiny.params(CONFIG)
    params["final_norm"] = params["final_norm"] * float("nan")
    qwenjax.save(CONFIG, params, tmp_path / "nan")
    tiny_text.write_text_files(tmp_path / "nan")
    (tmp_path / "words.txt").write_text("the cat sat")
    told = (
        "logits: aren't numbers (NaN): the weights hold NaN or infinity, or the dtype is too narrow for them. "
        "Check the weights, or try --dtype float32.\n"
    )
    for more in ([], ["--temperature", "1", "--top-p", "0.5"], ["--json"]):
        assert refusal(*generated(tmp_path / "nan", "--prompt", "a", *more)) == told
    assert refusal("qwenjax score", str(tmp_path / "nan"), "--text", str(tmp_path / "words.txt")) == told


def test_too_little_memory_is_one_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = "Ask for less at once: fewer tokens, prompts or layers, a smaller batch, or a narrower dtype."

    def failing(error: BaseException) -> Any:
        def init_cache(*args: Any) -> None:
            raise error

        return init_cache

    full = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 192000003072 bytes.\nmore")
    for error, reason in (
        (full, "RESOURCE_EXHAUSTED: Out of memory allocating 192000003072 bytes"),
        (MemoryError(), "out of memory"),
    ):
        monkeypatch.setattr("qwenjax.generation.init_cache", failing(error))
        told = f"memory: isn't enough ({reason}). {remedy}\n"
        assert refusal(*generated(folder, "--prompt", "a")) == told
    monkeypatch.setattr("qwenjax.generation.init_cache", failing(RuntimeError("INTERNAL: a fault")))
    with pytest.raises(RuntimeError, match="INTERNAL"):
        app(["generate", str(folder), "--prompt", "a"])


def test_experts_count_by_those_that_rows_can_choose() -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    config = tiny.config("qwen3_moe", tie_word_embeddings=True, **sizes)
    params = qwenjax.param_shapes(config, "bfloat16")
    arrays = {name: np.zeros(leaf.shape, np.float16) for name, leaf in params["layers"][0].items()}
    params = {"embed_tokens": np.zeros(params["embed_tokens"].shape, np.float16), "layers": {0: arrays}}
    expert_bytes = 3 * config.hidden_size * 24 * 2
    one, two, all_ = (step_weight_bytes(config, params, rows) for rows in (1, 2, 9))
    assert (two - one, all_ - one) == (2 * expert_bytes, 6 * expert_bytes)
