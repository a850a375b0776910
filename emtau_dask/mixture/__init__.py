"""Gaussian mixtures on blocks of rows: NumPy and SciPy, no files, no dask."""
