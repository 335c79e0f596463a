"""The process that compiles for a GPU which isn't there: jobs in as JSON, HLO text and memory figures out as files.

It is a process of its own because the CUDA plugin, without a driver, complains in every process whose JAX finds it,
and with one would take the card. Here JAX_PLATFORMS=cpu keeps it from looking; the caller's JAX is never touched.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from qwenjax.ops import KV, leaf_letters

if TYPE_CHECKING:
    from jax.sharding import Sharding

JOBS = "jobs.json"
MESH_AXIS = "tp"
_SPLIT = "KFV"  # the letters that tensor parallelism splits, see qwenjax.sharding


def main() -> None:
    """Compiles the jobs of a folder one after another; each leaves `N.json`, and `N.hlo` if it compiled."""
    folder = Path(sys.argv[1])
    for number, job in enumerate(json.loads((folder / JOBS).read_text())):
        try:
            text, figures = _compile(job)
            (folder / f"{number}.hlo").write_text(text)
        except InputError as error:
            figures = {"input": [error.field, error.value, error.problem, error.remedy]}
        except Exception as error:  # what the compiler says, whatever its class, is for the caller to tell
            figures = {"refusal": f"{type(error).__name__}: {error}"}
        (folder / f"{number}.json").write_text(json.dumps(figures))


def _compile(job: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    import jax
    from jax.experimental import topologies

    from qwenjax.model import check_runnable, decode_step_impl, extend_impl, prefill_impl, step_shapes

    config = check_runnable(ModelConfig.from_hf(job["config"]))
    step = Step(job["batch"], job["query_len"], job["context"])
    params, arguments, cache = step_shapes(config, step.phase, step.batch, step.query_len, step.kv_len, job["dtype"])
    topology = topologies.get_topology_desc(
        job["chip"], platform="cuda", target_config=job["target"], topology=job["topology"]
    )
    place = _placing(topology.devices)
    params = jax.tree_util.tree_map_with_path(lambda path, leaf: _placed(leaf, place(_letters(path))), params)
    cache_letters = {tensor.name: tensor.letters for tensor in KV}
    cache = cache.replace(  # type: ignore[attr-defined]
        keys=tuple(_placed(leaf, place(cache_letters["k"])) for leaf in cache.keys),
        values=tuple(_placed(leaf, place(cache_letters["v"])) for leaf in cache.values),
        lengths=_placed(cache.lengths, place("")),
    )
    arguments = tuple(_placed(leaf, place("")) for leaf in arguments)
    function: Any = decode_step_impl if step.phase == "decode" else prefill_impl
    if step.phase == "prefill" and step.kv_len > step.query_len:
        function = extend_impl  # a chunk attends what the cache holds already
    start = time.perf_counter()
    # Logits whole on every device, as sampling needs them; the cache stays where it lies and is updated there.
    outputs = (place(""), jax.tree.map(lambda leaf: leaf.sharding, cache))
    jitted = jax.jit(function, static_argnums=0, donate_argnames="cache", out_shardings=outputs)
    compiled = jitted.lower(config, params, *arguments, cache).compile()
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    return compiled.as_text() or "", {
        "compile_s": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "jax": jax.__version__,
    }


def _placing(devices: Any) -> Any:
    """A function from a tensor's letters to where it lies: split over all devices on the letter that tp splits."""
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    if len(devices) == 1:
        alone = SingleDeviceSharding(devices[0])
        return lambda letters: alone
    mesh = Mesh(np.array(devices), (MESH_AXIS,))

    def place(letters: str) -> Sharding:
        split = next((letter for letter in letters if letter in _SPLIT), None)
        return NamedSharding(mesh, PartitionSpec(*(MESH_AXIS if letter == split else None for letter in letters)))

    return place


def _letters(path: Any) -> str:
    return leaf_letters(str(path[-1].key))


def _placed(leaf: Any, sharding: Sharding) -> Any:
    import jax

    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


if __name__ == "__main__":
    main()
