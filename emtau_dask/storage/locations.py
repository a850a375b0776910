"""The kind of data at a path or URL, and the files that match a pattern."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path

from dask.utils import natural_sort_key
from zarr.storage import LocalStore

from emtau_dask.errors import InvalidDataError
from emtau_dask.storage.errors import read_errors
from emtau_dask.storage.files import check_listed, read_regular, stream_at
from emtau_dask.storage.urls import Url, is_url, plain_path, suffix_of
from emtau_dask.storage.zarr_check import document_at

OWN_GROUPS = {
    "emtau-checkpoint": "the checkpoint of a fit",
    "emtau-model": "a saved model",
    "emtau-labels": "a group of labels",
}
MODEL, CHECKPOINT = OWN_GROUPS["emtau-model"], OWN_GROUPS["emtau-checkpoint"]
FOLDERS = ("a folder", "a zarr array", "a zarr group", "a dataset")


@dataclass(frozen=True)
class Format:
    """A format of files: its kind with an article, its endings, and the bytes that its files begin with.

    ``read`` says whether its rows are read (`data.opening`). Where not, ``remedy`` says what to do.
    """

    kind: str
    endings: tuple[str, ...] = ()
    beginning: bytes = b""
    read: bool = False
    remedy: str = "Give a zarr array or group, a .npy, a parquet or a CSV file"


NPY = Format("a .npy file", (".npy",), b"\x93NUMPY", True, "Give it the ending .npy")
PARQUET = Format("a parquet file", (".parquet", ".pq"), b"PAR1", True, "Give it the ending .parquet")
CSV = Format("a CSV table", (".csv",), read=True)
TSV = Format("a table of text", (".tsv",), read=True)
FORMATS = (
    NPY,
    PARQUET,
    CSV,
    TSV,
    Format(
        "an .npz archive",
        (".npz",),
        remedy="Take its array out: numpy.save('rows.npy', numpy.load(path)[name])",
    ),
    Format("an Arrow file", (".feather", ".arrow"), b"ARROW1"),
    Format("an HDF5 file", (".h5", ".hdf5"), b"\x89HDF"),
    Format(
        "a netCDF file",
        (".nc", ".nc4"),
        remedy="Name its features: --features A,B, or fit(xarray.open_dataset(path), features=[...])",
    ),
    Format(
        "a raster image",
        (".tif", ".tiff"),
        remedy="Open it in Python: fit(rioxarray.open_rasterio(path, chunks=True), features='band')",
    ),
    Format(
        "an AnnData file",
        (".h5ad",),
        remedy="Write it once as zarr, adata.write_zarr('cells.zarr'), and give that with --array obsm/X_pca",
    ),
    Format("a pickle", (".pkl", ".joblib")),
    Format("an ORC file", (".orc",)),
    Format("a JSON file", (".json", ".jsonl")),
    Format("a page of HTML", (".html",)),
    Format("an Excel file", (".xls", ".xlsx")),
    Format("a zip archive", (".zip",), b"PK\x03\x04"),
    Format("a gzip file", (".gz",), b"\x1f\x8b"),
    Format("a compressed file", (".bz2", ".xz", ".zst")),
)
"""All but zarr, which is a folder. The ending of a file decides, where it is known."""
ENDINGS_OF_ROWS = (".zarr", *(ending for format in FORMATS if format.read for ending in format.endings))
Place = str | Sequence[str]


def kind_by_ending(path: str) -> str | None:
    """Return the kind by the ending of a path or URL, with an article; None if the ending is unknown."""
    found = format_by_ending(path)
    return None if found is None else found.kind


def format_by_ending(path: str) -> Format | None:
    """Return the format by the ending of a path or URL; None if the ending is unknown."""
    ending = suffix_of(path).lower()
    return next((found for found in FORMATS if ending in found.endings), None)


def kind_of(path: str) -> str | None:
    """Return the kind of data at a path, with an article; None for nothing, plain text and unknown kinds.

    For a URL the ending decides, and nothing is opened.
    """
    path = plain_path(path)
    if is_url(path):
        return kind_by_ending(path)
    place = Path(path)
    try:
        if place.is_dir():
            return _kind_of_folder(place)
        if not place.is_file():
            return None
        beginning = read_regular(place, 0, max(len(known.beginning) for known in FORMATS)).tobytes()
    except (OSError, ValueError):
        return None
    starts = (known for known in FORMATS if known.beginning and beginning.startswith(known.beginning))
    found = format_by_ending(path) or next(starts, None)
    return None if found is None else found.kind


def fit_in(place: str, *kinds: str) -> str:
    """Return what the folder of a run has of the first kind that is there once; other places as they are."""
    if is_url(place) or kind_of(place) not in ("a folder", "a dataset"):
        return place
    members = {str(path): kind_of(str(path)) for path in sorted(Path(plain_path(place)).iterdir())}
    for wanted in kinds:
        found = [path for path, kind in members.items() if kind == wanted]
        if len(found) == 1:
            return found[0]
    return place


def check_readable(path: str, array: str | None) -> None:
    """Raise `InvalidDataError` if a path has neither a folder nor a zarr array that may be rows.

    A member of a group that this package wrote must be named by ``array``.
    """
    stream = stream_at(path)
    if stream is not None:
        raise InvalidDataError(f"{path} is no regular file but {stream}; give a file.")
    kind = kind_of(path)
    with read_errors(path, remote=False):
        if kind is None and Path(plain_path(path)).is_file():
            kind = "a file of an unknown kind"
    if kind is None or kind in FOLDERS:
        return
    if kind not in OWN_GROUPS.values():
        remedy = next((known.remedy for known in FORMATS if known.kind == kind), Format.remedy)
        raise InvalidDataError(f"{path} is {kind}, which is not read as rows. {remedy}.")
    if array is None:
        raise InvalidDataError(f"{path} is {kind}, not rows. Give the data, or the name of an array in it.")


def _kind_of_folder(folder: Path) -> str:
    """Return the kind of a folder; raises OSError or ValueError if it cannot be read."""
    found = document_at(LocalStore(folder, read_only=True), "")
    if found is None:
        return "a folder"
    if found.kind == "array":
        return "a zarr array"
    attributes = found.document.get("attributes")
    attributes = attributes if isinstance(attributes, dict) else {}
    if "dataset" in attributes:
        return "a dataset"
    return OWN_GROUPS.get(str(attributes.get("format")), "a zarr group")


def paths_at(place: Place) -> tuple[str, ...]:
    """Return the paths and URLs of a place.

    Parameters
    ----------
    place : str or sequence of str
        A path or URL; a pattern with ``*`` (in local paths also ``?`` and ``[...]``; ``**`` is any number of
        folders), unless that very path exists; or a list of these.

    Returns
    -------
    tuple of str
        Those of a list in its order. Those of a pattern in natural order, in which ``part-9`` comes before
        ``part-10``.

    Raises
    ------
    InvalidDataError
        Nothing matches a pattern, or the list is empty.
    """
    given = [place] if isinstance(place, str) else list(place)
    if not given:
        raise InvalidDataError("the list of files is empty; give at least one.")
    return tuple(path for each in given for path in _matches(plain_path(each)))


def is_pattern(path: str) -> bool:
    """Return whether a path or URL is a pattern of names, and not the name of a file that exists."""
    if is_url(path):
        return "*" in path.partition("?")[0]
    with read_errors(path, remote=False):
        return has_magic(path) and not Path(path).exists()


def _matches(path: str) -> list[str]:
    if not is_pattern(path):
        return [path]
    if is_url(path):
        found = _remote_matches(path)
    else:
        with read_errors(path, remote=False):
            found = _local_matches(path)
    if not found:
        raise InvalidDataError(f"nothing matches {path}. Check the pattern; it is relative to {_base(path)}.")
    return found


def _local_matches(pattern: str) -> list[str]:
    """Return the paths that match; raises `OSError` if a folder that may have some cannot be listed.

    Python's glob treats such a folder as empty.
    """
    parts = Path(pattern).parts
    for number, part in enumerate(parts):
        within = parts[: number + (part == "**")]
        for folder in _sorted_glob(os.path.join(*within, "")) if within else [""]:  # noqa: PTH118
            if has_magic(part):
                check_listed(folder or ".")
            else:
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.lstat(f"{folder}{part}")
    return _sorted_glob(pattern)


def _sorted_glob(pattern: str) -> list[str]:
    # Path.glob would also find hidden files, such as unfinished ones.
    return sorted(glob(pattern, recursive=True), key=natural_sort_key)  # noqa: PTH207


def _base(path: str) -> str:
    return "its bucket or host" if is_url(path) else str(Path.cwd())


def _remote_matches(url: str) -> list[str]:
    before, star, after = url.partition("*")
    folder, _, begun = before.rpartition("/")
    pattern, question, query = f"{begun}{star}{after}".partition("?")
    with read_errors(url, remote=True):
        return [
            f"{folder}/{name}{question}{query}" for name in Url.of(f"{folder}{question}{query}").glob(pattern)
        ]


def place_text(place: Place) -> str:
    """Return a place for messages: a path or pattern, or the first of a list and the number of others."""
    if isinstance(place, str):
        return place
    first, *others = place
    return f"{first} and {len(others)} more" if others else first
