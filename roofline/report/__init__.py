"""Records of what was computed, and their text. Only here do numbers become strings.

Each file has pairs: `*_record` puts computed values side by side in a dict, which is what `--json` prints, and
`*_text` writes the same record for reading. A text never computes what its record doesn't hold.
"""

from roofline.report.catalogue import (
    chip_record,
    chip_text,
    hardware_record,
    hardware_text,
    model_list_text,
    models_record,
    models_text,
)
from roofline.report.experts import experts_record, experts_text
from roofline.report.memory import memory_record, memory_text
from roofline.report.params import params_record, params_text
from roofline.report.request import predict_record, predict_text
from roofline.report.step import measured_record, step_record, step_text

__all__ = [
    "chip_record",
    "chip_text",
    "experts_record",
    "experts_text",
    "hardware_record",
    "hardware_text",
    "measured_record",
    "memory_record",
    "memory_text",
    "model_list_text",
    "models_record",
    "models_text",
    "params_record",
    "params_text",
    "predict_record",
    "predict_text",
    "step_record",
    "step_text",
]
