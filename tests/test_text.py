"""Tokenizer, chat template, eos ids, and text that streams; tests/test_reference_generate.py has transformers' own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="needs the `text` extra")
import tiny_text

from qwenjax.errors import InputError
from qwenjax.text import Detokenizer, StopStrings, Text, TextStream, eos_ids, load_text

TALK = [{"role": "user", "content": "Wie groß? 日本"}, {"role": "assistant", "content": "höher"}]
ENGLISH = [{"role": "user", "content": "the cat", "note": None, "unused": 1}]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return load_text(tiny_text.write_text_files(tmp_path_factory.mktemp("text")))


def written(folder: Path, **files: Any) -> Path:
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
    return folder


def message_of(call: Any, *args: Any) -> str:
    with pytest.raises(InputError) as caught:
        call(*args)
    return str(caught.value)


# Tokenizer


@pytest.mark.parametrize("line", [*tiny_text.CORPUS, "", " x\n\ty ", "👩‍👩‍👧 \u0000 ﷽"])
def test_decoding_gives_back_what_was_encoded(text: Text, line: str) -> None:
    ids = text.encode(line)
    assert text.decode(ids) == line
    assert len(ids) <= len(line.encode())


def test_special_tokens_are_single_ids_and_left_out_of_text(text: Text) -> None:
    ids = text.encode("the<|im_end|>cat")
    assert ids.count(text.tokenizer.token_to_id("<|im_end|>")) == 1
    assert text.decode(ids) == "thecat"
    assert text.decode(ids, skip_special_tokens=False) == "the<|im_end|>cat"


def test_ids_beyond_the_tokenizer_have_no_text(text: Text) -> None:
    beyond = text.tokenizer.get_vocab_size() + 5
    ids = text.encode("the cat")
    assert text.decode([beyond, ids[0], beyond + 1, *ids[1:], 2**31 - 1]) == "the cat"
    assert streamed(text, [ids[0], beyond, *ids[1:], beyond]) == "the cat"


def test_a_folder_without_a_tokenizer_or_with_a_broken_one_is_named(tmp_path: Path) -> None:
    assert message_of(load_text, tmp_path) == (
        f"{tmp_path}: the folder has no tokenizer.json. Save the tokenizer in its fast form there."
    )
    written(tmp_path, tokenizer={"model": 1})
    message = message_of(load_text, tmp_path)
    assert message.startswith(f"{tmp_path / 'tokenizer.json'}: isn't a tokenizer (")
    assert message.endswith("). Download the file again.")


@pytest.mark.parametrize("module", ["tokenizers", "jinja2"])
def test_a_missing_extra_is_named(text: Text, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    call: Any = (lambda: load_text(text.folder)) if module == "tokenizers" else (lambda: text.render_chat(TALK))
    assert message_of(call) == (
        f"{module}: isn't installed, and text needs it. "
        'Install it: pip install "qwenjax-roofline[text]"'
    )  # fmt: skip


# Chat templates


def test_a_conversation_is_written_by_the_template(text: Text) -> None:
    assert text.render_chat(TALK) == (
        "<|im_start|>user\nWie groß? 日本<|im_end|>\n<|im_start|>assistant\nhöher<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.render_chat(ENGLISH, add_generation_prompt=False) == "<|im_start|>user\nthe cat<|im_end|>\n"
    assert text.render_chat(ENGLISH, enable_thinking=False).endswith("assistant\n<think></think>")
    tools = [{"name": "größe<&>", "x": [1]}]
    assert text.render_chat([], tools=tools) == (
        '<|im_start|>system\n{"name": "größe<&>", "x": [1]}<|im_end|>\n<|im_start|>assistant\n'
    )


def test_a_conversation_is_encoded_with_its_special_tokens(text: Text) -> None:
    ids = text.encode_chat(ENGLISH)
    start, end = (text.tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert (ids[0], ids.count(start), ids.count(end)) == (start, 2, 1)
    assert text.decode(ids, skip_special_tokens=False) == text.render_chat(ENGLISH)


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    assert load_text(tiny_text.write_text_files(tmp_path, chat_template=named)).render_chat(TALK) == "named"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }} größer", encoding="utf-8")
    assert load_text(tmp_path).render_chat(TALK) == "<|im_end|> größer"
    (tmp_path / "chat_template.jinja").unlink()
    tiny_text.write_text_files(tmp_path, template=None)
    assert message_of(load_text(tmp_path).render_chat, TALK) == (
        f"chat_template: {tmp_path} has none. Give plain text, or add a chat_template.jinja."
    )
    tiny_text.write_text_files(tmp_path, chat_template=7)
    assert message_of(load_text, tmp_path) == (
        f"{tmp_path / 'tokenizer_config.json'}: chat_template = 7: must be text. Write the template itself."
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for k in messages[0].__init__.__globals__ %}{{ k }}{% endfor %}",
        "{% if %}",
        "{{ messages + 1 }}",
        "{{ raise_exception('no such role') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 // 0 }}",
        "{{ 'a'.encode('no such code') }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_and_its_errors_are_messages(tmp_path: Path, template: str) -> None:
    text = load_text(tiny_text.write_text_files(tmp_path, template))
    message = message_of(text.render_chat, TALK)
    assert message.startswith("chat_template: can't write this conversation (")
    assert message.endswith("). Change the messages or the template.")
    assert "raise" not in template or "(no such role)" in message


def test_a_template_that_is_no_text_is_told_by_its_file(tmp_path: Path) -> None:
    file = tiny_text.write_text_files(tmp_path) / "chat_template.jinja"
    file.write_bytes(b"\xff\xfe")
    assert message_of(load_text, tmp_path) == f"{file}: can't be read (invalid start byte). Download the file again."
    file.unlink()
    text = load_text(tiny_text.write_text_files(tmp_path, chat_template=[7, {"name": "default"}]))
    assert text.chat_template is None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[1]", "holds a JSON list, not an object"),
        ("{", "isn't valid JSON (Expecting property name enclosed in double quotes, line 1 column 2)"),
    ],
)
def test_settings_that_are_no_object_are_told_by_their_file(tmp_path: Path, content: str, told: str) -> None:
    file = tiny_text.write_text_files(tmp_path) / "tokenizer_config.json"
    file.write_text(content)
    assert message_of(load_text, tmp_path) == f"{file}: {told}. Correct the file or download it again."


def test_bytes_that_are_no_text_are_refused(text: Text) -> None:
    """A shell hands on what isn't UTF-8 as lone surrogates."""
    told = "text = 'a\\udc80': isn't UTF-8, which tokenizers read. Write it in UTF-8."
    assert message_of(text.encode, "a\udc80") == told
    message = message_of(text.encode_chat, [{"role": "user", "content": "a\udc80"}])
    assert message.startswith("text = '<|im_start|>user")
    assert "\\udc80" in message


