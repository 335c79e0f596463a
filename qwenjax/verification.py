"""A checkpoint's layers here and in transformers, on the same tokens: where the two part, if they do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwenjax.block import run_block_to_train
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.layers import rms_norm
from qwenjax.model import _start, _unembed
from qwenjax.weights import Params, layer_scopes

TOLERANCE = 1e-4  # of the logits, in float32, for each unit of their spread
_TIE = 1e-6  # router probabilities closer than this may be ordered either way


@dataclass(frozen=True)
class LayerDifference:
    """One layer's output: greatest difference and spread of the reference; for experts, the share of equal choices.

    `ties` counts tokens whose last chosen and first unchosen expert are within 1e-6, where libraries may differ.
    """

    layer: str
    max_abs_difference: float
    reference_std: float
    routing_agreement: float | None = None
    ties: int | None = None


@dataclass(frozen=True)
class Verification:
    layers: tuple[LayerDifference, ...]
    num_tokens: int
    tolerance: float
    holds: bool  # logits within the tolerance


def verify(config: ModelConfig, params: Params, folder: Path, num_tokens: int = 64, seed: int = 0) -> Verification:
    """Runs made-up tokens through both and compares embedding, every layer and the logits, in float32."""
    tokens_BT = np.random.default_rng(seed).integers(0, config.vocab_size, (1, num_tokens))
    ours, routers = _our_states(config, params, jnp.asarray(tokens_BT))
    theirs, their_routers = _their_states(folder, tokens_BT)
    names = ["embedding", *(f"layer {i}" for i in range(config.num_hidden_layers - 1)), "last layer and norm", "logits"]
    routing = dict(zip(config.sparse_layers, zip(routers, their_routers, strict=True), strict=True))
    rows = []
    for i, (name, x, y) in enumerate(zip(names, ours, theirs, strict=True)):
        chosen = (
            _compare_routing(config, *routing[i - 1]) if 0 < i < len(names) - 1 and i - 1 in routing else (None, None)
        )
        rows.append(LayerDifference(name, float(np.abs(x - y).max()), float(y.std()), *chosen))
    tolerance = TOLERANCE * max(1.0, rows[-1].reference_std)
    return Verification(tuple(rows), num_tokens, tolerance, rows[-1].max_abs_difference <= tolerance)


def _our_states(config: ModelConfig, params: Params, tokens_BT: jax.Array) -> tuple[list[Any], list[Any]]:
    """Embedding, each layer's output (the last one normed, as transformers gives it) and logits; router logits."""
    positions_T = jnp.arange(tokens_BT.shape[1])
    positions_BT = jnp.broadcast_to(positions_T, tokens_BT.shape)
    x_BTD, rope, masks = _start(config, params, tokens_BT, positions_BT, positions_T)
    states, routers = [x_BTD], []
    for i, window in enumerate(config.sliding_windows):
        x_BTD, logits_BTE = run_block_to_train(
            config, layer_scopes(config, i), params["layers"][i], x_BTD, rope, masks[window]
        )
        states.append(x_BTD)
        routers += [] if logits_BTE is None else [np.asarray(logits_BTE[0])]
    states[-1] = rms_norm(x_BTD, params["final_norm"], config.rms_norm_eps)
    return [np.asarray(x) for x in (*states, _unembed(config, params, x_BTD))], routers


def _their_states(folder: Path, tokens_BT: np.ndarray[Any, Any]) -> tuple[list[Any], list[Any]]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(
            "transformers", None, f"can't be imported ({error})", 'Run `pip install "qwenjax-roofline[reference]"`.'
        ) from None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    wants_routers = {"output_router_logits": True} if hasattr(model.config, "num_experts") else {}
    with torch.no_grad():
        out = model(torch.from_numpy(tokens_BT), output_hidden_states=True, use_cache=False, **wants_routers)
    states = [state.numpy() for state in (*out.hidden_states, out.logits)]
    return states, [logits.numpy() for logits in getattr(out, "router_logits", None) or ()]


def _compare_routing(config: ModelConfig, ours: Any, theirs: Any) -> tuple[float, int]:
    """Share of equal choices of experts, and tokens whose border is a tie."""
    count = config.num_experts_per_tok
    chosen, expected = (np.sort(np.argsort(-logits, axis=-1)[:, :count], axis=-1) for logits in (ours, theirs))
    shared = [len(set(a) & set(b)) for a, b in zip(chosen, expected, strict=True)]
    if count == config.num_experts:
        return sum(shared) / (count * len(shared)), 0
    probs = -np.sort(-np.asarray(jax.nn.softmax(jnp.asarray(theirs), axis=-1)), axis=-1)
    return sum(shared) / (count * len(shared)), int((probs[:, count - 1] - probs[:, count] < _TIE).sum())
