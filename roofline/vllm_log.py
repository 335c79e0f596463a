"""What a vLLM startup log says of memory, in the wording of versions 0.4 to 0.3x, from files as people keep them.

Every line is searched alone, so prefixes (dates, `(Worker_TP0 pid=611)`, container names), colours and wrapped messages
don't matter. A file may hold several ranks, several engines and several starts; the last start counts. A number is
kept with its line and its rank, nothing is guessed: what a log doesn't say is in `missing`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from qwenjax.errors import InputError

GIB: Final = 2**30
LARGEST_LOG_BYTES: Final = 256 * 2**20
_NUMBER = r"(-?[\d,]+(?:\.\d+)?)"
_SIZE = rf"{_NUMBER}\s*Gi?B"  # early versions print GB and mean 2**30

# Field -> wordings, newest first. A field ending in `_bytes` is a printed number of GiB.
_WORDINGS: Final[dict[str, tuple[str, ...]]] = {
    "total_bytes": (
        rf"free memory on device[^(]*\([\d.,]+/{_NUMBER} GiB\)",
        rf"total_gpu_memory\s+\(?{_SIZE}",
    ),
    "free_bytes": (rf"free memory on device[^(]*\({_NUMBER}/[\d.,]+ GiB\)", rf"Initial free memory:? {_SIZE}"),
    "gpu_memory_utilization": (
        rf"desired GPU memory utilization (?:is )?\({_NUMBER},",
        r"current --gpu-memory-utilization=([\d.]+)",
        rf"gpu_memory_utilization\s+\(?{_NUMBER}",
        r"gpu_memory_utilization['\"]?\s*[:=]\s*([\d.]+)",
        r"--gpu-memory-utilization[ =]([\d.]+)",
    ),
    "budget_bytes": (
        rf"desired GPU memory utilization (?:is )?\([\d.]+, {_SIZE}\)",
        rf"gpu_memory_utilization \([\d.]+\)\s*=\s*{_SIZE}",
        rf"Requested memory: [\d.]+ \(util\), {_SIZE}",
        rf"vLLM instance can use\s+{_SIZE}",
    ),
    "weight_bytes": (
        rf"usage(?: is|:) {_SIZE} for weights?\b",
        rf"model loading took {_SIZE}",
        rf"loading model weights took {_SIZE}",
        rf"model weights takes?\s+{_SIZE}",
        rf"weights memory: {_SIZE}",
    ),
    "consumed_bytes": (
        rf"{_SIZE} (?:for )?(?:consumed memory )?\(?weights? (?:\+|and) non-torch",
        rf"total consumed \(from mem_get_info\): {_SIZE}",
        rf"weights? (?:\+|and) non-torch(?: memory)?[^\d\n-]{{0,20}}{_SIZE}",
    ),
    "non_torch_bytes": (
        rf"{_SIZE} for non-torch memory",
        rf"non_torch_memory\s+(?:takes )?{_SIZE}",
        rf"non-torch forward increase memory: {_SIZE}",
    ),
    "activation_bytes": (
        rf"{_SIZE} for peak activation",
        rf"pytorch activation peak memory\s+(?:takes )?{_SIZE}",
        rf"torch peak memory increase: {_SIZE}",
        rf"peak activation(?: memory)?[^\d\n-]{{0,20}}{_SIZE}",
    ),
    "graph_bytes": (
        rf"CUDA graph pool memory: {_SIZE} \(actual\)",
        rf"{_SIZE} for CUDA ?Graph memory",
        rf"graph capturing finished in [\d.]+ secs?, took {_SIZE}",
        rf"CUDA ?graph(?: memory)?[^\d\n(-]{{0,20}}{_SIZE}(?! total)",
    ),
    "graph_estimate_bytes": (
        rf"estimated CUDA graph memory: {_SIZE}",
        rf"CUDA graph pool memory: [\d.]+ GiB \(actual\), {_SIZE} \(estimated\)",
    ),
    "kv_pool_bytes": (
        rf"available KV cache memory[:\s]+{_SIZE}",
        rf"current kv cache memory in use is {_SIZE}",
        rf"reserved for KV Cache is {_SIZE}",
        rf"available_kv_cache_memory\s+{_SIZE}",
    ),
    "gpu_blocks": (
        r"# (?:GPU|CUDA) blocks: ([\d,]+)",
        r"can allocate ([\d,]+) GPU blocks",
        r"num_gpu_blocks is: ([\d,]+)",
    ),
    "kv_tokens": (r"GPU KV cache size[:\s]+([\d,]+) tokens",),
    "concurrency_len": (r"maximum concurrency for ([\d,]+) tokens per request",),
    "concurrency": (r"maximum concurrency for [\d,]+ tokens per request: ([\d.,]+)x",),
    "max_model_len": (
        r"\bmax_seq_len=(\d+)",
        r"using max model len (\d+)",
        r"max_model_len['\"]?\s*[:=]\s*(\d+)",
        r"--max-model-len[ =](\d+)\b",
    ),
    "max_num_batched_tokens": (
        r"max_num_batched_tokens['\"]?\s*[:=]\s*(\d+)",
        r"--max-num-batched-tokens[ =](\d+)\b",
    ),
    "max_num_seqs": (r"max_num_seqs['\"]?\s*[:=]\s*(\d+)", r"--max-num-seqs[ =](\d+)\b"),
    "tp": (r"tensor_parallel_size['\"]?\s*[:=]\s*(\d+)", r"--tensor-parallel-size[ =](\d+)\b"),
    "pp": (r"pipeline_parallel_size['\"]?\s*[:=]\s*(\d+)", r"--pipeline-parallel-size[ =](\d+)\b"),
}
_TEXTS: Final[dict[str, tuple[str, ...]]] = {
    "version": (
        r"vLLM API server version v?(\d[\w.+]*)",
        r"LLM engine \(v(\d[\w.+]*)\)",
        r"\bvllm(?:==| )v?(\d+\.\d+[\w.]*)",
    ),
    "model": (r"LLM engine .*?\bmodel='([^']+)'", r"starting to load model ([^\s.]\S*?)(?:\.\.\.|\s|$)"),
    "kv_cache_dtype": (r"kv_cache_dtype=['\"]?(\w+)",),
    "quantization": (r"\bquantization=['\"]?([\w-]+)",),
    "enforce_eager": (r"enforce_eager['\"]?\s*[:=]\s*(True|False)",),
    "enable_expert_parallel": (r"enable_expert_parallel['\"]?\s*[:=]\s*(True|False)",),
    # The V1 engine has two runners, so its name says nothing of them.
    "runner": (r"Using (V2) Model Runner", r"initializing an? (V0) LLM engine"),
}
_WHOLE = (
    "gpu_blocks",
    "kv_tokens",
    "concurrency_len",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "tp",
    "pp",
)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_RANK = re.compile(
    r"\((?:Ray)?(?:Vllm)?Worker(?:Wrapper|Process)?(?:_(?P<name>\w+))?(?: rank=(?P<rank>\d+))?[^)]*\)"
    r"|\[rank(?P<torch>\d+)\]"
)
_ENGINE = re.compile(r"\(EngineCore_?(?P<engine>DP\d+)?[^)]*\)")
_START = re.compile(r"vLLM API server version|initializing an? (?:V\d )?LLM engine", re.IGNORECASE)
# Every wording above has one of these; a server's log is long, and few of its lines do.
_HINTS = (
    "gib", "gb", "blocks", "kv cache size", "concurrency for", "utilization", "num_batched", "num-batched", "num_seqs",
    "num-seqs", "model len", "model_len", "model-len", "max_seq_len", "parallel", "version", "vllm", "llm engine",
    "starting to load", "kv_cache_dtype", "quantization", "enforce_eager", "model runner", "kv_cache_memory",
)  # fmt: skip
_PATTERNS = {
    field: tuple(re.compile(wording, re.IGNORECASE) for wording in wordings)
    for field, wordings in {**_WORDINGS, **_TEXTS}.items()
}
# What a memory account needs; a log that has none of these isn't one of vLLM's startup.
ESSENTIAL: Final = ("weight_bytes", "activation_bytes", "kv_pool_bytes", "kv_tokens", "concurrency")
_NAMES: Final = {
    "weight_bytes": "the size of the weights",
    "activation_bytes": "the peak of activations",
    "kv_pool_bytes": "the memory of the KV cache",
    "kv_tokens": "the KV cache's tokens",
    "concurrency": "the maximum concurrency",
    "total_bytes": "the device's total memory",
    "gpu_memory_utilization": "gpu_memory_utilization",
}


class Reading(NamedTuple):
    """One number as one line says it: bytes, tokens or a plain number, how finely it was printed, line and rank."""

    value: float
    step: float  # of the last printed digit, in the value's unit: the true number is within half of it
    line: int
    rank: str
    wording: int  # which of the field's wordings it was: the first are the most exact


class Conflict(NamedTuple):
    """Lines of one rank that say different numbers for the same thing; the last is taken."""

    field: str
    first: Reading
    last: Reading


@dataclass(frozen=True)
class StartupLog:
    """The numbers of one start of an engine; `readings` has every line that said one."""

    path: str
    readings: dict[str, tuple[Reading, ...]]
    texts: dict[str, str]
    starts: int
    conflicts: tuple[Conflict, ...]

    def get(self, field: str) -> Reading | None:
        """The number of a field: over ranks the least pool, which all must obey, and the largest of everything else."""
        found = self.readings.get(field, ())
        if not found:
            return None
        best = min(reading.wording for reading in found)
        last = {reading.rank: reading for reading in found if reading.wording == best}.values()
        least = field in ("kv_pool_bytes", "kv_tokens", "gpu_blocks", "free_bytes", "total_bytes", "concurrency")
        return (min if least else max)(last, key=lambda reading: reading.value)

    def value(self, field: str) -> float | None:
        reading = self.get(field)
        return None if reading is None else reading.value

    def whole(self, field: str) -> int | None:
        value = self.value(field)
        return None if value is None else int(value)

    @property
    def ranks(self) -> tuple[str, ...]:
        """Ranks and engines that said something of memory, in order of appearance."""
        names = ("weight_bytes", "kv_pool_bytes", "activation_bytes", "consumed_bytes")
        found = {reading.rank for name in names for reading in self.readings.get(name, ())}
        return tuple(sorted(found - {""}))

    @property
    def least_ranks(self) -> int:
        """Devices of one engine as far as the ranks' names tell it: up to the highest, and to a power of two."""
        found = (
            re.match(r"TP(\d+)|rank (\d+)", rank) for readings in self.readings.values() for *_, rank, _ in readings
        )
        highest = max((int(match[1] or match[2]) for match in found if match), default=0)
        return int(2 ** highest.bit_length())

    @property
    def missing(self) -> tuple[str, ...]:
        """In words, what a full account needs and this log doesn't say."""
        told = set(self.readings) | ({"kv_tokens"} if "gpu_blocks" in self.readings else set())
        return tuple(words for field, words in _NAMES.items() if field not in told)


