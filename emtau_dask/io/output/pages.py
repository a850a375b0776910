"""A page of HTML that appears at its place whole, and replaces nothing but such a page."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from emtau_dask.errors import EmtauError, InvalidDataError
from emtau_dask.io.files import give_free_name, read_regular, writing_errors
from emtau_dask.io.output.zarr_rows import refuse_inputs, refuse_url

ENDINGS = (".html", ".htm")
BEGINNING = 2**12
_OURS = re.compile(
    r'<meta name="generator" content="emtau_dask [^"<>]*">\s*<meta name="emtau-run" content="(\w*)">'
)
"""How a page says that emtau wrote it, and of which run it is."""


def refuse_existing_page(path: Path, overwrite: bool, *, inputs: Sequence[str | Path] = ()) -> None:
    """Raise `EmtauError` unless a page may be written at the local path ``path``.

    With ``overwrite`` it may replace a page that emtau wrote, and nothing else. It never replaces what is
    read for it, ``inputs``.
    """
    refuse_url(path)
    if path.suffix.lower() not in ENDINGS:
        raise EmtauError(
            f"{path} would hold a page of HTML, which its name does not say; give a name such as "
            f"{path.with_suffix(ENDINGS[0])}"
        )
    refuse_inputs(path, inputs)
    with writing_errors("the report", path):
        if not path.exists():
            return
    if not overwrite:
        raise EmtauError(f"{path} already exists; use --overwrite to replace it, or choose another place")
    if _written_by_us(path) is None:
        raise EmtauError(
            f"{path} is no report that emtau wrote, so --overwrite does not replace it; choose another place"
        )


def run_of_page(path: Path) -> str | None:
    """Return the id of the run that a page is a report of; None where it names none, or is no report."""
    found = _written_by_us(path)
    return None if found is None else found[1] or None


def _written_by_us(path: Path) -> re.Match[str] | None:
    try:
        beginning = read_regular(path, 0, BEGINNING, BEGINNING).tobytes()
    except (OSError, InvalidDataError):
        return None
    return _OURS.search(beginning.decode("utf-8", "replace"))


def write_page(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a page where nothing is; with ``overwrite`` also in place of a page that emtau wrote.

    Raises
    ------
    EmtauError
        Something else is there by now, or nothing can be written there.
    """
    with writing_errors("the report", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.emtau-", dir=path.parent) as folder:
            private = Path(folder) / path.name
            private.write_text(text, encoding="utf-8")
            try:
                give_free_name(private, path)
            except FileExistsError:
                refuse_existing_page(path, overwrite)
                private.replace(path)
