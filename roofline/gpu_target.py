"""A chip as XLA's GPU compiler wants to be told of it: the text of a GpuTargetConfigProto, from the hardware files."""

from __future__ import annotations

from qwenjax.errors import InputError
from roofline.hardware import Hardware, list_hardware

# Limits of every NVIDIA GPU of these capabilities: CUDA C++ Programming Guide, technical specifications per compute
# capability (2025). The rest differs between chips and comes from their files.
_LIMITS = (
    ("threads_per_block_limit", 1024),
    ("threads_per_warp", 32),
    ("shared_memory_per_block", 49152),
    ("block_dim_limit_x", 2**31 - 1),
    ("block_dim_limit_y", 65535),
    ("block_dim_limit_z", 65535),
    ("thread_dim_limit_x", 1024),
    ("thread_dim_limit_y", 1024),
    ("thread_dim_limit_z", 64),
    ("registers_per_core_limit", 65536),
    ("registers_per_block_limit", 65536),
)
_FIGURES = (
    ("core_count", "sm_count"),
    ("fpus_per_core", "fp32_lanes_per_sm"),
    ("threads_per_core_limit", "max_threads_per_sm"),
    ("shared_memory_per_core", "shared_memory_per_sm_bytes"),
    ("shared_memory_per_block_optin", "shared_memory_per_block_bytes"),
    ("memory_bandwidth", "peak_bandwidth_bytes_per_s"),
    ("l2_cache_size", "l2_bytes"),
)
_OLDEST = (7, 5)  # what CUDA 13's assembler knows; Triton kernels need 8.0, and before it XLA takes others
_ACCELERATED = 9  # from this major capability on XLA compiles for the arch-specific form: sm_90a, sm_100a, sm_120a
DNN_VERSION = "9.10"  # cuDNN that XLA's own recorded targets name, where none is installed


def target_ids() -> tuple[str, ...]:
    """Ids of the chips in the package that the compiler can be told of: NVIDIA, with every figure it asks for."""
    return tuple(chip.id for chip in list_hardware() if not _problem(chip))


def check_target(hardware: Hardware) -> Hardware:
    """Refuses a chip that XLA's CUDA compiler can't compile for, with the known ones."""
    problem = _problem(hardware)
    if problem:
        remedy = f"Known: {', '.join(target_ids())}; or give a TOML file with its figures."
        raise InputError("--hardware", hardware.id, problem, remedy)
    return hardware


def target_config(hardware: Hardware, memory_bytes: int | None = None, dnn_version: str = DNN_VERSION) -> str:
    """The chip in the text form of GpuTargetConfigProto; `memory_bytes` stands in for what the card has.

    Left out are the rates of scalar and matrix units, which XLA's cost model takes from the capability.
    """
    check_target(hardware)
    major, minor = map(int, hardware.compute_capability.split("."))
    figures = [(theirs, _whole(hardware, ours)) for theirs, ours in _FIGURES]
    clock = hardware.boost_clock_hz
    assert clock is not None  # checked above
    fields = [f"{name}: {value}" for name, value in (*_LIMITS, *figures)]
    fields += [
        f"clock_rate_ghz: {clock / 1e9:g}",
        f"device_memory_size: {hardware.usable_memory_bytes if memory_bytes is None else memory_bytes}",
        f"cuda_compute_capability {{ major: {major} minor: {minor}{_extension(major)} }}",
    ]
    dnn_major, dnn_minor = (*dnn_version.split("."), "0")[:2]
    return "\n".join(
        (
            f"gpu_device_info {{ {' '.join(fields)} }}",
            'platform_name: "CUDA"',
            f"dnn_version_info {{ major: {dnn_major} minor: {dnn_minor} }}",
            f'device_description_str: "{hardware.name}"',
        )
    )


def _extension(major: int) -> str:
    return " feature_extension: ACCELERATED_FEATURES" if major >= _ACCELERATED else ""


def _problem(hardware: Hardware) -> str:
    if hardware.vendor.upper() != "NVIDIA":
        return f"is a chip of {hardware.vendor}, and the compiler here is XLA's for CUDA"
    capability = _capability(hardware)
    if capability is None:
        return f"has the compute capability {hardware.compute_capability!r}, not one such as 8.9"
    if capability < _OLDEST:
        return f"has compute capability {hardware.compute_capability}, older than CUDA 13 compiles for"
    needed = (*(ours for _, ours in _FIGURES), "boost_clock_hz")
    missing = [name for name in needed if hardware.number(name) is None]
    return f"lacks {', '.join(missing)}, which the compiler asks for" if missing else ""


def _capability(hardware: Hardware) -> tuple[int, int] | None:
    major, dot, minor = hardware.compute_capability.partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None


def _whole(hardware: Hardware, name: str) -> int:
    number = hardware.number(name)
    assert number is not None  # checked by check_target
    return int(number)
