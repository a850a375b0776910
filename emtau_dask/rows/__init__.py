"""The rows of chunks: loaded, cached, sampled, and known by their contents."""

from emtau_dask.rows.chunk import LARGEST, ChunkLoader, LoadedChunk, loaded_bytes
from emtau_dask.rows.contents import CONTENTS_BYTES, ReadContents
from emtau_dask.rows.positions import Positions
from emtau_dask.rows.samples import ACTIVITY, Samples

__all__ = [
    "ACTIVITY",
    "CONTENTS_BYTES",
    "LARGEST",
    "ChunkLoader",
    "LoadedChunk",
    "Positions",
    "ReadContents",
    "Samples",
    "loaded_bytes",
]
