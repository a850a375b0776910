"""A task for each chunk, a fixed tree of merges, wherever dask computes."""
