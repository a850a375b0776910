"""Whether the rows of a fit go by compiled tiles, in this process and in those that run its tasks."""

from __future__ import annotations

import dask

from emtau_dask.engine.cluster import cluster_errors
from emtau_dask.engine.scheduler import active_client
from emtau_dask.errors import ClusterError, ConfigError
from emtau_dask.mixture.tiles import why_not_compiled

__all__ = ["check_compiler", "worth_compiling"]

KEY = "emtau.compiled"
WORTH_IT = 2**24
"""Rows times components times features from which on a fit is compiled for: some ten milliseconds an
iteration, beside half a second for importing numba and, once on a machine, a few for compiling."""


def worth_compiling(size: int) -> bool:
    """Return whether a fit goes by compiled tiles where it can: as dask's ``emtau.compiled`` says.

    By default ``"auto"``: fits of some size, where this process and all workers there are can compile.
    Else ``"always"``, for any size, or ``"never"``.

    Parameters
    ----------
    size : int
        Rows times components times features.

    Raises
    ------
    ConfigError
        The setting is none of the three, or ``"always"`` where nothing can be compiled.
    """
    setting = dask.config.get(KEY, "auto")
    if setting not in ("auto", "always", "never"):
        raise ConfigError(f"dask's setting {KEY} is {setting!r}; give 'auto', 'always' or 'never'.")
    if setting == "never" or (setting == "auto" and size < WORTH_IT):
        return False
    why_not = why_not_compiled()
    if setting == "always" and why_not is not None:
        raise ConfigError(
            f"dask's setting {KEY} is 'always', but nothing can be compiled here ({why_not}). Install numba "
            "with pip install 'emtau_dask[compiled]', or set 'auto'."
        )
    return why_not is None and (setting == "always" or _workers_can_compile())


def _workers_can_compile() -> bool:
    """Return whether all workers of the active client can, True where there is no client.

    One that goes away meanwhile does not count; should it only have seemed to, `check_compiler` says so.
    """
    client = active_client()
    if client is None:
        return True
    with cluster_errors():
        answers = client.run(why_not_compiled, on_error="return")
    return all(answer is None or isinstance(answer, OSError) for answer in answers.values())


def check_compiler() -> None:
    """Raise `ClusterError` in a worker that cannot compile, where the fitting process could."""
    why_not = why_not_compiled()
    if why_not is not None:
        raise ClusterError(
            f"this worker cannot compile ({why_not}), but the process that fits can. Install numba on every "
            f"worker (pip install 'emtau_dask[compiled]'), or set dask's {KEY} to 'never'."
        )