def load_startup_log(path: str | Path) -> StartupLog:
    """Reads a vLLM startup log; raises InputError where the file can't be read or isn't one."""
    return read_startup_log(read_text("--vllm-log", path), str(path))


def read_text(option: str, path: str | Path) -> str:
    """The text of a file that an option names; raises InputError with the option and the path."""
    shown = f"{option} {path}"
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(shown, None, f"can't be read: {error.strerror}", "Give the path of a text file.") from None
    if len(content) > LARGEST_LOG_BYTES:
        raise InputError(shown, None, f"is larger than {LARGEST_LOG_BYTES >> 20} MiB", "Cut it to the startup.")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):  # as Windows shells redirect
        return content.decode("utf-16", "replace")
    if b"\0" in content:
        raise InputError(shown, None, "is not a text file", "Give the text that vLLM wrote.")
    return content.decode("utf-8-sig", "replace")


def read_startup_log(text: str, path: str = "the log") -> StartupLog:
    """Reads the text of a log; raises InputError where no line is one of vLLM's about memory."""
    lines = [line if _is_hinted(line) else "" for line in _ANSI.sub("", text).splitlines()]
    starts = _firsts(lines)
    begin = _last_start(lines, starts)
    readings: dict[str, list[Reading]] = {}
    texts: dict[str, str] = {}
    for number, line in enumerate(lines):
        if not line:
            continue
        for field, reading in _readings(line, number + 1):
            if number >= begin:
                readings.setdefault(field, []).append(reading)
        for field in _TEXTS:
            match = next((found for pattern in _PATTERNS[field] if (found := pattern.search(line))), None)
            if match and number >= begin:
                texts[field] = match[1].removesuffix(".")
    if not any(field in readings for field in (*ESSENTIAL, "consumed_bytes", "gpu_blocks")):
        raise InputError(
            f"--vllm-log {path}",
            None,
            "has no line of a vLLM startup about memory",
            "Give what vLLM wrote while it started, with lines such as `Available KV cache memory` or `# GPU blocks`.",
        )
    kept = {field: tuple(found) for field, found in readings.items()}
    return StartupLog(path, kept, texts, max(1, len(starts)), tuple(_conflicts(kept)))


