"""Startup logs of vLLM: wordings of several versions, prefixes, ranks, several starts, and files that aren't logs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwenjax.errors import InputError
from roofline.vllm_log import ESSENTIAL, GIB, load_startup_log, read_startup_log

LOGS = Path(__file__).resolve().parent / "data" / "vllm"
# Lines of one size each, as versions from 0.4 on have written them, with the field and its number.
WORDINGS = [
    ("INFO 05-02 10:00:00 model_runner.py:172] Loading model weights took 14.2409 GB", "weight_bytes", 14.2409 * GIB),
    ("INFO [model_runner.py:1115] Loading model weights took 2.8875 GB", "weight_bytes", 2.8875 * GIB),
    ("INFO [gpu_model_runner.py:1801] Model loading took 15.2683 GiB and 3.6 seconds", "weight_bytes", 15.2683 * GIB),
    ("INFO [model_runner.py:1146] Model loading took 8.6253 GB and 7.670299 seconds", "weight_bytes", 8.6253 * GIB),
    ("INFO [x.py:1] Model loading took 1.19 GiB memory and 1.919768 seconds", "weight_bytes", 1.19 * GIB),
    ("model weights take 30.71GiB; non_torch_memory takes 0.30GiB;", "non_torch_bytes", 0.30 * GIB),
    ("Actual usage is 27.72 GiB for weight, 1.4 GiB for peak activation, 0.21", "weight_bytes", 27.72 * GIB),
    ("1.4 GiB for peak activation, 0.21 GiB for non-torch memory", "non_torch_bytes", 0.21 * GIB),
    ("and 3.45 GiB for CUDAGraph memory.", "graph_bytes", 3.45 * GIB),
    ("Actual usage is 56.89 GiB for consumed memory (weights + non-torch), 0.76", "consumed_bytes", 56.89 * GIB),
    ("weights + non-torch memory: 15.49 GiB", "consumed_bytes", 15.49 * GIB),
    ("PyTorch activation peak memory takes 1.26GiB; the rest", "activation_bytes", 1.26 * GIB),
    ("torch peak memory increase: 1.04GiB; non-torch forward increase memory: 0.05GiB", "activation_bytes", 1.04 * GIB),
    ("peak activation memory 1.04 GiB", "activation_bytes", 1.04 * GIB),
    ("the rest of the memory reserved for KV Cache is -0.94GiB.", "kv_pool_bytes", -0.94 * GIB),
    ("INFO [gpu_worker.py:563] Available KV cache memory: -24.42 GiB", "kv_pool_bytes", -24.42 * GIB),
    ("Current kv cache memory in use is 27.85 GiB.", "kv_pool_bytes", 27.85 * GIB),
    ("INFO worker.py:243] total_gpu_memory     79.22GiB", "total_bytes", 79.22 * GIB),
    ("INFO worker.py:243] gpu_memory_utilization       0.90", "gpu_memory_utilization", 0.9),
    ("INFO worker.py:243] the current vLLM instance can use    71.29GiB", "budget_bytes", 71.29 * GIB),
    ("INFO worker.py:243] model weights take   14.96GiB", "weight_bytes", 14.96 * GIB),
    ("INFO worker.py:243] non_torch_memory     1.79GiB", "non_torch_bytes", 1.79 * GIB),
    ("INFO worker.py:243] PyTorch activation peak memory       1.26GiB", "activation_bytes", 1.26 * GIB),
    ("INFO worker.py:243] available_kv_cache_memory    53.29GiB", "kv_pool_bytes", 53.29 * GIB),
    ("-3.58 GiB for non-torch memory, and 0.68 GiB for CUDAGraph memory.", "non_torch_bytes", -3.58 * GIB),
    ("Actual usage: 1.13 GiB for weights, 0.22 GiB for peak activation", "weight_bytes", 1.13 * GIB),
    ("Graph capturing finished in 23 secs, took 2.24 GiB", "graph_bytes", 2.24 * GIB),
    ("CUDA graph pool memory: 4.13 GiB (actual), 4.99 GiB (estimated), difference: 0.86", "graph_bytes", 4.13 * GIB),
    ("CUDA graph pool memory: 4.13 GiB (actual), 4.99 GiB (estimated)", "graph_estimate_bytes", 4.99 * GIB),
    ("INFO [gpu_model_runner.py:6639] Estimated CUDA graph memory: 1.58 GiB total", "graph_estimate_bytes", 1.58 * GIB),
    ("can use total_gpu_memory (44.42GiB) x gpu_memory_utilization (0.90) = 39.98GiB", "total_bytes", 44.42 * GIB),
    ("can use total_gpu_memory (44.42GiB) x gpu_memory_utilization (0.90) = 39.98GiB", "budget_bytes", 39.98 * GIB),
    ("can use total_gpu_memory (44.42GiB) x gpu_memory_utilization (0.90) = 39.98GiB", "gpu_memory_utilization", 0.9),
    ("Free memory on device cuda:0 (43.93/44.42 GiB) on startup. Desired GPU memory utilization is (0.9, 39.98 GiB).",
     "total_bytes", 44.42 * GIB),
    ("Free memory on device (43.93/44.42 GiB) on startup.", "free_bytes", 43.93 * GIB),
    ("Desired GPU memory utilization is (0.9, 39.98 GiB).", "budget_bytes", 39.98 * GIB),
    ("The current --gpu-memory-utilization=0.9500 is equivalent to 0.9334", "gpu_memory_utilization", 0.95),
    ("non-default args: {'gpu_memory_utilization': 0.426, 'max_model_len': 32768}", "gpu_memory_utilization", 0.426),
    ("INFO [gpu_executor.py:76] # GPU blocks: 715, # CPU blocks: 1310", "gpu_blocks", 715),
    ("INFO [executor_base.py:111] # cuda blocks: 14815, # CPU blocks: 1966", "gpu_blocks", 14815),
    ("The engine can allocate 12225 GPU blocks, 4228 CPU blocks on PP Rank 1 TP Rank 0.", "gpu_blocks", 12225),
    ("(EngineCore pid=411) INFO GPU KV cache size: 1,629,520 tokens", "kv_tokens", 1629520),
    ("GPU KV cache size: 460,496 tokens, Maximum concurrency for 131,072 tokens per request", "kv_tokens", 460496),
    ("GPU KV cache size: 460,496 tokens, Maximum concurrency for 131,072 tokens per request: 3.5x", "concurrency", 3.5),
    ("Maximum concurrency for 10000 tokens per request: 6.32x", "concurrency_len", 10000),
    ("Chunked prefill is enabled with max_num_batched_tokens=2048.", "max_num_batched_tokens", 2048),
    ("vllm serve m --max-num-seqs 32 --tensor-parallel-size 4", "max_num_seqs", 32),
    ("vllm serve m --max-num-seqs 32 --tensor-parallel-size 4", "tp", 4),
]  # fmt: skip


@pytest.mark.parametrize(("line", "field", "value"), WORDINGS)
def test_wordings(line: str, field: str, value: float) -> None:
    log = read_startup_log(f"{line}\nAvailable KV cache memory: 1 GiB" if field not in ESSENTIAL else line)
    reading = log.get(field)
    assert reading is not None
    assert reading.value == pytest.approx(value, rel=1e-12)
    assert reading.line == 1


def test_the_seed_s_log() -> None:
    log = load_startup_log(LOGS / "seed-0.26.log")
    assert log.texts["version"] == "0.26.0"
    assert log.texts["runner"] == "V2"
    sizes = ("consumed_bytes", "activation_bytes", "graph_bytes", "kv_pool_bytes", "total_bytes", "budget_bytes")
    assert [round((log.value(name) or 0) / GIB, 2) for name in sizes] == [15.49, 1.04, 0.34, 4.64, 23.52, 21.17]
    assert [log.whole(name) for name in ("kv_tokens", "concurrency_len", "max_model_len")] == [86896, 8192, 8192]
    assert log.value("concurrency") == 10.61
    assert (log.starts, log.ranks, log.conflicts) == (1, (), ())
    assert log.missing == ("the size of the weights",)


def test_ranks_are_told_apart() -> None:
    """The pool is the least rank's, which all obey; weights are the fullest one's."""
    text = """(Worker_TP0 pid=1) INFO Model loading took 30.59 GiB and 20.69 seconds
