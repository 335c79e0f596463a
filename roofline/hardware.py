"""Chips and links as data: SI numbers, each with its source, in one TOML file per chip.

A number is kept once, in its `Figure`; the properties of `Hardware` only read it. Peaks are dense rates with float32
(int32 for int8) accumulation: tables printed "with sparsity", and GeForce's float16 accumulation, are twice that.
One file form is read, checked and written here, because each of the three must know every field.
"""

from __future__ import annotations

import copy
import datetime
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from qwenjax.calibration import calibration_path as calibration_path
from qwenjax.errors import InputError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

KINDS: Final = ("datasheet", "measured elsewhere", "measured here", "reported elsewhere", "derived")
_FLOAT8: Final = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
DTYPES: Final = ("bfloat16", "float16", "float32", "float64", *_FLOAT8, "float4_e2m1fn", "int8")
_REQUIRED: Final = ("peak_bandwidth_bytes_per_s", "memory_bytes")
_FIGURE_FORM: Final = '{ value = 1008e9, unit = "B/s", kind = "datasheet", source = "document, page" }'
_PEER_LINKS: Final = ("nvlink", "infinity_fabric", "pcie")  # fastest first; a CPU-GPU link is not a way to a peer


class _Rule(NamedTuple):
    """What a figure of this name must look like, and what a value that is too small most likely is."""

    unit: str
    low: float
    high: float
    mistake: str
    remedy: str

    @property
    def whole(self) -> bool:
        return self.unit in ("B", "count")


_SPEED: Final = _Rule("B/s", 1e9, 1e15, "looks like GB/s", "Give bytes per second, for instance 1008e9")
_RATE: Final = _Rule("FLOP/s", 1e9, 1e18, "looks like TFLOP/s", "Give operations per second, for instance 165.2e12")
_MEMORY: Final = _Rule("B", 2**27, 2**50, "looks like GB or GiB", "Give bytes, for instance 25769803776 (24 GiB)")
_CACHE: Final = _Rule("B", 2**16, 2**36, "looks like KiB or MiB", "Give bytes, for instance 75497472 (72 MiB)")
_SHARED: Final = _Rule("B", 2**12, 2**24, "looks like KiB", "Give bytes, for instance 102400 (100 KiB)")
_CLOCK: Final = _Rule("Hz", 1e8, 1e11, "looks like MHz or GHz", "Give hertz, for instance 2.52e9")
_COUNT: Final = _Rule("count", 1, 1e6, "is less than one", "Give a whole number, for instance 128")
_RULES: Final[dict[str, _Rule]] = {
    "peak_bandwidth_bytes_per_s": _SPEED,
    "measured_bandwidth_bytes_per_s": _SPEED,
    "peak_tensorfloat32_flops_per_s": _RATE,
    **{f"peak_flops_per_s.{dtype}": _RATE for dtype in DTYPES},
    "memory_bytes": _MEMORY,
    "reported_memory_bytes": _MEMORY,
    "sm_count": _COUNT,
    "fp32_lanes_per_sm": _COUNT,
    "max_threads_per_sm": _COUNT,
    "boost_clock_hz": _CLOCK,
    "tensor_clock_hz": _CLOCK,
    "l2_bytes": _CACHE,
    "shared_memory_per_sm_bytes": _SHARED,
    "shared_memory_per_block_bytes": _SHARED,
    "tdp_watts": _Rule("W", 1, 1e5, "looks like kW", "Give watts, for instance 450"),
}


@dataclass(frozen=True)
class Figure:
    """One number in SI and where it comes from: kind one of KINDS, sparsity "dense" for peaks, clock boost or base."""

    value: float
    unit: str
    kind: str
    source: str
    date: str = ""
    note: str = ""
    sparsity: str = ""
    clock: str = ""


@dataclass(frozen=True)
class Link:
    """A connection of the chip; `figure` is its bandwidth in one direction, vendors often print the sum of both."""

    name: str
    generation: str
    figure: Figure
    lanes: int | None = None

    @property
    def one_way_bytes_per_s(self) -> float:
        return float(self.figure.value)


