"""Rows that rate one kernel: a matrix product, attention of one layer, or the experts of one layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from case_fields import gpu_of, length_of, model_of, weights_of

from qwenjax.errors import InputError
from roofline.weight_schemes import scheme_of

Kind = Literal["gemm", "prefill attention", "decode attention", "experts"]
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class KernelCase:
    """One kernel's rate: `work` over its time is `measured`, in TFLOP/s or GB/s; `sizes` are the kernel's own.

    gemm: m, n, k. Attention: batch, query_len, kv_len, heads, kv_heads, head_dim. experts: tokens, hidden, width,
    per_token, experts.
    """

    id: str
    grade: str
    kind: Kind
    hardware: str
    framework: str
    weights: str
    metric: str
    measured: float
    work: float  # FLOPs or bytes, as the source counts them
    sizes: Mapping[str, int]
    repeated: bool  # the benchmark repeats one call: weights that fit in L2 are read from there
    source: str
    note: str

    @property
    def seconds(self) -> float:
        return self.work / (self.measured * (1e12 if self.metric == "tflops" else 1e9))

    def rate(self, seconds: float) -> float:
        """The row's metric for another time of the same kernel."""
        return self.work / seconds / (1e12 if self.metric == "tflops" else 1e9)


def kernel_case(name: str, grade: str, row: Mapping[str, str], measured: float) -> KernelCase:
    """The kernel that a row of bw_gb_s or tflops rates; raises InputError where its shape isn't told."""
    text, note = row["model"], row["note"]
    weights = weights_of(re.sub(r"\bKV\b", "", row["dtype_or_quant"]))[0]
    scale = 1e12 if row["metric"].strip() == "tflops" else 1e9
    time = re.search(r"(?:measured|median) ([\d.]+) (us|ms|s)\b", note)
    given = measured * scale * float(time[1]) * _SECONDS[time[2]] if time else None
    kind, sizes = _shape(text, note, row)
    work = given if given is not None else _work(kind, sizes, weights, row["metric"].strip())
    return KernelCase(
        name, grade, kind, gpu_of(row["gpu"], row["source"]).id, row["framework"].strip(), weights,
        row["metric"].strip(), measured, work, sizes, _repeats(row), row["source"].strip(), note.strip(),
    )  # fmt: skip


def _repeats(row: Mapping[str, str]) -> bool:
    return "repeated-weight" in row["note"] or "aiconfigurator" in row["source"]


def _shape(text: str, note: str, row: Mapping[str, str]) -> tuple[Kind, dict[str, int]]:
    gemm = re.search(r"GEMM M=(\d+) (?:N=(\d+) K=(\d+)|N=K=(\d+))", f"{text} {note}")
    if gemm:
        n, k = (gemm[2], gemm[3]) if gemm[2] else (gemm[4], gemm[4])
        return "gemm", {"m": int(gemm[1]), "n": int(n), "k": int(k)}
    head = re.search(r"(\d+) x (\d+) \w+ weight bytes", note)
    if "lm_head" in text and head:
        return "gemm", {"m": _batch(row), "n": int(head[1]), "k": int(head[2])}
    if "attention" in text:
        return _attention(text, note, row)
    if "MoE" in text:
        return "experts", {"tokens": _batch(row), **_experts(text)}
    raise InputError("model", text, "names no kernel whose shape is told", "Write for instance GEMM M=1 N=4096 K=4096")


def _batch(row: Mapping[str, str]) -> int:
    cell = row["batch_or_concurrency"].strip()
    if not cell.isdigit() or int(cell) < 1:
        raise InputError("batch_or_concurrency", cell or None, "is not the kernel's number of rows", "Write a count")
    return int(cell)


def _attention(text: str, note: str, row: Mapping[str, str]) -> tuple[Kind, dict[str, int]]:
    heads = re.search(r"(\d+)q/(\d+)kv heads d(\d+)", text)
    if heads:
        sizes = {"heads": int(heads[1]), "kv_heads": int(heads[2]), "head_dim": int(heads[3])}
    else:
        config = model_of(re.sub(r"\s*(prefill|decode)? attention kernel$", "", text))
        sizes = {
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
        }
    length = length_of("input_len", row["input_len"])
    if length is None or length < 1:
        raise InputError("input_len", row["input_len"] or None, "is not the attended length", "Write the tokens")
    chunk = re.search(r"chunk (\d+) on history (\d+)", note)
    query = int(chunk[1]) if chunk else length
    if "decode" in text:
        return "decode attention", {"batch": _batch(row), "query_len": 1, "kv_len": length, **sizes}
    return "prefill attention", {"batch": _batch(row), "query_len": query, "kv_len": length, **sizes}


def _experts(text: str) -> dict[str, int]:
    shape = re.search(r"\((\d+) exp top(\d+), (\d+)x(\d+)\)", text)
    if shape is None:
        raise InputError("model", text, "doesn't tell the experts' shape", "Write (128 exp top8, 2048x768)")
    experts, per_token, hidden, width = map(int, shape.groups())
    return {"hidden": hidden, "width": width, "per_token": per_token, "experts": experts}


def _work(kind: Kind, s: Mapping[str, int], weights: str, metric: str) -> float:
    """FLOPs or bytes of the kernel by the rule of its source, where the row doesn't print the time."""
    if metric == "bw_gb_s":
        if kind == "gemm":
            bits = scheme_of(weights).linear.bits
            return s["n"] * s["k"] * bits / 8 + 2.0 * s["m"] * (s["n"] + s["k"])
        if kind == "experts":
            raise InputError("metric", metric, "needs the experts that were read", "Print the time in the note")
        return 4.0 * s["batch"] * s["kv_len"] * s["kv_heads"] * s["head_dim"]
    if kind == "gemm":
        return 2.0 * s["m"] * s["n"] * s["k"]
    if kind == "experts":
        return 6.0 * s["tokens"] * s["per_token"] * s["hidden"] * s["width"]
    history = s["kv_len"] - s["query_len"]
    return 4.0 * s["batch"] * s["heads"] * s["head_dim"] * s["query_len"] * (history + s["query_len"] / 2)


def kernel_options(case: KernelCase) -> dict[str, Any]:
    """The bits of a stored weight and the type of the products, as the kernel times take them."""
    scheme = scheme_of(case.weights)
    return {"weight_bits": float(scheme.linear.bits), "dtype": scheme.compute[0] if scheme.compute else "bfloat16"}
