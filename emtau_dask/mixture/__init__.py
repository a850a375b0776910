"""Gaussian mixtures: parameters, covariance structures, sufficient statistics, E-step, M-step.

Knows NumPy and SciPy; nothing of chunks, storage or iterations.
"""
