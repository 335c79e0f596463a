"""The real model's jaxpr as a witness: its matrix products equal the inventory's, op by op, as integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from qwenjax import ModelConfig
from qwenjax.known_models import known_model_names
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Qwen3-30B-A3B",
            "model_type = 'qwen3_moe': the mixture-of-experts model isn't built yet; only its costs are known. "
            "Use a dense model.",
        ),
        (
            "Qwen3-8B-FP8",
            "quantization_config = 'fp8': quantised weights don't run here; only their costs are known. "
            "Use the unquantised checkpoint.",
        ),
    ],
)
def test_models_that_do_not_run_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        count_jaxpr_flops(CONFIGS[f"Qwen/{name}"], Step.decode(1, 16))
    assert str(raised.value) == message
