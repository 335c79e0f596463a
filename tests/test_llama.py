"""Configs of Llama, Mistral and Mixtral: read for their costs, strictly, and refused by all that runs a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_run import run
from config_base import DROP, Json, changed, notes

import qwenjax
from qwenjax.config import ModelConfig, check_architecture
from qwenjax.dims import Step
from qwenjax.errors import InputError
from qwenjax.known_models import known_model_config, known_model_facts, known_model_names
from qwenjax.model import check_runnable
from qwenjax.rope_config import RopeScaling
from roofline import formulas as f
from roofline.count import count_kv_bytes_per_token, count_params, count_step, sum_rows
from roofline.stored import count_stored_params

# As published, bookkeeping included; the sizes are small and all different.
LLAMA: Json = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 88,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 320,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
MISTRAL = changed(
    LLAMA,
    architectures=["MistralForCausalLM"],
    model_type="mistral",
    sliding_window=4,
    rope_theta=10000.0,
    pretraining_tp=DROP,
)
MIXTRAL = changed(
    MISTRAL,
    architectures=["MixtralForCausalLM"],
    model_type="mixtral",
    sliding_window=None,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=False,
    router_aux_loss_coef=0.02,
    router_jitter_noise=0.0,
)
BASES = {"llama": LLAMA, "mistral": MISTRAL, "mixtral": MIXTRAL}


def read(base: Json, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(changed(base, **changes))


def refusal(base: Json, **changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(base, **changes)
    return str(caught.value)


def test_a_llama_has_no_biases_and_no_qk_norm() -> None:
    config = read(LLAMA)
    assert [config.qkv_bias, config.attention_o_bias, config.qk_norm, config.is_moe] == [False] * 4
    assert (config.head_dim, config.rope_theta, config.sliding_windows) == (8, 10000.0, (None,) * 3)
    attention, mlp, norms = 48 * (48 + 16 + 16 + 48), 3 * 48 * 88, 2 * 48
    assert count_params(config).num_params == 2 * 320 * 48 + 3 * (attention + mlp + norms) + 48
    assert notes(config) == {("default", "rope_theta"): "missing; 10000 as transformers takes it"}


def test_a_mixtral_is_sparse_everywhere_and_its_experts_are_intermediate_size_wide() -> None:
    config = read(MIXTRAL)
    assert (config.sparse_layers, config.num_experts, config.moe_intermediate_size) == ((0, 1, 2), 4, 88)
    groups = count_params(config).groups
    assert (groups["experts"], groups["router"], groups["mlp"]) == (3 * 4 * 3 * 48 * 88, 3 * 4 * 48, 0)
    assert config.norm_topk_prob is True


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("changes", [{}, {"head_dim": 16}, {"num_key_value_heads": 6}, {"tie_word_embeddings": True}])
def test_counts_equal_the_hand_formulas(base: Json, changes: Json) -> None:
    config = read(base, **changes)
    counts = count_params(config)
    assert counts.groups == f.param_groups(config)
    assert counts.num_active_params == f.num_active_params(config)
    assert counts.flops_per_token["total"] == 2 * f.num_matmul_params(config, experts="active")


@pytest.mark.parametrize(("stated", "kv_heads"), [(DROP, 6), (None, 6), (3, 3)])
def test_llama_without_kv_heads_gives_each_head_its_own(stated: Any, kv_heads: int) -> None:
    config = read(LLAMA, num_key_value_heads=stated)
    assert config.num_key_value_heads == kv_heads
    assert (("default", "num_key_value_heads") in notes(config)) == (stated != 3)


def test_mistral_without_kv_heads_has_the_class_s_eight() -> None:
    assert read(MISTRAL, num_attention_heads=16, head_dim=8, num_key_value_heads=DROP).num_key_value_heads == 8
    assert read(MISTRAL, num_key_value_heads=None).num_key_value_heads == 6


def test_attention_bias_of_llama_is_of_all_four_projections() -> None:
    config = read(LLAMA, attention_bias=True)
    assert (config.qkv_bias, config.attention_o_bias) == (True, True)
    assert count_params(config).groups["attention_bias"] == 3 * (48 + 16 + 16 + 48)


@pytest.mark.parametrize(
    ("base", "stated", "windows", "note"),
    [
        (MISTRAL, 4, (4, 4, 4), None),
        (MISTRAL, None, (None, None, None), None),
        (MISTRAL, DROP, (4096, 4096, 4096), ("default", "sliding_window")),
        (MIXTRAL, None, (None, None, None), None),
        (MIXTRAL, DROP, (None, None, None), None),
        (MIXTRAL, 9, (9, 9, 9), None),
        (LLAMA, 4, (None, None, None), ("ignored", "sliding_window")),
    ],
)
def test_windows_of_mistral_hold_for_every_layer(
    base: Json, stated: Any, windows: tuple[int | None, ...], note: tuple[str, str] | None
) -> None:
    config = read(base, sliding_window=stated)
    assert config.sliding_windows == windows
    assert note is None or note in notes(config)


def test_a_window_limits_what_a_step_reads_and_attends() -> None:
    inside, beyond = (
        sum_rows(count_step(read(MISTRAL), Step.decode(1, context)))["kv_read_bytes"] for context in (4, 64)
    )
    assert inside == beyond == 4 * count_kv_bytes_per_token(read(MISTRAL))


def test_llama3_rope_changes_no_cost() -> None:
    plain, scaled = (read(LLAMA, max_position_embeddings=131072, rope_scaling=rope) for rope in (None, LLAMA3_ROPE))
    assert scaled.rope_scaling == RopeScaling("llama3", 8.0, 8192)
    assert scaled.context_length == 131072
    step = Step.prefill(2, 30, 50)
    assert count_step(plain, step) == count_step(scaled, step)


ROPE_TYPES = "Known: default, linear, yarn, llama3."
REFUSED: list[tuple[Json, Json, str]] = [
    (LLAMA, {"mlp_bias": True}, "mlp_bias = True: a bias in the MLP is not implemented. Only false is supported."),
    (LLAMA, {"qkv_bias": True}, "qkv_bias = True: llama has no biases in attention. Remove the key."),
    (MISTRAL, {"attention_bias": True}, "attention_bias = True: mistral has no biases in attention. Remove the key."),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu': must be silu. No other activation is implemented."),
    (
        LLAMA,
        {"use_qk_norm": True},
        "use_qk_norm = True: llama never normalises queries and keys. Remove the key.",
    ),
    (
        LLAMA,
        {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}},
        f"rope_scaling.rope_type = 'longrope': is not implemented. {ROPE_TYPES}",
    ),
    (
        LLAMA,
        {"num_local_experts": 8},
        "num_experts = 8: is a mixture-of-experts field in a dense llama. Remove the field.",
    ),
    (
        MIXTRAL,
        {"num_local_experts": DROP},
        "num_experts: is missing. A config.json of this model_type must state it; nothing is guessed.",
    ),
    (
        MIXTRAL,
        {"moe_intermediate_size": 64},
        "moe_intermediate_size = 64: isn't a field of mixtral, whose experts are intermediate_size wide. "
        "Remove the field.",
    ),
    (
        LLAMA,
        {"architectures": ["MistralForCausalLM"]},
        "architectures = ['MistralForCausalLM']: disagrees with model_type llama. Correct one.",
    ),
    (
        LLAMA,
        {"logit_scale": 0.5},
        "logit_scale = 0.5: is not a key that is known here. Remove it if it has no effect on the model, or report it.",
    ),
    (MISTRAL, {"sliding_window": 0}, "sliding_window = 0: must be at least 1. Check the file."),
    (LLAMA, {"num_hidden_layers": "3"}, "num_hidden_layers = '3': must be an integer. Write a JSON number without "
                                        "quotes or a point."),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "text"), REFUSED)
def test_readers_are_as_strict_as_qwen_s(base: Json, changes: Json, text: str) -> None:
    assert refusal(base, **changes) == text


def test_qwen_refuses_what_only_llama_has() -> None:
    qwen = changed(LLAMA, model_type="qwen2", architectures=["Qwen2ForCausalLM"], pretraining_tp=1)
    assert "Known: default, linear, yarn." in refusal(qwen, rope_scaling={"rope_type": "llama3", "factor": 8.0})
    assert refusal(qwen, pretraining_tp=2) == (
        "pretraining_tp = 2: a layout of tensor-parallel pretraining is not implemented. Only 1 is supported."
    )


# What runs a model refuses them, in one sentence.


def message(model_type: str) -> str:
    return (
        f"model_type = '{model_type}': runs in other libraries; here only its costs are known. "
        "Models that run here: qwen2, qwen3, qwen2_moe, qwen3_moe."
    )


@pytest.mark.parametrize("name", ["Llama-2-7b-hf", "Mistral-7B-v0.1", "Mixtral-8x7B-v0.1", "Qwen-7B"])
def test_the_model_refuses_them(name: str) -> None:
    config = ModelConfig.from_hf(name)
    makers = (check_architecture, check_runnable, qwenjax.init_params, qwenjax.param_shapes)
    for make in makers:
        with pytest.raises(InputError) as caught:
            make(config)
        assert str(caught.value) == message(config.model_type)


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_commands_that_run_a_model_refuse_them(base: Json, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(base))
    with pytest.raises(InputError) as caught:
        qwenjax.load(tmp_path)
    assert str(caught.value) == message(base["model_type"])
    for line in (f"qwenjax init {tmp_path} -o {tmp_path / 'new'}", f"roofline check {tmp_path}"):
        result = run(line)
        assert (result.status, result.stderr.splitlines()[-1]) == (2, message(base["model_type"]))


def test_a_known_name_is_refused_before_anything_is_downloaded() -> None:
    result = run("qwenjax generate meta-llama/Llama-3.1-8B --prompt x")
    assert (result.status, result.stderr) == (2, message("llama") + "\n")


# The common sizes

PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen-7B": 7_721_324_544,
    "Qwen/Qwen-72B": 72_287_920_128,
}
COSTS_ONLY = known_model_names(runnable=False)[len(known_model_names()) :]
# What each term of stored_note adds to the parameters of the architecture.
NOTES = {
    "rotary inv_freq stored": {"inv_freq_stored": True},
    "fp8 scales of outputs": {},  # quantization_config says it
}


@pytest.mark.parametrize(("name", "num_params"), PUBLISHED.items())
def test_known_sizes_have_the_published_totals(name: str, num_params: int) -> None:
    config = ModelConfig.from_hf(name)
    assert count_params(config).num_params == f.num_params(config) == num_params


@pytest.mark.parametrize("name", COSTS_ONLY)
def test_every_published_count_is_the_formula_plus_what_the_note_says(name: str) -> None:
    config, facts = ModelConfig.from_hf(name), known_model_facts(name)
    terms = [term for term in facts.stored_note.split("; ") if term]
    known = {key: value for term in terms for key, value in NOTES[term].items()}
    assert facts.stored_params in (None, count_stored_params(config, **known).stored)
    config_source, _, count_source = facts.source.partition("; count: ")
    assert config_source.startswith("config: ")
    assert len(config_source) > 15
    assert (facts.stored_params is None) == (count_source == "")
    assert config.model_type in ("llama", "mistral", "mixtral", "qwen")


@pytest.mark.parametrize(
    ("spelling", "hf_id"),
    [
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-chat-hf"),
        ("llama-2-70b", "meta-llama/Llama-2-70b-hf"),
        ("Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/Meta-Llama-3.1-405B", "meta-llama/Llama-3.1-405B"),
        ("MISTRAL-7B-V0.1", "mistralai/Mistral-7B-v0.1"),
        ("Qwen/Qwen-1.8B-Chat", "Qwen/Qwen-1_8B-Chat"),
    ],
)
def test_the_names_that_people_use(spelling: str, hf_id: str) -> None:
    assert known_model_facts(spelling).hf_id == hf_id
    assert ModelConfig.from_hf(spelling).num_hidden_layers == known_model_config(hf_id)["num_hidden_layers"]


def test_names_collide_nowhere() -> None:
    names = known_model_names(runnable=False)
    assert len({name.lower() for name in names}) == len(names)
    assert set(known_model_names()).isdisjoint(COSTS_ONLY)
    assert all(ModelConfig.from_hf(name).model_type in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
               for name in known_model_names())  # fmt: skip


def test_the_first_qwen_generation_is_known_by_name_and_refused_as_a_file() -> None:
    config = ModelConfig.from_hf("Qwen-7B")
    assert (config.model_type, config.qkv_bias, config.intermediate_size) == ("qwen", True, 11008)
    with pytest.raises(InputError, match="the first Qwen generation runs custom code"):
        ModelConfig.from_hf(known_model_config("Qwen-7B"))


def test_commands_print_the_costs_of_a_llama() -> None:
    result = run("roofline params Llama-3.1-8B")
    assert result.stdout.startswith("Llama-3.1-8B: 8,030,261,248 parameters (8.030 B), 16.06 GB")
    assert result.status == 0
    assert run("roofline step Mixtral-8x7B-v0.1 --phase decode --context 100").status == 0
