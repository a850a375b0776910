"""What a fit leaves that does not end, or ends before it converges, and how it goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emtau_dask.errors import EmtauError, shutdown_named
from emtau_dask.interrupts import interrupt_saying
from emtau_dask.io.objects import ObjectStore, object_store, open_log
from emtau_dask.messages import shown


@contextmanager
def as_it_was_unless_done(estimator: Any) -> Iterator[None]:
    """Set back all attributes of the estimator where the block raises; an interrupt says how to go on."""
    before = dict(vars(estimator))
    try:
        with shutdown_named():
            yield
    except KeyboardInterrupt:
        estimator.__dict__ = before
        raise interrupt_saying(shown(_going_on(estimator.checkpoint))) from None
    except BaseException:
        estimator.__dict__ = before
        raise


def _going_on(checkpoint: Any) -> str:
    """Return what an interrupted fit has left, and how to go on."""
    left = "The fit was interrupted; the estimator is as it was before."
    if checkpoint is None:
        return (
            f"{left} Without a checkpoint nothing of the fit was kept; with checkpoint=PATH it is committed "
            "after every iteration, and GaussianMixture.resume(PATH, X) goes on."
        )
    try:
        number = open_log(object_store(checkpoint)).last
    except EmtauError:
        return f"{left} That was before the first commit, so there is nothing to resume; fit it again."
    return f"{left} Go on from the last commit, {number}: GaussianMixture.resume({_named(checkpoint)}, X)."


def _named(checkpoint: Any) -> str:
    if isinstance(checkpoint, ObjectStore):
        return repr(checkpoint.location)
    return repr(str(checkpoint)) if isinstance(checkpoint, (str, Path)) else "checkpoint"


def not_converged(estimator: Any) -> str:
    """Return what a fit that ``max_iter`` stopped should say: how far it was, and how it goes on."""
    change, gap = estimator.history_.last_change, estimator.gap_
    far = [
        f"The lower bound last changed by {change:.2g} nats per row" if math.isfinite(change) else "",
        f"its estimated gap is {gap:.2g} nats per row" if math.isfinite(gap) else "",
        f"tol is {estimator.tol!r}",
    ]
    how = "set_params(max_iter=..., warm_start=True).fit(X)"
    if estimator.checkpoint is not None:
        how = f"GaussianMixture.resume({_named(estimator.checkpoint)}, X, max_iter=...)"
    return (
        "Best performing initialization did not converge. Try different init parameters, or increase "
        "max_iter, tol, or check for degenerate data. "
        f"{'; '.join(filter(None, far))}. To go on from here: {how}."
    )
