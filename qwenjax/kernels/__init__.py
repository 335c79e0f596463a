"""Pallas (Triton) kernels for NVIDIA GPUs of what XLA leaves apart; each has the plain XLA version as its reference."""
