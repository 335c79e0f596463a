"""The modules of a checkpoint by name, and which of them a quantiser was told to leave alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import translate
from re import compile as compile_pattern

from qwenjax.config import ModelConfig
from qwenjax.ops import Weight

# Linear layers that quantisers take unless told otherwise; embedding, output head, router and the shared expert's
# scalar gate keep their precision in every published Qwen checkpoint.
QUANTISED_GROUPS = ("attention", "mlp", "experts", "shared_expert")


def weight_layers(config: ModelConfig, weight: Weight) -> tuple[int, ...]:
    """The layers that hold a weight of a layer."""
    sparse = set(config.sparse_layers)
    layers = range(config.num_hidden_layers)
    return tuple(i for i in layers if weight.scope == "layer" or (i in sparse) == (weight.scope == "sparse"))


def module_names(config: ModelConfig, weight: Weight, layer: int) -> Iterator[str]:
    """Names of one layer's modules that hold a weight, as modules_to_not_convert spells them; one for each expert."""
    name = weight.key.removesuffix(".weight")
    for expert in range(config.num_experts if "{expert}" in name else 1):
        yield f"model.layers.{layer}.{name.replace('{expert}', str(expert))}"


def is_kept(names: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a module is named: itself, a parent, its last parts, or by a pattern (`*`, or `re:` before it)."""
    plain = {name for name in names if "*" not in name and not name.startswith("re:")}
    patterns = [translate(name) for name in names if "*" in name and not name.startswith("re:")]
    patterns += [f"(?:{name.removeprefix('re:')})" for name in names if name.startswith("re:")]
    pattern = compile_pattern("|".join(patterns) or r"(?!)")

    def kept(module: str) -> bool:
        parts = module.split(".")
        heads = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        tails = (".".join(parts[start:]) for start in range(1, len(parts)))
        return any(head in plain or pattern.match(head) for head in heads) or any(tail in plain for tail in tails)

    return kept
