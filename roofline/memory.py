"""What fits on a device: weights, activations, the engine's own needs, and the KV pool that remains."""

from __future__ import annotations

from dataclasses import dataclass, field

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh, check_mesh
from roofline.count import DtypePolicy, count_kv_bytes_per_token, count_weight_bytes
from roofline.hardware import Hardware
from roofline.vllm_memory import (
    EngineMemory,
    EngineSettings,
    MemoryTerm,
    Usage,
    engine_memory,
    forward_bytes,
    parse_engine,
)
from roofline.weight_schemes import WeightScheme, stored_weight_bytes

# One startup log of vLLM with Qwen2.5-7B on an RTX 4090: 15.49 GiB of weights and non-torch memory, of which 14.19 are
# weights (seed ledger S000-168). Its 0.34 GiB of CUDA graphs lie outside the budget, see S000-171. It is one card and
# one engine: name your engine's version, or pass your own.
OVERHEAD_BYTES = int((15.49 - 14.19) * 2**30)
OVERHEAD_SOURCE = "measured elsewhere: non-torch memory of one vLLM log, Qwen2.5-7B on an RTX 4090"
GPU_MEMORY_UTILIZATION = 0.9  # vLLM's default until 0.20
MAX_NUM_BATCHED_TOKENS = 8192  # vLLM's default for a server on a large GPU, and for a program on any other
BLOCK_TOKENS = 16  # vLLM hands out the cache in blocks of 16 tokens


@dataclass(frozen=True)
class MemoryPlan:
    """The bill of one device's memory; every figure's origin is in `sources`, by field name.

    With an engine, `terms` has what its version takes, in the budget and outside it, by name.
    """

    capacity_bytes: int
    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    overhead_bytes: int
    kv_pool_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    max_model_len: int
    concurrency_at_max_len: float
    fits: bool
    sources: dict[str, str]
    gpu_memory_utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int | None = None
    engine: str | None = None
    terms: dict[str, MemoryTerm] = field(default_factory=dict)


def plan_memory(
    config: ModelConfig,
    hardware: Hardware,
    *,
    gpu_memory_utilization: float | None = None,
    max_model_len: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    kv_pool_bytes: int | None = None,
    overhead_bytes: int | None = None,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    weights: WeightScheme | str | None = None,
    mesh: Mesh | None = None,
    engine: str | None = None,
    usage: Usage = "server",
    enforce_eager: bool = False,
) -> MemoryPlan:
    """Plans one device's memory as a serving engine does; a measured KV pool overrides the estimate.

    max_model_len is in tokens (default: the model's context length). With `engine` (vllm==0.26.0) the version's own
    rules and defaults hold; without it, one log's overhead. `weights` is a scheme such as awq; without it and without
    `dtype` a quantised checkpoint keeps its own. Raises InputError for values out of range.
    """
    mesh = check_mesh(config, mesh or Mesh())
    _check(gpu_memory_utilization, max_num_batched_tokens, max_num_seqs, kv_pool_bytes, overhead_bytes)
    length = _length(config, max_model_len)
    policy = DtypePolicy.for_model(config, dtype, kv_dtype, weights)
    scheme = policy.scheme
    settings = EngineSettings(
        version=parse_engine(engine) if engine is not None else (),
        usage=usage,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        enforce_eager=enforce_eager,
    )
    needs = memory_of_one_log(config, settings, policy, scheme, mesh)
    if engine is not None:
        needs = engine_memory(
            config, hardware, settings, max_model_len=length, weights=scheme, dtype=policy.activation, mesh=mesh
        )
        if scheme is None:
            needs = _with_dtype(needs, config, policy.weight, mesh)
    return _plan(config, hardware, needs, policy.kv, length, kv_pool_bytes, overhead_bytes, mesh)


def _plan(
    config: ModelConfig,
    hardware: Hardware,
    needs: EngineMemory,
    kv_dtype: str,
    length: int,
    kv_pool_bytes: int | None,
    overhead_bytes: int | None,
    mesh: Mesh,
) -> MemoryPlan:
    weights, activations = needs.term("weights"), needs.term("activations")
    rest = [term for term in needs.terms if term.in_budget and term not in (weights, activations)]
    overhead = sum(term.num_bytes for term in rest) if overhead_bytes is None else overhead_bytes
    capacity = int(hardware.usable_memory_bytes)
    budget = int(capacity * needs.gpu_memory_utilization)
    resident = weights.num_bytes + activations.num_bytes + overhead
    pool = max(0, budget - resident) if kv_pool_bytes is None else kv_pool_bytes
    per_token = count_kv_bytes_per_token(config, kv_dtype, mesh)
    tokens = kv_tokens(pool, per_token)
    return MemoryPlan(
        capacity,
        budget,
        weights.num_bytes,
        activations.num_bytes,
        overhead,
        pool,
        per_token,
        tokens,
        length,
        tokens / length,
        fits=tokens >= length and weights.num_bytes + activations.num_bytes <= capacity,
        sources=_sources(hardware, needs, rest, kv_dtype, length, kv_pool_bytes is None, overhead_bytes is None),
        gpu_memory_utilization=needs.gpu_memory_utilization,
        max_num_batched_tokens=needs.max_num_batched_tokens,
        max_num_seqs=needs.max_num_seqs or None,
        engine=needs.engine or None,
        terms={term.name: term for term in needs.terms} if needs.engine else {},
    )


