"""A vLLM startup log beside our own account of the same device: each term, the difference and its likely cause.

Two kinds of rows. Identities of the engine's own numbers with the architecture (bytes of weights, bytes of a cached
token, tokens in the pool, concurrency, the budget and its parts) must hold and decide whether the log agrees. What is
predicted by the rules of the version (activations, memory outside PyTorch, the pool) is set beside and only explained.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose

from qwenjax.config import ModelConfig
from qwenjax.sharding import Mesh, check_mesh
from roofline.count import DtypePolicy, count_kv_bytes_per_token, count_weight_bytes
from roofline.engine_run import EngineRun
from roofline.findings import Finding
from roofline.hardware import Hardware
from roofline.memory import BLOCK_TOKENS, kv_tokens, memory_of_one_log
from roofline.vllm_log import GIB, Reading, StartupLog
from roofline.vllm_memory import EngineMemory, engine_memory, forward_bytes
from roofline.weight_schemes import stored_weight_bytes

WEIGHT_TOLERANCE = 0.03  # engines add tables, pad, and lay quantised weights out anew
_RANKS_DIFFER = 0.2  # of a pool, between the ranks of one engine
_IDENTITY = "arithmetic on the log's own lines"


def account_of_log(
    config: ModelConfig, log: StartupLog, run: EngineRun, hardware: Hardware | None = None
) -> LogAccount:
    """The log's memory beside our plan of the device, by the rules of its version where the device is given."""
    mesh = check_mesh(config, Mesh(run.tp))
    needs = None
    if hardware is not None and run.version_text:
        length = run.max_model_len
        needs = engine_memory(
            config, hardware, run.settings, max_model_len=length, weights=run.weights, dtype="bfloat16", mesh=mesh
        )
    elif hardware is not None:
        needs = memory_of_one_log(config, run.settings, DtypePolicy(), run.weights, mesh)
    return LogAccount(config, log, run, mesh, hardware, needs)


