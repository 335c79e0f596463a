"""The command `kernels`: the contract's names, its text, and what it refuses before and after compiling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from cli_run import figures, run, text_of

from roofline import gpu_compile
from roofline.gpu_compile import Compiled, CompileJob
from roofline.gpu_target import target_ids
from roofline.hlo import parse_hlo

DATA = Path(__file__).parent / "data"
KERNEL = {"name", "op", "kind", "flops", "read_bytes", "write_bytes", "time_s", "bound"}
TOTALS = {
    *("num_kernels", "kernels_per_layer", "bytes", "ideal_bytes", "byte_ratio", "temp_bytes", "argument_bytes"),
    *("alias_bytes", "compile_s", "predicted_s", "bound_s"),
}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The compiler replaced by what it made of tiny models: a decode step of one layer, a prompt of a mixture."""

    def compile_steps(jobs: list[CompileJob]) -> list[Compiled]:
        return [compiled(job) for job in jobs]

    def compiled(job: CompileJob) -> Compiled:
        name = "tiny_moe_prefill" if job.config.is_moe else "tiny_decode"
        text = (DATA / f"{name}.hlo").read_text(encoding="utf-8")
        assumed = 10**12 if job.hardware.id == "l4" else None
        arguments = 10**11 if assumed else 54321
        return Compiled(text, 2.5, arguments, 12500, 6148, 12296, "0.10.2", assumed)

    monkeypatch.setattr("roofline.kernels.compile_steps", compile_steps)
    monkeypatch.setattr("roofline.gpu_compile.check_compiler", lambda: "9.10")
    for name, config in (("dense", tiny.config_json()), ("moe", tiny.moe_json(num_hidden_layers=1))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def dense(folder: str, *more: str) -> str:
    options = "--hardware rtx-4090 --phase decode --batch 2 --context 64 --layers 1"
    return " ".join(("roofline kernels", f"{folder}/dense/config.json", options, *more))


def moe(folder: str, chip: str = "rtx-4090") -> str:
    return f"roofline kernels {folder}/moe/config.json --hardware {chip} --phase prefill --batch 2 --query-len 32"


def test_json_has_the_contract_s_names_and_sums(recorded: str) -> None:
    record = figures(dense(recorded))
    kernels, totals = record["kernels"], record["totals"]
    assert kernels == record["rows"]
    assert all(set(kernel) >= KERNEL for kernel in kernels)
    assert set(totals) >= TOTALS
    assert totals["num_kernels"] == sum(kernel["count"] for kernel in kernels) == 23
    moved = sum(kernel["count"] * (kernel["read_bytes"] + kernel["write_bytes"]) for kernel in kernels)
    assert totals["bytes"] == moved
    assert totals["byte_ratio"] == moved / totals["ideal_bytes"]
    assert totals["predicted_s"] == pytest.approx(sum(kernel["count"] * kernel["time_s"] for kernel in kernels))
    assert (totals["temp_bytes"], totals["argument_bytes"], totals["alias_bytes"]) == (6148, 54321, 12296)
    assert totals["compile_s"] == 2.5
    assert record["autotuned"] is False
    assert (record["layers"], record["model_layers"], record["devices"]) == (1, 3, 1)
    groups = record["groups"]
    assert sum(group["count"] for group in groups) == 23
    assert sum(group["flops"] for group in groups) == totals["flops"]


def test_the_text_answers_first_and_says_what_is_not_real(recorded: str) -> None:
    text = text_of(dense(recorded))
    first, second = text.splitlines()[:2]
    assert first.endswith(
        "decode, batch 2, context 64 on rtx-4090: 23 kernels, 18.0 a layer, 1.288 of the ideal bytes, 6.148 kB of "
        "temporaries; not autotuned"
    )
    assert second == "the first 1 of 3 layers, bfloat16; compiled in 2.500 s by XLA of jax 0.10.2"
    assert "Not real: nothing is autotuned, so tilings, and whether Triton or cuBLAS runs a matrix product" in text
    assert "6.148 kB of temporaries; 0.00 GiB at once, which fits the card's 23.52 GiB." in text
    rows = [line.split() for line in text.splitlines()]
    assert ["swiglu", "loop", "fusion", "2", "2.0", "0", "0.45", "0.45", "0.89", "memory"] in rows


def test_all_lists_every_kernel_by_name(recorded: str) -> None:
    record, text = figures(dense(recorded)), text_of(dense(recorded, "--all"))
    assert "Kernels in order, figures of one run" in text
    listed = [line.split()[0] for line in text.splitlines() if line.strip()]
    names = [kernel["name"] for kernel in record["kernels"]]
    assert [name for name in listed if name in names] == names


def test_the_waterfall_starts_at_the_roof_and_prices_launches_only_where_told(recorded: str) -> None:
    unpriced, priced = (figures(dense(recorded, *more)) for more in ((), ("--launch-us", "3")))
    terms = {term["name"]: term for term in unpriced["waterfall"]["terms"]}
    assert terms["roof"]["time_s"] + terms["ops in turn"]["time_s"] == pytest.approx(unpriced["totals"]["bound_s"])
    assert terms["launches"]["time_s"] == 0
    assert terms["launches"]["source"] == "not priced: no launch cost is known"
    assert unpriced["waterfall"]["total_s"] == pytest.approx(unpriced["totals"]["predicted_s"])
    assert priced["waterfall"]["total_s"] == pytest.approx(unpriced["totals"]["predicted_s"] + 23 * 3e-6)
    assert unpriced["waterfall"]["measured_s"] is None
    assert "Waterfall of a decode (batch 2, 1 new of 64 tokens)" in text_of(dense(recorded))


def test_plot_draws_both_phases(recorded: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the `plot` extra")
    target = tmp_path / "kernels.png"
    text = text_of(dense(recorded, "--plot", str(target)))
    assert text.splitlines()[-1] == f"plot: {target}"
    assert target.stat().st_size > 10_000


def test_hlo_keeps_the_compiled_program(recorded: str, tmp_path: Path) -> None:
    target = tmp_path / "step.hlo"
    text_of(dense(recorded, "--hlo", str(target)))
    assert target.read_text(encoding="utf-8") == (DATA / "tiny_decode.hlo").read_text(encoding="utf-8")


def test_progress_and_notes_are_on_stderr(recorded: str) -> None:
    told = run(dense(recorded)).stderr.splitlines()
    assert told[-1] == "compiling for rtx-4090 ..."


def test_a_loop_s_conditions_are_told_as_upper_bounds(recorded: str) -> None:
    text = text_of(moe(recorded))
    assert " prefill, batch 2, 32 new tokens on rtx-4090: at most 546 kernels" in text.splitlines()[0]
    assert "A condition decides 41 times whether work is done" in text
    assert "once for each token's choice or block of rows, they are 1.579 times that" in text
    assert "<= 41" in text


def test_a_model_that_does_not_fit_is_compiled_and_says_so(recorded: str) -> None:
    told = run(moe(recorded, "l4"))
    assert told.status == 0
    assert told.stdout.splitlines()[0].endswith("not autotuned; it does not fit the card")
    assert "Weights and cache alone don't fit l4: compiled as if it had memory enough" in told.stdout


# What is refused, with exit status 2 and one message.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--hardware h100-pci --phase decode",
            "hardware = 'h100-pci': is not a known chip. Did you mean h100-pcie? `roofline hardware` lists all, or "
            "give a TOML file",
        ),
        (
            "--hardware mi300x --phase decode",
            "--hardware = 'mi300x': is a chip of AMD, and the compiler here is XLA's for CUDA. Known: "
            f"{', '.join(target_ids())}; or give a TOML file with its figures.",
        ),
        (
            "--hardware rtx-4090 --phase decode --context 64 --launch-us 0",
            "--launch-us = '0': must be a positive number. Give for instance 2.5.",
        ),
        (
            "--hardware rtx-4090 --phase decode --context 64 --plot kernels.gif",
            "path = 'kernels.gif': has no suffix of a known figure format. Use .png, .svg or .pdf",
        ),
        (
            "--hardware rtx-4090 --phase train",
            "--phase = 'train': is not a kind of step. Use prefill or decode.",
        ),
        (
            "--hardware rtx-4090 --phase decode --layers 99",
            "layers = 99: must be from 1 to num_hidden_layers 28. Choose fewer.",
        ),
        (
            "--hardware rtx-4090 --phase decode --mesh 8",
            "--mesh = '8': is no mesh of three sizes. Give slices x hosts x devices of a host, such as 1x1x8.",
        ),
        (
            "--hardware rtx-4090 --phase decode --dtype int8",
            "--dtype = 'int8': is not a dtype that the model runs in. Use bfloat16, float16, float32.",
        ),
        (
            "--hardware t4 --phase decode",
            "dtype = 'bfloat16': no peak rate is known on t4. Use one of float16, float32, int8",
        ),
        (
            "--hardware rtx-4090 --phase decode --hlo no/such/folder/x.hlo",
            "--hlo = 'no/such/folder/x.hlo': can't be written there. Name a file in a folder that exists.",
        ),
    ],
)
def test_what_cannot_be_compiled_is_one_message(options: str, message: str, recorded: str) -> None:
    told = run(f"roofline kernels Qwen2.5-7B {options}")
    assert (told.status, told.stdout) == (2, "")
    assert told.stderr.splitlines()[-1] == message


