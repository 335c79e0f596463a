"""Where `roofline calibrate` keeps what it measured of this machine, and the read bandwidth that it found."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path


def calibration_path() -> Path:
    """Where the calibrated device is kept: here.toml in $ROOFLINE_HOME, else in ~/.cache/roofline."""
    home = os.environ.get("ROOFLINE_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "roofline") / "here.toml"


def calibrated_bandwidth_bytes_per_s() -> float | None:
    """The best read bandwidth of this machine, bytes/s; None where it wasn't calibrated or the file can't be read.

    The whole file is `roofline`'s to check; a rate that is only reported beside another needs this one number.
    """
    try:
        figures = tomllib.loads(calibration_path().read_text(encoding="utf-8"))["figures"]
        value = figures["peak_bandwidth_bytes_per_s"]["value"]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError):
        return None
    return float(value) if isinstance(value, int | float) and value > 0 else None
