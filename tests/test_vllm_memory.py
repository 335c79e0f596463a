"""vLLM's memory rules: versions, runners, defaults, the terms of published logs, and their KV tokens within 3 %."""

from __future__ import annotations

import csv
import re
import statistics
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import roofline
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh
from roofline.count import count_kv_bytes_per_token
from roofline.hardware import load_hardware
from roofline.memory import kv_tokens
from roofline.vllm_memory import (
    LATEST,
    EngineMemory,
    EngineSettings,
    engine_memory,
    parse_engine,
    parse_version,
    usage_of,
)
from roofline.weight_schemes import scheme_of

GIB = 2**30
QWEN25_7B, QWEN3_8B, MOE = (ModelConfig.from_hf(name) for name in ("Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B"))
CARD, LARGE = load_hardware("rtx-4090"), load_hardware("h100-sxm")


def account(config: ModelConfig = QWEN25_7B, version: str = "0.9.2", **options: Any) -> EngineMemory:
    known = {name: options.pop(name) for name in ("weights", "mesh", "max_model_len") if name in options}
    chip = options.pop("hardware", CARD)
    asked = EngineSettings(version=parse_version(version) or LATEST, **options)
    return engine_memory(config, chip, asked, **{"max_model_len": 8192, **known})


@pytest.mark.parametrize(
    ("version", "config", "quantised", "runner"),
    [
        ("0.5.1", QWEN25_7B, False, "V0"),
        ("0.7.3", QWEN3_8B, False, "V0"),
        ("0.8.0", QWEN25_7B, False, "V1"),
        ("0.21.0", QWEN3_8B, False, "V1"),
        ("0.22.0", QWEN3_8B, False, "V2"),
        ("0.22.0", QWEN25_7B, False, "V1"),
        ("0.23.0", QWEN3_8B, True, "V1"),
        ("0.26.0", QWEN25_7B, False, "V2"),
        ("0.26.0", QWEN3_8B, True, "V2"),
        ("0.26.0", MOE, False, "V1"),
        ("0.26.0", ModelConfig.from_hf("Qwen2-57B-A14B"), False, "V2"),
        ("0.31.0", QWEN25_7B, False, "V2"),
    ],
)
def test_which_runner_a_version_takes(version: str, config: ModelConfig, quantised: bool, runner: str) -> None:
    taken = account(config, version, weights=scheme_of("fp8") if quantised else None)
    assert taken.runner == runner
    assert taken.gpu_memory_utilization == (0.92 if parse_version(version) >= (0, 21) else 0.9)  # type: ignore[operator]


def test_defaults_of_a_step_and_of_sequences() -> None:
    """By device and by how the engine starts: EngineArgs.get_batch_defaults."""

    def defaults(**options: Any) -> tuple[int, int]:
        taken = account(**options)
        return taken.max_num_batched_tokens, taken.max_num_seqs

    assert defaults() == (2048, 256)
    assert defaults(usage="offline") == (8192, 256)
    assert defaults(hardware=LARGE) == (8192, 1024)
    assert defaults(hardware=LARGE, usage="offline") == (16384, 1024)
    assert defaults(hardware=load_hardware("a100-80gb-sxm")) == (2048, 256)
    assert defaults(max_num_batched_tokens=100, max_num_seqs=3) == (100, 3)
    # The V0 engine took whole prompts, and chunks only above 32,768 tokens.
    assert defaults(version="0.5.0", max_model_len=8192) == (8192, 256)
    assert defaults(version="0.5.0", max_model_len=100, hardware=LARGE) == (2048, 256)
    assert defaults(version="0.5.0", max_model_len=40960) == (512, 256)
    assert defaults(version="0.7.0", max_model_len=40960) == (2048, 256)


def test_when_graphs_come_out_of_the_budget() -> None:
    def graphs(config: ModelConfig, version: str) -> tuple[bool, int]:
        term = account(config, version).term("CUDA graphs")
        return term.in_budget, term.num_bytes

    assert graphs(QWEN25_7B, "0.9.2") == (False, 0)
    assert graphs(MOE, "0.20.0") == (False, 0)
    assert graphs(MOE, "0.26.0") == (True, GIB)
    assert graphs(QWEN25_7B, "0.26.0") == (False, 0)  # the V2 runner doesn't estimate them
    assert all(term.name != "CUDA graphs" for term in account(MOE, "0.26.0", enforce_eager=True).terms)