(Worker_TP1 pid=2) INFO Model loading took 30.61 GiB and 20.45 seconds
(VllmWorker rank=2 pid=12) INFO Available KV cache memory: 10.50 GiB
(Worker_TP0_EP0 pid=1) INFO Available KV cache memory: 8.22 GiB
[rank3] Available KV cache memory: 9.00 GiB
(EngineCore_DP1 pid=3) INFO GPU KV cache size: 67,296 tokens"""
    log = read_startup_log(text)
    assert log.ranks == ("TP0", "TP0_EP0", "TP1", "rank 2", "rank 3")
    assert log.value("weight_bytes") == 30.61 * GIB
    assert log.value("kv_pool_bytes") == 8.22 * GIB
    assert log.readings["kv_tokens"][0].rank == "DP1"
    assert log.least_ranks == 4
    assert load_startup_log(LOGS / "seed-0.26.log").least_ranks == 1
    assert log.conflicts == ()


def test_colours_returns_and_other_encodings_do_not_matter(tmp_path: Path) -> None:
    plain = (LOGS / "qwen3-8b-0.9.2.log").read_text()
    wrapped = "".join(f"pod/vllm-0 | 2026-06-10T10:58:13.1Z \x1b[36m{line}\x1b[0m\r\n" for line in plain.splitlines())
    for name, content in (("utf8", wrapped.encode("utf-8-sig")), ("utf16", wrapped.encode("utf-16"))):
        path = tmp_path / name
        path.write_bytes(content)
        log = load_startup_log(path)
        assert (log.whole("kv_tokens"), log.value("weight_bytes")) == (136080, 15.2683 * GIB)
        assert log.texts["version"] == "0.9.2"


def test_the_last_start_that_reached_its_memory_counts() -> None:
    first = (LOGS / "qwen3-8b-0.9.2.log").read_text()
    second = first.replace("18.69", "17.00").replace("136,080", "123,776").replace("8505", "7736")
    failed = "INFO [api_server.py:1395] vLLM API server version 0.9.2\nERROR died\n"
    log = read_startup_log(first + second + failed)
    assert log.starts == 3
    assert (log.value("kv_pool_bytes"), log.whole("kv_tokens")) == (17.0 * GIB, 123776)
    assert log.conflicts == ()


def test_lines_that_disagree_are_told() -> None:
    log = read_startup_log("Available KV cache memory: 4.64 GiB\n\nAvailable KV cache memory: 4.60 GiB")
    (conflict,) = log.conflicts
    assert (conflict.field, conflict.first.line, conflict.last.line) == ("kv_pool_bytes", 1, 3)
    assert log.value("kv_pool_bytes") == 4.60 * GIB


def test_a_line_that_says_a_number_more_exactly_goes_before() -> None:
    log = read_startup_log("model weights take 15.27GiB\nModel loading took 15.2683 GiB and 3.6 seconds")
    assert log.value("weight_bytes") == 15.2683 * GIB
    assert log.conflicts == ()


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(InputError):
        assert read_startup_log(text).readings


NO_LOG = (
    "has no line of a vLLM startup about memory. Give what vLLM wrote while it started, with lines such as "
    "`Available KV cache memory` or `# GPU blocks`."
)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", f"--vllm-log FILE: {NO_LOG}"),
        (b"hello\nworld\n", f"--vllm-log FILE: {NO_LOG}"),
        (b"GPU KV cache size: none tokens", f"--vllm-log FILE: {NO_LOG}"),
        (b"\0\1\2", "--vllm-log FILE: is not a text file. Give the text that vLLM wrote."),
        (None, "--vllm-log FILE: can't be read: No such file or directory. Give the path of a text file."),
    ],
)
def test_files_that_are_not_logs(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "server.log"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_startup_log(path)
    assert str(caught.value) == text.replace("FILE", str(path))
