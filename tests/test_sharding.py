"""What each device of a mesh holds, by enumeration, and the meshes that are refused."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from config_base import BASES, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, Json, read
from hypothesis import given
from hypothesis import strategies as st

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.ops import KV, WEIGHTS
from qwenjax.sharding import Mesh, check_mesh, device_fraction

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 6, "hidden_size": 48}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
TENSORS = (*(weight.letters for weight in WEIGHTS), *(tensor.letters for tensor in KV))
FEWER = "Use fewer devices, or the unquantised checkpoint."


@pytest.mark.parametrize("tp", [1, 3, 6, 12])
def test_heads_by_enumeration(tp: int) -> None:
    """Each device takes its query heads, and every KV head that one of them reads."""
    config = check_and(read(QWEN3, **HEADS, intermediate_size=144), Mesh(tp))
    queries = [range(12 * device // tp, 12 * (device + 1) // tp) for device in range(tp)]
    fullest = max(len({head // 4 for head in heads}) for heads in queries)
    for letters in ("KGHD", "DKGH", "KGH", "BTNH", "BTKGHS", "N"):
        assert device_fraction(letters, config, Mesh(tp)) == Fraction(12 // tp, 12), letters
    for letters in ("K1HD", "K1H", "BKSH", "BTKH"):
        assert device_fraction(letters, config, Mesh(tp)) == Fraction(fullest, 3), letters
    for letters in ("KJHD", "BTKJH", "BTDKJH"):  # queries, keys and values side by side
        assert device_fraction(letters, config, Mesh(tp)) == Fraction(12 // tp + 2 * fullest, 12 + 2 * 3), letters


def check_and(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    assert check_mesh(config, mesh) is mesh
    return config


def test_other_letters() -> None:
    config = read(QWEN2_MOE, vocab_size=257)
    mesh = Mesh(tp=2, ep=4)
    assert mesh.num_devices == 8
    assert device_fraction("1FD", config, mesh) == Fraction(1, 2)
    assert device_fraction("E1FD", config, mesh) == Fraction(1, 8)
    assert device_fraction("ED", config, mesh) == 1  # the router: every device needs its scores
    assert device_fraction("BTACF", config, mesh) == Fraction(1, 2)
    assert device_fraction("VD", config, mesh) == Fraction(129, 257)  # rows are padded up to equal parts
    assert device_fraction("D", config, mesh) == device_fraction("BTD", config, mesh) == 1
    assert device_fraction("", config, mesh) == 1


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_one_device_holds_everything(base: Json) -> None:
    config = read(base)
    for letters in TENSORS:
        assert device_fraction(letters, config, Mesh()) == 1


@given(st.sampled_from([QWEN2_MOE, QWEN3_MOE]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_the_axes_split_independently_and_lose_nothing(base: Json, tp: int, ep: int) -> None:
    config, mesh = check_and(read(base), Mesh(tp, ep)), Mesh(tp, ep)
    for letters in TENSORS:
        share = device_fraction(letters, config, mesh)
        assert share == device_fraction(letters, config, Mesh(tp)) * device_fraction(letters, config, Mesh(1, ep))
        assert Fraction(1, mesh.num_devices) <= share <= 1


def message(config: ModelConfig, mesh: Mesh) -> str:
    with pytest.raises(InputError) as caught:
        check_mesh(config, mesh)
    return str(caught.value)


@pytest.mark.parametrize("name", ["tp", "ep"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "2", True, None])
def test_what_is_no_number_of_devices(name: str, value: Any) -> None:
    shown = "" if value is None else f" = {value!r}"
    text = f"{name}{shown}: must be a positive integer. Give the number of devices."
    assert message(read(QWEN3_MOE), Mesh(**{name: value})) == text


@pytest.mark.parametrize(
    ("base", "changes", "mesh", "text"),
    [
        (
            QWEN3,
            {},
            Mesh(3),
            "tp = 3: doesn't split 4 attention heads and 2 KV heads evenly. Use one of 1, 2, 4.",
        ),
        (
            QWEN3,
            HEADS,
            Mesh(2),
            "tp = 2: doesn't split 12 attention heads and 3 KV heads evenly. Use one of 1, 3, 6, 12.",
        ),
        (
            QWEN3,
            {},
            Mesh(8),
            "tp = 8: doesn't split 4 attention heads and 2 KV heads evenly. Use one of 1, 2, 4.",
        ),
        (
            QWEN3,
            {"intermediate_size": 130},
            Mesh(4),
            "tp = 4: doesn't divide intermediate_size 130. Use a divisor of it.",
        ),
        (
            QWEN3_MOE,
            {"moe_intermediate_size": 33},
            Mesh(2),
            "tp = 2: doesn't divide moe_intermediate_size 33. Use a divisor of it.",
        ),
        (
            QWEN2_MOE,
            {"shared_expert_intermediate_size": 49},
            Mesh(2),
            "tp = 2: doesn't divide shared_expert_intermediate_size 49. Use a divisor of it.",
        ),
        (QWEN2, {}, Mesh(1, 2), "ep = 2: a dense model has no experts to spread. Use tp."),
        (QWEN3_MOE, {}, Mesh(1, 3), "ep = 3: doesn't divide num_experts 4. Use a divisor of it."),
        (
            QWEN2,
            {"intermediate_size": 132, "quantization_config": GPTQ},
            Mesh(2),
            (
                "tp = 2: leaves 66 of intermediate_size 132 to a device, not whole groups of 16 that share a scale. "
                + FEWER
            ),
        ),
        (
            QWEN3_MOE,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}},
            Mesh(2),
            (
                "tp = 2: leaves 16 of moe_intermediate_size 32 to a device, not whole groups of 32 that share a scale. "
                + FEWER
            ),
        ),
        (
            QWEN2,
            {"num_key_value_heads": 4, "head_dim": 8, "quantization_config": GPTQ},
            Mesh(4),
            (
                "tp = 4: leaves 8 of num_attention_heads x head_dim 32 to a device, not whole groups of 16 that share "
                "a scale. " + FEWER
            ),
        ),
    ],
)
def test_meshes_that_do_not_fit(base: Json, changes: Json, mesh: Mesh, text: str) -> None:
    assert message(read(base, **changes), mesh) == text


@pytest.mark.parametrize(
    ("base", "changes", "mesh"),
    [
        (QWEN2, {"intermediate_size": 160, "quantization_config": GPTQ}, Mesh(2)),  # the padded width of later files
        (QWEN2, {"intermediate_size": 132, "quantization_config": GPTQ}, Mesh(1)),
        (QWEN2, {"intermediate_size": 132, "quantization_config": {**GPTQ, "group_size": -1}}, Mesh(2)),
        (QWEN2, {"intermediate_size": 132}, Mesh(4)),
        (QWEN3_MOE, {"intermediate_size": 131}, Mesh(2)),  # every layer is sparse: that width isn't there
        (QWEN3_MOE, {}, Mesh(2, 4)),
        (QWEN3, {"num_attention_heads": 8, "num_key_value_heads": 2}, Mesh(8)),
    ],
)
def test_meshes_that_fit(base: Json, changes: Json, mesh: Mesh) -> None:
    check_and(read(base, **changes), mesh)


@pytest.mark.parametrize(
    ("name", "tp", "fits"),
    [
        ("Qwen3-30B-A3B-FP8", 2, True),
        ("Qwen3-30B-A3B-FP8", 4, False),
        ("Qwen3-32B-FP8", 8, True),
        ("Qwen3-32B", 8, True),
    ],
)
def test_published_block_quantised_models(name: str, tp: int, fits: bool) -> None:
    """768 / 4 cuts a block of 128 in two: engines refuse it too."""
    config = ModelConfig.from_hf(name)
    if fits:
        check_and(config, Mesh(tp))
    else:
        assert message(config, Mesh(tp)).startswith("tp = 4: leaves 192 of moe_intermediate_size 768")