def test_buffers_count_since_0_27() -> None:
    early, late = (account(version=version).term("buffers") for version in ("0.26.0", "0.27.0"))
    assert early.num_bytes == late.num_bytes == 256 * (152064 * 4 + 4752 * 4 + 8192 * 4)
    assert (early.in_budget, late.in_budget) == (False, True)
    assert all(term.name != "buffers" for term in account().terms)


def test_the_sampler_s_logits_can_be_the_peak() -> None:
    """39 bytes of each of 256 x 152,064 logits: the 1.42 GiB that logs of Qwen2.5-7B say from 0.6 to 0.20."""
    taken = account().term("activations")
    assert taken.num_bytes == 39 * 256 * 152064
    assert round(taken.num_bytes / GIB, 2) == 1.41
    assert account(max_num_seqs=1).term("activations").num_bytes == 2048 * (3 * 18944 + 3 * 3584) * 2
    assert account(version="0.26.0").term("activations").num_bytes == 2048 * (3 * 18944 + 3 * 3584) * 2
    assert account(MOE, "0.26.0").term("activations").num_bytes == 18 * 256 * 151936


def test_published_peaks() -> None:
    """Peak activations as logs print them, GiB: Qwen3-235B-FP8 over four devices with 32 and with 256 sequences."""
    big, mesh = ModelConfig.from_hf("Qwen3-235B-A22B"), Mesh(4)
    chip = load_hardware("rtx-pro-6000-server")
    few = account(big, "0.28.0", mesh=mesh, max_num_seqs=32, hardware=chip).term("activations")
    assert few.num_bytes / GIB == pytest.approx(0.76, rel=0.05)
    many = account(big, "0.10.2", mesh=mesh, hardware=load_hardware("l40s")).term("activations")
    assert many.num_bytes / GIB == pytest.approx(1.4, rel=0.02)


def test_memory_outside_pytorch_by_links() -> None:
    single, pcie, nvlink = (
        account(mesh=Mesh(tp), hardware=chip).term("non-torch").num_bytes
        for tp, chip in ((1, LARGE), (2, CARD), (2, LARGE))
    )
    assert single < pcie < nvlink


def test_constants_lie_within_their_bounds_and_have_sources() -> None:
    path = Path(roofline.__file__).parent / "data" / "vllm_memory.toml"
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    assert {"rules", "batching", "constants"} == set(data)
    for name, constant in data["constants"].items():
        assert constant["bounds"][0] <= constant["value"] <= constant["bounds"][1], name
        assert constant["kind"] in ("exact", "fitted")
        assert constant["unit"]
        assert len(constant["source"]) > 20
    since = [parse_version(rules["since"]) or () for rules in data["rules"]]
    assert since == sorted(since)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["0.5.0", "0.9.2", "0.23.0", "0.26.0", "0.27.1"]), st.integers(1, 20_000), st.integers(1, 2000))
