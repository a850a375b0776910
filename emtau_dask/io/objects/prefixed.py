"""Objects of a store whose keys begin alike, as a store of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from emtau_dask.io.objects.base import ObjectStore


@dataclass(frozen=True)
class PrefixedObjects(ObjectStore):
    """The objects of ``whole`` whose keys begin with ``folder`` and a slash, which their keys here lack."""

    whole: ObjectStore
    folder: str

    @property
    def location(self) -> str:
        """That of the whole, and the folder."""
        return f"{self.whole.location}/{self.folder}"

    @property
    def shared(self) -> bool:
        """As the whole is."""
        return self.whole.shared

    @property
    def exclusive(self) -> bool:
        """As the whole is."""
        return self.whole.exclusive

    def _key(self, key: str) -> str:
        return f"{self.folder}/{key}"

    def prepare(self) -> None:
        """Prepare the whole."""
        self.whole.prepare()

    def empty(self) -> bool:
        """List them."""
        return not self.list("")

    def get(self, key: str, limit: int) -> bytes | None:
        """Read one of the whole."""
        return self.whole.get(self._key(key), limit)

    def put(self, key: str, data: bytes) -> None:
        """Write one of the whole."""
        self.whole.put(self._key(key), data)

    def create(self, key: str, data: bytes) -> bool:
        """Create one of the whole."""
        return self.whole.create(self._key(key), data)

    def sync(self, keys: Iterable[str]) -> None:
        """Make them durable in the whole."""
        self.whole.sync(list(map(self._key, keys)))

    def list(self, prefix: str) -> list[str]:
        """List the whole."""
        return [key.removeprefix(self._key("")) for key in self.whole.list(self._key(prefix))]

    def delete(self, keys: Iterable[str]) -> None:
        """Remove them from the whole."""
        self.whole.delete(list(map(self._key, keys)))
