"""The CUDA backend: the Hopper kernels of csrc behind the engine's interface."""
