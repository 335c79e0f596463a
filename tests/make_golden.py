"""Records logits of transformers for two tiny models: `python tests/make_golden.py` writes tests/data/golden_dense.npz.

The weights follow from their checkpoint keys (`tiny.tensor`), so that only configs, tokens and logits are stored.
"""

from __future__ import annotations

import json
from pathlib import Path

import hf_bridge
import numpy as np
import tiny

from qwenjax.config import ModelConfig

PATH = Path(__file__).parent / "data" / "golden_dense.npz"
POSITIONS = np.array([0, 1, 19, 20, 47, 71])
CONFIGS = {
    "qwen2": tiny.config_json(
        "qwen2", tie_word_embeddings=True, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": tiny.config_json(
        "qwen3",
        attention_bias=True,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
}


def main() -> None:
    import torch
    import transformers

    recorded: dict[str, np.ndarray] = {"transformers": np.array(transformers.__version__)}
    for name, data in CONFIGS.items():
        tokens_BT = np.asarray(tiny.tokens(f"golden {name}", 1, 72))
        model = hf_bridge.reference_model(data, tiny.state_dict(ModelConfig.from_hf(data)))
        with torch.no_grad():
            logits_TV = model(torch.tensor(tokens_BT).long()).logits[0].numpy()
        recorded |= {
            f"{name}_config": np.array(json.dumps(data)),
            f"{name}_tokens": tokens_BT[0].astype(np.uint8),
            f"{name}_positions": POSITIONS,
            f"{name}_logits": logits_TV[POSITIONS],
        }
    np.savez_compressed(PATH, **recorded)
    print(f"wrote {PATH}: {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
