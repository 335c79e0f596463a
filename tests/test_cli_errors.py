"""Input that the commands can't use: one message on stderr with field, value and remedy, exit status 2, no figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from cli_run import run
from config_base import QWEN3, QWEN3_MOE, changed

from qwenjax import command_line
from qwenjax.errors import InputError

STEP = "roofline step Qwen2.5-7B --phase decode"
PREDICT = "roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 8 --output 8"
MEMORY = "roofline memory Qwen2.5-7B --hardware rtx-4090"
UNKNOWN_MODEL = (
    "MODEL = 'nothing': is not a known model. `roofline models` lists the known ones; a path to a config.json or to a "
    "checkpoint folder works too."
)
DTYPES = "Known: float64, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, int8, int4."
BATCH = "Give a number (8), a range (1..64) or a list (1,2,4)."

MESSAGES = {
    "roofline params nothing": UNKNOWN_MODEL,
    "qwenjax inspect nothing": UNKNOWN_MODEL,
    "roofline models nothing": UNKNOWN_MODEL,
    "roofline params ./nowhere.json": (
        "./nowhere.json: no such file or folder. Give a config.json, a checkpoint folder or a known model: "
        "Qwen/Qwen1.5-0.5B, Qwen/Qwen1.5-0.5B-Chat, Qwen/Qwen1.5-1.8B, ... (`roofline models` lists them)."
    ),
    "roofline params Qwen2.5-7B --dtype bf16": f"dtype = 'bf16': is not a dtype that is known here. {DTYPES}",
    "roofline params Qwen2.5-7B --kv-dtype fp8": f"kv_dtype = 'fp8': is not a dtype that is known here. {DTYPES}",
    f"{STEP} --batch 0": "batch = 0: must be at least 1. Give a count of sequences or tokens.",
    f"{STEP} --batch 1..4": "--batch = '1..4': must be a whole number. Give digits only, such as 16.",
    f"{STEP} --batch 99999999999999999999": (
        "--batch = '99999999999999999999': is larger than any count here. Check the number."
    ),
    f"{STEP} --context 131073": (
        "context = 131073: is beyond the model's 131072 positions. Choose a shorter context, or a config with a RoPE "
        "scaling."
    ),
    f"{STEP} --context 2k": "--context = '2k': must be a whole number. Give digits only, such as 16.",
    f"{STEP} --query-len 4": (
        "--query-len = 4: but a decode step takes one token of each sequence. For a chunk of several, use --phase "
        "prefill with --context."
    ),
    "roofline step Qwen2.5-7B --phase train": (
        "--phase = 'train': is not a kind of step. Use prefill or decode."
    ),
    "roofline step Qwen2.5-7B --phase prefill --query-len 9 --context 4": (
        "context = 4: is less than the 9 query tokens, which are attended too. Give past and new tokens together."
    ),
    f"{STEP} --attention full": (
        "attention = 'full': is not a convention that is known here. Known: causal, dense."
    ),
    f"{STEP} --logits first": "logits = 'first': is not a convention that is known here. Known: last, all.",
    "roofline step Qwen3-30B-A3B --phase decode --experts many": (
        "--experts = 'many': must be expected, all or a whole number. Give the distinct experts of one layer as they "
        "were measured, or one of the words."
    ),
    "roofline step Qwen3-30B-A3B --phase decode --experts 9": (
        "experts = 9: must be from 8 (one token's) to 8. Count the distinct experts of one layer."
    ),
    f"{STEP} --profile vllm": (
        "--profile = 'vllm': has no times of single ops; step prints the lower bound. Use `roofline predict --profile` "
        "for what an engine takes, or leave the option out."
    ),
    f"{STEP} --hardware rtx-4090 --bandwidth fast": (
        "--bandwidth = 'fast': must be peak, measured or bytes per second. Give for instance 887e9."
    ),
    f"{STEP} --hardware rtx-4090 --bandwidth 2e12": (
        "bandwidth = 2000000000000.0: must be peak, measured, or bytes per second up to the peak 1.008e+12. Give for "
        "instance 887e9."
    ),
    f"{STEP} --measured-s soon": (
        "--measured-s = 'soon': must be a positive number. Give for instance 0.0162 for 16.2 ms."
    ),
    f"{STEP} --measured-s nan": (
        "--measured-s = 'nan': must be a positive number. Give for instance 0.0162 for 16.2 ms."
    ),
    f"{STEP} --tp two": "--tp = 'two': must be a whole number. Give digits only, such as 16.",
    f"{STEP} --tp 3": (
        "tp = 3: doesn't split 28 attention heads and 4 KV heads evenly. Use one of 1, 2, 4, 28."
    ),
    f"{STEP} --ep 2": "ep = 2: a dense model has no experts to spread. Use tp.",
    f"{PREDICT} --batch x": f"--batch = 'x': is no whole number, range or list. {BATCH}",
    f"{PREDICT} --batch 1,": f"--batch = '1,': is no whole number, range or list. {BATCH}",
    f"{PREDICT} --batch 8..2": "--batch = '8..2': has a range that ends at 2, below its start. Swap the two.",
    f"{PREDICT} --batch 1..9999": "--batch = '1..9999': names more than 4096 sizes. Give fewer, such as 1,2,4,8.",
    f"{PREDICT} --batch 0..2": "batch = 0: must be at least 1. Give a count of sequences or tokens.",
    "roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 0 --output 8": (
        "prompt = 0: must be a positive integer. Give a length in tokens."
    ),
    "roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 8 --output eight": (
        "--output = 'eight': must be a whole number. Give digits only, such as 16."
    ),
    "roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 131072 --output 2": (
        "context = 131073: is beyond the model's 131072 positions. Choose a shorter context, or a config with a RoPE "
        "scaling."
    ),
    f"{MEMORY} --gpu-memory-utilization 1.5": (
        "gpu_memory_utilization = 1.5: must be above 0 and at most 1. vLLM's default is 0.9."
    ),
    f"{MEMORY} --gpu-memory-utilization most": (
        "--gpu-memory-utilization = 'most': must be a positive number. Give for instance 0.9."
    ),
    f"{MEMORY} --max-model-len 200000": (
        "max_model_len = 200000: must be from 1 to the model's 131072 positions. Choose a length within."
    ),
    f"{MEMORY} --kv-pool-bytes 4GB": "--kv-pool-bytes = '4GB': must be a whole number. Give digits only, such as 16.",
    f"{MEMORY} --overhead-bytes -1": "overhead_bytes = -1: must not be negative. Give bytes.",
    "roofline experts Qwen2.5-7B": (
        "MODEL = 'Qwen2.5-7B': is dense: it has no experts. Give a mixture-of-experts model, such as Qwen3-30B-A3B."
    ),
}  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("line", MESSAGES)
def test_the_whole_message(line: str, as_json: bool) -> None:
    assert run(line, *(["--json"] if as_json else [])) == (2, "", f"{MESSAGES[line]}\n")


@pytest.mark.parametrize(
    "command", ["step {} --phase decode", "predict {} --prompt 8 --output 8", "memory {}", "experts {}"]
)
def test_an_unknown_chip_names_the_near_or_the_known_ones(command: str) -> None:
    line = f"roofline {command.format('Qwen3-30B-A3B')} --hardware"
    near = run(f"{line} rtx-9")
    assert (near.status, near.stdout) == (2, "")
    assert near.stderr.startswith("hardware = 'rtx-9': is not a known chip. Did you mean rtx-")
    assert near.stderr.endswith("? `roofline hardware` lists all, or give a TOML file\n")


def test_a_device_that_was_never_calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    problem = f"this device isn't calibrated, {tmp_path / 'here.toml'} doesn't exist"
    remedy = "Run `roofline calibrate`, or name a chip (`roofline hardware` lists them)"
    assert run("roofline hardware here") == (2, "", f"hardware = 'here': {problem}. {remedy}\n")


def test_a_bandwidth_that_nobody_measured() -> None:
    assert run(f"{STEP} --hardware h100-sxm --bandwidth measured") == (
        2,
        "",
        "bandwidth = 'measured': nobody's measurement is known for h100-sxm. Use peak, or give bytes per second.\n",
    )


# files


@pytest.mark.parametrize("command", ["roofline params", "qwenjax inspect"])
def test_a_folder_without_a_config(command: str, tmp_path: Path) -> None:
    message = f"{tmp_path}: the folder has no config.json. Name a Hugging Face checkpoint folder.\n"
    assert run(command, str(tmp_path)) == (2, "", message)


@pytest.mark.parametrize("command", ["roofline params", "roofline models", "qwenjax inspect"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            b'{"model_type": ',
            "isn't valid JSON (Expecting value, line 1 column 16). Correct or download the file again.",
        ),
        (b"[1, 2]", "holds a JSON list, not an object. Give a config.json."),
        (b"\xff\xfe{", "isn't UTF-8 text (invalid start byte). Give a config.json."),
        (b"[" * 100_000, "nests too deep. Give a config.json."),
    ],
    ids=["cut", "list", "bytes", "deep"],
)
def test_a_file_that_is_no_config(command: str, content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert run(command, str(path)) == (2, "", f"{path}: {problem}\n")


def test_a_config_with_a_field_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(QWEN3, num_attention_heads=6, num_key_value_heads=4)))
    message = "num_key_value_heads = 4: doesn't divide num_attention_heads 6. Dividing: 1, 2, 3, 6.\n"
    assert run("roofline params", str(path)) == (2, "", message)


def test_a_dense_config_has_no_experts(tmp_path: Path) -> None:
    path = tmp_path / "small" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(QWEN3))
    message = "MODEL = 'small': is dense: it has no experts. Give a mixture-of-experts model, such as Qwen3-30B-A3B.\n"
    assert run("roofline experts", str(path)) == (2, "", message)


def test_a_context_beyond_a_small_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_MOE))
    problem = "is beyond the model's 512 positions"
    message = f"context = 513: {problem}. Choose a shorter context, or a config with a RoPE scaling.\n"
    assert run("roofline step", str(path), "--phase", "decode", "--context", "513") == (2, "", message)


# what typer itself refuses


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("roofline bogus", "No such command 'bogus'."),
        ("roofline params", "Missing argument 'MODEL'."),
        ("roofline step Qwen2.5-7B", "Missing option '--phase'."),
        ("roofline predict Qwen2.5-7B --prompt 1 --output 1", "Missing option '--hardware'."),
        ("roofline memory Qwen2.5-7B", "Missing option '--hardware'."),
        ("roofline params Qwen2.5-7B --batch 2", "No such option: --batch"),
        ("roofline params Qwen2.5-7B Qwen3-8B", "(Qwen3-8B)"),
        ("roofline params Qwen2.5-7B --dtype", "Option '--dtype' requires an argument."),
        ("qwenjax bogus", "No such command 'bogus'."),
        ("qwenjax inspect", "Missing argument 'MODEL'."),
    ],
)
def test_usage_errors_name_the_option(line: str, message: str) -> None:
    result = run(line)
    assert (result.status, result.stdout) == (2, "")
    error = result.stderr.splitlines()[-1]
    assert error.startswith("Error: ")
    assert message in error


@pytest.mark.parametrize("command", ["roofline", "qwenjax"])
def test_a_command_alone_shows_its_help(command: str) -> None:
    result = run(command)
    assert result.status == 2
    assert f"Usage: {command} [OPTIONS] COMMAND" in result.stdout + result.stderr


# real processes


@pytest.mark.parametrize("package", ["roofline", "qwenjax"])
def test_a_real_process_has_one_message_and_no_traceback(package: str) -> None:
    command = [sys.executable, "-m", package, "params" if package == "roofline" else "inspect", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{UNKNOWN_MODEL}\n")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_gone_ends_the_command_quietly(options: list[str]) -> None:
    command = [sys.executable, "-m", "roofline", "hardware", "rtx-4090", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait() == 141


def test_an_interrupt_is_status_130(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def forever() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as finished:
        command_line.run(app, "roofline", [])
    assert finished.value.code == 130
    assert "Traceback" not in "".join(capsys.readouterr())


def test_a_fault_of_ours_is_not_hidden() -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def faulty() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        command_line.run(app, "roofline", [])


def test_an_input_error_of_a_subcommand_reaches_stderr_whole(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def refuses() -> None:
        raise InputError("seed", -1, "must not be negative", "Give 0 or more.")

    with pytest.raises(SystemExit) as finished:
        command_line.run(app, "qwenjax", [])
    assert finished.value.code == 2
    assert capsys.readouterr() == ("", "seed = -1: must not be negative. Give 0 or more.\n")
