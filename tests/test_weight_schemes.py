"""Stored bytes of weight schemes: published file sizes, hand counts of small matrices, names, and what steps read."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_run import figures, run
from config_base import QWEN2, QWEN3, QWEN3_MOE, read

import roofline
from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from qwenjax.quantization import Quantization, read_quantization
from qwenjax.sharding import Mesh
from roofline.count import DtypePolicy, count_params, count_step, count_weight_bytes
from roofline.predict import device_of, predict_step
from roofline.weight_schemes import (
    SCHEMES,
    Packing,
    bits_per_weight,
    op_weight_bits,
    scheme_for,
    scheme_of,
    stored_weight_bytes,
    weight_bits,
)

GIB = 2**30

# Sizes of files as the model cards of TheBloke's GGUF, AWQ and GPTQ repositories print them, and Qwen's own GGUF's, GB.
FILES = [
    ("Llama-2-7b-hf", "Q4_0", 3.83),
    ("Llama-2-7b-hf", "Q4_K_M", 4.08),
    ("Llama-2-7b-hf", "Q8_0", 7.16),
    ("Llama-2-13b-hf", "Q4_0", 7.37),
    ("Llama-2-13b-hf", "Q4_K_M", 7.87),
    ("Llama-2-13b-hf", "Q8_0", 13.83),
    ("Llama-2-70b-hf", "Q4_0", 38.87),
    ("Llama-2-70b-hf", "Q4_K_M", 41.42),
    ("Llama-2-70b-hf", "Q8_0", 73.29),
    ("Mistral-7B-v0.1", "Q4_K_M", 4.37),
    ("Mistral-7B-v0.1", "Q8_0", 7.70),
    ("Mixtral-8x7B-v0.1", "Q8_0", 49.62),
    ("Qwen3-8B", "Q4_K_M", 5.03),
    ("Qwen3-8B", "Q8_0", 8.71),
    ("Qwen2.5-7B-Instruct", "Q4_K_M", 4.68),
    ("Llama-2-7b-hf", "AWQ", 3.89),
    ("Llama-2-13b-hf", "AWQ", 7.25),
    ("Llama-2-70b-hf", "AWQ", 36.61),
    ("Mistral-7B-v0.1", "AWQ", 4.15),
    ("Llama-2-7b-hf", "GPTQ-Int4", 3.90),
    ("Llama-2-13b-hf", "GPTQ-Int4", 7.26),
    ("Llama-2-70b-hf", "GPTQ-Int4", 36.65),
]


@pytest.mark.parametrize(("model", "scheme", "published_gb"), FILES)
def test_published_file_sizes(model: str, scheme: str, published_gb: float) -> None:
    stored = stored_weight_bytes(ModelConfig.from_hf(model), scheme)
    # Rounded to 10 MB, and a GGUF file holds some MB of vocabulary too.
    assert stored / 1e9 == pytest.approx(published_gb, rel=0.0002, abs=0.0121)


@pytest.mark.parametrize(
    ("model", "scheme", "printed_gib"),
    [
        ("Meta-Llama-3-8B", "Q4_K_M", 4.58),
        ("Meta-Llama-3-8B", "F16", 14.96),
        ("Meta-Llama-3-70B", "Q4_K_M", 39.59),
    ],
)
def test_sizes_that_llama_bench_prints(model: str, scheme: str, printed_gib: float) -> None:
    assert round(stored_weight_bytes(ModelConfig.from_hf(model), scheme) / GIB, 2) == printed_gib


# Rows of weights_gib whose model isn't a known one by that name, or that count more than one device's share.
LOADED = {
    "m3940": ("Qwen3-8B", "NVFP4"),
    "m3944": ("Qwen3-14B", "NVFP4"),
    "m3948": ("Qwen3-30B-A3B", "NVFP4"),
    "m4086": ("Qwen2.5-7B-Instruct", "bitsandbytes 4-bit"),
    "m4087": ("Qwen3-30B-A3B", "BF16"),
}
LEFT_OUT = {
    "m3964": "pipeline stages",
    "m4053": "another architecture",
    "m4083": "the model isn't named",
    "m4085": "of 16 KV heads, see below",
}


def test_what_engines_print_of_loaded_weights(shared: Path) -> None:
    """vLLM's `model weights take`: at most 2 % more than what is stored (workspaces, padding), and never less."""
    with (shared / "measurements" / "published.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "weights_gib"]
    compared = 0
    for row in rows:
        if row["id"] in LEFT_OUT:
            continue
        model, scheme = LOADED.get(row["id"], (row["model"], row["dtype_or_quant"]))
        config = ModelConfig.from_hf(model)
        taken = scheme_of(config.quantization) if config.quantization else scheme_of(scheme)
        ratio = float(row["value"]) * GIB / stored_weight_bytes(config, taken, Mesh(int(row["tp"])))
        assert 0.999 < ratio < 1.025, row["id"]
        compared += 1
    assert compared >= 16


def test_the_first_llama_405b_of_fp8_explains_its_load_by_16_kv_heads() -> None:
    config = replace(ModelConfig.from_hf("Llama-3.1-405B-Instruct-FP8"), num_key_value_heads=16)
    stored = stored_weight_bytes(config, "stored", Mesh(8))
    assert stored / GIB == pytest.approx(57.752, rel=0.001)  # vllm-project/vllm#6746, per GPU


# Hand counts of one matrix


@pytest.mark.parametrize(
    ("packing", "bits"),
    [
        (Packing(16), 10 * 300 * 16),
        (Packing(8, tile_bits=32), 10 * 300 * 8 + 32),
        (Packing(8, (1, None), 16), 10 * 300 * 8 + 10 * 16),
        (Packing(4, (1, 128), 20), 10 * 300 * 4 + 10 * 3 * 20),
        (Packing(4, (1, 128), 20, 32), 10 * 300 * 4 + 10 * 3 * 20 + 300 * 32),
        (Packing(8, (4, 128), 16), 10 * 300 * 8 + 3 * 3 * 16),
    ],
)
def test_a_matrix_of_10_outputs_and_300_inputs(packing: Packing, bits: int) -> None:
    assert packing.matrix_bits(10, 300) == bits


DENSE_LAYER = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]  # q k v o gate up down
EXPERT = [(32, 64), (32, 64), (64, 32)]


