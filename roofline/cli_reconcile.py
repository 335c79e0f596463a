"""The command that sets a real engine's figures beside ours: reconcile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from qwenjax.command_line import CHECK_FAILED, say, say_notes, show
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from roofline.cli_options import JsonOption, KvDtypeOption, MaybeHardwareOption, ModelArgument, maybe_whole_number
from roofline.hardware import load_hardware

if TYPE_CHECKING:
    from roofline.engine_run import EngineRun
    from roofline.vllm_log import StartupLog


def reconcile(
    model: ModelArgument,
    vllm_log: Annotated[
        str | None, typer.Option("--vllm-log", metavar="FILE", help="What vLLM wrote while it started.")
    ] = None,
    vllm_metrics: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--vllm-metrics",
            metavar="BEFORE AFTER",
            help="Its /metrics page before and after some requests, with --enable-mfu-metrics.",
        ),
    ] = None,
    hardware: MaybeHardwareOption = None,
    tp: Annotated[
        str | None, typer.Option("--tp", metavar="N", help="Tensor parallelism.  [default: as the log says, else 1]")
    ] = None,
    kv_dtype: KvDtypeOption = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="SCHEME", help="How weights are stored, such as awq or fp8-block."),
    ] = None,
    max_num_batched_tokens: Annotated[
        str | None,
        typer.Option(
            "--max-num-batched-tokens",
            metavar="TOKENS",
            help="At which prompts are split.  [default: as the log says, else whole prompts]",
        ),
    ] = None,
    usage: Annotated[
        str, typer.Option("--usage", metavar="server|offline", help="How the engine is started, for its defaults.")
    ] = "server",
    as_json: JsonOption = False,
) -> None:
    """A real engine's figures beside ours, term by term, with what a difference most likely comes from.

    Rows without a mark must agree: identities between the log's numbers and the architecture, within how finely they
    are printed, weights within 3 %, and counters within what requests of these sums can count. Exit status 1 if one
    doesn't. Rows with * are predictions beside the engine's figure; they don't change the status.

    \b
    roofline reconcile Qwen2.5-7B --vllm-log server.log --hardware rtx-4090
    roofline reconcile Qwen3-30B-A3B --vllm-metrics before.txt after.txt --json
    """
    if vllm_log is None and vllm_metrics is None:
        remedy = "Give --vllm-log FILE, --vllm-metrics BEFORE AFTER, or both."
        raise InputError("reconcile", None, "has no engine's figures to set beside ours", remedy)
    from roofline.engine_run import run_of_log
    from roofline.reconcile import account_of_log
    from roofline.reconcile_counters import reconcile_counters
    from roofline.report.reconcile import reconcile_record, reconcile_text
    from roofline.vllm_log import load_startup_log
    from roofline.vllm_memory import usage_of
    from roofline.vllm_metrics import load_counter_delta

    config, started = ModelConfig.from_hf(model), usage_of(usage)
    devices = maybe_whole_number("--tp", tp)
    chunk = maybe_whole_number("--max-num-batched-tokens", max_num_batched_tokens)
    chip = load_hardware(hardware) if hardware is not None else None
    say_notes(note for note in config.notes if note.kind == "warning")
    read: tuple[StartupLog, EngineRun] | None = None
    if vllm_log is not None:
        log = load_startup_log(vllm_log)
        read = log, run_of_log(config, log, tp=devices, kv_dtype=kv_dtype, weights=weights, usage=started, chunk=chunk)
    counters = None
    if vllm_metrics is not None:
        delta = load_counter_delta(*vllm_metrics, model=model)
        run = read[1] if read else None
        report = reconcile_counters(
            config,
            delta,
            tp=devices or (run.tp if run else 1),
            kv_dtype=kv_dtype or (run.kv_dtype if run else "bfloat16"),
            chunk=chunk or (run.settings.max_num_batched_tokens if run else None),
            max_model_len=run.max_model_len if run else None,
        )
        counters = delta, report
    found = (*read, account_of_log(config, *read, chip)) if read else None
    record = reconcile_record(config, chip, found, counters)
    show(record, reconcile_text, as_json)
    if not record["agrees"]:
        wrong = [row["term"] for row in record["rows"] if row["agrees"] is False]
        say(f"reconcile: {', '.join(wrong)}: ours and the engine's don't agree")
        raise typer.Exit(CHECK_FAILED)
