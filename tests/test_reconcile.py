"""reconcile: logs and counters beside ours, what makes a row agree, exit statuses, and the words of differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_run import figures, run, text_of

from qwenjax.config import ModelConfig
from roofline.engine_run import run_of_log
from roofline.findings import Finding, all_agree
from roofline.hardware import load_hardware
from roofline.log_bill import bill_of_log
from roofline.reconcile import account_of_log
from roofline.reconcile_counters import reconcile_counters
from roofline.vllm_log import GIB, read_startup_log
from roofline.vllm_metrics import CounterDelta

DATA = Path(__file__).resolve().parent / "data" / "vllm"
SEED = f"--vllm-log {DATA / 'seed-0.26.log'}"
METRICS = f"--vllm-metrics {DATA / 'before.txt'} {DATA / 'after.txt'}"
QWEN25_7B = ModelConfig.from_hf("Qwen2.5-7B")
# (log, model, hardware, tokens, predicted tokens, exact rows)
LOGS = [
    ("seed-0.26.log", "Qwen2.5-7B-Instruct", "rtx-4090", 86896, 87088, 5),
    ("qwen3-8b-0.9.2.log", "Qwen3-8B", "a100-40gb-sxm", 136080, 136256, 5),
    ("qwen3-32b-tp2-0.27.1.log", "Qwen3-32B", "rtx-pro-6000-server", 67296, 66512, 4),
    ("qwen2.5-32b-tp2-0.8.log", "Qwen2.5-32B", "l40s", 63152, 63888, 6),
    ("qwen2.5-7b-0.6.log", "Qwen2.5-7B", "a100-80gb-sxm", 1039600, 1041568, 6),
]


def rows_of(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["term"]: row for row in record["rows"]}


def findings_of(
    text: str, model: str = "Qwen2.5-7B", hardware: str | None = None, **options: Any
) -> dict[str, Finding]:
    config, log = ModelConfig.from_hf(model), read_startup_log(text)
    chip = load_hardware(hardware) if hardware else None
    found = account_of_log(config, log, run_of_log(config, log, **options), chip).findings()
    return {finding.term: finding for finding in found}


@pytest.mark.parametrize(("log", "model", "hardware", "tokens", "predicted", "exact"), LOGS)
def test_logs_of_five_versions_agree(
    log: str, model: str, hardware: str, tokens: int, predicted: int, exact: int
) -> None:
    record = figures(f"roofline reconcile {model} --vllm-log {DATA / log} --hardware {hardware}")
    rows = rows_of(record)
    assert record["agrees"]
    assert sum(row["agrees"] is True for row in record["rows"]) == exact
    assert rows["KV tokens predicted"]["engine"] == tokens
    assert rows["KV tokens predicted"]["ours"] == predicted
    assert abs(rows["KV tokens predicted"]["delta_fraction"]) < 0.03
    assert rows["KV tokens of that pool"]["engine"] == tokens
    fields = {"term", "engine", "ours", "delta", "cause", "source", "unit", "kind", "agrees", "tolerance"}
    assert all(fields <= set(row) and row["cause"] and row["source"] for row in record["rows"])
    assert all(row["delta"] is None or row["delta"] == row["ours"] - row["engine"] for row in record["rows"])


def test_the_seed_s_log_term_by_term() -> None:
    """15.49 + 1.04 + 4.64 GiB are 0.9 of 23.52; 0.34 GiB of graphs lie outside (ledger S000-165 to S000-171)."""
    rows = rows_of(figures(f"roofline reconcile Qwen2.5-7B-Instruct {SEED} --hardware rtx-4090"))
    in_gib = {term: (row["engine"] and round(row["engine"] / GIB, 2), row["ours"] and round(row["ours"] / GIB, 2))
              for term, row in rows.items() if row["unit"] == "B"}  # fmt: skip
    assert in_gib == {
        "device memory": (23.52, 23.52),
        "budget": (21.17, 21.17),
        "weights and non-torch": (15.49, 15.49),
        "non-torch, less our weights": (1.30, 1.30),
        "activations": (1.04, 1.03),
        "CUDA graphs, captured": (0.34, None),
        "KV pool from its own parts": (4.64, 4.64),
        "KV pool predicted": (4.64, 4.65),
    }
    assert rows["CUDA graphs, captured"]["cause"] == "outside the budget"
    assert rows["activations"]["cause"].startswith("widest block of a step of 8192 tokens, which the log doesn't state")
    assert (rows["concurrency"]["engine"], round(rows["concurrency"]["ours"], 2)) == (10.61, 10.61)
    assert rows["KV bytes a token"]["ours"] == 57344


def test_the_way_from_the_card_to_the_tokens() -> None:
    """24 GiB by the name, 23.52 as CUDA reports them, a tenth outside, and what the log says is taken (S000-159 on)."""
    record = figures(f"roofline reconcile Qwen2.5-7B-Instruct {SEED} --hardware rtx-4090")
    steps = [
        (row["step"], round(row["change_bytes"] / GIB, 2), round(row["left_bytes"] / GIB, 2)) for row in record["bill"]
    ]
    assert steps == [
        ("memory of the card", 24.0, 24.0),
        ("kept back from CUDA", -0.48, 23.52),
        ("outside the utilisation", -2.35, 21.17),
        ("weights", -14.19, 6.98),
        ("non-torch", -1.30, 5.68),
        ("activations", -1.04, 4.64),
        ("86,896 tokens in 5,431 blocks", 0.0, 4.64),
    ]
    assert record["bill"][-1]["left_bytes"] == 86_896 * 57_344
    assert "From the device's memory to the cache" in text_of(f"roofline reconcile Qwen2.5-7B {SEED}")


def test_what_no_term_explains_is_told() -> None:
    text = """vLLM API server version 0.9.2
