"""Folders of kernel times, read into tables that can predict their own rows.

Forms: gemm.csv, attention_context.csv, attention_generation.csv, moe.csv and allreduce.csv as ai-dynamo/aiconfigurator
has them; MODEL_dense.csv, MODEL_attention.csv, MODEL_per_sequence.csv and MODEL_moe_by_distinct_experts.csv as
casys-kaist/LLMServingSim has them. A file that can't be used is one error, a row that can't be is skipped and told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from kernel_csv import Columns, Form, Run, Skipped, Source, Table, read_rows
from kernel_routing import routed

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.known_models import known_model_config
from roofline.hardware import Hardware, load_hardware
from roofline.timing.attention import attention_work, attention_work_s
from roofline.timing.efficiency import Efficiency
from roofline.timing.kernels import allreduce_s, elementwise_s, gemm_s, kv_write_s, moe_s, sampler_s

_CHIPS: Final = {
    "a100-sxm4-80gb": "a100-80gb-sxm",
    "a100-sxm4-40gb": "a100-40gb-sxm",
    "a100-pcie-80gb": "a100-80gb-pcie",
    "a100-sxm": "a100-80gb-sxm",
    "h100-sxm5-80gb": "h100-sxm",
    "h200-sxm": "h200",
    "h200-sxm5-141gb": "h200",
    "b200-sxm": "b200",
}
# gemm_dtype of the table: bits of a stored weight, and the dtype of the product.
_GEMM_DTYPES: Final = {
    "bfloat16": (16.0, "bfloat16"),
    "float16": (16.0, "float16"),
    "fp8": (8.0, "float8_e4m3fn"),
    "fp8_block": (8.0, "float8_e4m3fn"),
    "int8": (8.0, "int8"),
    "int8_wo": (8.0, "bfloat16"),
    "int4_wo": (4.25, "bfloat16"),
}


def chip_of(folder: Path, name: str | None = None) -> Hardware:
    """The chip that a folder is named after, or the one that is asked for."""
    key = (name or folder.resolve().name).lower().replace("_", "-")
    try:
        return load_hardware(_CHIPS.get(key, key))
    except InputError as unknown:
        if name:
            raise
        remedy = f"Give the chip with --chip. {unknown}"
        raise InputError("folder", str(folder), "isn't named after a chip that is known", remedy) from None


def read_folder(folder: Path, crowded: bool = False) -> tuple[list[Table], list[Skipped]]:
    """Every table of a folder, and the rows that can't be used; crowded: how moe.csv's routing was made."""
    if not folder.is_dir():
        raise InputError("folder", str(folder), "isn't a folder", "Give one that holds kernel times as CSV")
    tables: list[Table] = []
    skipped: list[Skipped] = []
    for path in sorted(folder.glob("*.csv")):
        form, prefix = _form_of(path)
        rows = read_rows(path, form, skipped)
        if rows.lines:
            tables += form.build(Source(path.name, rows, prefix, crowded), skipped)
    if not tables and not skipped:
        known = ", ".join((*_FORMS, *(f"MODEL_{name}" for name in _MODEL_FORMS)))
        raise InputError("folder", str(folder), "has no kernel times", f"Known files: {known}")
    return tables, skipped


def _form_of(path: Path) -> tuple[Form, str]:
    if path.name in _FORMS:
        return _FORMS[path.name], ""
    for suffix, form in _MODEL_FORMS.items():
        if path.name.endswith(f"_{suffix}"):
            return form, path.name.removesuffix(f"_{suffix}")
    known = ", ".join((*_FORMS, *(f"MODEL_{name}" for name in _MODEL_FORMS)))
    raise InputError(str(path), None, "is not a form of kernel times that is known", f"Known: {known}")


def _gemm(source: Source, skipped: list[Skipped]) -> list[Table]:
    tables = []
    for dtype in sorted(set(source.rows.columns["gemm_dtype"])):
        rows = source.rows.where(source.rows.columns["gemm_dtype"] == dtype)
        if dtype not in _GEMM_DTYPES:
            reason = f"gemm_dtype = {str(dtype)!r} is not known here"
            skipped += [Skipped(source.file, line, reason) for line in rows.lines]
            continue
        bits, product = _GEMM_DTYPES[dtype]
        group = "gemm" if product.endswith("16") else "float8_gemm"
        tables.append(source.table(f"gemm {dtype}", group, _run_gemm(bits, product), rows, "m", ("n", "k")))
    return tables


def _run_gemm(bits: float, dtype: str) -> Run:
    def run(columns: Columns, chip: Hardware, eff: Efficiency, cache: dict[str, Any]) -> Any:
        sizes = (columns["m"], columns["n"], columns["k"])
        return gemm_s(*sizes, chip=chip, eff=eff, weight_bits=bits, dtype=dtype, resident=True)

    return run


def _context(source: Source, skipped: list[Skipped]) -> list[Table]:
    columns = source.rows.columns
    batch, new = columns["batch_size"], columns["query_len"]
    single = new == 1  # one new token each is what a decode is
    columns |= {"prefills": batch * ~single, "seen": new, "decodes": batch * single, "context": new}
    shape = ("num_heads", "num_key_value_heads")
    return _uneven(
        source, skipped, source.table("attention context", "attention", _attention, source.rows, "query_len", shape)
    )


def _generation(source: Source, skipped: list[Skipped]) -> list[Table]:
    columns = source.rows.columns
    none = 0 * columns["kv_len"]
    columns |= {"prefills": none, "query_len": none, "seen": none}
    columns |= {"decodes": columns["batch_size"], "context": columns["kv_len"]}
    shape = ("num_heads", "num_key_value_heads")
    return _uneven(
        source, skipped, source.table("attention generation", "attention", _attention, source.rows, "kv_len", shape)
    )


def _uneven(source: Source, skipped: list[Skipped], table: Table) -> list[Table]:
    """The table without rows whose query heads can't share KV heads evenly."""
    even = table.columns["num_heads"] % table.columns["num_key_value_heads"] == 0
    lines = np.array(table.lines)[~even]
    skipped += [Skipped(source.file, int(line), "num_heads isn't a multiple of num_key_value_heads") for line in lines]
    return [table.take(even)] if even.any() else []


