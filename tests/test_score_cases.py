"""How the scoring bench reads a measurement file: every kind of cell, what a bad row does, and the published file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from score_rows import HEADER, USUAL, Modules, load_bench, write_rows

from qwenjax.errors import InputError
from roofline.timing.case import UNBOUNDED, Case

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def bench() -> Modules:
    return load_bench()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return lambda *rows, name="rows.csv", **options: write_rows(tmp_path / name, *rows, **options)


def one_case(bench: Modules, path: Path) -> Case:
    cases, skipped = bench["cases"].read_cases(path)
    assert skipped == []
    (case,) = cases
    return case


@pytest.mark.parametrize(
    ("text", "chip"),
    [
        ("NVIDIA A100-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100 PCIe 80GB", "a100-80gb-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("H100 PCIe", "h100-pcie"),
        ("NVIDIA GH200 SXM", "gh200"),
        ("NVIDIA H20-96GB", "h20"),
        ("NVIDIA H200 SXM 141GB", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX 4090 24GB", "rtx-4090"),
        ("RTX 3090 Ti", "rtx-3090-ti"),
        ("NVIDIA RTX 5070 Ti 16GB", "rtx-5070-ti"),
        ("NVIDIA RTX PRO 6000 Blackwell Server (95.01 GiB)", "rtx-pro-6000-server"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA L40S (44.42 GiB)", "l40s"),
        ("NVIDIA A10", "a10"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-32gb-sxm"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpu_is_known_by_its_many_names(bench: Modules, text: str, chip: str) -> None:
    assert bench["case_fields"].gpu_of(text).id == chip


def test_a_power_cap_and_a_guess_are_kept(bench: Modules) -> None:
    gpu_of = bench["case_fields"].gpu_of
    assert gpu_of("NVIDIA A100-80GB (330 W cap)").power_limit_watts == 330
    assert gpu_of("NVIDIA A100-80GB").assumed == ("A100 taken as the 80 GB SXM card",)
    assert gpu_of("NVIDIA A100-SXM4-80GB").assumed == ()
    bare = "NVIDIA A100 (memory size not in CSV)"
    assert gpu_of(bare).id == "a100-80gb-sxm"
    assert gpu_of(bare, "argonne-lcf/LLM-Inference-Bench Plots").id == "a100-40gb-sxm"


@pytest.mark.parametrize("text", ["not stated", "Apple M2 Ultra", "", "NVIDIA B9000", "79.25 GiB GPU"])
def test_another_gpu_is_refused(bench: Modules, text: str) -> None:
    with pytest.raises(InputError) as refused:
        bench["case_fields"].gpu_of(text)
    assert str(refused.value) == (
        f"gpu = {text!r}: is not a GPU of the catalogue. `roofline hardware` lists the known ones"
    )


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("vLLM", "vllm"),
        ("VLLM", "vllm"),
        ("vLLM-based (Splitwise paper)", "vllm"),
        ("TensorRT-LLM", "tensorrt-llm"),
        ("TRTLLM", "tensorrt-llm"),
        ("SGLang", "sglang"),
        ("lmdeploy (TurboMind)", "lmdeploy"),
        ("llama.cpp", "llama.cpp"),
        ("gpt-fast (PyTorch)", "gpt-fast"),
        ("transformers (remote code)", "transformers"),
        ("HF Transformers", "transformers"),
        ("mlc-llm", "mlc-llm"),
    ],
)
def test_an_engine_is_known_by_its_many_names(bench: Modules, text: str, engine: str) -> None:
    assert bench["case_fields"].engine_of(text) == engine


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.6.3", "0.6.3"), ("not stated (2024-03)", ""), ("see PR", ""), ("2024 (not in CSV)", "2024"), ("", "")],
)
def test_a_version_that_is_not_stated_is_empty(bench: Modules, text: str, version: str) -> None:
    assert bench["case_fields"].version_of(text) == version


@pytest.mark.parametrize(
    ("text", "pull", "version"),
    [("see PR", 4766, "2024"), ("see PR", 15131, "2025"), ("see PR", 99, "2023"), ("b4500", 15131, "b4500")],
)
def test_a_pull_request_of_llama_cpp_tells_its_year(bench: Modules, text: str, pull: int, version: str) -> None:
    assert bench["case_fields"].version_of(text, f"ggml-org/llama.cpp#{pull}") == version
    assert bench["case_fields"].version_of("see PR", f"someone/else#{pull}") == ""


@pytest.mark.parametrize(
    ("text", "layers", "hidden"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 28, 3584),
        ("Qwen/Qwen3-14B-AWQ", 40, 5120),
        ("Qwen/Qwen3-8B (NVFP4)", 36, 4096),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", 28, 3584),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", 32, 4096),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", 32, 4096),
        ('llama-7B (GGUF "llama 7B")', 32, 4096),
        ("meta-llama/Llama-2-70b-hf", 80, 8192),
        ("Qwen/Qwen3-30B-A3B (by size)", 48, 2048),
    ],
)
def test_a_model_is_known_with_its_suffixes(bench: Modules, text: str, layers: int, hidden: int) -> None:
    config = bench["case_fields"].model_of(text)
    assert (config.num_hidden_layers, config.hidden_size, config.quantization) == (layers, hidden, None)


@pytest.mark.parametrize("text", ["microsoft/phi-4", "../etc/passwd", "", "32B dense (model name not stated)", "."])
def test_another_model_is_refused(bench: Modules, text: str) -> None:
    with pytest.raises(InputError) as refused:
        bench["case_fields"].model_of(text)
    assert str(refused.value) == f"model = {text!r}: is not a known model. `roofline models` lists the known ones"


@pytest.mark.parametrize(
    ("text", "weights", "kv_dtype"),
    [
        ("BF16", "BF16", None),
        ("FP16/BF16", "BF16", None),
        ("BF16 weights, int8 KV", "BF16", "int8"),
        ("BF16 weights, bf16 KV", "BF16", None),
        ("FP8 (--quantization fp8, online) + FP8 KV", "FP8", "float8_e4m3fn"),
        ("W4A16 (AWQ g128)", "W4A16", None),
        ("INT8 weight-only", "INT8 weight-only", None),
        ("GPTQ (Int8)", "GPTQ (Int8)", None),
        ("Q4_K_M", "Q4_K_M", None),
        ("", "BF16", None),
    ],
)
def test_weights_and_cache_are_told_apart(bench: Modules, text: str, weights: str, kv_dtype: str | None) -> None:
    assert bench["case_fields"].weights_of(text)[:2] == (weights, kv_dtype)


def test_an_unknown_weight_scheme_is_refused(bench: Modules) -> None:
    with pytest.raises(InputError, match=r"^dtype_or_quant = 'Q9_Z': is not a weight scheme that is known here\. "):
        bench["case_fields"].weights_of("Q9_Z")


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("16", (16, False, None, None)),
        ("inf (1000 at once)", (1000, True, 1000, None)),
        ("offline(100)", (100, True, 100, None)),
        ("all 100 prompts at once (max_num_seqs default 256)", (100, True, 100, None)),
        ("max (all requests queued)", (UNBOUNDED, True, None, None)),
        ("300 req @10/s", (300, False, 300, 10.0)),
    ],
)
def test_a_batch_is_a_count_a_queue_or_a_rate(bench: Modules, text: str, batch: tuple[Any, ...]) -> None:
    assert tuple(bench["case_fields"].batch_of(text)) == batch


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "batch_or_concurrency: is not stated"),
        ("not stated", "batch_or_concurrency = 'not stated': is not stated"),
        ("8-16", "batch_or_concurrency = '8-16': is not one number of sequences"),
        ("0", "batch_or_concurrency = '0': is not one number of sequences"),
        ("-4", "batch_or_concurrency = '-4': is not one number of sequences"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(bench: Modules, text: str, problem: str) -> None:
    with pytest.raises(InputError) as refused:
        bench["case_fields"].batch_of(text)
    remedy = "Write a count, `inf (N at once)`, `offline(N)` or `N req @R/s`"
    assert str(refused.value) == f"{problem}. {remedy}"


def test_settings_are_read_from_a_note(bench: Modules) -> None:
    note = (
        "runner config gmu 0.9, max_num_seqs 512, max-model-len 32768, max_num_batched_tokens 2048, "
        "--enforce-eager, FlashAttention off, MoE: EP plus attention data-parallel"
    )
    notes = bench["case_notes"].read_notes({**USUAL, "note": note}, "vllm", "throughput_out_tok_s")
    assert (notes.gpu_memory_utilization, notes.max_num_seqs, notes.max_model_len) == (0.9, 512, 32768)
    assert (notes.max_num_batched_tokens, notes.cuda_graphs, notes.flash_attention) == (2048, False, False)
    assert (notes.expert_parallel, notes.attention_dp) == (True, True)


@pytest.mark.parametrize(
    ("version", "repeats"), [("0.4.2", True), ("0.6.4.post1", True), ("0.6.5", False), ("", False)]
)
def test_prompts_of_vllms_early_throughput_script_are_one_token_repeated(
    bench: Modules, write: Write, version: str, repeats: bool
) -> None:
    note = "benchmark_throughput.py --input-len 1000 --output-len 100 --enforce-eager -tp 2"
    assert one_case(bench, write({"note": note, "framework_version": version})).repeated_token is repeats
    assert not one_case(bench, write({"note": "benchmark_throughput.py on ShareGPT"})).repeated_token


@pytest.mark.parametrize(
    ("note", "lengths"),
    [
        ("", "equal"),
        ("random prompts of 1024 tokens", "equal"),
        ("benchmark_serving.py, ShareGPT prompts", "recorded"),
        ("suite A: ShareGPT prompts, at most 256 tokens out", "limited"),
    ],
)
def test_how_lengths_spread_is_read_from_a_note(bench: Modules, write: Write, note: str, lengths: str) -> None:
    assert one_case(bench, write({"note": note})).lengths == lengths


def test_an_end_to_end_rate_counts_what_its_note_says(bench: Modules, write: Write) -> None:
    plain = one_case(bench, write({}))
    both = one_case(bench, write({"note": "(prompt+2048 generated)/time (stated); batch 1"}))
    total = one_case(bench, write({"metric": "throughput_total_tok_s"}))
    assert (plain.counts_prompt, both.counts_prompt, total.counts_prompt) == (False, True, True)
    assert plain.time_has_prefill
    assert (plain.engine, plain.engine_version, plain.hardware) == ("vllm", "0.6.3", "a100-80gb-sxm")
    assert (plain.input_len, plain.output_len, plain.measured) == (1, 2048, 84.28)


def test_decode_rates_leave_out_the_prefill_save_where_the_engine_does_not(bench: Modules, write: Write) -> None:
    vllm = one_case(bench, write({"metric": "decode_tok_s"}))
    fast = one_case(
        bench, write({"metric": "decode_tok_s", "framework": "gpt-fast (PyTorch)", "note": "torch.compile"})
    )
    assert (vllm.time_has_prefill, fast.time_has_prefill) == (False, True)
    assert fast.torch_compile is True


def test_llama_bench_generates_from_an_empty_context_and_splits_layers(bench: Modules, write: Write) -> None:
    row = {"framework": "llama.cpp", "metric": "decode_tok_s", "dtype_or_quant": "Q4_K_M", "input_len": "0",
           "output_len": "512", "n_gpus": "2", "tp": "2"}  # fmt: skip
    case = one_case(bench, write(row))
    assert (case.empty_context, case.input_len, case.output_len) == (True, 0, 512)
    assert (case.tp, case.pp, case.num_gpus) == (1, 2, 2)


def test_a_micro_batch_is_tokens_of_a_step_and_a_depth_lies_in_the_cache(bench: Modules, write: Write) -> None:
    row = {"framework": "llama.cpp", "metric": "prefill_tok_s", "dtype_or_quant": "Q4_0", "batch_or_concurrency": "8",
           "input_len": "32768", "output_len": "512", "note": "pp512 at depth 32768, micro-batch 8, FlashAttention, x",
    }  # fmt: skip
    case = one_case(bench, write(row))
    assert (case.concurrency, case.max_num_batched_tokens, case.prior_len) == (1, 8, 32768)
    assert (case.input_len, case.output_len, case.flash_attention) == (512, 0, True)
    one = one_case(bench, write({**row, "metric": "decode_tok_s", "batch_or_concurrency": "1"}))
    assert (one.prior_len, one.input_len, one.output_len, one.empty_context) == (32768, 0, 512, False)


@pytest.mark.parametrize(
    ("source", "note", "flash"),
    [
        ("ggml-org/llama.cpp#17505", "pp512 at depth 32768 with micro-batch 1", True),
        ("ggml-org/llama.cpp#17505", "pp512, FlashAttention off", False),
        ("ggml-org/llama.cpp#7676", "pp512 with micro-batch 16", None),
    ],
)
def test_late_pull_requests_of_llama_cpp_have_flash_attention(
    bench: Modules, write: Write, source: str, note: str, flash: bool | None
) -> None:
    row = {"framework": "llama.cpp", "metric": "prefill_tok_s", "input_len": "512", "output_len": "0"}
    assert one_case(bench, write({**row, "source": source, "note": note})).flash_attention is flash


def test_a_window_of_pure_decode_is_decode_at_its_mean_context(bench: Modules, write: Write) -> None:
    note = "1-second window = pure decode with 39 running sequences; mean context about 1059 tokens"
    row = {
        "metric": "throughput_out_tok_s",
        "batch_or_concurrency": "39",
        "input_len": "",
        "output_len": "",
        "note": note,
    }
    case = one_case(bench, write(row))
    assert (case.metric, case.concurrency, case.input_len, case.time_has_prefill) == ("decode_tok_s", 39, 1059, False)


def test_layers_on_cards_one_after_the_other(bench: Modules, write: Write) -> None:
    piped = one_case(bench, write({"n_gpus": "2", "note": "PP2, median"}))
    mapped = one_case(bench, write({"framework": "transformers", "n_gpus": "4"}))
    split = one_case(bench, write({"n_gpus": "4", "tp": "4"}))
    assert [(case.tp, case.pp) for case in (piped, mapped, split)] == [(1, 2), (1, 4), (4, 1)]


def test_lengths_come_from_the_rows_of_the_same_run(bench: Modules, write: Write) -> None:
    row = {"batch_or_concurrency": "64", "input_len": "", "output_len": "", "note": "max batch 64, 10.0 req/s"}
    out, total = (
        {**row, "metric": f"throughput_{kind}_tok_s", "value": value}
        for kind, value in (("out", "2000"), ("total", "5000"))
    )
    cases, skipped = bench["cases"].read_cases(write(out, total))
    assert skipped == []
    assert [(case.input_len, case.output_len) for case in cases] == [(300, 200), (300, 200)]
    assert cases[0].assumed == ("lengths 300 and 200 from requests/s and tokens/s of the same run",)


def test_a_batch_that_does_not_fit_is_a_queue(bench: Modules, write: Write) -> None:
    row = {"model": "meta-llama/Meta-Llama-3-8B", "gpu": "NVIDIA A100-SXM4-40GB", "metric": "throughput_total_tok_s",
           "batch_or_concurrency": "64", "note": "static batch"}  # fmt: skip
    fits = one_case(bench, write({**row, "input_len": "1024", "output_len": "1024"}))
    waits = one_case(bench, write({**row, "input_len": "2048", "output_len": "2048"}))
    assert (fits.saturated, waits.saturated, waits.requests) == (False, True, 64)
    assert waits.assumed == ("of 64 sequences some wait: their cache is more than the memory",)


def test_a_context_beyond_the_models_own_is_taken_as_stretched(bench: Modules, write: Write) -> None:
    case = one_case(bench, write({"input_len": "129024"}))
    assert case.config.context_length == 129024 + 2048


def test_the_h20_tables_are_marked(bench: Modules, write: Write) -> None:
    source = "QwenLM/Qwen3 docs/source/getting_started/speed_benchmark.md@c7f51a1a"
    row = {"model": "Qwen/Qwen3-8B", "framework": "SGLang", "gpu": "NVIDIA H20-96GB"}
    assert one_case(bench, write({**row, "source": source})).h20_qwen3_table
    assert not one_case(bench, write(row)).h20_qwen3_table


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"grade": "C"}, "grade C, which isn't scored"),
        ({"grade": ""}, "grade: is not one of A, B and C. Grade the row"),
        ({"metric": "joules"},
         "metric = 'joules': is not a known metric. Known: decode_tok_s, e2e_tok_s, prefill_tok_s, "
         "ttft_ms, tpot_ms, throughput_out_tok_s, throughput_total_tok_s, mem_gb, kv_tokens, kv_gib, weights_gib, "
         "bw_gb_s, tflops"),
        ({"framework": "abacus"}, "framework = 'abacus': is not a known engine. Known: tensorrt-llm, sglang, lmdeploy, "
         "llama.cpp, gpt-fast, transformers, mlc-llm, llm-awq, vllm"),
        ({"value": "fast"}, "value = 'fast': is not a number above 0. Write the figure as the source prints it"),
        ({"value": "-3"}, "value = '-3': is not a number above 0. Write the figure as the source prints it"),
        ({"value": "nan"}, "value = 'nan': is not a number above 0. Write the figure as the source prints it"),
        ({"value": ""}, "value: is not a number above 0. Write the figure as the source prints it"),
        ({"tp": "4"}, "tp = 4: is more than the 1 GPUs. Correct one of the two"),
        ({"tp": "2", "n_gpus": "3"}, "tp = 2: doesn't divide the 3 GPUs. Correct one of the two"),
        ({"input_len": "many"}, "input_len = 'many': is not one number of tokens. Write the mean length"),
        ({"input_len": "-5"}, "input_len = '-5': is not a number of tokens that can be. Write the mean length"),
        ({"input_len": ""}, "input_len: is not stated. The time depends on it"),
        ({"output_len": ""}, "output_len: is not stated. The time depends on it"),
        ({"metric": "bw_gb_s", "model": "(hardware)"},
         "a figure of the card alone (datasheet, stream or best matmul), not of a kernel of a step"),
        ({"metric": "bw_gb_s", "framework": "gpt-fast (PyTorch)"},
         "the tokens/s of another row times the model's bytes: it would count one run twice"),
    ],
)  # fmt: skip
def test_a_bad_row_is_skipped_with_its_reason_and_the_rest_read(
    bench: Modules, write: Write, changed: dict[str, str], reason: str
) -> None:
    rows = bench["cases"].read_rows(write(changed, {}))
    assert rows.skipped == (("r1", reason),)
    assert [case.id for case in rows.cases] == ["r2"]


def test_a_row_of_another_width_is_skipped(bench: Modules, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    usual = ",".join(USUAL[column] for column in HEADER)
    path.write_text("\n".join([",".join(HEADER), "A,short", usual, "", f"{usual},more"]))
    rows = bench["cases"].read_rows(path)
    assert rows.skipped == (
        ("short", "has 2 cells under 17 columns"),
        ("r1", "has 18 cells under 17 columns"),
    )
    assert len(rows.cases) == 1


def test_a_source_with_an_unquoted_comma_is_joined_again(bench: Modules, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    cells = [USUAL[column] for column in HEADER[:-2]]
    path.write_text("\n".join([",".join(HEADER), ",".join([*cells, "a file (path unknown", " id 5)", "gmu 0.8"])]))
    case = one_case(bench, path)
    assert (case.source, case.note, case.gpu_memory_utilization) == ("a file (path unknown, id 5)", "gmu 0.8", 0.8)


@pytest.mark.parametrize("column", [column for column in HEADER if column != "arch_params_known"])
def test_a_missing_column_is_named(bench: Modules, write: Write, column: str) -> None:
    header = [name for name in HEADER if name != column]
    path = write({}, header=header)
    with pytest.raises(InputError) as refused:
        bench["cases"].read_rows(path)
    assert str(refused.value) == f"{path}: {column}: is a column that is missing. Found: {', '.join(header)}"


def test_a_file_that_is_no_table_is_refused(bench: Modules, tmp_path: Path) -> None:
    read_rows = bench["cases"].read_rows
    gone, empty, binary = (tmp_path / name for name in ("gone.csv", "empty.csv", "binary.csv"))
    empty.write_text("")
    binary.write_bytes(b"grade,\xff\xfe")
    with pytest.raises(InputError) as missing:
        read_rows(gone)
    assert str(missing.value) == f"{gone}: can't be read: No such file or directory. Name a CSV file"
    with pytest.raises(InputError, match=r"empty\.csv: is empty\. Its first line names the columns grade, id, model, "):
        read_rows(empty)
    with pytest.raises(InputError, match=r"binary\.csv: isn't a CSV text: .*\. Save it as UTF-8$"):
        read_rows(binary)


def test_kernels_are_read_with_their_shape_and_time(bench: Modules, write: Write) -> None:
    rows = bench["cases"].read_rows(
        write(
            {"model": "GEMM M=16 N=65536 K=8192", "metric": "bw_gb_s", "value": "1618",
             "note": "derived: bytes/measured 0.6651 ms; repeated-weight benchmark"},
            {"model": "(hardware)", "metric": "tflops", "value": "101.7", "note": "MEASURED fp16 GEMM M=64 N=K=12288"},
            {"model": "decode attention 32q/8kv heads d128", "metric": "bw_gb_s", "value": "1000",
             "dtype_or_quant": "BF16 KV", "batch_or_concurrency": "32", "input_len": "2048"},
            {"model": "Llama-3.1-8B prefill attention kernel", "metric": "tflops", "value": "116.5",
             "input_len": "2560", "note": "measured 165.9 us per layer; chunk 512 on history 2048"},
            {"model": "fused MoE layer (128 exp top8, 2048x768)", "metric": "tflops", "value": "2.34",
             "batch_or_concurrency": "8"},
        )
    )  # fmt: skip
    assert rows.skipped == ()
    gemm, square, decode, prefill, experts = rows.kernels
    assert (gemm.sizes, gemm.repeated, gemm.seconds) == (
        {"m": 16, "n": 65536, "k": 8192},
        True,
        pytest.approx(665.1e-6),
    )
    assert square.seconds == pytest.approx(2 * 64 * 12288**2 / 101.7e12)
    assert decode.seconds == pytest.approx(32 * 2048 * 2 * 8 * 128 * 2 / 1000e9)
    assert (prefill.sizes["query_len"], prefill.sizes["kv_len"], prefill.sizes["kv_heads"]) == (512, 2560, 8)
    assert experts.seconds == pytest.approx(6 * 8 * 8 * 2048 * 768 / 2.34e12)
    assert [case.rate(case.seconds) for case in rows.kernels] == pytest.approx([case.measured for case in rows.kernels])


def test_sizes_of_one_log_share_its_settings(bench: Modules, write: Write) -> None:
    row = {"batch_or_concurrency": "", "input_len": "", "output_len": "", "value": "10"}
    stated, silent = {**row, "metric": "kv_gib", "note": "gmu 0.8, max-model-len 4096"}, {**row, "metric": "kv_tokens"}
    sizes = bench["cases"].read_rows(write(stated, silent)).memories
    assert [size.notes.gpu_memory_utilization for size in sizes] == [0.8, 0.8]
    assert [size.notes.max_model_len for size in sizes] == [4096, 4096]


CELLS = st.sampled_from(
    ["", "0", "-1", "1e400", "nan", "inf", "8-16", "1,024", "~5", "None", "x" * 300, "../..", '"', "(", "\u00bd", " 3 ",
     "Qwen/Qwen2.5-7B", "GEMM M=8 N=8 K=8", "decode attention", "vLLM", "NVIDIA H100", "16", "131072", "kv_gib", "B"]
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.sampled_from(HEADER), CELLS, max_size=5), min_size=1, max_size=4))
def test_whatever_stands_in_a_cell_is_read_or_refused(
    bench: Modules, write: Write, changed: list[dict[str, str]]
) -> None:
    rows = bench["cases"].read_rows(write(*changed))
    assert len(rows.cases) + len(rows.kernels) + len(rows.memories) + len(rows.skipped) == len(changed)
    assert all(left.reason for left in rows.skipped)


def test_every_published_row_is_a_question_or_has_a_reason(bench: Modules, shared: Path) -> None:
    rows = bench["cases"].read_rows(shared / "measurements" / "published.csv")
    assert (len(rows.cases), len(rows.kernels), len(rows.memories)) == (841, 335, 274)
    reasons = Counter(left.reason.split(". ")[0] for left in rows.skipped)
    assert reasons.pop("grade C, which isn't scored") == 424
    assert reasons.pop("a figure of the card alone (datasheet, stream or best matmul), not of a kernel of a step") == 63
    assert reasons.pop("the tokens/s of another row times the model's bytes: it would count one run twice") == 24
    assert sum(reasons.values()) == 17
    assert {reason.split(" ")[0] for reason in reasons} == {"model", "gpu", "batch_or_concurrency", "a"}
    ids = [one.id for group in (rows.cases, rows.kernels, rows.memories, rows.skipped) for one in group]
    assert len(ids) == len(set(ids)) == 1978
