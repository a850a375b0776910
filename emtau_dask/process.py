"""State of a whole process: BLAS on one thread, objects shared by its tasks, versions.

BLAS has one thread: results must not depend on its number of threads, and
chunks run in parallel instead. (OpenMP's limit belongs to a thread: `em.starts`
sets it for the one library call that uses OpenMP.) The interpreter's switch
interval is short. A thread that waits for the interpreter's lock needs some 50 µs
to wake up, and another thread may meanwhile have finished a call of NumPy and taken the
lock again. After the interval the waiting thread gets the lock for certain. With glibc,
malloc keeps the memory of freed arrays for the next ones.

All are process-wide. The first holder sets the first two, and the last one restores them, in any thread.
After an interrupt at that moment they may stay set until the next holder is done.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import Any, TypeVar, cast
from uuid import uuid4
from weakref import WeakSet

import numpy as np
import scipy.linalg
from threadpoolctl import LibController, OpenBLASController, ThreadpoolController, threadpool_info

T = TypeVar("T")
OWN = "emtau_dask"
READERS = (OWN, "zarr", "numcodecs", "dask", "distributed", "fsspec", "pyarrow")
MAX_TOKENS = 256
"""Maximum number of verified tokens that a process remembers; others are verified again."""
SWITCH_INTERVAL = 5e-5
"""Switch interval of the interpreter during a fit (seconds); Python's default is 5e-3."""
KEPT_BYTES = 2**25 - 2**16
"""Maximum size of an array whose memory glibc may keep (bytes); it ignores arrays of more than 32 MiB."""
_IMPORTED = uuid4().hex


class ProcessObjects:
    """Objects by the function that creates them; a forked process begins without any."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all objects: locks and threads of another process are of no use."""
        self._making = threading.RLock()
        self._made: dict[Callable[[], Any], Any] = {}

    def of(self, make: Callable[[], T]) -> T:
        """Return this process's own object of a kind.

        Tasks run wherever dask sends them, and find there what tasks of the same process share: the rows that
        it keeps between passes, its budget for reads, its waiting threads, what it has verified.

        Parameters
        ----------
        make : callable () -> object
            A class, a function of a module, or a record that can be called; called once in a process.
        """
        if make not in self._made:
            with self._making:
                if make not in self._made:
                    self._made[make] = make()
        return cast("T", self._made[make])


_OBJECTS = ProcessObjects()
os.register_at_fork(after_in_child=_OBJECTS.begin)
of_process = _OBJECTS.of


