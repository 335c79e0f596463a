"""The one direction of imports: which package may import what, and that estimates start without JAX."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*(ROOT / "qwenjax").rglob("*.py"), *(ROOT / "roofline").rglob("*.py")])
# What reads configs and writes the step down; everything an estimate needs. Standard library only.
PLAIN = {
    "qwenjax", "qwenjax.config", "qwenjax.dims", "qwenjax.errors", "qwenjax.field_reader", "qwenjax.hf_keys",
    "qwenjax.hf_llama", "qwenjax.hf_reader", "qwenjax.known_models", "qwenjax.ops", "qwenjax.quantization",
    "qwenjax.rope_config", "qwenjax.sharding",
}  # fmt: skip
# The chain that none may import backwards: a module may only import those of its own rank or before.
CHAIN = ("config", "dims", "ops", "sharding", "layers", "model", "generation", "cli")
# The files of roofline that may import JAX, inside functions. The others never do.
MEASURE = {"compiler", "compiler_cost", "gpu_worker", "trace", "measure", "calibrate", "compare"}
HEAVY = ("jax", "jaxlib", "flax", "numpy", "matplotlib", "optax", "torch", "transformers", "safetensors", "tokenizers")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def _targets(node: ast.stmt, module: str, is_package: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert isinstance(node, ast.ImportFrom)
    base = module.split(".")
    above = base[: len(base) - node.level + is_package] if node.level else []
    source = ".".join([*above, *([node.module] if node.module else [])])
    names = [f"{source}.{alias.name}" for alias in node.names]
    return [name if name in MODULES else source for name in names]


def imports(module: str, *, lazy: bool) -> Iterator[str]:
    """What a file imports as it is imported itself, types apart; with `lazy` also what its functions import."""
    path = MODULES[module]
    is_package = path.name == "__init__.py"
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _targets(node, module, is_package)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            continue
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        else:
            pending += ast.iter_child_nodes(node)


def top(name: str) -> str:
    return name.partition(".")[0]


def loaded_with(module: str) -> set[str]:
    """Everything that importing a module of ours imports in turn, its packages' __init__ included."""
    seen: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += imports(name, lazy=False) if name in MODULES else ()
            pending += [name.rpartition(".")[0]] if "." in name and top(name) in ("qwenjax", "roofline") else ()
    return seen


def test_the_walk_sees_what_is_there() -> None:
    assert set(MODULES) >= PLAIN | {"roofline", "roofline.count", "roofline.memory", "roofline.formulas.params"}
    assert "qwenjax.dims" in set(imports("qwenjax.ops", lazy=False))
    assert "qwenjax.config" in set(imports("qwenjax", lazy=False))
    lazy = {top(name) for module in MODULES for name in imports(module, lazy=True)}
    assert {"jax", "flax", "qwenjax", "roofline"} <= lazy


@pytest.mark.parametrize("module", [name for name in MODULES if top(name) == "qwenjax"])
def test_qwenjax_never_imports_roofline(module: str) -> None:
    assert [name for name in imports(module, lazy=True) if top(name) == "roofline"] == []


@pytest.mark.parametrize("module", sorted(PLAIN))
def test_configs_and_the_inventory_need_only_the_standard_library(module: str) -> None:
    found = {name for name in imports(module, lazy=True) if top(name) not in sys.stdlib_module_names}
    assert found <= PLAIN
    assert {top(name) for name in imports(module, lazy=True)} & set(HEAVY) == set()


@pytest.mark.parametrize("module", [f"qwenjax.{name}" for name in CHAIN])
def test_the_chain_has_one_direction(module: str) -> None:
    if module in MODULES:
        after = CHAIN[CHAIN.index(module.removeprefix("qwenjax.")) + 1 :]
        assert set(imports(module, lazy=True)) & {f"qwenjax.{name}" for name in after} == set()


@pytest.mark.parametrize("module", [name for name in MODULES if top(name) == "roofline"])
def test_roofline_imports_nothing_heavy_as_it_is_imported(module: str) -> None:
    assert {top(name) for name in loaded_with(module)} & set(HEAVY) == set()
    if not MEASURE & set(module.split(".")):
        inside = {top(name) for name in imports(module, lazy=True)}
        assert inside & {"jax", "jaxlib", "flax"} == set(), "only the files that measure or compile import JAX"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("roofline.formulas")])
def test_the_hand_formulas_are_an_independent_witness(module: str) -> None:
    used = {name for name in imports(module, lazy=True) if top(name) in ("qwenjax", "roofline")}
    outside = {name for name in used if not name.startswith("roofline.formulas")}
    assert outside <= {"qwenjax.errors"}  # the config is imported for its type alone


def _loaded_by(statement: str) -> set[str]:
    script = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return {top(name) for name in json.loads(result.stdout.splitlines()[-1])}


@pytest.mark.parametrize("module", ["qwenjax", "qwenjax.cli", "roofline", "roofline.cli"])
def test_importing_a_package_or_its_command_loads_nothing_heavy(module: str) -> None:
    assert _loaded_by(f"import {module}") & set(HEAVY) == set()


def test_estimates_run_without_jax() -> None:
    estimate = """
import qwenjax
from qwenjax.dims import Step
from roofline.count import count_params, count_step
from roofline.hardware import load_hardware
from roofline.memory import plan_memory
from roofline.stored import count_stored_params
config = qwenjax.ModelConfig.from_hf("Qwen3-30B-A3B")
count_params(config), count_step(config, Step.decode(8, 1024)), count_stored_params(config)
plan_memory(config, load_hardware("h100-sxm"))
"""
    assert _loaded_by(estimate) & set(HEAVY) == set()
