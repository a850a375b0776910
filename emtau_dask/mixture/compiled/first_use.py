"""The compilation of the loops, which takes some seconds once a machine, before a pass needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from emtau_dask.mixture.compiled.tiles import Kernels
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.estep import KernelPlan, plan_tiles
from emtau_dask.mixture.model import m_step, zero


def compile_loops(
    structure: CovarianceStructure,
    n_components: int,
    n_features: int,
    dtype: np.dtype[Any],
    begins: Callable[[], None],
) -> None:
    """Compile the loops for rows of a shape and dtype, or load what was compiled before.

    They are compiled for the form in which well-conditioned components are scored, then for mixtures of which
    some components, or all, are ill-conditioned.

    Parameters
    ----------
    structure : CovarianceStructure
    n_components, n_features : int
    dtype : dtype
        Of the rows.
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
    plan = plan_tiles(m_step(alike, structure, reg_covar=1.0), dtype)
    with install_listener("numba:compile", Begins()):
        for each in _forms(plan):
            kernels = Kernels(each, compiled=True)
            if kernels.by_tiles:
                rows = np.zeros((1, n_features), each.dtype)
                kernel = kernels.made(len(rows))
                kernel.accumulate(rows, None, None)
                kernels.finished(kernel)


def _forms(plan: KernelPlan) -> Iterator[KernelPlan]:
    """Yield plans by which the components of a plan may have to be scored, the likeliest first."""
    yield plan
    if plan.parameters.structure.own_factors and plan.together.all():
        if len(plan.together) > 1:
            yield replace(plan, single=False, together=np.arange(len(plan.together)) > 0)
        yield plan.centred
