"""Which rows each profile is fitted on, how its engine schedules, and what is usual of it where rows don't tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from roofline.hardware import load_hardware
from roofline.timing.case import Case
from roofline.timing.scheduling import Scheduler
from roofline.timing.serving import vllm_v1_scheduler

FREE: Final = (
    "products_memory",
    "products_compute",
    "attention_decode",
    "attention_prefill",
    "attention_plain",
    "attention_plain_decode",
    "experts",
    "experts_tuned",
    "collectives",
    "collectives_pcie",
    "layer_s",
    "prefill_layer_s",
    "step_s",
    "remote_step_s",
    "hop_s",
    "packed_call_s",
    "sequence_s",
    "collectives_large",
    "collectives_staged",
    "collective_call_s",
    "host_layer_s",
    "prefill_host_layer_s",
    "request_s",
)
FAMILIES: Final = {
    "a100": ("a100-80gb-sxm", "a100-40gb-sxm", "a100-80gb-pcie"),
    "h100": ("h100-sxm",),
    "h200": ("h200",),
    "rtx-4090": ("rtx-4090",),
    "rtx-3090": ("rtx-3090",),
    "rtx-3080": ("rtx-3080",),
    "rtx-5070-ti": ("rtx-5070-ti",),
    "rtx-pro-6000": ("rtx-pro-6000", "rtx-pro-6000-server"),
    "l4": ("l4",),
    "a10": ("a10",),
}
# No launch is a CUDA graph's: each layer waits for the host.
_EAGER: Final = Scheduler(1 << 20, mixes=False, captured_context=0, flash_decode=False, remote_workers=True)
_EAGER_SOURCE: Final = (
    "a vLLM of 2023 without CUDA graphs (the source's note) and with its own paged attention; "
    "Ray starts each step of several GPUs"
)


@dataclass(frozen=True)
class Group:
    """An engine's versions on a family of GPUs: the rows of a profile."""

    engine: str
    versions: tuple[str, ...]  # how a row's version begins; empty text: not stated
    family: str
    scheduler: Scheduler
    scheduler_source: str
    usual: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        version = next((text for text in self.versions if text), "")
        return "-".join(part for part in (self.engine, version, self.family) if part)

    @property
    def kin(self) -> str:
        """Groups of the same engine and generation lean to each other's constants."""
        return f"{self.engine} mixing" if self.scheduler.mixes else self.engine

    @property
    def hardware(self) -> tuple[str, ...]:
        return FAMILIES[self.family]

    def takes(self, case: Case) -> bool:
        """Whether a case is one of this profile's rows."""
        if case.engine != self.engine or case.hardware not in self.hardware:
            return False
        parts = re.split(r"[^0-9a-zA-Z]+", case.engine_version)
        return any(parts[: len(text.split("."))] == text.split(".") for text in self.versions)


