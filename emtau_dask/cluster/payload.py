"""Values that are pickled once, where they are made, and unpickled where tasks use them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import cloudpickle

from emtau_dask.errors import CheckpointCorruptError, ClusterError, EmtauError
from emtau_dask.io.files import this_process
from emtau_dask.versions import OWN, other_versions, software

T = TypeVar("T")


class Payload(Generic[T]):
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
        Without the contents of the large buffers of the value.
    buffers : sequence of buffer
        These contents.
    made_with : mapping of str to str, optional
        The `software` of the process that made it. Another one with another version of this
        package does not unpickle it.
    """

    def __init__(
        self, pickled: bytes, buffers: Sequence[Any], made_with: Mapping[str, str] | None = None
    ) -> None:
        self._pickled, self._buffers = pickled, buffers
        self._made_with = made_with
        self._opening = threading.Lock()
        self._opened: list[T] = []

    @classmethod
    def of(
        cls,
        value: T,
        dumps: Callable[..., bytes] = cloudpickle.dumps,
        made_with: Mapping[str, str] | None = None,
    ) -> Payload[T]:
        """Return the pickle of ``value``; its large arrays are not copied. Raises what pickling raises.

        Parameters
        ----------
        value : object
        dumps : callable
            ``pickle.dumps`` takes a tenth of the time, for what all processes can import.
        made_with : mapping of str to str, optional
            What `software` returns here, to be compared where it is unpickled.
        """
        buffers: list[pickle.PickleBuffer] = []
        pickled = dumps(value, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        return cls(pickled, buffers, made_with)

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
                self._check_version()
                try:
                    self._opened.append(pickle.loads(self._pickled, buffers=self._buffers))
                except Exception as error:
                    raise ClusterError(self._unopened(error)) from error
            return self._opened[0]

    def _check_version(self) -> None:
        """Raise `ClusterError` where this process has another version of the package."""
        if self._made_with is None:
            return
        mine = software()
        if mine[OWN] != self._made_with[OWN]:
            raise ClusterError(
                f"{this_process()} has {OWN} {mine[OWN]}, the process that fits {self._made_with[OWN]}. "
                "Install the same version on every worker."
            )

    def _other_versions(self) -> str:
        return "" if self._made_with is None else other_versions(software(), self._made_with)

    @contextmanager
    def in_use(self) -> Iterator[T]:
        """Give the value; what fails in a process with other versions of packages is a `ClusterError`.

        Not what is the data's or the fit's own: errors of this package, but for state that cannot be read.
        """
        value = self.value
        try:
            yield value
        except Exception as error:
            why = self._other_versions()
            if not why or (isinstance(error, EmtauError) and not isinstance(error, CheckpointCorruptError)):
                raise
            raise ClusterError(
                f"{this_process()} failed ({type(error).__name__}: {error}). {why.rstrip()}"
            ) from error

    def _unopened(self, error: Exception) -> str:
        return (
            f"{this_process()} cannot unpickle what tasks need ({type(error).__name__}: {error}). "
            f"{self._other_versions()}All that it refers to, such as a policy of your own, must be "
            "importable on every worker: install it there; or set dask.config.set(scheduler='threads')."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        buffers = [pickle.PickleBuffer(buffer) for buffer in self._buffers]
        return Payload, (self._pickled, buffers, self._made_with)


def in_use(thing: T | Payload[T]) -> AbstractContextManager[T]:
    """Give the value of a payload, as by `Payload.in_use`; anything else as it is."""
    return thing.in_use() if isinstance(thing, Payload) else nullcontext(thing)


def opened(thing: T | Payload[T]) -> T:
    """Return the value of a payload; anything else as it is."""
    return thing.value if isinstance(thing, Payload) else thing
