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
from qwenjax.dims import Step, dims
from qwenjax.errors import InputError
from qwenjax.ops import KV, leaf_letters

if TYPE_CHECKING:
    from jax.sharding import Sharding

JOBS = "jobs.json"
# Tensor parallelism splits K, F and V, see qwenjax.sharding. Devices beyond the KV heads share them: those of one KV
# head split its query heads where an array's letters keep them apart, and widths and vocabulary go over all devices.
_HEADS, _SHARED = "kv", "shared"
_AXES = {"K": _HEADS, "G": _SHARED, "F": (_HEADS, _SHARED), "V": (_HEADS, _SHARED)}


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

    from qwenjax.kernels.choice import NO_KERNELS, from_environment
    from qwenjax.model import check_runnable, decode_step_impl, extend_impl, prefill_impl, step_shapes

    config = check_runnable(ModelConfig.from_hf(job["config"]))
    step = Step(job["batch"], job["query_len"], job["context"])
    params, arguments, cache = step_shapes(config, step.phase, step.batch, step.query_len, step.kv_len, job["dtype"])
    topology = topologies.get_topology_desc(
        job["chip"], platform="cuda", target_config=job["target"], topology=job["topology"]
    )
    place = _placing(topology.devices, config)
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
    jitted = jax.jit(
        function, static_argnums=0, static_argnames="kernels", donate_argnames="cache", out_shardings=outputs
    )
    kernels = from_environment() if len(topology.devices) == 1 else NO_KERNELS  # they don't split over a mesh
    compiled = jitted.lower(config, params, *arguments, cache, kernels=kernels).compile()
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


def _placing(devices: Any, config: ModelConfig) -> Any:
    """A function from a tensor's letters to where it lies, split over the devices by the letters that tp splits."""
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    if len(devices) == 1:
        alone = SingleDeviceSharding(devices[0])
        return lambda letters: alone
    heads = min(len(devices), config.num_key_value_heads)  # one divides the other
    mesh = Mesh(np.array(devices).reshape(heads, -1), (_HEADS, _SHARED))
    group = dims(config)["G"]

    def place(letters: str) -> Sharding:
        split = next((letter for letter in letters if letter in "KFV"), None)
        whole = "" if group % mesh.shape[_SHARED] == 0 else "G"
        axes = (_AXES.get(x) if x == split or (x == "G" and x != whole) else None for x in letters)
        return NamedSharding(mesh, PartitionSpec(*axes))

    return place


def _letters(path: Any) -> str:
    return leaf_letters(str(path[-1].key))


def _placed(leaf: Any, sharding: Sharding) -> Any:
    import jax

    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


if __name__ == "__main__":
    main()
