"""The real model's jaxpr as a witness: its matrix products equal the inventory's, op by op, as integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from qwenjax import ModelConfig
from qwenjax.known_models import known_model_names
from qwenjax.moe_blocks import block_rows, num_blocks
from roofline import InputError, Step, count_step
from roofline.compiler import _dots, count_jaxpr_flops
from roofline.formulas.flops import step_flops

CONFIGS = {name: ModelConfig.from_hf(name) for name in known_model_names()}
DENSE = [name for name, config in CONFIGS.items() if not config.is_moe and config.quantization is None]
STEPS = (Step.prefill(2, 64), Step.prefill(1, 1000), Step.decode(3, 100), Step.decode(1, 4096))


@pytest.mark.parametrize("name", DENSE)
def test_three_witnesses_agree_on_every_known_dense_model(name: str) -> None:
    config = CONFIGS[name]
    for step in STEPS[::2]:
        counted = {row.op: row.flops for row in count_step(config, step, attention="dense") if row.flops}
        assert count_jaxpr_flops(config, step) == counted


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-8B", "Qwen3-32B", "Qwen2.5-72B"])
def test_totals_equal_the_closed_form(name: str, step: Step) -> None:
    config = CONFIGS[f"Qwen/{name}"]
    traced = sum(count_jaxpr_flops(config, step).values())
    by_hand = step_flops(config, step.query_len, step.kv_len, batch=step.batch, attention="dense")
    assert traced == by_hand.total


def test_a_prefill_holds_one_row_of_the_output_head_for_each_sequence() -> None:
    config = CONFIGS["Qwen/Qwen2.5-7B"]
    flops = count_jaxpr_flops(config, Step.prefill(2, 64))
    assert flops["unembed"] == 2 * 2 * config.vocab_size * config.hidden_size


def test_a_scan_body_counts_once_for_each_turn() -> None:
    def scanned(x: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, _: (carry @ carry, None), x, length=5)

    assert sum(flops for _, flops in _dots(jax.make_jaxpr(scanned)(jnp.ones((3, 3))).jaxpr, "", 1)) == 5 * 2 * 27


def test_a_while_loop_is_refused() -> None:
    def looped(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y.sum() < 10, lambda y: y @ y, x)

    with pytest.raises(InputError, match="a while loop's trip count can't be read off its jaxpr"):
        list(_dots(jax.make_jaxpr(looped)(jnp.ones((3, 3))).jaxpr, "", 1))


def test_a_product_outside_every_op_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import qwenjax.model as model

    original: Callable[..., Any] = model._unembed

    def with_a_stray_product(config: ModelConfig, params: Any, x_BUD: jax.Array) -> jax.Array:
        return original(config, params, x_BUD + jnp.einsum("BUD,BVD->BUV", x_BUD, x_BUD).sum())

    monkeypatch.setattr(model, "_unembed", with_a_stray_product)
    with pytest.raises(InputError, match="a matrix product runs outside every op of the inventory"):
        count_jaxpr_flops(CONFIGS["Qwen/Qwen3-0.6B"], Step.decode(1, 16))


MOE = [name for name, config in CONFIGS.items() if config.is_moe and config.quantization is None]
EXPERTS = ("experts_gate_up_proj", "experts_down_proj")


@pytest.mark.parametrize("name", MOE)
def test_a_decode_step_of_a_mixture_runs_the_routed_rows_alone(name: str) -> None:
    config, step = CONFIGS[name], Step.decode(2, 100)
    counted = {row.op: row.flops for row in count_step(config, step, attention="dense") if row.flops}
    assert count_jaxpr_flops(config, step) == counted


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen2-57B-A14B", "Qwen3-235B-A22B"])
def test_a_prefill_of_a_mixture_runs_the_routed_rows_in_whole_blocks(name: str) -> None:
    """What the grouped way adds to the routed rows is the filling of blocks, and nothing else differs."""
    config, step = CONFIGS[f"Qwen/{name}"], Step.prefill(2, 512)
    counted = {row.op: row.flops for row in count_step(config, step, attention="dense") if row.flops}
    rows, experts = 2 * 512 * config.num_experts_per_tok, config.num_experts
    blocked_rows = num_blocks(rows, experts) * block_rows(rows, experts)
    expected = {op: flops // rows * blocked_rows if op in EXPERTS else flops for op, flops in counted.items()}
    assert count_jaxpr_flops(config, step) == expected


def test_models_that_do_not_run_are_refused() -> None:
    with pytest.raises(InputError) as raised:
        count_jaxpr_flops(CONFIGS["Qwen/Qwen3-8B-FP8"], Step.decode(1, 16))
    assert str(raised.value) == (
        "quantization_config = 'fp8': quantised weights don't run here; only their costs are known. "
        "Use the unquantised checkpoint."
    )
