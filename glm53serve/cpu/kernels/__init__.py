"""Compiled kernels. Importing any module of this package imports Numba; do it only when the kernels are about to run."""
