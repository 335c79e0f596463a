"""A prediction's derivation: every number from the config's integers to tokens/s, with its kind and its source.

`explain_step` and `explain_request` give the nodes in the order in which they follow from each other. Leaves come from
the config, the command line, the chip's file and the profile; what is derived has a formula over the names before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.ops import Op, layers_of, ops_of
from qwenjax.sharding import Mesh
from roofline.comms import CommRow
from roofline.count import Attention, DtypePolicy, Experts, Logits, count_step
from roofline.explain.counts import (
    Ground,
    explain_config,
    explain_context,
    explain_op,
    explain_step_letters,
    letters_of,
)
from roofline.explain.derivation import Derivation, Node, total_of
from roofline.hardware import Figure, Hardware
from roofline.predict import Bandwidth, OpTime, StepTime, predict_step

_KINDS = {"derived": "datasheet", "reported elsewhere": "estimate"}  # of figures, in the words of a derivation
_COLLECTIVES = {"all-reduce": "BTD", "all-gather": "BUV", "all-to-all": "BTAD"}
MOMENTS = ("decode_first", "decode_middle", "decode_last")


@dataclass(frozen=True)
class Bound:
    """Names of the roofline's times of a request."""

    ttft_s: str
    decode_s: str
    e2e_s: str


def explain_step(
    config: ModelConfig,
    step: Step,
    hardware: Hardware | None,
    policy: DtypePolicy,
    *,
    origin: str = "",
    attention: Attention = "causal",
    logits: Logits = "last",
    experts: Experts = "expected",
    mesh: Mesh | None = None,
    bandwidth: Bandwidth = "peak",
) -> tuple[Node, ...]:
    """The derivation of one step's least time, or of its FLOPs and bytes without a chip."""
    mesh = mesh or Mesh()
    ground = Ground(Derivation(), config, policy, mesh, origin or "config.json", attention, logits, experts)
    ground.nodes.leaf("B", step.batch, "count", "given", "--batch: sequences in the step")
    explain_config(ground)
    times = Times(ground, hardware, bandwidth)
    if hardware is None:
        rows = count_step(
            config, step, attention=attention, logits=logits, experts=experts, mesh=mesh, **stored_as(policy)
        )
        times.count(rows, step)
    else:
        times.step("step", step)
    return tuple(ground.nodes.nodes.values())


def stored_as(policy: DtypePolicy) -> dict[str, Any]:
    """The arguments that say how weights and cache are stored."""
    return {"dtype": None if policy.scheme else policy.weight, "kv_dtype": policy.kv, "weights": policy.scheme}


def figure_leaf(nodes: Derivation, chip: Hardware, name: str) -> str:
    """A chip's figure as a leaf."""
    figure: Figure = chip.figures[name]
    source = ", ".join(part for part in (figure.source, figure.date, figure.note) if part)
    source = source.replace("; ", ", ")  # what stands before a semicolon is told beside the number
    if figure.kind in _KINDS:
        source = f"{figure.kind}: {source}"
    return nodes.leaf(f"chip.{name}", figure.value, figure.unit, _KINDS.get(figure.kind, figure.kind), source)


