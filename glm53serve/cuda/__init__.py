"""The CUDA backend (CuPy)."""
