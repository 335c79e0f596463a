"""What an engine reaches of a device's peaks: the constants between the lower bound and a prediction, as data files."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from qwenjax.errors import InputError
from roofline.hardware import Hardware, known_ids, load_hardware
from roofline.timing.engine import CONSTANTS, REWRITES, Engine
from roofline.timing.scheduling import Scheduler

KINDS = ("single", "batched", "prefill")
_REWRITE_APART = 10.0  # minor versions that a rewrite counts for
_MINORS_A_YEAR = 5  # releases of vLLM: 0.2 in late 2023, 0.6 in late 2024, 0.12 in late 2025
_FAR_VERSIONS = 3.0  # minor versions; a profile of versions farther away is only the nearest
_BUILDS_A_YEAR = 2300  # of llama.cpp, which numbers its builds since early 2023: b1500, b4500 (January 2025)
_NEAR = 2.0  # minor versions; a profile so much farther away than the nearest counts 1/e of it
_LEAST_SHARE = 0.01  # of the nearest's, of profiles that tell something of a GPU or version that none was fitted on
FEW_ROWS = 8  # a profile of fewer is taken on another GPU only where none of more is nearly as near


@dataclass(frozen=True)
class Profile:
    """Constants of one engine, a range of its versions and a family of GPUs, and where they come from."""

    name: str
    source: str
    validation: str
    engine: str = ""
    versions: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    schemes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by kind of figure: factors on time
    elsewhere: tuple[float, float] = (0.7, 1.6)  # the same on GPUs and versions that it wasn't fitted on
    scheduler: Scheduler = field(default_factory=Scheduler)
    scheduler_source: str = ""
    sources: Mapping[str, int] = field(default_factory=dict)  # rows by repository or page
    num_rows: int = FEW_ROWS  # measurements that it was fitted on

    @property
    def summary(self) -> dict[str, str]:
        """What is shown of it beside figures."""
        return {"name": self.name, "source": self.source, "validation": self.validation}

    @property
    def engine_constants(self) -> Engine:
        return Engine(self.constants, self.schemes)


BOUND = Profile(
    name="bound",
    source="datasheet peaks; every op takes the longer of its compute and its memory time, nothing else",
    validation="none needed: a lower bound in time, which no run beats; real engines are slower",
)


@dataclass(frozen=True)
class Choice:
    """A profile for an engine on a GPU, and whether it was fitted there or is the nearest by architecture."""

    profile: Profile
    nearest: bool
    reason: str
    shares: Mapping[str, float] = field(default_factory=dict)  # of profiles by name, whose mean stands in for one

    def interval(self, kind: str) -> tuple[float, float]:
        """Factors on the expected time between which 4 of 5 unseen figures of this kind fall."""
        own = self.profile.intervals.get(kind, self.profile.elsewhere)
        if not self.nearest:
            return own
        wide = self.profile.elsewhere
        return min(own[0], wide[0]), max(own[1], wide[1])

    @property
    def provenance(self) -> str:
        near = f"the nearest: {self.reason}" if self.nearest else ""
        return ", ".join(filter(None, (f"profile {self.profile.name}", near, self.averaged)))

    @property
    def averaged(self) -> str:
        """That other profiles count too, in words; empty where they don't."""
        others = len(self.shares.keys() - {self.profile.name})
        return f"averaged with {others} of its engine by nearness of GPU and version" if others else ""

    def of(self, profiles: Mapping[str, Profile]) -> Choice:
        """The same with its constants from these profiles: the mean by shares where none was fitted there."""
        own = profiles[self.profile.name]
        if not self.shares:
            return replace(self, profile=own)
        parts = [(share, profiles[name]) for name, share in self.shares.items()]
        names = dict.fromkeys(scheme for _, part in parts for scheme in part.schemes)
        schemes = {name: _mean([(share, part.schemes.get(name, {})) for share, part in parts]) for name in names}
        constants = _mean([(share, part.constants) for share, part in parts])
        return replace(self, profile=replace(own, constants=constants, schemes=schemes))


def _mean(parts: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """The mean of each constant over those that have it, by share."""
    names = dict.fromkeys(name for _, values in parts for name in values)
    return {
        name: sum(share * values[name] for share, values in parts if name in values)
        / sum(share for share, values in parts if name in values)
        for name in names
    }


@cache
def known_profiles() -> tuple[Profile, ...]:
    """Every profile that comes with the package, by name."""
    return tuple(parse_profile(text) for text in _texts())


@cache
def _texts() -> tuple[str, ...]:
    folder = resources.files("roofline") / "data" / "profiles"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".toml")) if folder.is_dir() else []
    return tuple((folder / name).read_text(encoding="utf-8") for name in names)


