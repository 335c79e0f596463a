"""What the steps of an engine are made of: kernel seconds by kind on one device, before any constant of the engine.

A step may decode some sequences and take chunks of prompts at once, as engines with continuous batching run it. The
ops, their letters and their shares of a mesh are those of `qwenjax.ops`; the seconds of each come from
`roofline.timing.kernels`. Beside them stands the roofline's own time of the same step, which no prediction goes below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, dims, size
from qwenjax.ops import Op, as_product, layers_of, ops_of
from qwenjax.sharding import Mesh, device_fraction
from roofline.count import distinct_experts
from roofline.hardware import Hardware, Link
from roofline.timing.efficiency import Efficiency
from roofline.timing.kernels import (
    ROWS_APART,
    TUNED_EXPERTS,
    allreduce_s,
    attention_decode_s,
    attention_mixed_s,
    attention_prefill_s,
    elementwise_s,
    gemm_s,
    moe_s,
    operand_bytes,
)
from roofline.timing.ways import Ways

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Seconds of a step, each scaled by one constant of the engine; then counts, each costing one.
SECONDS = (
    "products_memory",
    "products_compute",
    "attention_decode",
    "attention_prefill",
    "attention_plain",
    "attention_plain_decode",
    "experts",
    "experts_tuned",
    "elementwise",
    "collectives",
    "collectives_pcie",
    "collectives_large",
    "collectives_staged",
)
COUNTS = (
    "layers",
    "eager_layers",
    "prefill_layers",
    "sequences",
    "collective_calls",
    "remote_steps",
    "packed_calls",
    "hops",
)
_LARGE_BYTES = 48 << 20  # of a message, from where on collectives of some engines slow down
_STAGED_BYTES = 1 << 20  # of a message over PCIe, from where on it goes through the host's memory
SHARED_ROWS = 64  # query rows of one KV head that an attention kernel takes in one pass over the cache
GROWN_FRACTION = 0.4  # of the peak bandwidth, where each step copies a layer's cache to make it a token longer
SPARSE_LAUNCHES = 3.0  # of a mixture-of-experts layer over a dense one: routing, sorting, grouped products, sums
# Of a shared expert beside them, over the 13 of a dense layer: three products, activation, gate, its scaling, the sum.
SHARED_LAUNCHES = 0.5
_UNFUSED = ("softmax", "top_k", "experts_swiglu", "combine")  # inside the kernels beside them


@dataclass(frozen=True)
class Steps:
    """Kinds of engine steps, an entry each: arrays of one length.

    `times` is how often the kind runs; it decodes `decodes` sequences that attend `context` tokens on average, and
    takes `chunk` new tokens of each of `prompts` prompts, after which those attend `reached` tokens.
    """

    times: NDArray[Any]
    decodes: NDArray[Any]
    context: NDArray[Any]
    prompts: NDArray[Any]
    chunk: NDArray[Any]
    reached: NDArray[Any]

    @property
    def tokens(self) -> NDArray[Any]:
        tokens: NDArray[Any] = self.decodes + self.prompts * self.chunk
        return tokens

    @property
    def logit_rows(self) -> NDArray[Any]:
        rows: NDArray[Any] = self.decodes + self.prompts
        return rows


@dataclass(frozen=True)
class Layout:
    """How the model lies on the devices: element types, the weights' width by op, tensor and data parallelism.

    attention_dp: attention runs whole on each device for its share of the sequences; only the rest is sharded.
    """

    tp: int = 1
    attention_dp: bool = False
    expert_parallel: bool = False  # whole experts lie on each device, instead of a share of every expert
    weight_bits: Mapping[str, float] = field(default_factory=dict)  # stored bits by op, scales included; else 16
    compute_dtype: str = "bfloat16"  # of the products with narrow weights
    kv_bytes: float = 2.0
    experts: float | None = None  # distinct experts of a layer and step where they were counted
    ways: Ways = field(default_factory=Ways)
    hops: int = 0  # from card to card on a token's way through the layers


@dataclass(frozen=True)
class Terms:
    """Kernel seconds and counts of each kind of step, by name; `least` has the roofline's time of the same kernels."""

    values: dict[str, NDArray[Any]]
    least: dict[str, NDArray[Any]]

    @property
    def bound_s(self) -> NDArray[Any]:
        """The roofline's time of each kind of step."""
        total: NDArray[Any] = sum(self.least.values())  # type: ignore[assignment]
        return total

    @property
    def kernel_s(self) -> NDArray[Any]:
        """Seconds of all kernels, as their chip runs them."""
        total: NDArray[Any] = sum(self.values[name] for name in SECONDS)  # type: ignore[assignment]
        return total


