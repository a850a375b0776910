"""What is pickled once, where it is made, and passed on as it was."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import cloudpickle

__all__ = ["Sealed"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Sealed(Generic[T]):
    """A value, and the pickle that other processes get of it.

    A worker that has a task's result sends it to others while tasks of its own
    use it. To pickle then what tasks use is unsafe: zarr's codecs, for one, keep
    what they make at their first use in their ``__dict__``, and pickle does not
    bear a dictionary that grows. (Distributed then waits for ever for the result.)

    Attributes
    ----------
    value : object
    pickled : bytes
        Of the value, without the contents of its large buffers.
    buffers : sequence of buffer
        Those contents: they belong to the arrays of ``value``, and are no copies.
    """

    value: T
    pickled: bytes
    buffers: Sequence[Any]

    @classmethod
    def of(cls, value: T) -> Sealed[T]:
        """Return ``value`` with its pickle; raises what pickling raises."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        return cls(value, pickled, buffers)

    @property
    def nbytes(self) -> int:
        """Bytes that other processes get."""
        return len(self.pickled) + sum(pickle.PickleBuffer(buffer).raw().nbytes for buffer in self.buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        """Give the pickle that there is."""
        return _opened, (self.pickled, [pickle.PickleBuffer(buffer) for buffer in self.buffers])


def _opened(pickled: bytes, buffers: Sequence[Any]) -> Sealed[Any]:
    return Sealed(pickle.loads(pickled, buffers=buffers), pickled, buffers)
