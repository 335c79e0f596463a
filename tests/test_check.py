"""`roofline check`: every FLOP that the compiler counts has a hand formula, and whatever hasn't is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from cli_run import figures, run

import roofline.check
from qwenjax import ModelConfig
from qwenjax.known_models import known_model_names
from qwenjax.model import check_runnable
from roofline import InputError, Step, count_step
from roofline.check import StepCheck, check_program, check_sampling, step_of
from roofline.compiler_cost import LARGEST_EXACT
from roofline.formulas.compiled import CompiledStep, Elementwise, elementwise_costs, product_flops

Groups = dict[ModelConfig, list[str]]


def runs(config: ModelConfig) -> bool:
    """Whether the model code runs it; of the others, quantised ones among them, only the costs are known."""
    try:
        return bool(check_runnable(config))
    except InputError:
        return False


def _groups() -> Groups:
    """Known models that run, those of equal sizes together: what isn't a size isn't in any count."""
    groups: Groups = {}
    for name in known_model_names():
        config = ModelConfig.from_hf(name)
        if runs(config):
            plain = {"rope_theta": 1e6, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "dtype": None}
            ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": (), "pad_token_id": None}
            groups.setdefault(replace(config, **plain, **ids, initializer_range=0.02), []).append(name)
    return groups


GROUPS = _groups()


def wrong(check: StepCheck) -> list[Any]:
    return [row for row in check.rows if row.unexplained_flops or row.unexplained_transcendentals]


@pytest.mark.parametrize("config", GROUPS, ids=[names[0] for names in GROUPS.values()])
def test_every_flop_of_every_known_model_is_explained(config: ModelConfig) -> None:
    for phase, batch, query_len, context in (("prefill", 2, 48, 48), ("decode", 3, 1, 100)):
        check = check_program(config, step_of(config, phase, batch, query_len, context, "bfloat16"))
        assert wrong(check) == []
        assert check.remainders == ()
        assert check.totals["unexplained_flops"] == 0
        assert check.totals["unexplained_transcendentals"] == 0
        # The lowered program's own figure says so too, as far as float32 holds it.
        assert abs(check.program_flops / check.reported_flops - 1) <= check.rounding_bound < 1e-3


def test_no_known_model_is_left_out() -> None:
    checked = {name for names in GROUPS.values() for name in names}
    left = set(known_model_names()) - checked
    assert not any(runs(ModelConfig.from_hf(name)) for name in left)
    assert len(checked) >= 90
    assert {"Qwen/Qwen2.5-7B", "Qwen/Qwen3-235B-A22B", "Qwen/Qwen2-57B-A14B"} <= checked


STEPS = (
    CompiledStep("prefill", 2, 7, 7, "float32"),
    CompiledStep("prefill", 3, 1, 1, "bfloat16"),
    CompiledStep("chunk", 2, 3, 9, "bfloat16"),
    CompiledStep("decode", 3, 1, 9, "float32"),
    CompiledStep("decode", 1, 1, 1, "bfloat16"),
)
TINY = (
    tiny.config("qwen2", num_hidden_layers=2, tie_word_embeddings=True),
    tiny.config("qwen3", num_hidden_layers=1, attention_bias=True, num_key_value_heads=12),
    tiny.moe_config("qwen3_moe", num_hidden_layers=1, norm_topk_prob=True),
    tiny.moe_config("qwen2_moe", num_hidden_layers=2, decoder_sparse_step=2),
)


@pytest.mark.parametrize("config", TINY, ids=[config.model_type for config in TINY])
def test_nothing_is_lost_between_the_jaxpr_and_the_lowered_program(config: ModelConfig) -> None:
    """Below 2**24 the compiler's sum of the whole program is exact: it must equal the sum of what was walked."""
    for step in STEPS:
        check = check_program(config, step)
        assert check.holds, (step, wrong(check))
        assert check.program_flops < LARGEST_EXACT
        assert (check.program_flops, check.program_transcendentals) == (
            check.reported_flops,
            check.reported_transcendentals,
        )


TRAINED = (
    (TINY[0], CompiledStep("train", 2, 7, 7, "bfloat16")),
    (TINY[1], CompiledStep("train", 1, 2, 2, "float32", "full")),
    (TINY[1], CompiledStep("train", 2, 3, 3, "bfloat16", "dots")),
    (TINY[2], CompiledStep("train", 2, 7, 7, "bfloat16")),  # grouped experts
    (TINY[2], CompiledStep("train", 2, 7, 7, "float32", "full")),
    (TINY[3], CompiledStep("train", 1, 2, 2, "bfloat16")),  # gathered, a shared one, and a dense layer
    (TINY[3], CompiledStep("train", 1, 2, 2, "float32", "dots")),
)


