"""The time model: kernels, engine steps and serving, from physics and few fitted constants."""
