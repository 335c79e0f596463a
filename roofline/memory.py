"""What fits on a device: weights, activations, the engine's own needs, and the KV pool that remains."""

from __future__ import annotations

from dataclasses import dataclass

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, dims, size
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh, check_mesh
from roofline.count import DtypePolicy, count_kv_bytes_per_token, count_weight_bytes, dtype_bits
from roofline.hardware import Hardware

# One startup log of vLLM 0.26 with Qwen2.5-7B on an RTX 4090: 15.49 GiB weights and non-torch memory, of which 14.19
# are weights, and 0.34 GiB of CUDA graphs (seed ledger S000-168). It is one card and one engine: pass your own.
OVERHEAD_BYTES = int((15.49 - 14.19 + 0.34) * 2**30)
OVERHEAD_SOURCE = "measured elsewhere: non-torch memory and CUDA graphs of one vLLM 0.26 log, Qwen2.5-7B on an RTX 4090"
GPU_MEMORY_UTILIZATION = 0.9  # vLLM's default
MAX_NUM_BATCHED_TOKENS = 8192  # vLLM's default for a server
BLOCK_TOKENS = 16  # vLLM hands out the cache in blocks of 16 tokens


@dataclass(frozen=True)
class MemoryPlan:
    """The bill of one device's memory; every figure's origin is in `sources`, by field name."""

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


def plan_memory(
    config: ModelConfig,
    hardware: Hardware,
    *,
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
    max_model_len: int | None = None,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    kv_pool_bytes: int | None = None,
    overhead_bytes: int | None = None,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    mesh: Mesh | None = None,
) -> MemoryPlan:
    """Plans one device's memory as a serving engine does; a measured KV pool overrides the estimate.

    max_model_len is in tokens (default: the model's context length). Activations are estimated, see
    `peak_activation_bytes`. Raises InputError for values out of range.
    """
    mesh = check_mesh(config, mesh or Mesh())
    _check(gpu_memory_utilization, max_num_batched_tokens, kv_pool_bytes, overhead_bytes)
    length = config.context_length if max_model_len is None else max_model_len
    if not 1 <= length <= config.context_length:
        raise InputError(
            "max_model_len",
            length,
            f"must be from 1 to the model's {config.context_length} positions",
            "Choose a length within.",
        )
    policy = DtypePolicy.of(dtype, kv_dtype)
    capacity = int(hardware.usable_memory_bytes)
    budget = int(capacity * gpu_memory_utilization)
    weights = count_weight_bytes(config, dtype, mesh)
    activations = peak_activation_bytes(config, max_num_batched_tokens, policy.activation, mesh)
    overhead = OVERHEAD_BYTES if overhead_bytes is None else overhead_bytes
    pool = max(0, budget - weights - activations - overhead) if kv_pool_bytes is None else kv_pool_bytes
    per_token = count_kv_bytes_per_token(config, policy.kv, mesh)
    tokens = pool // (BLOCK_TOKENS * per_token) * BLOCK_TOKENS
    return MemoryPlan(
        capacity,
        budget,
        weights,
        activations,
        overhead,
        pool,
        per_token,
        tokens,
        length,
        tokens / length,
        fits=tokens >= length and weights + activations <= capacity,
        sources={
            "capacity_bytes": hardware.usable_memory_source,
            "budget_bytes": f"capacity x gpu_memory_utilization {gpu_memory_utilization:g}",
            "weight_bytes": f"exact: {dtype} weights of the architecture",
            "activation_bytes": f"estimate: widest op of {max_num_batched_tokens} tokens",
            "overhead_bytes": OVERHEAD_SOURCE if overhead_bytes is None else "given",
            "kv_pool_bytes": "budget - weights - activations - overhead"
            if kv_pool_bytes is None
            else "given (measured)",
            "kv_bytes_per_token": f"exact: {policy.kv} keys and values of all layers",
            "kv_tokens": f"pool in whole blocks of {BLOCK_TOKENS} tokens",
            "concurrency_at_max_len": f"kv_tokens / {length}",
        },
    )


def peak_activation_bytes(
    config: ModelConfig, max_num_batched_tokens: int, dtype: str = "bfloat16", mesh: Mesh | None = None
) -> int:
    """Estimates the largest set of live activations, bytes: an MLP's input, residual, gate and up, and product.

    For Qwen2.5-7B at 8192 tokens it gives 1.03 GiB where a vLLM log says 1.04 (seed ledger S000-168). It leaves out
    the sampler's float32 logits, which are smaller unless hundreds of sequences finish a step together.
    """
    mesh = mesh or Mesh()
    sizes = dims(config, Step(1, max_num_batched_tokens, max_num_batched_tokens))
    widths = [config.intermediate_size if len(config.sparse_layers) < config.num_hidden_layers else 0]
    if config.is_moe:
        widths.append(
            config.moe_intermediate_size * config.num_experts_per_tok + config.shared_expert_intermediate_size
        )
    elements = size("T", sizes) * (3 * max(widths) // mesh.tp + 3 * config.hidden_size)
    return int(elements * dtype_bits(dtype) // 8)


def _check(utilization: float, batched: int, pool: int | None, overhead: int | None) -> None:
    if not 0 < utilization <= 1:
        raise InputError(
            "gpu_memory_utilization", utilization, "must be above 0 and at most 1", "vLLM's default is 0.9."
        )
    if batched < 1:
        raise InputError("max_num_batched_tokens", batched, "must be at least 1", "vLLM's server default is 8192.")
    for name, value in (("kv_pool_bytes", pool), ("overhead_bytes", overhead)):
        if value is not None and value < 0:
            raise InputError(name, value, "must not be negative", "Give bytes.")
