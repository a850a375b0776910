"""scikit-learn's callbacks (from its version 1.9 on): a fit is a task, and each iteration a task in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeVar, cast

from emtau_dask.em import FitHistory, FitObserver, IterationRecord, SilentObserver
from emtau_dask.errors import warn_user
from emtau_dask.mixture.model import MixtureParameters
from emtau_dask.progress import Observers, closed_after, observer_for

try:
    from sklearn.callback import CallbackSupportMixin, with_callbacks
except ImportError:

    class CallbackSupportMixin:  # type: ignore[no-redef]
        """Nothing: this scikit-learn has no callbacks."""

    def with_callbacks(method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method as it is."""
        return method


M = TypeVar("M", bound=Callable[..., Any])


class FollowedFits(CallbackSupportMixin):  # type: ignore[misc]
    """Gives an estimator ``set_callbacks``, where scikit-learn has callbacks."""


def torn_down(fit: M) -> M:
    """Tear callbacks down at the end of the method ``fit``, however it ends."""
    return cast("M", with_callbacks(fit))


class CallbackObserver(SilentObserver):
    """Calls the hooks of an estimator's callbacks at the begin and end of each iteration.

    Parameters
    ----------
    estimator : GaussianMixture
        It is being fitted.
    context : sklearn.callback.CallbackContext
        Of the fit.
    data : dict
        X, y and metadata, as hooks get them.
    """

    def __init__(self, estimator: Any, context: Any, data: dict[str, Any]) -> None:
        self._estimator, self._context, self._data = estimator, context, data
        self._iteration: Any = None
        self._records: list[IterationRecord] = []
        self._told = False

    def stage(self, name: str, chunks: int) -> None:
        """Begin an iteration's task; an iteration may have two passes."""
        if name.startswith("iteration ") and self._iteration is None:
            self._iteration = self._context.subcontext(task_name="iteration")
            self._iteration.call_on_fit_task_begin(estimator=self._estimator, **self._data)

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """End it. ``fitted_estimator`` is, for hooks that take it, as if the fit had stopped here."""
        self._records.append(record)
        context, self._iteration = self._iteration, None
        if context is None:
            return
        stop = context.call_on_fit_task_end(
            estimator=self._estimator,
            reconstruction_attributes=lambda: self._attributes(parameters),
            **self._data,
        )
        if stop and not self._told:
            self._told = True
            warn_user(
                "A callback asks to stop the fit, but a fit of emtau_dask ends by tol and max_iter alone. "
                "It goes on; interrupt it to end it, with a checkpoint to keep what it has."
            )

    def _attributes(self, parameters: MixtureParameters) -> dict[str, Any]:
        twin = copy(self._estimator)
        twin._publish(parameters, FitHistory(tuple(self._records)), "max-iter")
        return _fitted(twin)


@contextmanager
def called_back(estimator: Any, X: Any, y: Any, sample_weight: Any) -> Iterator[FitObserver | None]:
    """Give the block an observer that also calls an estimator's callbacks; None where it has none.

    The begin and the end of the fit are told too, the end where the block does not raise.
    """
    if not (hasattr(estimator, "_skl_callbacks") or hasattr(estimator, "_parent_callback_ctx")):
        yield None
        return
    context = estimator._init_callback_context(max_subtasks=None)
    metadata = None if sample_weight is None else {"sample_weight": sample_weight}
    data = {"X": X, "y": y, "metadata": metadata}
    context.call_on_fit_task_begin(estimator=estimator, **data)
    called = CallbackObserver(estimator, context, data)
    with closed_after(Observers(observer_for(estimator.verbose), called)) as observer:
        yield observer
    context.call_on_fit_task_end(
        estimator=estimator, reconstruction_attributes=lambda: _fitted(estimator), **data
    )


def _fitted(estimator: Any) -> dict[str, Any]:
    return {
        name: value for name, value in vars(estimator).items() if name.endswith("_") or name == "_fitted_type"
    }
