"""The fold over the inventory: against the hand formulas, published totals, and laws that every step obeys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from config_base import BASES, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, read
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formulas import configs

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from qwenjax.known_models import known_model_names
from qwenjax.ops import ops_of
from qwenjax.sharding import Mesh, check_mesh
from roofline import formulas as f
from roofline.count import (
    Attention,
    CountRow,
    DtypePolicy,
    Logits,
    count_params,
    count_step,
    count_weight_bytes,
    distinct_experts,
    sum_rows,
)

ATTENTION: tuple[Attention, ...] = ("causal", "dense")
LOGITS: tuple[Logits, ...] = ("last", "all")
FIELDS = ("flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes", "activation_bytes", "bytes")


def steps_of(config: ModelConfig) -> tuple[Step, ...]:
    longest = config.context_length
    return (
        Step.prefill(1, 1024),
        Step.prefill(5, 7),
        Step.prefill(2, 512, 4096),  # the last chunk of a longer prompt
        Step.decode(1, 1),
        Step.decode(3, 777),
        Step.decode(64, longest),
    )


def check_params(config: ModelConfig) -> None:
    counts = count_params(config)
    assert counts.groups == f.param_groups(config)
    assert counts.num_params == f.num_params(config) == sum(counts.groups.values())
    assert counts.num_active_params == f.num_active_params(config)
    assert counts.num_matmul_params == f.num_matmul_params(config)
    assert counts.num_active_matmul_params == f.num_matmul_params(config, experts="active")
    per_token = f.flops_per_token(config)
    assert counts.flops_per_token == {
        "backbone": per_token.backbone,
        "lm_head": per_token.lm_head,
        "total": per_token.total,
    }
    heads, head_dim, layers = config.num_attention_heads, config.head_dim, config.num_hidden_layers
    assert counts.attention_flops == {
        "prefill_causal_per_token_squared": f.prefill_attention_flops_per_token_squared(heads, head_dim, layers),
        "decode_per_context_token": f.attention_flops_per_pair(heads, head_dim, layers),
    }
    assert counts.kv_bytes_per_token == f.kv_bytes_per_token(layers, config.num_key_value_heads, head_dim, 2)
    assert counts.weight_bytes == 2 * counts.num_params


def check_step_sums(config: ModelConfig, step: Step, attention: Attention, logits: Logits) -> None:
    batch, query_len, kv_len = step.batch, step.query_len, step.kv_len
    rows = count_step(config, step, attention=attention, logits=logits, experts="all")
    by_kind = {kind: sum(row.flops for row in rows if row.kind == kind) for kind in ("matmul", "grouped", "attention")}
    expected = f.step_flops(config, query_len, kv_len, batch=batch, attention=attention, logits=logits)
    assert by_kind["attention"] == expected.attention
    assert by_kind["matmul"] + by_kind["grouped"] == expected.backbone + expected.lm_head
    sums = sum_rows(rows)
    assert sums["flops"] == expected.total
    assert sums["kv_read_bytes"] == f.kv_read_bytes(config, query_len, kv_len, 2, batch=batch)
    assert sums["kv_write_bytes"] == f.kv_write_bytes(config, query_len, 2, batch=batch)
    assert sums["weight_bytes"] == f.step_weight_bytes(config, batch * query_len, experts="all", embedding="rows")
    assert all(isinstance(sums[name], int) for name in FIELDS)
    assert sums["bytes"] == sums["weight_bytes"] + sums["kv_read_bytes"] + sums["kv_write_bytes"]


# Against the hand formulas


@pytest.mark.parametrize("name", known_model_names())
def test_known_models_equal_the_hand_formulas(name: str) -> None:
    config = ModelConfig.from_hf(name)
    check_params(config)
    for step in steps_of(config):
        for attention in ATTENTION:
            for logits in LOGITS:
                check_step_sums(config, step, attention, logits)


STEPS = st.builds(lambda b, t, past: Step(b, t, t + past), st.integers(1, 5), st.integers(1, 40), st.integers(0, 60))


@settings(deadline=None)
@given(configs(), STEPS, st.sampled_from(ATTENTION), st.sampled_from(LOGITS))
def test_any_architecture_equals_the_hand_formulas(
    config: ModelConfig, step: Step, attention: Attention, logits: Logits
) -> None:
    check_params(config)
    check_step_sums(config, step, attention, logits)


@pytest.mark.parametrize("name", ["Qwen2-57B-A14B", "Qwen3-30B-A3B", "Qwen3-235B-A22B"])
@pytest.mark.parametrize("tokens", [1, 2, 8, 33, 512])
def test_expected_experts_equal_the_hand_formula(name: str, tokens: int) -> None:
    config = ModelConfig.from_hf(name)
    step = Step.decode(tokens, 100)
    formula = f.distinct_experts(config.num_experts, config.num_experts_per_tok, tokens)
    assert distinct_experts(config, step) == pytest.approx(formula, rel=1e-12)
    read_bytes = sum_rows(count_step(config, step))["weight_bytes"]
    assert read_bytes == pytest.approx(f.step_weight_bytes(config, tokens, embedding="rows"), rel=1e-12)
    measured = config.num_experts_per_tok if tokens == 1 else config.num_experts_per_tok + 1
    exact = f.step_weight_bytes(config, tokens, experts=measured, embedding="rows")
    assert sum_rows(count_step(config, step, experts=measured))["weight_bytes"] == exact


# Published totals


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen2-57B-A14B", 57_408_658_944),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-32B", 32_762_123_264),
        ("Qwen3-30B-A3B", 30_532_122_624),
    ],
)
def test_published_totals(name: str, total: int) -> None:
    assert count_params(ModelConfig.from_hf(name)).num_params == total


def test_qwen25_7b_flops() -> None:
    config = ModelConfig.from_hf("Qwen2.5-7B")
    counts = count_params(config)
    assert counts.flops_per_token == {
        "backbone": 13_050_576_896, "lm_head": 1_089_994_752, "total": 14_140_571_648,
    }  # fmt: skip
    assert counts.attention_flops == {"prefill_causal_per_token_squared": 200_704, "decode_per_context_token": 401_408}
    # A request of 1024 tokens in and 256 out: 1279 positions through the backbone, 256 heads, causal with the diagonal.
    prefill = sum_rows(count_step(config, Step.prefill(1, 1024)))["flops"]
    decode = sum(sum_rows(count_step(config, Step.decode(1, s)))["flops"] for s in range(1025, 1280))
    assert round((prefill + decode) / 1e9, 3) == 17_299.303


def test_decode_bytes_of_a_mixture_by_batch() -> None:
    """The published table for Qwen2-57B-A14B in bfloat16, the looked-up embedding rows apart: GB a step by batch."""
    config = ModelConfig.from_hf("Qwen2-57B-A14B")
    table = {1: 27.41, 2: 38.20, 4: 55.90, 8: 79.83, 16: 102.08, 32: 112.35, 64: 113.71, 128: 113.73, 256: 113.73}
    for batch, gigabytes in table.items():
        rows = count_step(config, Step.decode(batch, 1))
        assert round(sum(row.weight_bytes for row in rows if row.op != "embed") / 1e9, 2) == gigabytes


def test_what_a_model_card_calls_active() -> None:
    assert round(count_params(ModelConfig.from_hf("Qwen2-57B-A14B")).num_active_params / 1e9, 2) == 14.25
    assert round(count_params(ModelConfig.from_hf("Qwen3-30B-A3B")).num_active_params / 1e9, 3) == 3.353


# Laws


@settings(deadline=None)
@given(configs(), STEPS, st.integers(1, 4), st.sampled_from(ATTENTION), st.sampled_from(LOGITS))
def test_flops_and_cache_are_linear_in_the_batch(
    config: ModelConfig, step: Step, factor: int, attention: Attention, logits: Logits
) -> None:
    larger = Step(step.batch * factor, step.query_len, step.kv_len)
    for once, more in zip(
        count_step(config, step, attention=attention, logits=logits, experts="all"),
        count_step(config, larger, attention=attention, logits=logits, experts="all"),
        strict=True,
    ):
        for name in ("flops", "kv_read_bytes", "kv_write_bytes", "activation_bytes"):
            assert getattr(more, name) == factor * getattr(once, name), (once.op, name)
        assert more.weight_bytes == once.weight_bytes * (factor if once.op == "embed" else 1)


@settings(deadline=None)
@given(configs(), st.integers(1, 4), st.integers(1, 40), st.integers(1, 40))
def test_a_prefill_is_a_shorter_prefill_and_a_chunk(config: ModelConfig, batch: int, first: int, second: int) -> None:
    whole = count_step(config, Step.prefill(batch, first + second), logits="all")
    start = count_step(config, Step.prefill(batch, first), logits="all")
    chunk = count_step(config, Step.prefill(batch, second, first + second), logits="all")
    for row, a, b in zip(whole, start, chunk, strict=True):
        assert row.flops == a.flops + b.flops, row.op
        assert row.kv_write_bytes == a.kv_write_bytes + b.kv_write_bytes
    if first + second > 1:
        steps = [count_step(config, Step.decode(batch, s)) for s in range(1, first + second + 1)]
        assert sum(sum_rows(rows)["flops"] for rows in steps) == sum_rows(whole)["flops"]


@settings(deadline=None)
@given(configs(), STEPS)
def test_dense_attention_is_an_upper_bound_and_equal_in_decode(config: ModelConfig, step: Step) -> None:
    causal, dense = (sum_rows(count_step(config, step, attention=kind)) for kind in ATTENTION)
    assert causal["flops"] <= dense["flops"]
    assert {**causal, "flops": 0} == {**dense, "flops": 0}
    if step.query_len == 1 and all(window is None for window in config.sliding_windows):
        assert causal == dense


@pytest.mark.parametrize("base", [QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE])
def test_parameters_do_not_depend_on_the_step_but_on_the_architecture(base: dict[str, Any]) -> None:
    config = read(base)
    for step in (Step(), Step(7, 5, 9)):
        assert tuple(row.op for row in count_step(config, step)) == tuple(op.name for op in ops_of(config))
    windowed = read(base, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert count_params(windowed).groups == count_params(config).groups
    assert count_weight_bytes(windowed) == count_weight_bytes(config)


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_a_tied_head_costs_its_flops_and_no_parameters(base: dict[str, Any]) -> None:
    tied, untied = read(base, tie_word_embeddings=True), read(base)
    assert count_params(untied).num_params - count_params(tied).num_params == 256 * 64
    assert count_params(tied).flops_per_token == count_params(untied).flops_per_token
    # It reads the same matrix, the one it shares.
    assert sum_rows(count_step(tied, Step(2, 3, 5))) == sum_rows(count_step(untied, Step(2, 3, 5)))


def test_windows_bound_what_a_decode_step_reads() -> None:
    config = read(
        QWEN3, num_hidden_layers=3, use_sliding_window=True, sliding_window=4, max_window_layers=1, head_dim=6
    )  # fmt: skip
    per_row = 2 * 2 * 6 * 2  # k and v, KV heads, head_dim, bytes
    for context in (1, 3, 4, 5, 100):
        rows = context + 2 * min(context, 4)
        sums = sum_rows(count_step(config, Step.decode(1, context)))
        assert sums["kv_read_bytes"] == rows * per_row
        attention = [row.flops for row in count_step(config, Step.decode(1, context)) if row.kind == "attention"]
        assert attention == [2 * 4 * 6 * rows] * 2


def test_rows_say_how_often_they_stand_in_the_model() -> None:
    config = read(QWEN2_MOE, num_hidden_layers=4, decoder_sparse_step=2)
    layers = {row.op: (row.layers, row.count) for row in count_step(config, Step())}
    assert layers["embed"] == layers["unembed"] == layers["final_norm"] == (1, 1)
    assert layers["qkv_proj"] == layers["mlp_residual"] == (4, 4)
    assert layers["gate_up_proj"] == layers["router"] == layers["shared_down_proj"] == (2, 2)


def test_activations_by_hand() -> None:
    config = read(QWEN3)
    rows = {row.op: row.activation_bytes for row in count_step(config, Step(3, 5, 7))}
    tokens = 3 * 5
    assert rows["embed"] == 2 * (tokens + tokens * 64)  # ids and rows
    assert rows["qkv_proj"] == 2 * 2 * tokens * (64 + (4 + 2 + 2) * 32)
    assert rows["scores"] == 2 * 2 * (tokens * 4 * 32 + tokens * 4 * 7)
    assert rows["softmax"] == 2 * 2 * 2 * tokens * 4 * 7
    assert rows["gate_up_proj"] == 2 * 2 * tokens * (64 + 2 * 128)
    assert rows["mlp_residual"] == 2 * 2 * tokens * 64 * 3
    assert rows["unembed"] == 2 * 3 * (64 + 256)
    wide = {row.op: row.activation_bytes for row in count_step(config, Step(3, 5, 7), dtype="float32")}
    assert wide == {op: 2 * count for op, count in rows.items()}


# Dtypes


def test_dtypes_by_class() -> None:
    assert DtypePolicy.of("bfloat16") == DtypePolicy("bfloat16", "bfloat16", "bfloat16")
    assert DtypePolicy.of("float32") == DtypePolicy("float32", "float32", "float32")
    assert DtypePolicy.of("int4") == DtypePolicy("int4", "bfloat16", "bfloat16")
    assert DtypePolicy.of("float8_e4m3fn", "float8_e5m2") == DtypePolicy("float8_e4m3fn", "bfloat16", "float8_e5m2")
    config, step = read(QWEN3), Step(2, 3, 5)
    usual, narrow = (
        sum_rows(count_step(config, step)),
        sum_rows(count_step(config, step, dtype="int4", kv_dtype="int8")),
    )
    assert narrow["weight_bytes"] * 4 == usual["weight_bytes"]
    assert narrow["kv_read_bytes"] * 2 == usual["kv_read_bytes"]
    assert (narrow["flops"], narrow["activation_bytes"]) == (usual["flops"], usual["activation_bytes"])


# Devices


def whole_of(rows: Sequence[CountRow], config: ModelConfig, mesh: Mesh) -> dict[str, list[Any]]:
    """What all devices do together, by op, where nothing is repeated: the ops whose letters are split."""
    split = {op.name for op in ops_of(config) if set(op.einsum) & set("KNF")}
    by_expert = {op.name for op in ops_of(config) if op.kind == "grouped"}
    devices = {row.op: (mesh.tp if row.op in split else 1) * (mesh.ep if row.op in by_expert else 1) for row in rows}
    return {
        row.op: [devices[row.op] * value for value in (row.flops, row.kv_read_bytes, row.kv_write_bytes)]
        for row in rows
    }


@settings(deadline=None)
@given(configs(), STEPS, st.sampled_from([2, 3]), st.sampled_from([1, 2, 3]))
def test_devices_sum_to_the_whole(config: ModelConfig, step: Step, tp: int, ep: int) -> None:
    mesh = Mesh(tp, ep)
    try:
        check_mesh(config, mesh)
    except InputError:
        return
    one = count_step(config, step, experts="all")
    many = count_step(config, step, experts="all", mesh=mesh)
    together = whole_of(many, config, mesh)
    for alone, device in zip(one, many, strict=True):
        if tp <= config.num_key_value_heads and device.op not in ("router", "unembed", "embed"):
            assert together[alone.op] == [alone.flops, alone.kv_read_bytes, alone.kv_write_bytes]
        for name in FIELDS:
            assert getattr(device, name) <= getattr(alone, name)
            assert getattr(device, name) * mesh.num_devices >= getattr(alone, name)


def test_a_device_with_a_repeated_kv_head_computes_it_whole() -> None:
    config = read(QWEN3, num_attention_heads=12, num_key_value_heads=3, head_dim=6, intermediate_size=144)
    rows = {row.op: row for row in count_step(config, Step(2, 5, 9), mesh=Mesh(6))}
    tokens, layers = 2 * 5, 2
    assert rows["qkv_proj"].flops == 2 * tokens * 64 * (2 + 1 + 1) * 6 * layers  # two query heads, one key, one value
    assert rows["qkv_proj"].weight_bytes == 2 * 64 * (2 + 1 + 1) * 6 * layers
    assert rows["scores"].flops * 6 == {row.op: row for row in count_step(config, Step(2, 5, 9))}["scores"].flops
    assert rows["scores"].kv_read_bytes == 2 * 9 * 6 * 2 * layers  # sequences, rows, one head, two bytes


# Arrays


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2)])
@pytest.mark.parametrize("attention", ATTENTION)
def test_arrays_of_steps_equal_single_steps(base: dict[str, Any], mesh: Mesh, attention: Attention) -> None:
    config = read(base, num_hidden_layers=4, use_sliding_window=True, sliding_window=6, max_window_layers=2)
    batches, queries, lengths = np.array([1, 2, 7, 32]), np.array([1, 5, 1, 9]), np.array([1, 5, 300, 20])
    options: dict[str, Any] = {"attention": attention, "mesh": mesh, "logits": "all"}
    swept = count_step(config, Step(batches, queries, lengths), check=False, **options)
    for i in range(4):
        single = count_step(config, Step(int(batches[i]), int(queries[i]), int(lengths[i])), **options)
        for array_row, row in zip(swept, single, strict=True):
            for name in FIELDS:
                value = np.broadcast_to(getattr(array_row, name), (4,))[i]
                # The expected number of experts is a power of a float, which two libraries round differently.
                inexact = row.kind == "grouped" and name in ("weight_bytes", "bytes")
                expected = pytest.approx(getattr(row, name), rel=1e-14) if inexact else getattr(row, name)
                assert value == expected, (row.op, name)


# Conventions that are named, and those that aren't

MIXTURE = read(QWEN3_MOE)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"attention": "full"},
            "attention = 'full': is not a convention that is known here. Known: causal, dense.",
        ),
        ({"logits": "first"}, "logits = 'first': is not a convention that is known here. Known: last, all."),
        (
            {"experts": "most"},
            "experts = 'most': must be expected, all or a whole number. Give the measured distinct experts of a layer.",
        ),
        (
            {"experts": 2.5},
            "experts = 2.5: must be expected, all or a whole number. Give the measured distinct experts of a layer.",
        ),
        (
            {"experts": True},
            "experts = True: must be expected, all or a whole number. Give the measured distinct experts of a layer.",
        ),
        (
            {"experts": 1},
            "experts = 1: must be from 2 (one token's) to 4. Count the distinct experts of one layer.",
        ),
        (
            {"experts": 5},
            "experts = 5: must be from 2 (one token's) to 4. Count the distinct experts of one layer.",
        ),
        (
            {"dtype": "bf16"},
            (
                "dtype = 'bf16': is not a dtype that is known here. Known: float64, float32, bfloat16, float16, "
                "float8_e4m3fn, float8_e5m2, int8, int4."
            ),
        ),
        (
            {"kv_dtype": "fp8"},
            (
                "kv_dtype = 'fp8': is not a dtype that is known here. Known: float64, float32, bfloat16, float16, "
                "float8_e4m3fn, float8_e5m2, int8, int4."
            ),
        ),
        ({"mesh": Mesh(ep=3)}, "ep = 3: doesn't divide num_experts 4. Use a divisor of it."),
    ],
)
def test_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        count_step(MIXTURE, Step(2, 3, 5), **options)
    assert str(caught.value) == text


def test_a_step_is_checked() -> None:
    with pytest.raises(InputError, match=r"^context = 2: is less than the 3 query tokens"):
        count_step(MIXTURE, Step(1, 3, 2))


@pytest.mark.parametrize("tokens", [1, 2, 3, 10, 1000, 10**6])
def test_distinct_experts_stay_within_what_routing_can_do(tokens: int) -> None:
    step = Step.prefill(1, tokens)
    assert distinct_experts(MIXTURE, step, "all") == 4
    expected = distinct_experts(MIXTURE, step)
    assert 2 <= expected <= min(4, 2 * tokens)
    assert distinct_experts(MIXTURE, Step.prefill(2, tokens)) >= expected
    assert distinct_experts(MIXTURE, step, 2) == 2
