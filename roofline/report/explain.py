"""A derivation as text: sections from the config's integers to the answer, a line for each number.

`quantity  value  = formula by name = formula in numbers  [kind: source]`. What has no brackets follows from the lines
before it. Long sources are numbered and told at the end.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from qwenjax.tables import Table
from roofline.explain import LEAF_KINDS, Node
from roofline.report.units import quantity, whole

_SECTIONS: Final = {
    "request": "What is asked",
    "model": "The model, in letters",
    "chip": "The chip",
    "weights": "Weights read by each op, on one device",
    "step": "The step, at least",
    "prefill": "The prefill, at least",
    "decode": "A decode step, at least",
    "bound": "The request, at least",
    "kernel": "Constants of the chip's kernels",
    "profile": "Constants of the engine",
    "engine.prefill": "The prefill as the engine runs it",
    "engine.decode": "Decode steps as the engine runs them",
    "answer": "The answer",
}
_ASKED: Final = ("B", "prompt", "output", "steps", "tp", "ep")
_ANSWER: Final = re.compile(r"(ttft|tpot|decode|e2e|low|high)_s|interval\..*|.*tokens_per_s.*")
_NAME: Final = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*(?![\w.(])")
_LONGEST_FORMULA: Final = 60  # characters; of one that is told by name alone a half more
_MOST_TERMS: Final = 5
_LONGEST_SOURCE: Final = 72


class _Place(NamedTuple):
    section: str
    group: str
    label: str


def explanation_text(nodes: Sequence[Node]) -> Iterator[str]:
    """The lines of a derivation, section by section."""
    by_name = {node.name: node for node in nodes}
    chosen = _chosen(nodes)
    sources: dict[str, int] = {}
    yield ""
    yield "How this comes about: numbers in brackets come from outside, the others from the lines before them."
    for section, title in _SECTIONS.items():
        lines = [(_place(node.name), node) for node in nodes if _place(node.name).section == section]
        lines = [(place, node) for place, node in lines if _is_told(node, chosen)]
        if lines:
            yield f"\n{title}"
            yield from _section(lines, by_name, sources)
    if len(chosen) > 3:
        yield "\nDecode steps are timed at more contexts than shown; --json has every one."
    yield "\nSources"
    for source, number in sources.items():
        yield f"  {number}  {source}"


def _chosen(nodes: Sequence[Node]) -> dict[str, bool]:
    """Kinds of decode steps by whether they are shown: the first, the middle and the last."""
    kinds = list(dict.fromkeys(node.name.split(".")[1] for node in nodes if node.name.startswith("engine.decode_")))
    steps = [kind for kind in kinds if kind != "decode_s"]
    shown = {0, len(steps) // 2, len(steps) - 1}
    return {kind: index in shown for index, kind in enumerate(steps)}


def _is_told(node: Node, chosen: Mapping[str, bool]) -> bool:
    if node.name.endswith(".floor_s"):  # its number stands in the line that takes the greater
        return False
    parts = node.name.split(".")
    return len(parts) < 2 or parts[0] != "engine" or chosen.get(parts[1], True)


def _place(name: str) -> _Place:
    """Where a node is told: section, group of lines and label."""
    first, *rest = name.split(".")
    if first == "engine" and rest[0].startswith("bits"):
        return _Place("model", "", name)
    if first == "engine":
        phase, _, number = rest[0].partition("_")
        if number in ("", "s"):
            group, label = (rest[1], ".".join(rest[2:])) if len(rest) > 2 else ("", ".".join(rest[1:]) or rest[0])
        else:
            group, label = f"steps of kind {number}", ".".join(rest[1:])
        return _Place(f"engine.{phase}", group, label)
    if _ANSWER.fullmatch(name):
        return _Place("answer", "", name)
    if name in _ASKED:
        return _Place("request", "", name)
    if first in ("bandwidth", "rate", "chip"):
        return _Place("chip", "", ".".join(rest) or first)
    if first.startswith("decode_"):
        return _Place("decode", f"{first.removeprefix('decode_')} step", ".".join(rest))
    if first in ("step", "prefill") and rest[0] in ("pairs", "rows"):
        return _Place(first, "attention", rest[0])
    if first not in _SECTIONS:
        return _Place("model", "", name)
    return _Place(first, *((rest[0], ".".join(rest[1:])) if len(rest) > 1 else ("", ".".join(rest))))


def _section(
    lines: Sequence[tuple[_Place, Node]], by_name: Mapping[str, Node], sources: dict[str, int]
) -> Iterator[str]:
    labels = max(len(place.label) for place, _ in lines)
    wide = max(len(value_text(node)) for _, node in lines)
    for group, members in _groups(lines):
        if group:
            yield f"  {group}"
        for place, node in members:
            indent = "    " if group else "  "
            told = " ".join(part for part in (_formula(node, by_name), _bracket(node, sources)) if part)
            yield f"{indent}{place.label:<{labels}}  {value_text(node):>{wide}}  {told}".rstrip()


def _groups(lines: Sequence[tuple[_Place, Node]]) -> list[tuple[str, list[tuple[_Place, Node]]]]:
    """Lines by group, a group where its last line stands; lines without a group stay where they are."""
    groups: dict[str | int, list[tuple[_Place, Node]]] = {}
    for index, (place, node) in enumerate(lines):
        key = place.group or index
        groups[key] = [*groups.pop(key, []), (place, node)]
    return [(key if isinstance(key, str) else "", members) for key, members in groups.items()]


def value_text(node: Node) -> str:
    """The value with its unit: counts, FLOPs and bytes in full, the rest with a prefix."""
    if node.unit in ("count", "bit", "FLOP", "B"):
        if node.unit == "bit":
            return f"{_scaled(node)} bit"
        return whole(node.value) if node.unit == "count" else f"{whole(node.value)} {node.unit}"
    return _scaled(node)


def _scaled(node: Node) -> str:
    if node.unit == "count":
        return whole(node.value)
    if node.unit in ("1", "bit"):
        return f"{node.value:.6g}"
    if node.unit in ("1/s", "tokens/s"):
        return f"{node.value:,.2f} {node.unit}" if node.value < 1e6 else quantity(node.value, node.unit)
    return quantity(node.value, node.unit)


def _formula(node: Node, by_name: Mapping[str, Node]) -> str:
    """The formula by names and in numbers, as far as either is short; else what the number is."""
    if not node.formula:
        return ""
    place, text = _place(node.name), ast.unparse(ast.parse(node.formula, mode="eval"))
    if text in by_name:
        return f"= {_short(text, place)}"
    names = _signs(_NAME.sub(lambda match: _short(match[0], place) if match[0] in by_name else match[0], text))
    numbers = _signs(_NAME.sub(lambda match: _scaled(by_name[match[0]]) if match[0] in by_name else match[0], text))
    if text.count(" + ") >= _MOST_TERMS:
        return f"= {numbers if len(numbers) <= 2 * _LONGEST_FORMULA else node.source}"
    told = [part for part in (names, numbers) if len(part) <= _LONGEST_FORMULA]
    if not told and len(names) <= 1.5 * _LONGEST_FORMULA:
        told = [names]
    return " ".join(f"= {part}" for part in told) if told else f"= {node.source}"


def _short(name: str, place: _Place) -> str:
    """A name without what the section and the group already say."""
    other = _place(name)
    if other.section != place.section and other.section not in ("chip", "profile", "request", "model"):
        return name
    if other.group in ("", place.group, "attention"):
        return other.label
    return f"{other.group}.{other.label}".replace(" step", "").replace("steps of kind ", "kind_")


def _signs(text: str) -> str:
    return text.replace(" ** ", "^").replace(" * ", " x ")


def _bracket(node: Node, sources: dict[str, int]) -> str:
    """Kind and source of what comes from outside; a long source by its number."""
    if node.kind not in LEAF_KINDS:
        return "[computed]" if node.kind == "computed" else ""
    text, _, where = node.source.partition("; ")
    if not where and len(text) > _LONGEST_SOURCE:
        text, where = "", text
    if not where:
        return f"[{node.kind}: {text}]"
    number = sources.setdefault(where, len(sources) + 1)
    return f"[{node.kind}, source {number}{': ' if text else ''}{text}]"


def explained(text: Callable[[Any], Iterable[str | Table]]) -> Callable[[Any], Iterable[str | Table]]:
    """The text of a record, and after it that of its `explanation`."""
    return lambda record: (*text(record), *explanation_text(record["explanation"]))