# Ends


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 3]}, {"eos_token_id": 5}, (7, 3, 5)),
        ({"eos_token_id": 7}, {"eos_token_id": [5, 7]}, (7, 5)),
        ({"eos_token_id": 0}, {}, (0,)),
        ({"temperature": 1}, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
        (None, {"eos_token_id": [5]}, (5,)),
        (None, None, ()),
    ],
)
def test_eos_ids_are_those_of_both_files(tmp_path: Path, generation: Any, config: Any, expected: Any) -> None:
    files = {"generation_config": generation, "config": config}
    written(tmp_path, **{name: data for name, data in files.items() if data is not None})
    assert eos_ids(tmp_path) == expected


@pytest.mark.parametrize("value", ["<|im_end|>", [1, None], -1, True, 1.0, [[1]]])
def test_eos_ids_of_other_kinds_are_refused(tmp_path: Path, value: Any) -> None:
    written(tmp_path, generation_config={"eos_token_id": value}, config={})
    assert message_of(eos_ids, tmp_path) == (
        f"{tmp_path / 'generation_config.json'}: eos_token_id = {value!r}: must be an id or a list of ids. "
        "Write [] or null for none."
    )


# Streams


def streamed(text: Text, ids: list[int]) -> str:
    stream = TextStream(text)
    return "".join([*map(stream.push, ids), stream.finish()])


