"""zarr arrays as addressable sources, with the stored bytes of every read counted."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

import dask.array as da
import numpy as np
import zarr
import zarr.abc.store
import zarr.errors
from dask.array.core import getter, getter_inline, getter_nofancy
from dask.blockwise import Blockwise
from dask.highlevelgraph import MaterializedLayer
from numpy.typing import NDArray
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import WrapperStore

from emtau_dask.errors import InvalidDataError
from emtau_dask.storage.readbudget import ReadBudget
from emtau_dask.storage.sources import RangeSource

__all__ = ["group_source", "open_zarr", "plain_zarr_of", "zarr_source"]

READ_BUDGET = ReadBudget(2**28)
COPIES_WHILE_READING = 3

_bytes_read: ContextVar[list[int] | None] = ContextVar("emtau_bytes_read", default=None)


class CountingStore(WrapperStore[Any]):
    """Adds the size of everything read to the counter of the reading context.

    zarr reads in an event loop of its own, but its coroutines inherit the
    context of the thread that asked, so that concurrent tasks count apart.
    """

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: zarr.abc.store.ByteRequest | None = None,
    ) -> Buffer | None:
        """Read, and count."""
        value = cast("Buffer | None", await self._store.get(key, prototype, byte_range))
        sizes = _bytes_read.get()
        if value is not None and sizes is not None:
            sizes.append(len(value))
        return value


@dataclass(frozen=True, eq=False)
class ZarrReader:
    """Reads rows of a zarr array, one call at a time for each task."""

    array: zarr.Array[Any]

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], int]:
        """Return the rows and the stored (compressed) bytes read for them."""
        sizes: list[int] = []
        token = _bytes_read.set(sizes)
        row_bytes = self.array.nbytes // max(self.array.shape[0], 1)
        try:
            with READ_BUDGET.reading(COPIES_WHILE_READING * row_bytes * (stop - start)):
                rows = np.asarray(self.array[start:stop])
        except Exception as error:
            raise InvalidDataError(
                f"rows {start} to {stop} of the zarr array {self.array.store_path} cannot be read: "
                f"{type(error).__name__}: {error}. Restore the array, or write it again."
            ) from error
        finally:
            _bytes_read.reset(token)
        return rows, sum(sizes)


def zarr_source(array: zarr.Array[Any], chunk_rows: tuple[int, ...] | None = None) -> RangeSource:
    """Return a zarr array as a source.

    Parameters
    ----------
    array : zarr.Array
    chunk_rows : tuple of int, optional
        By default its own row chunks; of a sharded array its shards, so that
        each shard is read once.
    """
    mode: Literal["r", "r+"] = "r" if array.store.read_only else "r+"
    counted = zarr.open_array(store=CountingStore(array.store), path=array.path, mode=mode)
    if chunk_rows is None:
        unit = (array.shards or array.chunks)[0] if array.ndim else 1
        n_rows = array.shape[0] if array.ndim else 0
        edges = (*range(0, n_rows, unit), n_rows)
        chunk_rows = tuple(stop - start for start, stop in pairwise(edges)) if n_rows else ()
    return RangeSource(ZarrReader(counted), array.shape, np.dtype(array.dtype), chunk_rows)


def open_zarr(path: str, array: str | None) -> RangeSource:
    """Open a zarr array, or a member of a zarr group, as a source.

    Parameters
    ----------
    path : str
    array : str or None
        The group's member; by default ``"X"``, or the only array with two axes.

    Raises
    ------
    InvalidDataError
        Nothing is there, or the group does not say which array is meant.
    """
    try:
        node = zarr.open(path, mode="r")
    except (zarr.errors.BaseZarrError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidDataError(
            f"{path} holds no zarr array or group ({type(error).__name__}: {error})."
        ) from error
    if isinstance(node, zarr.Array):
        if array is not None:
            raise InvalidDataError(
                f"{path} is a zarr array, not a group; leave out the array name {array!r}."
            )
        return zarr_source(node)
    return group_source(node, array, path)


def group_source(group: zarr.Group, array: str | None, where: str) -> RangeSource:
    """Return a member of a zarr group as a source; see `open_zarr`.

    Parameters
    ----------
    group : zarr.Group
    array : str or None
    where : str
        Names the group in errors.
    """
    arrays = dict(group.arrays())
    tables = [name for name, member in arrays.items() if member.ndim == 2]
    name = array or ("X" if "X" in arrays else tables[0] if len(tables) == 1 else None)
    if name is None or name not in arrays:
        wanted = f"no array {array!r}" if array else "no array 'X' and not exactly one with two axes"
        raise InvalidDataError(
            f"the zarr group {where} has {wanted}; its arrays are {sorted(arrays) or 'none'}. "
            "Name one of them."
        )
    return zarr_source(arrays[name])


def plain_zarr_of(array: da.Array) -> zarr.Array[Any] | None:
    """Return the zarr array that a dask array plainly is, None where it is anything else.

    Plainly: made by ``dask.array.from_zarr`` or ``from_array``, inline or not,
    and nothing done to it since, so that block i is exactly its rows i.
    """
    layers = array.__dask_graph__().layers
    last = layers.get(array.name)
    if len(layers) > 2 or not isinstance(last, Blockwise):
        return None
    if getattr(last.task, "func", None) not in (getter, getter_nofancy, getter_inline):
        return None
    candidates = [argument for argument, _ in last.indices]
    for name, layer in layers.items():
        if name != array.name and isinstance(layer, MaterializedLayer):
            candidates += [getattr(value, "value", value) for value in dict(layer).values()]
    found = [candidate for candidate in candidates if isinstance(candidate, zarr.Array)]
    if len(found) != 1 or found[0].shape != array.shape or found[0].dtype != array.dtype:
        return None
    return found[0]
