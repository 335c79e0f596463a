"""Every real config file: read and counted exactly as published, or refused with the reason."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from roofline.count import count_params
from roofline.stored import count_stored_params

KNOWN_TYPES = "Known here: qwen2, qwen3, qwen2_moe, qwen3_moe, llama, mistral, mixtral."


def _foreign(model_type: str, reason: str) -> str:
    return f"model_type = '{model_type}': {reason}. {KNOWN_TYPES}"


def _other_file(what: str) -> str:
    return f"model_type: is missing: this is {what}, not a config.json. Give the config.json."


_HYBRID = "hybrid linear attention is not implemented"
_VISION = "vision models are not implemented"
_OMNI = "omni models (vision and audio) are not implemented"
_FIRST = "the first Qwen generation runs custom code and is not implemented"
_INDEX = _other_file("the index of a sharded checkpoint")
_QUANT = _other_file("modelopt's hf_quant_config.json")

REFUSED = {
    "Qwen-72B-Chat.json": _foreign("qwen", _FIRST),
    "Qwen-7B.json": _foreign("qwen", _FIRST),
    "Qwen2-VL-2B-Instruct-AWQ.json": _foreign("qwen2_vl", _VISION),
    "Qwen2-VL-7B-Instruct.json": _foreign("qwen2_vl", _VISION),
    "Qwen2.5-VL-7B-Instruct.json": _foreign("qwen2_5_vl", _VISION),
    "Qwen2.5-Omni-7B-AWQ.json": _foreign("qwen2_5_omni", _OMNI),
    "Qwen3-VL-8B-Instruct.json": _foreign("qwen3_vl", _VISION),
    "Qwen3-VL-30B-A3B-Instruct.json": _foreign("qwen3_vl_moe", _VISION),
    "Qwen3-ASR.json": _foreign("qwen3_asr", "audio models are not implemented"),
    "Qwen3-Next-80B-A3B-Thinking.json": _foreign("qwen3_next", _HYBRID),
    "Qwen3.5-27B.json": _foreign("qwen3_5", _HYBRID),
    "Qwen3.5-35B-A3B.json": _foreign("qwen3_5_moe", _HYBRID),
    "Qwen3.5-122B-A10B.json": _foreign("qwen3_5_moe", _HYBRID),
    "Qwen3.5-397B-A17B.json": _foreign("qwen3_5_moe", _HYBRID),
    "nvidia-Qwen3.5-122B-A10B-NVFP4.json": _foreign("qwen3_5_moe", _HYBRID),
    "Qwen3.8-2.4T-A95B.json": _foreign("qwen3_5_moe_text", _HYBRID),
    "Qwen2.5-7B-Instruct-1M.dca.json": (
        "dual_chunk_attention_config = {'chunk_size': 262144, 'local_size': 8192, "
        "'original_max_position_embeddings': 262144}: dual chunk attention is not plain causal attention and is not "
        "implemented. Use a plain text checkpoint of the four Qwen architectures."
    ),
    "bad-tpu-inference-qwen3_32b-string-bools.json": (
        "attention_bias = 'False': is a string, not the JSON boolean false (quoted too: rope_scaling, sliding_window, "
        "tie_word_embeddings, use_sliding_window). Write false without quotes."
    ),
    "mllm-gguf-Qwen3-30B-A3B.json": (
        'rope_scaling = 1.0: must be null or an object. Write null, or {"rope_type": "yarn", "factor": 4.0}.'
    ),
    "Qwen2-7B-Instruct.index.json": _INDEX,
    "Qwen3-1.7B.index.json": _INDEX,
    "Qwen3-4B.index.json": _INDEX,
    "Qwen3-32B-FP8-Static-PerTensor.hf_quant_config.json": _QUANT,
    "nvidia-Qwen3-235B-A22B-NVFP4.hf_quant_config.json": _QUANT,
    "Qwen3-32B.generation_config.json": _other_file("a generation_config.json"),
}

EXACT = (
    "DeepSeek-R1-Distill-Qwen-1.5B.json",
    "DeepSeek-R1-Distill-Qwen-14B.json",
    "DeepSeek-R1-Distill-Qwen-32B.json",
    "DeepSeek-R1-Distill-Qwen-7B.json",
    "Qwen1.5-1.8B-Chat.json",
    "Qwen1.5-110B.json",
    "Qwen1.5-14B.json",
    "Qwen1.5-32B.json",
    "Qwen1.5-72B.json",
    "Qwen1.5-7B-Chat.json",
    "Qwen2-0.5B-Instruct.json",
    "Qwen2-1.5B-Instruct.json",
    "Qwen2-57B-A14B-Instruct.json",
    "Qwen2-57B-A14B.json",
    "Qwen2-72B-Instruct.json",
    "Qwen2-72B.json",
    "Qwen2-7B-Instruct.json",
    "Qwen2-7B.json",
    "Qwen2.5-0.5B-Instruct.json",
    "Qwen2.5-0.5B.json",
    "Qwen2.5-1.5B-Instruct.json",
    "Qwen2.5-1.5B.json",
    "Qwen2.5-14B-Instruct.json",
    "Qwen2.5-14B.json",
    "Qwen2.5-32B-Instruct-GPTQ-Int4.json",
    "Qwen2.5-32B-Instruct.json",
    "Qwen2.5-32B.json",
    "Qwen2.5-3B-Instruct.json",
    "Qwen2.5-72B-Instruct.json",
    "Qwen2.5-72B.json",
    "Qwen2.5-7B-Instruct-1M.json",
    "Qwen2.5-7B-Instruct.json",
    "Qwen2.5-7B.json",
    "Qwen2.5-Coder-32B-Instruct.json",
    "Qwen2.5-Coder-7B-Instruct.json",
    "Qwen2.5-Math-1.5B.json",
    "Qwen2.5-Math-7B-Instruct.json",
    "Qwen3-235B-A22B-Instruct-2507.json",
    "Qwen3-30B-A3B-Instruct-2507.json",
    "Qwen3-30B-A3B-Thinking-2507.json",
    "Qwen3-30B-A3B.json",
    "Qwen3-32B-AWQ.json",
    "Qwen3-32B.json",
    "Qwen3-4B.json",
    "Qwen3-8B.json",
    "Qwen3-Coder-30B-A3B-Instruct.json",
    "Qwen3-Embedding-0.6B.json",
    "Qwen3-Embedding-4B.json",
    "Qwen3-Reranker-0.6B.json",
)


class Stored(NamedTuple):
    """What the caller must know of the files, and the differences that come of it."""

    known: dict[str, bool]
    differences: tuple[tuple[str, int], ...]


_HEAD = "lm_head stored although tied"
EXPLAINED = {
    "Qwen1.5-0.5B-Chat.json": Stored({"lm_head_stored": True}, ((_HEAD, 155582464),)),
    "Qwen3-0.6B.json": Stored({"lm_head_stored": True}, ((_HEAD, 155582464),)),
    "Qwen3-1.7B.json": Stored({"lm_head_stored": True}, ((_HEAD, 311164928),)),
    "Qwen3-Embedding-8B.json": Stored({"lm_head_stored": False}, (("no lm_head stored although untied", -621219840),)),
    "Qwen3-8B-FP8.json": Stored({}, (("FP8 scales of 128x128 blocks", 423936),)),
    "Qwen3-32B-FP8.json": Stored({}, (("FP8 scales of 128x128 blocks", 1904640),)),
    "Qwen3-235B-A22B-FP8.json": Stored({}, (("FP8 scales of 128x128 blocks", 14269952),)),
    "Qwen1.5-32B-Chat-GPTQ-Int4.partial.json": Stored(
        {"zero_biases_stored": True}, (("zero biases of linears that have none", 4194304),)
    ),
    "nvidia-Qwen3-30B-A3B-NVFP4.json": Stored(
        {"group_scales_counted": False}, (("NVFP4 weights packed two to a byte", -14948499456),)
    ),
    "nvidia-Qwen3-235B-A22B-NVFP4.json": Stored(
        {}, (("NVFP4 weights packed two to a byte", -116899446784), ("NVFP4 scales of 16 weights", 14612430848))
    ),
}
# Files of which nobody published a stored count.
UNCOUNTED = (
    "Qwen3-32B-FP8-Static-PerTensor.json",
    "odd-CodeQwen1.5-7B-finetune.json",
    "odd-maxtext-vllm-adapter-qwen3_moe.json",
    "toy-VeOmni-qwen25.json",
    "toy-VeOmni-qwen3.json",
    "toy-torchtitan-qwen3_moe_debug.json",
    "transformers5-qwen2-default.json",
    "transformers5-qwen2.json",
    "transformers5-qwen2_moe-default.json",
    "transformers5-qwen2_moe.json",
    "transformers5-qwen3-default.json",
    "transformers5-qwen3-yarn.json",
    "transformers5-qwen3.json",
    "transformers5-qwen3_moe.json",
)
READ = (*EXACT, *EXPLAINED, *UNCOUNTED)


def index_rows(shared: Path) -> dict[str, dict[str, Any]]:
    """INDEX.csv by file. Some rows have unquoted commas in their sources: the last columns are found from the end."""
    with (shared / "configs" / "INDEX.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    index = {}
    for row in rows:
        stored = next((match for cell in row if (match := re.match(r"(\d+) stored", cell))), None)
        computed = row[-3]
        index[row[0]] = {
            **dict(zip(header[:18], row, strict=False)),
            "stored": int(stored[1]) if stored else None,
            "computed": int(computed) if computed.isdigit() else None,
        }
    return index


def read_file(shared: Path, name: str, folder: Path) -> ModelConfig:
    """The config of one file, with the hf_quant_config.json that its repository ships beside it."""
    path = shared / "configs" / name
    if not name.startswith("nvidia-"):
        return ModelConfig.from_hf(path)
    shutil.copy(path, folder / "config.json")
    quantized = path.with_name("nvidia-Qwen3-235B-A22B-NVFP4.hf_quant_config.json")
    # The 30B repository's own wasn't archived; as the 235B's it keeps the routers and the head.
    shutil.copy(quantized, folder / "hf_quant_config.json")
    return ModelConfig.from_hf(folder)


def test_every_file_of_the_folder_is_read_or_refused_here(shared: Path) -> None:
    files = {path.name for path in (shared / "configs").iterdir() if path.suffix != ".csv"}
    assert files == set(READ) | set(REFUSED)
    assert len(READ) + len(REFUSED) == len(set(READ) | set(REFUSED))
    assert set(index_rows(shared)) == files


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(shared: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        ModelConfig.from_hf(shared / "configs" / name)
    assert str(caught.value) == REFUSED[name]


@pytest.mark.parametrize("name", READ)
def test_sizes_and_count_are_those_of_the_index(shared: Path, name: str) -> None:
    row = index_rows(shared)[name]
    config = ModelConfig.from_hf(shared / "configs" / name)
    fields = {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate": config.intermediate_size,
        "vocab": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "torch_dtype": config.dtype,
    }
    for column, value in fields.items():
        if row[column]:  # empty: the file doesn't say
            stated = row[column] if isinstance(value, str) else json.loads(row[column])
            assert value == stated, column
    assert count_params(config).num_params == row["computed"]
    if row["moe_fields"]:
        for field, stated in json.loads(row["moe_fields"]).items():
            value = getattr(config, {"num_local_experts": "num_experts"}.get(field, field))
            assert (list(value) if isinstance(value, tuple) else value) == stated, field


@pytest.mark.parametrize("name", [*EXACT, *EXPLAINED])
def test_the_stored_count_is_exact_or_explained(shared: Path, tmp_path: Path, name: str) -> None:
    row = index_rows(shared)[name]
    known, differences = EXPLAINED.get(name, Stored({}, ()))
    stored = count_stored_params(read_file(shared, name, tmp_path), **known)
    assert stored.differences == differences
    assert (stored.num_params, stored.stored) == (row["computed"], row["stored"])


def test_uncounted_files_have_no_published_count(shared: Path) -> None:
    assert [name for name, row in index_rows(shared).items() if row["stored"] is None and name in READ] == sorted(
        UNCOUNTED, key=list(index_rows(shared)).index
    )


def test_every_published_count(shared: Path, tmp_path: Path) -> None:
    """PARAM_COUNTS.csv says the sizes and whether two embedding matrices are stored; the rest is counted."""
    files = {row["hf_id"]: name for name, row in index_rows(shared).items() if name in READ}
    files["Qwen/Qwen2.5-7B-Instruct-1M"] = "Qwen2.5-7B-Instruct-1M.json"
    with (shared / "configs" / "PARAM_COUNTS.csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    assert len(rows) >= 50
    for row in rows:
        name = files[row[0]]
        config = read_file(shared, name, tmp_path)
        sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
        width = config.moe_intermediate_size if config.is_moe else config.intermediate_size
        assert [row[1], *map(int, row[3:10])] == [config.model_type, *sizes, config.head_dim, config.vocab_size, width]
        two, one = "two vocab x hidden matrices" in row[-1], "one embedding matrix" in row[-1]
        known = {**EXPLAINED.get(name, Stored({}, ())).known, **({"lm_head_stored": two} if two or one else {})}
        assert count_stored_params(config, **known).stored == int(row[2]), row[0]


@pytest.mark.parametrize(
    ("name", "lm_head_stored"), [("Qwen2-7B-Instruct", True), ("Qwen3-4B", False), ("Qwen3-1.7B", True)]
)
def test_an_index_states_two_bytes_for_each_stored_element(shared: Path, name: str, lm_head_stored: bool) -> None:
    index = json.loads((shared / "configs" / f"{name}.index.json").read_text(encoding="utf-8"))
    config = ModelConfig.from_hf(shared / "configs" / f"{name}.json")
    assert ("lm_head.weight" in index["weight_map"]) == lm_head_stored
    assert 2 * count_stored_params(config, lm_head_stored=lm_head_stored).stored == index["metadata"]["total_size"]
