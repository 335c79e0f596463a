"""Expected times of kernels and steps: the physics of each kernel, and a chip's few fitted constants."""
