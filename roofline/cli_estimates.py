"""The commands that estimate from a config and a datasheet: params, step, predict, memory, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from qwenjax.command_line import CHECK_FAILED, say, say_notes, show
from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from qwenjax.hf_keys import Note
from qwenjax.tables import Table
from roofline import report
from roofline.bill import bill_of_materials, layer_matmuls, published_count
from roofline.cli_options import (
    AttentionOption,
    BandwidthOption,
    BatchesOption,
    BatchOption,
    DtypeOption,
    EpOption,
    ExpertsOption,
    ExplainOption,
    HardwareOption,
    JsonOption,
    KvDtypeOption,
    LogitsOption,
    MaybeHardwareOption,
    ModelArgument,
    PhaseOption,
    ProfileOption,
    QueryLenOption,
    TpOption,
    WeightsOption,
    batch_sizes,
    expert_convention,
    known_facts,
    maybe_whole_number,
    memory_bandwidth,
    mesh_of,
    positive_number,
    weight_policy,
    whole_number,
)
from roofline.count import DtypePolicy, count_params, count_step, distinct_experts
from roofline.formulas import tokens_to_touch
from roofline.hardware import load_hardware
from roofline.memory import GPU_MEMORY_UTILIZATION, MAX_NUM_BATCHED_TOKENS, plan_memory
from roofline.moe import count_experts
from roofline.predict import device_of, predict_step
from roofline.profile import BOUND
from roofline.request import predict as predict_requests
from roofline.vllm_memory import usage_of

DEFAULT_LENGTH = 1024  # tokens, where a command needs a length and none is given
DEFAULT_BATCHES = "1,2,4,8,16,32,64,128,256"
TOUCH_FRACTION = 0.99  # of the experts, from where on a batch saves nothing worth naming


def params(
    model: ModelArgument,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    weights: WeightsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Where the parameters live, and what one token costs.

    \b
    roofline params Qwen2.5-7B
    roofline params path/to/config.json --dtype float8_e4m3fn --json
    """
    config, policy, notes = _load(model, dtype, kv_dtype, weights)
    counts = count_params(config, policy.weight, policy.kv, policy.scheme)
    known = known_facts(model)
    record = report.params_record(
        config,
        policy,
        counts,
        bill_of_materials(config, counts),
        layer_matmuls(config),
        published_count(config, known, model),
        known,
    )
    _show(record, report.params_text, notes, as_json)


