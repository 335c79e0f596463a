"""Instructions of a compiled program joined to the inventory, and the profiler's time by op."""

from __future__ import annotations

import pytest

from qwenjax import ModelConfig
from qwenjax.ops import OPS, ops_of
from roofline import Step
from roofline.hlo import Module, parse_hlo
from roofline.measure import fill_params, step_call
from roofline.trace import OTHER, instruction_ops, measure_time_by_op

TINY = ModelConfig(
    "qwen3", vocab_size=384, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32,
)  # fmt: skip


def _compiled(step: Step) -> Module:
    from qwenjax.model import decode_step, prefill, step_shapes

    function = prefill if step.phase == "prefill" else decode_step
    params, arguments, cache = step_shapes(TINY, step.phase, step.batch, step.query_len, step.kv_len, "float32")
    return parse_hlo(function.lower(TINY, params, *arguments, cache).compile().as_text() or "")


@pytest.mark.parametrize("step", [Step.prefill(1, 64), Step.decode(1, 64), Step.decode(3, 64)])
def test_every_product_of_the_compiled_step_has_its_op(step: Step) -> None:
    found = set(instruction_ops(_compiled(step)).values())
    products = {op.name for op in ops_of(TINY) if op.kind in ("matmul", "attention")}
    assert products <= found
    assert found <= {op.name for op in OPS} | {OTHER}


def test_metadata_that_a_rewrite_dropped_is_found_through_the_weight() -> None:
    text = """
%fused (p0: f32[1,4]) -> f32[4] {
  %p0 = f32[1,4]{1,0} parameter(0)
  ROOT %b = f32[4]{0} bitcast(%p0), metadata={op_name="jit(f)/swiglu/mul"}
}

ENTRY %main (w: f32[8,4], x: f32[1,4], k: f32[2,4]) -> f32[1,8] {
  %w = f32[8,4]{1,0} parameter(0), metadata={op_name="params[\\'layers\\'][3][\\'down_proj\\']"}
  %x = f32[1,4]{1,0} parameter(1)
  %k = f32[2,4]{1,0} parameter(2), metadata={op_name="cache.keys[0]"}
  %copy.1 = f32[8,4]{1,0} copy(%w)
  %dot.1 = f32[1,8]{1,0} dot(%x, %copy.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %fusion.1 = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
  %dot.2 = f32[1,2]{1,0} dot(%x, %k), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %exp.1 = f32[1,2]{1,0} exponential(%dot.2), metadata={op_name="jit(f)/softmax/exp"}
  %dot.3 = f32[1,4]{1,0} dot(%exp.1, %k), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %copy.2 = f32[1,4]{1,0} copy(%dot.3)
  ROOT %add.1 = f32[1,8]{1,0} add(%dot.1, %dot.1)
}
"""
    found = instruction_ops(parse_hlo(text))
    assert {name: found[name] for name in ("dot.1", "fusion.1", "dot.2", "dot.3", "copy.2", "add.1")} == {
        "dot.1": "down_proj", "fusion.1": "swiglu", "dot.2": "scores", "dot.3": "values", "copy.2": "values",
        "add.1": "down_proj",
    }  # fmt: skip


def test_shares_of_a_real_step_sum_to_one() -> None:
    step = Step.prefill(2, 64)
    call = step_call(TINY, fill_params(TINY, "float32"), step, "float32")
    call()
    shares = measure_time_by_op(call, _compiled(step))
    assert sum(shares.values()) == pytest.approx(1)
    assert {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"} <= shares.keys()
