"""vLLM's KV pool by the rules of its version: what it takes out of its budget first, term by term.

The rules and the few fitted sizes are in data/vllm_memory.toml, with their sources. The pool is what is left of
gpu_memory_utilization x the device's total memory after weights, the peak of a profiling step, memory outside PyTorch
and, by version, CUDA graphs and the runner's buffers; it is handed out in blocks of 16 tokens.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import ceil
from typing import Any, Final, Literal

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, dims, size
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh
from roofline.count import count_weight_bytes, dtype_bits
from roofline.hardware import Hardware
from roofline.weight_schemes import WeightScheme, stored_weight_bytes

Usage = Literal["server", "offline"]
USAGES: Final = ("server", "offline")
ENGINE: Final = "vllm"
LATEST: Final = (99, 0, 0)
_LONG_MODEL_LEN = 32768  # tokens, above which the V0 engine splits prompts into chunks


@dataclass(frozen=True)
class MemoryTerm:
    """One part of the account: bytes, whether they come out of the budget, and where the figure is from.

    kind: exact (shapes and the engine's source), fitted (from other logs), given (by whoever asks) or measured.
    """

    name: str
    num_bytes: int
    in_budget: bool
    kind: str
    source: str


@dataclass(frozen=True)
class EngineMemory:
    """What a version of vLLM takes on one device, and the settings that were asked or are its defaults."""

    engine: str
    runner: str
    gpu_memory_utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int
    terms: tuple[MemoryTerm, ...]
    tokens_source: str = ""

    @property
    def taken_bytes(self) -> int:
        """Bytes that leave the budget before the KV pool."""
        return sum(term.num_bytes for term in self.terms if term.in_budget)

    def term(self, name: str) -> MemoryTerm:
        return next(term for term in self.terms if term.name == name)


def parse_engine(text: str) -> tuple[int, ...]:
    """The version in `vllm==0.26.0` or `vllm` (the newest rules); raises InputError for any other engine."""
    name, _, version = (part.strip() for part in text.partition("=="))
    if name.lower() != ENGINE:
        raise InputError("engine", text, "has no memory rules here", "Give vllm==VERSION, such as vllm==0.26.0.")
    if not version:
        return LATEST
    parsed = parse_version(version)
    if parsed is None or parsed < (0, 4):
        remedy = "Give 0.4.0 or later, such as vllm==0.26.0."
        raise InputError("engine", text, "is not a version whose memory rules are known", remedy)
    return parsed


def usage_of(text: str) -> Usage:
    """How an engine is started; raises InputError for anything but the known ways."""
    if text not in USAGES:
        raise InputError("usage", text, "is not a way to start an engine", f"Use {' or '.join(USAGES)}.")
    return "server" if text == "server" else "offline"


def parse_version(text: str) -> tuple[int, ...] | None:
    """Numbers of a version as people write it: 0.26.0, v0.8.5.post1, 0.19.2.dev0, 0.8.x; None where there are none."""
    match = re.match(r"\s*v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in match.groups()) if match else None


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is started; None takes the version's default."""

    version: tuple[int, ...] = LATEST
    usage: Usage = "server"  # `vllm serve`, or LLM(...) in a program, which takes larger steps
    gpu_memory_utilization: float | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    enforce_eager: bool = False
    runner: str | None = None  # V0, V1, V2 where it was chosen


def batch_limits(hardware: Hardware, usage: Usage = "server") -> tuple[int, int]:
    """Tokens and sequences of one step that vLLM since 0.8 (V1) takes by default; larger cards get more, not A100s."""
    batching = _data()["batching"]
    large = hardware.usable_memory_bytes >= batching["large_bytes"] and "a100" not in hardware.id
    size = "_large" if large else ""
    return int(batching[f"{usage}_tokens{size}"]), int(batching[f"seqs{size}"])


def engine_memory(
    config: ModelConfig,
    hardware: Hardware,
    settings: EngineSettings,
    *,
    max_model_len: int,
    weights: WeightScheme | None = None,
    dtype: str = "bfloat16",
    mesh: Mesh | None = None,
) -> EngineMemory:
    """The account of one device before its KV pool, bytes, by the version's rules; max_model_len in tokens.

    Leaves out LoRA, speculative and multimodal parts, and what other processes hold on the device.
    """
    mesh = mesh or Mesh()
    rules, constants = _rules(settings.version), _data()["constants"]
    runner = settings.runner or _runner(config, rules, weights)
    usual = _v0_limits(max_model_len, rules) if runner == "V0" else batch_limits(hardware, settings.usage)
    tokens, seqs = settings.max_num_batched_tokens or usual[0], settings.max_num_seqs or usual[1]
    weight_bytes = (
        count_weight_bytes(config, dtype, mesh) if weights is None else stored_weight_bytes(config, weights, mesh)
    )
    stored = f"{dtype} weights of the architecture" if weights is None else f"weights stored as {weights.name}"
    terms = [
        MemoryTerm("weights", weight_bytes, True, "exact", stored),
        _activations(config, runner, rules, tokens, seqs, max_model_len, dtype, mesh),
        _non_torch(hardware, mesh, runner, rules, constants),
    ]
    if runner == "V2":
        terms.append(_buffers(config, seqs, max_model_len, rules["buffers_in_budget"]))
    if not settings.enforce_eager:
        estimated = rules["graphs_in_budget"] and runner == "V1"
        terms.append(_graphs(constants["graph_estimate"], estimated, runner, settings.version))
    return EngineMemory(
        engine=_name(settings.version),
        runner=runner,
        gpu_memory_utilization=settings.gpu_memory_utilization or rules["gpu_memory_utilization"],
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        terms=tuple(terms),
        tokens_source="given" if settings.max_num_batched_tokens else f"default of a {settings.usage} start",
    )


def forward_bytes(config: ModelConfig, tokens: int, dtype: str = "bfloat16", mesh: Mesh | None = None) -> int:
    """Peak of live activations in a step of `tokens`, bytes: a block's gate and up, their product, and three residuals.

    A mixture's experts keep gate and up (or, where that is wider, their outputs) and the product for each of a token's
    experts. For Qwen2.5-7B at 8192 tokens it gives 1.03 GiB where a log says 1.04 (seed ledger S000-168), and for
    Qwen3-235B over four devices 0.73 where one says 0.76.
    """
    mesh = mesh or Mesh()
    hidden = config.hidden_size
    widths = [3 * config.intermediate_size // mesh.tp if len(config.sparse_layers) < config.num_hidden_layers else 0]
    if config.is_moe:
        expert = config.moe_intermediate_size // mesh.tp
        widths.append(config.num_experts_per_tok * (max(2 * expert, hidden) + expert))
        widths.append(3 * config.shared_expert_intermediate_size // mesh.tp)
    rows = int(size("BT", dims(config, Step(1, tokens, tokens))))
    return rows * (max(widths) + 3 * hidden) * dtype_bits(dtype) // 8


def _activations(
    config: ModelConfig,
    runner: str,
    rules: dict[str, Any],
    tokens: int,
    seqs: int,
    max_model_len: int,
    dtype: str,
    mesh: Mesh,
) -> MemoryTerm:
    """The larger of the widest block of the largest step, and the sampler over every sequence's logits."""
    constants = _data()["constants"]
    forward = forward_bytes(config, tokens, dtype, mesh)
    name = "sampler_v2" if runner == "V2" else f"sampler_{rules.get('sampler', 'sorting').replace('-', '_')}"
    logits = min(seqs, tokens) * config.vocab_size
    # The V0 engine doesn't sample in its profiling step where it splits prompts.
    sampler = 0 if runner == "V0" and max_model_len > _LONG_MODEL_LEN else constants[name]["value"] * logits
    if forward >= sampler:
        return MemoryTerm("activations", forward, True, "exact", f"widest block of a step of {tokens} tokens")
    per_logit = f"{constants[name]['value']} bytes of each logit of {min(seqs, tokens)} sequences in the sampler"
    return MemoryTerm("activations", sampler, True, constants[name]["kind"], per_logit)


def _non_torch(
    hardware: Hardware, mesh: Mesh, runner: str, rules: dict[str, Any], constants: dict[str, Any]
) -> MemoryTerm:
    link = hardware.peer_link
    single = "non_torch"
    if runner == "V2":
        single = "v2_rest" if rules["buffers_in_budget"] else "v2_rest_early"
    several = "non_torch_nvlink" if link is not None and link.name != "pcie" else "non_torch_pcie"
    constant = constants[several if mesh.num_devices > 1 else single]
    return MemoryTerm("non-torch", constant["value"], True, constant["kind"], constant["source"])


def _buffers(config: ModelConfig, seqs: int, max_model_len: int, in_budget: bool) -> MemoryTerm:
    """Counts and masks of each sequence's tokens for penalties, and its token ids: held as long as the V2 runner."""
    counts = seqs * config.vocab_size * 4 + seqs * ceil(config.vocab_size / 32) * 4
    source = f"penalty counts and token ids of {seqs} sequences (V2 runner)"
    note = "" if in_budget else "; not subtracted before 0.27"
    return MemoryTerm("buffers", counts + seqs * max_model_len * 4, in_budget, "exact", source + note)


def _graphs(constant: dict[str, Any], estimated: bool, runner: str, version: tuple[int, ...]) -> MemoryTerm:
    if estimated:
        return MemoryTerm("CUDA graphs", constant["value"], True, constant["kind"], constant["source"])
    why = "the V2 runner doesn't estimate them" if runner == "V2" else "captured after the pool is made"
    return MemoryTerm("CUDA graphs", 0, False, "exact", f"{why}: they come out of what the budget leaves free")


def _runner(config: ModelConfig, rules: dict[str, Any], weights: WeightScheme | None) -> str:
    quantised = weights is not None and weights.linear.bits < 16
    by_type = config.model_type in rules.get("v2_model_types", ())
    if rules.get("v2_dense", False):
        return "V2" if by_type or not config.is_moe else str(rules["runner"])
    return "V2" if by_type and not quantised else str(rules["runner"])


def _v0_limits(max_model_len: int, rules: dict[str, Any]) -> tuple[int, int]:
    """The same of vLLM before V1: a prompt of the model's length in one step, chunks of it where that is long."""
    long = max_model_len > _LONG_MODEL_LEN
    return int(rules.get("chunk_tokens", 2048)) if long else max(max_model_len, 2048), int(_data()["batching"]["seqs"])


def _rules(version: tuple[int, ...]) -> dict[str, Any]:
    fitting = [rules for rules in _data()["rules"] if (parse_version(rules["since"]) or ()) <= version]
    if not fitting:
        raise InputError("engine", _name(version), "is older than the rules that are known", "Give 0.4.0 or later.")
    return dict(fitting[-1])


def _name(version: tuple[int, ...]) -> str:
    return ENGINE if version == LATEST else f"{ENGINE}=={'.'.join(map(str, version))}"


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((files("roofline") / "data" / "vllm_memory.toml").read_text(encoding="utf-8"))