@cache
def _heads() -> tuple[Profile, ...]:
    """What every profile is chosen by; the rest, most of its text, stands after the number of rows and isn't parsed."""
    return tuple(_head(tomllib.loads(text.partition("\n[rows.by_source]")[0])) for text in _texts())


@cache
def _whole(name: str) -> Profile:
    place = next(place for place, head in enumerate(_heads()) if head.name == name)
    return parse_profile(_texts()[place])


def _head(data: Mapping[str, Any]) -> Profile:
    return Profile(
        data["name"],
        data["source"],
        data["validation"],
        data["engine"],
        tuple(data["versions"]),
        tuple(data["hardware"]),
        num_rows=sum(data["rows"][grade] for grade in ("grade_a", "grade_b")),
    )


def parse_profile(text: str) -> Profile:
    """A profile from its TOML text; raises InputError for a constant that is unknown or out of its bounds."""
    data: dict[str, Any] = tomllib.loads(text)
    constants = {name: _checked(name, entry["value"]) for name, entry in data["constants"].items()}
    schemes = {
        scheme: {kind: _checked(f"scheme_{kind}", entry["value"]) for kind, entry in kinds.items()}
        for scheme, kinds in data.get("schemes", {}).items()
    }
    intervals = {kind: (float(pair[0]), float(pair[1])) for kind, pair in data["intervals"].items()}
    elsewhere = intervals.pop("elsewhere")
    scheduler = dict(data["scheduler"])
    return replace(
        _head(data),
        constants=constants,
        schemes=schemes,
        intervals=intervals,
        elsewhere=elsewhere,
        scheduler_source=scheduler.pop("source", ""),
        scheduler=Scheduler(**scheduler),
        sources=data["rows"].get("by_source", {}),
    )


def _checked(name: str, value: object) -> float:
    if name not in CONSTANTS:
        raise InputError(name, value, "is not a constant of an engine", f"Known: {', '.join(CONSTANTS)}.")
    bounds = CONSTANTS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not bounds.low <= value <= bounds.high:
        problem = f"must be from {bounds.low:g} to {bounds.high:g} {bounds.unit}"
        raise InputError(name, value, problem, "Outside, a prediction could be above the roof, or the unit is another.")
    return float(value)


def load_profile(name: str) -> Profile:
    """The profile of this name; no engine's name stands for one, see `find_profile`."""
    text = name.strip().lower()
    if text == BOUND.name:
        return BOUND
    names = [profile.name for profile in _heads()]
    if text not in names:
        known = ", ".join((BOUND.name, *names))
        raise InputError("profile", name, "is not a profile that is known here", f"Known: {known}.")
    return _whole(text)


def find_profile(name: str, hardware: Hardware | str | None = None) -> Choice:
    """The profile of this name, or an engine's best one for a GPU: `vllm`, or `vllm==0.6.3` for a version's."""
    text = name.strip().lower()
    if text == BOUND.name:
        return Choice(BOUND, False, "")
    named = next((profile for profile in _heads() if profile.name == text), None)
    chip = hardware.id if isinstance(hardware, Hardware) else hardware
    if named is not None:
        fits = chip is None or chip in named.hardware or named.engine == "any"
        return Choice(
            _whole(text), not fits, "" if fits else f"it was fitted on {', '.join(named.hardware)}, not on {chip}"
        )
    engine, _, version = text.partition("==")
    engines = tuple(dict.fromkeys(profile.engine for profile in _heads()))
    if engine not in engines:
        known = ", ".join(("bound", *engines, *(profile.name for profile in _heads())))
        raise InputError("profile", name, "is not a profile or engine that is known here", f"Known: {known}.")
    choice = choose_profile(_heads(), engine, hardware or "", version)
    return choice.of({name: _whole(name) for name in (choice.profile.name, *choice.shares)})


