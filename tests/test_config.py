"""What a config.json means: spellings, defaults and their notes, layers that are sparse, biased or windowed."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from config_base import BASES, DROP, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, Json, changed, notes, read

from qwenjax.config import ModelConfig
from qwenjax.known_models import known_model_names
from roofline.count import count_kv_bytes_per_token, count_params


@pytest.mark.parametrize("model_type", BASES)
def test_a_complete_config_needs_no_notes(model_type: str) -> None:
    config = ModelConfig.from_hf(BASES[model_type])
    assert config.notes == ()
    assert (config.model_type, config.name) == (model_type, "")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, 256)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.head_dim == (32 if model_type.startswith("qwen3") else 16)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-6, 1e6, None)
    assert config.dtype == "bfloat16"
    assert config.sliding_windows == (None, None)
    assert config.sparse_layers == ((0, 1) if model_type.endswith("_moe") else ())
    assert config.is_moe == model_type.endswith("_moe")
    assert config.has_shared_expert == (model_type == "qwen2_moe")
    assert config.qk_norm == model_type.startswith("qwen3")


def test_a_config_is_a_value(tmp_path: Path) -> None:
    source = json.loads(json.dumps(QWEN3_MOE))
    config = ModelConfig.from_hf(source)
    assert source == QWEN3_MOE
    with pytest.raises(FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]
    # Names and notes say where a config came from, not what it is.
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    assert hash(config) == hash(ModelConfig.from_hf(tmp_path))
    assert config == ModelConfig.from_hf(tmp_path)


def test_a_config_has_the_name_of_its_folder_or_file(tmp_path: Path) -> None:
    folder = tmp_path / "My-Qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "other.json").write_text(json.dumps(QWEN3))
    assert ModelConfig.from_hf(folder).name == "My-Qwen"
    assert ModelConfig.from_hf(str(folder / "config.json")).name == "My-Qwen"
    assert ModelConfig.from_hf(tmp_path / "other.json").name == "other"
    assert ModelConfig.from_hf("Qwen/Qwen3-8B").name == "Qwen3-8B"


@pytest.mark.parametrize("name", known_model_names())
def test_known_models_are_read(name: str) -> None:
    config = ModelConfig.from_hf(name.upper())
    assert not [note for note in config.notes if note.kind == "ignored" and note.field != "rope_scaling.attn_factor"]


# Spellings


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_each_spelling_of_the_experts(spelling: str) -> None:
    config = read(QWEN3_MOE, **{"num_experts": DROP, spelling: 4})
    assert config == ModelConfig.from_hf(QWEN3_MOE)
    assert config.notes == ()


@pytest.mark.parametrize("value", [4, None])
def test_spellings_that_agree_or_say_nothing(value: int | None) -> None:
    config = read(QWEN3_MOE, num_local_experts=value, n_routed_experts=4)
    assert config == ModelConfig.from_hf(QWEN3_MOE)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"dtype": "torch.bfloat16"},
        {"dtype": None},
        {"torch_dtype": DROP, "dtype": "bfloat16"},
        {"torch_dtype": None, "dtype": "bfloat16"},
        {"torch_dtype": "torch.bfloat16"},
    ],
)
def test_both_spellings_of_the_dtype(changes: Json) -> None:
    assert read(QWEN3, **changes).dtype == "bfloat16"


@pytest.mark.parametrize("changes", [{"torch_dtype": DROP}, {"torch_dtype": None}])
def test_no_dtype(changes: Json) -> None:
    config = read(QWEN3, **changes)
    assert config.dtype is None
    assert notes(config) == {("default", "dtype"): "missing; estimates take bfloat16 unless told otherwise"}


@pytest.mark.parametrize(
    ("value", "ids"),
    [(7, (7,)), ([7, 5], (7, 5)), ([], ()), (None, ()), (DROP, ()), (-1, ()), ([7, -1], (7,)), (0, (0,))],
)
def test_end_tokens_are_one_or_several(value: Any, ids: tuple[int, ...]) -> None:
    assert read(QWEN3, eos_token_id=value).eos_token_id == ids


@pytest.mark.parametrize(("value", "token"), [(7, 7), (0, 0), (None, None), (DROP, None), (-1, None)])
def test_other_tokens(value: Any, token: int | None) -> None:
    config = read(QWEN3, bos_token_id=value, pad_token_id=value)
    assert (config.bos_token_id, config.pad_token_id) == (token, token)


def test_bookkeeping_changes_nothing() -> None:
    config = read(
        QWEN3, transformers_version="5.24.0", use_cache=False, _name_or_path="x", auto_map={"AutoConfig": "y"},
        id2label={"0": "a"}, max_length=20, temperature=0.6, top_k=20, top_p=0.95, torchscript=False,
    )  # fmt: skip
    assert config == ModelConfig.from_hf(QWEN3)
    assert config.notes == ()


def test_older_spellings_beside_the_usual_ones() -> None:
    config = read(QWEN2, rotary_emb_base=1000000, seq_length=512)
    assert config == ModelConfig.from_hf(QWEN2)
    assert notes(config) == {
        ("ignored", "rotary_emb_base"): "an older spelling of rope_theta",
        ("ignored", "seq_length"): "an older spelling of max_position_embeddings",
    }


@pytest.mark.parametrize("architectures", [["MaxTextForCausalLM"], ["Qwen3ForSequenceClassification", "Other"]])
def test_an_unusual_architecture_is_a_warning(architectures: list[str]) -> None:
    text = f"{architectures[0]} where Qwen3ForCausalLM is usual; model_type decides"
    assert notes(read(QWEN3, architectures=architectures)) == {("warning", "architectures"): text}


@pytest.mark.parametrize("architectures", [DROP, None, []])
def test_no_architecture(architectures: Any) -> None:
    assert read(QWEN3, architectures=architectures).notes == ()


# Defaults

DEFAULTS: list[tuple[str, Any, str, str]] = [
    ("max_position_embeddings", 32768, "default", "missing; the class default 32768 taken"),
    ("rms_norm_eps", 1e-6, "default", "missing; the class default 1e-06 taken"),
    (
        "tie_word_embeddings",
        False,
        "warning",
        "missing; the class default false taken: lm_head is a matrix of its own",
    ),
    (
        "rope_theta",
        10000.0,
        "warning",
        (
            "missing; 10000 as transformers takes it. Qwen2 and later were trained with 1000000: check the file"
        ),
    ),
    ("norm_topk_prob", False, "default", "missing; the class default false taken"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "kind", "text"), DEFAULTS, ids=[row[0] for row in DEFAULTS])
def test_what_is_taken_when_a_key_is_missing(key: str, value: Any, kind: str, text: str) -> None:
    config = read(QWEN3_MOE, **{key: DROP})
    assert getattr(config, key) == value
    assert notes(config) == {(kind, key): text}


@pytest.mark.parametrize("model_type", BASES)
def test_quiet_defaults(model_type: str) -> None:
    """Keys that real files often lack, at the values that every published model has."""
    config = ModelConfig.from_hf(BASES[model_type])
    assert (config.initializer_range, config.router_aux_loss_coef, config.decoder_sparse_step) == (0.02, 0.001, 1)
    assert (config.mlp_only_layers, config.attention_o_bias, config.quantization) == ((), False, None)


@pytest.mark.parametrize(("base", "default"), [(QWEN2, 32), (QWEN3, 32), (QWEN2_MOE, 16), (QWEN3_MOE, 4)])
def test_kv_heads_missing_is_the_class_default_and_null_the_head_count(base: Json, default: int) -> None:
    missing = read(base, num_attention_heads=64, num_key_value_heads=DROP, head_dim=8)
    assert missing.num_key_value_heads == default
    text = f"missing; the class default {default} taken, not the head count"
    assert notes(missing) == {("default", "num_key_value_heads"): text}
    null = read(base, num_attention_heads=8, num_key_value_heads=None)
    assert null.num_key_value_heads == 8
    assert notes(null)["default", "num_key_value_heads"] == "null; the 8 attention heads, as transformers takes it"


@pytest.mark.parametrize(
    ("base", "value", "text"),
    [
        (QWEN2, 16, None),
        (QWEN2_MOE, 16, None),
        (QWEN3, 128, "{}; the class default 128 taken"),
        (QWEN3_MOE, 16, "{}; hidden_size / num_attention_heads = 16 taken, as transformers takes it"),
    ],
)
def test_head_dim_missing(base: Json, value: int, text: str | None) -> None:
    for absent, word in ((DROP, "missing"), (None, "null")):
        config = read(base, head_dim=absent)
        assert config.head_dim == value
        assert notes(config) == ({("default", "head_dim"): text.format(word)} if text else {})


@pytest.mark.parametrize("base", BASES.values())
def test_head_dim_stated_wins_also_where_heads_would_not_divide(base: Json) -> None:
    config = read(base, head_dim=48, hidden_size=66)
    assert config.head_dim == 48
    assert count_kv_bytes_per_token(config) == 2 * 2 * 2 * 48 * 2  # k and v, layers, heads, head_dim, bytes
    assert count_kv_bytes_per_token(config, "float8_e4m3fn") == 2 * 2 * 2 * 48


@pytest.mark.parametrize(
    ("base", "changes", "qkv", "output"),
    [
        (QWEN2, {}, True, False),
        (QWEN2, {"attention_bias": True}, True, False),
        (QWEN2, {"qkv_bias": True}, True, False),
        (QWEN2_MOE, {}, True, False),
        (QWEN2_MOE, {"qkv_bias": False}, False, False),
        (QWEN2_MOE, {"qkv_bias": False, "attention_bias": False}, False, False),
        (QWEN2_MOE, {"attention_bias": True}, True, False),
        (QWEN3, {}, False, False),
        (QWEN3, {"attention_bias": True}, True, True),
        (QWEN3_MOE, {"attention_bias": True, "qkv_bias": True}, True, True),
        (QWEN3_MOE, {"attention_bias": False, "qkv_bias": False, "use_qk_norm": True}, False, False),
    ],
)
def test_biases_follow_the_class(base: Json, changes: Json, qkv: bool, output: bool) -> None:
    config = read(base, **changes)
    assert (config.qkv_bias, config.attention_o_bias) == (qkv, output)
    head_dim = config.head_dim
    biases = count_params(config).groups["attention_bias"]
    assert biases == 2 * ((4 + 2 + 2) * head_dim * qkv + 64 * output)


# Mixtures


@pytest.mark.parametrize(
    ("step", "dense", "sparse"),
    [
        (1, [], (0, 1, 2, 3)),
        (2, [], (1, 3)),
        (2, [3], (1,)),
        (3, [], (2,)),
        (4, [], (3,)),
        (1, [0], (1, 2, 3)),
        (1, [3, 1, 3], (0, 2)),
        (2, [0, 2], (1, 3)),
        (1, None, (0, 1, 2, 3)),
    ],
)
@pytest.mark.parametrize("base", [QWEN2_MOE, QWEN3_MOE])
def test_which_layers_are_mixtures(base: Json, step: int, dense: list[int] | None, sparse: tuple[int, ...]) -> None:
    config = read(base, num_hidden_layers=4, decoder_sparse_step=step, mlp_only_layers=dense)
    assert config.sparse_layers == sparse
    groups = count_params(config).groups
    assert groups["experts"] == len(sparse) * 4 * 3 * 64 * 32
    assert groups["mlp"] == (4 - len(sparse)) * 3 * 64 * 128


def test_an_untied_mixture_is_counted_whole() -> None:
    """Every expert, the router and the head of its own: the parts that estimators drop."""
    attention = 64 * (4 + 2 + 2) * 32 + 4 * 32 * 64 + 2 * 32
    layer = attention + 2 * 64 + 4 * 64 + 4 * 3 * 64 * 32
    assert count_params(read(QWEN3_MOE)).num_params == 2 * layer + 64 + 2 * 256 * 64
    assert count_params(read(QWEN3_MOE, tie_word_embeddings=True)).num_params == 2 * layer + 64 + 256 * 64


@pytest.mark.parametrize(
    ("value", "width", "note"),
    [
        (48, 48, None),
        (0, 0, None),
        (None, 0, "null; no shared expert, although transformers' class default is 5632"),
        (DROP, 0, "missing; no shared expert, although transformers' class default is 5632"),
    ],
)
def test_the_shared_expert_of_qwen2_moe(value: Any, width: int, note: str | None) -> None:
    config = read(QWEN2_MOE, shared_expert_intermediate_size=value)
    assert (config.shared_expert_intermediate_size, config.has_shared_expert) == (width, width > 0)
    assert notes(config) == ({("default", "shared_expert_intermediate_size"): note} if note else {})
    groups = count_params(config).groups
    assert (groups["shared_expert"], groups["shared_expert_gate"]) == (2 * 3 * 64 * width, 2 * 64 * (width > 0))


@pytest.mark.parametrize("value", [0, None, DROP])
def test_qwen3_moe_has_no_shared_expert(value: Any) -> None:
    config = read(QWEN3_MOE, shared_expert_intermediate_size=value)
    assert not config.has_shared_expert
    assert config.notes == ()


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("base", [QWEN2_MOE, QWEN3_MOE])
def test_renormalising_is_as_stated_whatever_the_type(base: Json, value: bool) -> None:
    assert read(base, norm_topk_prob=value).norm_topk_prob is value


def test_switches_of_mixtures_do_nothing_in_a_dense_model() -> None:
    config = read(QWEN3, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[], router_aux_loss_coef=0.1)
    assert config == ModelConfig.from_hf(QWEN3)
    assert notes(config) == {
        ("ignored", key): "a mixture-of-experts field; qwen3 is dense"
        for key in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef")
    }
    assert read(QWEN3, num_experts=0, num_experts_per_tok=None).notes == ()


# Sliding windows

FULL, SLIDING = "full_attention", "sliding_attention"


def windows(base: Json, **changes: Any) -> tuple[int | None, ...]:
    return read(base, num_hidden_layers=4, **changes).sliding_windows


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("window", [8, 4096, None, 0, DROP])
@pytest.mark.parametrize("flag", [False, DROP])
def test_a_window_counts_only_with_the_flag(base: Json, window: Any, flag: Any) -> None:
    config = read(base, sliding_window=window, use_sliding_window=flag, max_window_layers=1)
    assert config.sliding_windows == (None, None)
    said = {("ignored", "sliding_window"): f"{window} has no effect: use_sliding_window is false"}
    assert notes(config) == (said if window in (8, 4096) else {})


@pytest.mark.parametrize("base", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (0, (8, 8, 8, 8)),
        (1, (None, 8, 8, 8)),
        (3, (None, None, None, 8)),
        (4, (None,) * 4),  # equal to the layer count: no layer is windowed, and that is no fault
        (28, (None,) * 4),
        (70, (None,) * 4),
        (None, (None,) * 4),
        (DROP, (None,) * 4),
    ],
)
def test_dense_models_are_windowed_from_max_window_layers_on(base: Json, first: Any, expected: tuple[Any, ...]) -> None:
    assert windows(base, sliding_window=8, use_sliding_window=True, max_window_layers=first) == expected


def test_max_window_layers_is_28_by_default() -> None:
    config = read(QWEN3, num_hidden_layers=30, sliding_window=8, use_sliding_window=True)
    assert config.sliding_windows == (*(None,) * 28, 8, 8)
    assert read(QWEN2_MOE, num_hidden_layers=32, sliding_window=8, use_sliding_window=True).sliding_windows == (
        *(8, None) * 14,
        *(None,) * 4,
    )


@pytest.mark.parametrize(
    ("first", "expected"),
    [(28, (8, None, 8, None)), (3, (8, None, 8, None)), (2, (8, None, None, None)), (0, (None,) * 4)],
)
def test_qwen2_moe_windows_every_other_layer_below_max_window_layers(first: int, expected: tuple[Any, ...]) -> None:
    assert windows(QWEN2_MOE, sliding_window=8, use_sliding_window=True, max_window_layers=first) == expected


@pytest.mark.parametrize("first", [0, 2, 28, DROP])
def test_qwen3_moe_windows_all(first: Any) -> None:
    assert windows(QWEN3_MOE, sliding_window=8, use_sliding_window=True, max_window_layers=first) == (8,) * 4


@pytest.mark.parametrize("base", [QWEN2, QWEN3, QWEN2_MOE], ids=["qwen2", "qwen3", "qwen2_moe"])
def test_layer_types_decide(base: Json) -> None:
    kinds = [SLIDING, FULL, FULL, SLIDING]
    flag = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    assert windows(base, layer_types=kinds, **flag) == (8, None, None, 8)
    assert windows(base, layer_types=[FULL] * 4, **flag) == (None,) * 4


def test_layer_types_without_effect_are_noted() -> None:
    off = read(QWEN3, layer_types=[SLIDING, FULL], sliding_window=8)
    assert off.sliding_windows == (None, None)
    assert notes(off) == {
        ("ignored", "sliding_window"): "8 has no effect: use_sliding_window is false",
        ("ignored", "layer_types"): "sliding_attention has no effect: use_sliding_window is false",
    }
    null = read(QWEN3, layer_types=[SLIDING, FULL], sliding_window=None, use_sliding_window=True)
    assert notes(null) == {("ignored", "layer_types"): "sliding_attention has no effect: sliding_window is null"}
    moe = read(QWEN3_MOE, layer_types=[SLIDING, FULL], sliding_window=8, use_sliding_window=True)
    assert moe.sliding_windows == (8, 8)
    assert notes(moe) == {("ignored", "layer_types"): "qwen3_moe windows every layer, as transformers does"}
    assert read(QWEN3, layer_types=[FULL, FULL]).notes == ()


def test_a_window_that_is_not_stated() -> None:
    config = read(QWEN3, use_sliding_window=True, max_window_layers=1)
    assert config.sliding_windows == (None, 4096)
    assert notes(config) == {("default", "sliding_window"): "missing; the class default 4096 taken"}
    assert read(QWEN3, use_sliding_window=True, sliding_window=None, max_window_layers=1).sliding_windows == (
        None,
        None,
    )


def test_cutting_layers_keeps_the_first_ones() -> None:
    config = read(
        QWEN2_MOE, num_hidden_layers=6, mlp_only_layers=[1, 5], sliding_window=8, use_sliding_window=True,
        max_window_layers=3,
    )  # fmt: skip
    cut = config.with_layers(4)
    assert (cut.num_hidden_layers, cut.sliding_windows, cut.sparse_layers) == (4, (8, None, 8, None), (0, 2, 3))
    assert config.with_layers(6) == config


# The classes of transformers, where they are installed


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
class TestTransformers:
    @staticmethod
    def of(base: Json, **changes: Any) -> Any:
        transformers = pytest.importorskip("transformers")
        data = {key: value for key, value in changed(base, **changes).items() if key != "model_type"}
        return transformers.AutoConfig.for_model(base["model_type"], **data)

    @pytest.mark.parametrize("base", BASES.values(), ids=BASES)
    @pytest.mark.parametrize("flag", [True, False, DROP])
    @pytest.mark.parametrize("window", [8, None, DROP])
    @pytest.mark.parametrize("first", [0, 1, 4, 5, 31, DROP])
    def test_windows(self, base: Json, flag: Any, window: Any, first: Any) -> None:
        changes = {
            "num_hidden_layers": 5, "use_sliding_window": flag, "sliding_window": window, "max_window_layers": first,
        }  # fmt: skip
        theirs = self.of(base, **changes)
        kinds = [SLIDING] * 5 if base is QWEN3_MOE else theirs.layer_types
        expected = tuple((theirs.sliding_window or None) if kind == SLIDING else None for kind in kinds)
        assert read(base, **changes).sliding_windows == expected

    @pytest.mark.parametrize("base", [QWEN2, QWEN3, QWEN2_MOE])
    def test_layer_types(self, base: Json) -> None:
        changes = {"layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 8}
        theirs = self.of(base, **changes)
        expected = tuple(theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types)
        assert read(base, **changes).sliding_windows == expected == (8, None)

    @pytest.mark.parametrize("base", BASES.values(), ids=BASES)
    def test_defaults(self, base: Json) -> None:
        left_out = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "norm_topk_prob")
        missing = dict.fromkeys((*left_out, "rope_theta", "tie_word_embeddings"), DROP)
        theirs = self.of(base, num_attention_heads=32, **missing)
        ours = read(base, num_attention_heads=32, **missing)
        for key in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
            assert getattr(ours, key) == getattr(theirs, key), key
        assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.norm_topk_prob == getattr(theirs, "norm_topk_prob", False)
        assert ours.router_aux_loss_coef == getattr(theirs, "router_aux_loss_coef", 0.001)
        assert ours.qkv_bias == getattr(theirs, "qkv_bias", getattr(theirs, "attention_bias", base is QWEN2))

    @pytest.mark.parametrize("base", [QWEN2, QWEN3])
    def test_null_kv_heads(self, base: Json) -> None:
        theirs = self.of(base, num_key_value_heads=None)
        assert read(base, num_key_value_heads=None).num_key_value_heads == theirs.num_key_value_heads == 4
