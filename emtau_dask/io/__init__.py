"""Reads rows, keeps what a run must not lose. Knows files, URLs, zarr and dask.array; nothing of EM."""
