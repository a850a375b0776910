"""The parquet files of a place: one file, or those of a folder, and the columns that names of folders give.

A folder below the given one that is named ``name=value`` gives its files a column, as in Hive.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote

import numpy as np
from dask.utils import natural_sort_key

from emtau_dask.errors import InvalidDataError
from emtau_dask.storage.errors import read_errors
from emtau_dask.storage.files import check_regular, paths_below
from emtau_dask.storage.locations import ENDINGS_OF_ROWS, PARQUET, Place, paths_at
from emtau_dask.storage.tables import loaded_pyarrow
from emtau_dask.storage.urls import Url, is_url, opened_stream, suffix_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

FOOTER_END_BYTES = 8
"""Size of the end of a file (bytes): the length of its footer, and the magic number."""
SIGNATURE_BYTES = 28
"""Size of the signature of a footer that is signed but not encrypted (bytes). The footer's length includes
it."""
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
MIN_INT32, MAX_INT32 = -(2**31), 2**31 - 1
"""Limits of whole numbers in the names of folders: pyarrow infers int32, and text for all others."""
ZARR_DOCUMENTS = ("zarr.json", ".zgroup", ".zarray")


@dataclass(frozen=True)
class ParquetPart:
    """One parquet file of ``size`` bytes, at an absolute path or a URL.

    ``partition`` are the columns that the names of its folders give, with their values; None is a null.
    """

    place: str | Url
    size: int
    partition: tuple[tuple[str, str | None], ...] = ()

    @property
    def remote(self) -> bool:
        """Whether the place is a URL."""
        return isinstance(self.place, Url)

    @contextmanager
    def opened(self) -> Iterator[pq.ParquetFile]:
        """Open the file with pyarrow; any error, here or in the block, becomes an `InvalidDataError`."""
        parquet = loaded_pyarrow().parquet
        with (
            read_errors(f"the parquet file {self.place}", remote=self.remote),
            arrow_input(self.place, self.size) as source,
            parquet.ParquetFile(source, pre_buffer=self.remote) as file,
        ):
            yield file

    def footer(self) -> tuple[pa.Schema, pq.FileMetaData]:
        """Return the file's schema and metadata.

        Raises `InvalidDataError` if it is not a parquet file, or encrypted. pyarrow refuses an encrypted file
        only if the whole footer is encrypted. If the footer is only signed, reading the metadata of a column
        would crash the process.
        """
        parquet = loaded_pyarrow().parquet
        with read_errors(f"the parquet file {self.place}", remote=self.remote), self._stream() as stream:
            with parquet.ParquetFile(stream) as file:
                schema, metadata = file.schema_arrow, file.metadata
            stream.seek(self.size - FOOTER_END_BYTES)
            if int.from_bytes(stream.read(4), "little") == metadata.serialized_size + SIGNATURE_BYTES:
                raise ValueError("its columns are encrypted")
            return schema, metadata

    def _stream(self) -> BinaryIO:
        if isinstance(self.place, Url):
            return opened_stream(self.place, self.size)
        return Path(self.place).open("rb")


@contextmanager
def arrow_input(place: str | Url, size: int) -> Iterator[str | BinaryIO]:
    """Yield what pyarrow can open: the path, or a stream for a URL or for a path that is not UTF-8."""
    if isinstance(place, Url):
        yield opened_stream(place, size)
        return
    try:
        place.encode()
    except UnicodeEncodeError:
        with Path(place).open("rb") as stream:
            yield stream
    else:
        yield place


def part_at(place: str | Url) -> ParquetPart | None:
    """Return the file at a place with its current size; None for a folder."""
    with read_errors(f"the parquet file {place}", remote=isinstance(place, Url)):
        if not isinstance(place, Url):
            return None if Path(place).is_dir() else ParquetPart(place, check_regular(place))
        info = place.info()
        if info["type"] == "directory":
            return None
        return ParquetPart(place, place.size_in(info))


def parts_at(place: Place) -> tuple[list[ParquetPart], int]:
    """Return the parquet files of a place, see `paths_at`, and the number of other files in its folders.

    Of several paths, folders that they do not share give partitions, too.
    """
    paths = paths_at(place)
    parts_and_ignored = [_parts_of(path) for path in paths]
    n_ignored = sum(ignored for _, ignored in parts_and_ignored)
    if len(paths) == 1:
        return parts_and_ignored[0][0], n_ignored
    folders = [_folders(path) for path in paths]
    shared = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, zip(*folders, strict=False)))
    partitions = (_partition("/".join([*names[shared:], ""])) for names in folders)
    parts = [
        replace(part, partition=(*partition, *part.partition))
        for (parts_of_path, _), partition in zip(parts_and_ignored, partitions, strict=True)
        for part in parts_of_path
    ]
    return parts, n_ignored


def _folders(path: str) -> list[str]:
    """Return the names of the folders in a path or URL."""
    names = (path.partition("?")[0] if is_url(path) else path).split("/")
    return names[:-1] if suffix_of(path) in PARQUET.endings else names


def _parts_of(path: str) -> tuple[list[ParquetPart], int]:
    """Return the parquet file or files at a path, and the number of other files in the folder.

    Raises `InvalidDataError` if a folder has no parquet file.
    """
    place = Url.of(path) if is_url(path) else str(Path(path).absolute())
    file = part_at(place) if suffix_of(path) in PARQUET.endings else None
    if file is not None:
        return [file], 0
    with read_errors(str(place), remote=isinstance(place, Url)):
        if isinstance(place, Url):
            sizes, n_ignored = _below_url(place)
            parts = [ParquetPart(place / name, size, _partition(name)) for name, size in sizes]
        else:
            names, n_ignored = _below_folder(place)
            parts = [
                ParquetPart(name, check_regular(name), _partition(name.removeprefix(place))) for name in names
            ]
    if not parts:
        raise InvalidDataError(f"the folder {path} holds no file named *.parquet.")
    return parts, n_ignored


def _partition(name: str) -> tuple[tuple[str, str | None], ...]:
    """Return the columns and values that the folders ``column=value`` in the name of a file give."""
    pairs = [folder.split("=", 1) for folder in name.split("/")[:-1] if "=" in folder]
    return tuple((unquote(key), None if value == NULL_PARTITION else unquote(value)) for key, value in pairs)


def partition_columns(parts: Sequence[ParquetPart]) -> dict[str, np.dtype[Any] | None]:
    """Return the type of each column that the names of folders give; None for text.

    A file without such a column has a null in it.
    """
    names = dict.fromkeys(name for part in parts for name, _ in part.partition)
    values = {name: [dict(part.partition).get(name) for part in parts] for name in names}
    return {name: _partition_dtype(texts) for name, texts in values.items()}


def _partition_dtype(values: Sequence[str | None]) -> np.dtype[Any] | None:
    texts = [value for value in values if value is not None]
    if not texts or not all(value.isascii() and value.removeprefix("-").isdecimal() for value in texts):
        return None
    if not all(MIN_INT32 <= int(value) <= MAX_INT32 for value in texts):
        return None
    return np.dtype(np.float64 if len(texts) < len(values) else np.int32)


def _below_folder(folder: str) -> tuple[list[str], int]:
    """Return the parquet files at any depth below a folder, in dask's natural order, and how many others.

    Others are hidden files, and those with other endings.
    """
    paths = [os.path.relpath(path, folder) for path in paths_below(folder)]
    names = sorted(filter(_is_read, paths), key=natural_sort_key)
    return [f"{folder}/{name}" for name in names], len(paths) - len(names)


def _below_url(folder: Url) -> tuple[list[tuple[str, int]], int]:
    """Return names and sizes of the parquet files below a folder, as `_below_folder`, and how many others."""
    sizes = folder.find()
    names = sorted(filter(_is_read, sizes), key=natural_sort_key)
    return [(name, sizes[name]) for name in names], len(sizes) - len(names)


def _is_read(name: str) -> bool:
    """Return whether a file is parquet and not hidden: dask and pyarrow ignore names like .a and _a."""
    return name.endswith(".parquet") and not any(part.startswith((".", "_")) for part in name.split("/"))


def is_parquet(place: Place) -> bool:
    """Return whether each path of a place (see `paths_at`) is a parquet file, or a folder that holds some.

    If the ending of the name decides, nothing is opened. Raises `InvalidDataError` if a path cannot be
    accessed.
    """
    return all(_is_parquet(path) for path in paths_at(place))


def _is_parquet(path: str) -> bool:
    if suffix_of(path) in PARQUET.endings:
        return True
    if is_url(path) and suffix_of(path) in ENDINGS_OF_ROWS:
        return False
    place = Url.of(path) if is_url(path) else Path(path)
    with read_errors(str(place), remote=isinstance(place, Url)):
        if any((place / name).exists() for name in ZARR_DOCUMENTS):
            return False
        if isinstance(place, Url):
            return bool(_below_url(place)[0])
        return place.is_dir() and bool(_below_folder(str(place))[0])