def test_awq_packs_linears_and_leaves_the_rest() -> None:
    config = read(QWEN2, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32})
    linears = 2 * sum(out * into * 4 + out * -(-into // 32) * 20 for out, into in DENSE_LAYER)
    rest = 2 * 256 * 64 + 2 * (64 + 32 + 32 + 2 * 64) + 64  # embedding, head, biases, norms
    assert stored_weight_bytes(config, "stored") == (linears + 16 * rest) // 8


def test_gptq_adds_a_group_index_of_each_input() -> None:
    awq, gptq = (Quantization(method, 4, 32) for method in ("awq", "gptq"))
    config = read(QWEN2)
    difference = stored_weight_bytes(config, scheme_of(gptq)) - stored_weight_bytes(config, scheme_of(awq))
    assert difference == 2 * 4 * sum(into for _, into in DENSE_LAYER)


def test_modules_that_are_kept_stay_wide_and_have_no_scales() -> None:
    config = read(QWEN3_MOE)
    block = {"quant_method": "fp8", "weight_block_size": [24, 40]}
    whole, kept = (
        scheme_of(read_quantization({**block, "modules_to_not_convert": names}))
        for names in (["lm_head"], ["lm_head", "model.layers.1.mlp.experts.3"])
    )
    scales = sum(-(-out // 24) * -(-into // 40) for out, into in EXPERT)
    weights = sum(out * into for out, into in EXPERT)
    assert stored_weight_bytes(config, kept) - stored_weight_bytes(config, whole) == weights - 2 * scales


def test_patterns_of_compressed_tensors_are_regular_expressions() -> None:
    config = read(QWEN2)
    everything, none = (
        replace(SCHEMES["w8a8"], kept=names) for names in ((), (r"re:.*self_attn.*", r"re:.*mlp\..*_proj"))
    )
    assert stored_weight_bytes(config, none) == count_weight_bytes(config)
    assert stored_weight_bytes(config, everything) < count_weight_bytes(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4"])
@pytest.mark.parametrize("base", [QWEN2, QWEN3, QWEN3_MOE])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_dtype_s_scheme_equals_the_plain_count(dtype: str, base: dict[str, Any], tp: int) -> None:
    config = read(base)
    assert stored_weight_bytes(config, scheme_of(dtype), Mesh(tp)) == count_weight_bytes(config, dtype, Mesh(tp))


def test_a_tied_head_of_gguf_is_as_fine_as_a_head() -> None:
    tied, untied = (read(QWEN3, hidden_size=256, tie_word_embeddings=tied) for tied in (True, False))
    assert bits_per_weight(tied, SCHEMES["q4_k_m"])["embed_tokens"] == 6.5625
    assert bits_per_weight(untied, SCHEMES["q4_k_m"])["embed_tokens"] == 4.5
    assert bits_per_weight(untied, SCHEMES["q4_k_m"])["lm_head"] == 6.5625
    assert bits_per_weight(untied, SCHEMES["q4_k_m"])["input_norm"] == 32


def test_rows_that_are_no_blocks_of_256_take_another_format() -> None:
    config = ModelConfig.from_hf("Qwen2.5-0.5B-Instruct")  # rows of 896
    bits = bits_per_weight(config, SCHEMES["q4_k_m"])
    assert (float(bits["q_proj"]), float(bits["embed_tokens"])) == (5.5, 8.5)
    assert 4.5 < bits["down_proj"] < 6.5625  # rows of 4864


# What a step reads


def test_a_step_reads_the_stored_bytes() -> None:
    config = ModelConfig.from_hf("Qwen3-32B-AWQ")
    rows = {row.op: row for row in count_step(config, Step.decode(1, 100), weights="stored")}
    bits = op_weight_bits(config, scheme_of("awq"))
    assert bits == {
        "qkv_proj": 4.15625,
        "o_proj": 4.15625,
        "gate_up_proj": 4.15625,
        "down_proj": 4.15625,
        "unembed": 16,
    }
    elements = count_params(config).groups["mlp"]
    assert rows["gate_up_proj"].weight_bytes + rows["down_proj"].weight_bytes == elements * 4.15625 / 8
    everything = sum(row.weight_bytes for row in rows.values() if row.kind != "gather")
    assert everything + 151936 * 5120 * 2 == stored_weight_bytes(config, "stored")


def test_experts_read_the_bytes_of_those_that_are_chosen() -> None:
    config = ModelConfig.from_hf("Mixtral-8x7B-v0.1")
    rows = {row.op: row for row in count_step(config, Step.decode(1, 1), weights="int8-wo")}
    # Two experts of 32 layers: gate and up of 14336 outputs each, one byte a weight and two a scale.
    assert rows["experts_gate_up_proj"].weight_bytes == 32 * 2 * 2 * (14336 * 4096 + 14336 * 2)
    assert rows["unembed"].weight_bytes == 32000 * 4096 + 32000 * 2
    assert rows["router"].weight_bytes == 32 * 8 * 4096 * 2


def test_activations_and_cache_keep_their_type() -> None:
    config = read(QWEN2)
    plain, narrow = (count_step(config, Step.decode(2, 9), weights=name) for name in ("bf16", "fp8"))
    for a, b in zip(plain, narrow, strict=True):
        assert (a.flops, a.kv_read_bytes, a.activation_bytes) == (b.flops, b.kv_read_bytes, b.activation_bytes)
    assert sum(row.weight_bytes for row in narrow) < sum(row.weight_bytes for row in plain)


def test_sweeps_take_schemes() -> None:
    config = ModelConfig.from_hf("Qwen3-8B")
    swept = roofline.sweep(config, ["rtx-4090"], [1, 4], [100], weights="awq")
    one = predict_step(config, Step.decode(4, 100), "rtx-4090", weights="awq")
    assert swept["time_s"][0, 1, 0] == pytest.approx(one.time_s, rel=1e-12)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Qwen3-30B-A3B", "Llama-3.2-1B"])
def test_rows_sum_to_the_stored_bytes_and_devices_share_them(model: str, name: str) -> None:
    config = ModelConfig.from_hf(model)
    rows = count_step(config, Step.decode(1, 1), weights=name, experts="all")
    embedding = 0 if config.tie_word_embeddings else weight_bits(config, SCHEMES[name])["embed_tokens"] / 8
    read_bytes = sum(row.weight_bytes for row in rows if row.kind != "gather")
    stored = stored_weight_bytes(config, name)
    assert read_bytes + embedding == pytest.approx(stored, rel=1e-12)
    assert stored_weight_bytes(config, name, Mesh(2)) == pytest.approx(
        stored / 2, rel=4e-3
    )  # norms and routers are repeated


@pytest.mark.parametrize(
    ("weights", "chip", "dtype"),
    [
        ("awq", "h100-sxm", "bfloat16"),
        ("w8a16", "h100-sxm", "bfloat16"),
        ("int8-wo", "a100-80gb-sxm", "bfloat16"),
        ("q4_k_m", "rtx-4090", "bfloat16"),
        ("w8a8", "a100-80gb-sxm", "int8"),
        ("fp8", "h100-sxm", "float8_e4m3fn"),
        ("fp8", "a100-80gb-sxm", "bfloat16"),  # no float8 there: weights only
    ],
)
def test_products_run_at_the_type_that_multiplies(weights: str, chip: str, dtype: str) -> None:
    hardware = roofline.load_hardware(chip)
    policy = DtypePolicy.for_model(read(QWEN2), weights=weights)
    assert device_of(hardware, policy).flops_per_s == hardware.peak_flops_per_s[dtype]


# Names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("BF16", "bf16"),
        ("", "bf16"),
        ("FP16/BF16", "bf16"),
        ("F16", "gguf-f16"),
        ("FP8 (--quantization fp8, online) + FP8 KV", "fp8"),
        ("AWQ-INT4", "awq"),
        ("W4A16 (AWQ g128)", "awq"),
        ("GPTQ-Marlin (Int4)", "gptq-int4"),
        ("GPTQ (Int8)", "gptq-int8"),
        ("INT8 weight-only", "int8-wo"),
        ("INT4 g32", "int4-wo"),
        ("INT4 g128", "int4-wo-g128"),
        ("int4_wo", "int4-wo"),
        ("W8A8", "w8a8"),
        ("W8A16", "w8a16"),
        ("NVFP4", "nvfp4"),
        ("bitsandbytes 4-bit", "bnb-nf4"),
        ("Q4_K_M", "q4_k_m"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_the_spellings_that_people_use(text: str, name: str) -> None:
    assert scheme_of(text).name == name


def test_every_spelling_of_the_published_table_is_known(shared: Path) -> None:
    with (shared / "measurements" / "published.csv").open(encoding="utf-8", newline="") as file:
        spellings = {row["dtype_or_quant"] for row in csv.DictReader(file)}
    assert all(scheme_of(text).name for text in spellings)
    assert len(spellings) > 30


def test_a_group_size_in_the_text_is_taken() -> None:
    assert scheme_of("INT4 g64").linear.tile == (1, 64)
    assert scheme_of("INT4 g64").head.tile == (1, 64)
    assert scheme_of("AWQ g64").head.tile == (None, None)
    assert scheme_of("W8A8 g64").linear.tile == (1, None)  # one scale of each output: nothing to group


def test_an_unknown_scheme_lists_the_known() -> None:
    with pytest.raises(InputError) as caught:
        scheme_of("ternary")
    known = ", ".join(SCHEMES)
    assert str(caught.value) == f"weights = 'ternary': is not a weight scheme that is known here. Known: {known}."


STORED: list[tuple[dict[str, Any], str, Packing, tuple[str, ...]]] = [
    ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "gptq-int8", Packing(8, (1, 128), 24, 32), ()),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "gptq-int4", Packing(4, (1, None), 20, 32), ()),
    ({"quant_method": "awq", "bits": 4, "group_size": 64}, "awq", Packing(4, (1, 64), 20), ()),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 64]},
        "fp8-block",
        Packing(8, (128, 64), 16),
        ("float8_e4m3fn",),
    ),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", Packing(8, tile_bits=32), ("float8_e4m3fn",)),
    ({"quant_method": "fbgemm_fp8"}, "fp8-channel", Packing(8, (1, None), 32), ("float8_e4m3fn",)),
    ({"quant_algo": "FP8"}, "fp8", Packing(8, tile_bits=32), ("float8_e4m3fn",)),
    ({"quant_algo": "NVFP4"}, "nvfp4", Packing(4, (1, 16), 8), ("float4_e2m1fn",)),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bnb-int8", Packing(8, (1, None), 32), ("int8",)),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bnb-nf4",
        Packing(4, (1, 64), 32),
        (),
    ),
]