@pytest.mark.parametrize(
    ("config", "step"), TRAINED, ids=[f"{config.model_type} {step.remat}" for config, step in TRAINED]
)
def test_a_training_step_is_explained_to_the_last_flop(config: ModelConfig, step: CompiledStep) -> None:
    check = check_program(config, step)
    assert check.holds, wrong(check)
    assert check.program_flops < LARGEST_EXACT
    assert (check.program_flops, check.program_transcendentals) == (
        check.reported_flops,
        check.reported_transcendentals,
    )


def test_products_of_a_training_step_run_once_forth_and_twice_back() -> None:
    config = TINY[1]
    once = product_flops(config, CompiledStep("prefill", 2, 7, 7))
    trained = product_flops(config, CompiledStep("train", 2, 7, 7))
    full = product_flops(config, CompiledStep("train", 2, 7, 7, remat="full"))
    assert trained == {op: 3 * (7 if op == "unembed" else 1) * flops for op, flops in once.items()}
    assert full["scores"] == 4 * once["scores"]
    assert full["down_proj"] == 3 * once["down_proj"]  # its result is added and needed by no gradient


def test_the_hand_products_equal_the_inventory() -> None:
    for config in TINY:
        step = CompiledStep("chunk", 2, 3, 9)
        counted = {row.op: row.flops for row in count_step(config, Step.prefill(2, 3, 9), attention="dense")}
        assert product_flops(config, step) == {op: flops for op, flops in counted.items() if flops}


def test_choosing_a_token_is_explained() -> None:
    check = check_sampling(TINY[0], STEPS[3])
    assert check.holds
    assert check.program_flops == check.reported_flops == check.totals["compiler_flops"]


def without(op: str, kind: str) -> Any:
    def costs(config: ModelConfig, step: CompiledStep) -> tuple[Elementwise, ...]:
        return tuple(cost for cost in elementwise_costs(config, step) if (cost.op, cost.kind) != (op, kind))

    return costs


COMMAND = "roofline check Qwen2.5-0.5B --phase decode --context 32"


def test_a_removed_formula_fails_the_check_and_its_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline.check, "elementwise_costs", without("softmax", "softmax"))
    record = figures(COMMAND, status=1)
    (row,) = [row for row in record["rows"] if row["difference"]]
    layers, heads, context = 24, 14, 32
    assert (row["op"], row["class"], row["hand_flops"]) == ("softmax", "softmax", 0)
    assert row["compiler_flops"] == row["difference"] == layers * heads * (4 * context - 1)
    assert record["totals"]["unexplained_flops"] == row["difference"]
    assert record["totals"]["unexplained_transcendentals"] == layers * heads * context
    assert {item["primitive"] for item in record["remainders"]} == {
        "reduce_max",
        "max",
        "sub",
        "exp",
        "reduce_sum",
        "div",
    }
    assert run(COMMAND).stdout.startswith(
        "Qwen2.5-0.5B: 42,672 FLOPs and 10,752 transcendentals of the step are unexplained"
    )


def test_a_removed_product_formula_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_o_proj(config: ModelConfig, step: CompiledStep) -> dict[str, int]:
        return {op: flops for op, flops in product_flops(config, step).items() if op != "o_proj"}

    monkeypatch.setattr(roofline.check, "product_flops", without_o_proj)
    record = figures(COMMAND, status=1)
    (row,) = [row for row in record["rows"] if row["difference"]]
    assert (row["op"], row["kind"], row["difference"]) == ("o_proj", "matmul", 2 * 24 * 896 * 896)
    assert [item["primitive"] for item in record["remainders"]] == ["dot_general"]


def test_stray_work_in_an_op_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import qwenjax.model as model

    def with_a_sine(config: ModelConfig, params: Any, x_BTD: jax.Array) -> jax.Array:
        with jax.named_scope("final_norm"):
            return model.rms_norm(jnp.sin(x_BTD), params["final_norm"], config.rms_norm_eps)

    monkeypatch.setattr(model, "_final_norm", with_a_sine)
    record = figures(COMMAND, status=1)
    assert record["totals"]["unexplained_flops"] == 0
    assert record["totals"]["unexplained_transcendentals"] == 896
    assert {"scope": "final_norm", "primitive": "sin", "transcendentals": 896}.items() <= next(
        item.items() for item in record["remainders"] if item["primitive"] == "sin"
    )


def test_stray_work_outside_every_op_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import qwenjax.model as model

    original = model._final_norm
    monkeypatch.setattr(model, "_final_norm", lambda config, params, x: original(config, params, x * 2))
    record = figures(COMMAND, status=1)
    (item,) = record["remainders"]
    assert (item["op"], item["work_class"], item["scope"], item["primitive"]) == ("unscoped", "unknown", "", "mul")
    assert record["totals"]["unexplained_flops"] == item["flops"] == 896


