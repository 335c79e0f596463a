"""Which letters a mesh splits: tp over heads, feed-forward width and vocabulary, ep over experts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError


@dataclass(frozen=True)
class Mesh:
    """Devices along each axis of parallelism."""

    tp: int = 1
    ep: int = 1

    @property
    def num_devices(self) -> int:
        return self.tp * self.ep


def check_mesh(config: ModelConfig, mesh: Mesh) -> Mesh:
    """Refuses a mesh that doesn't split this model evenly."""
    for name, value in (("tp", mesh.tp), ("ep", mesh.ep)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(name, value, "must be a positive integer", "Give the number of devices.")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % mesh.tp or (kv_heads % mesh.tp and mesh.tp % kv_heads):
        raise InputError(
            "tp",
            mesh.tp,
            f"doesn't split {heads} attention heads and {kv_heads} KV heads evenly",
            f"Use one of {_even_splits(heads, kv_heads)}.",
        )
    widths = {
        "intermediate_size": config.intermediate_size if len(config.sparse_layers) < config.num_hidden_layers else 0,
        "moe_intermediate_size": config.moe_intermediate_size,
        "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
    }
    for name, width in widths.items():
        if width % mesh.tp:
            raise InputError("tp", mesh.tp, f"doesn't divide {name} {width}", "Use a divisor of it.")
    _check_scale_groups(config, mesh, widths)
    if mesh.ep > 1 and not config.is_moe:
        raise InputError("ep", mesh.ep, "a dense model has no experts to spread", "Use tp.")
    if config.is_moe and config.num_experts % mesh.ep:
        raise InputError("ep", mesh.ep, f"doesn't divide num_experts {config.num_experts}", "Use a divisor of it.")
    return mesh


def _check_scale_groups(config: ModelConfig, mesh: Mesh, widths: dict[str, int]) -> None:
    """Refuses a split that cuts through weights which share a scale: their device's kernel couldn't read it."""
    quantization = config.quantization
    unit = (quantization.group_size or max(quantization.block or (1,))) if quantization else 1
    attended = config.num_attention_heads * config.head_dim
    for name, width in {**widths, "num_attention_heads x head_dim": attended}.items():
        part = width // mesh.tp
        if mesh.tp > 1 and part % unit:
            problem = f"leaves {part} of {name} {width} to a device, not whole groups of {unit} that share a scale"
            raise InputError("tp", mesh.tp, problem, "Use fewer devices, or the unquantised checkpoint.")


def _even_splits(heads: int, kv_heads: int) -> str:
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    return ", ".join(map(str, fitting))


def device_fraction(letters: str, config: ModelConfig, mesh: Mesh) -> Fraction:
    """The share of a tensor, or of a contraction's work, that the fullest device holds.

    KV heads fewer than tp are repeated: a tensor over K alone is split K ways at most, and of q, k and v side by side
    each device has its query heads and one whole key and value head. Vocabulary rows are padded up. The router is
    repeated: it is small, and every device needs all of its scores.
    """
    share = Fraction(1)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if "K" in letters and mesh.tp > kv_heads and "G" not in letters:
        share *= Fraction(heads // mesh.tp + 2, heads + 2 * kv_heads) if "J" in letters else Fraction(1, kv_heads)
    elif set(letters) & set("KFN"):
        share /= mesh.tp
    elif "V" in letters:
        share *= Fraction(-(-config.vocab_size // mesh.tp), config.vocab_size)
    if "E" in letters and "F" in letters:
        share /= mesh.ep
    return share
