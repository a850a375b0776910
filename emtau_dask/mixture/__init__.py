"""Gaussian mixtures on blocks of rows: knows NumPy and SciPy, nothing of files or dask."""
