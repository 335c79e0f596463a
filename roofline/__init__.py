"""What a decoder step must cost and what it costs: parameters, FLOPs, bytes, memory and times, without JAX."""

from qwenjax.dims import Step
from qwenjax.errors import InputError
from roofline.count import count_kv_bytes_per_token, count_params, count_step, count_weight_bytes
from roofline.hardware import Hardware, list_hardware, load_hardware
from roofline.memory import MemoryPlan, plan_memory
from roofline.predict import predict_step, sweep
from roofline.request import predict

__all__ = [
    "Hardware",
    "InputError",
    "MemoryPlan",
    "Step",
    "count_kv_bytes_per_token",
    "count_params",
    "count_step",
    "count_weight_bytes",
    "list_hardware",
    "load_hardware",
    "plan_memory",
    "predict",
    "predict_step",
    "sweep",
]
