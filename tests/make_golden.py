"""Records logits of transformers for tiny models: `python tests/make_golden.py` writes tests/data/golden_*.npz.

The weights follow from their checkpoint keys (`tiny.tensor`), so that only configs, tokens and logits are stored.
"""

from __future__ import annotations

import json
from pathlib import Path

import hf_bridge
import numpy as np
import tiny

from qwenjax.config import ModelConfig

FOLDER = Path(__file__).parent / "data"
POSITIONS = np.array([0, 1, 19, 20, 47, 71])
DENSE = {
    "qwen2": tiny.config_json(
        "qwen2", tie_word_embeddings=True, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": tiny.config_json(
        "qwen3",
        attention_bias=True,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
}
MOE = {
    "qwen2_moe": tiny.moe_json("qwen2_moe", decoder_sparse_step=2, norm_topk_prob=False, num_hidden_layers=2),
    "qwen3_moe": tiny.moe_json("qwen3_moe", mlp_only_layers=[1], norm_topk_prob=True, tie_word_embeddings=True),
}


def main() -> None:
    record(FOLDER / "golden_dense.npz", DENSE)
    record(FOLDER / "golden_moe.npz", MOE)


def record(path: Path, configs: dict[str, tiny.Json]) -> None:
    """Writes configs, tokens, positions and logits of these models."""
    import torch
    import transformers

    recorded: dict[str, np.ndarray] = {"transformers": np.array(transformers.__version__)}
    for name, data in configs.items():
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
    np.savez_compressed(path, **recorded)
    print(f"wrote {path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
