"""The kernels of a compiled program, one row each: op, how often it runs, FLOPs, bytes and least time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from qwenjax.ops import OPS
from qwenjax.sharding import Mesh
from roofline.count import Attention, CountRow, DtypePolicy, Experts, count_step
from roofline.gpu_compile import CompileJob, mesh_sizes
from roofline.hlo import Computation, Instruction, Module
from roofline.hlo_cost import Touched, count_kernel, product_flops
from roofline.own_kernels import count_own, joined_ops, own_name, padded_share
from roofline.predict import device_of

OTHER = "other"  # the op of a kernel that no named scope and no weight tells
CACHE = "cache"  # writing keys and values, the one scope that isn't an op of the inventory
_SCOPES = {op.name: op.scope for op in OPS}
_LEAVES = {leaf: op.name for op in reversed(OPS) for leaf in op.leaves}
_OWN = "pallas "  # how the kind of qwenjax's own kernels begins, before the kernel's name
_BLOCK = "_run_block"  # the function of one layer, whose name stands in the path of whatever it runs
_NO_KERNEL = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
        *("after-all", "add-dependency", "opt-barrier", "domain"),
    )
)
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_JAX_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "s8": "int8",
               "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}  # fmt: skip
_REMATERIALISED = re.compile(r"\.remat\d*(\.|$)")
Source = Literal["compiler", "inventory"]


@dataclass(frozen=True)
class Collective:
    """Devices that exchange data: payload is what they exchange as a whole array, result what one device then holds
    of it, sent what it sends at least (a ring's)."""

    kind: str
    payload_bytes: int
    result_bytes: int
    sent_bytes: float
    group_size: int
    groups: str


@dataclass(frozen=True)
class Kernel:
    """One kernel of the program on one device. FLOPs, bytes and time are those of one run; it runs `count` times.

    time_s is the longer of FLOPs at the peak rate and bytes at the memory bandwidth, of a collective its data over the
    link (None where the link isn't known). Where `at_most`, a condition decides whether it runs. `source` is
    "inventory" where a library call, or a kernel of qwenjax's own, hides what it does.
    """

    name: str
    op: str
    ops: tuple[str, ...]
    kind: str
    count: int
    at_most: bool
    in_layer: bool
    rematerialised: bool
    flops: int
    read_bytes: int
    write_bytes: int
    time_s: float | None
    bound: str
    source: Source
    collective: Collective | None = None

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def is_own(self) -> bool:
        """Whether it is one of qwenjax's own kernels."""
        return self.kind.startswith(_OWN)


@dataclass(frozen=True)
class _Run:
    """An instruction that runs as a kernel, inside a computation, so many times, or at most so many."""

    instruction: Instruction
    within: Computation
    count: int
    at_most: bool


def count_inventory(
    job: CompileJob, experts: Experts = "expected", attention: Attention = "dense"
) -> tuple[CountRow, ...]:
    """What the step needs on one device by the inventory; plain products of attention run over the whole square."""
    mesh = Mesh(tp=job.num_devices)
    return count_step(job.config, job.step, dtype=job.dtype, attention=attention, experts=experts, mesh=mesh)


def read_kernels(module: Module, job: CompileJob) -> tuple[Kernel, ...]:
    """The kernels of a compiled program in the order in which they run; a loop's body counts as often as it turns."""
    reader = _Reader(module, job)
    return tuple(reader.kernel(run) for run in _runs(module.entry, module, 1, False))


def _runs(computation: Computation, module: Module, count: int, at_most: bool) -> Iterator[_Run]:
    for instruction in computation.instructions:
        opcode = instruction.opcode
        if opcode in _NO_KERNEL or opcode.endswith("-done"):
            continue
        if opcode == "while":
            turns = _turns(instruction)
            body = module.computations[(instruction.attribute("body") or "").lstrip("%")]
            yield from _runs(body, module, count * (turns or 1), at_most)
        elif opcode == "conditional":
            branches = [module.computations[name] for name in instruction.calls]
            busiest = max(branches, key=lambda branch: _work(branch, module))
            yield from _runs(busiest, module, count, True)
        elif opcode == "call" or (opcode == "async-start" and instruction.calls):
            yield from _runs(module.computations[instruction.calls[0]], module, count, at_most)
        else:
            yield _Run(instruction, computation, count, at_most)


def _turns(loop: Instruction) -> int | None:
    found = loop.backend_config.get("known_trip_count", {}).get("n")
    return None if found is None else int(found)


def _work(branch: Computation, module: Module) -> int:
    """Bytes that a branch moves: enough to tell the one that works from the one that fills in zeros."""
    total = 0
    for run in _runs(branch, module, 1, False):
        touched = count_kernel(run.instruction, run.within, module)
        total += run.count * (touched.read_bytes + touched.write_bytes)
    return total


def count_conditions(module: Module) -> int:
    """How often the program asks a condition to choose a branch, loops counted as often as they turn."""

    def asked(computation: Computation) -> int:
        total = 0
        for instruction in computation.instructions:
            inner = [module.computations[name] for name in instruction.calls if name in module.computations]
            if instruction.opcode == "conditional":
                total += 1 + max(asked(branch) for branch in inner)
            elif instruction.opcode == "while":
                body = module.computations[(instruction.attribute("body") or "").lstrip("%")]
                total += (_turns(instruction) or 1) * asked(body)
            elif instruction.opcode == "call":
                total += asked(inner[0])
        return total

    return asked(module.entry)


class _Reader:
    """What it takes to read one row: the program, the chip's peaks, the inventory for calls that hide their work."""

    def __init__(self, module: Module, job: CompileJob) -> None:
        self.module, self.job = module, job
        self.device = device_of(job.hardware, DtypePolicy.of(job.dtype))
        self.inventory = {row.op: row for row in count_inventory(job)}
        self.flash = {row.op: row for row in count_inventory(job, attention="causal")}
        tokens = job.step.batch * job.step.query_len
        self.padded = padded_share(tokens, job.config) if job.config.is_moe else 1.0
        self.host_devices = mesh_sizes(job.mesh)[2]

    def kernel(self, run: _Run) -> Kernel:
        instruction = run.instruction
        body = self.body(instruction)
        op, path = self.op_of(run, body)
        collective = self.collective(instruction, run.within)
        touched, source = count_kernel(instruction, run.within, self.module), "compiler"
        if collective is not None:
            touched = Touched(touched.read_bytes, collective.result_bytes, {})
        own = own_name(instruction.op_name) if instruction.opcode == "custom-call" else None
        if own:
            touched, source = count_own(instruction, run.within, own, self.flash, self.padded), "inventory"
        elif instruction.opcode == "custom-call" and not touched.flops and op in self.inventory:
            touched, source = self.hidden(instruction, run.within, op, touched), "inventory"
        compute_s = sum(flops / self.rate(dtype) for dtype, flops in touched.flops.items())
        memory_s = (touched.read_bytes + touched.write_bytes) / self.device.bandwidth_bytes_per_s
        time_s: float | None = max(compute_s, memory_s)
        bound = "compute" if compute_s > memory_s else "memory"
        if collective is not None:
            time_s, bound = self.link_s(collective), "communication"
        return Kernel(
            name=instruction.name,
            op=op,
            ops=joined_ops(own, self.inventory) or self.ops_of(body, op),
            kind=kind_of(instruction, body),
            count=run.count,
            at_most=run.at_most,
            in_layer=_BLOCK in path or "['layers']" in path or (not path and _SCOPES.get(op, "model") != "model"),
            rematerialised=bool(_REMATERIALISED.search(instruction.name)),
            flops=sum(touched.flops.values()),
            read_bytes=touched.read_bytes,
            write_bytes=touched.write_bytes,
            time_s=time_s,
            bound=bound,
            source="inventory" if source == "inventory" else "compiler",
            collective=collective,
        )

    def body(self, instruction: Instruction) -> Computation | None:
        return self.module.computations[instruction.calls[0]] if instruction.opcode == "fusion" else None

    def op_of(self, run: _Run, body: Computation | None) -> tuple[str, str]:
        """The op and the path that told it: its largest matrix product's; of several results the latest in the step;
        the kernel's own; its most frequent one; and last that of the weight that it reads."""
        inner = body.instructions if body else ()
        products, results = (_products(body), _results(body)) if body else ([], [])
        own = run.instruction.op_name
        for path in (*products, *([*results, own] if len(results) > 1 else [own, *results])):
            if op := scope_op(path):
                return op, path
        named = Counter((op, _BLOCK in i.op_name) for i in inner if (op := scope_op(i.op_name)))
        if named:
            (op, in_block), _ = named.most_common(1)[0]
            return op, _BLOCK if in_block else op
        for path in self.weights(run):
            if op := _leaf_op(path):
                return op, path
        return OTHER, run.instruction.op_name

    def weights(self, run: _Run) -> Iterator[str]:
        """Paths of the arguments that a kernel reads, as JAX names them, the largest first."""
        found = [_source(run.within.by_name[name], run.within) for name in run.instruction.operands]
        yield run.instruction.op_name
        for instruction in sorted(found, key=lambda i: -i.bytes):
            yield instruction.op_name

    def ops_of(self, body: Computation | None, op: str) -> tuple[str, ...]:
        """Every op that a fusion mixes, in the order of its computation."""
        inner = (scope_op(i.op_name) for i in (body.instructions if body else ()))
        return tuple(dict.fromkeys([*(name for name in inner if name), *([op] if op != OTHER else [])]))

    def rate(self, dtype: str) -> float:
        rates = self.job.hardware.peak_flops_per_s
        return rates.get(_JAX_DTYPES.get(dtype, ""), self.device.flops_per_s)

    def hidden(self, call: Instruction, within: Computation, op: str, shapes: Touched) -> Touched:
        """A library call's work by the inventory: of one layer, its operands apart from weights and cache as shaped."""
        names = ("scores", "values") if op in ("scores", "softmax", "values") else (op,)
        rows = [self.inventory[name] for name in names]
        flops = sum(row.flops // row.layers for row in rows)
        stored = sum(int((row.weight_bytes + row.kv_read_bytes) / row.layers) for row in rows)
        given = [within.by_name[name].bytes for name in call.operands]
        passed = given[0] if len(names) > 1 else sum(given) - max(given, default=0)
        return Touched(stored + passed, shapes.write_bytes, {"": flops})

    def collective(self, instruction: Instruction, within: Computation) -> Collective | None:
        kind = instruction.opcode.removesuffix("-start")
        if kind not in _COLLECTIVES:
            return None
        given = sum(within.by_name[name].bytes for name in instruction.operands)
        pairs = instruction.attribute("source_target_pairs")
        groups = instruction.replica_groups if pairs is None else f"{{{{{pairs}}}}}"
        size = group_size(groups, self.job.num_devices)
        payload = given * size if kind == "all-gather" else given
        result = given // size if kind == "reduce-scatter" else payload
        share = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0}.get(kind, (size - 1) / size)
        return Collective(kind, payload, result, payload * share, size, groups)

    def link_s(self, collective: Collective) -> float | None:
        """Least time over the chip's own link; between hosts it isn't known here."""
        link = self.device.link_bytes_per_s
        inside = collective.group_size <= self.host_devices
        return collective.sent_bytes / link if link and inside else None


def _source(instruction: Instruction, within: Computation) -> Instruction:
    while instruction.opcode in ("bitcast", "reshape", "copy"):
        instruction = within.by_name[instruction.operands[0]]
    return instruction


def _products(body: Computation) -> list[str]:
    """Paths of a fusion's matrix products, the largest first."""
    found = [(flops, i.op_name) for i in body.instructions if (flops := product_flops(i, body))]
    return [path for _, path in sorted(found, key=lambda pair: -pair[0])]


def _results(body: Computation) -> list[str]:
    """Paths of what a fusion makes, the latest op of the step first."""
    root = body.root
    made = [body.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    order = list(_SCOPES)
    places = {path: order.index(op) for i in made if (op := scope_op(path := i.op_name)) in _SCOPES}
    return sorted((i.op_name for i in made), key=lambda path: -places.get(path, -1))


def scope_op(path: str) -> str | None:
    """The innermost named scope of a path that is an op of the inventory, or the cache."""
    return next((part for part in reversed(path.split("/")) if part in _SCOPES or part == CACHE), None)


def _leaf_op(path: str) -> str | None:
    """The op that reads an argument such as params['layers'][1]['down_proj'] or cache.keys[1]."""
    if path.startswith("cache."):
        return CACHE
    names = re.findall(r"\['(\w+)'\]", path)
    return _LEAVES.get(names[-1]) if names else None


def group_size(groups: str, num_devices: int) -> int:
    """Devices of one group out of {{0,1},{2,3}}, [2,8]<=[16] or mesh['a'=2,'b'=8] {'b'}; none named means all."""
    if groups.startswith("{{"):
        return len(groups[2:].partition("}")[0].split(","))
    if groups.startswith("mesh["):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", groups)}
        axes = re.findall(r"'(\w+)'", groups.partition("]")[2])
        return prod(sizes[axis] for axis in axes)
    found = re.match(r"\[(\d+),(\d+)\]", groups)
    return int(found.group(2)) if found else num_devices


def kind_of(instruction: Instruction, body: Computation | None) -> str:
    """What makes the kernel: "triton gemm", "loop fusion", "cuDNN attention", "copy", "all-reduce"."""
    if instruction.opcode == "custom-call":
        if own := own_name(instruction.op_name):
            return f"{_OWN}{own}"
        target = instruction.attribute("custom_call_target") or "?"
        return f"call {target}"
    if body is None:
        return instruction.opcode.removesuffix("-start")
    kind = (instruction.attribute("kind") or "").removeprefix("k").lower()
    backend = str(instruction.backend_config.get("fusion_backend_config", {}).get("kind", ""))
    if "gemm" in backend:
        return "triton gemm"
    if "triton" in backend:
        return "triton fusion"
    return f"{kind} fusion"