def choose_profile(profiles: Sequence[Profile], engine: str, hardware: Hardware | str, version: str = "") -> Choice:
    """The profile of an engine that is nearest in GPU architecture, then in version; any engine's where it has none.

    Where none was fitted on the GPU and version, its constants are the mean of the engine's profiles, each of which
    counts the less the farther it is. What a profile has from its own rows alone carries over less that way.
    """
    if not profiles:
        raise InputError("profile", engine, "can't be chosen, no profiles are there", "Fit them with bench/fit.py.")
    chip = _chip(hardware)
    own = [profile for profile in profiles if profile.engine == engine]
    candidates = own or [profile for profile in profiles if profile.engine == "any"] or list(profiles)

    def far(profile: Profile) -> float:
        newest = -0.01 * max((_age(text) for text in profile.versions), default=0)
        apart = _versions_apart(profile, version) if version else newest
        return 10 * _apart(chip, profile) + apart

    distances = {profile.name: far(profile) for profile in candidates}
    few = {p.name: 8.0 if p.num_rows < FEW_ROWS and distances[p.name] > 0 else 0.0 for p in candidates}
    best = min(candidates, key=lambda p: (distances[p.name] + few[p.name], version not in p.versions, p.name))
    where = chip.id if chip else str(hardware)
    reasons = []
    if not own:
        reasons.append(f"no profile of {engine} is known")
    if where and best.hardware and where not in best.hardware:
        reasons.append(f"nothing was fitted on {where}; by architecture {', '.join(best.hardware)} is nearest")
    if version and own and _versions_apart(best, version) > _FAR_VERSIONS:
        reasons.append(f"version {version} is far from {', '.join(best.versions)}")
    shares = _shares(distances) if own and chip and (version or chip.id not in best.hardware) else {}
    return Choice(best, bool(reasons), "; ".join(reasons), shares).of({part.name: part for part in candidates})


def _shares(distances: Mapping[str, float]) -> dict[str, float]:
    """How much each profile counts by its distance; none where one was fitted just there."""
    least = min(distances.values())
    shares = {name: math.exp((least - far) / _NEAR) for name, far in distances.items()}
    counted = {name: share for name, share in shares.items() if share > _LEAST_SHARE}
    return counted if least > 0 and len(counted) > 1 else {}


def _versions_apart(profile: Profile, version: str) -> float:
    """From a version to the nearest of a profile's; just near enough where its rows don't state theirs."""
    rewrites = [_age(text) for text in REWRITES.get(profile.engine, ())]

    def apart(one: float, other: float) -> float:
        between = sum((one < rewrite) != (other < rewrite) for rewrite in rewrites)
        return abs(one - other) + _REWRITE_APART * between

    return min((apart(_age(version), _age(text)) for text in profile.versions), default=_FAR_VERSIONS)


def _chip(hardware: Hardware | str) -> Hardware | None:
    if isinstance(hardware, Hardware):
        return hardware
    return load_hardware(hardware) if hardware in known_ids() else None


def _apart(chip: Hardware | None, profile: Profile) -> float:
    """0 on the same chip, a third for the same compute capability, then by kind of memory and architecture."""
    if chip is None:
        return 0.0
    if chip.id in profile.hardware:
        return 0.0
    fitted = [load_hardware(name) for name in profile.hardware if name in known_ids()]
    if not fitted:
        return 3.0
    return min(_between(chip, other) for other in fitted)


def _between(chip: Hardware, other: Hardware) -> float:
    wide = abs(math.log(chip.peak_bandwidth_bytes_per_s / other.peak_bandwidth_bytes_per_s)) / 10
    if chip.compute_capability and chip.compute_capability == other.compute_capability:
        return 0.3 + wide
    if chip.vendor != other.vendor:
        return 2.5 + wide
    # Cards with GDDR have the same kind of cores for their kernels to run on, and those with HBM another.
    board = 0.4 if chip.memory_type[:4] == other.memory_type[:4] else 0.8
    return board + (0.1 if chip.architecture == other.architecture else 0.2) + wide


def _age(version: str) -> float:
    """A version as a number that grows with time: a year counts for a few minor versions."""
    build = re.fullmatch(r"b(\d+)", version.strip().lower())
    if build:
        return (int(build.group(1)) / _BUILDS_A_YEAR) * _MINORS_A_YEAR + 2
    numbers = [int(part) for part in re.findall(r"\d+", version)]
    if not numbers:
        return 10.0
    if numbers[0] >= 2000:  # a year instead of a version
        return float(max(0, numbers[0] - 2023) * _MINORS_A_YEAR + 2)
    minor = numbers[1] if len(numbers) > 1 else 0
    return float(numbers[0] * 20 + minor)
