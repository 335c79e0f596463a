"""Training: the loss, one optax step as a single jitted function, data without state, and a loop that can resume."""

from qwenjax.train.data import read_bytes, sample_batch
from qwenjax.train.loop import train
from qwenjax.train.loss import lm_loss, load_balancing_loss, next_token_loss
from qwenjax.train.settings import TrainConfig
from qwenjax.train.state_file import load_state, save_state
from qwenjax.train.step import Metrics, TrainState, init_state, train_step

__all__ = [
    "Metrics",
    "TrainConfig",
    "TrainState",
    "init_state",
    "lm_loss",
    "load_balancing_loss",
    "load_state",
    "next_token_loss",
    "read_bytes",
    "sample_batch",
    "save_state",
    "train",
    "train_step",
]
