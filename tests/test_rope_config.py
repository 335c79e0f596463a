"""RoPE as configs state it: both generations of spelling, defaults with their notes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from config_base import BASES, DROP, QWEN3, QWEN3_MOE, Json, changed, notes, read

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.rope_config import RopeScaling

NUMBER = "must be a positive number. Write a JSON number without quotes."
KNOWN = "Known: default, linear, yarn."
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def message(**changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        ModelConfig.from_hf(changed(QWEN3, **changes))
    return str(caught.value)


# The base


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000},
        {"rope_theta": DROP, "rope_parameters": {"rope_theta": 500000, "rope_type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        {"rope_theta": DROP, "rope_scaling": {"rope_theta": 5e5, "rope_type": "default"}},
        {
            "rope_theta": DROP,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0},
        },
    ],
)
def test_the_base_is_read_wherever_it_is(base: Json, changes: Json) -> None:
    config = read(base, **changes)
    assert (config.rope_theta, config.rope_scaling, config.notes) == (5e5, None, ())


@pytest.mark.parametrize(
    "changes", [{"rope_theta": DROP}, {"rope_theta": None}, {"rope_theta": DROP, "rope_parameters": {}}]
)
def test_no_base_is_10000_with_a_warning(changes: Json) -> None:
    config = read(QWEN3, **changes)
    assert config.rope_theta == 10000
    assert notes(config) == {
        ("warning", "rope_theta"): (
            "missing; 10000 as transformers takes it. Qwen2 and later were trained with 1000000: check the file"
        )
    }


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_block_with_another_base_is_refused(key: str) -> None:
    assert message(rope_theta=1000000, **{key: {"rope_theta": 10000, "rope_type": "default"}}) == (
        f"rope_theta = 1000000: is given twice with different values ({key}.rope_theta 10000, rope_theta 1000000). "
        "Keep one of them."
    )


@pytest.mark.parametrize("value", [0, -1.0, "1000000", True, [1e6], float("nan"), float("inf"), 10**400])
def test_what_is_no_base(value: Any) -> None:
    for changes in ({"rope_theta": value}, {"rope_parameters": {"rope_theta": value}}):
        text = message(**changes)
        assert text.startswith("rope_theta = " if "rope_theta" in changes else "rope_parameters.rope_theta = ")
        assert text.endswith(NUMBER)


# Scaling


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128}},
        {"rope_scaling": {**YARN, "type": "yarn"}},
        {"rope_scaling": {**YARN, "rope_theta": 1000000}},
        {"rope_theta": DROP, "rope_parameters": {**YARN, "rope_theta": 1e6}},
        {"rope_parameters": YARN},
        {"rope_scaling": YARN, "rope_parameters": YARN},
        # A block added to a file of transformers 5 keeps that file's base.
        {"rope_theta": DROP, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": YARN},
        {"rope_scaling": {**YARN, "attention_factor": None, "beta_fast": None, "mscale": None, "truncate": True}},
    ],
)
def test_every_spelling_of_one_scaling(base: Json, changes: Json) -> None:
    config = read(base, **changes)
    assert config.rope_scaling == RopeScaling("yarn", 4.0, 128)
    assert config.rope_theta == 1e6
    assert config.notes == ()
    assert (config.max_position_embeddings, config.context_length) == (512, 512)


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_a_minimal_block_takes_the_length_of_the_model(base: Json) -> None:
    config = read(base, rope_scaling={"type": "yarn", "factor": 4.0})
    assert config.rope_scaling == RopeScaling("yarn", 4.0, 512)
    assert config.context_length == 2048
    field = "rope_scaling.original_max_position_embeddings"
    assert notes(config) == {("default", field): "missing; max_position_embeddings 512 taken"}


@pytest.mark.parametrize(
    ("positions", "factor", "context", "implied"),
    [
        (512, 4.0, 512, None),
        (512, 2.0, 512, "4"),  # the factor wins over the ratio, as transformers 5.24 has it
        (512, 8, 1024, "4"),
        (160, 4.0, 512, "1.25"),  # Qwen3: 40960 positions in the config, 32768 trained, 131072 by YaRN
        (128, 4.0, 512, None),
        (64, 4.0, 512, "0.5"),
    ],
)
def test_the_factor_wins(positions: int, factor: float, context: int, implied: str | None) -> None:
    config = read(QWEN3, max_position_embeddings=positions, rope_scaling={**YARN, "factor": factor})
    assert config.rope_scaling == RopeScaling("yarn", factor, 128)
    assert (config.max_position_embeddings, config.context_length) == (positions, context)
    text = f"{factor:g} is used, although max_position_embeddings / original_max_position_embeddings is {implied}"
    assert notes(config) == ({("warning", "rope_scaling.factor"): text} if implied else {})


def test_every_field_of_yarn() -> None:
    more = {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "mscale": 0.5, "mscale_all_dim": 1}
    block = {**YARN, **more, "truncate": False}
    assert read(QWEN3, rope_scaling=block).rope_scaling == RopeScaling(
        "yarn", 4.0, 128, 1.5, 16.0, 2.0, 0.5, 1.0, False
    )


def test_linear() -> None:
    config = read(QWEN3, rope_scaling={"type": "linear", "factor": 8})
    assert config.rope_scaling == RopeScaling("linear", 8.0, 512)
    assert (config.context_length, config.notes) == (4096, ())


@pytest.mark.parametrize("block", [{}, {"rope_type": "default"}, {"type": "default"}, {"rope_type": None}])
def test_no_scaling(block: Json) -> None:
    config = read(QWEN3, rope_scaling=block)
    assert (config.rope_scaling, config.context_length, config.notes) == (None, 512, ())


def test_a_factor_that_the_default_type_ignores_is_noted() -> None:
    config = read(QWEN3, rope_parameters={"rope_type": "default", "factor": 4.0})
    assert config.rope_scaling is None
    assert notes(config) == {("ignored", "rope_parameters.factor"): "rope_type default doesn't stretch the context"}


def test_attn_factor_is_ignored_as_transformers_does_and_the_context_kept() -> None:
    config = read(QWEN3, rope_scaling={**YARN, "attn_factor": 0.8782})
    assert config.rope_scaling == RopeScaling("yarn", 4.0, 128)
    assert config.context_length == 512
    assert notes(config) == {
        ("ignored", "rope_scaling.attn_factor"): (
            "not a key of transformers, which ignores it; "
            "the attention factor follows attention_factor, mscale or the YaRN default"
        )
    }


# Refused


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", [1.0, 4, "yarn", ["yarn"], True, [], 0, False])
def test_what_is_no_block(key: str, value: Any) -> None:
    assert message(**{key: value}) == (
        f'{key} = {value!r}: must be null or an object. Write null, or {{"rope_type": "yarn", "factor": 4.0}}.'
    )


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {"rope_type": "dynamic", "factor": 4.0},
            "rope_type = 'dynamic': is not implemented: its frequencies depend on the longest position seen. " + KNOWN,
        ),
        (
            {"type": "mrope", "factor": 4.0},
            "rope_type = 'mrope': is not implemented: it is the rotary embedding of vision models. " + KNOWN,
        ),
        ({"rope_type": "longrope", "factor": 4.0}, f"rope_type = 'longrope': is not implemented. {KNOWN}"),
        ({"rope_type": "llama3", "factor": 8.0}, f"rope_type = 'llama3': is not implemented. {KNOWN}"),
        ({"type": "su", "factor": 4.0}, f"rope_type = 'su': is not implemented. {KNOWN}"),
        ({"type": ["yarn"], "factor": 4.0}, f"rope_type = ['yarn']: is not implemented. {KNOWN}"),
        ({"factor": 4.0}, f"rope_type: is missing beside the factor 4.0. {KNOWN}"),
        (
            {"rope_type": "yarn", "type": "linear", "factor": 4.0},
            "type = 'linear': disagrees with rope_type 'yarn'. Keep rope_type.",
        ),
        ({"rope_type": "yarn"}, "factor: is missing for rope_type yarn. Give the factor, such as 4.0."),
        (
            {"rope_type": "linear", "factor": None},
            "factor: is missing for rope_type linear. Give the factor, such as 4.0.",
        ),
        (
            {"rope_type": "yarn", "factor": 0.5},
            "factor = 0.5: must be at least 1. A factor of 4.0 stretches the context fourfold.",
        ),
        ({"rope_type": "yarn", "factor": 0}, f"factor = 0: {NUMBER}"),
        ({"rope_type": "yarn", "factor": -4.0}, f"factor = -4.0: {NUMBER}"),
        ({"rope_type": "yarn", "factor": "4.0"}, f"factor = '4.0': {NUMBER}"),
        ({"rope_type": "yarn", "factor": True}, f"factor = True: {NUMBER}"),
        ({"rope_type": "yarn", "factor": float("nan")}, f"factor = nan: {NUMBER}"),
        ({"rope_type": "yarn", "factor": [4.0]}, f"factor = [4.0]: {NUMBER}"),
        (
            {"rope_type": "yarn", "factor": 1e308},
            "factor = 1e+308: stretches 512 positions beyond any model's (2147483648). Check the file.",
        ),
        ({**YARN, "attention_factor": 0}, f"attention_factor = 0: {NUMBER}"),
        ({**YARN, "beta_fast": "32"}, f"beta_fast = '32': {NUMBER}"),
        (
            {**YARN, "truncate": 1},
            "truncate = 1: must be true or false. Leave it out for the default, true.",
        ),
        (
            {**YARN, "truncate": None},
            "truncate: is null, but must be true or false. Leave it out for the default, true.",
        ),
        *(
            (
                {**YARN, "original_max_position_embeddings": value},
                (
                    f"original_max_position_embeddings = {value!r}: must be a positive integer up to 2147483648. "
                    "Give the length the model was trained with, such as 32768."
                ),
            )
            for value in (0, -1, 32768.0, "32768", True, [32768], 10**30)
        ),
        *(
            (
                {"rope_type": "default", key: value},
                (
                    f"{key} = {value!r}: is not implemented. Known keys: attention_factor, beta_fast, beta_slow, "
                    "factor, mscale, mscale_all_dim, original_max_position_embeddings, rope_theta, rope_type, "
                    "truncate, type."
                ),
            )
            for key, value in {
                "mrope_section": [16, 24, 24],
                "partial_rotary_factor": 0.25,
                "low_freq_factor": 1.0,
                "full_attention": {"rope_theta": 1e6},
            }.items()
        ),
    ],
)
def test_refused(block: Json, text: str) -> None:
    assert message(rope_scaling=block) == f"rope_scaling.{text}"
    assert message(rope_parameters=block) == f"rope_parameters.{text}"


def test_blocks_that_disagree() -> None:
    assert message(rope_scaling=YARN, rope_parameters={"rope_type": "yarn", "factor": 2.0}) == (
        "rope_scaling = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 128}: "
        "disagrees with rope_parameters ({'rope_type': 'yarn', 'factor': 2.0}). Keep one of the two blocks."
    )


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": DROP},
        {"rope_scaling": YARN},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": DROP, "rope_parameters": {**YARN, "rope_theta": 5e5}},
    ],
)
def test_transformers_reads_the_same(changes: Json) -> None:
    transformers = pytest.importorskip("transformers")
    data = {key: value for key, value in changed(QWEN3_MOE, **changes).items() if key != "model_type"}
    theirs = transformers.AutoConfig.for_model("qwen3_moe", **data).rope_parameters
    ours = read(QWEN3_MOE, **changes)
    assert ours.rope_theta == theirs["rope_theta"]
    scaling = ours.rope_scaling
    assert (scaling.rope_type if scaling else "default") == theirs["rope_type"]
    assert (scaling.factor if scaling else None) == theirs.get("factor")
    if scaling and scaling.rope_type == "yarn":
        assert scaling.original_max_position_embeddings == theirs["original_max_position_embeddings"]
