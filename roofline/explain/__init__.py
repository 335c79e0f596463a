"""Derivations of predictions: every number from the config's integers to tokens/s, with its kind and its source."""

from roofline.explain.bound import explain_step
from roofline.explain.derivation import LEAF_KINDS, Node, evaluate
from roofline.explain.engine import explain_request
from roofline.explain.kernels import kernel_functions

__all__ = ["LEAF_KINDS", "Node", "evaluate", "explain_request", "explain_step", "kernel_functions"]