def step_terms(config: ModelConfig, steps: Steps, layout: Layout, chip: Hardware, eff: Efficiency) -> Terms:
    """Seconds of each kind of kernel and the counts of one run of each kind of step, on one device of the mesh.

    Sizes are tokens and sequences; seconds come from the chip's kernel constants and leave out what the engine adds.
    """
    return StepFold(config, steps, layout, chip, eff).terms()


class StepFold:
    """Goes over the ops of a step once, adding each one's kernel time and roofline time."""

    def __init__(self, config: ModelConfig, steps: Steps, layout: Layout, chip: Hardware, eff: Efficiency) -> None:
        import numpy as np

        self.np, self.config, self.steps, self.layout = np, config, steps, layout
        self.chip, self.eff = chip, eff
        self.zero = np.zeros_like(steps.times, dtype=np.float64)
        self.values = {name: self.zero.copy() for name in (*SECONDS, *COUNTS)}
        self.least = {name: self.zero.copy() for name in SECONDS}
        self.bandwidth = chip.peak_bandwidth_bytes_per_s

    def terms(self) -> Terms:
        steps, layers = self.steps, float(self.config.num_hidden_layers)
        for op in ops_of(self.config):
            if op.kind == "matmul":
                self.product(op)
            elif op.kind in ("elementwise", "gather") and op.name not in _UNFUSED:
                self.elementwise(op)
        self.attention()
        self.experts()
        self.collectives()
        prefills = (steps.prompts > 0) * 1.0
        if self.layout.ways.rows_apart:  # the engine tells a prompt from decodes by its rows alone
            prefills = prefills * (steps.tokens > ROWS_APART)
        self.values["layers"] += layers * (1 - prefills)
        sparse = float(len(self.config.sparse_layers))
        launches = layers + (SPARSE_LAUNCHES - 1 + SHARED_LAUNCHES * self.config.has_shared_expert) * sparse
        self.values["eager_layers"] += launches * (1 - prefills) * (steps.context > self.layout.ways.captured_context)
        self.values["prefill_layers"] += layers * prefills
        self.values["sequences"] += steps.logit_rows / (self.layout.tp if self.layout.attention_dp else 1)
        self.values["hops"] += self.layout.hops * (1 - prefills)
        self.values["remote_steps"] += float(self.layout.ways.remote_workers and self.layout.tp > 1)
        return Terms(self.values, self.least)

    def peak(self, dtype: str) -> float:
        """The roof of a product: the faster of the activations' rate and of the operands', where the chip has it."""
        rates = self.chip.peak_flops_per_s
        return max(rates[name] for name in ("bfloat16", "float16", dtype) if name in rates)

    def sizes(self, op: Op) -> dict[str, Any]:
        """Letters of an op with all tokens of the step in B, so that any mix of prompts and decodes is one product."""
        tokens = self.steps.logit_rows if "U" in op.einsum else self.steps.tokens
        return dims(self.config, Step(tokens, 1, 1), op.block)

    def mesh(self, op_name: str) -> tuple[Mesh, float]:
        """Mesh of an op, and the share of the step's rows that one device works on."""
        if self.layout.attention_dp and op_name in ("qkv_proj", "o_proj", "rope", "qk_norm", "input_norm", "unembed"):
            return Mesh(), 1 / self.layout.tp
        return Mesh(tp=self.layout.tp), 1.0

    def product(self, op: Op) -> None:
        sizes, (mesh, share) = self.sizes(op), self.mesh(op.name)
        product, layers = as_product(op.einsum), layers_of(self.config, op.scope)
        rows = size(product.rows, sizes) * share
        n = size(product.columns, sizes) * float(device_fraction(product.columns, self.config, mesh))
        k = size(product.contracted, sizes) * float(device_fraction(product.contracted, self.config, mesh))
        bits = self.layout.weight_bits.get(op.name, 16.0)
        dtype = self.layout.compute_dtype if bits < 16 else "bfloat16"
        dtype = dtype if dtype in self.chip.peak_flops_per_s else "bfloat16"
        running = rows > 0
        rows = self.np.maximum(rows, 1.0)
        self.values["packed_calls"] += float(layers) * (bits < 16) * running
        bias = n * 2.0 if op.name == "qkv_proj" and self.config.qkv_bias else 0.0
        compute = 2.0 * rows * n * k / self.peak(dtype)
        memory = (n * k * bits / 8 + bias) / self.bandwidth
        kernel: dict[str, Any] = {"weight_bits": bits, "dtype": dtype, "rows_apart": self.layout.ways.rows_apart}
        seconds = gemm_s(rows, n, k, chip=self.chip, eff=self.eff, **kernel)
        seconds = self.np.maximum(seconds, self.np.maximum(compute, memory)) * layers * running
        by_memory = memory**2 / (memory**2 + compute**2)
        self.values["products_memory"] += seconds * by_memory
        self.values["products_compute"] += seconds * (1 - by_memory)
        least = self.np.maximum(compute, memory) * layers * running
        self.least["products_memory"] += least * by_memory
        self.least["products_compute"] += least * (1 - by_memory)

    def elementwise(self, op: Op) -> None:
        sizes, (mesh, share) = self.sizes(op), self.mesh(op.name)
        inputs, outputs = op.einsum.split("->")
        operands = inputs.split(",")
        operands = operands[:1] if op.kind == "gather" else operands[: len(operands) - len(op.leaves)]
        elements = sum(
            size(letters, sizes) * float(device_fraction(letters, self.config, mesh))
            for letters in (*operands, *outputs.split(","))
        )
        layers = layers_of(self.config, op.scope)
        seconds = elementwise_s(elements * share * 2.0, chip=self.chip, eff=self.eff) * layers
        self.values["elementwise"] += seconds
        if op.kv_write:
            written = self.steps.tokens * share * self.kv_row_bytes()
            self.least["elementwise"] += written * layers / self.bandwidth
        if op.kind == "gather":
            read = self.steps.tokens * self.config.hidden_size * 2.0 / self.layout.tp
            self.least["elementwise"] += read / self.bandwidth

    def heads(self) -> tuple[float, float, float]:
        """Query heads and KV heads of one device, and its share of the sequences."""
        heads, kv_heads, tp = self.config.num_attention_heads, self.config.num_key_value_heads, self.layout.tp
        if self.layout.attention_dp:
            return float(heads), float(kv_heads), 1 / tp
        return heads / tp, max(1.0, kv_heads / tp), 1.0

    def kv_row_bytes(self) -> float:
        return 2 * self.heads()[1] * self.config.head_dim * self.layout.kv_bytes

    def attention(self) -> None:
        steps, np, ways = self.steps, self.np, self.layout.ways
        both = (steps.decodes > 0) & (steps.prompts > 0)
        for window, layers in Counter(self.config.sliding_windows).items():
            decode_s, decode_least = self.decode_attention(window)
            prompt_s, prompt_least = self.prompt_attention(window)
            if ways.one_attention and both.any():
                decode_s = np.where(both, self.joint_attention_s(window) - prompt_s, decode_s)
            name = "attention_prefill" if ways.flash_attention else "attention_plain"
            self.values[name] += np.maximum(prompt_s, prompt_least) * layers
            self.least[name] += prompt_least * layers
            name = "attention_decode" if ways.flash_attention and ways.flash_decode else "attention_plain_decode"
            self.values[name] += np.maximum(decode_s, decode_least) * layers
            self.least[name] += decode_least * layers

    def attended(self, window: int | None) -> tuple[Any, Any, Any, Any, Any]:
        """Prompts, new tokens of each, tokens that they reach, decodes and their context, with a layer's window."""
        steps, np, share = self.steps, self.np, self.heads()[2]
        context = steps.context if window is None else np.minimum(steps.context, window)
        reached = steps.reached if window is None else np.minimum(steps.reached, steps.chunk + window - 1)
        chunk = np.maximum(steps.chunk, 1)
        prompts, decodes = (np.maximum(rows * share, 1e-9) for rows in (steps.prompts, steps.decodes))
        return prompts, chunk, np.maximum(reached, chunk), decodes, np.maximum(context, 1)

    def attention_sizes(self) -> dict[str, Any]:
        return {"chip": self.chip, "eff": self.eff, "kv_bytes": self.layout.kv_bytes}

    def decode_attention(self, window: int | None) -> tuple[Any, Any]:
        """Seconds and least seconds of one layer's decodes."""
        steps, np, ways = self.steps, self.np, self.layout.ways
        (heads, kv_heads, share), width = self.heads(), self.config.head_dim
        _, _, _, batch, context = self.attended(window)
        stored = heads if ways.repeats_kv or not ways.flash_decode else kv_heads
        seconds = attention_decode_s(batch, context, heads, stored, width, **self.attention_sizes())
        flops = 4.0 * steps.decodes * share * heads * width * context
        moved = steps.decodes * share * context * self.kv_row_bytes()
        if ways.repeats_kv:
            seconds = seconds + 2 * moved / (self.bandwidth * GROWN_FRACTION)
        # Scores and values are two ops to the roofline; each takes half of the FLOPs and of the bytes.
        return seconds * (steps.decodes > 0), np.maximum(flops / self.peak("bfloat16"), moved / self.bandwidth)

    def prompt_attention(self, window: int | None) -> tuple[Any, Any]:
        """Seconds and least seconds of one layer's prompts."""
        steps, np = self.steps, self.np
        (heads, kv_heads, share), width = self.heads(), self.config.head_dim
        prompts, chunk, reached, _, _ = self.attended(window)
        sizes = self.attention_sizes()
        seconds = attention_prefill_s(prompts, chunk, reached, heads, kv_heads, width, **sizes)
        # A few new tokens of each prompt: their query heads share a pass over the cache, as in a decode step.
        passes = np.maximum(1.0, chunk * heads / kv_heads / SHARED_ROWS)
        shared = attention_decode_s(prompts, reached, heads, kv_heads, width, **sizes) * passes
        pairs = steps.chunk * steps.reached - steps.chunk * (steps.chunk - 1) / 2
        if window is not None:
            pairs = _windowed(np, steps.reached, window) - _windowed(np, steps.reached - steps.chunk, window)
        flops = 4.0 * steps.prompts * share * heads * width * pairs
        moved = steps.prompts * share * reached * self.kv_row_bytes()
        least = np.maximum(flops / self.peak("bfloat16"), moved / self.bandwidth)
        return np.minimum(seconds, shared) * (steps.prompts > 0), least

    def joint_attention_s(self, window: int | None) -> Any:
        """Seconds of one layer's prompts and decodes in one kernel."""
        heads, kv_heads, _ = self.heads()
        work = self.attended(window)
        return attention_mixed_s(*work, heads, kv_heads, self.config.head_dim, **self.attention_sizes())

    def experts(self) -> None:
        config, layout, np = self.config, self.layout, self.np
        layers = len(config.sparse_layers)
        if not layers:
            return
        tokens = self.steps.tokens.astype(np.float64)
        counted = layout.experts
        distinct = np.full_like(tokens, counted) if counted else distinct_experts(config, Step(tokens, 1, 1))
        hidden, per_token = float(config.hidden_size), float(config.num_experts_per_tok)
        # Devices share each expert's width, or the experts; the rows of the latter are taken to spread evenly.
        spread = layout.tp if layout.expert_parallel else 1
        width = config.moe_intermediate_size * spread / layout.tp
        rows, here = tokens * per_token / spread, np.maximum(distinct / spread, 1.0)
        bits = layout.weight_bits.get("experts_gate_up_proj", 16.0)
        kernels: dict[str, Any] = {"chip": self.chip, "eff": self.eff, "weight_bits": bits, "rows": rows}
        seconds = moe_s(tokens, hidden, width, per_token, config.num_experts / spread, here, **kernels)
        if layout.ways.fused_experts:
            products: dict[str, Any] = {"chip": self.chip, "eff": self.eff, "weight_bits": bits}
            fused = gemm_s(1.0, 2.0 * width * per_token / spread, hidden, **products)
            fused += gemm_s(1.0, hidden * per_token / spread, width, **products)
            seconds = np.where(tokens <= 1, fused, seconds)
        compute = 6.0 * rows * hidden * width / self.peak(layout.compute_dtype)
        memory = 3.0 * distinct / spread * hidden * width * bits / 8 / self.bandwidth
        # The kernels were measured in 16 bits: what waits for arithmetic is as much faster as narrow operands are.
        by_compute = compute**2 / (memory**2 + compute**2)
        seconds = seconds * (1 - by_compute * (1 - self.peak("bfloat16") / self.peak(layout.compute_dtype)))
        least = np.maximum(compute, memory)
        name = "experts_tuned" if config.num_experts == TUNED_EXPERTS else "experts"
        self.values[name] += np.maximum(seconds, least) * layers
        self.least[name] += least * layers

    def collectives(self) -> None:
        config, tp = self.config, self.layout.tp
        link = self.chip.peer_link
        if tp == 1 or link is None:
            return
        payload = self.steps.tokens * config.hidden_size * 2.0
        logits = self.steps.logit_rows * config.vocab_size * 2.0 * (tp - 1) / tp / link.one_way_bytes_per_s
        calls = 2.0 * config.num_hidden_layers + 1
        if self.layout.attention_dp:
            # A layer's tokens are gathered and their sums scattered: together one all-reduce. Embedding and logits of
            # its own sequences each device has whole.
            logits, calls = 0.0 * logits, 1.0 * config.num_hidden_layers
        one = allreduce_s(payload, tp, chip=self.chip, eff=self.eff)
        share = self.gathered_share()
        one, least = one * share, 2 * (tp - 1) / tp * share * payload / link.one_way_bytes_per_s
        small, large, limit = collective_kinds(link)
        is_large = payload >= limit
        one = self.np.where(is_large, one * (host_share(tp) if large == "collectives_staged" else 1.0), one)
        seconds = self.np.maximum(one, least) * calls
        self.values[small] += seconds * ~is_large + logits
        self.values[large] += seconds * is_large
        self.values["collective_calls"] += calls
        self.least[small] += least * calls * ~is_large + logits
        self.least[large] += least * calls * is_large

    def gathered_share(self) -> float:
        """Bytes that go between the devices for one layer, over those of an all-reduce of 16-bit activations.

        With attention apart, activations are quantised before they are gathered where the experts' products are narrow
        (TensorRT-LLM 1.0, fused_moe_cutlass.py: its gather comes after quantisation); sums are scattered in 16 bits.
        """
        if not self.layout.attention_dp or self.layout.weight_bits.get("experts_gate_up_proj", 16.0) >= 16:
            return 1.0
        return (operand_bytes(self.layout.compute_dtype) + 2.0) / 4.0


def collective_kinds(link: Link) -> tuple[str, str, int]:
    """Kinds of the collectives of small and of large messages over a link, and the size from which on one is large."""
    if link.name == "pcie":
        return "collectives_pcie", "collectives_staged", _STAGED_BYTES
    return "collectives", "collectives_large", _LARGE_BYTES


def host_share(devices: int) -> float:
    """What an all-reduce through the host's memory takes over a ring's time, whose links work side by side.

    A ring moves 2 (n - 1) / n of the payload over each link; the one memory takes n payloads, half as fast as a link
    for two devices. Eight RTX 4090s on one host show it: on 2, 4 and 8 of them, 1, 2 and 3.6 times the time.
    """
    return devices * devices / (4.0 * (devices - 1))


def _windowed(np: Any, positions: Any, window: int) -> Any:
    """Pairs of the first `positions` queries when each sees at most `window` keys."""
    short = np.minimum(positions, window)
    return short * (short + 1) / 2 + (positions - short) * window
