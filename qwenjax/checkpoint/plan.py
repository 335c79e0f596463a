"""Which stored tensor goes where, decided from headers alone; whatever doesn't fit is told in one error."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

from qwenjax.checkpoint import quantised
from qwenjax.checkpoint.layout import HEAD_KEY, PREFIX, Tensor, tensors_of
from qwenjax.checkpoint.shards import BITS, StoredTensor
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError

FLOATS = ("BF16", "F16", "F32")
_LONGEST_LIST = 100  # keys of one kind that are told one by one; the others by their pattern


class Source(NamedTuple):
    """A stored tensor, and the scales of its blocks if it is FP8."""

    key: str
    stored: StoredTensor
    scales: StoredTensor | None = None
    block: tuple[int, int] = (1, 1)


class Plan(NamedTuple):
    """Each tensor of the model with its source, and the head that a tied model stores all the same."""

    steps: tuple[tuple[Tensor, Source], ...]
    tied_head: Source | None = None


class _Names:
    """Stored keys by their bare form, without the prefix that some checkpoints lack."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored
        self.full: dict[str, str] = {}
        self.twice: list[str] = []
        for key in stored:
            bare = _bare(key)
            self.twice += [bare] if bare in self.full else []
            self.full[bare] = key
        self.prefix = PREFIX if not stored or any(key.startswith(PREFIX) for key in stored) else ""

    def find(self, key: str) -> StoredTensor | None:
        full = self.full.get(_bare(key))
        return None if full is None else self.stored[full]

    def shown(self, key: str) -> str:
        """The key as this checkpoint spells it, or would."""
        bare = _bare(key)
        return self.full.get(bare) or (key if key == HEAD_KEY else self.prefix + bare)


def _bare(key: str) -> str:
    return key if key == PREFIX + HEAD_KEY else key.removeprefix(PREFIX)


def plan_loading(
    folder: Path, config: ModelConfig, stored: Mapping[str, StoredTensor], *, lm_head: bool = True
) -> Plan:
    """Matches the tensors of the model to the stored ones: every one of both exactly once, or one error lists all.

    Without lm_head an untied output head isn't asked for, and left where it is if there is one.
    """
    names = _Names(stored)
    tensors = list(tensors_of(config, {PREFIX + bare for bare in names.full}))
    quantised.check_stored(folder, stored, {_bare(t.key): t.stored_shape for t in tensors if len(t.stored_shape) == 2})
    faults = _Faults()
    for bare in names.twice:
        faults.add("stored twice", bare, f"with and without {PREFIX}")
    steps: list[tuple[Tensor, Source]] = []
    used: set[str] = set()
    if not lm_head:
        used |= {HEAD_KEY, HEAD_KEY + quantised.SCALE_SUFFIX}
    for tensor in (tensor for tensor in tensors if lm_head or tensor.key != HEAD_KEY):
        source = _match(names, config, tensor, faults)
        used.add(_bare(tensor.key))
        if _is_fp8(names, tensor):
            used.add(_bare(tensor.key) + quantised.SCALE_SUFFIX)
        steps += [(tensor, source)] if source else []
    head = _tied_head(names, config, faults)
    used |= {HEAD_KEY} if config.tie_word_embeddings else set()
    for bare in names.full.keys() - used:
        kept = names.stored[names.full[bare]]
        faults.add("unexpected", names.full[bare], f"{kept.dtype} {list(kept.shape)}")
    if faults.lines:
        problem = f"the tensors don't fit config.json ({faults.counts()}):\n{faults.text()}"
        raise InputError(str(folder), None, problem, _hint(config, names, faults))
    return Plan(tuple(steps), head)


class _Faults:
    """What doesn't fit, by kind: keys and what is wrong with them."""

    def __init__(self) -> None:
        self.lines: dict[str, list[tuple[str, str]]] = {}

    def add(self, kind: str, key: str, text: str) -> None:
        self.lines.setdefault(kind, []).append((key, text))

    def keys(self, *kinds: str) -> list[str]:
        return [key for kind in kinds for key, _ in self.lines.get(kind, [])]

    def counts(self) -> str:
        return ", ".join(f"{len(lines)} {kind}" for kind, lines in self.lines.items())

    def text(self) -> str:
        return "\n".join(f"  {line}" for kind, lines in self.lines.items() for line in _told(kind, lines))


