"""Collectives of a sharded step, by hand."""

from __future__ import annotations

import pytest
from config_base import BASES, QWEN2_MOE, QWEN3, QWEN3_MOE, Json, read

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh
from roofline.comms import CommRow, count_comms

B, T, D, V, E, A, LAYERS = 3, 5, 64, 256, 4, 2, 2  # of the small configs
STEP = Step(B, T, 9)


def rows(config: ModelConfig, mesh: Mesh, **options: object) -> dict[str, CommRow]:
    result = count_comms(config, STEP, mesh, **options)  # type: ignore[arg-type]
    assert len({row.op for row in result}) == len(result)
    return {row.op: row for row in result}


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_one_device_sends_nothing(base: Json) -> None:
    assert count_comms(read(base), STEP, Mesh()) == ()


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel(base: Json, tp: int) -> None:
    """Two all-reduces of the residual a layer, whatever is in it; one of the embedding, and the logits gathered."""
    found = rows(read(base), Mesh(tp))
    residual, logits = B * T * D * 2, B * V * 2
    share = (tp - 1) / tp
    assert list(found) == ["embed", "attention_residual", "mlp_residual", "unembed"]
    for op, count in (("embed", 1), ("attention_residual", LAYERS), ("mlp_residual", LAYERS)):
        assert found[op] == CommRow(op, "all-reduce", tp, count, residual, 2 * share * residual * count)
    assert found["unembed"] == CommRow("unembed", "all-gather", tp, 1, logits, share * logits)


@pytest.mark.parametrize("base", [QWEN2_MOE, QWEN3_MOE])
def test_expert_parallel(base: Json) -> None:
    """Tokens are sent to their experts and back; nothing else moves, since every device has the router."""
    found = rows(read(base), Mesh(1, 4))
    tokens = B * T * A * D * 2
    assert found == {
        # A device holds a quarter of the tokens and keeps a quarter of those.
        "experts_gate_up_proj": CommRow(
            "experts_gate_up_proj", "all-to-all", 4, LAYERS, tokens, tokens / 4 * 3 / 4 * LAYERS
        ),
        "experts_down_proj": CommRow("experts_down_proj", "all-to-all", 4, LAYERS, tokens, tokens / 4 * 3 / 4 * LAYERS),
    }


def test_both_axes() -> None:
    config = read(QWEN2_MOE)
    both = rows(config, Mesh(2, 4))
    assert both == rows(config, Mesh(2)) | rows(config, Mesh(1, 4))


def test_only_sparse_layers_exchange_tokens() -> None:
    config = read(QWEN3_MOE, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    found = rows(config, Mesh(2, 2))
    assert {op: row.count for op, row in found.items()} == {
        "embed": 1,
        "attention_residual": 4,
        "mlp_residual": 4,
        "experts_gate_up_proj": 1,
        "experts_down_proj": 1,
        "unembed": 1,
    }


def test_logits_and_dtype() -> None:
    config, mesh = read(QWEN3), Mesh(2)
    assert rows(config, mesh, logits="all")["unembed"].payload_bytes == B * T * V * 2
    wide = rows(config, mesh, dtype="float32")
    assert {op: row.sent_bytes for op, row in wide.items()} == {
        op: 2 * row.sent_bytes for op, row in rows(config, mesh).items()
    }


def test_collectives_grow_with_the_batch_alone() -> None:
    config, mesh = read(QWEN2_MOE), Mesh(2, 2)
    once, thrice = count_comms(config, Step(1, 5, 9), mesh), count_comms(config, Step(3, 5, 9), mesh)
    assert [row.sent_bytes * 3 for row in once] == [row.sent_bytes for row in thrice]
    assert once == count_comms(config, Step(1, 5, 99), mesh)  # the context doesn't matter


def test_an_unknown_dtype() -> None:
    with pytest.raises(InputError) as caught:
        count_comms(read(QWEN3), STEP, Mesh(2), dtype="bf16")
    assert str(caught.value) == (
        "dtype = 'bf16': is not a dtype that is known here. "
        "Known: float64, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, int8, int4."
    )
