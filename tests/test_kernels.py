"""Rows of kernels: hand-made programs, programs recorded from the compiler, and real models compiled here."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tiny

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from roofline import gpu_compile
from roofline.gpu_compile import Compiled, CompileJob, compile_step, compile_steps
from roofline.hardware import load_hardware
from roofline.hlo import parse_hlo
from roofline.kernel_rows import Kernel, count_conditions, count_inventory, group_size, read_kernels, scope_op
from roofline.kernels import KernelReport, compile_jobs, kernel_report, kernels_waterfall
from roofline.own_kernels import padded_share
from roofline.report.kernels import kernels_record

DATA = Path(__file__).parent / "data"
ONE = ModelConfig.from_hf("Qwen2.5-7B").with_layers(1)
EIGHT = ModelConfig.from_hf("Qwen3-8B").with_layers(1)  # KV heads
LAYER = "jit(decode_step_impl)/jit(_run_block)"


def job(mesh: str = "1x1x1", chip: str = "rtx-4090") -> CompileJob:
    return CompileJob(ONE if mesh == "1x1x1" else EIGHT, Step.decode(1, 16), load_hardware(chip), mesh)


def rows(text: str, mesh: str = "1x1x1", chip: str = "rtx-4090") -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in read_kernels(parse_hlo(text), job(mesh, chip))}


LOOP = """HloModule loop

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %row = f32[1,4]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,4}
  %work = pred[] copy(%flag)
  %flag = pred[] constant(true)
  %done = f32[1,4]{1,0} conditional(%work, %row, %row), true_computation=%busy, false_computation=%idle
  %y = f32[8,4]{1,0} dynamic-update-slice(%x, %done, %i, %i)
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %y)
}

%busy (p: f32[1,4]) -> f32[1,4] {
  %p.1 = f32[1,4]{1,0} parameter(0)
  %a = f32[1,4]{1,0} negate(%p.1)
  ROOT %b = f32[1,4]{1,0} exponential(%a)
}

%idle (p: f32[1,4]) -> f32[1,4] {
  %p.2 = f32[1,4]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %c = f32[1,4]{1,0} broadcast(%zero), dimensions={}
}

%more (p: (s32[], f32[8,4])) -> pred[] {
  %p.3 = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %arg = f32[8,4]{1,0} parameter(0)
  %start = s32[] constant(0)
  %t.0 = (s32[], f32[8,4]{1,0}) tuple(%start, %arg)
  %while = (s32[], f32[8,4]{1,0}) while(%t.0), condition=%more, body=%body, backend_config=TURNS
  ROOT %out = f32[8,4]{1,0} get-tuple-element(%while), index=1
}
""".replace("TURNS", '{"known_trip_count":{"n":"8"}}')


def test_a_loop_counts_its_body_as_often_as_it_turns_and_the_branch_that_works() -> None:
    found = rows(LOOP)
    assert {name: (kernel.count, kernel.at_most) for name, kernel in found.items()} == {
        "row": (8, False),
        "work": (8, False),
        "a": (8, True),
        "b": (8, True),
        "y": (8, False),
    }
    assert (found["row"].read_bytes, found["row"].write_bytes) == (16 + 4, 16)
    assert (found["y"].read_bytes, found["y"].write_bytes) == (16 + 4, 16)
    assert count_conditions(parse_hlo(LOOP)) == 8


COLLECTIVES = """HloModule collectives