def _told(kind: str, lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    ordered = sorted(lines, key=lambda line: _by_number(line[0]))
    for key, text in ordered[:_LONGEST_LIST]:
        yield f"{kind}: {key}: {text}"
    patterns = Counter(re.sub(r"\d+", "*", key) for key, _ in ordered[_LONGEST_LIST:])
    for pattern, count in patterns.items():
        yield f"{kind}: {count} more like {pattern}"


def _by_number(key: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10; every other part is a number, and more digits are a larger one."""
    parts = re.split(r"(\d+)", key)
    return [(len(part) if i % 2 else 0, part) for i, part in enumerate(parts)]


def _is_fp8(names: _Names, tensor: Tensor) -> bool:
    found = names.find(tensor.key)
    return found is not None and found.dtype == quantised.FP8 and len(found.shape) > 1


def _match(names: _Names, config: ModelConfig, tensor: Tensor, faults: _Faults) -> Source | None:
    """The source of one tensor; None where something was wrong."""
    key, stored = names.shown(tensor.key), names.find(tensor.key)
    if stored is None:
        faults.add("missing", key, f"expected {list(tensor.stored_shape)}")
        return None
    fits = stored.shape == tensor.stored_shape
    if not fits:
        faults.add("misshapen", key, f"is {list(stored.shape)}, expected {list(tensor.stored_shape)}")
    if _is_fp8(names, tensor):
        scales = _match_scales(names, config, tensor, faults)
        return Source(key, stored, scales, quantised.block_of(config)) if fits and scales else None
    if stored.dtype not in FLOATS:
        faults.add("wrong dtype", key, f"is {stored.dtype}, expected {', '.join(FLOATS)}, or {quantised.FP8} matrices")
        return None
    return Source(key, stored) if fits else None


def _match_scales(names: _Names, config: ModelConfig, tensor: Tensor, faults: _Faults) -> StoredTensor | None:
    key = tensor.key + quantised.SCALE_SUFFIX
    block = quantised.block_of(config)
    expected = quantised.scale_shape(tensor.stored_shape, block)
    scales = names.find(key)
    if scales is None:
        text = f"expected {list(expected)}, the scales of {names.shown(tensor.key)}, which is {quantised.FP8}"
        faults.add("missing", names.shown(key), text)
        return None
    if scales.shape != expected:
        text = f"is {list(scales.shape)}, expected {list(expected)} for blocks of {block[0]}x{block[1]}"
        faults.add("misshapen", names.shown(key), text)
    if scales.dtype not in FLOATS:
        faults.add("wrong dtype", names.shown(key), f"is {scales.dtype}, expected {', '.join(FLOATS)}")
    return scales if scales.shape == expected and scales.dtype in FLOATS else None


def _tied_head(names: _Names, config: ModelConfig, faults: _Faults) -> Source | None:
    """The output head that a tied model stores although it is the embedding."""
    if not config.tie_word_embeddings:
        return None
    stored, embedding = names.find(HEAD_KEY), names.find(f"{PREFIX}embed_tokens.weight")
    if stored is None or embedding is None:
        return None
    if stored.dtype not in FLOATS:
        faults.add("wrong dtype", HEAD_KEY, f"is {stored.dtype}, expected {', '.join(FLOATS)}")
    elif stored.shape != embedding.shape:
        text = f"is {list(stored.shape)}, expected {list(embedding.shape)}, a copy of the tied embedding"
        faults.add("misshapen", HEAD_KEY, text)
    else:
        return Source(HEAD_KEY, stored)
    return None


def _hint(config: ModelConfig, names: _Names, faults: _Faults) -> str:
    """What to do about it, from what most likely happened."""
    layers = {match[1] for bare in names.full if (match := re.match(r"layers\.(\d+)\.", bare))}
    if faults.keys("missing") == [HEAD_KEY] and len(faults.lines) == 1:
        silent = any(note.field == "tie_word_embeddings" for note in config.notes)
        says = "doesn't state tie_word_embeddings, which then is" if silent else "says tie_word_embeddings"
        return (
            f"config.json {says} false: write true if the embedding is the head, or add the file that holds it. "
            "An embedding model has none: load(..., lm_head=False) gives what hidden_states needs."
        )
    if layers and len(layers) != config.num_hidden_layers:
        here = f"num_hidden_layers {config.num_hidden_layers}, and the files hold {len(layers)} layers"
        return f"config.json says {here}: use the config.json of these weights."
    if faults.keys("misshapen"):
        return "config.json and the weights are of different models: use the config.json of these weights."
    return "Use the config.json and all files of one checkpoint."


def stored_bytes(source: Source) -> int:
    """Bytes that reading a source takes from the files, scales apart."""
    return prod(source.stored.shape) * BITS[source.stored.dtype] // 8
