"""Every error that the package raises on purpose, under one base class; and how it warns."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

from emtau_dask.messages import shown


class EmtauError(Exception):
    """Base class of every error that emtau_dask raises on purpose.

    Its message holds no secret of a URL, and nothing that a terminal would obey.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(shown(value) if isinstance(value, str) else value for value in args))


class InvalidDataError(EmtauError, ValueError):
    """Data, weights, responsibilities or parameters that cannot be used.

    The message names the value, the limit and the remedy; for NaN and infinity
    also the first bad chunk and row.
    """


class UnusableRowError(InvalidDataError):
    """A row holds NaN, infinity, or a number too large to be squared.

    Attributes
    ----------
    row : int
        Its global number.
    feature : int or None
        The first feature whose value cannot be used; None where it is the row as a whole.
    """

    def __init__(self, message: str, row: int, feature: int | None = None) -> None:
        super().__init__(message, row, feature)
        self.row = row
        self.feature = feature

    def __str__(self) -> str:
        return str(self.args[0])


@contextmanager
def features_named(names: Sequence[str] | None) -> Iterator[None]:
    """Add the name of the feature to every `UnusableRowError` in the block; None where there are no names."""
    try:
        yield
    except UnusableRowError as error:
        if names is None or error.feature is None:
            raise
        number = f"(feature {error.feature}"
        message = str(error).replace(f"{number})", f"{number}, {str(names[error.feature])!r})")
        raise UnusableRowError(message, error.row, error.feature) from None


class InvalidDtypeError(InvalidDataError, TypeError):
    """Data of a kind that is not real numbers (complex, object, strings)."""


class ConfigError(EmtauError, ValueError):
    """A run config or setting that cannot be used; names the key."""


class PathTakenError(EmtauError):
    """Something is where a result is to be written, and may not be replaced."""


class SingularComponentError(EmtauError, ValueError):
    """A component collapsed: no weight left, or no positive-definite covariance.

    Attributes
    ----------
    component : int
        Index of the component (0-based); for tied covariances, -1.
    weight : float
        Its weight, in (weighted) rows.
    """

    def __init__(self, component: int, weight: float, reason: str) -> None:
        self.component = component
        self.weight = weight
        self.reason = reason
        name = "the shared covariance" if component < 0 else f"component {component}"
        super().__init__(
            "Fitting the mixture model failed because some components have ill-defined empirical "
            "covariance (for instance caused by singleton or collapsed samples). Try to decrease the "
            "number of components, increase reg_covar, or scale the input data. "
            f"Here {name} (weight {weight:.6g} rows): {reason}."
        )

    def __reduce__(self) -> tuple[type[SingularComponentError], tuple[int, float, str]]:
        return type(self), (self.component, self.weight, self.reason)


class StorageError(EmtauError, OSError):
    """A file that is not a checkpoint's cannot be written; names the path, what is wrong and the remedy."""


class CheckpointError(EmtauError):
    """A checkpoint cannot be written, read or resumed."""


class StoreUnreachableError(CheckpointError):
    """The server of a checkpoint does not answer, after some attempts; nothing more is asked of it."""


class CheckpointExistsError(CheckpointError):
    """The place of a new run already holds one, or something else."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is of another format version, other data or other settings; names both sides."""


class CheckpointCorruptError(CheckpointError):
    """An object of a checkpoint is missing, truncated or altered; names it."""


class CheckpointTakenError(CheckpointError):
    """Another process has continued this run meanwhile."""


class MissingPackageError(EmtauError, ImportError):
    """A package that only some need is not installed; names it, and how to install it."""


class ClusterError(EmtauError):
    """A dask cluster cannot be used, or failed while it was; says what to change."""


class ShutdownError(EmtauError):
    """Python is shutting down, and begins no more threads; nothing is wrong with data or checkpoint."""


@contextmanager
def shutdown_named() -> Iterator[None]:
    """Raise `ShutdownError` for what Python says of a thread or a task that it does not begin any more."""
    try:
        yield
    except RuntimeError as error:
        if "shutdown" not in str(error) or _begins_threads():
            raise
        raise ShutdownError(
            f"Python is shutting down, and begins no more work in other threads ({error}). Let the main "
            "thread wait for this one before it ends, for example by thread.join(). The last commit of a "
            "checkpoint is intact; GaussianMixture.resume goes on from it."
        ) from error


def _begins_threads() -> bool:
    """Return whether Python still begins threads; that alone tells, as pools say the same when they end."""
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int)
    except RuntimeError:
        return False
    return True


def warn_user(message: str, category: type[Warning] = UserWarning, line: FrameType | None = None) -> None:
    """Warn at a line of the user's: ``line``, or `line_of_user` of this thread."""
    line = line or line_of_user()
    namespace = line.f_globals
    warnings.warn_explicit(
        shown(message),
        category,
        line.f_code.co_filename,
        line.f_lineno,
        str(namespace.get("__name__")),
        namespace.setdefault("__warningregistry__", {}),
    )


def line_of_user() -> FrameType:
    """Return the line, outside of this package, by which this thread entered it."""
    package = f"{__name__.partition('.')[0]}."
    frame: FrameType | None = sys._getframe()
    found = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(package):
            found = frame.f_back or frame
        frame = frame.f_back
    while found.f_globals.get("__name__") == "contextlib" and found.f_back is not None:
        found = found.f_back
    return found