%adds (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: bf16[1024]) -> bf16[1024] {{
  %x = bf16[1024]{{0}} parameter(0)
  %reduce = bf16[1024]{{0}} all-reduce-start(%x), replica_groups={0}, to_apply=%adds, metadata={{op_name="o_proj/dot"}}
  %reduced = bf16[1024]{{0}} all-reduce-done(%reduce)
  %gather = (bf16[1024]{{0}}, bf16[8192]{{0}}) all-gather-start(%reduced), replica_groups={0}, dimensions={{0}}
  %gathered = bf16[8192]{{0}} all-gather-done(%gather)
  %scatter = bf16[1024]{{0}} reduce-scatter(%gathered), replica_groups={0}, dimensions={{0}}, to_apply=%adds
  ROOT %pass = bf16[1024]{{0}} collective-permute(%scatter), source_target_pairs={{{{0,1}},{{1,0}}}}
}}
"""


@pytest.mark.parametrize("groups", ["{{0,1,2,3,4,5,6,7}}", "[1,8]<=[8]", "mesh['axis_0'=8,'axis_1'=1] {'axis_0'}"])
def test_collectives_have_kind_bytes_group_and_a_ring_s_time(groups: str) -> None:
    found = rows(COLLECTIVES.format(groups), "1x1x8", "h100-sxm")
    assert list(found) == ["reduce", "gather", "scatter", "pass"]  # what ends one is no kernel
    told = {name: kernel.collective for name, kernel in found.items()}
    assert {name: c and (c.kind, c.payload_bytes, c.result_bytes, c.group_size) for name, c in told.items()} == {
        "reduce": ("all-reduce", 2048, 2048, 8),
        "gather": ("all-gather", 16384, 16384, 8),
        "scatter": ("reduce-scatter", 16384, 2048, 8),
        "pass": ("collective-permute", 2048, 2048, 2),
    }
    assert {name: c and c.sent_bytes for name, c in told.items()} == {
        "reduce": 2 * 7 / 8 * 2048,
        "gather": 7 / 8 * 16384,
        "scatter": 7 / 8 * 16384,
        "pass": 2048,
    }
    assert told["pass"]
    assert told["pass"].groups == "{{0,1},{1,0}}"
    assert found["gather"].write_bytes == 16384
    assert found["reduce"].time_s == pytest.approx(2 * 7 / 8 * 2048 / 450e9)
    assert {kernel.bound for kernel in found.values()} == {"communication"}
    assert found["reduce"].op == "o_proj"


def test_a_group_across_hosts_has_no_time() -> None:
    found = rows(COLLECTIVES.format("[1,8]<=[8]"), "1x2x4", "h100-sxm")
    assert {name: kernel.time_s is None for name, kernel in found.items()} == {
        "reduce": True,
        "gather": True,
        "scatter": True,
        "pass": False,
    }


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1},{2,3}}", 2),
        ("[2,8]<=[16]", 8),
        ("[4,4]<=[4,4]T(1,0)", 4),
        ("mesh['a'=2,'b'=8] {'b'}", 8),
        ("mesh['a'=2,'b'=8] {'a','b'}", 16),
        ("", 16),
        ("{}", 16),
    ],
)
def test_sizes_of_groups_in_each_notation(groups: str, size: int) -> None:
    assert group_size(groups, 16) == size


@pytest.mark.parametrize(
    ("path", "op"),
    [
        (f"{LAYER}/qkv_proj/dot_general", "qkv_proj"),
        (f"{LAYER}/top_k/jit(argsort)/sort", "top_k"),
        (f"{LAYER}/cache/scatter", "cache"),
        (f"{LAYER}/while/body/experts_gate_up_proj/experts_swiglu/mul", "experts_swiglu"),
        (f"{LAYER}/slice", None),
        ("params['layers'][0]['o_proj']", None),
    ],
)
def test_the_innermost_scope_names_the_op(path: str, op: str | None) -> None:
    assert scope_op(path) == op


NAMES = """HloModule names

%plain (p.0: f32[4], p.1: f32[4,4]) -> f32[4] {
  %p.0 = f32[4]{0} parameter(0)
  %p.1 = f32[4,4]{1,0} parameter(1)
  %a = f32[4]{0} negate(%p.0)INNER
  ROOT %dot = f32[4]{0} dot(%p.1, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}PRODUCT
}