def _is_hinted(line: str) -> bool:
    lower = line.lower()
    return any(hint in lower for hint in _HINTS)


def _firsts(lines: list[str]) -> list[int]:
    """Lines where a start begins; an engine's line right after its API server's belongs to the same one."""
    firsts: list[int] = []
    told = True  # whether memory was told of since the last start
    for number, line in enumerate(lines):
        if _START.search(line) and told:
            firsts.append(number)
            told = False
        told = told or _tells(line)
    return firsts


def _last_start(lines: list[str], starts: list[int]) -> int:
    """The line where the last start begins that got as far as its memory; what precedes the first belongs to it."""
    return next((begin for begin in reversed(starts[1:]) if any(map(_tells, lines[begin:]))), 0)


def _tells(line: str) -> bool:
    return bool(line) and any(pattern.search(line) for field in ESSENTIAL for pattern in _PATTERNS[field])


def _readings(line: str, number: int) -> Iterator[tuple[str, Reading]]:
    rank = _rank(line)
    for field in _WORDINGS:
        for wording, pattern in enumerate(_PATTERNS[field]):
            match = pattern.search(line)
            if match and (reading := _reading(field, match[1], number, rank, wording)):
                yield field, reading
                break


def _reading(field: str, text: str, line: int, rank: str, wording: int) -> Reading | None:
    digits = text.replace(",", "").rstrip(".")
    try:
        value = float(digits)
    except ValueError:
        return None
    unit = GIB if field.endswith("_bytes") else 1
    decimals = len(digits.partition(".")[2])
    step = 0.0 if field in _WHOLE else 10.0**-decimals
    return Reading(value * unit, step * unit, line, rank, wording)


def _rank(line: str) -> str:
    worker = _RANK.search(line)
    if worker:
        known = worker["name"] or worker["rank"] or worker["torch"]
        return f"rank {known}" if known and known.isdigit() else known or ""
    engine = _ENGINE.search(line)
    return engine["engine"] or "" if engine else ""


def _conflicts(readings: dict[str, tuple[Reading, ...]]) -> Iterator[Conflict]:
    for field, found in readings.items():
        by_source: dict[tuple[str, int], list[Reading]] = {}
        for reading in found:
            by_source.setdefault((reading.rank, reading.wording), []).append(reading)
        for same in by_source.values():
            other = next((reading for reading in same if reading.value != same[-1].value), None)
            if other is not None:
                yield Conflict(field, other, same[-1])
