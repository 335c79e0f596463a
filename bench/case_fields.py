"""What the texts of a measurement row mean: its GPU, engine, model, weights, batch and lengths.

Sources spell the same thing in many ways. Each function takes a cell and returns the project's own name, together with
what had to be assumed; a cell that can't be used raises InputError.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Final, NamedTuple

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.known_models import known_model_names
from roofline.hardware import known_ids
from roofline.timing.case import UNBOUNDED
from roofline.weight_schemes import WeightScheme, scheme_of

_VENDORS: Final = r"nvidia|geforce|tesla|quadro|amd|instinct|intel|laptop gpu"
# A family's form factor isn't always told. (text that must occur, then the id, then what was assumed)
_GPUS: Final[tuple[tuple[str, str, str], ...]] = (
    (r"a100.*pcie.*40|a100.*40.*pcie", "a100-40gb-sxm", "A100 PCIe 40GB taken as the SXM card, of the same bandwidth"),
    (r"a100.*pcie|pcie.*a100", "a100-80gb-pcie", ""),
    (r"a100.*(\b40 ?g)", "a100-40gb-sxm", ""),
    (r"a100.*80.*(sxm|dgx|azure)|a100.sxm.*80", "a100-80gb-sxm", ""),
    (r"a100", "a100-80gb-sxm", "A100 taken as the 80 GB SXM card"),
    (r"gh200", "gh200", ""),
    (r"h100.*nvl\b", "h100-nvl", ""),
    (r"h100.*pcie", "h100-pcie", ""),
    (r"h100.*(sxm|hbm3|dgx)", "h100-sxm", ""),
    (r"h100", "h100-sxm", "H100 taken as the SXM card"),
    (r"v100.*32", "v100-32gb-sxm", ""),
    (r"v100", "v100-16gb-sxm", "V100 taken as the 16 GB SXM card"),
    (r"rtx pro 6000.*server", "rtx-pro-6000-server", ""),
    (r"rtx pro 6000", "rtx-pro-6000", ""),
    (r"rtx 6000 ada", "rtx-6000-ada", ""),
    (r"rtx a6000|\ba6000", "a6000", ""),
)
# Rows of this source fall off where 40 GB of KV cache would, not 80: Llama-3-8B at 64 x 4096 tokens, 70B on four cards.
_ARGONNE: Final = (
    "a100-40gb-sxm",
    "A100 of argonne-lcf taken as the 40 GB card: throughput falls where 40 GB are full",
)

_ENGINES: Final[tuple[tuple[str, str], ...]] = (
    (r"tensorrt[- ]?llm|\btrt[- ]?llm", "tensorrt-llm"),
    (r"sglang", "sglang"),
    (r"lmdeploy|turbomind", "lmdeploy"),
    (r"llama\.?[- ]?cpp|llama-bench", "llama.cpp"),
    (r"ollama", "llama.cpp"),
    (r"gpt[- ]?fast", "gpt-fast"),
    (r"transformers|hugging ?face|\bhf\b", "transformers"),
    (r"mlc[- ]?llm", "mlc-llm"),
    (r"llm-awq|tinychat", "llm-awq"),
    (r"vllm", "vllm"),
)
ENGINES: Final = tuple(dict.fromkeys(engine for _, engine in _ENGINES))

_MODEL_ALIASES: Final[dict[str, str]] = {
    "llama-7b": "meta-llama/Llama-2-7b-hf",  # GGUF names: Llama 1 and 2 of this size have one shape
    "llama-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-13b": "meta-llama/Llama-2-13b-hf",
    "llama-70b": "meta-llama/Llama-2-70b-hf",
}
_QUANTIZED_NAME: Final = re.compile(
    r"[-_.]?(fp8(-dynamic)?|awq(-int4)?|gptq[-_]?(int[48])?|int[48]|quantized\.\w+|w\d+a\d+|bnb-4bit|nvfp4|gguf)$", re.I
)
_TUNED_NAME: Final = re.compile(r"[-_](hf|chat|instruct|it|v\d+(\.\d+)?)$", re.I)


class Gpu(NamedTuple):
    """The chip's id, a power cap in watts where the row has one, and what was assumed."""

    id: str
    power_limit_watts: float | None
    assumed: tuple[str, ...]


