"""The compilation of the loops, which takes some seconds once a machine, before a pass needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from emtau_dask.mixture.compiled.tiles import Kernels
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.estep import KernelPlan, plan_tiles
from emtau_dask.mixture.model import m_step, zero
from emtau_dask.mixture.numerics import Floats

FAR = 100.0
"""From one mean to the next, in standard deviations, in each feature."""
LONE = 1e8
"""From a mean to all others: so far, in standard deviations, that it has to be scored by itself."""


class _NotCompiledError(Exception):
    """Loops that were to be loaded were not compiled before."""


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
    ones are left out, where the shape is one of those for which that may pay. Where they were compiled before
    for components of which some go centred, they are loaded. Where a fit needs another form, that is compiled
    in its first pass.

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

    class Refuses(Listener):  # type: ignore[misc]
        thread = threading.get_ident()

        def on_start(self, event: Event) -> None:
            """Compile nothing in this thread."""
            if threading.get_ident() == self.thread:
                raise _NotCompiledError

        def on_end(self, event: Event) -> None:
            """Ignore."""

    def plan_of(weights: Floats, places: Floats) -> KernelPlan:
        """Return the plan for components of variance 1 at places (K,), the same in each feature."""
        means = np.repeat(places[:, np.newaxis], n_features, axis=1)
        statistics = replace(zero(structure, n_components, n_features), weights=weights, means=means)
        return plan_tiles(m_step(statistics, structure, reg_covar=1.0), dtype, chunk_rows)

    numbers, ones = np.arange(float(n_components)), np.ones(n_components)
    usual, far_left_out = plan_of(ones, 0.0 * numbers), plan_of(ones, FAR * numbers)
    with install_listener("numba:compile", Begins()):
        _use(usual)
        if far_left_out.reach is not None:
            _use(far_left_out)
    if usual.together.all() and n_components > 1:
        first = numbers == 0
        with suppress(_NotCompiledError), install_listener("numba:compile", Refuses()):
            _use(plan_of(np.where(first, 1 / LONE, 1.0), np.where(first, LONE, 0.0)))


def _use(plan: KernelPlan) -> None:
    """Score a row under a plan, by tiles."""
    kernels = Kernels(plan, compiled=True)
    if kernels.by_tiles:
        kernel = kernels.made(1)
        kernel.accumulate(np.zeros((1, plan.parameters.n_features), plan.dtype), None, None)
        kernels.finished(kernel)
