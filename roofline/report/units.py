"""Numbers as strings, each with its unit: SI prefixes are powers of 1000 (GB = 1e9), GiB is 2**30 bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL_PREFIXES = ((1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))
NOTHING = "-"  # a figure that isn't defined


def quantity(value: float | None, unit: str) -> str:
    """A number with the SI prefix that leaves it between 1 and 1000: 15.23 GB, 14.09 ms."""
    if not value:
        return NOTHING if value is None else f"0 {unit}"
    factor, prefix = _prefix(value, unit)
    return f"{_digits(value / factor)} {prefix}{unit}"


def column(values: Iterable[float | None], unit: str) -> tuple[str, Callable[[float | None], str]]:
    """One unit for a whole column, and the function that writes a value in it; the greatest has up to five digits."""
    greatest = max((abs(value) for value in values if value is not None), default=0)
    factor, prefix = _prefix(greatest / 10, unit)

    def write(value: float | None) -> str:
        if not value:
            return NOTHING if value is None else "0"
        return f"{value / factor:,.2f}"

    return f"{prefix}{unit}", write


def milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1000 * seconds:,.3f}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


def whole(value: float | None) -> str:
    """A count with thousands separated; an expected number that isn't whole keeps two decimals."""
    if value is None:
        return NOTHING
    return f"{int(value):,}" if value == int(value) else f"{value:,.2f}"


def short_count(value: float) -> str:
    """A count of parameters as model names have it: 7.62 B, 494.0 M."""
    for factor, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{_digits(value / factor)} {letter}"
    return whole(value)


def percent(fraction: float | None) -> str:
    return NOTHING if fraction is None else f"{100 * fraction:.1f} %"


def rate(value: float | None, unit: str = "tokens/s") -> str:
    return NOTHING if value is None else f"{value:,.1f} {unit}"


def decimal(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _prefix(value: float, unit: str) -> tuple[float, str]:
    prefixes = _SMALL_PREFIXES if unit == "s" else _PREFIXES
    return next((pair for pair in prefixes if abs(value) >= pair[0]), prefixes[-1])


def _digits(value: float) -> str:
    """Four significant digits of a number below 1000."""
    decimals = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    return f"{value:,.{decimals}f}"
