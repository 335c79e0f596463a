"""Options that commands share: how they are spelled and explained, and how their text becomes values.

Options arrive as text and are read here, so that a wrong one is refused like any other input: field, value, remedy.
"""

from __future__ import annotations

import os
from math import isfinite
from typing import Annotated

import typer

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.hf_keys import Note
from qwenjax.known_models import KnownModel, known_model_facts
from qwenjax.sharding import Mesh
from roofline.count import DtypePolicy, Experts
from roofline.predict import Bandwidth

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A known model's name in any letter case (Qwen2.5-7B, Qwen/Qwen3-30B-A3B), a config.json, or a checkpoint "
        "folder.",
    ),
]
HardwareOption = Annotated[
    str, typer.Option("--hardware", metavar="HARDWARE", help="An id such as rtx-4090, a TOML file, or `here`.")
]
MaybeHardwareOption = Annotated[
    str | None,
    typer.Option("--hardware", metavar="HARDWARE", help="An id such as rtx-4090, a TOML file, or `here`; for times."),
]
PhaseOption = Annotated[str, typer.Option("--phase", metavar="prefill|decode", help="The kind of step.")]
QueryLenOption = Annotated[
    str | None,
    typer.Option("--query-len", metavar="TOKENS", help="New tokens of each sequence in a prefill; a decode has 1."),
]
LayersOption = Annotated[str | None, typer.Option("--layers", metavar="N", help="Cut the model to its first N layers.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, in SI units.")]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="Weights, as JAX names it.  [default: bfloat16]")
]
KvDtypeOption = Annotated[
    str | None, typer.Option("--kv-dtype", metavar="DTYPE", help="KV cache.  [default: the activations' dtype]")
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="SCHEME",
        help="How the weights are stored, in place of --dtype: awq, gptq-int4, fp8, w8a8, int8-wo, nvfp4, bnb-nf4, "
        "q4_k_m, ..., with their scales; or `stored`.  [default: as the checkpoint's quantization_config says]",
    ),
]
AttentionOption = Annotated[
    str,
    typer.Option(
        "--attention", metavar="causal|dense", help="Count the pairs that the mask keeps, or all of the square."
    ),
]
LogitsOption = Annotated[
    str, typer.Option("--logits", metavar="last|all", help="Positions of a prefill that reach the output head.")
]
ExpertsOption = Annotated[
    str,
    typer.Option(
        "--experts",
        metavar="expected|all|N",
        help="Distinct experts of a layer whose weights are read: expected under uniform routing, all, or as measured.",
    ),
]
ProfileOption = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="An engine (vllm, vllm==0.6.3, sglang, ...), whose best constants for the GPU are taken, or one profile "
        "by name; `bound` is the lower bound in time.",
    ),
]
TpOption = Annotated[str, typer.Option("--tp", metavar="N", help="Devices that split heads and widths.")]
EpOption = Annotated[str, typer.Option("--ep", metavar="N", help="Devices that split the experts.")]
ExplainOption = Annotated[
    bool,
    typer.Option("--explain", help="How the figures come about: each number with its formula, or its kind and source."),
]
BandwidthOption = Annotated[
    str,
    typer.Option(
        "--bandwidth",
        metavar="peak|measured|B_PER_S",
        help="Memory bandwidth: the datasheet's, one that was measured, or bytes per second such as 887e9.",
    ),
]
BatchOption = Annotated[str, typer.Option("--batch", metavar="B", help="Sequences in the step.")]
BatchesOption = Annotated[
    str, typer.Option("--batch", metavar="B|A..Z|A,B,C", help="Batch sizes: one, a range, or a list.")
]

LARGEST_NUMBER = 2**63
LARGEST_SWEEP = 4096  # batch sizes of one command; more is a slip of the pen


def whole_number(option: str, text: str) -> int:
    """An integer; whether it is in range is for whoever uses it to say."""
    try:
        value = int(text)
    except ValueError:
        raise InputError(option, text, "must be a whole number", "Give digits only, such as 16.") from None
    if abs(value) >= LARGEST_NUMBER:
        raise InputError(option, text, "is larger than any count here", "Check the number.")
    return value


def maybe_whole_number(option: str, text: str | None) -> int | None:
    return None if text is None else whole_number(option, text)


def positive_number(option: str, text: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise InputError(option, text, "must be a positive number", f"Give for instance {example}.")
    return value


def batch_sizes(text: str, option: str = "--batch") -> tuple[int, ...]:
    """Sizes out of `8`, `1..64` (both ends included) and lists of these parted by commas."""
    sizes: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        start = _size(option, text, first)
        end = _size(option, text, last) if dots else start
        if end < start:
            raise InputError(option, text, f"has a range that ends at {end}, below its start", "Swap the two.")
        if len(sizes) + end - start >= LARGEST_SWEEP:
            raise InputError(option, text, f"names more than {LARGEST_SWEEP} sizes", "Give fewer, such as 1,2,4,8.")
        sizes += range(start, end + 1)
    return tuple(sizes)


def _size(option: str, text: str, part: str) -> int:
    try:
        return int(part)
    except ValueError:
        remedy = "Give a number (8), a range (1..64) or a list (1,2,4)."
        raise InputError(option, text, "is no whole number, range or list", remedy) from None


def expert_convention(text: str) -> Experts:
    if text in ("expected", "all"):
        return "all" if text == "all" else "expected"
    try:
        return int(text)
    except ValueError:
        remedy = "Give the distinct experts of one layer as they were measured, or one of the words."
        raise InputError("--experts", text, "must be expected, all or a whole number", remedy) from None


def memory_bandwidth(text: str) -> Bandwidth:
    if text in ("peak", "measured"):
        return "peak" if text == "peak" else "measured"
    try:
        return float(text)
    except ValueError:
        raise InputError(
            "--bandwidth", text, "must be peak, measured or bytes per second", "Give for instance 887e9."
        ) from None


def mesh_of(tp: str, ep: str) -> Mesh:
    return Mesh(whole_number("--tp", tp), whole_number("--ep", ep))


def weight_policy(
    config: ModelConfig, dtype: str | None, kv_dtype: str | None, weights: str | None
) -> tuple[DtypePolicy, tuple[Note, ...]]:
    """What the options say of weights and cache; the note tells what a quantised checkpoint's weights were taken as."""
    if weights is not None and dtype is not None:
        raise InputError("--weights", weights, f"and --dtype {dtype} both say how weights are stored", "Give one.")
    policy = DtypePolicy.for_model(config, dtype, kv_dtype, weights)
    if config.quantization is None or weights is not None or dtype is not None:
        return policy, ()
    stored = f"{config.quantization.method} weights of {config.quantization.bits} bits as they are stored"
    text = f"{stored}, scales and unquantised parts included; --weights or --dtype takes others"
    return policy, (Note("default", "quantization_config", text),)


def known_facts(model: str) -> KnownModel | None:
    """The published facts of a MODEL that was read by its name, None where it is a path."""
    return None if os.path.exists(model) else known_model_facts(model)


def check_figure(path: str) -> None:
    """Refuses a file that no figure can be written to, before anything is measured or compiled."""
    from roofline.plot_axes import check_path

    check_path(path)
