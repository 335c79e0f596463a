"""The estimating commands: what --json prints is what Python computes, and the text says the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cli_run import as_json, figures, run, text_of
from config_base import DROP, QWEN3_MOE, changed

import roofline
from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.known_models import known_model_facts, known_model_names
from qwenjax.sharding import Mesh
from roofline import formulas
from roofline.count import sum_rows
from roofline.memory import plan_memory
from roofline.utilization import compute_mbu, compute_mfu

MODELS = ("Qwen2.5-7B", "Qwen3-30B-A3B", "Qwen3-0.6B", "Qwen2-57B-A14B")
DECODE = "roofline step Qwen2.5-7B --phase decode"


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_hf(name)


# params


@pytest.mark.parametrize("name", MODELS)
def test_params_are_the_counts_of_the_python_api(name: str) -> None:
    record, counts = figures(f"roofline params {name}"), roofline.count_params(config_of(name))
    assert {key: record[key] for key in asdict(counts)} == as_json(counts)
    assert sum(record["groups"].values()) == record["num_params"]
    assert set(record["groups"]) == {
        "embedding", "attention", "attention_bias", "qk_norm", "mlp", "router", "experts", "shared_expert",
        "shared_expert_gate", "norm", "lm_head",
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_bill_of_materials_adds_up(name: str) -> None:
    record = figures(f"roofline params {name}")
    bill = record["bill"]
    assert {row["component"]: row["weights"] for row in bill} == record["groups"]
    assert sum(row["flops_per_token"] for row in bill) == record["flops_per_token"]["total"]
    assert sum(row["kv_bytes_per_token"] for row in bill) == record["kv_bytes_per_token"]
    head = next(row for row in bill if row["component"] == "lm_head")
    assert head["flops_per_token"] == record["flops_per_token"]["lm_head"]


def test_a_mixed_model_s_bill_adds_up_too(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(QWEN3_MOE, num_hidden_layers=3, mlp_only_layers=[1])))
    record = figures("roofline params", str(path))
    matmuls = {row["name"]: row for row in record["matmuls"]}
    assert [matmuls[name]["layers"] for name in ("q_proj", "gate_proj", "experts_gate_proj")] == [3, 1, 2]
    assert (
        sum(row["flops_per_token"] * row["layers"] for row in matmuls.values())
        == (record["flops_per_token"]["backbone"])
    )
    assert sum(row["flops_per_token"] for row in record["bill"]) == record["flops_per_token"]["total"]


def test_the_matmuls_of_a_layer_are_the_seven_of_the_lost_table() -> None:
    rows = figures("roofline params Qwen2.5-7B")["matmuls"]
    # Ledger S000-014 to S000-021: in, out, weights, FLOPs per token.
    keys = ("in_features", "out_features", "weights", "flops_per_token")
    assert {row["name"]: [row[key] for key in keys] for row in rows} == {
        "q_proj": [3584, 3584, 12845056, 25690112],
        "k_proj": [3584, 512, 1835008, 3670016],
        "v_proj": [3584, 512, 1835008, 3670016],
        "o_proj": [3584, 3584, 12845056, 25690112],
        "gate_proj": [3584, 18944, 67895296, 135790592],
        "up_proj": [3584, 18944, 67895296, 135790592],
        "down_proj": [18944, 3584, 67895296, 135790592],
    }  # fmt: skip
    assert [sum(row[key] for row in rows) for key in ("weights", "flops_per_token")] == [233046016, 466092032]


@pytest.mark.parametrize("name", MODELS)
def test_the_matmuls_of_all_layers_are_the_backbone(name: str) -> None:
    record = figures(f"roofline params {name}")
    assert (
        sum(row["layers"] * row["flops_per_token"] for row in record["matmuls"])
        == (record["flops_per_token"]["backbone"])
    )


def test_experts_are_copies_of_which_a_token_uses_some() -> None:
    row = next(r for r in figures("roofline params Qwen3-30B-A3B")["matmuls"] if r["name"] == "experts_down_proj")
    assert row == {
        "name": "experts_down_proj", "in_features": 768, "out_features": 2048, "copies": 128, "layers": 48,
        "weights": 128 * 768 * 2048, "flops_per_token": 2 * 8 * 768 * 2048,
    }  # fmt: skip


def test_every_published_count_is_explained() -> None:
    names = known_model_names()
    unexplained = {}
    for name in names:
        stored = figures(f"roofline params {name}")["stored"]
        if stored["published"] != stored["stored"]:
            unexplained[name] = stored
    assert unexplained == {}
    assert len(names) > 100


def test_a_stored_count_that_differs_is_explained_term_by_term() -> None:
    record = figures("roofline params Qwen/Qwen3-0.6B")
    facts = known_model_facts("Qwen3-0.6B")
    assert record["stored"] == {
        "stored": facts.stored_params,
        "differences": [{"reason": "lm_head stored although tied", "elements": 151936 * 1024}],
        "published": facts.stored_params,
        "published_note": "lm_head stored although tied",
        "source": facts.source,
    }
    assert "lm_head stored although tied: +155,582,464" in text_of("roofline params Qwen3-0.6B")


def test_narrow_dtypes_change_the_bytes_alone() -> None:
    wide, narrow = figures("roofline params Qwen3-8B"), figures("roofline params Qwen3-8B --dtype int4 --kv-dtype int8")
    assert narrow["weight_bytes"] == wide["weight_bytes"] / 4
    assert narrow["kv_bytes_per_token"] == wide["kv_bytes_per_token"] / 2
    assert [narrow[key] for key in ("dtype", "kv_dtype", "num_params")] == ["int4", "int8", wide["num_params"]]


def test_what_was_taken_by_default_goes_to_stderr_and_into_the_notes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(QWEN3_MOE, torch_dtype=DROP)))
    result = run("roofline params", str(path), "--json")
    text = "missing; estimates take bfloat16 unless told otherwise"
    assert result.stderr == f"default: dtype: {text}\n"
    assert json.loads(result.stdout)["notes"] == [{"kind": "default", "field": "dtype", "text": text}]
    assert run("roofline params", str(path)).stderr == result.stderr


def test_quantised_checkpoints_are_taken_as_they_are_stored_and_say_so() -> None:
    note = (
        "default: quantization_config: fp8 weights of 8 bits as they are stored, scales and unquantised parts "
        "included; --weights or --dtype takes others\n"
    )
    assert run("roofline params Qwen3-235B-A22B-FP8").stderr == note
    assert run("roofline params Qwen3-235B-A22B-FP8 --dtype float8_e4m3fn").stderr == ""


# step


TIMED = ("compute_s", "memory_s", "communication_s", "overhead_s", "time_s", "bound", "mfu", "mbu")
STEPS = {
    "--phase decode --batch 8 --context 2048": Step.decode(8, 2048),
    "--phase decode --batch 3 --query-len 1 --context 17": Step.decode(3, 17),
    "--phase prefill --batch 2 --query-len 300": Step.prefill(2, 300),
    "--phase prefill --query-len 300 --context 900": Step.prefill(1, 300, 900),
    "--phase prefill --context 500": Step.prefill(1, 500),
    "--phase decode": Step.decode(1, 1024),
    "--phase prefill": Step.prefill(1, 1024),
}


@pytest.mark.parametrize("options", STEPS)
@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-30B-A3B"])
def test_steps_are_timed_as_the_python_api_does(name: str, options: str) -> None:
    step = STEPS[options]
    record = figures(f"roofline step {name} --hardware rtx-4090 {options}")
    times = roofline.predict_step(config_of(name), step, "rtx-4090")
    assert [record[key] for key in ("batch", "query_len", "context")] == [step.batch, step.query_len, step.kv_len]
    names = (
        "compute_s",
        "memory_s",
        "communication_s",
        "overhead_s",
        "time_s",
        "bound",
        "mfu",
        "mbu",
        "flops",
        "bytes",
    )
    assert {key: record["totals"][key] for key in names} == {key: getattr(times, key) for key in names}
    assert record["totals"]["tokens_per_s"] == step.batch * step.query_len / times.time_s
    expected = [
        {**asdict(op.row), "intensity": op.intensity, "time_s": op.time_s, "bound": op.bound} for op in times.ops
    ]
    assert record["rows"] == expected
    assert record["profile"]["name"] == "bound"


def test_a_step_without_a_device_has_counts_and_no_times() -> None:
    record = figures("roofline step Qwen3-30B-A3B --phase decode --batch 4 --context 64")
    counts = roofline.count_step(config_of("Qwen3-30B-A3B"), Step.decode(4, 64))
    assert {key: record["totals"][key] for key in sum_rows(counts)} == sum_rows(counts)
    assert [row["flops"] for row in record["rows"]] == [row.flops for row in counts]
    assert {record["totals"][key] for key in (*TIMED, "tokens_per_s")} == {None}
    assert {row["time_s"] for row in record["rows"]} == {row["bound"] for row in record["rows"]} == {None}
    assert record["hardware"] is record["profile"] is record["measured"] is None


def test_conventions_and_splits_reach_the_count() -> None:
    config = config_of("Qwen3-30B-A3B")
    record = figures(
        "roofline step Qwen3-30B-A3B --phase prefill --query-len 64 --attention dense --logits all --experts 100 "
        "--dtype float8_e4m3fn --kv-dtype int8 --tp 2 --ep 4 --hardware h100-sxm --bandwidth 2e12 --profile bound"
    )
    times = roofline.predict_step(
        config, Step.prefill(1, 64), "h100-sxm", attention="dense", logits="all", experts=100, dtype="float8_e4m3fn",
        kv_dtype="int8", tp=2, ep=4, bandwidth=2e12,
    )  # fmt: skip
    assert record["totals"]["time_s"] == times.time_s
    assert [row["weight_bytes"] for row in record["rows"]] == [op.row.weight_bytes for op in times.ops]
    assert record["communication"] == [asdict(row) for row in times.comms]
    assert record["device"]["bandwidth_bytes_per_s"] == 2e12
    assert [record[key] for key in ("attention", "logits", "experts", "distinct_experts")] == ["dense", "all", 100, 100]
    assert [record[key] for key in ("tp", "ep", "dtype", "kv_dtype")] == [2, 4, "float8_e4m3fn", "int8"]


def test_the_seed_s_measured_decode_is_within_the_card_s_bandwidth() -> None:
    # Ledger 000 11: 61.9 tokens/s imply 875 GB/s, and 943 GB/s when the embedding table is counted as read.
    seconds = 1 / 61.9
    record = figures(f"{DECODE} --context 1 --hardware rtx-4090 --bandwidth measured --measured-s {seconds}")
    measured, totals = record["measured"], record["totals"]
    assert measured["implied_bandwidth_bytes_per_s"] == pytest.approx(875e9, rel=1e-3)
    assert measured["mfu"] == compute_mfu(totals["flops"], seconds, record["device"]["flops_per_s"])
    assert measured["mbu"] == compute_mbu(totals["bytes"], seconds, 887e9)
    assert measured["tokens_per_s"] == 1 / seconds
    assert measured["bound_fraction"] == totals["time_s"] / seconds
    assert measured["problems"] == []


def test_a_time_that_no_hardware_reaches_is_exit_status_1() -> None:
    line = f"{DECODE} --context 1 --hardware rtx-4090 --bandwidth measured --measured-s 0.015"
    record = figures(line, status=1)
    result = run(line)
    problem = record["measured"]["problems"][0]
    assert problem.startswith("mbu = 1.0629: is above 1, which no hardware does. Likely cause: the time is too short, ")
    assert result.stderr == f"{problem}\n"
    assert "Measured 15.00 ms: 66.7 tokens/s, implies 942.8 GB/s" in result.stdout
    assert record["measured"]["mbu"] is None
    assert record["measured"]["mfu"] == compute_mfu(record["totals"]["flops"], 0.015, 165.2e12)


def test_a_measured_time_without_a_device_implies_rates_only() -> None:
    record = figures(f"{DECODE} --context 1 --measured-s 0.5")
    measured = record["measured"]
    assert measured["implied_bandwidth_bytes_per_s"] == record["totals"]["bytes"] / 0.5
    assert measured["implied_flops_per_s"] == record["totals"]["flops"] / 0.5
    assert [measured[key] for key in ("mfu", "mbu", "bound_fraction")] == [None] * 3
    assert "implies 28.28 GB/s" in text_of(f"{DECODE} --context 1 --measured-s 0.5")


def test_a_length_that_was_not_given_is_said_and_within_the_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_MOE))  # 512 positions
    result = run("roofline step", str(path), "--phase", "decode")
    assert result.stderr == "default: --context: not given; 512 tokens taken\n"
    assert figures("roofline step", str(path), "--phase", "prefill")["query_len"] == 512
    assert figures("roofline step", str(path), "--phase", "prefill", "--context", "9")["notes"] == []


# predict, memory, experts


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-30B-A3B"])
def test_requests_are_predicted_as_the_python_api_does(name: str) -> None:
    record = figures(f"roofline predict {name} --hardware h100-sxm --prompt 200 --output 20 --batch 1..3,16")
    prediction = roofline.predict(config_of(name), "h100-sxm", prompt=200, output=20, batch=(1, 2, 3, 16))
    assert record["rows"] == as_json(prediction.rows)
    profile = prediction.profile
    assert record["profile"] == {**profile.summary, "sources": {}, "nearest": None}
    assert [row["batch"] for row in record["rows"]] == [1, 2, 3, 16]


def test_request_options_reach_the_prediction() -> None:
    line = (
        "roofline predict Qwen3-30B-A3B --hardware h100-sxm --prompt 64 --output 4 --batch 8 --tp 2 --ep 2 "
        "--experts 40 --dtype float8_e4m3fn --kv-dtype int8 --bandwidth 3e12 --profile bound"
    )
    prediction = roofline.predict(
        config_of("Qwen3-30B-A3B"), "h100-sxm", prompt=64, output=4, batch=8, tp=2, ep=2, experts=40,
        dtype="float8_e4m3fn", kv_dtype="int8", bandwidth=3e12,
    )  # fmt: skip
    assert figures(line)["rows"] == as_json(prediction.rows)


def test_one_token_has_no_time_for_later_ones() -> None:
    row = figures("roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 64 --output 1")["rows"][0]
    assert [row["tpot_s"], row["tokens_per_s_per_sequence"]] == [None, None]
    assert row["ttft_s"] == row["e2e_s"]


def test_a_prediction_says_that_it_is_a_bound_whether_it_fits_and_what_limits() -> None:
    text = text_of("roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 1024 --output 256 --batch 8")
    assert text.splitlines()[0] == (
        "Qwen2.5-7B on rtx-4090, 1,024 tokens in, 256 out, batch 8: first token after at least 659.0 ms, at least "
        "14.55 ms a token after that, at most 468.6 tokens/s, limited by weights from memory (a lower bound in time)"
    )
    assert "Validation: none needed: a lower bound in time, which no run beats" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["8", "yes", "658.964", "14.554", "4,370.185", "68.7", "468.6"] in [line[:7] for line in lines]
    wide = text_of("roofline predict Qwen3-32B --hardware rtx-4090 --prompt 1024 --output 8 --batch 1,2")
    assert ", batch 2, none of which fits in memory: " in wide.splitlines()[0]


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        ("", {}),
        ("--max-model-len 4096 --gpu-memory-utilization 0.8", {"max_model_len": 4096, "gpu_memory_utilization": 0.8}),
        ("--max-num-batched-tokens 2048 --overhead-bytes 7", {"max_num_batched_tokens": 2048, "overhead_bytes": 7}),
        ("--kv-pool-bytes 12345678 --kv-dtype int8", {"kv_pool_bytes": 12345678, "kv_dtype": "int8"}),
        ("--dtype int8 --tp 2", {"dtype": "int8", "mesh": Mesh(2)}),
    ],
)
def test_memory_is_the_plan_of_the_python_api(options: str, keywords: dict[str, Any]) -> None:
    record = figures(f"roofline memory Qwen2.5-7B --hardware rtx-4090 {options}")
    plan = plan_memory(config_of("Qwen2.5-7B"), roofline.load_hardware("rtx-4090"), **keywords)
    assert {key: record[key] for key in asdict(plan)} == as_json(asdict(plan))
    figures_with_source = {key for key in asdict(plan) if key.endswith(("_bytes", "_tokens", "_token", "_max_len"))}
    assert set(record["sources"]) == figures_with_source


def test_the_seed_s_measured_pool_gives_its_tokens_and_concurrency() -> None:
    line = "roofline memory Qwen2.5-7B --hardware rtx-4090 --kv-pool-bytes 4982964224 --max-model-len"
    assert [figures(f"{line} {length}")["kv_tokens"] for length in (1280, 8192)] == [86896, 86896]
    assert int(figures(f"{line} 1280")["concurrency_at_max_len"]) == 67
    assert figures(f"{line} 8192")["concurrency_at_max_len"] == pytest.approx(10.61, abs=0.005)
    assert text_of(f"{line} 8192").splitlines()[0] == (
        "Qwen2.5-7B on rtx-4090 fits: KV pool 4.64 GiB (4.983 GB), 86,896 tokens, 10.61 sequences of 8,192 tokens"
    )


# Batch, experts touched, GB a step, GB a token, percent of all readable weights: ledger S000-229 to S000-246.
EXPERTS = {
    "Qwen2-57B-A14B": [
        (1, 8, 27.40946432, 27.40946432, 24.1008426454),
        (8, 42.0090293884, 79.83121076, 9.978901345, 70.1947118066),
        (64, 63.9875635804, 113.709071059, 1.7767042353, 99.983144397),
        (256, 64, 113.72824064, 0.44425094, 100),
    ],
    "Qwen3-30B-A3B": [
        (1, 8, 6.083735552, 6.083735552, 10.0654248174),
        (2, 15.5, 9.481121792, 4.740560896, 15.6863357663),
        (128, 127.966922449, 60.4269317631, 0.472085404399, 99.9752098708),
    ],
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_against_batch_are_the_lost_table(name: str) -> None:
    record = figures(f"roofline experts {name}")
    rows = {row["batch"]: row for row in record["rows"]}
    assert list(rows) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for batch, experts, step_gb, token_gb, share in EXPERTS[name]:
        row = rows[batch]
        got = [row["distinct_experts"], row["weight_bytes"] / 1e9, row["weight_bytes_per_token"] / 1e9]
        assert [*got, 100 * (1 - row["saving"])] == pytest.approx([experts, step_gb, token_gb, share], rel=1e-9)
        assert row["time_s"] is None


@pytest.mark.parametrize(("name", "batch"), [("Qwen2-57B-A14B", 35), ("Qwen3-30B-A3B", 72)])
def test_the_batch_from_where_on_nothing_is_saved(name: str, batch: int) -> None:
    record = figures(f"roofline experts {name} --batch {batch - 1},{batch}")
    before, after = (row["distinct_experts"] / record["num_experts"] for row in record["rows"])
    assert record["touch_batch"] == batch  # S000-247
    assert before < record["touch_fraction"] == 0.99 <= after


def test_expert_rows_agree_with_the_hand_formula_and_the_step_s_time() -> None:
    config = config_of("Qwen3-30B-A3B")
    record = figures("roofline experts Qwen3-30B-A3B --hardware h100-sxm --batch 5,70 --context 333 --dtype int8")
    for row in record["rows"]:
        hand = formulas.expert_row(config, row["batch"], weight_bytes=1)
        assert row["weight_bytes"] == pytest.approx(hand.weight_bytes, rel=1e-12)
        assert 1 - row["saving"] == pytest.approx(hand.fraction_of_all, rel=1e-12)
        times = roofline.predict_step(config, Step.decode(row["batch"], 333), "h100-sxm", dtype="int8")
        assert row["time_s"] == times.time_s
