"""The kernels of each kind of step of a phase: seconds and floors by kind, as nodes of a derivation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from qwenjax.ops import WEIGHTS, Op, as_product, ops_of
from roofline.explain.bound import figure_leaf
from roofline.explain.counts import Ground, letters_of, scoped, share_of, windowed_pairs, windows_of
from roofline.explain.derivation import evaluate, total_of
from roofline.explain.kernels import Constants, Recorder
from roofline.timing.step import GROWN_FRACTION, SECONDS, SHARED_ROWS, Steps, Terms, collective_kinds

_STEP: Final = "roofline.timing.step"
_HEADS: Final = "N / tp"
_KV_HEADS: Final = "max(1, K / tp)"  # of one device; fewer than tp are repeated
_CACHE_ROW: Final = f"2 * {_KV_HEADS} * H * bits.kv / 8"  # bytes of one position of one layer


class PhaseKernels:
    """Kernel seconds and their floor by kind, of the kinds of steps of one phase.

    A number that all kinds of steps share is one node of the phase, else each kind has its own.
    """

    def __init__(self, ground: Ground, key: str, steps: Steps, recorder: Recorder, constants: Constants) -> None:
        self.ground, self.nodes, self.key = ground, ground.nodes, key
        self.steps, self.recorder, self.constants = steps, recorder, constants
        self.terms: Terms = recorder.terms()
        self.count = len(steps.times)
        self.keys = [key if self.count == 1 else f"{key}_{index + 1}" for index in range(self.count)]
        self.decodes = key.endswith("decode")
        self.chip, self.layout, self.config = recorder.chip, recorder.layout, ground.config
        self.speed = figure_leaf(self.nodes, self.chip, "peak_bandwidth_bytes_per_s")

    def each(
        self, base: str, unit: str, formulas: Sequence[str], values: Any, source: str, inputs: Sequence[str] = ()
    ) -> list[str]:
        """A node for each kind of step, or one for all where the formula is the same; computed if it calls a kernel."""
        names = []
        for index, formula in enumerate(formulas):
            name = f"{self.key if len(set(formulas)) == 1 else self.keys[index]}.{base}"
            value = float(values[index])
            if "_s(" in formula:
                self.nodes.compute(name, formula, value, unit, source, inputs)
            elif math.isclose(evaluate(formula, self.nodes.values), value, rel_tol=1e-11, abs_tol=1e-300):
                self.nodes.derive(name, formula, unit, source, value)
            else:
                read = [part for part in ("B", "prompt", "output") if part in self.nodes.values]
                self.nodes.compute(name, f"step_terms({', '.join(read)})", value, unit, f"{source}; {_STEP}", inputs)
            names.append(name)
        return names

    def leaves(self, field: str, candidates: Callable[[int], Sequence[str]], source: str) -> list[str]:
        """The size of a step that the schedule gives, by the first candidate formula that is right."""
        values = getattr(self.steps, field)
        alike = len({float(value) for value in values}) == 1
        keys = [self.key] * self.count if alike else self.keys
        return [
            self.nodes.same(f"{keys[index]}.{field}", _whole(values[index]), "count", candidates(index), source)
            for index in range(self.count)
        ]

    def sizes(self, schedule: str) -> None:
        """Adds how often each kind of step runs, and what it takes."""
        parts = self.count
        if self.decodes:
            text = (
                f"runs of this kind; decode steps are timed at {parts} contexts, between which time is all but linear"
            )
            self.times = self.leaves("times", lambda index: (f"steps / {parts}",), text)
            middle = "prompt + 1 + ({0} + 0.5) * steps / {1} - 0.5"
            text = "tokens attended, on average over these runs"
            self.context = self.leaves("context", lambda index: (middle.format(index, parts),), text)
            self.tokens = self.rows = ["B"] * parts
            return
        self.times = self.leaves("times", lambda index: (), f"runs of this kind; {schedule}")
        self.prompts = self.leaves("prompts", lambda index: ("B",), f"prompts in the step; {schedule}")
        self.chunk = self.leaves("chunk", lambda index: ("prompt",), f"tokens of each prompt; {schedule}")
        self.reached = self.leaves("reached", lambda index: ("prompt",), "tokens of each prompt attended after it")
        formulas = [f"{a} * {b}" for a, b in zip(self.prompts, self.chunk, strict=True)]
        self.tokens = self.each("tokens", "count", formulas, self.steps.tokens, "new tokens of the step")
        self.rows = self.prompts

    def by_kind(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Names of kernel seconds and of their floor, by kind, an entry for each kind of step."""
        products = [op for op in ops_of(self.config) if op.kind == "matmul" and op.name in self.recorder.pieces]
        rest = [
            op for op in ops_of(self.config) if op.kind in ("elementwise", "gather") and op.name in self.recorder.pieces
        ]
        taken, floors = self._products([self._product(op) for op in products])
        made = self._elementwise(rest)
        taken["elementwise"], floors["elementwise"] = made
        for kind in SECONDS:
            if kind not in taken and self.terms.values[kind].any():
                taken[kind], floors[kind] = self._other(kind)
        return taken, floors

    def _product(self, op: Op) -> tuple[list[str], list[str], list[str]]:
        """Seconds of one product over its layers, the part that waits for weights, and the floor."""
        ground, (values, least) = self.ground, self.recorder.pieces[op.name]
        product, tokens = as_product(op.einsum), self.rows if "U" in op.einsum else self.tokens
        n, k = (
            letters_of(part, "", op.block) + share_of(ground, part)[1] for part in (product.columns, product.contracted)
        )
        width = self.layout.weight_bits.get(op.name, 16.0)
        bits = self._bits(op, width)
        dtype = self.layout.compute_dtype if width < 16 else "bfloat16"
        dtype = dtype if dtype in self.chip.peak_flops_per_s else "float16"
        group = "float8_gemm" if dtype not in ("bfloat16", "float16") else "gemm"
        peak = self._peak(dtype)
        read = [*self.constants.of(group), peak, self.speed]
        sums = {kind: values[f"products_{kind}"] for kind in ("memory", "compute")}
        both, floor = sums["memory"] + sums["compute"], least["products_memory"] + least["products_compute"]
        source = f"tiles and waves of its kernels, all layers (roofline.timing.kernels.gemm_s, {dtype})"
        function = f"gemm_{dtype}_rows_apart_s" if self.layout.ways.rows_apart else f"gemm_{dtype}_s"
        calls = [scoped(ground, f"{function}({one}, {n}, {k}, {bits})", op.scope) for one in tokens]
        seconds = self.each(f"{op.name}.kernel_s", "s", calls, both, source, read)
        bias = f" + 2 * {n}" if op.name == "qkv_proj" and self.config.qkv_bias else ""
        memory = f"(({n} * {k} * {bits} / 8{bias}) / {self.speed})"
        compute = [f"(2 * {one} * {n} * {k} / {peak})" for one in tokens]
        shares = [f"{memory} ** 2 / ({memory} ** 2 + {one} ** 2)" for one in compute]
        source = "the part of it that waits for weights, by the roofline's times of both"
        waiting = self.each(f"{op.name}.memory_share", "1", shares, sums["memory"] / both, source)
        floors = [scoped(ground, f"max({memory}, {one})", op.scope) for one in compute]
        return seconds, waiting, self.each(f"{op.name}.floor_s", "s", floors, floor, "the roofline's time of it")

    def _products(
        self, made: Sequence[tuple[list[str], list[str], list[str]]]
    ) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        taken: dict[str, list[str]] = {}
        floors: dict[str, list[str]] = {}
        for kind, part in (("products_memory", "{1}"), ("products_compute", "(1 - {1})")):
            for into, place, values in ((taken, 0, self.terms.values), (floors, 2, self.terms.least)):
                formulas = [
                    total_of(f"{{0}} * {part}".format(op[place][index], op[1][index]) for op in made)
                    for index in range(self.count)
                ]
                what = "kernel_s" if place == 0 else "floor_s"
                source = "all matrix products, weighted by what they wait for"
                into[kind] = self.each(f"{kind}.{what}", "s", formulas, values[kind], source)
        return taken, floors

    def _bits(self, op: Op, width: float) -> str:
        own = {f"bits.{weight.name}" for weight in WEIGHTS if weight.leaf in op.leaves}
        tensors = [name for name in self.nodes.values if name.startswith("bits.")]
        tensors = sorted(set(tensors) - {"bits.activation", "bits.kv"}, key=lambda name: (name not in own, name))
        source = "mean stored bits of its weights, scales included"
        close = [name for name in tensors if math.isclose(self.nodes.values[name], width, rel_tol=1e-12)]
        return close[0] if close else self.nodes.leaf(f"engine.bits.{op.name}", width, "bit", "exact", source)

    def _peak(self, dtype: str) -> str:
        rates = self.chip.peak_flops_per_s
        best = max((name for name in ("bfloat16", "float16", dtype) if name in rates), key=lambda name: rates[name])
        return figure_leaf(self.nodes, self.chip, f"peak_flops_per_s.{best}")

    def _elementwise(self, ops: Sequence[Op]) -> tuple[list[str], list[str]]:
        read = [*self.constants.of("elementwise", "norm_"), self.speed]
        made = [self._moved(op, read) for op in ops]
        source = "norms, rotations, activations and the like"
        sums = [total_of(names[index] for names in made) for index in range(self.count)]
        taken = self.each("elementwise.kernel_s", "s", sums, self.terms.values["elementwise"], source)
        floors = [f"({one} * {_CACHE_ROW} * L + {one} * D * 2 / tp) / {self.speed}" for one in self.tokens]
        source = "writing the cache and looking tokens up, at the peak"
        return taken, self.each("elementwise.floor_s", "s", floors, self.terms.least["elementwise"], source)

    def _moved(self, op: Op, read: Sequence[str]) -> list[str]:
        """Seconds of a kernel that moves activations, over its layers."""
        inputs, outputs = op.einsum.split("->")
        operands = inputs.split(",")
        operands = operands[:1] if op.kind == "gather" else operands[: len(operands) - len(op.leaves)]
        tokens = self.rows if "U" in op.einsum else self.tokens
        calls = []
        for one in tokens:
            terms = []
            for letters in (*operands, *outputs.split(",")):
                factors = letters_of(letters, "", op.block, skip="BTU")
                term = one if factors == "1" else f"{one} * {factors}"
                terms.append(term + share_of(self.ground, letters)[1])
            calls.append(scoped(self.ground, f"elementwise_s(2 * ({total_of(terms)}))", op.scope))
        source = "launch, and bytes through L2 or memory, all layers (roofline.timing.kernels.elementwise_s)"
        values = self.recorder.pieces[op.name][0]["elementwise"]
        return self.each(f"{op.name}.kernel_s", "s", calls, values, source, read)

    def _other(self, kind: str) -> tuple[list[str], list[str]]:
        make = {
            **dict.fromkeys(("experts", "experts_tuned"), self._experts),
            **dict.fromkeys((kind for kind in SECONDS if kind.startswith("collectives")), self._collectives),
        }
        calls, floors, read, text = make.get(kind, self._attention)(kind)
        values, least = self.terms.values[kind], self.terms.least[kind]
        taken = self.each(f"{kind}.kernel_s", "s", calls, values, f"{text}, all layers", read)
        return taken, self.each(f"{kind}.floor_s", "s", floors, least, "the roofline's time of it")

    def _attention(self, kind: str) -> tuple[list[str], list[str], list[str], str]:
        peak, read = self._peak("bfloat16"), [*self.constants.of("attention"), self.speed]
        text = "thread blocks over keys and queries (roofline.timing.attention)"
        make = self._decoding if self.decodes else self._prefilling
        made = [[make(index, peak, *window) for window in windows_of(self.ground)] for index in range(self.count)]
        calls, floors = ([total_of(one[place] for one in windows) for windows in made] for place in (0, 1))
        return calls, floors, [*read, peak], text

    def _decoding(self, index: int, peak: str, window: str, layers: str) -> tuple[str, str]:
        """Call and floor of the layers with one window, of decode steps."""
        context, stored = self.context[index], _KV_HEADS
        seen = f"min({context}, {window})" if window else context
        copied = _HEADS if self.layout.ways.repeats_kv or not self.layout.ways.flash_decode else stored
        work, moved = f"4 * B * {_HEADS} * H * {seen}", f"B * {seen} * {_CACHE_ROW}"
        call = f"attention_decode_s(B, {seen}, {_HEADS}, {copied}, H, bits.kv / 8)"
        if self.layout.ways.repeats_kv:
            call = f"({call} + 2 * {moved} / ({self.speed} * {GROWN_FRACTION}))"
        call = f"{call} * {layers}"
        return call, f"max({work} / {peak}, {moved} / {self.speed}) * {layers}"

    def _prefilling(self, index: int, peak: str, window: str, layers: str) -> tuple[str, str]:
        """The same of steps that take prompts; few new tokens share passes over the cache, as in a decode step."""
        prompts, chunk, reached = self.prompts[index], self.chunk[index], self.reached[index]
        seen = f"min({reached}, {chunk} + {window} - 1)" if window else reached
        shape = f"{_HEADS}, {_KV_HEADS}, H, bits.kv / 8"
        passes = f"max(1, {chunk} * {_HEADS} / {_KV_HEADS} / {SHARED_ROWS})"
        shared = f"attention_decode_s({prompts}, {seen}, {shape}) * {passes}"
        call = f"min(attention_prefill_s({prompts}, {chunk}, max({seen}, {chunk}), {shape}), {shared}) * {layers}"
        pairs = f"({chunk} * {reached} - {chunk} * ({chunk} - 1) / 2)"
        if window:
            pairs = f"({windowed_pairs(reached, window)} - {windowed_pairs(f'({reached} - {chunk})', window)})"
        work, moved = f"4 * {prompts} * {_HEADS} * H * {pairs}", f"{prompts} * {seen} * {_CACHE_ROW}"
        return call, f"max({work} / {peak}, {moved} / {self.speed}) * {layers}"

    def _experts(self, kind: str) -> tuple[list[str], list[str], list[str], str]:
        width = self.layout.weight_bits.get("experts_gate_up_proj", 16.0)
        op = next(op for op in ops_of(self.config) if op.name == "experts_gate_up_proj")
        bits, peak, narrow = self._bits(op, width), self._peak("bfloat16"), self._peak(self.layout.compute_dtype)
        # Devices share each expert's width, or the experts.
        each, whole = ("F_experts", " / tp") if self.layout.expert_parallel else ("F_experts / tp", "")
        fused = [self.layout.ways.fused_experts and tokens <= 1 for tokens in self.steps.tokens]
        calls, floors, shares, values = [], [], [], []
        for index, (tokens, distinct) in enumerate(zip(self.tokens, self._distinct(), strict=True)):
            rows = f"{tokens} * A{whole}"
            work, moved = f"6 * {rows} * D * {each} / {narrow}", f"3 * {distinct}{whole} * D * {each} * {bits} / 8"
            memory = f"{moved} / {self.speed}"
            here = f"max({distinct}{whole}, 1)"
            if fused[index]:
                into, out = f"2 * {each} * A{whole}, D", f"D * A{whole}, {each}"
                calls.append(f"(gemm_bfloat16_s(1, {into}, {bits}) + gemm_bfloat16_s(1, {out}, {bits}))")
            else:
                calls.append(f"moe_s({tokens}, D, {each}, A, E{whole}, {here}, {bits}, {rows})")
            floors.append(f"max({work}, {memory}) * L_sparse")
            shares.append(f"({work}) ** 2 / (({memory}) ** 2 + ({work}) ** 2)")
            values.append(evaluate(shares[-1], self.nodes.values))
        if narrow != peak:  # the kernels were measured in 16 bits
            source = "the part of it that waits for arithmetic, which narrow operands speed up"
            faster = self.each("experts.compute_share", "1", shares, values, source)
            calls = [
                f"{call} * (1 - {part} * (1 - {peak} / {narrow}))" for call, part in zip(calls, faster, strict=True)
            ]
        floored = [f"max({call} * L_sparse, {floor})" for call, floor in zip(calls, floors, strict=True)]
        read = [*self.constants.of("gemm" if all(fused) else "moe"), peak, self.speed]
        text = "grouped products with sorting, activation and sum (roofline.timing.kernels.moe_s)"
        if any(fused):
            text = "one token's experts as one product, in each of two (roofline.timing.kernels.gemm_s)"
        return floored, floors, read, text

    def _distinct(self) -> list[str]:
        """Names of the distinct experts that a layer reads, for each kind of step."""
        if self.layout.experts:
            return [f"{self.key.removeprefix('engine.')}.distinct"] * self.count
        total, chosen = self.config.num_experts, self.config.num_experts_per_tok
        made = total * (1 - (1 - chosen / total) ** self.steps.tokens)
        formulas = [f"E * (1 - (1 - A / E) ** {tokens})" for tokens in self.tokens]
        source = "distinct experts that a layer is expected to read, uniform routing"
        return self.each("distinct", "count", formulas, made, source)

    def _collectives(self, kind: str) -> tuple[list[str], list[str], list[str], str]:
        peer = self.chip.peer_link
        assert peer is not None
        link = figure_leaf(self.nodes, self.chip, f"links.{peer.name}.one_way_bytes_per_s")
        read = [*self.constants.of("allreduce"), link]
        calls, floors, (small, _, limit) = [], [], collective_kinds(peer)
        for index, (tokens, rows) in enumerate(zip(self.tokens, self.rows, strict=True)):
            payload = f"({tokens} * D * 2)"
            large = self.steps.tokens[index] * self.config.hidden_size * 2.0 >= limit
            least = f"2 * (tp - 1) / tp * {payload} / {link}"
            logits = "" if kind != small else f" + {rows} * V * 2 * (tp - 1) / tp / {link}"
            if large == (kind != small):
                shared = " * tp * tp / (4 * (tp - 1))" if kind == "collectives_staged" else ""
                calls.append(f"max(allreduce_s({payload}, tp){shared}, {least}) * (2 * L + 1){logits}")
                floors.append(f"{least} * (2 * L + 1){logits}")
            else:
                calls.append(f"0{logits}")
                floors.append(f"0{logits}")
        return calls, floors, read, "all-reduces of a layer's sums, and the logits gathered"


def _whole(value: Any) -> float:
    number = float(value)
    return int(number) if number.is_integer() else number
