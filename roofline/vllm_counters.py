"""vLLM's own estimates of FLOPs and bytes (its /metrics counters), and what they would be with their gaps closed.

The counters `vllm:estimated_flops_per_gpu_total`, `..._read_bytes_per_gpu_total` and `..._write_bytes_per_gpu_total`
are analytic: config and scheduler output, nothing measured. `counter_terms` follows the definitions of vLLM 0.26 and
0.27 (vllm/v1/metrics/perf.py): a prefill chunk attends its whole square, every step reads the output head, a chunk
that doesn't end its prompt still pays for logits, experts are charged min(tokens x k, E), and the shared expert, the
router, norms, biases and RoPE aren't there. `corrected_terms` keeps what they count and repairs what they miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, dims
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh, check_mesh
from roofline.count import distinct_experts, dtype_bits

ACTIVATION_BYTES = 2  # vLLM's own constant, whatever the dtype
# Bytes of a linear layer's weight by quant_method, scales left out; GPTQ of 8 bits is charged as 4, as vLLM does.
_WEIGHT_BYTES = {"fp8": 1.0, "gptq": 0.5, "awq": 0.5, "NVFP4": 0.5, "FP8": 1.0}


class Account(NamedTuple):
    """FLOPs (two for each multiply-add), and bytes read and written, of one part of the model on one GPU."""

    flops: float
    read_bytes: float
    write_bytes: float

    def plus(self, other: Account) -> Account:
        return Account(*(a + b for a, b in zip(self, other, strict=True)))


class Span(NamedTuple):
    """Neighbouring positions start..end (end excluded) that some requests computed, in any number of steps."""

    start: int
    end: int
    requests: int


@dataclass(frozen=True)
class Work:
    """What an engine scheduled over some steps, as vLLM's counters sum it, and the spans that it stands for."""

    prefill_requests: int = 0  # chunks, each of a request and a step: all but single later tokens
    prefill_tokens: int = 0
    prefill_context: int = 0  # attended lengths of the chunks, summed
    prefill_products: int = 0  # tokens x attended length of each chunk, summed
    decode_tokens: int = 0
    decode_context: int = 0
    sampled: int = 0  # tokens that were sampled: positions whose logits somebody reads
    spans: tuple[Span, ...] = ()
    steps: tuple[tuple[float, float], ...] = ()  # (tokens of a step, how many such steps)

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    @property
    def num_steps(self) -> float:
        return sum(count for _, count in self.steps)

    def pairs(self, window: int | None = None) -> int:
        """Query-key pairs under the causal mask, and a sliding window if there is one."""
        return sum(
            span.requests * (_causal_pairs(span.end, window) - _causal_pairs(span.start, window)) for span in self.spans
        )

    def plus(self, other: Work) -> Work:
        names = [name for name in self.__dataclass_fields__ if name not in ("spans", "steps")]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Work(**sums, spans=(*self.spans, *other.spans), steps=(*self.steps, *other.steps))


def request_work(
    prompt: int, output: int, *, count: int = 1, chunk: int | None = None, cached: int = 0, batch: int = 1
) -> Work:
    """The work of `count` equal requests: prompts one after the other in chunks, then decode steps of `batch` requests.

    The prompt's last position samples the first output token; the last one is never fed back. `cached` tokens of each
    prompt come from a prefix cache. Which requests share a step changes the bytes of weights, nothing else.
    """
    _check_lengths(prompt, output, cached, chunk, batch)
    chunks = list(_chunks(prompt, chunk or prompt, cached))
    # A later single token of a prompt counts as decode.
    prefill = [(new, end) for new, end in chunks if new > 1 or end == cached + 1]
    single = [end for new, end in chunks if new == 1 and end != cached + 1]
    fed_back = output - 1
    contexts = sum(single) + fed_back * prompt + fed_back * (fed_back + 1) // 2
    together = min(batch, count)
    decodes = ((together, count * fed_back / together),) if fed_back else ()
    return Work(
        prefill_requests=count * len(prefill),
        prefill_tokens=count * sum(new for new, _ in prefill),
        prefill_context=count * sum(end for _, end in prefill),
        prefill_products=count * sum(new * end for new, end in prefill),
        decode_tokens=count * (len(single) + fed_back),
        decode_context=count * contexts,
        sampled=count * output,
        spans=(Span(cached, prompt + output - 1, count),),
        steps=(*((new, count * times) for new, times in Counter(new for new, _ in chunks).items()), *decodes),
    )