def _sources(
    hardware: Hardware,
    needs: EngineMemory,
    rest: list[MemoryTerm],
    kv_dtype: str,
    length: int,
    pool_estimated: bool,
    overhead_estimated: bool,
) -> dict[str, str]:
    activations = needs.term("activations")
    kind = "estimate" if not needs.engine else activations.kind
    overhead = "; ".join(f"{term.name}: {term.source}" if needs.engine else term.source for term in rest)
    return {
        "capacity_bytes": hardware.usable_memory_source,
        "budget_bytes": f"capacity x gpu_memory_utilization {needs.gpu_memory_utilization:g}",
        "weight_bytes": f"exact: {needs.term('weights').source}",
        "activation_bytes": f"{kind}: {activations.source}",
        "overhead_bytes": overhead if overhead_estimated else "given",
        "kv_pool_bytes": "budget - weights - activations - overhead" if pool_estimated else "given (measured)",
        "kv_bytes_per_token": f"exact: {kv_dtype} keys and values of all layers",
        "kv_tokens": f"pool in whole blocks of {BLOCK_TOKENS} tokens",
        "concurrency_at_max_len": f"kv_tokens / {length}",
        "max_num_batched_tokens": needs.tokens_source,
    }


def kv_tokens(pool_bytes: float, bytes_per_token: int) -> int:
    """Tokens that a KV pool holds in whole blocks of 16."""
    return int(pool_bytes // (BLOCK_TOKENS * bytes_per_token)) * BLOCK_TOKENS


def peak_activation_bytes(
    config: ModelConfig, max_num_batched_tokens: int, dtype: str = "bfloat16", mesh: Mesh | None = None
) -> int:
    """Estimates the largest set of live activations of a step, bytes; see `forward_bytes`.

    It leaves out the sampler's float32 logits, which are smaller unless hundreds of sequences finish a step together.
    """
    return forward_bytes(config, max_num_batched_tokens, dtype, mesh)


def memory_of_one_log(
    config: ModelConfig, settings: EngineSettings, policy: DtypePolicy, scheme: WeightScheme | None, mesh: Mesh
) -> EngineMemory:
    """Where no version is known: weights, the largest step's activations, and the overhead of one published log."""
    tokens = settings.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS
    activations = peak_activation_bytes(config, tokens, policy.activation, mesh)
    terms = (
        _weights(config, policy.weight, scheme, mesh),
        MemoryTerm("activations", activations, True, "exact", f"widest op of {tokens} tokens"),
        MemoryTerm("non-torch", OVERHEAD_BYTES, True, "measured", OVERHEAD_SOURCE),
    )
    source = "given" if settings.max_num_batched_tokens else "default"
    return EngineMemory("", "", settings.gpu_memory_utilization or GPU_MEMORY_UTILIZATION, tokens, 0, terms, source)


def _weights(config: ModelConfig, dtype: str, scheme: WeightScheme | None, mesh: Mesh) -> MemoryTerm:
    if scheme is not None:
        stored = stored_weight_bytes(config, scheme, mesh)
        return MemoryTerm("weights", stored, True, "exact", f"weights stored as {scheme.name}")
    size = count_weight_bytes(config, dtype, mesh)
    return MemoryTerm("weights", size, True, "exact", f"{dtype} weights of the architecture")


def _with_dtype(needs: EngineMemory, config: ModelConfig, dtype: str, mesh: Mesh) -> EngineMemory:
    """The same account with weights of one dtype, which may be narrower than the activations'."""
    terms = (_weights(config, dtype, None, mesh), *(term for term in needs.terms if term.name != "weights"))
    fields = {name: getattr(needs, name) for name in needs.__dataclass_fields__}
    return EngineMemory(**{**fields, "terms": terms})


def _length(config: ModelConfig, max_model_len: int | None) -> int:
    length = config.context_length if max_model_len is None else max_model_len
    if not 1 <= length <= config.context_length:
        raise InputError(
            "max_model_len",
            length,
            f"must be from 1 to the model's {config.context_length} positions",
            "Choose a length within.",
        )
    return length


def _check(
    utilization: float | None, batched: int | None, seqs: int | None, pool: int | None, overhead: int | None
) -> None:
    if utilization is not None and not 0 < utilization <= 1:
        raise InputError(
            "gpu_memory_utilization", utilization, "must be above 0 and at most 1", "vLLM's default is 0.9."
        )
    for name, value, remedy in (
        ("max_num_batched_tokens", batched, "vLLM's server default is 8192."),
        ("max_num_seqs", seqs, "vLLM's default is 256."),
    ):
        if value is not None and value < 1:
            raise InputError(name, value, "must be at least 1", remedy)
    for name, value in (("kv_pool_bytes", pool), ("overhead_bytes", overhead)):
        if value is not None and value < 0:
            raise InputError(name, value, "must not be negative", "Give bytes.")
