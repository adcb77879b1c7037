"""CUDA sources of the runtime, and how they are built. None of this is installed: the wheel holds the built library."""
