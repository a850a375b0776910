"""Whether a fit or a prediction uses the compiled loops, in this process and in those that run its tasks."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from typing import Any

from emtau_dask.dask_config import read_settings
from emtau_dask.data.source import Source
from emtau_dask.em.history import FitObserver
from emtau_dask.errors import ClusterError, ConfigError
from emtau_dask.execution.scheduler import cluster_errors
from emtau_dask.kernels.dispatch import compilation_noted, compile_loops, why_not_compiled
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.plan import fits_tiles

KEY = "emtau.compiled"
MIN_PRODUCTS = 2**26
"""Minimum products of features and coefficients in an iteration for which a fit is compiled. They take about
ten milliseconds; importing numba takes half a second, and the first compilation a few seconds."""
MIN_PRODUCTS_WITH_MISSING = 2**22
"""The same if values may be missing, where NumPy takes a hundred times as long."""
MIN_PRODUCTS_ONCE = 2**32
"""Minimum products of a single pass for which it is compiled; NumPy takes seconds for them."""
COMPILES = "compiling loops: once per machine, some seconds"


def compile_setting() -> str:
    """Return dask's ``emtau.compiled``: ``"auto"``, ``"always"`` or ``"never"``.

    Raises
    ------
    ConfigError
        The setting is none of the three, or it is ``"always"`` and nothing can be compiled.
    """
    setting = read_settings().compiled
    if setting == "always" and (why_not := why_not_compiled()) is not None:
        raise ConfigError(
            f"dask's setting {KEY} is 'always', but nothing can be compiled here ({why_not}). Install numba "
            "with pip install numba, or set 'auto'."
        )
    return setting


def worth_compiling(
    client: Any, shape: tuple[int, ...], covariance_type: str, n_components: int, *, missing: bool = False
) -> bool:
    """Return whether a fit uses the compiled loops where it can.

    Dask's ``emtau.compiled`` decides. With ``"auto"`` they are used by fits of at least `MIN_PRODUCTS`, or
    `MIN_PRODUCTS_WITH_MISSING`, unless they do not support so many features, or this process or a worker
    cannot compile.

    Parameters
    ----------
    client : distributed.Client or None
    shape : tuple of int
        Rows and features.
    covariance_type : str
    n_components : int
    missing : bool, default=False
        Whether values may be missing.

    Raises
    ------
    ConfigError
        The setting cannot be used.
    """
    (n_rows, n_features), least = shape, MIN_PRODUCTS_WITH_MISSING if missing else MIN_PRODUCTS
    return _worth(client, n_rows, n_features, covariance_type, n_components, least)


def worth_compiling_once(
    client: Any,
    n_rows: float,
    n_features: int,
    covariance_type: str,
    n_components: int,
    *,
    missing: bool = False,
) -> bool:
    """Return the same for a single pass over rows, which needs `MIN_PRODUCTS_ONCE` products.

    If values may be ``missing`` it needs `MIN_PRODUCTS`. An unknown number of rows is NaN, and counts as few.
    """
    least = MIN_PRODUCTS if missing else MIN_PRODUCTS_ONCE
    return _worth(client, n_rows, n_features, covariance_type, n_components, least)


def _worth(
    client: Any, n_rows: float, n_features: int, covariance_type: str, n_components: int, least: int
) -> bool:
    setting = compile_setting()
    if setting != "auto":
        return setting == "always"
    structure = structure_named(covariance_type)
    size = n_rows * n_components * structure.n_row_features(n_features)
    if not size >= least or not fits_tiles(structure, n_features):
        return False
    if why_not_compiled() is not None:
        return False
    if client is None:
        return True
    with cluster_errors():  # a worker that is lost meanwhile (OSError) is left to `check_compiler`
        answers = client.run(why_not_compiled, on_error="return")
    return all(answer is None or isinstance(answer, OSError) for answer in answers.values())


@cache
def check_compiler() -> None:
    """Raise `ClusterError` in a worker that cannot compile; the fitting process could."""
    why_not = why_not_compiled()
    if why_not is not None:
        raise ClusterError(
            f"this worker cannot compile ({why_not}), but the process that gave it work can. Install numba "
            f"on every worker (pip install numba), or set dask's {KEY} to 'never'."
        )


def compile_ahead(
    structure: CovarianceStructure, n_components: int, rows: Source, observer: FitObserver, *, missing: bool
) -> None:
    """Begin to compile the loops in a thread of this process, before a fit needs them.

    A pass that needs them meanwhile waits, so the bits of a fit do not depend on how long that takes.
    ``observer`` gets a note if they were not compiled on this machine before.
    """

    def compile_here() -> None:
        with suppress(Exception), noted(observer):  # A pass that needs the loops raises the same error.
            compile_loops(structure, n_components, rows.shape[1], rows.dtype, missing=missing)

    threading.Thread(target=compile_here, name="emtau-compile").start()


def noted(observer: FitObserver) -> AbstractContextManager[None]:
    """Return a context in which ``observer`` gets a note when loops are compiled in this process."""
    return compilation_noted(partial(observer.note, COMPILES))