@pytest.mark.parametrize(("stated", "name", "packing", "compute"), STORED)
def test_schemes_of_quantization_configs(
    stated: dict[str, Any], name: str, packing: Packing, compute: tuple[str, ...]
) -> None:
    scheme = scheme_for(read(QWEN2, quantization_config=stated), "stored")
    assert (scheme.name, scheme.linear, scheme.compute) == (name, packing, compute)
    assert scheme.is_weight_only == (not compute)


@pytest.mark.parametrize(
    ("weights", "inputs", "name", "packing"),
    [
        ({"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8, "type": "int"}, "w8a8",
         Packing(8, (1, None), 16)),
        ({"num_bits": 8, "type": "int", "strategy": "channel"}, None, "w8a16", Packing(8, (1, None), 16)),
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None, "w4a16",
         Packing(4, (1, 128), 16)),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, {"num_bits": 8, "type": "float"}, "fp8",
         Packing(8, tile_bits=32)),
    ],
)  # fmt: skip
def test_schemes_of_compressed_tensors(
    weights: dict[str, Any], inputs: dict[str, Any] | None, name: str, packing: Packing
) -> None:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    stated = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    config = read(QWEN2, quantization_config=stated)
    scheme = scheme_for(config, "stored")
    assert (scheme.name, scheme.linear, scheme.kept) == (name, packing, ("lm_head",))
    assert scheme.is_weight_only == (inputs is None)