class LogAccount:
    """One log's memory: `findings` beside ours, in the order of the budget, and the terms that they are made of."""

    def __init__(
        self,
        config: ModelConfig,
        log: StartupLog,
        run: EngineRun,
        mesh: Mesh,
        hardware: Hardware | None,
        needs: EngineMemory | None,
    ) -> None:
        self.config, self.log, self.run, self.mesh = config, log, run, mesh
        self.hardware, self.needs = hardware, needs
        self.rules = "rules of the version" if run.version_text else "one log's overhead: the version isn't known"
        self.total = log.value("total_bytes") or (hardware.usable_memory_bytes if hardware else None)
        self.utilization = log.value("gpu_memory_utilization") or (needs.gpu_memory_utilization if needs else None)
        self.per_token = count_kv_bytes_per_token(config, run.kv_dtype, mesh) / run.pp
        self.weights = (
            stored_weight_bytes(config, run.weights, mesh) if run.weights else count_weight_bytes(config, mesh=mesh)
        ) // run.pp

    def findings(self) -> tuple[Finding, ...]:
        """Every term that the log says or that can be set beside it; sizes in bytes, per device."""
        rows = (row for part in (self.budget, self.parts, self.pool, self.cache) for row in part())
        return tuple(row for row in rows if row.engine is not None)

    def budget(self) -> Iterator[Finding]:
        total = self.log.get("total_bytes")
        if total is not None and self.hardware is not None:
            card = self.hardware.usable_memory_bytes
            same = isclose(card, total.value, rel_tol=0.002)
            cause = "the same card" if same else f"another card than {self.hardware.id}, or its driver keeps more back"
            yield Finding("device memory", "B", total.value, card, cause, self.hardware.usable_memory_source)
        budget = self._budget_of_log()
        if budget is None or self.total is None or self.utilization is None:
            return
        reading, where = budget
        ours = self.total * self.utilization
        tolerance = (reading.step + (total.step if total else 0.0)) / max(reading.value, 1.0)
        cause = f"{where}; ours is {self.total / GIB:.2f} GiB x {self.utilization:g}"
        if abs(ours - reading.value) > tolerance * reading.value:
            implied = reading.value / self.total
            cause += f". They imply a utilisation of {implied:.3f}"
        # Summed parts lack what the log doesn't print, so only a printed budget must agree.
        kind = "exact" if where == "printed" and total is not None else "estimate"
        yield Finding("budget", "B", reading.value, ours, cause, _IDENTITY, kind, tolerance)

    def _budget_of_log(self) -> tuple[Reading, str] | None:
        printed = self.log.get("budget_bytes")
        if printed is not None:
            return printed, "printed"
        parts = self.own_parts()
        pool = self.log.get("kv_pool_bytes")
        if pool is None or parts is None:
            return None
        value = pool.value + sum(part.value for part in parts.values())
        step = pool.step + sum(part.step for part in parts.values())
        words = " + ".join([f"{part.value / GIB:.2f} {name}" for name, part in parts.items()])
        return Reading(value, step, 0, "", 0), f"{words} + {pool.value / GIB:.2f} KV pool, GiB"

    def own_parts(self) -> dict[str, Reading] | None:
        """What the engine says it took out of its budget, without graphs; None where a part is missing."""
        log = self.log
        consumed, weights, other = log.get("consumed_bytes"), log.get("weight_bytes"), log.get("non_torch_bytes")
        activations = log.get("activation_bytes")
        if activations is None:
            return None
        if consumed is not None:
            return {"weights and non-torch": consumed, "activations": activations}
        if weights is None or other is None:
            return None
        return {"weights": weights, "non-torch": other, "activations": activations}

    def parts(self) -> Iterator[Finding]:
        yield from self._weight_rows()
        activations = self.log.get("activation_bytes")
        if activations is not None:
            yield self._activation_row(activations)
        yield from self._graph_rows()

    def _weight_rows(self) -> Iterator[Finding]:
        weights, consumed = self.log.get("weight_bytes"), self.log.get("consumed_bytes")
        source = f"{self.run.weights.name} weights" if self.run.weights else "bfloat16 weights of the architecture"
        if weights is not None:
            cause = self._weight_cause(weights.value)
            tolerance = WEIGHT_TOLERANCE
            yield Finding("weights", "B", weights.value, self.weights, cause, source, "exact", tolerance)
        ours = self.term("non-torch")
        if consumed is not None:
            rest = consumed.value - self.weights
            both = None if ours is None else self.weights + ours
            cause = f"{rest / GIB:.2f} GiB are not weights: CUDA libraries, communication, the runner's buffers"
            yield Finding("weights and non-torch", "B", consumed.value, both, cause, source)
            if weights is None:
                yield Finding("non-torch, less our weights", "B", rest, ours, self._non_torch_cause(), self.rules)
        other = self.log.get("non_torch_bytes")
        if other is not None:
            yield Finding("non-torch", "B", other.value, ours, self._non_torch_cause(), self.rules)

    def _weight_cause(self, engine: float) -> str:
        ratio = engine / self.weights
        if abs(ratio - 1) <= WEIGHT_TOLERANCE:
            return "RoPE tables and padding come with the weights" if ratio > 1 else "the same weights"
        for devices in (2, 4, 8, 16):
            if isclose(ratio, 1 / devices, rel_tol=WEIGHT_TOLERANCE):
                return f"1/{devices} of ours: tensor parallelism over {devices} (--tp {devices}), or narrow weights"
        if ratio < 1:
            bits = 16 * ratio
            return f"{ratio:.2f} of ours, {bits:.1f} bits a weight: quantised (--weights), or another model"
        return f"{ratio:.2f} times ours: another model, wider weights, or a draft model loaded too"

    def _non_torch_cause(self) -> str:
        return "depends on driver, libraries and links; ours is what other logs of such devices say"

    def _activation_row(self, activations: Reading) -> Finding:
        ours = self.term("activations")
        one = forward_bytes(self.config, 1, "bfloat16", self.mesh)
        tokens = activations.value / one
        logits = 256 * self.config.vocab_size
        cause = (
            f"as much as a step of {tokens:,.0f} tokens, or {activations.value / logits:.0f} B a logit of 256 sequences"
        )
        if self.needs is not None and ours is not None and abs(ours / activations.value - 1) <= 0.1:
            stated = self.log.whole("max_num_batched_tokens") is not None
            inferred = not stated and self.run.settings.max_num_batched_tokens is not None
            cause = self.needs.term("activations").source
            cause += ", which the log doesn't state: read from this figure" if inferred else ""
        if ours is None:
            ours = forward_bytes(self.config, self.log.whole("max_num_batched_tokens") or round(tokens), mesh=self.mesh)
        return Finding("activations", "B", activations.value, ours, cause, self.rules)

    def _graph_rows(self) -> Iterator[Finding]:
        actual, estimated = self.log.get("graph_bytes"), self.log.get("graph_estimate_bytes")
        outside = "outside the budget" if self.graphs_outside() else "in the budget by the estimate before capture"
        if estimated is not None:
            ours = self.term("CUDA graphs")
            cause = "in the budget" if not self.graphs_outside() else "profiled and not applied"
            yield Finding("CUDA graphs, estimated", "B", estimated.value, ours, cause, self.rules)
        if actual is not None:
            yield Finding("CUDA graphs, captured", "B", actual.value, None, outside, _IDENTITY)

    def graphs_outside(self) -> bool:
        """Whether the log's own numbers leave graphs out of the budget; by the version's rules where they don't say."""
        closes = self.closes()
        if closes is not None:
            return closes == "without graphs"
        return self.needs is None or not self.needs.term("CUDA graphs").in_budget if self._has_graphs() else True

    def _has_graphs(self) -> bool:
        return self.needs is not None and any(term.name == "CUDA graphs" for term in self.needs.terms)

    def closes(self) -> str | None:
        """With or without graphs: what makes budget less parts equal the pool, in how finely they are printed."""
        pool, parts, graphs = self.log.get("kv_pool_bytes"), self.own_parts(), self.graph_estimate()
        printed = self.log.get("budget_bytes")
        budget = printed.value if printed else (self.total or 0) * (self.utilization or 0)
        if pool is None or parts is None or not budget:
            return None
        slack = pool.step + sum(part.step for part in parts.values()) + 0.01 * GIB
        rest = budget - sum(part.value for part in parts.values())
        if abs(rest - pool.value) <= slack:
            return "without graphs"
        return "with graphs" if graphs and abs(rest - graphs - pool.value) <= slack else None

    def graph_estimate(self) -> float | None:
        return self.log.value("graph_estimate_bytes") or self.log.value("graph_bytes")

    def pool(self) -> Iterator[Finding]:
        pool = self.log.get("kv_pool_bytes")
        if pool is None:
            return
        parts, printed = self.own_parts(), self.log.get("budget_bytes")
        budget = printed.value if printed else (self.total or 0) * (self.utilization or 0)
        if parts is not None and budget:
            closes = self.closes()
            graphs = (self.graph_estimate() or 0.0) if closes == "with graphs" else 0.0
            rest = budget - sum(part.value for part in parts.values()) - graphs
            slack = pool.step + sum(part.step for part in parts.values()) + 0.01 * GIB
            cause = f"budget less its own parts, {closes}" if closes else "its parts don't make up the budget"
            tolerance = slack / max(abs(pool.value), slack)
            yield Finding("KV pool from its own parts", "B", pool.value, rest, cause, _IDENTITY, "exact", tolerance)
        predicted = self._predicted_pool()
        if predicted is not None:
            yield Finding("KV pool predicted", "B", pool.value, predicted, self._largest_delta(), self.rules)

    def _predicted_pool(self) -> float | None:
        if self.needs is None or self.total is None or self.utilization is None:
            return None
        others = sum(term.num_bytes for term in self.needs.terms if term.in_budget and term.name != "weights")
        return self.total * self.utilization - others - self.weights

    def _largest_delta(self) -> str:
        """Which term the difference of the pool comes from most."""
        rows = [row for row in (*self._weight_rows(), *self.parts()) if row.delta is not None]
        named = {row.term: row.delta for row in rows if row.term != "weights and non-torch" and row.delta is not None}
        if not named:
            return "the log doesn't say the other terms"
        term = max(named, key=lambda name: abs(named[name]))
        return f"of the terms in the log, {term} differ most, ours by {named[term] / GIB:+.2f} GiB"

    def cache(self) -> Iterator[Finding]:
        pool, tokens = self.log.get("kv_pool_bytes"), self.tokens_of_log()
        if tokens is None:
            return
        count, where = tokens
        if pool is not None and count:
            slack = (pool.step / 2 + BLOCK_TOKENS * self.per_token) / max(pool.value, 1)
            engine = pool.value / count
            cause = self._per_token_cause(engine / self.per_token, slack)
            # Ranks have unlike pools, and the one that the tokens are of may not be in the log.
            kind, off = "exact", abs(engine / self.per_token - 1)
            if slack < off <= _RANKS_DIFFER and self._ranks_are_missing():
                kind, cause = "estimate", "the tokens are of a rank whose pool isn't in the log"
            source = f"{self.run.kv_dtype} keys and values of {self.config.num_hidden_layers // self.run.pp} layers"
            yield Finding("KV bytes a token", "B/token", engine, self.per_token, cause, source, kind, slack)
            ours = kv_tokens(pool.value, int(self.per_token))
            cause = f"the printed pool in whole blocks of {BLOCK_TOKENS}; it is rounded to {pool.step / GIB:g} GiB"
            yield Finding("KV tokens of that pool", "tokens", count, ours, cause, where, kind, slack)
        blocks = self.log.whole("gpu_blocks")
        if blocks is not None and where != "GPU blocks":
            made = blocks * BLOCK_TOKENS
            cause = f"{blocks:,} blocks of {BLOCK_TOKENS} tokens"
            yield Finding("KV tokens of the blocks", "tokens", count, made, cause, _IDENTITY, "exact", 0.0)
        predicted = self._predicted_pool()
        if predicted is not None:
            ours = kv_tokens(max(0.0, predicted), int(self.per_token))
            yield Finding("KV tokens predicted", "tokens", count, ours, self._largest_delta(), self.rules)
        yield from self._concurrency(count)

    def _ranks_are_missing(self) -> bool:
        ranks = {reading.rank for reading in self.log.readings.get("kv_pool_bytes", ())}
        return len(ranks) < self.run.tp * self.run.pp

    def tokens_of_log(self) -> tuple[int, str] | None:
        said = self.log.whole("kv_tokens")
        if said is not None:
            return said, "GPU KV cache size"
        blocks = self.log.whole("gpu_blocks")
        return None if blocks is None else (blocks * BLOCK_TOKENS, "GPU blocks")

    def _per_token_cause(self, ratio: float, slack: float) -> str:
        if abs(ratio - 1) <= slack:
            return "the same shapes"
        for factor in (2, 4, 8):
            if isclose(ratio, 1 / factor, rel_tol=0.02):
                halves = "an 8-bit cache (--kv-dtype float8_e4m3fn), or " if factor == 2 else ""
                return f"1/{factor} of ours: {halves}tensor parallelism over {factor} (--tp {factor})"
        return f"{ratio:.3f} of ours: another model, or tokens that don't go with this pool"

    def _concurrency(self, count: int) -> Iterator[Finding]:
        said, length = self.log.get("concurrency"), self.log.whole("concurrency_len")
        if said is not None and length:
            tolerance = (said.step / 2 + 1e-9) / max(said.value, 1e-9)
            cause = f"{count:,} tokens over {length:,}"
            yield Finding("concurrency", "sequences", said.value, count / length, cause, _IDENTITY, "exact", tolerance)

    def term(self, name: str) -> float | None:
        """A term of the version's rules, buffers counted with what lies outside PyTorch."""
        if self.needs is None:
            return None
        names = (name, "buffers") if name == "non-torch" else (name,)
        found = [term.num_bytes for term in self.needs.terms if term.name in names and term.in_budget]
        return float(sum(found)) if found else None