ENTRY %main (x: f32[4], w: f32[4,4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %w = f32[4,4]{1,0} parameter(1), metadata={op_name="params['layers'][3]['down_proj']"}
  %view = f32[4,4]{1,0} bitcast(%w)
  ROOT %k = f32[4]{0} fusion(%x, %view), kind=kLoop, calls=%plainOWN
}
"""


def named(op: str) -> str:
    return f', metadata={{op_name="{LAYER}/{op}/x"}}' if op else ""


@pytest.mark.parametrize(
    ("product", "own", "inner", "op", "ops"),
    [
        ("o_proj", "mlp_residual", "swiglu", "o_proj", ("swiglu", "o_proj")),
        ("", "mlp_residual", "swiglu", "mlp_residual", ("swiglu", "mlp_residual")),
        ("", "", "swiglu", "swiglu", ("swiglu",)),
        ("", "", "", "down_proj", ("down_proj",)),  # by the weight that it reads
    ],
)
def test_a_kernel_s_op_by_its_product_its_own_name_its_parts_or_its_weight(
    product: str, own: str, inner: str, op: str, ops: tuple[str, ...]
) -> None:
    text = NAMES.replace("PRODUCT", named(product)).replace("OWN", named(own)).replace("INNER", named(inner))
    kernel = rows(text)["k"]
    assert (kernel.op, kernel.ops, kernel.in_layer) == (op, ops, True)
    assert (kernel.flops, kernel.kind, kernel.bound, kernel.source) == (32, "loop fusion", "memory", "compiler")


def test_a_library_call_that_hides_its_work_has_the_inventory_s() -> None:
    text = """HloModule call

ENTRY %main (q: bf16[1,1,28,128], k: bf16[1,16,4,128]) -> bf16[1,1,28,128] {
  %q = bf16[1,1,28,128]{3,2,1,0} parameter(0)
  %k = bf16[1,16,4,128]{3,2,1,0} parameter(1)
  ROOT %attend = (bf16[1,1,28,128]{3,2,1,0}, u8[4096]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmha"TAIL
}
""".replace("TAIL", named("scores"))
    kernel = rows(text)["attend"]
    assert (kernel.source, kernel.kind, kernel.op) == ("inventory", "call __cudnn$fmha", "scores")
    assert kernel.flops == 2 * (2 * 28 * 128 * 16)
    assert kernel.read_bytes == 2 * (2 * 16 * 4 * 128) + 2 * 28 * 128
    assert kernel.write_bytes == 2 * 28 * 128


# Programs that the compiler made for an RTX 4090 (jax 0.10.2), kept as text.


def recorded(name: str, config: ModelConfig, step: Step) -> KernelReport:
    text = (DATA / f"{name}.hlo").read_text(encoding="utf-8")
    compiled = Compiled(text, 1.0, 1000, 200, 50, 100, "0.10.2", None)
    return kernel_report(CompileJob(config, step, load_hardware("rtx-4090")), compiled, 1e-6)


def test_a_recorded_decode_step_computes_what_the_inventory_says() -> None:
    report = recorded("tiny_decode", tiny.config(num_hidden_layers=1), Step.decode(2, 64))
    totals = report.totals
    assert totals.flops == totals.dense_flops == 218144
    assert (totals.num_kernels, totals.kernels_per_layer) == (23, 18)
    products = {kernel.op: kernel.flops for kernel in report.kernels if kernel.flops}
    assert list(products) == ["qkv_proj", "scores", "values", "o_proj", "gate_up_proj", "down_proj", "unembed"]
    assert products["down_proj"] == 2 * 2 * 40 * 56
    writes = [kernel for kernel in report.kernels if kernel.op == "cache" and kernel.in_layer]
    assert [kernel.write_bytes for kernel in writes] == [2 * 3 * 16 * 2] * 2  # two rows, three heads, in place
    assert totals.byte_ratio > 1
    assert totals.peak_bytes == 1000 + 200 - 100 + 50
    assert totals.fits


def test_a_recorded_loop_over_experts_is_counted_as_if_every_block_worked() -> None:
    config = tiny.moe_config(num_hidden_layers=1)
    report = recorded("tiny_moe_prefill", config, Step.prefill(2, 32))
    totals = report.totals
    blocks = 2 * 32 * 5 // 16 + 21  # of 16 rows each
    assert totals.conditional_runs == blocks
    products = {kernel.op: kernel for kernel in report.kernels if kernel.flops and kernel.at_most}
    assert {op: (kernel.count, kernel.flops) for op, kernel in products.items()} == {
        "experts_gate_up_proj": (blocks, 2 * 16 * 40 * 48),
        "experts_down_proj": (blocks, 2 * 16 * 24 * 40),
    }
    padding = (blocks * 16 - 2 * 32 * 5) * 2 * (40 * 48 + 24 * 40)
    assert totals.flops == totals.dense_flops + padding
    assert totals.routed_ideal_bytes > totals.ideal_bytes


# What is refused before any compiler runs.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": "8"}, "--mesh = '8': is no mesh of three sizes. Give slices x hosts x devices of a host, such as "
         "1x1x8."),
        ({"mesh": "1x0x8"}, "--mesh = '1x0x8': is no mesh of three sizes. "),
        ({"mesh": "99x99x99"}, "--mesh = '99x99x99': has more than 1024 devices. "),
        ({"mesh": "1x1x8"}, "tp = 8: doesn't split 28 attention heads and 4 KV heads evenly. Use one of 1, 2, 4, 28."),
        ({"config": ModelConfig.from_hf(tiny.config_json(num_attention_heads=16, num_key_value_heads=8)),
          "mesh": "1x1x8"}, "--mesh = '1x1x8': 8 devices don't divide the 101 rows of the vocabulary. "),
        ({"dtype": "int4"}, "--dtype = 'int4': is not a dtype that the model runs in. Use bfloat16, float16, float32."),
        ({"hardware": load_hardware("mi300x")}, "--hardware = 'mi300x': is a chip of AMD, and the compiler here is "),
        ({"step": Step.decode(0, 16)}, "batch = 0: must be at least 1. "),
    ],
)  # fmt: skip
def test_a_job_that_no_compiler_need_see_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"config": ONE, "step": Step.decode(1, 16), "hardware": load_hardware("rtx-4090"), **changes}
    with pytest.raises(InputError) as refused:
        compile_jobs([CompileJob(**given)])
    assert str(refused.value).startswith(message)


def test_a_missing_compiler_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "jax":
            return "0.10.2"
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(InputError) as refused:
        compile_step(ONE, Step.decode(1, 16), "rtx-4090")
    assert str(refused.value) == (
        "jax-cuda13-plugin: isn't installed, and it is what compiles for NVIDIA GPUs (Linux only; no GPU or driver "
        'needed). Install it: pip install "qwenjax-roofline[gpu-compile]"'
    )


def test_a_compiler_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"jax": "0.10.2", "jax-cuda13-plugin": "0.10.1", "jax-cuda13-pjrt": "0.10.1"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    with pytest.raises(InputError) as refused:
        compile_step(ONE, Step.decode(1, 16), "rtx-4090")
    assert str(refused.value) == (
        "jax-cuda13-plugin = '0.10.1': doesn't fit jax 0.10.2. "
        'Install the same version: pip install "jax==0.10.1", or jax-cuda13-plugin==0.10.2.'
    )


REFUSALS = [
    (
        "UNAVAILABLE: No PTX compilation provider is available.\nmore",
        'Part of the extra is missing: pip install "qwenjax-roofline[gpu-compile]"',
    ),
    ("INTERNAL: Triton can't do that", "Try XLA_FLAGS=--xla_gpu_enable_triton_gemm=false."),
    ("RESOURCE_EXHAUSTED: too large", "Try fewer --layers, or a smaller batch."),
    ("something else", "Try --layers 2, another chip, or another version of jax with its plugin."),
]


@pytest.mark.parametrize(("text", "remedy"), REFUSALS)
def test_a_compiler_that_refuses_gives_its_first_line_and_what_to_try(
    text: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> str:
        (folder / "0.json").write_text(json.dumps({"refusal": text}))
        return ""

    monkeypatch.setattr(gpu_compile, "check_compiler", lambda: "9.10")
    monkeypatch.setattr(gpu_compile, "_run", refuse)
    with pytest.raises(InputError) as refused:
        compile_step(ONE, Step.decode(1, 16), "rtx-4090")
    first = text.splitlines()[0].rstrip(".")
    assert str(refused.value) == f"--hardware = 'rtx-4090': the compiler refuses: {first}. {remedy}"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "import sys; sys.exit('a note\\nUnknown flag in XLA_FLAGS: --xla_gpu_nonsense')",
            "Unknown flag in XLA_FLAGS: --xla_gpu_nonsense. Correct the environment variable XLA_FLAGS.",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "Fatal: ended by signal 9. Try fewer --layers, or a smaller batch.",
        ),
        ("", "it ended without a word. Try --layers 2, another chip, or another version of jax with its plugin."),
    ],
)
def test_a_compiler_that_dies_gives_its_last_words(
    program: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"  # in place of the interpreter that would run the worker
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{program}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(gpu_compile, "check_compiler", lambda: "9.10")
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(InputError) as refused:
        compile_step(ONE, Step.decode(1, 16), "rtx-4090")
    assert str(refused.value) == f"--hardware = 'rtx-4090': the compiler refuses: {message}"


# The real thing: compiled here, all in one process.

GPUS = ("rtx-4090", "rtx-3090", "l4", "l40s", "a100-80gb-sxm", "h100-sxm", "h200", "b200", "rtx-5090")
SPLIT = tiny.config(num_hidden_layers=1, hidden_size=64, num_attention_heads=32, num_key_value_heads=8, vocab_size=128,
                    intermediate_size=96)  # fmt: skip


@pytest.fixture(scope="session")
def compiled(gpu_compiler: None) -> dict[str, KernelReport]:
    dense, moe = ModelConfig.from_hf("Qwen2.5-7B"), ModelConfig.from_hf("Qwen3-30B-A3B").with_layers(2)
    small, chip = tiny.config(num_hidden_layers=1), load_hardware("h100-sxm")
    jobs = {
        "dense": CompileJob(dense, Step.decode(1, 2048), load_hardware("rtx-4090")),
        "experts": CompileJob(moe, Step.decode(1, 2048), chip),
        "prompt": CompileJob(tiny.moe_config(num_hidden_layers=1), Step.prefill(2, 32), chip),
        "chunk": CompileJob(small, Step.prefill(2, 8, 64), chip),
        "large": CompileJob(small, Step.decode(2**20, 512), load_hardware("l4")),
        "host": CompileJob(SPLIT, Step.decode(2, 64), chip, "1x1x8"),
        "hosts": CompileJob(SPLIT, Step.decode(2, 64), chip, "1x2x8"),
        **{gpu: CompileJob(small, Step.decode(2, 64), load_hardware(gpu)) for gpu in GPUS},
    }
    return dict(zip(jobs, compile_jobs(list(jobs.values())), strict=True))


@pytest.mark.gpu_compile
@pytest.mark.parametrize("gpu", GPUS)
def test_every_named_gpu_compiles_a_small_step(compiled: dict[str, KernelReport], gpu: str) -> None:
    totals = compiled[gpu].totals
    assert totals.flops == totals.dense_flops
    assert totals.num_kernels > 10
    assert totals.fits
    assert totals.alias_bytes >= 2 * 2 * 3 * 64 * 16 * 2  # the cache is updated where it lies


@pytest.mark.gpu_compile
def test_a_7b_decode_step_reads_each_weight_once(compiled: dict[str, KernelReport]) -> None:
    report = compiled["dense"]
    totals = report.totals
    assert totals.flops == totals.dense_flops
    assert 1 <= totals.byte_ratio <= 1.05
    assert totals.fits
    assert totals.alias_bytes >= 2 * 28 * 4 * 2048 * 128 * 2
    assert {kernel.count for kernel in report.kernels} == {1}
    assert {"qkv_proj", "scores", "values", "o_proj", "gate_up_proj", "down_proj", "unembed"} <= {
        op for kernel in report.kernels if kernel.flops for op in kernel.ops
    }
    gate_up = [kernel for kernel in report.kernels if kernel.op == "gate_up_proj" and kernel.flops]
    assert len(gate_up) == 28
    assert all(2 * 3584 * 37888 < kernel.read_bytes < 2.02 * 3584 * 37888 for kernel in gate_up)
    assert totals.bound_s <= totals.predicted_s


@pytest.mark.gpu_compile
def test_a_token_s_experts_are_read_and_no_others(compiled: dict[str, KernelReport]) -> None:
    totals = compiled["experts"].totals
    assert totals.flops == totals.dense_flops
    assert 1 <= totals.byte_ratio <= 1.05
    assert totals.routed_ideal_bytes == pytest.approx(totals.ideal_bytes)


@pytest.mark.gpu_compile
def test_a_prompt_of_a_mixture_computes_the_rows_that_were_routed(compiled: dict[str, KernelReport]) -> None:
    """And what fills the last tile of each expert."""
    report = compiled["prompt"]
    totals, inventory = report.totals, {row.op: row for row in count_inventory(report.job)}
    experts = sum(inventory[f"experts_{name}_proj"].flops for name in ("gate_up", "down"))
    assert totals.conditional_runs == 0
    padding = experts * (padded_share(64, report.job.config) - 1)
    assert totals.flops == pytest.approx(totals.dense_flops - totals.masked_flops + padding, abs=2)


@pytest.mark.gpu_compile
def test_switched_off_it_runs_in_a_loop_of_blocks(gpu_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWENJAX_KERNELS_OFF", "all")
    job = CompileJob(tiny.moe_config(num_hidden_layers=1), Step.prefill(2, 32), load_hardware("h100-sxm"))
    (report,) = compile_jobs([job])
    assert report.totals.conditional_runs == 2 * 32 * 5 // 16 + 21
    assert report.totals.flops >= report.totals.dense_flops
    assert not [kernel.kind for kernel in report.kernels if kernel.kind.startswith("pallas")]


@pytest.mark.gpu_compile
def test_a_chunk_attends_what_the_cache_holds(compiled: dict[str, KernelReport]) -> None:
    totals = compiled["chunk"].totals
    assert totals.flops == totals.dense_flops - totals.masked_flops


@pytest.mark.gpu_compile
def test_what_does_not_fit_compiles_all_the_same(compiled: dict[str, KernelReport]) -> None:
    report = compiled["large"]
    assert not report.totals.fits
    assert report.compiled.assumed_memory_bytes is not None
    assert report.compiled.assumed_memory_bytes > report.totals.capacity_bytes
    assert report.totals.rematerialised == 0


@pytest.mark.gpu_compile
@pytest.mark.parametrize(("mesh", "devices"), [("host", 8), ("hosts", 16)])
def test_a_mesh_splits_heads_and_reduces(compiled: dict[str, KernelReport], mesh: str, devices: int) -> None:
    report = compiled[mesh]
    reduced = [k for k in report.kernels if k.op == "o_proj" and k.collective and k.collective.kind == "all-reduce"]
    assert [kernel.collective and kernel.collective.group_size for kernel in reduced] == [devices]
    assert [kernel.time_s is None for kernel in reduced] == [mesh == "hosts"]
    told = "16 devices share 8 KV heads: each has the cache and projections of a whole one."
    assert (told in kernels_record(report, kernels_waterfall(report, None), 1)["remarks"]) == (mesh == "hosts")
    scores = sum(kernel.flops for kernel in report.kernels if kernel.op == "scores")
    assert scores == 2 * (2 * 32 * 64 * 16) // devices


@pytest.mark.gpu_compile
def test_compiling_leaves_this_process_s_jax_alone(gpu_compiler: None) -> None:
    script = """
import sys
from roofline.gpu_compile import compile_step
from qwenjax.config import ModelConfig
from qwenjax.dims import Step
config = ModelConfig.from_hf("Qwen3-0.6B").with_layers(1)
print(len(compile_step(config, Step.decode(1, 16), "l4").hlo) > 1000, "jax" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("True False\n", "", 0)


@pytest.mark.gpu_compile
def test_a_flag_that_xla_does_not_know_is_told(gpu_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_nonsense=1")
    with pytest.raises(InputError) as refused:
        compile_steps([CompileJob(tiny.config(), Step.decode(1, 16), load_hardware("l4"))])
    assert "the compiler refuses: " in str(refused.value)
    assert "XLA_FLAGS" in str(refused.value)


# qwenjax's own kernels, of which a program shows a name, operands and results.

OWN = """HloModule own

ENTRY %main (qkv: bf16[1,4,9,128], angles: bf16[1,64], lengths: s32[1], cache: bf16[1,4,2048,128]) -> bf16[1,4,7,128] {
  %qkv = bf16[1,4,9,128]{3,2,1,0} parameter(0)
  %angles = bf16[1,64]{1,0} parameter(1)
  %lengths = s32[1]{0} parameter(2)
  %cache = bf16[1,4,2048,128]{3,2,1,0} parameter(3)
  ROOT %attend = (bf16[1,4,7,128]{3,2,1,0}, bf16[1,4,2048,128]{3,2,1,0}, bf16[1,4,2048,128]{3,2,1,0}) custom-call(%qkv, %angles, %angles, %lengths, %cache, %cache), custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{1}: (4, {}), {2}: (5, {})}TAIL
}
"""  # noqa: E501


def own_call(op: str, kernel: str) -> str:
    return f', metadata={{op_name="{LAYER}/{op}/{kernel}/pallas_call"}}'


def test_an_own_kernel_reads_the_cache_and_writes_one_position_of_it() -> None:
    text = OWN.replace("TAIL", own_call("scores", "decode_attention"))
    kernel = rows(text)["attend"]
    assert (kernel.kind, kernel.op, kernel.source) == ("pallas decode_attention", "scores", "inventory")
    assert kernel.ops == ("rope", "scores", "softmax", "values")
    assert kernel.flops == 2 * (2 * 28 * 128 * 16)  # 16 positions, as the step has
    assert kernel.read_bytes == 2 * (2 * 16 * 4 * 128) + 2 * 4 * 9 * 128 + 2 * 64 + 4
    assert kernel.write_bytes == 2 * 4 * 7 * 128 + 2 * (2 * 4 * 128)


def test_an_own_product_reads_a_weight_once_though_it_is_passed_twice() -> None:
    text = """HloModule own

ENTRY %main (x: bf16[32,256], w: bf16[2,512,256]) -> bf16[32,512] {
  %x = bf16[32,256]{1,0} parameter(0)
  %w = bf16[2,512,256]{2,1,0} parameter(1)
  ROOT %multiply = bf16[32,512]{1,0} custom-call(%x, %w, %w), custom_call_target="__gpu$xla.gpu.triton"TAIL
}
""".replace("TAIL", own_call("gate_up_proj", "narrow_gated"))
    kernel = rows(text)["multiply"]
    assert (kernel.op, kernel.flops) == ("gate_up_proj", 2 * 32 * 2 * 512 * 256)
    assert (kernel.read_bytes, kernel.write_bytes) == (2 * 32 * 256 + 2 * 2 * 512 * 256, 2 * 32 * 512)


def test_rows_of_an_expert_fill_tiles_of_sixteen() -> None:
    """Four tokens choose one of two experts: none with a chance of 1/16, else one tile, where two rows are expected."""
    config = tiny.moe_config(num_experts=2, num_experts_per_tok=1)
    assert padded_share(4, config) == pytest.approx((15 / 16) * 16 / 2)
    assert padded_share(20, tiny.moe_config(num_experts=4, num_experts_per_tok=4)) == 32 / 20
    assert padded_share(1024, ModelConfig.from_hf("Qwen3-30B-A3B")) == pytest.approx(1.117, abs=1e-3)
