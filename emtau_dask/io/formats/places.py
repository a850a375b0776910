"""Where rows are stored: a path or a URL, a pattern of names, or a list of these."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from glob import glob, has_magic
from pathlib import Path

from emtau_dask.errors import InvalidDataError
from emtau_dask.io.files import check_listed
from emtau_dask.io.remote import Url, is_url, plain_path, read_errors

Place = str | Sequence[str]


def paths_at(place: Place) -> tuple[str, ...]:
    """Return the paths and URLs that a place stands for.

    Parameters
    ----------
    place : str or sequence of str
        A path or URL; a pattern with ``*`` (in local paths also ``?`` and ``[...]``; ``**`` is any number of
        folders), unless that very path exists; or a list of these.

    Returns
    -------
    tuple of str
        Those of a list in its order. Those of a pattern in the order of their names, folder by folder and
        character by character, so that ``part-10`` comes before ``part-9``.

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
    """Return the paths that match; raises `OSError` where a folder that may hold some cannot be looked into.

    Python's glob takes such a folder for an empty one.
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
    # Path.glob would also find hidden files, such as those that are being written.
    return sorted(glob(pattern, recursive=True), key=lambda name: Path(name).parts)  # noqa: PTH207


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
    """Return a place for messages: a path or pattern, or the first of a list and how many follow."""
    if isinstance(place, str):
        return place
    first, *others = place
    return f"{first} and {len(others)} more" if others else first