class Times:
    """The roofline's times of steps and requests on one chip, added to a ground's nodes."""

    def __init__(self, ground: Ground, hardware: Hardware | None, bandwidth: Bandwidth = "peak") -> None:
        self.ground, self.nodes, self.bandwidth = ground, ground.nodes, bandwidth
        self.chip, self.link, self.speed, self.rate = hardware, "", "", ""
        if hardware:
            self.speed, self.rate = self._bandwidth(hardware), self._rate(hardware)

    def _bandwidth(self, chip: Hardware) -> str:
        if isinstance(self.bandwidth, str):
            return figure_leaf(self.nodes, chip, f"{self.bandwidth}_bandwidth_bytes_per_s")
        return self.nodes.leaf("bandwidth", self.bandwidth, "B/s", "given", "--bandwidth")

    def _rate(self, chip: Hardware) -> str:
        policy = self.ground.policy
        narrow = (policy.weight,) if policy.scheme is None else policy.scheme.compute
        dtypes = [dtype for dtype in dict.fromkeys((*narrow, policy.activation)) if dtype in chip.peak_flops_per_s]
        names = [figure_leaf(self.nodes, chip, f"peak_flops_per_s.{dtype}") for dtype in dtypes]
        if not names:
            chip.flops_per_s(policy.activation)  # says which dtypes are known
        if len(names) == 1:
            return names[0]
        source = "narrow weights multiply at the faster of their own and the activations' rate"
        return self.nodes.derive("rate", f"max({', '.join(names)})", "FLOP/s", source)

    def predicted(self, step: Step) -> StepTime:
        ground, chip = self.ground, self.chip
        assert chip is not None
        return predict_step(
            ground.config, step, chip, attention=ground.attention, logits=ground.logits, experts=ground.experts,
            tp=ground.mesh.tp, ep=ground.mesh.ep, bandwidth=self.bandwidth, **stored_as(ground.policy),
        )  # fmt: skip

    def count(self, rows: Any, step: Step) -> None:
        """FLOPs and bytes of a step, without a chip."""
        explain_step_letters(self.ground, "step", step)
        explain_context(self.ground, "step", step)
        ops = {op.name: op for op in ops_of(self.ground.config)}
        made = [explain_op(self.ground, ops[row.op], row, "step", "step") for row in rows]
        self.nodes.derive("step.flops", total_of(flops for flops, _ in made if flops), "FLOP", "all ops")
        self.nodes.derive("step.bytes", total_of(moved for _, moved in made if moved), "B", "all ops")

    def step(self, prefix: str, step: Step, common: str = "") -> tuple[str, str, list[str]]:
        """Names of a step's time, of the part that no context changes, and of attention's times.

        common: where ops that don't attend are kept, for steps that share them.
        """
        shared, times = common or prefix, self.predicted(step)
        explain_step_letters(self.ground, shared, step)
        explain_context(self.ground, prefix, step)
        ops = {op.name: op for op in ops_of(self.ground.config)}
        fixed: list[str] = []
        attended: list[str] = []
        for op_time in times.ops:
            op = ops[op_time.row.op]
            attends = op.kind == "attention"
            name = self.op(op, op_time, prefix if attends else shared)
            if name:
                (attended if attends else fixed).append(name)
        fixed += self.collectives(shared, times.comms)
        still = self.nodes.derive(f"{shared}.without_attention_s", total_of(fixed), "s", "all ops but attention")
        source = "ops run one after another, so their times add"
        total = self.nodes.derive(f"{prefix}.s", total_of([still, *attended]), "s", source, times.time_s)
        return total, still, attended

    def op(self, op: Op, times: OpTime, prefix: str) -> str:
        """Adds the counts and times of an op; its time's name, empty where it takes none."""
        flops, moved = explain_op(self.ground, op, times.row, prefix, prefix)
        parts = []
        for part, amount, rate in (("compute_s", flops, self.rate), ("memory_s", moved, self.speed)):
            if amount:
                parts.append(self.nodes.derive(f"{prefix}.{op.name}.{part}", f"{amount} / {rate}", "s", "at the peak"))
        if len(parts) < 2:
            return parts[0] if parts else ""
        source = f"the longer of the two: {times.bound}"
        return self.nodes.derive(f"{prefix}.{op.name}.s", f"max({', '.join(parts)})", "s", source, times.time_s)

    def collectives(self, prefix: str, rows: tuple[CommRow, ...]) -> list[str]:
        """Adds what one device sends in each collective and the time of all; its name, if there are any."""
        if not rows or self.chip is None or self.chip.peer_link is None:
            return []
        sent = [self._sent(prefix, row) for row in rows]
        link = figure_leaf(self.nodes, self.chip, f"links.{self.chip.peer_link.name}.one_way_bytes_per_s")
        source = "collectives, on top of the ops"
        return [self.nodes.derive(f"{prefix}.communication_s", f"({total_of(sent)}) / {link}", "s", source)]

    def _sent(self, prefix: str, row: CommRow) -> str:
        n = "ep" if row.kind == "all-to-all" else "tp"
        letters = letters_of(_COLLECTIVES[row.kind], prefix, "mlp")
        payload = self.nodes.derive(
            f"{prefix}.{row.op}.payload_bytes", f"{letters} * bits.activation / 8", "B", f"one {row.kind}",
            row.payload_bytes,
        )  # fmt: skip
        times = 2 if row.kind == "all-reduce" else 1
        way = f"{times} * ({n} - 1) / {n}" + (f" / {n}" if row.kind == "all-to-all" else "")
        counts = {
            1: "1",
            self.ground.config.num_hidden_layers: "L",
            layers_of(self.ground.config, "sparse"): "L_sparse",
        }
        source = f"sent by one device in {row.count} {row.kind}"
        formula = f"{payload} * {way} * {counts[row.count]}"
        return self.nodes.derive(f"{prefix}.{row.op}.sent_bytes", formula, "B", source, row.sent_bytes)

    def request(self, batch: int, prompt: int, output: int) -> Bound:
        """Adds the roofline's times of a prefill and the decode steps after it."""
        nodes = self.nodes
        for name, value, text in (
            ("B", batch, "--batch: requests served together"),
            ("prompt", prompt, "--prompt: tokens of each prompt"),
            ("output", output, "--output: tokens that each request makes"),
        ):
            nodes.leaf(name, value, "count", "given", text)
        explain_config(self.ground)
        for phase in ("T", "S"):
            nodes.derive(f"prefill.{phase}", "prompt", "count", "the whole prompt")
        # A counted number of distinct experts speaks of decode steps; a prefill reads what its tokens are expected to.
        counted = isinstance(self.ground.experts, int)
        first = Times(replace(self.ground, experts="expected"), self.chip, self.bandwidth) if counted else self
        prefill = first.step("prefill", Step.prefill(batch, prompt))[0]
        ttft = nodes.derive("bound.ttft_s", prefill, "s", "the prefill makes the first token")
        decode = self._decodes(batch, prompt, output)
        return Bound(ttft, decode, nodes.derive("bound.e2e_s", f"{ttft} + {decode}", "s", "least time of a request"))

    def _decodes(self, batch: int, prompt: int, output: int) -> str:
        nodes, steps = self.nodes, output - 1
        count = nodes.derive("steps", "output - 1", "count", "decode steps; the last token is never fed back")
        if not steps:
            return nodes.derive("bound.decode_s", f"0 * {count}", "s", "no decode step")
        where = ("prompt + 1", "ceil((2 * prompt + 1 + steps) / 2)", "prompt + steps")
        made = {}
        for moment, formula in zip(MOMENTS, where, strict=True):
            context = nodes.derive(f"{moment}.S", formula, "count", "tokens attended, the new one included")
            made[moment] = self.step(moment, Step.decode(batch, int(nodes.values[context])), "decode")
        _, still, first = made["decode_first"]
        formula = f"{count} * {still} + {self._attended(first, made['decode_last'][2], count)}"
        return nodes.derive("bound.decode_s", formula, "s", "all decode steps; attention grows with the context")

    def _attended(self, first: list[str], last: list[str], count: str) -> str:
        """The sum of attention's times over all steps: linear in the context unless a window cuts it off."""
        if set(self.ground.config.sliding_windows) == {None}:
            return f"{count} * ({total_of(first)} + {total_of(last)}) / 2"
        terms = []
        for name in first:
            op = name.split(".")[1]
            flops, moved = (self._inlined(f"decode_first.{op}.{part}") for part in ("flops", "bytes"))
            terms.append(f"total(S, decode_first.S, decode_last.S, max({flops} / {self.rate}, {moved} / {self.speed}))")
        return total_of(terms)

    def _inlined(self, name: str) -> str:
        """A node's formula as a function of S: what depends on the context is put in its place."""
        formula = self.nodes.nodes[name].formula
        for part in ("pairs", "rows"):
            inner = f"decode_first.{part}"
            formula = formula.replace(inner, f"({self.nodes.nodes[inner].formula})") if inner in formula else formula
        return formula.replace("decode_first.S", "S")