def test_more_tokens_or_sequences_never_take_less(version: str, tokens: int, seqs: int) -> None:
    taken = account(version=version, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    more = account(version=version, max_num_batched_tokens=tokens + 7, max_num_seqs=seqs + 3)
    assert more.taken_bytes >= taken.taken_bytes
    assert taken.term("weights").num_bytes == 15231233024
    assert account(version=version, mesh=Mesh(2)).term("weights").num_bytes < 15231233024


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.26.0", (0, 26, 0)), ("v0.8.5.post1", (0, 8, 5)), ("0.8.x V0", (0, 8, 0)), ("0.19.2.dev0", (0, 19, 2)),
        ("0.18.0 (script image)", (0, 18, 0)), ("V1 (2025-11)", None), ("not stated", None), ("", None),
    ],
)  # fmt: skip
def test_versions(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


def test_engines_and_ways_to_start() -> None:
    assert parse_engine("vLLM == 0.26.0") == (0, 26, 0)
    assert parse_engine("vllm") == LATEST
    assert usage_of("offline") == "offline"
    with pytest.raises(InputError) as caught:
        usage_of("batch")
    assert str(caught.value) == "usage = 'batch': is not a way to start an engine. Use server or offline."


# Published logs.

CHIPS = {
    "NVIDIA RTX 5070 Ti 16GB": "rtx-5070-ti",
    "NVIDIA RTX PRO 6000 Blackwell Server (95.01 GiB)": "rtx-pro-6000-server",
    "NVIDIA A100-40GB": "a100-40gb-sxm",
    "80 GB card (model not stated)": "a100-80gb-sxm",
    "NVIDIA A100-80GB": "a100-80gb-sxm",
    "NVIDIA L40S (44.42 GiB)": "l40s",
    "NVIDIA RTX 4090": "rtx-4090",
    "NVIDIA H100 80GB": "h100-sxm",
}
SAME_RUN = ("model", "framework_version", "gpu", "n_gpus", "tp")


@dataclass(frozen=True)
class Row:
    """A published KV pool with our account of it."""

    id: str
    measured: int
    predicted: int
    taken: EngineMemory

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        terms = ", ".join(f"{term.name} {term.num_bytes / GIB:.2f}" for term in self.taken.terms if term.in_budget)
        return f"{self.id}: {self.predicted:,} of {self.measured:,} ({self.error:+.1%}); {terms} GiB"


def published_rows(path: Path) -> list[Row]:
    """Rows of vLLM's kv_tokens whose model, GPU and parallelism are stated; the note of a run's rows is one."""
    with path.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    rows = []
    for row in table:
        base = re.sub(r" \(.*|-(FP8|AWQ)$", "", row["model"].split(" (")[0])
        if (row["metric"], row["framework"]) != ("kv_tokens", "vLLM") or row["gpu"] not in CHIPS:
            continue
        if row["n_gpus"] != row["tp"]:  # a pipeline's stages aren't planned here
            continue
        same = [other for other in table if all(other[key] == row[key] for key in SAME_RUN)]
        notes = " ".join(" ".join(map(str, other.values())) for other in same)  # some sources have commas unquoted
        rows.append(_row(row, base, notes))
    return rows


def _row(row: dict[str, str], base: str, notes: str) -> Row:
    config = ModelConfig.from_hf(base.split("/")[-1])
    chip, mesh = load_hardware(CHIPS[row["gpu"]]), Mesh(int(row["tp"]))

    def said(pattern: str) -> int | None:
        match = re.search(pattern, notes)
        return int(match[1]) if match else None

    utilization = re.search(r"gmu (\d\.\d+)", notes)
    asked = EngineSettings(
        version=parse_version(row["framework_version"]) or (0, 15, 0),
        gpu_memory_utilization=float(utilization[1]) if utilization else None,
        max_num_batched_tokens=said(r"max_num_batched_tokens (\d+)"),
        max_num_seqs=said(r"max-num-seqs (\d+)"),
        runner="V0" if row["framework_version"].endswith("V0") else None,
    )
    weights = None if row["dtype_or_quant"] == "BF16" else scheme_of(row["dtype_or_quant"])
    length = said(r"max-model-len (\d+)") or config.context_length
    taken = engine_memory(config, chip, asked, max_model_len=length, weights=weights, mesh=mesh)
    pool = chip.usable_memory_bytes * taken.gpu_memory_utilization - taken.taken_bytes
    return Row(row["id"], int(row["value"]), kv_tokens(pool, count_kv_bytes_per_token(config, mesh=mesh)), taken)


def test_kv_tokens_of_published_logs(shared: Path) -> None:
    rows = published_rows(shared / "measurements" / "published.csv")
    shown = "\n".join(map(str, rows))
    print(shown)
    assert len(rows) >= 8
    assert statistics.median(abs(row.error) for row in rows) < 0.03, shown
    # But for one row, where the tokens are of a rank whose memory isn't stated, all are within 6 %.
    assert {row.id for row in rows if abs(row.error) > 0.06} <= {"m4070"}, shown


def test_the_seed_s_log_by_the_rules_of_its_version() -> None:
    """4.64 GiB and 86,896 tokens of Qwen2.5-7B on a 4090, in steps of 8192 tokens, as its activations say."""
    taken = account(version="0.26.0", gpu_memory_utilization=0.9, max_num_batched_tokens=8192)
    sizes = {term.name: round(term.num_bytes / GIB, 2) for term in taken.terms if term.in_budget}
    assert sizes == {"weights": 14.19, "activations": 1.03, "non-torch": 1.3}
    pool = CARD.usable_memory_bytes * 0.9 - taken.taken_bytes
    assert pool / GIB == pytest.approx(4.64, abs=0.02)
    assert kv_tokens(pool, 57344) == pytest.approx(86_896, rel=0.005)