# The command line


def test_a_quantised_checkpoint_is_taken_as_it_is_stored() -> None:
    record = figures("roofline params Qwen3-32B-AWQ")
    assert record["weight_bytes"] == stored_weight_bytes(ModelConfig.from_hf("Qwen3-32B-AWQ"), "stored")
    assert (record["dtype"], record["kv_dtype"]) == ("awq", "float16")
    assert figures("roofline params Qwen3-32B-AWQ --dtype bfloat16")["weight_bytes"] == 2 * record["num_params"]


@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-8B-FP8"])
def test_every_estimate_takes_a_scheme(model: str) -> None:
    stored = stored_weight_bytes(ModelConfig.from_hf(model), "q4_k_m")
    assert figures(f"roofline params {model} --weights Q4_K_M")["weight_bytes"] == stored
    plan = figures(f"roofline memory {model} --weights q4_k_m --hardware rtx-4090 --max-model-len 4096")
    assert plan["weight_bytes"] == stored
    step = figures(f"roofline step {model} --weights q4_k_m --phase decode --context 100 --hardware rtx-4090")
    assert step["dtype"] == "q4_k_m"
    row = figures(
        f"roofline predict {model} --weights q4_k_m --hardware rtx-4090 --prompt 99 --output 2 --profile bound"
    )["rows"][0]
    assert row["tpot_s"] == pytest.approx(step["totals"]["time_s"], rel=1e-9)


def test_scheme_and_dtype_are_not_both_taken() -> None:
    result = run("roofline params Qwen3-8B --weights awq --dtype int8")
    assert (result.status, result.stderr) == (
        2, "--weights = 'awq': and --dtype int8 both say how weights are stored. Give one.\n",
    )  # fmt: skip