def _chunks(prompt: int, chunk: int, cached: int) -> Iterator[tuple[int, int]]:
    """New tokens of each step of a prompt, and where it then ends."""
    start = cached
    while start < prompt:
        new = min(chunk, prompt - start)
        start += new
        yield new, start


def mean_work(
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    *,
    chunk: int | None = None,
    steps: float | None = None,
    cached_tokens: int = 0,
) -> Work:
    """The work of requests whose lengths are known only in sum: as equal as whole tokens allow.

    `steps` is the number of engine steps, where it was counted; without it, decode steps of one request each. Tokens
    from a prefix cache are spread over all requests.
    """
    long_prompts, long_outputs = prompt_tokens % requests, output_tokens % requests
    work, done = Work(), 0
    for until in sorted({long_prompts, long_outputs, requests}):
        if until > done:
            prompt = prompt_tokens // requests + (done < long_prompts)
            output = output_tokens // requests + (done < long_outputs)
            cached = min(cached_tokens // requests, prompt - 1)
            group = request_work(prompt, output, count=until - done, chunk=chunk, cached=cached)
            work, done = work.plus(group), until
    return work if steps is None else _in_steps(work, steps)


def _in_steps(work: Work, steps: float) -> Work:
    """The same tokens over the counted number of steps, evenly."""
    fields = {name: getattr(work, name) for name in work.__dataclass_fields__}
    return Work(**{**fields, "steps": ((work.tokens / steps, steps),) if steps else ()})


def _causal_pairs(positions: int, window: int | None) -> int:
    short = positions if window is None else min(positions, window)
    return short * (short + 1) // 2 + (positions - short) * (window or 0)


def _check_lengths(prompt: int, output: int, cached: int, chunk: int | None, batch: int) -> None:
    values = {"prompt": prompt, "output": output, "chunk": 1 if chunk is None else chunk, "batch": batch}
    for name, value in values.items():
        if value < 1:
            raise InputError(name, value, "must be at least 1", "Give a count of tokens or requests.")
    if not 0 <= cached < prompt:
        raise InputError("cached", cached, f"must be from 0 to {prompt - 1}", "The prompt's last token is computed.")


class _Sizes(NamedTuple):
    """Sizes on one GPU, divided as vLLM divides them, and bytes of an element."""

    layers: int
    hidden: int
    query: int  # query heads x head dimension
    kv: int  # KV heads x head dimension
    mlp: int
    expert: int
    shared: int
    vocab: int
    weight_bytes: float
    head_bytes: float
    kv_bytes: float


def _sizes(config: ModelConfig, tp: int, kv_dtype: str, dtype: str) -> _Sizes:
    check_mesh(config, Mesh(tp))
    letters = dims(config)
    shared = dims(config, block="shared_expert")["F"]
    quantization = config.quantization
    plain = dtype_bits(dtype) / 8
    narrow = plain
    if quantization is not None:
        narrow = _WEIGHT_BYTES[quantization.algorithm or quantization.method]
    return _Sizes(
        layers=letters["L"],
        hidden=letters["D"],
        query=max(1, letters["N"] // tp) * letters["H"],
        kv=max(1, letters["K"] // tp) * letters["H"],
        mlp=letters["F"] // tp,
        expert=dims(config, block="experts")["F"] // tp,
        shared=shared // tp,
        vocab=letters["V"] // tp,
        weight_bytes=narrow,
        head_bytes=plain,
        kv_bytes=dtype_bits(kv_dtype, "kv_dtype") / 8,
    )


def counter_terms(
    config: ModelConfig, work: Work, *, tp: int = 1, kv_dtype: str = "bfloat16", dtype: str = "bfloat16"
) -> dict[str, Account]:
    """vLLM's own count of some work on one GPU of `tp`, by part of the model: its three counters are the sums.

    FLOPs and bytes; vllm/v1/metrics/perf.py of 0.26 and 0.27. Pipeline and expert parallelism are left out.
    """
    s = _sizes(config, tp, kv_dtype, dtype)
    attention_flops = 4 * s.query * (work.prefill_products + work.decode_context) * s.layers
    terms = _attention(s, work, attention_flops)
    if config.is_moe:
        chosen, total = config.num_experts_per_tok, config.num_experts
        # Every layer is taken for a sparse one; experts as many as tokens could choose.
        experts: float = sum(min(tokens * chosen, total) * count for tokens, count in work.steps)
        terms["experts"] = _swiglu(s, work.tokens * chosen, s.expert, experts, s.layers)
    else:
        terms["mlp"] = _swiglu(s, work.tokens, s.mlp, work.num_steps, s.layers)
    terms["unembed"] = _unembed(s, work.prefill_requests + work.decode_tokens, work.num_steps)
    return terms


def corrected_terms(
    config: ModelConfig, work: Work, *, tp: int = 1, kv_dtype: str = "bfloat16", dtype: str = "bfloat16"
) -> dict[str, Account]:
    """The same count of what a step must do: causal pairs, sampled logits, distinct experts, shared expert, router.

    FLOPs and bytes on one GPU. Experts are those expected under uniform routing; sliding windows and dense layers of a
    mixture are counted as the config says. Norms, biases, RoPE and the embedding's rows stay out, as in the counters.
    """
    s = _sizes(config, tp, kv_dtype, dtype)
    pairs = sum(work.pairs(window) for window in config.sliding_windows)  # one entry for each layer
    terms = _attention(s, work, 4 * s.query * pairs)
    sparse = len(config.sparse_layers)
    if s.layers > sparse:
        terms["mlp"] = _swiglu(s, work.tokens, s.mlp, work.num_steps, s.layers - sparse)
    if sparse:
        terms |= _sparse_layers(config, s, work, sparse)
    terms["unembed"] = _unembed(s, work.sampled, work.num_steps)
    return terms


def _sparse_layers(config: ModelConfig, s: _Sizes, work: Work, layers: int) -> dict[str, Account]:
    chosen, total = config.num_experts_per_tok, config.num_experts
    experts: float = sum(distinct_experts(config, Step(1, tokens, tokens)) * count for tokens, count in work.steps)
    terms = {"experts": _swiglu(s, work.tokens * chosen, s.expert, experts, layers)}
    terms["router"] = _product(s, work.tokens, s.hidden, total, work.num_steps, layers, s.head_bytes)
    if s.shared:
        terms["shared_expert"] = _swiglu(s, work.tokens, s.shared, work.num_steps, layers)
        terms["shared_expert_gate"] = _product(s, work.tokens, s.hidden, 1, work.num_steps, layers, s.head_bytes)
    return terms


def _attention(s: _Sizes, work: Work, attention_flops: float) -> dict[str, Account]:
    fused = s.query + 2 * s.kv
    read: float = work.tokens * s.query * ACTIVATION_BYTES
    # Keys and values of a chunk count as activations, of a decode step as cache.
    read += 2 * s.kv * (work.prefill_context * ACTIVATION_BYTES + work.decode_context * s.kv_bytes)
    write = 2 * work.tokens * s.kv * s.kv_bytes
    return {
        "qkv_proj": _product(s, work.tokens, s.hidden, fused, work.num_steps, s.layers, s.weight_bytes),
        "attention": Account(attention_flops, read * s.layers, write * s.layers),
        "o_proj": _product(s, work.tokens, s.query, s.hidden, work.num_steps, s.layers, s.weight_bytes),
    }


def _product(s: _Sizes, rows: float, into: int, out: int, reads: float, layers: int, weight_bytes: float) -> Account:
    """A matrix product of `rows` rows whose weights are read `reads` times."""
    read = rows * into * ACTIVATION_BYTES + reads * into * out * weight_bytes
    return Account(2 * rows * into * out * layers, read * layers, rows * out * ACTIVATION_BYTES * layers)


def _swiglu(s: _Sizes, rows: float, width: int, reads: float, layers: int) -> Account:
    """Gate and up, SiLU and the product, down: three matrices, unfused between them."""
    read = rows * (s.hidden + 3 * width) * ACTIVATION_BYTES + reads * 3 * s.hidden * width * s.weight_bytes
    write = rows * (3 * width + s.hidden) * ACTIVATION_BYTES
    return Account(6 * rows * s.hidden * width * layers, read * layers, write * layers)


def _unembed(s: _Sizes, rows: int, reads: float) -> Account:
    return _product(s, rows, s.hidden, s.vocab, reads, 1, s.head_bytes)


def total_of(terms: dict[str, Account] | Iterable[Account]) -> Account:
    """The sum over the parts of the model."""
    total = Account(0, 0, 0)
    for account in terms.values() if isinstance(terms, dict) else terms:
        total = total.plus(account)
    return total
