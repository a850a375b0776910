"""Gaussian mixtures: parameters, sufficient statistics, E-step and M-step. Knows NumPy and SciPy only."""