def _version(package: str) -> str | None:
    imported = getattr(sys.modules.get(package), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def documentation() -> str:
    """Return the address of the documentation in the package's metadata; "" if there is none."""
    try:
        named = metadata(OWN).get_all("Project-URL") or ()
    except PackageNotFoundError:
        return ""
    addresses = dict(line.split(", ", 1) for line in named)
    return str(addresses.get("Documentation", "")).rstrip("/")


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = ((package, _version(package)) for package in READERS)
    return tuple((package, number) for package, number in found if number is not None)


def software() -> dict[str, str]:
    """Return the versions of the installed packages of this process, by name."""
    return dict(_versions())


def other_versions(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return a sentence on the versions in which two processes differ; "" if they are equal.

    Both are `software`. The sentence ends in a space, to be followed by other remedies.
    """
    found = differences(mine, theirs, "the process that fits")
    return f"It has other versions of packages ({found}): install the same there. " if found else ""


def differences(its: Mapping[str, str], mine: Mapping[str, str], here: str = "here") -> str:
    """Return the differences of two processes, such as ``"zarr 3.0.1, here 3.1.3"``; "" if there are none.

    Both are versions and the like by name; ``here`` names the second process.
    """
    names = [*mine, *(name for name in its if name not in mine)]
    return ", ".join(
        f"{name} {its.get(name, 'missing')}, {here} {mine.get(name, 'missing')}"
        for name in names
        if its.get(name) != mine.get(name)
    )


class VerifiedTokens:
    """The tokens of access that this process has verified."""

    def __init__(self) -> None:
        self._tokens: dict[str, None] = {}
        self._lock = threading.RLock()

    def once(self, token: str, verify: Callable[[], None]) -> None:
        """Call ``verify`` unless it has returned before for this token; other threads wait meanwhile.

        Its errors are raised, and the next call tries again.
        """
        if token in self._tokens:
            return
        with self._lock:
            if token not in self._tokens:
                verify()
                self.add(token)

    def add(self, token: str) -> None:
        """Remember a token as verified."""
        with self._lock:
            self._tokens[token] = None
            while len(self._tokens) > MAX_TOKENS:
                del self._tokens[next(iter(self._tokens))]


def this_process() -> str:
    """Return the name of this process in messages: a worker's is its address."""
    distributed = sys.modules.get("distributed")
    if distributed is not None:
        with suppress(ValueError):
            return f"the worker {distributed.get_worker().address}"
    return f"process {os.getpid()} on {platform.node()}"


@cache
def process_id() -> str:
    """Return a name that no other process on any host has."""
    return f"{_IMPORTED}-{os.getpid()}"


os.register_at_fork(after_in_child=process_id.cache_clear)


def _keep_memory() -> None:
    """Let malloc keep some 64 MiB of freed arrays for each thread.

    glibc returns free memory above twice the size of the largest array freed so far to the system, and later
    gets it again, page by page, filled with zeros. So a large array is allocated and freed here, without
    using a page of it. If a limit of malloc has been set, as dask does in workers, nothing changes
    (mallopt(3), M_MMAP_THRESHOLD).
    """
    np.empty(KEPT_BYTES, np.uint8)


def _control() -> None:
    """Let the next thread control OpenBLAS: since version 3.8 threadpoolctl allows only one."""
    if hasattr(OpenBLASController, "clear_controlling_thread"):
        OpenBLASController.clear_controlling_thread(force=True)


class _Setting:
    """One thread for BLAS and a short switch interval; remembers the values before."""

    def __init__(self, blas: Sequence[LibController]) -> None:
        self._threads = [(each, each.num_threads) for each in blas]
        self._usual_interval = self._interval = sys.getswitchinterval()

    def take(self) -> None:
        """Set both."""
        _keep_memory()
        sys.setswitchinterval(min(SWITCH_INTERVAL, self._usual_interval))
        self._interval = sys.getswitchinterval()
        _control()
        for library, _ in self._threads:
            library.set_num_threads(1)

    def lift(self) -> None:
        """Set both back; an interval that other code has set stays."""
        if sys.getswitchinterval() == self._interval:
            sys.setswitchinterval(self._usual_interval)
        _control()
        for library, threads in self._threads:
            library.set_num_threads(threads)
        _control()


class _Holder:
    """A user of the setting."""


class _Holders:
    """All users of the setting.

    Attributes
    ----------
    lock : RLock
        Protects the other attributes while the setting is taken or lifted. Reentrant, since a holder that an
        interrupt left behind may be collected anywhere.
    holding : WeakSet of _Holder
    process : _Holder
        Holds the setting for the rest of the process.
    setting : _Setting or None
        None if it is not in force.
    """

    def __init__(self) -> None:
        self._blas: tuple[int, list[LibController]] = 0, []
        self.begin()

    def begin(self) -> None:
        """Begin with no holders."""
        self.lock = threading.RLock()
        self.holding: WeakSet[_Holder] = WeakSet()
        self.process = _Holder()
        self.setting: _Setting | None = None

    def enter(self, holder: _Holder) -> None:
        """Return once the setting is in force."""
        with self.lock:
            self.holding.add(holder)
            if self.setting is None:
                self.setting = _Setting(self._blas_libraries())
                self.setting.take()

    def _blas_libraries(self) -> list[LibController]:
        """Return the BLAS libraries, which take milliseconds to find; found again after imports."""
        n_modules, found = self._blas
        if n_modules != len(sys.modules):
            found = [each for each in ThreadpoolController().lib_controllers if each.user_api == "blas"]
            self._blas = len(sys.modules), found
        return found

    def leave(self, holder: _Holder) -> None:
        """Lift the setting if there is no other holder."""
        with self.lock:
            self.holding.discard(holder)
            if self.setting is not None and not self.holding:
                self.setting.lift()
                self.setting = None

    def forget(self) -> None:
        """Begin anew in a forked process, which has no holders."""
        setting = self.setting
        self.begin()
        if setting is not None:
            setting.lift()


_HOLDERS = _Holders()
# A fork waits until the setting has been taken or lifted completely, which its child could not do.
os.register_at_fork(
    before=lambda: _HOLDERS.lock.acquire(),
    after_in_parent=lambda: _HOLDERS.lock.release(),
    after_in_child=_HOLDERS.forget,
)


@contextmanager
def threads_side_by_side() -> Iterator[None]:
    """Limit BLAS to one thread, and shorten the switch interval; nested and concurrent holders share both."""
    holder = _Holder()
    try:
        _HOLDERS.enter(holder)
        yield
    finally:
        _HOLDERS.leave(holder)


def hold_for_process() -> None:
    """Limit both for the rest of this process, unless they are limited already.

    Tasks outside the fitting process call it; the first one sets the limits while the others wait. A task
    that loaded a library at that moment could wait for ever; see `compiled_loops`.
    """
    with _HOLDERS.lock:
        if _HOLDERS.setting is None:
            _HOLDERS.enter(_HOLDERS.process)


@cache
def _environment() -> tuple[tuple[str, str], ...]:
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    blas = {f"{library['internal_api']} {library['version']}" for library in libraries}
    kinds = {str(library.get("architecture", "")) for library in libraries}
    return (
        ("python", platform.python_version()),
        ("numpy", np.__version__),
        ("scipy", scipy.__version__),
        ("blas", ", ".join(sorted(blas))),
        ("cpu", " ".join((platform.machine(), *sorted(kinds))).strip()),
    )


def numerical_environment(*, compiled: bool = False) -> dict[str, str]:
    """Return library versions and the kind of CPU, on which the last bits of a result depend.

    numba is included only if rows are scored by ``compiled`` tiles.
    """
    return {**dict(_environment()), **({"numba": version("numba")} if compiled else {})}
