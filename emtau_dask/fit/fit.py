"""A whole fit: one or more runs from their starts, each step a new `FitState`."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol
from uuid import uuid4

import dask
import numpy as np

from emtau_dask.em import (
    EmSettings,
    FitObserver,
    FitState,
    KMeansProgress,
    Problem,
    ReadContents,
    RunState,
    iterate,
)
from emtau_dask.errors import CheckpointError, ConfigError, SingularComponentError, StorageError
from emtau_dask.init import (
    STARTS,
    GivenParameters,
    StartRequest,
    start_from_responsibilities,
    starting_parameters,
)
from emtau_dask.io.files import ScratchFolder
from emtau_dask.io.objects import LocalObjects, RowFields, RowStateWriter, Witness, rows_layout
from emtau_dask.io.sources import Source
from emtau_dask.mixture.model import MixtureParameters
from emtau_dask.policies import ACTIVE, ActivityPolicy, checked_row_arrays

WITNESS = "witness"
"""Key of what a temporary folder holds beside row state."""


@dataclass(frozen=True, eq=False)
class FitPlan:
    """How a fit begins and when it ends.

    Attributes
    ----------
    policy : ActivityPolicy
    settings : EmSettings
    init_params : str
        A name of `STARTS`.
    given : GivenParameters
        Starting parameters that win over the start's.
    responsibilities : Source or None
        Win over every other start.
    seeds : tuple of int
        One for each run.
    previous_bound : float or None
        What the first iteration's bound is compared with, for a warm start.
    """

    policy: ActivityPolicy
    settings: EmSettings
    init_params: str
    given: GivenParameters
    responsibilities: Source | None
    seeds: tuple[int, ...]
    previous_bound: float | None = None


class Journal(Protocol):
    """Remembers a fit while it goes on."""

    @property
    def fields(self) -> RowFields | None:
        """The row state that is kept; None for policies that keep none."""
        ...

    @property
    def contents(self) -> ReadContents | None:
        """What the data is found to hold; None where nothing outlasts this process."""
        ...

    def writer(self) -> RowStateWriter | None:
        """Return where the next iteration's tasks leave row state; None where none is kept."""
        ...

    def save(self, state: FitState, *, commit: bool) -> None:
        """Take note of a new state; it must outlast this process where ``commit`` says so."""
        ...

    def due(self, step: int) -> bool:
        """Return whether the state after iteration (or k-means pass) ``step`` is to be committed."""
        ...

    def watched(self) -> AbstractContextManager[None]:
        """Say in errors of the store what can be resumed, or that another process has gone on."""
        ...


def row_fields(rows: Source, n_components: int, policy: ActivityPolicy, max_iter: int) -> RowFields | None:
    """Return the row arrays that ``policy`` keeps, with the active mask; None where it keeps none."""
    arrays = checked_row_arrays(policy, n_components, max_iter)
    if arrays is None:
        return None
    dtypes = {ACTIVE: np.dtype(np.bool_)} | {array.name: array.dtype for array in arrays}
    return RowFields.of(dtypes, max(rows.chunk_rows, default=1))