def _attention(columns: Columns, chip: Hardware, eff: Efficiency, cache: dict[str, Any]) -> Any:
    group = eff.attention
    if "work" not in cache:  # thread blocks and bytes don't depend on what is fitted
        names = ("prefills", "query_len", "seen", "decodes", "context", "num_heads", "num_key_value_heads", "head_dim")
        cache["work"] = attention_work(*(columns[name] for name in names), chip=chip, eff=group)
    work = cache["work"]
    seconds = attention_work_s(work, chip=chip, eff=group, resident=True)
    if group.includes_cache_write:
        seconds = seconds + kv_write_s(work.tokens, work.kv_heads, work.head_dim, chip=chip, eff=eff)
    return seconds


def _moe(source: Source, skipped: list[Skipped]) -> list[Table]:
    columns, keep = source.rows.columns, np.ones(len(source.rows.lines), bool)
    names = ("num_tokens", "topk", "num_experts", "moe_ep_size")
    found = []
    for index, line in enumerate(source.rows.lines):
        tokens, per_token, experts, ranks = (int(columns[name][index]) for name in names)
        try:
            found.append(routed(tokens, per_token, experts, ranks, str(columns["distribution"][index])))
        except InputError as unknown:
            keep[index] = False
            found.append((0.0, 0.0))
            skipped.append(Skipped(source.file, line, str(unknown)))
    columns["rows"], columns["distinct"] = (np.array(values) for values in zip(*found, strict=True))
    columns["local"] = np.maximum(1, columns["num_experts"] // columns["moe_ep_size"])
    if source.crowded:
        columns["distinct"] = np.maximum(columns["distinct"], np.minimum(columns["local"], columns["topk"]))
        columns["rows"] = np.maximum(columns["rows"], columns["distinct"])
    rows = source.rows.where(keep)
    shape = ("hidden_size", "inter_size", "num_experts", "moe_tp_size", "moe_ep_size")
    tables = []
    for name in sorted(set(rows.columns["distribution"])):
        chosen = rows.where(rows.columns["distribution"] == name)
        tables.append(source.table(f"moe {name}", "moe", _run_moe, chosen, "num_tokens", shape))
    return tables


def _run_moe(columns: Columns, chip: Hardware, eff: Efficiency, cache: dict[str, Any]) -> Any:
    width = columns["inter_size"] / columns["moe_tp_size"]
    sizes = (columns["num_tokens"], columns["hidden_size"], width, columns["topk"], columns["local"])
    return moe_s(*sizes, columns["distinct"], rows=columns["rows"], chip=chip, eff=eff, resident=True)


def _allreduce(source: Source, skipped: list[Skipped]) -> list[Table]:
    columns = source.rows.columns
    tables = []
    for kernel, devices in sorted(set(zip(columns["kernel_source"], columns["num_gpus"], strict=True))):
        rows = source.rows.where((columns["kernel_source"] == kernel) & (columns["num_gpus"] == devices))
        run = _run_allreduce(int(devices), eager=str(kernel).endswith("eager"))
        label = f"allreduce {kernel} {int(devices)}"
        tables.append(source.table(label, "allreduce", run, rows, "message_size", ("num_gpus",)))
    return tables


def _run_allreduce(devices: int, eager: bool) -> Run:
    def run(columns: Columns, chip: Hardware, eff: Efficiency, cache: dict[str, Any]) -> Any:
        # message_size counts elements of 16 bits: in bytes, the largest would reach half of what the link is known to.
        return allreduce_s(columns["message_size"] * 2, devices, chip=chip, eff=eff, eager=eager)

    return run


def _config(source: Source) -> ModelConfig:
    try:
        return ModelConfig.from_hf(known_model_config(source.model))
    except InputError as unknown:
        problem = f"{source.model} isn't a model whose sizes are known"
        raise InputError(source.file, None, problem, f"Name the file after one. {unknown}") from None


def _dense(source: Source, skipped: list[Skipped]) -> list[Table]:
    config, columns = _config(source), source.rows.columns
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, width = config.hidden_size, config.intermediate_size
    products = {
        "qkv_proj": ((heads + 2 * kv_heads) * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
        "gate_up_proj": (2 * width, hidden),
        "down_proj": (hidden, width),
    }
    # Bytes a token: the layer norm adds the residual, so it reads and writes two rows.
    moved = {
        "layernorm": ("norm", 8 * hidden),
        "final_layernorm": ("final_norm", 8 * hidden),
        "act_fn": ("act", 6 * width),
        "rotary_emb": ("rope", 4 * (heads + kv_heads) * head_dim),
        "embedding": ("gather", 4 * hidden),
    }
    tables = []
    for layer in sorted(set(columns["layer"])):
        rows = source.rows.where(columns["layer"] == layer)
        if layer in products:
            n, k = products[layer]
            rows.columns |= {"m": rows.columns["tokens"], "n": 0.0 * rows.seconds + n, "k": 0.0 * rows.seconds + k}
            tables.append(source.table(layer, "gemm", _run_gemm(16.0, "bfloat16"), rows, "tokens", ("n", "k")))
        elif layer in moved:
            tables.append(source.table(layer, "elementwise", _run_elementwise(*moved[layer]), rows, "tokens"))
        else:
            skipped += [Skipped(source.file, line, f"layer = {str(layer)!r} is not known here") for line in rows.lines]
    return tables


def _run_elementwise(kind: str, token_bytes: int) -> Run:
    def run(columns: Columns, chip: Hardware, eff: Efficiency, cache: dict[str, Any]) -> Any:
        tokens = columns["tokens"]
        blocks = tokens if kind == "rope" else None
        return elementwise_s(tokens * token_bytes, chip=chip, eff=eff, kind=kind, blocks=blocks)

    return run


def _mixed(source: Source, skipped: list[Skipped]) -> list[Table]:
    config, columns = _config(source), source.rows.columns
    chunk, decodes, kept = columns["prefill_chunk"], columns["n_decode"], columns["kv_decode"]
    columns |= {"prefills": (chunk > 0) * 1.0, "query_len": chunk, "seen": chunk + columns["kv_prefill"]}
    columns |= {"decodes": decodes, "context": (kept + 1) * (decodes > 0)}  # the new token comes on top
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    for name, heads in zip(_HEADS, sizes, strict=True):
        columns[name] = 0.0 * chunk + heads
    kinds = {
        "attention decode": (chunk == 0) & (decodes > 0),
        "attention prefill": (chunk > 0) & (decodes == 0),
        "attention mixed": (chunk > 0) & (decodes > 0),
    }
    empty = np.array(source.rows.lines)[(chunk == 0) & (decodes == 0)]
    skipped += [Skipped(source.file, int(line), "has neither a prompt nor a decode") for line in empty]
    tables = []
    for kind, mask in kinds.items():
        if mask.any():
            size = "prefill_chunk" if "prefill" in kind else "n_decode"
            tables.append(source.table(kind, "attention", _attention, source.rows.where(mask), size))
    return tables


def _per_sequence(source: Source, skipped: list[Skipped]) -> list[Table]:
    config, columns = _config(source), source.rows.columns
    tables = []
    for layer in sorted(set(columns["layer"])):
        rows = source.rows.where(columns["layer"] == layer)
        ones = 0.0 * rows.seconds + 1
        if layer == "lm_head":
            rows.columns |= {
                "m": rows.columns["sequences"],
                "n": ones * config.vocab_size,
                "k": ones * config.hidden_size,
            }
            tables.append(source.table(layer, "gemm", _run_gemm(16.0, "bfloat16"), rows, "sequences", ("n", "k")))
        elif layer == "sampler":
            tables.append(source.table(layer, "elementwise", _run_sampler(config.vocab_size), rows, "sequences"))
        else:
            skipped += [Skipped(source.file, line, f"layer = {str(layer)!r} is not known here") for line in rows.lines]
    return tables


def _run_sampler(vocabulary: int) -> Run:
    def run(columns: Columns, chip: Hardware, eff: Efficiency, cache: dict[str, Any]) -> Any:
        return sampler_s(columns["sequences"], vocabulary, chip=chip, eff=eff)

    return run


def _by_distinct(source: Source, skipped: list[Skipped]) -> list[Table]:
    config, columns = _config(source), source.rows.columns
    choices = columns["tokens"] * config.num_experts_per_tok
    possible = (columns["activated_experts"] <= np.minimum(choices, config.num_experts)) & (
        columns["activated_experts"] >= config.num_experts_per_tok
    )
    reason = "activated_experts is more than the tokens choose, or less than one token chooses"
    skipped += [Skipped(source.file, int(line), reason) for line in np.array(source.rows.lines)[~possible]]
    rows = source.rows.where(possible)
    sizes = (config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok, config.num_experts)

    def run(columns: Columns, chip: Hardware, eff: Efficiency, cache: dict[str, Any]) -> Any:
        distinct = columns["activated_experts"]
        return moe_s(columns["tokens"], *sizes, distinct, chip=chip, eff=eff, resident=True)

    table = source.table("moe by distinct experts", "moe", run, rows, "tokens", ("activated_experts",))
    return [table] if rows.lines else []


_HEADS: Final = ("num_heads", "num_key_value_heads", "head_dim")
_MOE_SIZES: Final = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
_MIXED: Final = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_FORMS: Final = {
    "gemm.csv": Form(("m", "n", "k"), ("gemm_dtype",), "latency_us", _gemm),
    "attention_context.csv": Form(("batch_size", "query_len", *_HEADS), (), "latency_us", _context),
    "attention_generation.csv": Form(("batch_size", "kv_len", *_HEADS), (), "latency_us", _generation),
    "moe.csv": Form(_MOE_SIZES, ("distribution",), "latency_us", _moe),
    "allreduce.csv": Form(("num_gpus", "message_size"), ("kernel_source",), "latency_us", _allreduce),
}
_MODEL_FORMS: Final = {
    "dense.csv": Form(("tokens",), ("layer",), "time_us", _dense),
    "per_sequence.csv": Form(("sequences",), ("layer",), "time_us", _per_sequence),
    "attention.csv": Form(_MIXED, (), "time_us", _mixed, least=0),
    "moe_by_distinct_experts.csv": Form(("tokens", "activated_experts"), (), "time_us", _by_distinct),
}
