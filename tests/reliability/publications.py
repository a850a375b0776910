"""What children of a `Zygote` do to a place at which results appear."""

from pathlib import Path

from emtau_dask.errors import EmtauError
from emtau_dask.storage.errors import writing_errors
from emtau_dask.storage.publishing import published
from reliability.boundaries import Boundaries

FILES = ("zarr.json", "c/0", "c/1")
TABLE = ".csv"
"""The ending of a place that is a file; others are folders."""


def written(folder, word, ending=""):
    """Make a folder of some files that hold a word, or one such file."""
    if ending == TABLE:
        folder.write_text(word)
        return
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(word)


def word_at(folder):
    """Return the word that all files of a folder hold, or a file; None where there is nothing."""
    if not folder.exists():
        return None
    if folder.is_file():
        return folder.read_text()
    (word,) = {(folder / name).read_text() for name in FILES}
    return word


def publish(target, word, overwrite, at=None):
    """Return the kind of error (empty for none), what it says, and the steps that it took."""
    boundaries = Boundaries(at).install()
    try:
        with (
            writing_errors("the word", target),
            published(Path(target), replaceable=lambda path: overwrite) as folder,
        ):
            written(folder, word, Path(target).suffix)
    except EmtauError as error:
        return type(error).__name__, str(error), boundaries.count
    return "", "", boundaries.count
