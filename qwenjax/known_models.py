"""Facts of published models, so that a model's name works without a network or a config.json.

`data/known_models.csv` has one row for each Qwen model that runs here; `data/cost_models.csv` has those of which only
the costs are known: Llama, Mistral, Mixtral and the first Qwen generation, that one in the keys of the second. An empty
cell means that the fact doesn't apply, or that no source
for it was found: the config then lacks the key, and whoever reads it takes the class default and says so.
"""

from __future__ import annotations

import csv
import difflib
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenjax.errors import InputError

_DATA = Path(__file__).parent / "data"
_FLOATS = ("rope_theta", "rms_norm_eps")  # the other cells are JSON: integers, true and false, objects
_WORDS = ("model_type", "torch_dtype")
_FACTS_ONLY = ("hf_id", "aliases", "stored_params", "stored_note", "source")
_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM",
                  "qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
                  "mixtral": "MixtralForCausalLM", "qwen": "QWenLMHeadModel"}  # fmt: skip


@dataclass(frozen=True)
class KnownModel:
    """What is known of a published checkpoint besides its config.

    stored_params counts the elements in its safetensors files (None: not known); stored_note says why that differs
    from the parameters of the architecture, as terms joined by "; "; source says where the facts come from.
    """

    hf_id: str
    stored_params: int | None
    stored_note: str
    source: str


def known_model_names(*, runnable: bool = True) -> tuple[str, ...]:
    """The Hugging Face ids of the known models, by generation and size.

    Those of the architectures that run here; with runnable=False those whose costs alone are known follow.
    """
    rows = _rows("known_models.csv") if runnable else _all_rows()
    return tuple(row["hf_id"] for row in rows)


def known_model_config(name: str) -> dict[str, object]:
    """The config.json fields of a known model; raises InputError with the near names for an unknown one.

    Leaves out token ids, bookkeeping, and keys for which no source was found.
    """
    row = _find(name)
    model_type = row["model_type"]
    config: dict[str, object] = {"architectures": [_ARCHITECTURES[model_type]]}
    config |= {key: _parse(key, cell) for key, cell in row.items() if cell and key not in _FACTS_ONLY}
    if model_type.startswith("qwen3"):
        config["attention_bias"] = False
    if "quantization_config" in config:
        config["quantization_config"] = _with_layers(config["quantization_config"], int(row["num_hidden_layers"]))
    return config


def known_model_facts(name: str) -> KnownModel:
    """Where a known model's facts come from and how many parameters its published files hold (a count of elements)."""
    row = _find(name)
    stored = int(row["stored_params"]) if row["stored_params"] else None
    return KnownModel(row["hf_id"], stored, row["stored_note"], row["source"])


def _parse(key: str, cell: str) -> object:
    if key in _WORDS:
        return cell
    if key in _FLOATS:
        return float(cell)
    value: object = json.loads(cell)
    return value


def _with_layers(quantization: Any, layers: int) -> dict[str, Any]:
    """Spells out `model.layers.*.name` for each layer, as Qwen's own files do."""
    names = quantization.get("modules_to_not_convert")
    if names is None:
        return dict(quantization)
    spelled = [name.replace("*", str(i)) for name in names for i in (range(layers) if "*" in name else (0,))]
    return {**quantization, "modules_to_not_convert": spelled}


@functools.cache
def _rows(table: str) -> tuple[dict[str, str], ...]:
    with (_DATA / table).open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def _all_rows() -> tuple[dict[str, str], ...]:
    return (*_rows("known_models.csv"), *_rows("cost_models.csv"))


@functools.cache
def _by_name() -> dict[str, dict[str, str]]:
    index = {}
    for row in _all_rows():
        owner, _, short = row["hf_id"].lower().rpartition("/")
        for name in (short, *row.get("aliases", "").lower().split()):
            index[name] = index[f"{owner}/{name}"] = row
    return index


def _find(name: str) -> dict[str, str]:
    found = _by_name().get(name.lower())
    if found is None:
        raise InputError("MODEL", name, f"is not a known model{_near(name)}", "`roofline models` lists the known ones; "
                         "a path to a config.json or to a checkpoint folder works too.")  # fmt: skip
    return found


def _near(name: str) -> str:
    """The known names that look most like this one, as the end of a sentence."""
    short = name.lower().rpartition("/")[2]
    ids = {hf_id.lower().rpartition("/")[2]: hf_id for hf_id in known_model_names(runnable=False)}
    longer = [known for known in ids if short and known.startswith(short)]
    near = list(dict.fromkeys(longer + difflib.get_close_matches(short, ids, n=4, cutoff=0.6)))[:4]
    return f"; near: {', '.join(ids[match] for match in near)}" if near else ""
