"""Active rows and row state, cached by a process between passes."""

from emtau_dask.io.cache.active_rows import CachedRows, RowCache, RowStore, process_store, release_rows

__all__ = ["CachedRows", "RowCache", "RowStore", "process_store", "release_rows"]