@dataclass(frozen=True)
class Hardware:
    """One chip: `figures` has every number by dotted name, links too; `measured` what calibration adds, verbatim."""

    id: str
    name: str
    vendor: str
    architecture: str
    figures: Mapping[str, Figure]
    links: tuple[Link, ...] = ()
    compute_capability: str = ""
    memory_type: str = ""
    launch_year: int | None = None
    notes: tuple[str, ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {name: figure for name, figure in self.figures.items() if not name.startswith("links.")}
        linked = {f"links.{link.name}.one_way_bytes_per_s": link.figure for link in self.links}
        object.__setattr__(self, "figures", MappingProxyType(own | linked))
        object.__setattr__(self, "links", tuple(self.links))
        object.__setattr__(self, "notes", tuple(self.notes))
        object.__setattr__(self, "measured", MappingProxyType(copy.deepcopy(dict(self.measured))))
        _check(self)

    def __hash__(self) -> int:
        return hash((self.id, self.name, tuple(sorted((name, figure.value) for name, figure in self.figures.items()))))

    def number(self, name: str) -> float | None:
        """The figure of this dotted name in its SI unit, None where it isn't known: `number("max_threads_per_sm")`."""
        figure = self.figures.get(name)
        return None if figure is None else float(figure.value)

    def _whole(self, name: str) -> int | None:
        number = self.number(name)
        return None if number is None else int(number)

    @property
    def peak_bandwidth_bytes_per_s(self) -> float:
        return float(self.figures["peak_bandwidth_bytes_per_s"].value)

    @property
    def measured_bandwidth_bytes_per_s(self) -> float | None:
        return self.number("measured_bandwidth_bytes_per_s")

    @cached_property
    def peak_flops_per_s(self) -> Mapping[str, float]:
        """Dense peaks by JAX dtype name; float32 is that of the ordinary cores, without TF32 (see the next)."""
        prefix = "peak_flops_per_s."
        named = ((name, float(f.value)) for name, f in self.figures.items() if name.startswith(prefix))
        return MappingProxyType({name.removeprefix(prefix): value for name, value in named})

    @property
    def peak_tensorfloat32_flops_per_s(self) -> float | None:
        """The rate for float32 operands rounded to TF32, which JAX's default precision allows on a GPU."""
        return self.number("peak_tensorfloat32_flops_per_s")

    @property
    def memory_bytes(self) -> int:
        return int(self.figures["memory_bytes"].value)

    @property
    def reported_memory_bytes(self) -> int | None:
        return self._whole("reported_memory_bytes")

    @property
    def sm_count(self) -> int | None:
        return self._whole("sm_count")

    @property
    def boost_clock_hz(self) -> float | None:
        return self.number("boost_clock_hz")

    @property
    def l2_bytes(self) -> int | None:
        return self._whole("l2_bytes")

    @property
    def peer_link(self) -> Link | None:
        """The fastest link to another such chip: NVLink or Infinity Fabric where there is one, else PCIe."""
        by_name = {link.name: link for link in self.links}
        return next((by_name[name] for name in _PEER_LINKS if name in by_name), None)

    @property
    def usable_memory_bytes(self) -> int:
        """Bytes a program sees: as the device reports where that is known, else nominal (up to 9 % more)."""
        return self.reported_memory_bytes or self.memory_bytes

    @property
    def usable_memory_source(self) -> str:
        reported = self.figures.get("reported_memory_bytes")
        if reported is None:
            return f"nominal capacity, the device's own report is not known ({self.figures['memory_bytes'].source})"
        return f"as the device reports it ({reported.source})"

    def flops_per_s(self, dtype: str) -> float:
        """Peak FLOP/s for operands of this JAX dtype, dense; no dtype stands in for another."""
        if dtype not in self.peak_flops_per_s:
            known = ", ".join(self.peak_flops_per_s)
            raise InputError("dtype", dtype, f"no peak rate is known on {self.id}", f"Use one of {known}")
        return self.peak_flops_per_s[dtype]

    def ridge_intensity(self, dtype: str) -> float:
        """FLOP/byte above which compute limits rather than memory: peak rate over peak bandwidth."""
        return self.flops_per_s(dtype) / self.peak_bandwidth_bytes_per_s


# Checks: one message with field, value and remedy. They run on construction, so no path around them exists.


def _check(hardware: Hardware) -> None:
    for name in ("id", "name", "vendor", "architecture"):
        if not getattr(hardware, name):
            raise InputError(name, None, "is missing or empty", f'Give the chip a text, {name} = "..."')
    for name in _REQUIRED:
        if name not in hardware.figures:
            raise InputError(name, None, "is missing", f"Add it under [figures]. {_RULES[name].remedy}")
    for name, figure in hardware.figures.items():
        _check_figure(name, figure, _rule(name))
    if not hardware.peak_flops_per_s:
        remedy = "Add a dense peak under [figures], for instance peak_flops_per_s.bfloat16"
        raise InputError("peak_flops_per_s", None, "is missing", remedy)
    reported = hardware.reported_memory_bytes
    if reported is not None and reported > hardware.memory_bytes:
        remedy = f"Check memory_bytes = {hardware.memory_bytes}: a card's GB is 2**30 bytes, 24 GB are 25769803776"
        raise InputError("reported_memory_bytes", reported, "is more than the nominal capacity", remedy)


def _rule(name: str) -> _Rule:
    if name.startswith("links."):
        return _SPEED
    if name in _RULES:
        return _RULES[name]
    if name.startswith("peak_flops_per_s."):
        raise InputError(name, None, "is not a JAX dtype name", f"Use one of {', '.join(DTYPES)}")
    near = difflib.get_close_matches(name, _RULES, n=1) or sorted(_RULES)
    raise InputError(name, None, "is not a known figure", f"Known: {', '.join(near)}")


def _check_figure(name: str, figure: Figure, rule: _Rule) -> None:
    units = ("FLOP/s", "OP/s") if rule is _RATE else (rule.unit,)
    if figure.unit not in units:
        raise InputError(f"{name}.unit", figure.unit, f"must be {' or '.join(units)}", rule.remedy)
    value: object = figure.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(name, value, "must be a number", rule.remedy)
    if not 0 < value < math.inf:
        raise InputError(name, value, "must be finite and greater than zero", rule.remedy)
    # A slip of units is a person's; a rate that was measured here may be as low as it is.
    if value < rule.low and not (rule is _RATE and figure.kind == "measured here"):
        raise InputError(name, value, rule.mistake, rule.remedy)
    if value > rule.high:
        raise InputError(name, value, f"is more than {rule.high:g} {figure.unit}, beyond any chip", rule.remedy)
    if rule.whole and value != int(value):
        raise InputError(name, value, "must be a whole number", rule.remedy)
    if figure.kind not in KINDS:
        raise InputError(f"{name}.kind", figure.kind, "is not a kind of figure", f"Use one of {', '.join(KINDS)}")
    if not figure.source.strip():
        raise InputError(f"{name}.source", figure.source, "must not be empty", "Name the document and where in it")
    if figure.clock not in ("", "boost", "base"):
        raise InputError(f"{name}.clock", figure.clock, "must be boost or base", "Leave it out where no clock is meant")
    if rule is _RATE:
        _check_dense(name, figure)


def _check_dense(name: str, figure: Figure) -> None:
    if figure.sparsity == "dense" or (not figure.sparsity and figure.kind.startswith("measured")):
        return
    if figure.sparsity == "sparse":
        remedy = f"Give the dense rate, which vendors print as half of it: {figure.value / 2:g}"
        raise InputError(f"{name}.sparsity", "sparse", "structured sparsity is no peak of dense work", remedy)
    remedy = 'Look up whether the table is "with sparsity", then write sparsity = "dense" beside the dense rate'
    raise InputError(f"{name}.sparsity", figure.sparsity, "must say dense", remedy)


@cache
def known_ids() -> tuple[str, ...]:
    """The ids of the chips that come with the package, sorted; opens no file."""
    names = (entry.name for entry in _data_folder().iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def list_hardware() -> tuple[Hardware, ...]:
    """Every chip that comes with the package, by id."""
    return tuple(_load_packaged(chip) for chip in known_ids())


def load_hardware(name_or_path: str | os.PathLike[str]) -> Hardware:
    """A chip by id (any letter case), by the path of a TOML file of the same form, or 'here' as last calibrated."""
    text = os.fspath(name_or_path).strip()
    key = text.lower()
    if key == "here":
        path = calibration_path()
        if not path.is_file():
            remedy = "Run `roofline calibrate`, or name a chip (`roofline hardware` lists them)"
            raise InputError("hardware", text, f"this device isn't calibrated, {path} doesn't exist", remedy)
        return _load_file(path)
    if key in known_ids():
        return _load_packaged(key)
    if key.endswith(".toml") or "/" in text or os.sep in text:
        return _load_file(Path(text).expanduser())
    raise _unknown(text)


def _unknown(text: str) -> InputError:
    ids, key = known_ids(), text.lower()
    near = [chip for chip in ids if key and key in chip] or difflib.get_close_matches(key, ids)
    if near:
        remedy = f"Did you mean {', '.join(near)}? `roofline hardware` lists all, or give a TOML file"
    else:
        remedy = f"Known: {', '.join(ids)}; or give a TOML file"
    return InputError("hardware", text, "is not a known chip", remedy)


def _data_folder() -> Traversable:
    from importlib import resources  # about 10 ms, which only those who load a chip need to pay

    return resources.files("roofline") / "data" / "hardware"


@cache
def _load_packaged(chip: str) -> Hardware:
    return _parse(f"{chip}.toml", (_data_folder() / f"{chip}.toml").read_bytes())


def _load_file(path: Path) -> Hardware:
    try:
        content = path.read_bytes()
    except OSError as error:
        remedy = "Give an id (`roofline hardware` lists them) or the path of a TOML file"
        raise InputError("hardware", str(path), f"can't be read: {error.strerror}", remedy) from None
    return _parse(str(path), content)


def _parse(where: str, content: bytes) -> Hardware:
    try:
        data = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # what TOML and UTF-8 errors are, and a number of 5000 digits
        raise InputError(where, None, f"is not valid TOML: {error}", "Correct that place in the file") from None
    try:
        return _from_table(data)
    except InputError as error:
        raise InputError(f"{where}: {error.field}", error.value, error.problem, error.remedy) from None


def _from_table(data: dict[str, Any]) -> Hardware:
    texts = ("id", "name", "vendor", "architecture", "compute_capability", "memory_type")
    _known_keys("", data, (*texts, "launch_year", "notes", "figures", "links", "measured"))
    for name in ("figures", "links", "measured"):
        _typed(name, data.get(name, {}), dict, "a table")
    notes = _typed("notes", data.get("notes", []), list, "a list of texts")
    return Hardware(
        **{name: _typed(name, data.get(name, ""), str, "a text") for name in texts},
        figures=dict(_figures("", data.get("figures", {}))),
        links=tuple(_link(name, table) for name, table in data.get("links", {}).items()),
        launch_year=_typed("launch_year", data["launch_year"], int, "a year") if "launch_year" in data else None,
        notes=tuple(_typed("notes", note, str, "a list of texts") for note in notes),
        measured=data.get("measured", {}),
    )


def _known_keys(prefix: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for key, value in table.items():
        if key not in known:
            raise InputError(f"{prefix}{key}", value, "is not a known field", f"Known: {', '.join(known)}")


def _typed(name: str, value: Any, wanted: type, words: str) -> Any:
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise InputError(name, value, f"must be {words}", "Compare with the chips that come with the package")
    return value


def _link(name: str, table: Any) -> Link:
    where = f"links.{name}"
    _typed(where, table, dict, "a table")
    _known_keys(f"{where}.", table, ("generation", "lanes", "one_way_bytes_per_s"))
    figure = _figure(f"{where}.one_way_bytes_per_s", table.get("one_way_bytes_per_s"))
    generation = _typed(f"{where}.generation", table.get("generation", ""), str, "a text")
    lanes = _typed(f"{where}.lanes", table["lanes"], int, "a whole number") if "lanes" in table else None
    return Link(name, generation, figure, lanes)


def _figures(prefix: str, table: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict) and not value.keys() & Figure.__dataclass_fields__.keys():
            yield from _figures(f"{name}.", value)
        else:
            yield name, _figure(name, value)


def _figure(name: str, table: Any) -> Figure:
    remedy = f"Every figure has value, unit, kind and source: {_FIGURE_FORM}"
    if not isinstance(table, dict):
        raise InputError(name, table, "must be a table", remedy)
    for key in ("value", "unit", "kind", "source"):
        if key not in table:
            raise InputError(f"{name}.{key}", None, "is missing", remedy)
    _known_keys(f"{name}.", table, Figure.__dataclass_fields__)
    for key, value in table.items():
        if key != "value":
            _typed(f"{name}.{key}", value, str, "a text")
    return Figure(**table)


def write_hardware(hardware: Hardware, path: str | os.PathLike[str]) -> None:
    """Write the chip as TOML that `load_hardware` reads back equal; the file appears whole or not at all."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    text = to_toml(hardware)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        problem = f"can't be written: {error.strerror}"
        raise InputError("hardware", str(target), problem, "Choose another file") from None


def to_toml(hardware: Hardware) -> str:
    """The chip as the text of its file: identity, notes, links, figures one a line, then what was measured."""
    lines = []
    for name in ("id", "name", "vendor", "architecture", "compute_capability", "memory_type", "launch_year"):
        value = getattr(hardware, name)
        lines += [f"{name} = {_value(name, value)}"] if value not in ("", None) else []
    if hardware.notes:
        lines += ["notes = [", *(f"  {_value('notes', note)}," for note in hardware.notes), "]"]
    for link in hardware.links:
        lines += ["", f"[links.{_key(link.name)}]", f"generation = {_value('generation', link.generation)}"]
        lines += [f"lanes = {link.lanes}"] if link.lanes is not None else []
        lines += [f"one_way_bytes_per_s = {_value(link.name, link.figure)}"]
    lines += ["", "[figures]"]
    lines += [f"{name} = {_value(name, f)}" for name, f in hardware.figures.items() if not name.startswith("links.")]
    if hardware.measured:
        lines += ["", "[measured]"]
        lines += [f"{_key(key)} = {_value(f'measured.{key}', value)}" for key, value in hardware.measured.items()]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key, key)


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        start, between, end = ("[\n  ", ",\n  ", "\n]") if value and isinstance(value[0], Mapping) else ("[", ", ", "]")
        return start + between.join(_value(name, item) for item in value) + end
    if isinstance(value, Figure):
        value = {key: part for key, part in vars(value).items() if part != ""}
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(name, item)}" for key, item in value.items()) + " }"
    raise InputError(name, value, f"TOML has no {type(value).__name__}", "Convert it to a text, number, list or table")


def _float(value: float) -> str:
    """Digits that read back equal, with an exponent in steps of three: 165.2e12."""
    if not math.isfinite(value):
        return repr(float(value))
    text = Decimal(repr(float(value))).normalize().to_eng_string().replace("E+", "e").replace("E", "e")
    return text if "." in text or "e" in text else f"{text}.0"


def describe_hardware(hardware: Hardware) -> list[dict[str, Any]]:
    """Rows {name, value, unit, kind, source, date, note, sparsity, clock}: every figure, then what follows."""
    ridge = "peak FLOP/s over peak bandwidth"
    follows = {
        f"ridge_intensity.{dtype}": Figure(hardware.ridge_intensity(dtype), "FLOP/B", "derived", ridge)
        for dtype in hardware.peak_flops_per_s
    }
    usable = Figure(hardware.usable_memory_bytes, "B", "derived", hardware.usable_memory_source)
    everything = {**hardware.figures, **follows, "usable_memory_bytes": usable}
    return [{"name": name, **vars(figure)} for name, figure in everything.items()]
