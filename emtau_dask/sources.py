"""What sources of rows of your own implement: a reader of ranges of rows, and what it returns."""

from emtau_dask.data.source import ChunkRange, ChunkReader, Loaded, RangeReader, RangeSource, Source, Unstored

__all__ = ["ChunkRange", "ChunkReader", "Loaded", "RangeReader", "RangeSource", "Source", "Unstored"]
