"""What a fit that fails or is interrupted leaves: the estimator as it was, and a word on how to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emtau_dask.errors import EmtauError
from emtau_dask.io.objects import object_store, open_log
from emtau_dask.messages import shown


@contextmanager
def as_it_was_unless_done(estimator: Any) -> Iterator[None]:
    """Set back all attributes of the estimator where the block raises; add a note to an interrupt."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException as error:
        estimator.__dict__ = before
        if isinstance(error, KeyboardInterrupt):
            error.add_note(shown(_going_on(estimator.checkpoint)))
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
    named = repr(str(checkpoint)) if isinstance(checkpoint, (str, Path)) else "checkpoint"
    return f"{left} Go on from the last commit, {number}: GaussianMixture.resume({named}, X)."
