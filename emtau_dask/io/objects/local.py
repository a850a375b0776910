"""Objects as files below a folder."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from emtau_dask.errors import CheckpointTakenError, InvalidDataError
from emtau_dask.io.files import each, give_free_name, opened_regular, paths_below, remedy_of
from emtau_dask.io.objects.base import (
    PARTIAL,
    PARTIAL_NAME,
    PROBES,
    ObjectStore,
    begun_elsewhere,
    storage_errors,
)

FOLDERS_MADE = 10
"""How often an object's folder is made anew, where others find it empty and remove it."""


@dataclass(frozen=True)
class LocalObjects(ObjectStore):
    """Objects as files below a folder, whose path ``root`` is absolute."""

    root: str

    @property
    def location(self) -> str:
        """The folder."""
        return self.root

    @property
    def shared(self) -> bool:
        """Yes, with processes that see the folder."""
        return True

    @property
    def exclusive(self) -> bool:
        """Yes: `give_free_name` fails where the name exists."""
        return True

    def _path(self, key: str) -> Path:
        return Path(self.root, key)

    def _errors(self, doing: str) -> AbstractContextManager[None]:
        return storage_errors(self.root, doing, lambda error: remedy_of(error, self.root))

    def prepare(self) -> None:
        """Make the folder."""
        with self._errors("make the folder"):
            Path(self.root).mkdir(parents=True, exist_ok=True)
            _fsync(str(Path(self.root).parent))

    def empty(self) -> bool:
        """Look for the folder, and for anything in it but probes and remains of an interrupted `create`."""
        root = Path(self.root)
        with self._errors("see what is there"):
            if not root.is_dir():
                return not root.exists()
            names = [path.name for path in root.iterdir()]
            return all(name == PROBES or PARTIAL_NAME.fullmatch(name) for name in names)

    def get(self, key: str, limit: int) -> bytes | None:
        """Read a file; anything else, such as a pipe, counts as missing."""
        with self._errors(f"read {key}"):
            try:
                with (
                    opened_regular(self._path(key)) as (descriptor, size),
                    open(descriptor, "rb", closefd=False) as file,
                ):
                    return file.read(min(limit, size) + 1)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError, InvalidDataError):
                return None

    @staticmethod
    def _new_partial(path: Path) -> Path:
        return path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")

    @contextmanager
    def _written(self, path: Path, data: bytes, *, durable: bool) -> Iterator[Path]:
        """Give the block a temporary file beside ``path``; after an error nothing new is left."""
        partial = self._new_partial(path)
        try:
            with self._opened(partial) as file:
                left = memoryview(data)
                while len(left):
                    left = left[file.write(left) :]
                if durable:
                    os.fsync(file.fileno())
            yield partial
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            self._remove_empty(path.parent)
            raise

    def _opened(self, path: Path) -> io.FileIO:
        """Return a new file; its folder is made where it is missing, again if others remove it."""
        for _ in range(FOLDERS_MADE):
            try:
                return path.open("xb", buffering=0)
            except FileNotFoundError:
                if not Path(self.root).is_dir():
                    raise
            with suppress(FileNotFoundError):
                self._make_folder(path.parent)
        return path.open("xb", buffering=0)

    def _make_folder(self, folder: Path) -> None:
        """Make folders below the root, never the root itself: where that has vanished, so has the run."""
        root = Path(self.root)
        missing = [path for path in (folder, *folder.parents) if root in path.parents]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
        each(_fsync, [str(path.parent) for path in missing])

    def put(self, key: str, data: bytes) -> None:
        """Write a temporary file and rename it."""
        path = self._path(key)
        with self._errors(f"write {key}"), self._written(path, data, durable=False) as partial:
            partial.replace(path)

    def create(self, key: str, data: bytes) -> bool:
        """Write a temporary file, fsync it, give it its name, fsync the folders."""
        path = self._path(key)
        with self._errors(f"write {key}"), self._written(path, data, durable=True) as partial:
            try:
                give_free_name(partial, path)
            except FileExistsError:
                return False
            except FileNotFoundError:
                if path.exists():
                    return False
                raise
            finally:
                partial.unlink(missing_ok=True)
            _fsync(str(path.parent))
        return True

    def check_exclusive(self) -> None:
        """Raise `CheckpointError` unless the file system refuses a name that is taken; leaves nothing."""
        with self._errors("give a file a name that is free"):
            name = self._new_partial(self._path(f"{PROBES}/name"))
            made = [name]
            try:
                with (
                    self._written(name, b"", durable=False) as first,
                    self._written(name, b"", durable=False) as second,
                ):
                    made += [first, second]
                    give_free_name(first, name)
                    with suppress(FileExistsError):
                        give_free_name(second, name)
                        raise OSError(errno.ENOTSUP, "a file that was there has been replaced")
            except FileNotFoundError as error:
                if not Path(self.root).is_dir():
                    raise
                raise begun_elsewhere(self) from error  # A process that begins a run removes such files.
            finally:
                for path in made:
                    path.unlink(missing_ok=True)
                self._remove_empty(name.parent)

    def sync(self, keys: Iterable[str]) -> None:
        """Fsync files and the folders that name them."""
        paths = [self._path(key) for key in keys]
        with self._errors("make written objects durable"):
            each(_fsync, [str(path) for path in {*paths, *(path.parent for path in paths)}])

    def list(self, prefix: str) -> list[str]:
        """Walk the folder; temporary files are listed too."""
        top = Path(self.root, prefix)
        with self._errors(f"list {prefix or 'the objects'}"):
            return sorted(path.removeprefix(f"{self.root}/") for path in paths_below(top, changing=True))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files, and the folders that this leaves empty."""
        folders = set()
        with self._errors("remove objects"):
            for key in keys:
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(f"{self.root}/{key}")  # noqa: PTH108 (making a Path takes longer)
                folders.add(key.rpartition("/")[0])
        for folder in sorted(folders, key=lambda name: -name.count("/")):
            self._remove_empty(self._path(folder))

    def _remove_empty(self, folder: Path) -> None:
        """Remove a folder below the root, and those above it, as far as they are empty."""
        while folder != Path(self.root) and folder.is_relative_to(self.root):
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                break
            folder = folder.parent

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder until this process ends, at the latest; a file system without locks is trusted."""
        with self._errors("open the folder"):
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise CheckpointTakenError(
                        f"another process is replacing the run in {self.root}; choose another place, or "
                        "start again when it has ended."
                    ) from error
            yield
        finally:
            os.close(descriptor)


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
