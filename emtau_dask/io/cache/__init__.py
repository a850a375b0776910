"""Active rows and row state, cached by a process between passes."""

from emtau_dask.io.cache.active_rows import CachedRows, RowCache, release_rows

__all__ = ["CachedRows", "RowCache", "release_rows"]
