"""Which kernel runs where: by platform when a function is lowered, by name when one is switched off."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

from qwenjax.errors import InputError

NAMES: Final = ("norm", "attention", "product", "experts")
VARIABLE: Final = "QWENJAX_KERNELS_OFF"  # names that never run, separated by commas, or "all"
_DTYPES: Final = ("bfloat16", "float16")  # float32 stays with XLA, whose products keep it whole


@dataclass(frozen=True)
class Kernels:
    """The kernels that may run: those not in `off`, on CUDA, or anywhere in Pallas's interpreter if `interpret`.

    A static argument of the jitted functions, so that another choice is another compiled program.
    """

    off: frozenset[str] = frozenset()
    interpret: bool = False

    def run(self, name: str, fits: bool, kernel: Callable[..., Any], plain: Callable[..., Any], *arrays: Any) -> Any:
        """kernel(*arrays, interpret=...) where it may run and the shapes fit it, else plain(*arrays).

        `fits` is what the kernel asks of shapes and dtypes. The platform is that of the lowering, not of this process:
        one that compiles for a GPU which isn't there gets the GPU's kernels.
        """
        if name in self.off or not fits:
            return plain(*arrays)
        if self.interpret:
            return kernel(*arrays, interpret=True)
        return jax.lax.platform_dependent(*arrays, cuda=kernel, default=plain)


NO_KERNELS: Final = Kernels(off=frozenset(NAMES))


def from_environment() -> Kernels:
    """All kernels but those that QWENJAX_KERNELS_OFF names."""
    text = os.environ.get(VARIABLE, "")
    named = {name.strip() for name in text.split(",") if name.strip()}
    if "all" in named:
        return NO_KERNELS
    if unknown := sorted(named - set(NAMES)):
        raise InputError(VARIABLE, text, f"names no kernel: {', '.join(unknown)}", f"Known: all, {', '.join(NAMES)}.")
    return Kernels(off=frozenset(named))


def resolved(kernels: Kernels | None) -> Kernels:
    """The given choice; by default all kernels on a process's one GPU, and none elsewhere.

    XLA can't split a kernel over a mesh: it would gather its operands on every device.
    """
    if kernels is not None:
        return kernels
    return from_environment() if jax.default_backend() == "gpu" and jax.device_count() == 1 else NO_KERNELS


def is_narrow(*arrays: jax.Array) -> bool:
    """Whether all are of one 16-bit float type, which the kernels are made for."""
    names = {jnp.dtype(array.dtype).name for array in arrays}
    return len(names) == 1 and names <= set(_DTYPES)
