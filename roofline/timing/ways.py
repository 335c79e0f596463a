"""Which kernels an engine has and how it launches them: facts of its code, not constants that are fitted."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How an engine runs a step that is set; the defaults are those of engines with flash attention and CUDA graphs."""

    captured_context: float = math.inf  # decode steps that attend more are launched op by op, not as CUDA graphs
    flash_attention: bool = True  # else a prompt's scores are written out
    flash_decode: bool = True  # else each query head of a decode step reads the keys by itself, without tensor cores
    one_attention: bool = False  # prompts and the decodes that they join run in one attention kernel
    repeats_kv: bool = False  # a decode step copies the cache to add its token, and then for each query head
    fused_experts: bool = False  # one token's experts are one product, compiled with the gather of their weights
    rows_apart: bool = False  # a few rows are multiplied with packed weights one by one, without tensor cores
    remote_workers: bool = False  # each step is a remote call to the processes of the other devices
    last_token_decoded: bool = False  # a prompt's last token goes through a decode step, which makes the first token
