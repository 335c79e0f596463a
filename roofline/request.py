"""Whole requests: one prefill and the decode steps that follow, for batches of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, check_step
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh, check_mesh
from roofline.comms import count_comms
from roofline.count import DtypePolicy, Experts, count_kv_bytes_per_token, count_step, count_weight_bytes
from roofline.hardware import Hardware, load_hardware
from roofline.predict import Bandwidth, StepTime, device_of, time_step
from roofline.profile import BOUND, Choice, Profile, find_profile
from roofline.timing.expected import Expected, expect_requests
from roofline.utilization import compute_mbu, compute_mfu
from roofline.weight_schemes import WeightScheme


@dataclass(frozen=True)
class RequestRow:
    """`batch` requests of one prompt and output length served together. Times in seconds; low and high bound e2e_s.

    expected is e2e_s by another name, beside the low and high that 4 of 5 unseen figures fell between.
    """

    batch: int
    fits: bool
    ttft_s: float
    tpot_s: float | None  # None when one token is asked for: the prefill makes it
    e2e_s: float
    tokens_per_s_per_sequence: float | None
    throughput_tokens_per_s: float
    mfu: float
    mbu: float
    limited_by: str
    low: float
    high: float | None  # None: the bound has no upper limit
    expected: float


@dataclass(frozen=True)
class Prediction:
    rows: tuple[RequestRow, ...]
    profile: Profile
    nearest: str = ""  # why the profile is only the nearest to what was asked; empty where it was fitted there


def predict(
    config: ModelConfig,
    hardware: Hardware | str,
    *,
    prompt: int,
    output: int,
    batch: int | Sequence[int] = 1,
    profile: str = "bound",
    dtype: str | None = None,
    kv_dtype: str | None = None,
    weights: str | WeightScheme | None = None,
    experts: Experts = "expected",
    tp: int = 1,
    ep: int = 1,
    bandwidth: Bandwidth = "peak",
) -> Prediction:
    """Predicts time to first token, time per output token and throughput of batches of equal requests.

    One prefill of the whole batch makes the first tokens; `output - 1` decode steps make the rest, the n-th attending
    prompt + n tokens. prompt and output in tokens. weights: a scheme (awq, fp8, ..., or `stored`) in place of the
    dtype; without both a quantised checkpoint's own. profile: `bound`, a profile, or an engine whose best one for this
    hardware is taken (`vllm`, `vllm==0.6.3`).
    """
    batches = (batch,) if isinstance(batch, int) else tuple(batch)
    hardware = load_hardware(hardware) if isinstance(hardware, str) else hardware
    mesh = check_mesh(config, Mesh(tp, ep))
    _check_request(config, prompt, output, batches)
    policy = DtypePolicy.for_model(config, dtype, kv_dtype, weights)
    request = _Request(config, hardware, prompt, output, policy, experts, mesh, bandwidth)
    choice = find_profile(profile, hardware)
    if choice.profile is BOUND:
        return Prediction(tuple(request.row(size) for size in batches), BOUND)
    _check_profile(choice, mesh, bandwidth)
    rows = [
        _expected_row(request.row(size), made, output, choice)
        for size, made in zip(batches, _expected(request, batches, choice), strict=True)
    ]
    nearest = "; ".join(filter(None, (choice.reason, choice.averaged))) if choice.nearest else ""
    return Prediction(tuple(rows), choice.profile, nearest)


def _check_profile(choice: Choice, mesh: Mesh, bandwidth: Bandwidth) -> None:
    name = choice.profile.name
    if mesh.ep > 1:
        raise InputError("ep", mesh.ep, f"isn't timed by the profile {name}", "Use tp, or --profile bound.")
    if bandwidth != "peak":
        problem = f"can't be set beside the profile {name}, which has its own share of the peak"
        raise InputError("bandwidth", bandwidth, problem, "Leave it out, or use --profile bound.")


def _expected(request: _Request, batches: Sequence[int], choice: Choice) -> list[Expected]:
    """What a profile expects of each batch, before the bound."""
    counted = request.experts if isinstance(request.experts, int) else None
    return expect_requests(
        request.config,
        request.hardware,
        choice,
        request.policy,
        batches=batches,
        prompt=request.prompt,
        output=request.output,
        tp=request.mesh.tp,
        experts=request.config.num_experts if request.experts == "all" else counted,
    )


def _expected_row(least: RequestRow, made: Expected, output: int, choice: Choice) -> RequestRow:
    """What a profile expects where the bound says `least`; never less than that."""
    steps = output - 1
    ttft = max(made.prefill_s, least.ttft_s)
    decode = max(made.decode_s, least.e2e_s - least.ttft_s)
    e2e = ttft + decode
    fast, slow = choice.interval("single" if least.batch == 1 else "batched")
    share = least.e2e_s / e2e
    return replace(
        least,
        ttft_s=ttft,
        tpot_s=decode / steps if steps else None,
        e2e_s=e2e,
        tokens_per_s_per_sequence=steps / decode if steps else None,
        throughput_tokens_per_s=least.batch * output / e2e,
        mfu=least.mfu * share,
        mbu=least.mbu * share,
        limited_by="the engine between kernels" if made.overhead_s > e2e / 2 else least.limited_by,
        low=max(least.e2e_s, e2e * fast),
        high=e2e * slow,
        expected=e2e,
    )


def _check_request(config: ModelConfig, prompt: int, output: int, batches: tuple[int, ...]) -> None:
    for name, value in (("prompt", prompt), ("output", output)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(name, value, "must be a positive integer", "Give a length in tokens.")
    if not batches:
        raise InputError("batch", [], "names no batch size", "Give a number or a range such as 1..64.")
    longest = prompt + output - 1  # the last output is never fed back
    for size in batches:
        check_step(config, Step(size, 1, longest))


@dataclass(frozen=True)
class _Request:
    config: ModelConfig
    hardware: Hardware
    prompt: int
    output: int
    policy: DtypePolicy
    experts: Experts
    mesh: Mesh
    bandwidth: Bandwidth

    def time(self, step: Step) -> StepTime:
        policy = self.policy
        rows = count_step(
            self.config,
            step,
            dtype=policy.weight,
            kv_dtype=policy.kv,
            weights=policy.scheme,
            experts=self._experts(step),
            mesh=self.mesh,
            check=False,
        )
        return time_step(
            rows,
            count_comms(self.config, step, self.mesh, policy.activation),
            device_of(self.hardware, policy, self.bandwidth),
        )

    def _experts(self, step: Step) -> Experts:
        # A measured number of distinct experts speaks of decode steps; a prefill reads what its tokens are expected to.
        return self.experts if isinstance(self.experts, str) or step.phase == "decode" else "expected"

    def row(self, batch: int) -> RequestRow:
        import numpy as np

        prefill = self.time(Step.prefill(batch, self.prompt))
        steps = self.output - 1  # the prefill makes the first token, and the last is never fed back
        # All decode steps at once, each context an entry of an array.
        decode = self.time(Step.decode(batch, np.arange(self.prompt + 1, self.prompt + 1 + steps, dtype=np.float64)))
        decode_s = _total(decode.time_s, steps)
        e2e = prefill.time_s + decode_s
        flops, moved = (
            of + _total(more, steps) for of, more in ((prefill.flops, decode.flops), (prefill.bytes, decode.bytes))
        )
        device = prefill.device
        return RequestRow(
            batch,
            self.fits(batch),
            prefill.time_s,
            decode_s / steps if steps else None,
            e2e,
            steps / decode_s if steps else None,
            batch * self.output / e2e,
            compute_mfu(flops, e2e, device.flops_per_s),
            compute_mbu(moved, e2e, device.bandwidth_bytes_per_s),
            _limit(prefill, decode, steps),
            low=e2e,
            high=None,
            expected=e2e,
        )

    def fits(self, batch: int) -> bool:
        """Whether weights and the whole batch's KV cache are within what the device reports as its memory."""
        policy = self.policy
        resident = count_weight_bytes(self.config, policy.weight, self.mesh, policy.scheme)
        tokens = batch * (self.prompt + self.output)
        need = resident + tokens * count_kv_bytes_per_token(self.config, policy.kv, self.mesh)
        return need <= self.hardware.usable_memory_bytes


def _total(value: Any, steps: int) -> float:
    """Sum over decode steps of what may be the same for all of them."""
    return float(value.sum()) if hasattr(value, "shape") else float(value) * steps


def _limit(prefill: StepTime, decode: StepTime, steps: int) -> str:
    """The term that takes most of the request's time."""
    terms = {"compute": 0.0, "weights from memory": 0.0, "KV cache from memory": 0.0, "communication": 0.0}
    for step, times in ((prefill, 1), (decode, steps)):
        terms["communication"] += _total(step.communication_s, times)
        for op in step.ops:
            waits = op.memory_s >= op.compute_s
            terms["compute"] += _total(op.compute_s * (1 - waits), times)
            weights_s = op.row.weight_bytes / step.device.bandwidth_bytes_per_s
            terms["weights from memory"] += _total(weights_s * waits, times)
            terms["KV cache from memory"] += _total((op.memory_s - weights_s) * waits, times)
    return max(terms, key=lambda name: terms[name])
