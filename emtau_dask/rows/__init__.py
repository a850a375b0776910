"""The rows of chunks: loaded, cached, sampled, and known by their contents."""

from emtau_dask.rows.chunk import LARGEST, ChunkLoader, ChunkTask, LoadedChunk, loaded_bytes
from emtau_dask.rows.contents import (
    RESPONSIBILITIES,
    WEIGHTS,
    ChunkContents,
    Contents,
    NotingTask,
    contents_of,
)
from emtau_dask.rows.positions import Positions
from emtau_dask.rows.samples import ACTIVITY, Samples

__all__ = [
    "ACTIVITY",
    "LARGEST",
    "RESPONSIBILITIES",
    "WEIGHTS",
    "ChunkContents",
    "ChunkLoader",
    "ChunkTask",
    "Contents",
    "LoadedChunk",
    "NotingTask",
    "Positions",
    "Samples",
    "contents_of",
    "loaded_bytes",
]