total_gpu_memory (23.52GiB) x gpu_memory_utilization (0.90) = 21.17GiB
model weights take 14.25GiB; non_torch_memory takes 0.10GiB; PyTorch activation peak memory takes 1.42GiB
the rest of the memory reserved for KV Cache is 3.40GiB."""
    config, log = QWEN25_7B, read_startup_log(text)
    rows = bill_of_log(account_of_log(config, log, run_of_log(config, log)))
    assert [row.step for row in rows][-1] == "not explained"
    assert rows[-1].change_bytes / GIB == pytest.approx(-2.0, abs=0.01)
    unknown = read_startup_log("Available KV cache memory: 1 GiB")
    assert bill_of_log(account_of_log(config, unknown, run_of_log(config, unknown))) == ()


def test_three_lines_are_enough_for_what_they_say() -> None:
    text = """Available KV cache memory: 4.64 GiB
GPU KV cache size: 86,896 tokens
Maximum concurrency for 8,192 tokens per request: 10.61x"""
    found = findings_of(text)
    assert set(found) == {"KV bytes a token", "KV tokens of that pool", "concurrency"}
    assert all(finding.agrees for finding in found.values())
    with_card = findings_of(text, hardware="rtx-4090")
    assert with_card["KV tokens predicted"].ours == 87088
    assert with_card["KV tokens predicted"].source == "one log's overhead: the version isn't known"


def test_text_answers_first_then_aligned_tables() -> None:
    lines = text_of(f"roofline reconcile Qwen2.5-7B {SEED} --hardware rtx-4090").splitlines()
    assert lines[0] == (
        "Qwen2.5-7B: all 5 exact figures agree; KV pool of 86,896 tokens, 86,880 by the printed size; "
        "87,088 predicted (+0.2 %)"
    )
    assert lines[1] == (
        "Log: vLLM 0.26.0, TP 1, cache bfloat16, weights bfloat16. Not in the log: the size of the weights."
    )
    header = next(line for line in lines if line.startswith("term"))
    assert header.split()[:3] == ["term", "engine", "ours"]
    assert any(line.startswith("KV bytes a token") and "57,344 B" in line and " yes " in line for line in lines)
    assert any(line.startswith("activations *") for line in lines)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (f"Qwen3-8B {SEED}", ["KV bytes a token", "KV tokens of that pool"]),
        (f"Qwen2.5-7B {SEED} --kv-dtype float8_e4m3fn", ["KV bytes a token", "KV tokens of that pool"]),
        (
            f"Qwen3-14B --vllm-log {DATA / 'qwen3-8b-0.9.2.log'}",
            ["weights", "KV bytes a token", "KV tokens of that pool"],
        ),
        (f"Qwen3-8B {METRICS}", ["estimated FLOPs"]),
    ],
)
def test_what_does_not_hold_is_exit_status_1(options: str, wrong: list[str]) -> None:
    record = figures(f"roofline reconcile {options}", status=1)
    assert [row["term"] for row in record["rows"] if row["agrees"] is False] == wrong
    told = run(f"roofline reconcile {options}")
    assert told.status == 1
    assert told.stderr.splitlines()[-1] == f"reconcile: {', '.join(wrong)}: ours and the engine's don't agree"
    assert f"not {', '.join(wrong)}" in told.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("text", "model", "term", "cause"),
    [
        ("Model loading took 7.11 GiB and 1 s", "Qwen2.5-7B", "weights",
         "1/2 of ours: tensor parallelism over 2 (--tp 2), or narrow weights"),
        ("Model loading took 5.20 GiB and 1 s", "Qwen2.5-7B", "weights",
         "0.37 of ours, 5.9 bits a weight: quantised (--weights), or another model"),
        ("Model loading took 28.4 GiB and 1 s", "Qwen2.5-7B", "weights",
         "2.00 times ours: another model, wider weights, or a draft model loaded too"),
        ("Available KV cache memory: 4.64 GiB\nGPU KV cache size: 173,792 tokens", "Qwen2.5-7B", "KV bytes a token",
         "1/2 of ours: an 8-bit cache (--kv-dtype float8_e4m3fn), or tensor parallelism over 2 (--tp 2)"),
        ("Available KV cache memory: 4.64 GiB\nGPU KV cache size: 80,000 tokens", "Qwen2.5-7B", "KV bytes a token",
         "1.086 of ours: another model, or tokens that don't go with this pool"),
        ("tensor_parallel_size=2\nAvailable KV cache memory: 4.64 GiB\nGPU KV cache size: 160,000 tokens", "Qwen2.5-7B",
         "KV bytes a token", "the tokens are of a rank whose pool isn't in the log"),
        ("Available KV cache memory: 5 GiB\n1.04 GiB for peak activation", "Qwen2.5-7B", "activations",
         "as much as a step of 8,262 tokens, or 29 B a logit of 256 sequences"),
    ],
)  # fmt: skip
def test_likely_causes(text: str, model: str, term: str, cause: str) -> None:
    assert findings_of(text, model)[term].cause == cause


def test_quantised_weights_and_narrow_caches_are_read_from_the_log() -> None:
    text = """Initializing a V1 LLM engine (v0.18.0) with config: quantization=awq, kv_cache_dtype=fp8
