"""Element types by tensor class: what weights, activations and the KV cache are stored as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.ops import weights_of
from roofline.weight_schemes import WeightScheme, bits_per_weight, scheme_for

DTYPE_BITS = {
    "float64": 64,
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "int4": 4,
}


def dtype_bits(dtype: str, field: str = "dtype") -> int:
    """Bits of one element of a JAX dtype."""
    if dtype not in DTYPE_BITS:
        raise InputError(field, dtype, "is not a dtype that is known here", f"Known: {', '.join(DTYPE_BITS)}.")
    return DTYPE_BITS[dtype]


@dataclass(frozen=True)
class DtypePolicy:
    """Element types by tensor class, as JAX names; with a scheme, `weight` is that scheme's name."""

    weight: str = "bfloat16"
    activation: str = "bfloat16"
    kv: str = "bfloat16"
    scheme: WeightScheme | None = None

    @classmethod
    def of(cls, dtype: str, kv_dtype: str | None = None) -> DtypePolicy:
        """One dtype for weights and activations (activations stay 16 bits wide when weights are narrower)."""
        dtype_bits(dtype)
        activation = dtype if DTYPE_BITS[dtype] >= 16 else "bfloat16"
        kv = kv_dtype or activation
        dtype_bits(kv, "kv_dtype")
        return cls(dtype, activation, kv)

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        weights: str | WeightScheme | None = None,
    ) -> DtypePolicy:
        """What weights and cache are stored as: by a weight scheme, else by a dtype, else as the checkpoint has them.

        Without any of them a quantised checkpoint keeps its own scheme, and another is taken as bfloat16.
        """
        if weights is None and (dtype is not None or config.quantization is None):
            return cls.of(dtype or "bfloat16", kv_dtype)
        scheme = scheme_for(config, "stored" if weights is None else weights)
        kv = kv_dtype or scheme.activation
        dtype_bits(kv, "kv_dtype")
        return cls(scheme.name, scheme.activation, kv, scheme)

    def weight_bits(self, config: ModelConfig) -> dict[str, Any]:
        """Stored bits of one element of each checkpoint tensor's kind; a scheme's are means, scales included."""
        if self.scheme is None:
            return dict.fromkeys((weight.name for weight in weights_of(config)), dtype_bits(self.weight))
        return dict(bits_per_weight(config, self.scheme))
