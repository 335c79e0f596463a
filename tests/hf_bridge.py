"""Between a parameter tree and a checkpoint's tensors in memory, the plain way: what `load` and `save` must equal."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from qwenjax.checkpoint.layout import Tensor, tensors_of
from qwenjax.config import ModelConfig
from qwenjax.weights import Params, param_shapes


def to_state_dict(config: ModelConfig, params: Params) -> dict[str, np.ndarray[Any, Any]]:
    """The tree's arrays under their checkpoint keys, in the layout on disk."""
    return {
        tensor.key: np.asarray(_branch(params, tensor)[tensor.leaf])[tensor.place].reshape(tensor.stored_shape)
        for tensor in tensors_of(config)
    }


def from_state_dict(
    config: ModelConfig, state: Mapping[str, np.ndarray[Any, Any]], dtype: str = "float32"
) -> Params:  # fmt: skip
    """The parameter tree of a checkpoint's tensors. Anything but the model's own keys and shapes is an error."""
    tensors = {tensor.key: tensor for tensor in tensors_of(config)}
    if set(tensors) != set(state):
        raise KeyError(f"missing {sorted(set(tensors) - set(state))}, unknown {sorted(set(state) - set(tensors))}")
    params = _map_leaves(param_shapes(config, dtype), lambda leaf: np.full(leaf.shape, np.nan, np.float32))
    for key, tensor in tensors.items():
        if state[key].shape != tensor.stored_shape:
            raise ValueError(f"{key} has shape {state[key].shape}, not {tensor.stored_shape}")
        _branch(params, tensor)[tensor.leaf][tensor.place] = state[key].reshape(tensor.slice_shape)
    return _map_leaves(params, lambda leaf: jnp.asarray(leaf, dtype))


def _branch(params: Params, tensor: Tensor) -> Any:
    return params if tensor.layer is None else params["layers"][tensor.layer]


def _map_leaves(tree: Any, function: Any) -> Any:
    return {k: _map_leaves(v, function) for k, v in tree.items()} if isinstance(tree, dict) else function(tree)


def reference_model(
    data: Mapping[str, Any],
    state: Mapping[str, np.ndarray[Any, Any]],
    dtype: str = "float32",
    attention: str = "eager",
) -> Any:
    """transformers' model of this config.json with these weights, ready for inference; needs torch."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**copy.deepcopy(dict(data)))  # it writes into nested blocks
    # The plain loop over experts is the definition; other implementations may sum in another order.
    how = {"experts_implementation": "eager"} if config.model_type.endswith("_moe") else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=getattr(torch, dtype), **how)
    tensors = {key: torch.tensor(value) for key, value in fused_experts(state).items()}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    tied_head = ["lm_head.weight"] if config.tie_word_embeddings else []
    if missing != tied_head or unknown:
        raise KeyError(f"missing {missing}, unknown {unknown}")
    return model.eval()


def fused_experts(state: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """A checkpoint with the experts of a layer as two tensors, as transformers 5 holds them in memory: gate rows, then
    up rows, [E, 2F, D]; down [E, D, F]."""
    fused = {key: value for key, value in state.items() if ".experts." not in key}
    for layer in dict.fromkeys(key.split(".experts.")[0] for key in state.keys() - fused.keys()):
        names = [f"{layer}.experts.{expert}" for expert in range(len(fused[f"{layer}.gate.weight"]))]
        gate, up, down = ([state[f"{name}.{part}_proj.weight"] for name in names] for part in ("gate", "up", "down"))
        fused[f"{layer}.experts.gate_up_proj"] = np.concatenate([np.stack(gate), np.stack(up)], axis=1)
        fused[f"{layer}.experts.down_proj"] = np.stack(down)
    return fused