class Batch(NamedTuple):
    """Sequences in flight at most, whether all wait from the start, how many requests, and their rate per second."""

    concurrency: int
    saturated: bool
    requests: int | None
    rate_per_s: float | None


def gpu_of(text: str, source: str = "") -> Gpu:
    """The chip that a `gpu` cell names: `NVIDIA A100-80GB (330 W cap)` is a100-80gb-sxm at 330 W."""
    cap = re.search(r"(\d+(?:\.\d+)?)\s*W\b.*(cap|limit)", text)
    watts = float(cap[1]) if cap else None
    bare = re.sub(r"[\s_-]+", " ", re.sub(_VENDORS, " ", text.lower())).strip()
    if "a100" in bare and source.startswith("argonne-lcf") and not re.search(r"\b[48]0 ?g|pcie|80", bare):
        return Gpu(_ARGONNE[0], watts, (_ARGONNE[1],))
    for pattern, chip, assumed in _GPUS:
        if re.search(pattern, bare):
            return Gpu(chip, watts, (assumed,) if assumed else ())
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)|\b\d+ ?g(i?b)?\b|\bsxm\d?\b|\bpcie\b|\bgpu\b", " ", bare)).strip(
        "-"
    )
    if slug in known_ids():
        return Gpu(slug, watts, ())
    raise InputError("gpu", text, "is not a GPU of the catalogue", "`roofline hardware` lists the known ones")


# The first number of a year among llama.cpp's issues and pull requests, which are counted together; to within a month.
_PULLS_OF_YEARS: Final = ((18500, "2026"), (11000, "2025"), (4700, "2024"))


def engine_of(text: str) -> str:
    """The engine that a `framework` cell names, one of ENGINES."""
    lowered = text.lower()
    for pattern, engine in _ENGINES:
        if re.search(pattern, lowered):
            return engine
    raise InputError("framework", text, "is not a known engine", f"Known: {', '.join(ENGINES)}")


def version_of(text: str, source: str = "") -> str:
    """The version that a `framework_version` cell gives; of a llama.cpp pull request its year; empty where unknown."""
    pull = re.search(r"ggml-org/llama\.cpp#(\d+)", source)
    if pull and re.match(r"\s*see pr\b", text, re.I):
        return next((year for first, year in _PULLS_OF_YEARS if int(pull[1]) >= first), "2023")
    unsaid = re.match(r"\s*(not (stated|in excerpt|in csv)|see pr|unknown|n/?a\b)", text, re.I)
    return "" if unsaid else re.sub(r"\s*\((not in CSV|build not in table)\)", "", text, flags=re.I).strip()


@cache
def model_of(text: str) -> ModelConfig:
    """The unquantised config of the model that a `model` cell names; how its weights are stored is another column."""
    name = re.sub(r"\s*\(.*\)\s*$", "", text.strip())
    name = _MODEL_ALIASES.get(name.lower(), name)
    for candidate in _candidates(name):
        if candidate.lower() in _known_models():
            return replace(ModelConfig.from_hf(candidate), quantization=None)
    raise InputError("model", text, "is not a known model", "`roofline models` lists the known ones")


def checkpoint_scheme(text: str) -> WeightScheme | None:
    """How a published quantised checkpoint of exactly this name stores its weights; None where it isn't known."""
    name = text.strip().rpartition("/")[2]
    if name.lower() not in _known_models():
        return None
    stored = ModelConfig.from_hf(name).quantization
    return None if stored is None else scheme_of(stored)


@cache
def _known_models() -> frozenset[str]:
    """Names without their owners, in lower case."""
    return frozenset(name.rpartition("/")[2].lower() for name in known_model_names(runnable=False))