def byte_ids(text: Text, data: bytes) -> list[int]:
    """One id a byte: no merges."""
    letters = text.tokenizer.pre_tokenizer.pre_tokenize_str("".join(map(chr, range(128))))
    assert letters
    kinds = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kinds]
    names = {byte: chr(byte) for byte in kinds} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [text.tokenizer.token_to_id(names[byte]) for byte in data]


def test_a_character_comes_out_once_all_its_bytes_are_there(text: Text) -> None:
    stream = TextStream(text)
    pieces = [stream.push(token) for token in byte_ids(text, "aö日👍b".encode())]
    assert pieces == ["a", "", "ö", "", "", "日", "", "", "", "👍", "b"]
    assert stream.finish() == ""


@given(data=st.binary(max_size=24), specials=st.lists(st.integers(0, 400), max_size=4))
@settings(max_examples=200, deadline=None)
def test_all_pieces_together_are_the_whole_text(text: Text, data: bytes, specials: list[int]) -> None:
    """For any bytes, whole or broken, with special ids and ids without text between them."""
    ids = byte_ids(text, data)
    for place, token in enumerate(specials):
        ids.insert(place * 5, token)
    assert streamed(text, ids) == text.decode(ids)


@given(line=st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_whole_text_streams_without_a_broken_character(text: Text, line: str) -> None:
    line = line.encode("utf-8", "ignore").decode()
    for ids in (text.encode(line), byte_ids(text, line.encode())):
        stream = Detokenizer(text.decode)
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) + stream.finish() == line
        assert all("�" not in piece for piece in pieces) or "�" in line


def test_the_cost_of_a_token_does_not_grow(text: Text) -> None:
    lengths: list[int] = []

    def decode(ids: Any) -> str:
        lengths.append(len(ids))
        return text.decode(ids)

    stream = Detokenizer(decode)
    for token in byte_ids(text, "日本語 cat ".encode() * 20):
        stream.push(token)
    assert max(lengths) <= 8


@pytest.mark.parametrize(
    ("pieces", "expected", "found"),
    [
        (["one ST", "OP two"], "one ", True),
        (["one S", "T", "ART"], "one START", False),
        (["SSTO", "P"], "S", True),
        (["aSTO"], "aSTO", False),
        (["x END STOP"], "x ", True),
        (["EN", "", "DSTOP"], "", True),
        (["a", "STOPb", "c"], "a", True),
        ([], "", False),
    ],
)
def test_stop_strings_hold_back_what_may_become_one(pieces: list[str], expected: str, found: bool) -> None:
    stops = StopStrings(["STOP", "END"])
    out = [stops.push(piece) for piece in pieces]
    assert ("".join(out) + stops.finish(), stops.found) == (expected, found)


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=5),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_stopping_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    """The text ends before the stop string that is complete first."""
    line = "".join(pieces)
    ends = [(line.find(stop) + len(stop), line.find(stop)) for stop in stops if stop in line]
    expected = line[: min(ends)[1]] if ends else line
    for split in (pieces, list(line), [line]):
        stream = StopStrings(stops)
        assert "".join([*map(stream.push, split), stream.finish()]) == expected
        assert stream.found == bool(ends)


def test_a_stream_stops_at_a_string_across_tokens(text: Text) -> None:
    stream = TextStream(text, ["t sat"])
    out = ""
    for token in text.encode("the cat sat on"):
        out += stream.push(token)
        if stream.stopped:
            break
    assert (out + stream.finish(), stream.stopped) == ("the ca", True)


def test_an_empty_stop_string_is_refused() -> None:
    assert message_of(StopStrings, ["a", ""]) == "stop = ['a', '']: an empty text stops everything. Leave it out."