Model loading took 18.1494 GiB and 1 s
Available KV cache memory: 51.88 GiB
GPU KV cache size: 425,008 tokens"""
    config, log = ModelConfig.from_hf("Qwen2.5-32B"), read_startup_log(text)
    started = run_of_log(config, log)
    assert started.weights is not None
    assert (started.weights.name, started.kv_dtype) == ("awq", "float8_e4m3fn")
    assert all(finding.agrees is not False for finding in account_of_log(config, log, started).findings())


def test_parts_that_do_not_make_up_the_budget() -> None:
    text = """total_gpu_memory (44.42GiB) x gpu_memory_utilization (0.90) = 39.98GiB
model weights take 30.71GiB; non_torch_memory takes 0.30GiB; PyTorch activation peak memory takes 1.26GiB
the rest of the memory reserved for KV Cache is 6.71GiB."""
    found = findings_of(text, "Qwen2.5-32B", tp=2)
    assert found["KV pool from its own parts"].agrees is False
    assert found["KV pool from its own parts"].cause == "its parts don't make up the budget"
    graphs = findings_of(f"{text}\nEstimated CUDA graph memory: 1.00 GiB total", "Qwen2.5-32B", tp=2)
    assert graphs["KV pool from its own parts"].agrees is True
    assert graphs["KV pool from its own parts"].cause == "budget less its own parts, with graphs"
    assert graphs["CUDA graphs, estimated"].cause == "in the budget"


def test_an_engine_that_does_not_start_is_told_too() -> None:
    text = "vLLM API server version 0.7.3\nthe rest of the memory reserved for KV Cache is -0.94GiB."
    found = findings_of(text, hardware="rtx-4090")
    assert found["KV pool predicted"].engine == -0.94 * GIB
    blocks = findings_of(f"{text}\n# GPU blocks: 0, # CPU blocks: 9")
    assert all(finding.agrees is not False for finding in blocks.values())


def test_a_finding_s_differences() -> None:
    row = Finding("x", "B", 10.0, 12.0, "cause", "source", "exact", 0.2)
    assert (row.delta, row.delta_fraction, row.agrees) == (2.0, 0.2, True)
    assert Finding("x", "B", 10.0, 12.1, "", "", "exact", 0.2).agrees is False
    assert Finding("x", "B", 10.0, 12.1, "", "").agrees is None
    assert Finding("x", "B", 10.0, None, "", "", "exact", 0.2).agrees is None
    assert Finding("x", "B", 0.0, 1.0, "", "", "exact", 0.2).delta_fraction is None
    assert Finding("x", "B", 5.0, 50.0, "", "", bounds=(4.0, 6.0)).agrees is True
    assert not all_agree([row, Finding("x", "B", 7.0, 50.0, "", "", bounds=(4.0, 6.0))])


# Counters.


def test_the_counters_of_two_pages() -> None:
    """The counter is its own formula to the unit, 68.3967 GFLOP an output token; corrected it is 67.5754."""
    record = figures(f"roofline reconcile Qwen2.5-7B {METRICS}")
    rows = rows_of(record)
    counted, right = rows["estimated FLOPs an output token"], rows["corrected FLOPs an output token"]
    assert counted["engine"] == counted["ours"] == 68.396683264e9
    assert right["ours"] == 67.575402496e9
    for name in ("estimated FLOPs", "estimated bytes written"):
        assert (rows[name]["delta"], rows[name]["agrees"]) == (0, True)
    assert rows["estimated bytes read"]["delta"] == pytest.approx(0, abs=1)
    assert rows["corrected FLOPs"]["cause"] == "-1.20 % the causal mask halves a prompt's attention"
    assert [part["part"] for part in record["parts"]] == ["qkv_proj", "attention", "o_proj", "mlp", "unembed"]
    assert sum(part["corrected_flops"] for part in record["parts"]) == rows["corrected FLOPs"]["ours"]
    assert record["metrics"]["prompt_tokens_per_request"] == 1024
    first = text_of(f"roofline reconcile Qwen2.5-7B {METRICS}").splitlines()[0]
    assert first == (
        "Qwen2.5-7B: all 2 exact figures agree; counter 68.40 GFLOP an output token, 68.40 GFLOP by its own formula, "
        "67.58 GFLOP corrected"
    )


def test_a_log_tells_how_the_counters_were_made() -> None:
    """The log's chunk of 512 tokens gives 67.9899 GFLOP an output token."""
    rows = rows_of(figures(f"roofline reconcile Qwen2.5-7B {METRICS} --max-num-batched-tokens 512"))
    assert rows["estimated FLOPs an output token"]["ours"] == 67.989899264e9
    assert rows["estimated FLOPs"]["agrees"]
    both = figures(f"roofline reconcile Qwen2.5-7B {SEED} {METRICS} --hardware rtx-4090")
    assert {"KV bytes a token", "estimated FLOPs"} <= set(rows_of(both))
    assert both["log"]["version"] == "0.26.0"


