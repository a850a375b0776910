"""Gaussian mixtures on blocks of rows, in NumPy and SciPy; no files, no dask."""