class TemporaryJournal:
    """Row state in a temporary folder; nothing outlasts the process.

    Parameters
    ----------
    objects : LocalObjects or None
    fields : RowFields or None
        None where the policy keeps no row state.
    n_slots : int
        Chunks of the data.
    """

    contents: ReadContents | None = None

    def __init__(self, objects: LocalObjects | None, fields: RowFields | None, n_slots: int) -> None:
        self.objects = objects
        self.fields, self._n_slots = fields, n_slots
        self._step = 0
        self._keys: set[str] = set()
        self._witness: Witness | None = None
        if objects is not None:
            data = uuid4().bytes
            objects.put(WITNESS, data)
            self._witness = Witness.of(WITNESS, data)

    def writer(self) -> RowStateWriter | None:
        """Return a writer to places not used before."""
        if self.objects is None or self._witness is None or self.fields is None:
            return None
        self._step += 1
        layout = rows_layout("rows", self.fields, self._step + 1, self._n_slots)
        return RowStateWriter(self.objects, layout, self.fields, self._step, self._witness)

    def save(self, state: FitState, *, commit: bool) -> None:
        """Remove the row state that the new one replaces."""
        runs = [run for run in (state.current, state.best) if run is not None]
        self.retain(*runs)

    def retain(self, *runs: RunState) -> None:
        """Remove all row state but that of ``runs``."""
        keys = {slot.key for run in runs for slot in run.slots.values()}
        if self.objects is not None:
            self.objects.delete(self._keys - keys)
        self._keys = keys

    def due(self, step: int) -> bool:
        """Never: nothing is committed."""
        return False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise `StorageError` for errors of the store: there is no checkpoint, and nothing to resume."""
        try:
            yield
        except CheckpointError as error:
            raise StorageError(
                f"{error} It is the temporary folder for the state of rows. The fit has no checkpoint, so "
                "nothing can be resumed: fit again with dask's temporary-directory set to a folder with "
                "enough space (dask.config.set or DASK_TEMPORARY_DIRECTORY), or give a checkpoint."
            ) from error


@contextmanager
def temporary_journal(fields: RowFields | None, n_slots: int) -> Iterator[TemporaryJournal]:
    """Hold a temporary local store for row state, where ``fields`` say that there is any.

    It lies in dask's ``temporary-directory``, or the system's; what fits of
    killed processes left there is removed first.

    Raises
    ------
    ConfigError
        There is no place for it.
    """
    if fields is None:
        yield TemporaryJournal(None, None, n_slots)
        return
    place = dask.config.get("temporary-directory", None)
    with ExitStack() as held:
        try:
            folder = ScratchFolder("emtau-state-", place)
            held.callback(folder.remove)
            objects = folder.path.absolute() / "objects"
            objects.mkdir()
        except OSError as error:
            raise ConfigError(
                f"row state cannot be kept in {place or tempfile.gettempdir()}: {error}. Set dask's "
                "temporary-directory to a folder that can be written."
            ) from error
        yield TemporaryJournal(LocalObjects(str(objects)), fields, n_slots)


def _start(
    problem: Problem,
    plan: FitPlan,
    state: FitState,
    after: Callable[[KMeansProgress], None],
    observer: FitObserver,
) -> MixtureParameters:
    reg_covar = plan.settings.reg_covar
    if plan.responsibilities is not None:
        statistics = start_from_responsibilities(problem, plan.responsibilities, observer)
        return starting_parameters(problem, GivenParameters(), statistics, reg_covar)
    complete = plan.given.complete(problem.structure.name)
    if complete is not None:
        return complete
    request = StartRequest(problem, plan.seeds[state.run], observer, state.start, after)
    statistics = STARTS[plan.init_params](request)
    return starting_parameters(problem, plan.given, statistics, reg_covar)


def run_fit(
    problem: Problem, plan: FitPlan, state: FitState, journal: Journal, observer: FitObserver
) -> FitState:
    """Go on with a fit until all its runs have ended; the best final bound wins.

    Parameters
    ----------
    problem : Problem
    plan : FitPlan
    state : FitState
        ``FitState()`` to begin with.
    journal : Journal
    observer : FitObserver

    Returns
    -------
    FitState
        Finished: its ``current`` is the best run.

    Raises
    ------
    SingularComponentError
        Every run collapsed.
    InvalidDataError
        A row cannot be used.

    CheckpointTakenError
        Another process has continued this fit.

    Warns
    -----
    UserWarning
        A run collapsed and is left out.
    """
    with journal.watched():
        return _run_fit(problem, plan, state, journal, observer)


def _run_fit(
    problem: Problem, plan: FitPlan, state: FitState, journal: Journal, observer: FitObserver
) -> FitState:
    while not state.finished:
        try:
            state = _run_started(problem, plan, state, journal, observer)
            state = _run_ended(problem, plan, state, journal, observer)
        except SingularComponentError as error:
            if state.run == len(plan.seeds) - 1 and state.best is None:
                raise
            message = f"start {state.run + 1} of {len(plan.seeds)} is left out: {error}"
            warnings.warn(message, stacklevel=4)
            state = _next_run(plan, replace(state, left_out=(*state.left_out, message)), state.best)
        journal.save(state, commit=True)
    return state


def _run_started(
    problem: Problem, plan: FitPlan, state: FitState, journal: Journal, observer: FitObserver
) -> FitState:
    """Return the state with a current run, whose Θ₀ is committed."""
    if state.current is not None:
        return state

    def after(progress: KMeansProgress) -> None:
        journal.save(replace(state, start=progress), commit=journal.due(progress.n_iter))

    parameters = _start(problem, plan, state, after, observer)
    begun = replace(state, start=None, current=RunState(parameters, plan.previous_bound))
    journal.save(begun, commit=True)
    return begun


def _run_ended(
    problem: Problem, plan: FitPlan, state: FitState, journal: Journal, observer: FitObserver
) -> FitState:
    """Return the state after the current run: that before the next, or the finished one."""
    assert state.current is not None

    def after(run: RunState) -> None:
        going_on = run.stop_reason is None
        journal.save(replace(state, current=run), commit=going_on and journal.due(run.iteration))

    ended = iterate(problem, state.current, plan.policy, plan.settings, journal.writer, after, observer)
    best = state.best
    return _next_run(plan, state, ended if best is None or ended.lower_bound > best.lower_bound else best)


def _next_run(plan: FitPlan, state: FitState, best: RunState | None) -> FitState:
    if state.run + 1 < len(plan.seeds):
        return replace(state, run=state.run + 1, start=None, current=None, best=best)
    return replace(state, start=None, current=best, best=None, finished=True)
