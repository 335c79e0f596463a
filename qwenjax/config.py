"""ModelConfig: what a Hugging Face config.json says, read strictly, with Hugging Face's field names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qwenjax.errors import InputError
from qwenjax.field_reader import plain_integer
from qwenjax.hf_keys import FIRST_QWEN, LARGEST, LIMITS, MODEL_TYPES, MOE_TYPES, Note
from qwenjax.hf_reader import read_fields
from qwenjax.known_models import known_model_config, known_model_names
from qwenjax.quantization import Quantization, read_hf_quant_config
from qwenjax.rope_config import RopeScaling


@dataclass(frozen=True)
class ModelConfig:
    """One decoder of the four architectures, or of Llama, Mistral or Mixtral, whose costs alone are known.

    Field names are Hugging Face's; sizes are element counts.
    `from_hf` reads a config.json; the constructor checks that the sizes fit together. eos_token_id has the ids of the
    generation_config.json beside it too.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_o_bias: bool = False
    # One entry for each layer: how many positions a query sees, itself included, or None for all.
    sliding_windows: tuple[int | None, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.001
    initializer_range: float = 0.02
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    quantization: Quantization | None = None
    name: str = field(default="", compare=False)
    notes: tuple[Note, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        _check_ranges(self)
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_hidden_layers)
        _check_sizes(self)

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelConfig:
        """Reads a config.json (path, checkpoint folder, known model's name, or the parsed object).

        Every key is used, known as harmless, or refused; what was taken by default or ignored is in `notes`.
        Raises InputError with the field, the value and the remedy.
        """
        if isinstance(source, Mapping):
            return cls(**read_fields(source))
        if not isinstance(source, str) and not isinstance(getattr(source, "__fspath__", lambda: None)(), str):
            raise InputError(
                "source",
                source,
                "must be a path, a known model's name or the object of a config.json",
                "Parse text with json.loads first.",
            )
        return load_config(source)

    @property
    def is_moe(self) -> bool:
        return bool(self.sparse_layers)

    @property
    def qk_norm(self) -> bool:
        return self.model_type.startswith("qwen3")

    @property
    def has_shared_expert(self) -> bool:
        return self.model_type == "qwen2_moe" and self.shared_expert_intermediate_size > 0

    @cached_property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the mixture-of-experts layers; the others are dense."""
        if self.model_type not in MOE_TYPES or self.num_experts == 0:
            return ()
        return tuple(
            i
            for i in range(self.num_hidden_layers)
            if i not in self.mlp_only_layers and (i + 1) % self.decoder_sparse_step == 0
        )

    def with_layers(self, layers: int) -> ModelConfig:
        """The same model cut to its first layers."""
        if not 1 <= layers <= self.num_hidden_layers:
            raise InputError(
                "layers", layers, f"must be from 1 to num_hidden_layers {self.num_hidden_layers}", "Choose fewer."
            )
        return replace(
            self,
            num_hidden_layers=layers,
            sliding_windows=self.sliding_windows[:layers],
            mlp_only_layers=tuple(i for i in self.mlp_only_layers if i < layers),
        )

    @property
    def context_length(self) -> int:
        """The longest context in tokens: max_position_embeddings, or what the RoPE scaling stretches it to."""
        scaling = self.rope_scaling
        if scaling is None:
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(scaling.factor * scaling.original_max_position_embeddings))


def load_config(source: str | os.PathLike[str]) -> ModelConfig:
    """Reads the config of a path to a config.json, a folder that holds one, or a known model's name."""
    path, text = Path(source), os.fspath(source)
    # os.path answers False where pathlib raises: names too long, folders that can't be entered.
    if os.path.isdir(text):
        path = path / "config.json"
        if not os.path.isfile(path):
            raise InputError(text, None, "the folder has no config.json", "Name a Hugging Face checkpoint folder.")
        return _from_file(path)
    if os.path.exists(text):
        return _from_file(path)
    if text.endswith(".json") or text.startswith((".", "/", "~")):
        raise InputError(
            text,
            None,
            "no such file or folder",
            "Give a config.json, a checkpoint folder or a known model: "
            f"{', '.join(known_model_names()[:3])}, ... (`roofline models` lists them).",
        )
    facts = known_model_config(text)
    fields = read_fields(facts, first_generation=facts["model_type"] == FIRST_QWEN)
    return ModelConfig(**fields, name=text.rsplit("/", 1)[-1])


def check_architecture(config: ModelConfig) -> ModelConfig:
    """Refuses what the estimates count and no model here runs: Llama, Mistral, Mixtral and the first Qwen."""
    if config.model_type not in MODEL_TYPES:
        remedy = f"Models that run here: {', '.join(MODEL_TYPES)}."
        problem = "runs in other libraries; here only its costs are known"
        raise InputError("model_type", config.model_type, problem, remedy)
    return config


def _from_file(path: Path) -> ModelConfig:
    fields = read_fields(read_json(path))
    if path.name != "config.json":
        return ModelConfig(**fields, name=path.stem)
    quantized, generation = path.with_name("hf_quant_config.json"), path.with_name("generation_config.json")
    if fields["quantization"] is None and quantized.is_file():
        fields["quantization"] = read_hf_quant_config(read_json(quantized))
    if generation.is_file():  # chat models end their turns with an id that only this file names
        ids = (*read_eos_ids(generation, read_json(generation)), *fields["eos_token_id"])
        fields["eos_token_id"] = tuple(dict.fromkeys(ids))
    return ModelConfig(**fields, name=path.resolve().parent.name)


def read_eos_ids(path: Path, data: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a text by the word of one of a checkpoint's JSON files: an id, a list of them, or none."""
    value = data.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(plain_integer(token) and 0 <= token < 2**31 for token in ids):
        raise InputError(f"{path}: eos_token_id", value, "must be an id or a list of ids", "Write [] or null for none.")
    return tuple(ids)


def read_json(path: Path) -> Mapping[str, Any]:
    """Reads one JSON object; names the file when it can't be read, isn't JSON, or names a key twice."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(f"{path}: {twice}", None, "is given twice", "Keep one of the two.")
        return result

    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=pairs)  # some editors write a BOM
    except UnicodeDecodeError as error:
        raise InputError(str(path), None, f"isn't UTF-8 text ({error.reason})", "Give a config.json.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InputError(
            str(path), None, f"isn't valid JSON ({error.msg}, {where})", "Correct or download the file again."
        ) from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or brackets without end
        what = "nests too deep" if isinstance(error, RecursionError) else "holds a number too long to read"
        raise InputError(str(path), None, what, "Give a config.json.") from None
    except OSError as error:
        raise InputError(
            str(path), None, f"can't be read ({error.strerror})", "Check the path and its permissions."
        ) from None
    if not isinstance(value, dict):
        raise InputError(str(path), None, f"holds a JSON {type(value).__name__}, not an object", "Give a config.json.")
    return value


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "decoder_sparse_step",
)


def _check_ranges(config: ModelConfig) -> None:
    """Refuses sizes that are no counts, before anything is computed from them."""
    for name in (*_SIZES, *(name for name in LIMITS if name not in _SIZES)):
        value, least = getattr(config, name), 1 if name in _SIZES else 0
        if not plain_integer(value) or value < least:
            raise InputError(name, value, f"must be an integer of at least {least}", "Check the value.")
        limit = LIMITS.get(name, LARGEST)
        if value > limit:
            raise InputError(name, value, f"is larger than any model's ({limit})", "Check the value.")


def _check_sizes(config: ModelConfig) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise InputError(
            "num_key_value_heads", kv_heads, f"doesn't divide num_attention_heads {heads}", f"Dividing: {fitting}."
        )
    if config.head_dim % 2:
        raise InputError(
            "head_dim", config.head_dim, "must be even: rotary embeddings pair its halves", "Check the file."
        )
    if config.num_experts and config.num_experts_per_tok > config.num_experts:
        raise InputError(
            "num_experts_per_tok",
            config.num_experts_per_tok,
            f"is more than num_experts {config.num_experts}",
            "Check the file.",
        )
    if len(config.sliding_windows) != config.num_hidden_layers:
        raise InputError(
            "sliding_windows",
            config.sliding_windows,
            f"must have num_hidden_layers ({config.num_hidden_layers}) entries",
            "Use `with_layers` to change the depth.",
        )
    stray = [layer for layer in config.mlp_only_layers if not 0 <= layer < config.num_hidden_layers]
    if stray:
        raise InputError(
            "mlp_only_layers", stray[0], f"is no layer of the {config.num_hidden_layers}", "Layers count from 0."
        )
    if config.model_type in MOE_TYPES and not config.is_moe:
        by_step = config.decoder_sparse_step > config.num_hidden_layers
        field = "num_experts" if not config.num_experts else "decoder_sparse_step" if by_step else "mlp_only_layers"
        raise InputError(
            field,
            getattr(config, field),
            f"leaves no mixture-of-experts layer among the {config.num_hidden_layers}",
            f"Use model_type {config.model_type.removesuffix('_moe')}, or correct the field.",
        )
