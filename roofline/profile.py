"""What an engine reaches of a device's peaks: the constants between the lower bound and a prediction."""

from __future__ import annotations

from dataclasses import dataclass

from qwenjax.errors import InputError


@dataclass(frozen=True)
class Profile:
    """Constants of one engine on one kind of device, and where they come from."""

    name: str
    source: str
    validation: str


BOUND = Profile(
    name="bound",
    source="datasheet peaks; every op takes the longer of its compute and its memory time, nothing else",
    validation="none needed: a lower bound in time, which no run beats; real engines are slower",
)


def load_profile(name: str) -> Profile:
    """The profile of this name. Only the lower bound is known so far."""
    if name.lower() != BOUND.name:
        raise InputError("profile", name, "is not a profile that is known here", f"Known: {BOUND.name}.")
    return BOUND
