"""Text to token ids and back: a checkpoint's own tokenizer and chat template, its eos ids, and text as it streams.

tokenizers and jinja2 (the `text` extra) are imported when used. Ids beyond the tokenizer's own are legal rows of a
padded vocabulary: they have no text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenjax.config import read_eos_ids, read_json
from qwenjax.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = Mapping[str, Any]
Folder = str | os.PathLike[str]
_INCOMPLETE = "�"  # what decoding gives for bytes that are no character, or not yet one
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Text:
    """A checkpoint's tokenizer with what its chat template reads."""

    folder: Path
    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens that the tokenizer adds itself (Qwen's adds none)."""
        return list(self.tokenizer.encode(_unicode(text)).ids)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Ids of a conversation, ending where the assistant's answer begins."""
        text = _unicode(self.render_chat(messages, **variables))
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as the checkpoint's template writes it; variables such as enable_thinking go to it."""
        if self.chat_template is None:
            raise InputError(
                "chat_template", None, f"{self.folder} has none", "Give plain text, or add a chat_template.jinja."
            )
        # A key without a value would be written as "None" by most templates; transformers drops it too.
        stated = [{key: value for key, value in message.items() if value is not None} for message in messages]
        conversation = {
            "messages": stated,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        return _render(self.chat_template, {**self.special_tokens, **variables, **conversation})

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Special tokens are left out unless asked for; ids beyond the tokenizer have no text."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def _unicode(text: str) -> str:
    """The text, unless it holds half a surrogate pair: what a shell hands on of bytes that aren't UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("text", text, "isn't UTF-8, which tokenizers read", "Write it in UTF-8.") from None
    return text


def load_text(folder: Folder) -> Text:
    """The tokenizer.json of a checkpoint folder, with its chat template and named special tokens where it has them."""
    path = Path(folder)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise InputError(
            str(folder), None, "the folder has no tokenizer.json", "Save the tokenizer in its fast form there."
        )
    tokenizer_class = _extra("tokenizers").Tokenizer
    try:
        tokenizer = tokenizer_class.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise InputError(str(file), None, f"isn't a tokenizer ({error})", "Download the file again.") from None
    settings = optional_json(path / "tokenizer_config.json")
    named = {**optional_json(path / "special_tokens_map.json"), **settings}
    special = {name: _content(named[name]) for name in _SPECIAL_TOKENS if named.get(name) is not None}
    return Text(path, tokenizer, _chat_template(path, settings), special)


def eos_ids(folder: Folder) -> tuple[int, ...]:
    """The ids that end a text: those of generation_config.json, then those of config.json, each an int or a list."""
    found: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        found.update(dict.fromkeys(read_eos_ids(path, optional_json(path))))
    return tuple(found)


def tokenizer_differences(one: Folder, other: Folder) -> tuple[str, ...]:
    """In what two checkpoints' tokenizers differ, part by part; nothing where they give the same ids for every text.

    The rows of the embedding matrices play no part: a draft and its target of the same tokenizer pair whatever padding
    their vocab_size has.
    """
    first, second = (json.loads(load_text(folder).tokenizer.to_str()) for folder in (one, other))
    vocab, vocab_2 = (_vocabulary(parts) for parts in (first, second))
    differing = sorted(token for token in vocab.keys() | vocab_2.keys() if vocab.get(token) != vocab_2.get(token))
    told = []
    if differing:
        token = differing[0]
        ids = " and ".join("none" if ids.get(token) is None else str(ids[token]) for ids in (vocab, vocab_2))
        told.append(f"vocabulary: {len(differing)} tokens have other ids, such as {token!r}: {ids}")
    rules = {part: (first[part], second[part]) for part in ("normalizer", "pre_tokenizer", "post_processor")}
    for table in (first["model"], second["model"]):
        table.pop("vocab", None)
    rules["model"] = first["model"], second["model"]
    rules["added_tokens"] = _matching(first), _matching(second)
    return (*told, *(f"{part}: not the same" for part, (mine, theirs) in rules.items() if mine != theirs))


def _vocabulary(parts: Mapping[str, Any]) -> dict[str, int]:
    """Every token's id, the added ones included."""
    vocab: dict[str, int] = dict(parts["model"]["vocab"])
    return vocab | {token["content"]: token["id"] for token in parts["added_tokens"]}


def _matching(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How added tokens are found in a text; whether they count as special only matters to what is printed."""
    return [{name: value for name, value in token.items() if name != "special"} for token in parts["added_tokens"]]


def optional_json(path: Path) -> Mapping[str, Any]:
    """A JSON object that a checkpoint may lack."""
    try:
        return read_json(path) if path.is_file() else {}
    except InputError as error:  # whose remedies are for config.json
        remedy = "Correct the file or download it again."
        raise InputError(error.field, error.value, error.problem, remedy) from None


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) and "content" in token else token)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's: one text, or named ones of which `default` counts."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = f"can't be read ({error.strerror if isinstance(error, OSError) else error.reason})"
            raise InputError(str(file), None, problem, "Download the file again.") from None
    value = settings.get("chat_template")
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    if value is not None and not isinstance(value, str):
        raise InputError(
            f"{folder / 'tokenizer_config.json'}: chat_template", value, "must be text", "Write the template itself."
        )
    return value


def _extra(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        remedy = 'Install it: pip install "qwenjax-roofline[text]"'
        raise InputError(module, None, "isn't installed, and text needs it", remedy) from None


def _render(template: str, variables: Mapping[str, Any]) -> str:
    """Renders in jinja2's sandbox, with the settings, filters and globals of transformers' apply_chat_template."""
    jinja2 = _extra("jinja2")
    sandbox, extensions = import_module("jinja2.sandbox"), import_module("jinja2.ext")

    class GenerationBlock(extensions.Extension):  # type: ignore[misc,name-defined]
        """{% generation %}: marks the assistant's words for training; here it is its body."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, extensions.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return str(environment.from_string(template).render(**variables))
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise InputError(
            "chat_template",
            None,
            f"can't write this conversation ({str(error).rstrip('.')})",
            "Change the messages or the template.",
        ) from None


class Detokenizer:
    """Ids in, text out, piece by piece; a character comes out once all its bytes are there.

    What came out in all, `finish` included, is the text of all ids together.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # a window: ids whose text came out last, for context, then newer ones
        self._context = 0
        self._given = 0  # characters of the window's text that came out

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        whole = not text.endswith(_INCOMPLETE)
        new = text[self._given : len(text) if whole else -1]
        self._given += len(new)
        if whole and new:
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._given = len(self._decode(self._ids))
        return new

    def finish(self) -> str:
        """What is left: bytes that never became a character, as the replacement character."""
        rest = self._decode(self._ids)[self._given :]
        self._given += len(rest)
        return rest


class StopStrings:
    """Passes text on until one of the stop strings is complete; neither it nor what follows comes out."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InputError("stop", list(stops), "an empty text stops everything", "Leave it out.")
        self._stops = tuple(stops)
        self._held = ""  # the beginning of a stop string, perhaps
        self.found = False

    def push(self, text: str) -> str:
        if self.found:
            return ""
        text = self._held + text
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:  # the one that is complete first, as if the text had come letter by letter
            self.found, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest


class TextStream:
    """One row's ids as printable text, up to a stop string. `stopped` says that one was met."""

    def __init__(self, text: Text, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(text.decode)
        self._stops = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def push(self, token: int) -> str:
        return self._stops.push(self._detokenizer.push(token))

    def finish(self) -> str:
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()
