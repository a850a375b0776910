"""What is pickled once, where it is made, and unpickled where it is used."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import cloudpickle

from emtau_dask.errors import ClusterError

__all__ = ["Sealed", "opened"]

T = TypeVar("T")


class Sealed(Generic[T]):
    """The pickle of a value, which other processes pass on as it is.

    A worker that has a task's result sends it to others while tasks of its own
    use it. To pickle then what tasks use is unsafe: zarr's codecs, for one, keep
    what they make at their first use in their ``__dict__``, and pickle does not
    bear a dictionary that grows. (Distributed then waits for ever for the result.)
    And a cluster's scheduler, which unpickles every graph, need not unpickle
    what is in it.

    Parameters
    ----------
    pickled : bytes
        Of the value, without the contents of its large buffers.
    buffers : sequence of buffer
        Those contents.
    """

    def __init__(self, pickled: bytes, buffers: Sequence[Any]) -> None:
        self._pickled, self._buffers = pickled, buffers
        self._opening = threading.Lock()
        self._opened: list[T] = []

    @classmethod
    def of(cls, value: T, dumps: Callable[..., bytes] = cloudpickle.dumps) -> Sealed[T]:
        """Return the pickle of ``value``; its large arrays are not copied. Raises what pickling raises.

        Parameters
        ----------
        value : object
        dumps : callable
            ``pickle.dumps`` takes a tenth of the time, for what all processes can import.
        """
        buffers: list[pickle.PickleBuffer] = []
        pickled = dumps(value, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        return cls(pickled, buffers)

    @property
    def nbytes(self) -> int:
        """Bytes that other processes get."""
        return len(self._pickled) + sum(pickle.PickleBuffer(buffer).raw().nbytes for buffer in self._buffers)

    @property
    def value(self) -> T:
        """The same object for all threads.

        Raises
        ------
        ClusterError
            This process cannot unpickle it.
        """
        with self._opening:
            if not self._opened:
                try:
                    self._opened.append(pickle.loads(self._pickled, buffers=self._buffers))
                except Exception as error:
                    raise ClusterError(
                        f"a worker cannot unpickle what tasks need ({type(error).__name__}: {error}). All "
                        "that it refers to, such as a policy of your own, must be importable on every "
                        "worker: install it there; or set dask.config.set(scheduler='threads')."
                    ) from error
            return self._opened[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return Sealed, (self._pickled, [pickle.PickleBuffer(buffer) for buffer in self._buffers])


def opened(thing: T | Sealed[T]) -> T:
    """Return the value of what is sealed; anything else as it is."""
    return thing.value if isinstance(thing, Sealed) else thing
