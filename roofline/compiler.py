"""The real model as the compiler sees it, joined to the inventory by named scope: its products and all other work."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from qwenjax.ops import OPS
from roofline.compiler_cost import PRODUCTS, equation_flops, inner_programs, joined
from roofline.formulas.compiled import UNSCOPED, CompiledPhase, CompiledStep, WorkClass

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr
    from jax.stages import Traced

    from roofline.compiler_cost import Work

_NAMES = frozenset(op.name for op in OPS)


def trace_step(config: ModelConfig, step: CompiledStep) -> Traced:
    """The real prefill, chunk or decode step over shapes alone: no weights, nothing compiled."""
    import jax

    if step.phase == "train":
        return _trace_training(config, step)
    from qwenjax.kernels.choice import NO_KERNELS
    from qwenjax.model import check_runnable, decode_step_impl, extend_impl, prefill_impl, step_shapes

    check_runnable(config)
    functions: dict[str, Callable[..., Any]] = {
        "prefill": prefill_impl,
        "chunk": extend_impl,
        "decode": decode_step_impl,
    }
    phase: Literal["prefill", "decode"] = "decode" if step.phase == "decode" else "prefill"
    params, arguments, cache = step_shapes(config, phase, step.batch, step.query_len, step.kv_len, step.dtype)
    # The plain step: on a GPU some of its work would be in kernels, whose FLOPs no equation tells.
    function = partial(functions[step.phase], config, kernels=NO_KERNELS)
    shapes = (params, *arguments, cache)
    return jax.jit(function).trace(*shapes)


def _trace_training(config: ModelConfig, step: CompiledStep) -> Traced:
    """A whole optimiser step, forward, backward and update, with the trainer's default settings."""
    import jax

    from qwenjax.model import check_runnable
    from qwenjax.train.settings import TrainConfig
    from qwenjax.train.step import init_state, train_step_impl
    from qwenjax.weights import param_shapes

    settings = TrainConfig(batch_size=step.batch, sequence_len=step.query_len, remat=step.remat)
    params = param_shapes(check_runnable(config), step.dtype)
    state = jax.eval_shape(partial(init_state, config, settings), params)
    tokens = jax.ShapeDtypeStruct((step.batch, step.query_len), "int32")
    mask = jax.ShapeDtypeStruct((step.batch, step.query_len), "bool")
    function = partial(train_step_impl, config, settings)
    return jax.jit(function).trace(state, tokens, mask)


def trace_sampling(config: ModelConfig, step: CompiledStep) -> Traced:
    """The greedy choice of each row's next token and its log-probability, as generation runs it after a step."""
    import jax

    from qwenjax.sampling import choose, sampling_of

    logits_BV = jax.ShapeDtypeStruct((step.batch, config.vocab_size), step.dtype)
    drawn_B = jax.ShapeDtypeStruct((step.batch,), "int32")
    settings = sampling_of(step.batch)

    def greedy(logits_BV: Any, drawn_B: Any) -> Any:
        return choose(logits_BV, settings, drawn_B)

    return jax.jit(greedy).trace(logits_BV, drawn_B)


def count_jaxpr_flops(config: ModelConfig, step: Step, dtype: str = "bfloat16") -> dict[str, int]:
    """FLOPs of each op's matrix products as the traced prefill or decode step holds them, without allocating weights.

    Attention's are dense: a plain product computes every pair and masks afterwards. A product outside every op's named
    scope is an error, not a remainder.
    """
    phase: CompiledPhase = "prefill" if step.kv_len == step.query_len else "chunk"
    phase = "decode" if step.phase == "decode" else phase
    traced = trace_step(config, CompiledStep(phase, step.batch, step.query_len, step.kv_len, dtype))
    return count_product_flops(traced.jaxpr.jaxpr)


def count_product_flops(jaxpr: Jaxpr) -> dict[str, int]:
    """FLOPs of the products in a jaxpr by op, by their shapes alone; one outside every op's scope is an error."""
    flops: Counter[str] = Counter()
    for scope, count in _dots(jaxpr, "", 1):
        op = op_of(scope)
        if op == UNSCOPED:
            raise InputError(
                "jaxpr", scope, "a matrix product runs outside every op of the inventory", "Give it a named scope."
            )
        flops[op] += count
    return dict(flops)


def op_of(scope: str) -> str:
    """The innermost op of the inventory (or `cache`) in a path of named scopes, as transpose(jvp(scores)) too."""
    parts = reversed(re.findall(r"\w+", scope))
    return next((part for part in parts if part in _NAMES or part in _OTHER_SCOPES), UNSCOPED)


_OTHER_SCOPES = ("cache",)
_CLASSES: dict[str, WorkClass] = {
    "input_norm": "norm",
    "post_norm": "norm",
    "final_norm": "norm",
    "qk_norm": "norm",
    "rope": "rope",
    "scores": "softmax",
    "softmax": "softmax",
    "qkv_proj": "bias",
    "o_proj": "bias",
    "attention_residual": "residual",
    "mlp_residual": "residual",
    "swiglu": "silu",
    "experts_swiglu": "silu",
    "shared_swiglu": "silu",
    "top_k": "router",
    "combine": "router",
    "shared_expert_gate": "gate",
}


def class_of(op: str, work: Work) -> WorkClass | None:
    """The class of elementwise work: by its op, but integers are indices (a mask's in softmax) and casts their own.

    None where no op does such work: a remainder.
    """
    is_index = work.dtype == "bool" or "int" in work.dtype
    if op == "cache":
        return "cache"
    if op == "softmax" and (is_index or work.primitive == "select_n"):
        return "mask"
    if is_index or work.primitive == "gather":
        return "index"
    return "cast" if work.primitive == "convert_element_type" else _CLASSES.get(op)


def is_product(work: Work) -> bool:
    return work.primitive in PRODUCTS


def _dots(jaxpr: Jaxpr, outer: str, times: int) -> Iterator[tuple[str, int]]:
    """Scope and FLOPs of every product, inner programs included; a scan's body counts once for each turn."""
    for equation in jaxpr.eqns:
        scope = joined(outer, str(equation.source_info.name_stack))
        if equation.primitive.name in PRODUCTS:
            yield scope, times * equation_flops(equation)
            continue
        if equation.primitive.name == "while":
            raise InputError("jaxpr", scope, "a while loop's trip count can't be read off its jaxpr", "Use a scan.")
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in inner_programs(equation):
            yield from _dots(inner, scope, times * turns)
