"""The compilation of the loops, which takes some seconds once a machine, before a pass needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from emtau_dask.mixture.compiled.tiles import Kernels
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.estep import plan_tiles
from emtau_dask.mixture.model import m_step, zero

FAR = 100.0
"""From one mean to the next, in standard deviations, in each feature."""


def compile_loops(
    structure: CovarianceStructure,
    n_components: int,
    n_features: int,
    dtype: np.dtype[Any],
    chunk_rows: float,
    begins: Callable[[], None],
) -> None:
    """Compile the loops for rows of a shape and dtype, or load what was compiled before.

    They are compiled for the form in which well-conditioned components are scored, and for that in which far
    ones of many are left out. Where a fit needs another one, that is compiled in its first pass.

    Parameters
    ----------
    structure : CovarianceStructure
    n_components, n_features : int
    dtype : dtype
        Of the rows.
    chunk_rows : float
        Rows of a chunk, on average.
    begins : callable () -> None
        Called once if something has to be compiled, when that begins.
    """
    from numba.core.event import Event, Listener, install_listener

    class Begins(Listener):  # type: ignore[misc]
        told = False

        def on_start(self, event: Event) -> None:
            """Tell of the first function of this package."""
            if not self.told and event.data["dispatcher"].py_func.__module__.startswith(__package__):
                self.told = True
                begins()

        def on_end(self, event: Event) -> None:
            """Ignore."""

    nothing = zero(structure, n_components, n_features)
    alike = replace(nothing, weights=np.ones(n_components))
    apart = replace(alike, means=np.repeat(FAR * np.arange(n_components)[:, np.newaxis], n_features, axis=1))
    usual = plan_tiles(m_step(alike, structure, reg_covar=1.0), dtype)
    far_left_out = plan_tiles(m_step(apart, structure, reg_covar=1.0), dtype, chunk_rows)
    with install_listener("numba:compile", Begins()):
        for plan in (usual,) if far_left_out.reach is None else (usual, far_left_out):
            kernels = Kernels(plan, compiled=True)
            if kernels.by_tiles:
                kernel = kernels.made(1)
                kernel.accumulate(np.zeros((1, n_features), plan.dtype), None, None)
                kernels.finished(kernel)