def test_experts_are_counted_at_their_routed_rows_and_the_filling_of_blocks_apart() -> None:
    record = figures("roofline check Qwen3-30B-A3B --phase prefill --query-len 64")
    rows = [row for row in record["rows"] if row["op"] == "experts_down_proj" and row["kind"] != "elementwise"]
    routed, filling = rows
    of_row, layers = 2 * 768 * 2048, 48
    assert (routed["kind"], filling["kind"]) == ("grouped", "block_padding")
    assert routed["hand_flops"] == routed["jaxpr_flops"] == routed["compiler_flops"] == layers * 64 * 8 * of_row
    # 512 rows in blocks of 8: 64 whole ones and a started one for each of 128 experts.
    assert filling["compiler_flops"] == filling["hand_flops"] == layers * 128 * 8 * of_row
    assert routed["reported_flops"] == layers * 8 * of_row  # one turn of the loop
    assert record["totals"]["unexplained_flops"] == 0


def test_the_record_has_what_was_promised() -> None:
    record = figures("roofline check Qwen2.5-0.5B --batch 2 --query-len 16 --context 64 --sampling")
    assert [step["phase"] for step in record["steps"]] == ["chunk", "decode", "chunk sampling", "decode sampling"]
    assert {"op", "hand_flops", "jaxpr_flops", "compiler_flops", "difference", "kind", "class"} <= set(
        record["rows"][0]
    )
    totals = record["totals"]
    assert totals["hand_flops"] == totals["compiler_flops"] == sum(row["hand_flops"] for row in record["rows"])
    assert totals["elementwise_flops"] == sum(
        row["compiler_flops"] for row in record["rows"] if row["kind"] == "elementwise"
    )
    scores = next(row for row in record["rows"] if row["op"] == "scores" and row["kind"] == "attention")
    pairs, layers, heads, head_dim = sum(range(49, 65)), 24, 14, 64
    assert scores["causal_flops"] == 2 * layers * 2 * heads * head_dim * pairs
    assert scores["hand_flops"] == 2 * layers * 2 * heads * head_dim * 16 * 64


def test_the_text_answers_first() -> None:
    result = run("roofline check Qwen2.5-0.5B --phase decode --context 32")
    assert result.status == 0
    assert result.stdout.startswith("Qwen2.5-0.5B: every FLOP of the step is explained, 991,752,759 of them")
    assert "unexplained: 0 FLOPs, 0 transcendentals." in result.stdout.splitlines()[0]


MESSAGES = {
    "--phase encode": "--phase = 'encode': is not a kind of step. Use prefill, decode, train.",
    "--query-len 0": "query_len = 0: must be at least 1. Give a count of sequences or tokens.",
    "--batch -3": "batch = -3: must be at least 1. Give a count of sequences or tokens.",
    "--phase prefill --query-len 9 --context 5": (
        "context = 5: is less than the 9 query tokens, which are attended too. Give past and new tokens together."
    ),
    "--phase decode --query-len 2": (
        "--query-len = 2: but a decode step takes one token of each sequence. "
        "For a chunk of several, use --phase prefill with --context."
    ),
    "--phase train --query-len 1": "query_len = 1: has no next token to train on. Use 2 or more.",
    "--phase train --query-len 4 --context 9": (
        "--context = 9: but a training step attends its own tokens. Use --query-len."
    ),
    "--phase train --remat some": "remat = 'some': is no known policy. Use one of none, full, dots.",
    "--dtype int8": "dtype = 'int8': isn't one that the model runs in. Choose bfloat16, float16, float32.",
}


@pytest.mark.parametrize("options", MESSAGES)
def test_a_step_that_cannot_be_is_refused(options: str) -> None:
    result = run(f"roofline check Qwen2.5-0.5B {options}")
    assert (result.status, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == MESSAGES[options]


@pytest.mark.parametrize("name", ["Qwen3-8B-FP8", "Qwen3-30B-A3B-FP8", "Qwen2.5-7B-Instruct-GPTQ-Int4"])
def test_the_command_checks_a_quantised_model_s_architecture_and_says_so(name: str) -> None:
    told = run(f"roofline check {name} --phase decode --context 64 --json")
    assert told.status == 0
    assert "weights don't run here: the architecture is checked with plain ones" in told.stderr
    assert json.loads(told.stdout)["totals"]["unexplained_flops"] == 0


def test_quantised_models_are_refused() -> None:
    with pytest.raises(InputError) as raised:
        check_program(ModelConfig.from_hf("Qwen3-8B-FP8"), CompiledStep("decode", 1, 1, 8))
    assert str(raised.value) == (
        "quantization_config = 'fp8': quantised weights don't run here; only their costs are known. "
        "Use the unquantised checkpoint."
    )
