"""How many elements a checkpoint's safetensors hold, and why that differs from the parameters of the architecture.

The published counts are the Hub's: elements by tensor shape. It unpacks GPTQ and AWQ integers and passes over their
scales and zero points, so that those checkpoints count like the unquantised ones; it takes FP8 block scales and NVFP4
weights as they lie. Scales of a whole tensor (one number each) enter none of the published counts, and none here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qwenjax.config import ModelConfig
from qwenjax.dims import dims, size
from qwenjax.ops import layers_of, weights_of
from roofline.count import count_params
from roofline.modules import QUANTISED_GROUPS, is_kept, module_names, weight_layers


@dataclass(frozen=True)
class StoredCount:
    """Elements of the architecture, elements stored, and what lies between them as (reason, elements)."""

    num_params: int
    stored: int
    differences: tuple[tuple[str, int], ...]


def count_stored_params(
    config: ModelConfig,
    *,
    lm_head_stored: bool | None = None,
    zero_biases_stored: bool = False,
    inv_freq_stored: bool = False,
    group_scales_counted: bool = True,
) -> StoredCount:
    """Counts the elements that a checkpoint of this config stores, every difference with its reason.

    A config can't say four things, so the caller does. lm_head_stored: whether the files hold lm_head.weight (None:
    they do exactly if it isn't tied). zero_biases_stored: whether a GPTQ tool wrote biases of 0 for the linears that
    have none. inv_freq_stored: whether each layer's rotary frequencies are there, as in Llama 2's.
    group_scales_counted: whether NVFP4's scales of 16 weights count, which differs between published counts.
    """
    num_params = count_params(config).num_params
    terms = (*_lm_head(config, lm_head_stored), *_quantised(config, group_scales_counted))
    if zero_biases_stored:
        terms = (*terms, ("zero biases of linears that have none", _missing_biases(config)))
    if inv_freq_stored:
        terms = (*terms, ("rotary inv_freq of each layer", config.num_hidden_layers * (config.head_dim // 2)))
    differences = tuple((reason, count) for reason, count in terms if count)
    return StoredCount(num_params, num_params + sum(count for _, count in differences), differences)


def _lm_head(config: ModelConfig, stored: bool | None) -> tuple[tuple[str, int], ...]:
    if stored is None or stored != config.tie_word_embeddings:
        return ()
    head = config.vocab_size * config.hidden_size
    return (("lm_head stored although tied", head),) if stored else (("no lm_head stored although untied", -head),)


def _quantised(config: ModelConfig, group_scales_counted: bool) -> tuple[tuple[str, int], ...]:
    quantization = config.quantization
    if quantization is None:
        return ()
    if quantization.block:
        rows, columns = quantization.block
        scales = sum(-(-out // rows) * -(-into // columns) for out, into in _quantised_shapes(config))
        return ((f"FP8 scales of {rows}x{columns} blocks", scales),)
    if quantization.method == "fbgemm_fp8":
        return (("FP8 scales of outputs", sum(out for out, _ in _quantised_shapes(config))),)
    if quantization.algorithm == "NVFP4" and quantization.group_size:
        group = quantization.group_size
        shapes = tuple(_quantised_shapes(config))
        halves = sum(out * into // 2 for out, into in shapes)
        scales = sum(out * -(-into // group) for out, into in shapes) if group_scales_counted else 0
        return (("NVFP4 weights packed two to a byte", -halves), (f"NVFP4 scales of {group} weights", scales))
    return ()


def _quantised_shapes(config: ModelConfig) -> Iterator[tuple[int, int]]:
    """[out, in] of every linear layer whose weights are stored quantised, one for each expert."""
    kept = is_kept(config.quantization.modules_to_not_convert if config.quantization else ())
    for weight in weights_of(config):
        if weight.group not in QUANTISED_GROUPS:
            continue
        sizes = dims(config, block=weight.block)
        out, into = (int(size(letters, sizes)) for letters in weight.stored.split(","))
        for layer in weight_layers(config, weight):
            for module in module_names(config, weight, layer):
                if not kept(module):
                    yield out, into


def _missing_biases(config: ModelConfig) -> int:
    """Outputs of every quantised linear layer that has no bias of its own."""
    biased = {weight.key.removesuffix(".bias") for weight in weights_of(config) if weight.group == "attention_bias"}
    total = 0
    for weight in weights_of(config):
        if weight.group in QUANTISED_GROUPS and weight.key.removesuffix(".weight") not in biased:
            experts = config.num_experts if "{expert}" in weight.key else 1
            out = int(size(weight.stored.split(",")[0], dims(config, block=weight.block)))
            total += out * experts * layers_of(config, weight.scope)
    return total
