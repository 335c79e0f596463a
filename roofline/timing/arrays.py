"""The few operations that numbers and numpy arrays don't share, so that one formula serves both."""

from __future__ import annotations

from typing import Any


def is_array(*values: Any) -> bool:
    """Whether any of the values is an array."""
    return any(hasattr(value, "shape") and value.shape for value in values)


def ceil_div(a: Any, b: Any) -> Any:
    """Least whole number not below a / b, elementwise."""
    return -(-a // b)


def most(a: Any, b: Any) -> Any:
    """The greater of two, elementwise."""
    if is_array(a, b):
        import numpy as np

        return np.maximum(a, b)
    return max(a, b)


def least(a: Any, b: Any) -> Any:
    """The smaller of two, elementwise."""
    if is_array(a, b):
        import numpy as np

        return np.minimum(a, b)
    return min(a, b)


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`, elementwise; both are already computed."""
    if is_array(condition, yes, no):
        import numpy as np

        return np.where(condition, yes, no)
    return yes if condition else no


def soft_most(a: Any, b: Any, sharpness: float) -> Any:
    """A smooth maximum, (a^p + b^p)^(1/p): never below either, and above both where they are near each other."""
    top = most(most(a, b), 1e-30)
    return top * (1 + (least(a, b) / top) ** sharpness) ** (1 / sharpness)