def _candidates(name: str) -> list[str]:
    """Names to try, the nearest first: without the words of quantisation, then without those of tuning."""
    if not re.match(r"[\w.-]+(/[\w.-]+)?$", name) or name.startswith("."):
        return []
    short = name.rpartition("/")[2]
    plain = _QUANTIZED_NAME.sub("", _QUANTIZED_NAME.sub("", short))
    names = [plain]
    while _TUNED_NAME.search(names[-1]):
        names.append(_TUNED_NAME.sub("", names[-1]))
    found = [variant for tried in names for variant in (tried, f"{tried}-Instruct", f"{tried}-hf", f"{tried}-Chat")]
    found += [tried.replace("Meta-Llama", "Llama") for tried in found if "Meta-" in tried]
    found += [tried.replace("Llama-3", "Meta-Llama-3") for tried in found if tried.startswith("Llama-3")]
    return list(dict.fromkeys(found))


def weights_of(text: str) -> tuple[str, str | None, tuple[str, ...]]:
    """The weight scheme that a `dtype_or_quant` cell names, the KV cache's dtype where it says one, and assumptions."""
    kv = re.search(r"(fp8|int8|bf16|fp16)[\w ]*\bkv\b", text, re.I)
    kv_dtype = {"fp8": "float8_e4m3fn", "int8": "int8", "bf16": None, "fp16": None}[kv[1].lower()] if kv else None
    weights = text
    if kv:
        weights = re.sub(r"[,+/]?\s*(fp8|int8|bf16|fp16)[\w ]*\bkv\b", "", weights, flags=re.I)
    weights = re.sub(r"\s*\((?![^)]*(int|bit)).*?\)|\bweights\b|\bdense\b", "", weights, flags=re.I).strip(" ,+")
    assumed: tuple[str, ...] = ()
    if weights.upper() in ("FP16/BF16", "BF16/FP16"):
        weights = "BF16"
    if not weights:
        weights, assumed = "BF16", ("weights = BF16, not stated",)
    try:
        scheme_of(weights)
    except InputError as error:
        raise InputError("dtype_or_quant", text, error.problem, error.remedy) from None
    return weights, kv_dtype, assumed


def batch_of(text: str) -> Batch:
    """What a `batch_or_concurrency` cell says: `16`, `inf (1000 at once)`, `offline(100)`, `300 req @10/s`."""
    cell = text.strip()
    if re.fullmatch(r"\d+(\.0+)?", cell) and int(float(cell)) > 0:
        return Batch(int(float(cell)), False, None, None)
    rate = re.search(r"(\d+)\s*req\w*\s*@\s*([\d.]+)\s*/\s*s", cell)
    if rate:
        return Batch(int(rate[1]), False, int(rate[1]), float(rate[2]))
    if re.match(r"(inf|offline|max|all|saturated|unlimited)\b", cell, re.I):
        number = re.search(r"(?<![\w.])(\d+)", cell.split("max_num_seqs")[0])
        requests = int(number[1]) if number else None
        return Batch(requests or UNBOUNDED, True, requests, None)
    problem = "is not stated" if not cell or "not" in cell.lower() else "is not one number of sequences"
    remedy = "Write a count, `inf (N at once)`, `offline(N)` or `N req @R/s`"
    raise InputError("batch_or_concurrency", text or None, problem, remedy)


def length_of(field: str, text: str) -> int | None:
    """Mean tokens of an `input_len` or `output_len` cell; None where it is empty or says that it isn't stated."""
    cell = text.strip().lower().replace(",", "")
    if not cell or cell.startswith(("not ", "n/a", "unknown")):
        return None
    try:
        tokens = round(float(cell.lstrip("~")))
    except (ValueError, OverflowError):
        raise InputError(field, text, "is not one number of tokens", "Write the mean length") from None
    if tokens < 0 or tokens > 10**8:
        raise InputError(field, text, "is not a number of tokens that can be", "Write the mean length")
    return tokens


def positive(field: str, text: str) -> float:
    """A number above 0, as values and counts of GPUs are."""
    try:
        number = float(text.strip().replace(",", "").lstrip("~"))
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise InputError(field, text or None, "is not a number above 0", "Write the figure as the source prints it")
    return number