# Before 0.8 a prompt's layers are launched op by op, and their attention by a longer way than a decode step's.
_V0_USUAL: Final = {"prefill_host_layer_s": (5e-4, 2e-4)}
# The sampler of 2023 went from sequence to sequence in Python, waiting for the device at each.
_2023_USUAL: Final = {**_V0_USUAL, "sequence_s": (3e-5, 1.5e-4)}
_V0: Final = Scheduler(max_num_batched_tokens=32768, max_num_seqs=256, mixes=False)
_V0_SOURCE: Final = "vLLM before 0.8: prompts run before decodes, whole, up to the model length; 256 sequences"
_EARLY: Final = Scheduler(32768, 256, mixes=False, flash_decode=False)
_EARLY_SOURCE: Final = f"{_V0_SOURCE}; decodes by its own paged attention (until vllm-project/vllm pull request 3648)"
_CAPTURED: Final = Scheduler(32768, 256, mixes=False, captured_context=8192, remote_workers=True)
_CAPTURED_SOURCE: Final = (
    f"{_V0_SOURCE}; CUDA graphs up to 8192 tokens of context (max_context_len_to_capture); "
    "Ray starts each step of several GPUs"
)
_V06: Final = Scheduler(32768, 256, mixes=False, long_context=32768, long_chunk=512)
_V06_SOURCE: Final = f"{_V0_SOURCE}; beyond 32768 tokens chunks of 512 (chunked prefill switched on by itself)"
_V1: Final = vllm_v1_scheduler(load_hardware("rtx-4090"))
_V1_SOURCE: Final = (
    "vLLM V1's server: 2048 tokens, 256 sequences a step; prompts join decodes in one kernel; a full pool pauses "
    "the last"
)
_V1_LARGE: Final = vllm_v1_scheduler(load_hardware("rtx-pro-6000"))
_V1_LARGE_SOURCE: Final = _V1_SOURCE.replace("server: 2048 tokens, 256", "server from 70 GiB on: 8192 tokens, 1024")
_V1_FULL_SOURCE: Final = f"{_V1_LARGE_SOURCE}; so on A100s too, as tokens/s times the time of a token (1000) say"
_SGLANG: Final = Scheduler(max_num_batched_tokens=8192, max_num_seqs=1024, mixes=False)
_TRT: Final = Scheduler(max_num_batched_tokens=8192, max_num_seqs=2048, mixes=True, charged_output=1.0)
_TRT_SOURCE: Final = "TensorRT-LLM: max_batch_size 2048, max_num_tokens 8192, a request's whole output reserved"
_TRT_BUILT: Final = Scheduler(49152, 2048, mixes=True, charged_output=1.0, flash_decode=False)
_TRT_BUILT_SOURCE: Final = (
    "TensorRT-LLM before 0.10: an engine is built for as many tokens a step as it sets memory aside for, about 49152 "
    "by which batches of Llama-3 8B and 70B wait on cards of 40 GB; a request's whole output reserved; decodes by its "
    "masked multi-head attention, each query head by itself (XQA was an option)"
)
_LMDEPLOY: Final = Scheduler(max_num_batched_tokens=1 << 20, max_num_seqs=256, mixes=False, last_token_decoded=True)
_LMDEPLOY_SOURCE: Final = (
    "lmdeploy TurboMind: all waiting prompts in one step, 256 sequences; a prompt's last token is the first that is "
    "decoded (LlamaBatch.cc)"
)
_LLAMA: Final = Scheduler(
    max_num_batched_tokens=512, max_num_seqs=256, mixes=False, flash_attention=False, rows_apart=True
)
_LLAMA_SOURCE: Final = "llama.cpp: micro-batches of 512 tokens; up to 8 rows of packed weights one by one"
# llama-bench neither schedules nor samples: a step builds its graph and copies the logits of one token.
_LLAMA_USUAL: Final = {"prefill_host_layer_s": (5e-5, 5e-5), "step_s": (3e-4, 2e-4)}
_LLAMA_2025_SOURCE: Final = f"{_LLAMA_SOURCE}; a build of 2025: decodes as CUDA graphs, prompts by int8 tensor cores"
_COMPILED: Final = {"prefill_host_layer_s": (3e-5, 5e-5)}  # no Python between the launches of a prompt's step
_BATCH: Final = Scheduler(max_num_batched_tokens=1 << 20, max_num_seqs=1024, mixes=False)
_FUSED: Final = replace(_BATCH, fused_experts=True)
_TRANSFORMERS: Final = Scheduler(1 << 20, 1024, mixes=False, captured_context=0, flash_attention=False, repeats_kv=True)
_TRANSFORMERS_USUAL: Final = {"attention_plain_decode": (5.0, 4.0), "step_s": (1e-3, 2e-3)}