def step(
    model: ModelArgument,
    phase: PhaseOption,
    batch: BatchOption = "1",
    query_len: QueryLenOption = None,
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="TOKENS", help="Tokens that each sequence attends, the new ones included."),
    ] = None,
    hardware: MaybeHardwareOption = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    weights: WeightsOption = None,
    attention: AttentionOption = "causal",
    logits: LogitsOption = "last",
    experts: ExpertsOption = "expected",
    profile: ProfileOption = "bound",
    tp: TpOption = "1",
    ep: EpOption = "1",
    bandwidth: BandwidthOption = "peak",
    measured_s: Annotated[
        str | None,
        typer.Option(
            "--measured-s",
            metavar="SECONDS",
            help="A time that somebody measured for this step: what it implies, and exit status 1 if it can't be.",
        ),
    ] = None,
    explain: ExplainOption = False,
    as_json: JsonOption = False,
) -> None:
    """FLOPs, bytes and least time of one forward step, op by op.

    \b
    roofline step Qwen2.5-7B --phase decode --batch 8 --context 2048 --hardware rtx-4090
    roofline step Qwen3-30B-A3B --phase prefill --query-len 512 --context 4096
    roofline step Qwen2.5-7B --phase decode --context 1 --hardware rtx-4090 --measured-s 0.01616
    """
    config, policy, notes = _load(model, dtype, kv_dtype, weights)
    asked, defaults = read_step(config, phase, batch, query_len, context)
    mesh = mesh_of(tp, ep)
    if profile.strip().lower() != BOUND.name:
        remedy = "Use `roofline predict --profile` for what an engine takes, or leave the option out."
        raise InputError("--profile", profile, "has no times of single ops; step prints the lower bound", remedy)
    conventions: dict[str, Any] = {"attention": attention, "logits": logits, "experts": expert_convention(experts)}
    settings = {"dtype": policy.weight, "kv_dtype": policy.kv, **conventions}
    timed = None
    if hardware is None:
        counts = count_step(config, asked, mesh=mesh, **conventions, **_kinds(policy))
    else:
        chip, wide = load_hardware(hardware), memory_bandwidth(bandwidth)
        arguments = conventions | _kinds(policy)
        times = predict_step(config, asked, chip, tp=mesh.tp, ep=mesh.ep, bandwidth=wide, **arguments)
        timed, counts = (chip, times, BOUND), tuple(op.row for op in times.ops)
    distinct = distinct_experts(config, asked, conventions["experts"]) if config.is_moe else None
    settings |= {"distinct_experts": distinct, "tp": mesh.tp, "ep": mesh.ep, "bandwidth": bandwidth}
    measured = None
    if measured_s is not None:
        seconds = positive_number("--measured-s", measured_s, "0.0162 for 16.2 ms")
        tokens = asked.batch * asked.query_len
        measured = report.measured_record(counts, tokens, seconds, timed[1] if timed else None)
    record = report.step_record(config, asked, phase, settings, counts, timed, measured)
    if explain:
        from roofline.explain import explain_step  # here and below: what only a derivation needs

        kinds = {**conventions, "mesh": mesh, "bandwidth": memory_bandwidth(bandwidth)}
        chip_or_none = timed[0] if timed else None
        record["explanation"] = explain_step(config, asked, chip_or_none, policy, origin=_origin(model), **kinds)
    _show(record, _explained(report.step_text, record), (*notes, *defaults), as_json)
    if measured and measured["problems"]:
        say("\n".join(measured["problems"]))
        raise typer.Exit(CHECK_FAILED)


