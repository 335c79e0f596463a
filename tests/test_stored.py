"""Stored counts of small checkpoints, tile by tile and module by module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from config_base import BASES, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, read

from qwenjax.config import ModelConfig
from qwenjax.quantization import Quantization
from roofline.count import count_params
from roofline.stored import StoredCount, count_stored_params

FP8 = {"quant_method": "fp8", "weight_block_size": [24, 40]}
NVFP4 = Quantization("modelopt", 4, 16, algorithm="NVFP4")


def fp8(base: dict[str, Any], *kept: str) -> ModelConfig:
    return read(base, quantization_config={**FP8, "modules_to_not_convert": list(kept)})


def tiles(*shapes: tuple[int, int]) -> int:
    """Tiles of 24x40 that cover matrices [out, in], counted by walking them."""
    return sum(len(range(0, out, 24)) * len(range(0, into, 40)) for out, into in shapes)


ATTENTION2 = [(64, 64), (32, 64), (32, 64), (64, 64)]  # q, k, v, o of head_dim 16
ATTENTION3 = [(128, 64), (64, 64), (64, 64), (64, 128)]  # of head_dim 32
MLP = [(128, 64), (128, 64), (64, 128)]
EXPERT = [(32, 64), (32, 64), (64, 32)]
SHARED = [(48, 64), (48, 64), (64, 48)]


@pytest.mark.parametrize("model_type", BASES)
@pytest.mark.parametrize("quantization", [None, Quantization("gptq", 4, 128), Quantization("awq", 4, 128)])
def test_unquantised_and_unpacked_counts_equal_the_architecture(
    model_type: str, quantization: Quantization | None
) -> None:
    config = replace(read(BASES[model_type]), quantization=quantization)
    total = count_params(config).num_params
    assert count_stored_params(config) == StoredCount(total, total, ())


@pytest.mark.parametrize(
    ("base", "layer"),
    [
        (QWEN2, [*ATTENTION2, *MLP]),
        (QWEN3, [*ATTENTION3, *MLP]),
        (QWEN2_MOE, [*ATTENTION2, *(4 * EXPERT), *SHARED]),
        (QWEN3_MOE, [*ATTENTION3, *(4 * EXPERT)]),
    ],
)
def test_fp8_has_one_scale_for_each_started_tile_of_each_linear(
    base: dict[str, Any], layer: list[tuple[int, int]]
) -> None:
    stored = count_stored_params(fp8(base))
    assert stored.differences == (("FP8 scales of 24x40 blocks", 2 * tiles(*layer)),)
    assert stored.stored == stored.num_params + 2 * tiles(*layer)


def test_nvfp4_halves_linears_and_adds_a_scale_for_each_group() -> None:
    config = replace(read(QWEN3_MOE, moe_intermediate_size=40), quantization=NVFP4)
    layer = [*ATTENTION3, *(4 * [(40, 64), (40, 64), (64, 40)])]
    halves = 2 * sum(out * into // 2 for out, into in layer)
    scales = 2 * sum(out * len(range(0, into, 16)) for out, into in layer)
    assert count_stored_params(config).differences == (
        ("NVFP4 weights packed two to a byte", -halves),
        ("NVFP4 scales of 16 weights", scales),
    )
    assert count_stored_params(config, group_scales_counted=False).differences == (
        ("NVFP4 weights packed two to a byte", -halves),
    )


def test_a_scale_of_a_whole_tensor_counts_nothing() -> None:
    config = read(QWEN3, quantization_config={"quant_algo": "FP8", "ignore": ["lm_head"]})
    assert count_stored_params(config).differences == ()


LAYER3 = [*ATTENTION3, *(4 * EXPERT)]


@pytest.mark.parametrize(
    ("kept", "quantised"),
    [
        (["lm_head", "model.embed_tokens", "model.norm"], 2 * tiles(*LAYER3)),
        (["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"], 2 * tiles(*LAYER3)),  # the routers, not gate_proj
        (["mlp.gate", "gate"], 2 * tiles(*LAYER3)),
        (["model.layers.0"], tiles(*LAYER3)),
        (["model.layers.0.self_attn"], tiles(*LAYER3) + tiles(*(4 * EXPERT))),
        (["model.layers.1.self_attn.q_proj"], 2 * tiles(*LAYER3) - tiles(ATTENTION3[0])),
        (["q_proj"], 2 * (tiles(*LAYER3) - tiles(ATTENTION3[0]))),
        (["self_attn.o_proj"], 2 * (tiles(*LAYER3) - tiles(ATTENTION3[3]))),
        (["model.layers.0.mlp.experts.3"], 2 * tiles(*LAYER3) - tiles(*EXPERT)),
        (["model.layers.*.mlp.experts.2.down_proj"], 2 * (tiles(*LAYER3) - tiles(EXPERT[2]))),
        (["*self_attn*"], 2 * tiles(*(4 * EXPERT))),
        (["model"], 0),
        (["model.layers.00", "layers.0.mlp", "model.layers.2"], 2 * tiles(*LAYER3)),  # no module is called that
    ],
)
def test_modules_that_are_kept_have_no_scales(kept: list[str], quantised: int) -> None:
    stored = count_stored_params(fp8(QWEN3_MOE, *kept))
    assert stored.stored - stored.num_params == quantised
    assert len(stored.differences) == bool(quantised)


def test_only_the_layers_that_have_a_module_count() -> None:
    config = read(QWEN3_MOE, quantization_config=FP8, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    dense, sparse = tiles(*ATTENTION3, *MLP), tiles(*LAYER3)
    assert count_stored_params(config).differences == (("FP8 scales of 24x40 blocks", 3 * dense + sparse),)


@pytest.mark.parametrize(
    ("tied", "stored", "difference"),
    [
        (False, None, ()),
        (True, None, ()),
        (False, True, ()),
        (True, False, ()),
        (True, True, (("lm_head stored although tied", 256 * 64),)),
        (False, False, (("no lm_head stored although untied", -256 * 64),)),
    ],
)
def test_a_head_that_is_stored_or_not(tied: bool, stored: bool | None, difference: tuple[tuple[str, int], ...]) -> None:
    count = count_stored_params(read(QWEN3, tie_word_embeddings=tied), lm_head_stored=stored)
    assert count.differences == difference


@pytest.mark.parametrize(
    ("base", "outputs"),
    [
        (QWEN2, 64 + 128 + 128 + 64),  # o, gate, up, down; q, k and v have real biases
        (QWEN3, 128 + 64 + 64 + 64 + 128 + 128 + 64),
        (QWEN2_MOE, 64 + 4 * (32 + 32 + 64) + (48 + 48 + 64)),
    ],
)
def test_zero_biases_of_every_linear_without_one(base: dict[str, Any], outputs: int) -> None:
    stored = count_stored_params(read(base), zero_biases_stored=True)
    assert stored.differences == (("zero biases of linears that have none", 2 * outputs),)


def test_reasons_add_up() -> None:
    config = replace(read(QWEN2, tie_word_embeddings=True), quantization=Quantization("fp8", 8, block=(24, 40)))
    stored = count_stored_params(config, lm_head_stored=True, zero_biases_stored=True)
    assert len(stored.differences) == 3
    assert stored.stored == stored.num_params + sum(count for _, count in stored.differences)
