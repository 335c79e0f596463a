"""A profile's part of a derivation: its constants, the time of each kind of engine step, and the figures printed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.sharding import Mesh
from roofline.count import DtypePolicy, Experts
from roofline.explain.bound import Bound, Times
from roofline.explain.counts import Ground
from roofline.explain.derivation import Derivation, Node, evaluate, total_of
from roofline.explain.kernels import Constants, Recorder
from roofline.explain.phases import PhaseKernels
from roofline.hardware import Hardware
from roofline.predict import Bandwidth
from roofline.profile import BOUND, Choice, find_profile
from roofline.timing.efficiency import load_efficiency
from roofline.timing.engine import CONSTANTS, SCHEME_KINDS, SHARPNESS, step_seconds, usual_of
from roofline.timing.scheduling import Group, as_steps, decode_groups, prefill_groups
from roofline.timing.serving import layout_of, scheme_key
from roofline.timing.step import SECONDS, SHARED_LAUNCHES, SPARSE_LAUNCHES
from roofline.weight_schemes import scheme_of

_SCHEMED = {
    "products_memory": "memory",
    "products_compute": "compute",
    "experts": "experts",
    "experts_tuned": "experts",
}


def explain_request(
    config: ModelConfig,
    hardware: Hardware,
    policy: DtypePolicy,
    *,
    prompt: int,
    output: int,
    batch: int,
    profile: str = "bound",
    origin: str = "",
    experts: Experts = "expected",
    mesh: Mesh | None = None,
    bandwidth: Bandwidth = "peak",
) -> tuple[Node, ...]:
    """The derivation of `roofline.request.predict` for one batch: the last nodes are the figures that it gives."""
    mesh = mesh or Mesh()
    ground = Ground(Derivation(), config, policy, mesh, origin or "config.json", experts=experts)
    times = Times(ground, hardware, bandwidth)
    bound = times.request(batch, prompt, output)
    nodes, choice = ground.nodes, find_profile(profile, hardware)
    if choice.profile is BOUND:
        nodes.derive("ttft_s", bound.ttft_s, "s", "time to the first token, at least")
        nodes.derive("decode_s", bound.decode_s, "s", "all later tokens, at least")
        nodes.derive("e2e_s", bound.e2e_s, "s", "the whole request, at least")
    else:
        _Engine(ground, hardware, choice, bound).request(batch, prompt, output)
    if output > 1:
        nodes.derive("tpot_s", "decode_s / steps", "s", "each token after the first")
        nodes.derive("tokens_per_s_per_sequence", "steps / decode_s", "tokens/s", "after the first, of one sequence")
    nodes.derive("throughput_tokens_per_s", "B * output / e2e_s", "tokens/s", "tokens of the batch over its whole time")
    return tuple(nodes.nodes.values())


class _Engine:
    """Adds what an engine's profile expects of a request whose bound is there already."""

    def __init__(self, ground: Ground, hardware: Hardware, choice: Choice, bound: Bound) -> None:
        self.ground, self.nodes, self.chip = ground, ground.nodes, hardware
        self.choice, self.profile, self.bound = choice, choice.profile, bound
        self.engine = self.profile.engine_constants
        self.scheme = ground.policy.scheme or scheme_of(ground.policy.weight)
        self.eff = load_efficiency(hardware)[0]

    def constant(self, name: str) -> str:
        """A constant of the profile, with its meaning and what it was fitted on."""
        profile, known = self.profile, CONSTANTS[name]
        meaning, rows = known.meaning, profile.source.split(":")[0]
        if name in profile.constants:
            source = f"{meaning}; profile {profile.name}, {rows}"
            return self.nodes.leaf(f"profile.{name}", profile.constants[name], known.unit, "fitted", source)
        source = f"{meaning}; profile {profile.name} has no rows that show it, a usual value"
        return self.nodes.leaf(f"profile.{name}", self.engine.of(name), known.unit, "estimate", source)

    def scheme_constant(self, kind: str) -> str:
        """A weight scheme's further slowdown; empty for weights of 16 bits."""
        key = scheme_key(self.scheme, self.chip)
        if not key:
            return ""
        value = self.engine.scheme(key)[SCHEME_KINDS.index(kind)]
        meaning, own = usual_of(key, kind).meaning, kind in self.profile.schemes.get(key, {})
        source = f"{meaning}; {key} of profile {self.profile.name}" + (
            "" if own else ", which has no rows of it: one as wide, or a usual value"
        )
        return self.nodes.leaf(
            f"profile.{key.replace('-', '_')}_{kind}", value, "1", "fitted" if own else "estimate", source
        )

    def request(self, batch: int, prompt: int, output: int) -> None:
        scheduler, nodes = self.profile.scheduler, self.nodes
        experts = self.ground.experts
        counted = self.ground.config.num_experts if experts == "all" else experts if isinstance(experts, int) else None
        once = self.constant("request_s")
        prefill = self.phase("engine.prefill", prefill_groups(batch, prompt, scheduler), None)
        nodes.derive("engine.prefill_s", f"{prefill} + {once}", "s", "all steps that take the prompts")
        groups = decode_groups(batch, prompt + 1, output - 1)
        decode = self.phase("engine.decode", groups, counted) if groups else "0 * steps"
        nodes.derive("engine.decode_s", decode, "s", "all decode steps")
        bound = self.bound
        nodes.derive("ttft_s", f"max(engine.prefill_s, {bound.ttft_s})", "s", "time to the first token")
        nodes.derive("decode_s", f"max(engine.decode_s, {bound.e2e_s} - {bound.ttft_s})", "s", "all later tokens")
        nodes.derive("e2e_s", "ttft_s + decode_s", "s", "the whole request, as expected")
        self.interval("single" if batch == 1 else "batched")

    def interval(self, kind: str) -> None:
        nodes, profile = self.nodes, self.profile
        fast, slow = self.choice.interval(kind)
        wider = ", or on chips that it wasn't fitted on, since none was fitted here" if self.choice.nearest else ""
        source = (
            f"of 5 held-out {kind} figures of profile {profile.name} 4 took between low and high of what was expected"
        )
        nodes.leaf("interval.low", fast, "1", "fitted", source + wider)
        nodes.leaf("interval.high", slow, "1", "fitted", source + wider)
        nodes.derive("low_s", f"max({self.bound.e2e_s}, e2e_s * interval.low)", "s", "the bound is never beaten")
        nodes.derive("high_s", "e2e_s * interval.high", "s", "the whole request, high")

    def phase(self, key: str, groups: list[Group], counted: float | None) -> str:
        """Adds the kinds of steps of a phase; the formula of the phase's time."""
        ground, scheduler = self.ground, self.profile.scheduler
        policy, tp = ground.policy, ground.mesh.tp
        layout = layout_of(ground.config, self.chip, self.scheme, tp=tp, kv_dtype=policy.kv, ways=scheduler)
        steps = as_steps(groups)
        recorder = Recorder(ground.config, steps, replace(layout, experts=counted), self.chip, self.eff)
        kernels = PhaseKernels(ground, key, steps, recorder, Constants(self.nodes, self.chip, self.eff))
        limit, known = scheduler.max_num_batched_tokens, self.profile.scheduler_source
        reason = f" ({known})" if known else ""
        kernels.sizes(f"the scheduler takes up to {limit} tokens of prompts a step{reason}")
        taken, floors = kernels.by_kind()
        made = {kind: self.engine_time(kernels, kind, taken[kind], floors[kind]) for kind in SECONDS if kind in taken}
        seconds = self.steps(kernels, made)
        return total_of(f"{times} * {one}" for times, one in zip(kernels.times, seconds, strict=True))

    def engine_time(self, kernels: PhaseKernels, kind: str, taken: list[str], floors: list[str]) -> list[str]:
        factor = self.constant(kind)
        values = self.engine.of(kind) * kernels.terms.values[kind]
        if kind in _SCHEMED and (more := self.scheme_constant(_SCHEMED[kind])):
            factor = f"{factor} * {more}"
            values = values * self.nodes.values[more]
        formulas = [f"max({factor} * {one}, {floor})" for one, floor in zip(taken, floors, strict=True)]
        import numpy as np

        values = np.maximum(values, kernels.terms.least[kind])
        return kernels.each(f"{kind}.engine_s", "s", formulas, values, "the engine's, never below the roofline's")

    def counted(self, kernels: PhaseKernels, name: str) -> list[str]:
        """What a constant of seconds is multiplied with, for each kind of step; "0" where it isn't there."""
        candidates = ["L", "(2 * L + 1)"]
        if self.ground.config.is_moe:  # the host launches more kernels for a layer with experts
            more = SPARSE_LAUNCHES - 1 + SHARED_LAUNCHES * self.ground.config.has_shared_expert
            candidates.append(f"(L + {more:g} * L_sparse)")
        made = []
        for index, value in enumerate(kernels.terms.values[name]):
            known = {"sequences": [kernels.rows[index]], "remote_steps": ["1"]}.get(name, candidates)
            fits = [formula for formula in known if evaluate(formula, self.nodes.values) == value]
            source = "as the engine's steps are counted (roofline.timing.step)"
            leaf = "" if fits or not value else self.nodes.leaf(
                f"{kernels.keys[index]}.{name}", float(value), "count", "exact", source
            )  # fmt: skip
            made.append(fits[0] if fits else leaf or "0")
        return made

    def added(self, kernels: PhaseKernels, pairs: dict[str, str], index: int) -> list[str]:
        """Terms of constants that are added by count."""
        terms = []
        for constant, count in pairs.items():
            formula = self.counted(kernels, count)[index]
            if formula != "0":
                terms.append(f"{self.constant(constant)} * {formula}")
        return terms

    def steps(self, kernels: PhaseKernels, made: dict[str, list[str]]) -> list[str]:
        """Names of the seconds of each kind of step."""
        import numpy as np

        value: Any = step_seconds(kernels.terms, self.engine, *self.engine.scheme(scheme_key(self.scheme, self.chip)))
        device_counts = {
            "layer_s": "layers",
            "prefill_layer_s": "prefill_layers",
            "collective_call_s": "collective_calls",
            "packed_call_s": "packed_calls",
        }
        host_counts = {"host_layer_s": "eager_layers", "prefill_host_layer_s": "prefill_layers"}
        formulas = []
        for index in range(kernels.count):
            kinds = [names[index] for names in made.values()]
            device = self.node(kernels, index, "device_s", [*kinds, *self.added(kernels, device_counts, index)],
                               "kernels and what the device idles between them")  # fmt: skip
            waits = self.added(kernels, host_counts, index)
            busy = device
            if waits:
                host = self.node(kernels, index, "host_s", waits, "the host launches layer by layer")
                top, low, p = f"max({device}, {host})", f"min({device}, {host})", f"{SHARPNESS:g}"
                formula = f"{top} * (1 + ({low} / {top}) ** {p}) ** (1 / {p})"
                busy = self.nodes.derive(f"{kernels.keys[index]}.busy_s", formula, "s", "a smooth maximum of the two")
            more = self.added(kernels, {"sequence_s": "sequences", "remote_step_s": "remote_steps"}, index)
            formulas.append(total_of([busy, self.constant("step_s"), *more]))
        return kernels.each("seconds", "s", formulas, np.broadcast_to(value, kernels.steps.times.shape), "one step")

    def node(self, kernels: PhaseKernels, index: int, base: str, terms: list[str], source: str) -> str:
        return self.nodes.derive(f"{kernels.keys[index]}.{base}", total_of(terms), "s", source)
