"""A prediction set against its row, and the arithmetic of groups of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cases import MemoryCase
from error_groups import Group, group_of
from kernel_cases import KernelCase

from roofline.count import count_params
from roofline.timing.case import Case
from roofline.weight_schemes import scheme_of

Asked = Case | KernelCase | MemoryCase
APART: Final = "H20 rows of the Qwen3 tables"


@dataclass(frozen=True)
class Scored:
    """One row of the file: what was predicted for it, its interval and what was measured, all in the row's unit.

    skipped is the reason why nothing was predicted; provenance says which constants did it.
    """

    id: str
    asked: Asked | None = None
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    skipped: str | None = None
    provenance: str = ""
    reasons: tuple[str, ...] = field(default=())

    @property
    def measured(self) -> float | None:
        return None if self.asked is None else self.asked.measured

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one."""
        return None if self.predicted is None or self.measured is None else self.predicted / self.measured - 1

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured figure lies in the interval; None where there is no interval."""
        if self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high

    @property
    def is_apart(self) -> bool:
        return isinstance(self.asked, Case) and self.asked.h20_qwen3_table


def group(by: str, key: str, rows: Iterable[Scored]) -> Group:
    """The errors of the rows that have a prediction."""
    chosen = [row for row in rows if row.error is not None]
    errors = [row.error for row in chosen if row.error is not None]
    return group_of(by, key, errors, [row.is_inside for row in chosen if row.is_inside is not None])


def groups_of(rows: Sequence[Scored]) -> list[Group]:
    """Every dimension's groups, the H20 rows of the Qwen3 tables as one group of their own and in no other."""
    scored = [row for row in rows if row.error is not None]
    usual = [row for row in scored if not row.is_apart]
    found = []
    for by, key_of in DIMENSIONS.items():
        by_key: dict[str, list[Scored]] = {}
        for row in usual:
            if row.asked is not None and (key := key_of(row.asked)):
                by_key.setdefault(key, []).append(row)
        found += [group(by, key, by_key[key]) for key in sorted(by_key, key=_natural)]
    apart = [row for row in scored if row.is_apart]
    return found + ([group("apart", APART, apart)] if apart else [])


def total_of(rows: Sequence[Scored]) -> Group:
    """All rows with a prediction, the H20 rows of the Qwen3 tables left out."""
    return group("total", "all", [row for row in rows if not row.is_apart])


def _natural(key: str) -> tuple[float, str]:
    """Classes by the number they start with, names by the alphabet."""
    digits = key.split(" ")[0].rstrip("BKk+")
    return (float(digits), key) if digits.replace(".", "").isdigit() else (float("inf"), key)


# What rows are grouped by: a class for each kind of question, empty where the dimension doesn't apply.


def kind_of(asked: Asked) -> str:
    if isinstance(asked, KernelCase):
        return f"kernel: {asked.kind}"
    return "memory" if isinstance(asked, MemoryCase) else "time of a model"


def engine_name(asked: Asked) -> str:
    return asked.framework if isinstance(asked, KernelCase) else asked.engine


def num_params(asked: Case | MemoryCase) -> int:
    return count_params(asked.config).num_params


def _model_size(asked: Asked) -> str:
    if isinstance(asked, KernelCase):
        return ""
    billions = num_params(asked) / 1e9
    classes = ((1, "0B to 1B"), (3, "1B to 3B"), (10, "3B to 10B"), (40, "10B to 40B"))
    dense = next((name for top, name in classes if billions < top), "40B and more")
    return f"{dense}, experts" if asked.config.is_moe else dense


def _batch(asked: Asked) -> str:
    if not isinstance(asked, Case):
        return ""
    if asked.saturated:
        return "saturated"
    classes = ((1, "1"), (8, "2 to 8"), (32, "9 to 32"), (128, "33 to 128"))
    return next((name for top, name in classes if asked.concurrency <= top), "129 and more")


def _context(asked: Asked) -> str:
    if not isinstance(asked, Case):
        return ""
    tokens = asked.prior_len + asked.input_len + asked.output_len
    classes = ((512, "0 to 512"), (2048, "513 to 2048"), (8192, "2049 to 8192"), (32768, "8193 to 32768"))
    return next((name for top, name in classes if tokens <= top), "32769 and more")


def is_quantized(asked: Asked) -> bool:
    """Whether the linear layers' weights are narrower than 16 bits."""
    scheme = scheme_of(asked.weights)
    return scheme.gguf not in ("", "F16") or scheme.linear.bits < 16


def _weights(asked: Asked) -> str:
    return "quantised" if is_quantized(asked) else "16 bits"


def _gpus(asked: Asked) -> str:
    if isinstance(asked, KernelCase):
        return ""
    return f"tp {asked.tp}" + (f" pp {asked.pp}" if asked.pp > 1 else "")


DIMENSIONS: Final[dict[str, Callable[[Asked], str]]] = {
    "kind": kind_of,
    "metric": lambda asked: asked.metric,
    "engine": engine_name,
    "gpu": lambda asked: asked.hardware or "not stated",
    "model_size": _model_size,
    "weights": _weights,
    "gpus": _gpus,
    "batch": _batch,
    "context": _context,
    "source": lambda asked: asked.source.split(" ")[0] if "/" in asked.source.split(" ")[0] else asked.source,
}
