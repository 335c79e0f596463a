"""One published figure as the question it answers: what ran, where, how, and what was timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from qwenjax.config import ModelConfig

Metric = Literal[
    "decode_tok_s",
    "e2e_tok_s",
    "prefill_tok_s",
    "ttft_ms",
    "tpot_ms",
    "throughput_out_tok_s",
    "throughput_total_tok_s",
]
# Of the requests: all equal, those of recorded conversations, or of a benchmark's suite, which limits the outputs.
Lengths = Literal["equal", "recorded", "limited"]
METRICS: Final[tuple[Metric, ...]] = (
    "decode_tok_s",
    "e2e_tok_s",
    "prefill_tok_s",
    "ttft_ms",
    "tpot_ms",
    "throughput_out_tok_s",
    "throughput_total_tok_s",
)
UNBOUNDED: Final = 1 << 20  # saturated by requests whose number isn't stated: every slot is always filled


@dataclass(frozen=True)
class Case:
    """One measured time of a model on an engine and a GPU; lengths are tokens, `measured` is in the metric's unit.

    Engines are lower-case ids: vllm, sglang, tensorrt-llm, lmdeploy, llama.cpp, transformers, gpt-fast, mlc-llm.
    tp shards each layer; pp > 1 puts whole layers on each GPU, which then work one after the other (transformers'
    device_map, llama.cpp's layer split). What a row leaves unsaid has its default here, and is named in `assumed`.
    """

    id: str
    grade: str
    model: str
    config: ModelConfig
    hardware: str
    engine: str
    engine_version: str  # empty: not stated
    weights: str  # weight scheme as the row spells it: BF16, FP16, FP8, AWQ, GPTQ-Int4, Q4_K_M ...
    metric: Metric
    measured: float
    input_len: int  # mean prompt tokens of a request
    output_len: int  # mean generated tokens of a request; 1 or 0 where only the prompt was timed
    concurrency: int = 1  # sequences in flight at most: the batch, the clients, or (saturated) all requests, UNBOUNDED
    saturated: bool = False  # all requests are queued at the start and the engine batches what fits
    lengths: Lengths = "equal"
    requests: int | None = None  # how many requests the run had, where that is known
    kv_dtype: str | None = None  # JAX name; None: as the activations
    tp: int = 1
    pp: int = 1
    ep: int = 1  # experts are spread over this many of the same GPUs instead of being sharded
    attention_dp: bool = False  # attention runs whole on each GPU for its own share of the sequences
    # What the metric means
    counts_prompt: bool = False  # tokens/s count the prompt's tokens too
    time_has_prefill: bool = True  # the time of tokens/s includes the prefill
    empty_context: bool = False  # decode starts from an empty context (llama-bench tg): the prompt isn't attended
    ttft_has_queueing: bool = False  # TTFT includes waiting for other requests' prefills
    per_request: bool = False  # tokens/s of one request among `concurrency`, not of the batch
    prior_len: int = 0  # tokens that are in the cache before the prompt (llama-bench's depth): attended, not timed
    static_batch: bool = False  # all sequences start together, nothing is admitted later
    request_rate_per_s: float | None = None  # Poisson or fixed arrivals; None: closed loop or all at once
    # How the engine was set, where the row says so
    cuda_graphs: bool | None = None  # None: the engine's own default
    torch_compile: bool | None = None
    flash_attention: bool | None = None
    max_num_batched_tokens: int | None = None  # tokens of one step: vLLM's limit, llama.cpp's micro-batch
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None  # TensorRT-LLM and lmdeploy: the cache's share of what is free
    offline: bool = False  # a program runs the engine (vLLM's LLM class), which then takes larger steps than a server
    power_limit_watts: float | None = None
    # Where it comes from, and what to know of it
    source: str = ""
    note: str = ""
    assumed: tuple[str, ...] = ()  # fields that the row doesn't state, with the value taken
    h20_qwen3_table: bool = False  # implies a third of the card's bandwidth, cause unknown: reported apart
    host_bound: bool = False  # the note says that launches or the host set the time
    repeated_token: bool = False  # prompts are one token over and over: alike rows draw less power, go to alike experts

    @property
    def is_rate(self) -> bool:
        """Whether larger is faster: tokens/s rather than milliseconds."""
        return self.metric.endswith("_tok_s")

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp
