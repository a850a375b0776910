"""The E-step as compiled loops, by numba."""