GROUPS: Final = (
    Group("vllm", ("2023",), "a100", _EAGER, _EAGER_SOURCE, _2023_USUAL),
    Group("vllm", ("2023",), "h100", _EAGER, _EAGER_SOURCE, _2023_USUAL),
    Group("vllm", ("2024",), "a100", _EARLY, _EARLY_SOURCE, _V0_USUAL),
    Group("vllm", ("0.4", ""), "a100", _CAPTURED, _CAPTURED_SOURCE, _V0_USUAL),
    Group("vllm", ("0.6",), "a100", _V06, _V06_SOURCE, _V0_USUAL),
    Group("vllm", ("0.7",), "a100", _V0, _V0_SOURCE, _V0_USUAL),
    Group("vllm", ("0.7",), "h100", _V0, _V0_SOURCE, _V0_USUAL),
    Group("vllm", ("0.7",), "rtx-4090", _V0, _V0_SOURCE, _V0_USUAL),
    Group("vllm", ("0.7",), "l4", _V0, _V0_SOURCE, _V0_USUAL),
    Group("vllm", ("0.9",), "a100", _V1_LARGE, _V1_FULL_SOURCE),
    Group("vllm", ("0.11", "0.10"), "a100", _V1, _V1_SOURCE),
    Group("vllm", ("0.19", "0.9", "0.10", "0.20"), "rtx-4090", _V1, _V1_SOURCE),
    Group("vllm", ("0.20", "0.23"), "a100", _V1, _V1_SOURCE),
    Group("vllm", ("0.23",), "rtx-5070-ti", _V1, _V1_SOURCE),
    Group("vllm", ("0.27",), "rtx-pro-6000", _V1_LARGE, _V1_LARGE_SOURCE),
    Group("sglang", ("0.5",), "a100", _SGLANG, "SGLang: chunks of 8192 tokens, decodes apart"),
    Group("tensorrt-llm", ("2024",), "a100", _TRT_BUILT, _TRT_BUILT_SOURCE, _COMPILED),
    Group("tensorrt-llm", ("1.2",), "a100", _TRT, _TRT_SOURCE, _COMPILED),
    Group("tensorrt-llm", ("1.0",), "h100", _TRT, _TRT_SOURCE, _COMPILED),
    Group("tensorrt-llm", ("1.0",), "h200", _TRT, _TRT_SOURCE, _COMPILED),
    Group(
        "lmdeploy",
        ("0.2",),
        "a100",
        _LMDEPLOY,
        _LMDEPLOY_SOURCE,
        _COMPILED,
    ),
    Group(
        "lmdeploy",
        ("",),
        "rtx-4090",
        _LMDEPLOY,
        _LMDEPLOY_SOURCE,
        _COMPILED,
    ),
    Group(
        "lmdeploy",
        ("2023",),
        "a10",
        _LMDEPLOY,
        _LMDEPLOY_SOURCE,
        _COMPILED,
    ),
    Group("mlc-llm", ("",), "rtx-4090", _BATCH, "one batch"),
    Group("llm-awq", ("",), "rtx-4090", _BATCH, "one batch"),
    Group("gpt-fast", ("2024", ""), "a100", _FUSED, "one batch; torch.compile with CUDA graphs, gathers fused"),
    Group("llama.cpp", ("2024",), "a100", _LLAMA, _LLAMA_SOURCE, _LLAMA_USUAL),
    Group("llama.cpp", ("2024", ""), "rtx-3090", _LLAMA, _LLAMA_SOURCE, _LLAMA_USUAL),
    Group("llama.cpp", ("2024", ""), "rtx-4090", _LLAMA, _LLAMA_SOURCE, _LLAMA_USUAL),
    Group("llama.cpp", ("2025",), "rtx-3090", _LLAMA, _LLAMA_2025_SOURCE, _LLAMA_USUAL),
    Group("llama.cpp", ("2025",), "rtx-4090", _LLAMA, _LLAMA_2025_SOURCE, _LLAMA_USUAL),
    Group("llama.cpp", ("",), "rtx-3080", _LLAMA, _LLAMA_SOURCE, _LLAMA_USUAL),
    Group(
        "transformers",
        ("4", "PyTorch", ""),
        "a100",
        _TRANSFORMERS,
        "transformers: op by op, one batch",
        _TRANSFORMERS_USUAL,
    ),
)
