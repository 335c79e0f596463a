"""What rows have in common that are held out together."""

from __future__ import annotations

import re
import zlib
from typing import Final

from roofline.timing.case import Case

FOLDS: Final = 10


def model_name(case: Case) -> str:
    """The architecture's name without its maker, its variant and its quantisation: `llama-3.1-8b`."""
    name = case.model.split("/")[-1].lower().replace("meta-", "").replace(" ", "-")
    size = re.match(r".*?[0-9][0-9._]*b(-a[0-9.]+b)?(?![a-z0-9])", name)
    return size[0] if size else name


def source_name(case: Case) -> str:
    """The repository or page that a row is from."""
    return case.source.split("@")[0].split(" ")[0].split("#")[0]


def setting_fold(case: Case) -> str:
    """One of FOLDS sets of settings, the same each time; all figures of one run lie in one."""
    lengths = (case.concurrency, case.prior_len, case.input_len, case.output_len)
    run = (source_name(case), case.engine_version, case.hardware, case.model, case.weights, case.tp, case.pp, *lengths)
    return str(zlib.crc32(repr(run).encode()) % FOLDS)