def delta(**changes: Any) -> CounterDelta:
    fields: dict[str, Any] = {
        "flops": 17509550915584.0,
        "read_bytes": 3641989607424.0,
        "write_bytes": 5065179136.0,
        "prompt_tokens": 1024,
        "output_tokens": 256,
        "requests": 1,
        "steps": 256,
        "cached_tokens": 0,
        "preemptions": 0,
        "draft_tokens": 0,
        "engines": ("0",),
        "model_name": "",
    }
    return CounterDelta(**{**fields, **changes})


@pytest.mark.parametrize(
    ("change", "agrees", "cause"),
    [
        ({}, True, "the same formula for these requests"),
        ({"flops": 17.7e12}, True, "requests of unlike length attend more than equal ones"),
        ({"flops": 17.40541e12}, True, "prompts in chunks attend less than whole ones (--max-num-batched-tokens)"),
        ({"flops": 17.7e12, "preemptions": 2}, True,
         "requests of unlike length attend more than equal ones; 2 preemptions"),
        ({"flops": 16e12}, False,
         "less than any such requests can count: another model, --tp, or requests cut by the pages"),
        ({"flops": 1e16, "draft_tokens": 5}, False,
         "more than any such requests can count: preempted requests are computed again, and draft tokens too"),
    ],
)  # fmt: skip
def test_counters_between_what_such_requests_can_count(change: dict[str, Any], agrees: bool, cause: str) -> None:
    report = reconcile_counters(QWEN25_7B, delta(**change))
    first = report.findings[0]
    assert (first.term, first.agrees, first.cause) == ("estimated FLOPs", agrees, cause)


def test_what_a_page_lacks_is_left_out_or_told() -> None:
    report = reconcile_counters(QWEN25_7B, delta(read_bytes=None, write_bytes=None, steps=None))
    assert [row.term for row in report.findings] == [
        "estimated FLOPs", "estimated FLOPs an output token", "corrected FLOPs", "corrected FLOPs an output token",
    ]  # fmt: skip
    reads = reconcile_counters(QWEN25_7B, delta(steps=None)).findings[2]
    assert reads.cause.endswith("taken as one request at a time: the page doesn't count steps")


