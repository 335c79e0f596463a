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
from roofline.compiler import _dots, count_jaxpr_flops, op_of
from roofline.compiler_cost import LARGEST_EXACT, Cost, Work, cost_of, reported_cost, tally_program
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


def tally_of(function: Callable[..., Any], *arguments: Any) -> Any:
    return tally_program(jax.make_jaxpr(function)(*arguments))


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_work_has_its_scope_through_inner_programs_and_gradients() -> None:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        with jax.named_scope("values"):
            return jnp.exp(x)

    def outer(x: jax.Array) -> jax.Array:
        with jax.named_scope("scores"):
            return inner(x).sum()

    assert tally_of(outer, floats(7)).transcendentals == {Work("scores/values", "exp", "float32"): 7}
    scopes = {work.scope for work in tally_of(jax.grad(outer), floats(7)).flops}
    assert {op_of(scope) for scope in scopes} == {"values"}
    assert op_of("transpose(jvp(scores))/jit(inner)") == "scores"
    assert op_of("") == op_of("jvp()") == "unscoped"


def test_loops_count_their_turns_and_the_compiler_one() -> None:
    def scanned(x: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, _: (carry @ carry, None), x, length=5)

    tally, product = tally_of(scanned, floats(3, 3)), 2 * 3**3
    assert tally.total().flops == 5 * (product + 2)
    assert tally.total_reported() == (product + 2, 0) == tuple(reported_cost(scanned, floats(3, 3)).values())


def test_the_dearest_branch_stands_for_a_condition() -> None:
    def chosen(x: jax.Array, yes: jax.Array) -> Any:
        return jax.lax.cond(yes, lambda y: y @ y, lambda y: y + 1, x)

    tally = tally_of(chosen, floats(3, 3), jax.ShapeDtypeStruct((), bool))
    assert tally.total().flops == 2 * 3**3 + 1  # and the condition as a number


def test_a_ragged_product_counts_each_row_once() -> None:
    def ragged(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, y, sizes)

    shapes = floats(16, 20), floats(8, 20, 30), jax.ShapeDtypeStruct((8,), jnp.int32)
    tally, routed = tally_of(ragged, *shapes), 2 * 16 * 20 * 30
    assert tally.total().flops == routed
    assert tally.total_reported().flops > 8 * routed  # what the compiler says
    assert sum(flops for _, flops in _dots(jax.make_jaxpr(ragged)(*shapes).jaxpr, "", 1)) == routed


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x, y: x @ y, (floats(4001, 4003), floats(4003, 4007)), 2 * 4001 * 4003 * 4007),
        (lambda x: x + 1, (floats(5001, 5003),), 5001 * 5003),
        (lambda x: x.sum(axis=1), (floats(5001, 5003),), 5001 * 5002),
        (jnp.cumsum, (floats(5001),), 5001 * 5000),
        (lambda x: jax.lax.sort(x), (floats(2**21 + 3),), (2**21 + 3) * 22),
        (lambda x, i: jnp.take_along_axis(x, i, axis=1, mode="fill"), (floats(3, 9), None), None),
    ],
    ids=["product", "sum", "reduction", "running sum", "sort", "gather"],
)
def test_counts_beyond_float32_are_rebuilt_exactly(
    function: Callable[..., Any], shapes: tuple[Any, ...], expected: int | None
) -> None:
    if expected is None:  # a gather: its law at a size where the compiler is exact, and beyond
        for columns in (9, 2**23 + 5):
            index = jax.ShapeDtypeStruct((3, 1, 1), jnp.int32)
            wide = jax.ShapeDtypeStruct((3, 2, columns), jnp.float32)
            tally = tally_of(lambda x, i: jnp.take_along_axis(x, i, axis=1), wide, index)
            (gather,) = (count for work, count in tally.flops.items() if work.primitive == "gather")
            assert gather == 3 * columns + 3 * 3
        return
    assert expected > LARGEST_EXACT
    assert tally_of(function, *shapes).total() == Cost(expected, 0)


def test_a_count_that_no_law_gives_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import roofline.compiler_cost as module

    (equation,) = jax.make_jaxpr(lambda x: jnp.sin(x))(floats(4097, 4099)).jaxpr.eqns
    monkeypatch.setattr(module, "_asked", lambda _: {"flops": 2e7})
    monkeypatch.setattr(module, "_COSTS", {})
    with pytest.raises(InputError) as raised:
        cost_of(equation)
    assert str(raised.value) == (
        "cost_analysis = 20000000.0: no integer is known that sin of float32[4097,4099] could cost. "
        "Report it with this JAX version; smaller sizes may work."
    )


def test_what_the_program_states_is_folded() -> None:
    def folded(x: jax.Array) -> jax.Array:
        zeros = jnp.square(jnp.zeros(7))
        return jnp.where(jnp.arange(1) < 1, x + zeros, x - 1) * jnp.ones(7)

    (tally, reported) = tally_of(folded, floats(7)), reported_cost(folded, floats(7))
    assert tally.total_reported().flops == reported["flops"]
