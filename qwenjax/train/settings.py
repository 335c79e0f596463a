"""What a training run is made of, checked before anything is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qwenjax.errors import InputError

Remat = Literal["none", "full", "dots"]
REMAT_POLICIES: tuple[Remat, ...] = ("none", "full", "dots")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run; the same settings and data give the same weights.

    The learning rate rises from 0 over `warmup_steps` and falls along a cosine to `final_learning_rate_fraction` of its
    peak at `steps`. A step sees `batch_size` sequences, in `accumulation_steps` parts of equal size. `remat` is what
    the backward pass recomputes of each block: nothing, all of it, or all but the products with weights.
    """

    steps: int = 1000
    batch_size: int = 8
    sequence_len: int = 256
    accumulation_steps: int = 1
    learning_rate: float = 1e-3
    final_learning_rate_fraction: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0
    router_aux_loss_coef: float | None = None  # None leaves the auxiliary loss out, as transformers does by default
    remat: Remat = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("steps", "batch_size", "accumulation_steps"):
            self._check(field, getattr(self, field) >= 1, "is below 1", "Use 1 or more.")
        self._check("sequence_len", self.sequence_len >= 2, "has no next token", "Use 2 or more.")
        for field in ("learning_rate", "eps"):
            self._check(field, _finite(getattr(self, field), above=0), "is no positive number", "Use a value above 0.")
        for field in ("weight_decay", "final_learning_rate_fraction"):
            self._check(field, _finite(getattr(self, field)), "is no number from 0 on", "Use 0 or more.")
        for field in ("beta1", "beta2"):
            self._check(field, 0 <= getattr(self, field) < 1, "is outside [0, 1)", "Use a value such as 0.9.")
        for field in ("clip_norm", "router_aux_loss_coef"):
            value = getattr(self, field)
            self._check(field, value is None or _finite(value), "is no number from 0 on", "Use 0 or more, or None.")
        self._check("clip_norm", self.clip_norm != 0, "would stop every step", "Use None to clip nothing.")
        self._check(
            "warmup_steps",
            0 <= self.warmup_steps < self.steps,
            f"isn't from 0 to below the {self.steps} steps",
            "Use fewer warm-up steps, or more steps.",
        )
        self._check(
            "accumulation_steps",
            self.batch_size % self.accumulation_steps == 0,
            f"doesn't divide the batch of {self.batch_size}",
            "Use a divisor of batch_size.",
        )
        policies = ", ".join(REMAT_POLICIES)
        self._check("remat", self.remat in REMAT_POLICIES, "is no known policy", f"Use one of {policies}.")
        self._check("seed", 0 <= self.seed < 2**32, "doesn't fit in 32 bits", "Use 0 to 4294967295.")

    def _check(self, field: str, holds: bool, problem: str, remedy: str) -> None:
        if not holds:
            raise InputError(field, getattr(self, field), problem, remedy)


def _finite(value: float, above: float | None = None) -> bool:
    return math.isfinite(value) and (value >= 0 if above is None else value > above)