def test_a_mixture_s_corrections_are_named() -> None:
    record = reconcile_counters(ModelConfig.from_hf("Qwen2-57B-A14B"), delta(flops=18692191551488.0))
    causes = {row.term: row.cause for row in record.findings}
    assert "the shared expert isn't counted" in causes["corrected FLOPs"]
    assert "the router isn't counted" in causes["corrected FLOPs"]
    assert record.findings[0].cause == "the same formula for these requests"
    reads = {row.term: row.cause for row in reconcile_counters(
        ModelConfig.from_hf("Qwen3-30B-A3B"), delta(steps=80, requests=8, prompt_tokens=800, output_tokens=640)
    ).findings}  # fmt: skip
    assert "distinct experts, not min(tokens x k, E)" in reads["corrected bytes read"]


def test_cached_prompts_cost_less() -> None:
    whole, cached = (reconcile_counters(QWEN25_7B, delta(cached_tokens=tokens)) for tokens in (0, 512))
    assert cached.work.tokens == whole.work.tokens - 512
    assert "prefix cache hits are spread evenly here" in cached.findings[0].cause or not cached.findings[0].agrees


# Input that can't be used.

NONE = "has no engine's figures to set beside ours. Give --vllm-log FILE, --vllm-metrics BEFORE AFTER, or both."


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("Qwen2.5-7B", f"reconcile: {NONE}"),
        (
            f"Qwen2.5-7B --vllm-log {DATA / 'before.txt'}",
            f"--vllm-log {DATA / 'before.txt'}: has no line of a vLLM startup about memory. Give what vLLM wrote while "
            "it started, with lines such as `Available KV cache memory` or `# GPU blocks`.",
        ),
        (
            f"Qwen2.5-7B --vllm-metrics {DATA / 'after.txt'} {DATA / 'before.txt'}",
            f"--vllm-metrics {DATA / 'after.txt'} {DATA / 'before.txt'}: every counter goes backwards. "
            "Give BEFORE first, then AFTER.",
        ),
        (
            f"Qwen2.5-7B --tp 3 {SEED}",
            "tp = 3: doesn't split 28 attention heads and 4 KV heads evenly. Use one of 1, 2, 4, 28.",
        ),
        (f"Qwen2.5-7B --tp two {SEED}", "--tp = 'two': must be a whole number. Give digits only, such as 16."),
        (
            f"Qwen2.5-7B --kv-dtype fp4 {SEED}",
            "kv_dtype = 'fp4': is not a dtype that is known here. Known: float64, float32, bfloat16, float16, "
            "float8_e4m3fn, float8_e5m2, int8, int4.",
        ),
        (
            f"Qwen2.5-7B --usage batch {SEED}",
            "usage = 'batch': is not a way to start an engine. Use server or offline.",
        ),
    ],
)
def test_one_message_and_exit_status_2(options: str, text: str) -> None:
    result = run(f"roofline reconcile {options}")
    assert (result.status, result.stdout, result.stderr) == (2, "", f"{text}\n")


def test_pages_with_requests_under_way_are_refused() -> None:
    with pytest.raises(ValueError, match="has 1 generation tokens for 2 finished requests") as caught:
        reconcile_counters(QWEN25_7B, delta(requests=2, output_tokens=1))
    assert str(caught.value) == (
        "--vllm-metrics: has 1 generation tokens for 2 finished requests. Take both pages while no request is running."
    )


def test_conflicts_and_ranks_are_in_the_record(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("[rank0] Available KV cache memory: 4.64 GiB\n[rank0] Available KV cache memory: 4.50 GiB\n")
    record = figures(f"roofline reconcile Qwen2.5-7B --vllm-log {path}")
    assert record["log"]["ranks"] == ["rank 0"]
    assert record["log"]["conflicts"] == [
        {"field": "kv_pool_bytes", "rank": "rank 0", "first_line": 1, "first": 4.64 * GIB, "last_line": 2,
         "last": 4.5 * GIB},
    ]  # fmt: skip
    assert json.dumps(record["log"]["missing"]).count("the KV cache's tokens") == 1
    told = text_of(f"roofline reconcile Qwen2.5-7B --vllm-log {path}")
    assert "Ranks: rank 0." in told
    assert "Lines 1 and 2 disagree on kv_pool_bytes; the last is taken." in told