def test_a_quantised_checkpoint_is_refused_by_the_model(gpu_compiler: None) -> None:
    told = run("roofline kernels Qwen3-8B-FP8 --hardware h100-sxm --phase decode --context 64")
    assert (told.status, told.stdout) == (2, "")
    assert told.stderr.splitlines()[-1] == (
        "quantization_config = 'fp8': quantised weights don't run here; only their costs are known. "
        "Use the unquantised checkpoint."
    )


def test_a_compiler_that_refuses_is_status_2(recorded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(jobs: list[CompileJob]) -> Any:
        raise gpu_compile._refusal(jobs[0], "UNIMPLEMENTED: Triton support for this.\nsecond line")

    monkeypatch.setattr("roofline.kernels.compile_steps", refuse)
    told = run(dense(recorded))
    assert (told.status, told.stdout) == (2, "")
    assert told.stderr.splitlines()[-1] == (
        "--hardware = 'rtx-4090': the compiler refuses: UNIMPLEMENTED: Triton support for this. "
        "Try XLA_FLAGS=--xla_gpu_enable_triton_gemm=false."
    )


@pytest.mark.gpu_compile
def test_the_command_compiles(gpu_compiler: None, tmp_path: Path) -> None:
    hlo = tmp_path / "step.hlo"
    (tmp_path / "config.json").write_text(json.dumps(tiny.config_json(num_hidden_layers=1)))
    command = (
        f"roofline kernels {tmp_path}/config.json --hardware h200 --phase decode --batch 2 --context 64 --hlo {hlo}"
    )
    record = figures(command)
    totals = record["totals"]
    assert totals["flops"] == totals["dense_flops"]
    assert totals["num_kernels"] == len(record["kernels"])
    assert {kernel["name"] for kernel in record["kernels"]} <= set(parse_hlo(hlo.read_text()).entry.by_name)