def predict(
    model: ModelArgument,
    hardware: HardwareOption,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TOKENS", help="Tokens of each prompt.")],
    output: Annotated[str, typer.Option("--output", metavar="TOKENS", help="Tokens that each request makes.")],
    batch: BatchesOption = "1",
    profile: ProfileOption = "bound",
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    weights: WeightsOption = None,
    experts: ExpertsOption = "expected",
    tp: TpOption = "1",
    ep: EpOption = "1",
    bandwidth: BandwidthOption = "peak",
    explain: ExplainOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time to the first token and to each later one, and throughput.

    By batch; with the profile `bound` they are lower bounds in time, which real engines don't beat. With an engine's
    profile they are what it is expected to take, with the interval that 4 of 5 unseen figures fell into.

    \b
    roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 1024 --output 256 --batch 1..64
    roofline predict Qwen3-32B --hardware h100-sxm --prompt 4096 --output 512 --batch 1,8,64 --tp 2
    roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 1024 --output 256 --profile vllm
    roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 1024 --output 256 --profile vllm --explain
    """
    config, policy, notes = _load(model, dtype, kv_dtype, weights)
    chip, mesh, wide = load_hardware(hardware), mesh_of(tp, ep), memory_bandwidth(bandwidth)
    settings: dict[str, Any] = {
        "prompt": whole_number("--prompt", prompt),
        "output": whole_number("--output", output),
        "dtype": policy.weight,
        "kv_dtype": policy.kv,
        "experts": expert_convention(experts),
        "tp": mesh.tp,
        "ep": mesh.ep,
        "bandwidth": wide,
    }
    sizes, arguments = batch_sizes(batch), settings | _kinds(policy)
    if explain and len(sizes) > 1:
        raise InputError("--batch", batch, "names several sizes, and --explain derives one", "Give one size.")
    prediction = predict_requests(config, chip, batch=sizes, profile=profile, **arguments)
    record = report.predict_record(config, chip, device_of(chip, policy, wide), settings, prediction)
    if explain:
        from roofline.explain import explain_request

        lengths = {"prompt": settings["prompt"], "output": settings["output"], "batch": sizes[0], "profile": profile}
        kinds = {"experts": settings["experts"], "mesh": mesh, "bandwidth": wide}
        record["explanation"] = explain_request(config, chip, policy, origin=_origin(model), **lengths, **kinds)
    _show(record, _explained(report.predict_text, record), notes, as_json)


def memory(
    model: ModelArgument,
    hardware: HardwareOption,
    gpu_memory_utilization: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory-utilization",
            metavar="FRACTION",
            help=f"Share of the memory that may be used.  [default: {GPU_MEMORY_UTILIZATION}, or the engine's]",
        ),
    ] = None,
    max_model_len: Annotated[
        str | None,
        typer.Option(
            "--max-model-len", metavar="TOKENS", help="Longest sequence.  [default: the model's context length]"
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        str | None,
        typer.Option(
            "--max-num-batched-tokens",
            metavar="TOKENS",
            help=f"Tokens of the largest step.  [default: {MAX_NUM_BATCHED_TOKENS}, or the engine's]",
        ),
    ] = None,
    max_num_seqs: Annotated[
        str | None,
        typer.Option("--max-num-seqs", metavar="N", help="Sequences at once.  [default: the engine's]"),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="vllm==VERSION", help="The rules of this engine's version, term by term."),
    ] = None,
    usage: Annotated[
        str, typer.Option("--usage", metavar="server|offline", help="How the engine is started, for its defaults.")
    ] = "server",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="The engine captures no CUDA graphs.")] = False,
    kv_pool_bytes: Annotated[
        str | None,
        typer.Option("--kv-pool-bytes", metavar="BYTES", help="A KV pool that was measured; overrides the estimate."),
    ] = None,
    overhead_bytes: Annotated[
        str | None,
        typer.Option("--overhead-bytes", metavar="BYTES", help="What the engine itself needs, CUDA graphs included."),
    ] = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    weights: WeightsOption = None,
    tp: TpOption = "1",
    ep: EpOption = "1",
    as_json: JsonOption = False,
) -> None:
    """What fits on a device, and the KV pool that remains.

    \b
    roofline memory Qwen2.5-7B --hardware rtx-4090 --max-model-len 8192
    roofline memory Qwen2.5-7B --hardware rtx-4090 --kv-pool-bytes 4982964224 --max-model-len 1280
    roofline memory Qwen3-32B --hardware a100-80gb-sxm --tp 2 --engine vllm==0.26.0 --max-model-len 32768
    """
    config, policy, notes = _load(model, dtype, kv_dtype, weights)
    chip, mesh = load_hardware(hardware), mesh_of(tp, ep)
    utilization = gpu_memory_utilization
    settings: dict[str, Any] = {
        "gpu_memory_utilization": None
        if utilization is None
        else positive_number("--gpu-memory-utilization", utilization, "0.9"),
        "max_num_batched_tokens": maybe_whole_number("--max-num-batched-tokens", max_num_batched_tokens),
        "max_num_seqs": maybe_whole_number("--max-num-seqs", max_num_seqs),
        "usage": usage_of(usage),
        "enforce_eager": enforce_eager,
        "dtype": policy.weight,
        "kv_dtype": policy.kv,
    }
    plan = plan_memory(
        config,
        chip,
        max_model_len=maybe_whole_number("--max-model-len", max_model_len),
        kv_pool_bytes=maybe_whole_number("--kv-pool-bytes", kv_pool_bytes),
        overhead_bytes=maybe_whole_number("--overhead-bytes", overhead_bytes),
        mesh=mesh,
        engine=engine,
        **(settings | _kinds(policy)),
    )
    record = report.memory_record(config, chip, {**settings, "tp": mesh.tp, "ep": mesh.ep}, plan)
    _show(record, report.memory_text, notes, as_json)


def experts(
    model: ModelArgument,
    hardware: MaybeHardwareOption = None,
    batch: BatchesOption = DEFAULT_BATCHES,
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="TOKENS", help="Tokens that each sequence attends; matters for times only."),
    ] = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    weights: WeightsOption = None,
    tp: TpOption = "1",
    ep: EpOption = "1",
    bandwidth: BandwidthOption = "peak",
    as_json: JsonOption = False,
) -> None:
    """Experts touched and weights read by a decode step, by batch.

    \b
    roofline experts Qwen2-57B-A14B
    roofline experts Qwen3-30B-A3B --hardware h100-sxm --batch 1,8,64
    """
    config, policy, notes = _load(model, dtype, kv_dtype, weights)
    chip = load_hardware(hardware) if hardware is not None else None
    mesh, attended = mesh_of(tp, ep), _length(config, "--context", context)
    devices = {"tp": mesh.tp, "ep": mesh.ep, "bandwidth": memory_bandwidth(bandwidth)}
    settings: dict[str, Any] = {"context": attended, "dtype": policy.weight, "kv_dtype": policy.kv, **devices}
    rows = count_experts(config, batch_sizes(batch), hardware=chip, **(settings | _kinds(policy)))
    touch = tokens_to_touch(config.num_experts, config.num_experts_per_tok, TOUCH_FRACTION)
    record = report.experts_record(config, chip, {**settings, "touch_fraction": TOUCH_FRACTION}, rows, touch)
    _show(record, report.experts_text, notes, as_json)


def _load(
    model: str, dtype: str | None, kv_dtype: str | None, weights: str | None
) -> tuple[ModelConfig, DtypePolicy, tuple[Note, ...]]:
    config = ModelConfig.from_hf(model)
    policy, notes = weight_policy(config, dtype, kv_dtype, weights)
    return config, policy, (*config.notes, *notes)


def _kinds(policy: DtypePolicy) -> dict[str, Any]:
    """The arguments that say how weights and cache are stored."""
    return {"dtype": None if policy.scheme else policy.weight, "kv_dtype": policy.kv, "weights": policy.scheme}


def _origin(model: str) -> str:
    """Where the config's integers come from, for a derivation."""
    known = known_facts(model)
    return f"config.json of {known.hf_id} ({known.source})" if known else "config.json"


def _explained(
    text: Callable[[Any], Iterable[str | Table]], record: Mapping[str, Any]
) -> Callable[[Any], Iterable[str | Table]]:
    """The text of a record and of its derivation, where it holds one."""
    if "explanation" not in record:
        return text
    from roofline.report.explain import explained

    return explained(text)


def read_step(
    config: ModelConfig, phase: str, batch: str, query_len: str | None, context: str | None
) -> tuple[Step, tuple[Note, ...]]:
    """The step that the options mean, and what was taken by default."""
    sequences = whole_number("--batch", batch)
    if phase == "decode":
        new = 1 if query_len is None else whole_number("--query-len", query_len)
        if new != 1:
            remedy = "For a chunk of several, use --phase prefill with --context."
            raise InputError("--query-len", new, "but a decode step takes one token of each sequence", remedy)
        return Step.decode(sequences, _length(config, "--context", context)), _defaults({"--context": context}, config)
    if phase != "prefill":
        raise InputError("--phase", phase, "is not a kind of step", "Use prefill or decode.")
    if query_len is None and context is not None:
        length = whole_number("--context", context)
        return Step.prefill(sequences, length), ()
    new = _length(config, "--query-len", query_len)
    attended = maybe_whole_number("--context", context)
    return Step.prefill(sequences, new, attended), _defaults({"--query-len": query_len}, config)


def _length(config: ModelConfig, option: str, text: str | None) -> int:
    return min(DEFAULT_LENGTH, config.context_length) if text is None else whole_number(option, text)


def _defaults(given: Mapping[str, str | None], config: ModelConfig) -> tuple[Note, ...]:
    return tuple(
        Note("default", option, f"not given; {_length(config, option, None)} tokens taken")
        for option, text in given.items()
        if text is None
    )


def _show(
    record: Mapping[str, Any],
    text: Callable[[Any], Iterable[str | Table]],
    notes: tuple[Note, ...],
    as_json: bool,
) -> None:
    say_notes(notes)
    show({**record, "notes": notes}, text, as_json)
