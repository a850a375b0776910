"""A fit in commits: the journal that writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from emtau_dask.checkpoint.entries import Entries, Stored, runs_of, stored_in
from emtau_dask.checkpoint.fingerprints import fingerprint_of
from emtau_dask.checkpoint.layout import Shapes
from emtau_dask.checkpoint.reader import SavedFit
from emtau_dask.checkpoint.schema import ConfigEntry, Manifest, SourceEntry, first_problem, references_of
from emtau_dask.cluster import numerical_environment
from emtau_dask.em import FitState, ReadContents
from emtau_dask.errors import CheckpointError, CheckpointMismatchError, StoreUnreachableError
from emtau_dask.init import KMEANS_PASSES, GivenParameters
from emtau_dask.io.files import each
from emtau_dask.io.objects import (
    CommitLog,
    ObjectStore,
    RowFields,
    RowStateWriter,
    Witness,
    group_document,
    new_attempt,
    rows_layout,
)


class CheckpointJournal:
    """Commits a fit to a checkpoint.

    Parameters
    ----------
    log : CommitLog
        Of a new run, or of one that this process goes on with.
    config : ConfigEntry
    given : GivenParameters
        Starting parameters of the user's.
    sources : mapping of str to SourceEntry or None
        ``data``, ``sample_weight`` and ``responsibilities_init``.
    fields : RowFields or None
        None where the policy keeps no row state.

    Raises
    ------
    CheckpointError
        The store failed.
    """

    def __init__(
        self,
        log: CommitLog,
        config: ConfigEntry,
        given: GivenParameters,
        sources: Mapping[str, SourceEntry | None],
        fields: RowFields | None,
        *,
        compiled: bool,
    ) -> None:
        data = fingerprint_of(sources["data"])
        assert data is not None
        self._log, self._config, self._given = log, config, given
        self._sources, self.fields = sources, fields
        self.state = FitState()
        self.contents = ReadContents({})
        self._environment = numerical_environment(compiled=compiled)
        self._n_chunks = len(data.chunk_rows)
        self._attempt = new_attempt(max(log.last, 0))
        shapes = Shapes.of(config.covariance_type, config.n_components, config.n_features, self._n_chunks)
        passes = config.max_iter + KMEANS_PASSES + config.n_components + 4
        n_steps = 4 * config.n_init * passes + 1
        prefix = f"attempts/{self._attempt}"
        self._layouts = shapes.layouts(prefix, n_steps)
        self._rows = (
            None if fields is None else rows_layout(f"{prefix}/rows", fields, n_steps, self._n_chunks)
        )
        self._step = 0
        self._stored: list[Stored] = []
        self._numbers: Mapping[str, int] = {}
        self._seen: set[str] = set()
        self._unsynced: set[str] = set()
        self._witness: Witness | None = None
        self._swept = log.last < 0

    def inherit(self, saved: SavedFit, state: FitState, given: GivenParameters) -> None:
        """Go on from ``saved``, which ``state`` and ``given`` were read from: what it refers to is stored.

        Raises
        ------
        CheckpointMismatchError
            Its row state has other arrays than the policy keeps.
        """
        ours = () if self.fields is None else self.fields.names
        for attempt in saved.manifest.attempts:
            if tuple(attempt.fields) != ours:
                raise CheckpointMismatchError(
                    f"the policy keeps the row arrays {list(ours)}; the checkpointed run had "
                    f"{attempt.fields}. Give the policy that the run was begun with."
                )
        self.state = state
        references = saved.references()
        self.contents = ReadContents(saved.contents())
        self._log.keep(saved.number, references)
        self._seen = {slot.key for run in runs_of(state) for slot in run.slots.values()}
        self._stored = stored_in(saved, state, given, self.contents.known)
        self._numbers = {attempt.id: n for n, attempt in enumerate(saved.manifest.attempts)}

    @property
    def run(self) -> str:
        """The run's id."""
        return self._log.run

    @property
    def objects(self) -> ObjectStore:
        """Where everything goes."""
        return self._log.objects

    def _begun(self) -> Witness:
        """Return a witness of the documents of this process's arrays, which are written first."""
        if self._witness is None:
            self._witness = self._begin()
        return self._witness

    def _begin(self) -> Witness:
        prefix = f"attempts/{self._attempt}"
        layouts = [*self._layouts.values(), *([] if self._rows is None else [self._rows])]
        documents = {f"{layout.name}/zarr.json": layout.document() for layout in layouts}
        own = f"{prefix}/zarr.json"
        documents[own] = group_document({"environment": self._environment})
        each(lambda item: self.objects.put(*item), documents.items())
        self.objects.sync(documents)
        return Witness.of(own, documents[own])

    def writer(self) -> RowStateWriter | None:
        """Return a writer to places not used before."""
        if self._rows is None or self.fields is None:
            return None
        self._step += 1
        return RowStateWriter(self.objects, self._rows, self.fields, self._step, self._begun())

    def due(self, step: int) -> bool:
        """Return whether ``step`` is divisible by ``checkpoint_every``."""
        return step % self._config.checkpoint_every == 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Say what can be resumed after an error of the store, or that another process has gone on."""
        try:
            with self._log.watched():
                yield
        except StoreUnreachableError as error:
            raise StoreUnreachableError(f"{error} {self._log.remembered()}") from error
        except CheckpointError as error:
            if type(error) is not CheckpointError:
                raise
            raise CheckpointError(f"{error} {self._log.standing()}") from error

    def save(self, state: FitState, *, commit: bool) -> None:
        """Take note of row state; write a commit where asked to."""
        self.state = state
        slots = {slot.key for run in runs_of(state) for slot in run.slots.values()}
        self._log.written(slots)
        self._unsynced |= slots - self._seen
        self._seen = slots
        if commit:
            self._commit(state, slots)

    def _commit(self, state: FitState, slots: set[str]) -> None:
        self._begun()
        self._step += 1
        entries = Entries(self._layouts, self._step, self._stored, self._numbers)
        config = self._config.model_copy(update={"given": entries.given(self._given)})
        manifest = _validated(
            {
                "run": self._log.run,
                "number": self._log.last + 1,
                "attempt": self._attempt,
                "attempts": entries.attempts(state),
                "environment": self._environment,
                "written": datetime.now(UTC).isoformat(timespec="seconds"),
                "config": config,
                "fit": entries.fit(state, self.contents.known),
                **self._sources,
            }
        )
        each(lambda item: self.objects.put(*item), entries.writes.items())
        self._log.written(entries.writes)
        references = {ref.key for ref in references_of(manifest)} | slots
        self.objects.sync([*entries.writes, *(self._unsynced & references)])
        self._log.append(manifest.model_dump(mode="json", exclude={"run", "number"}), references)
        self._unsynced -= references
        self._stored, self._numbers, self._step = entries.stored, entries.numbers, entries.last_step
        if state.finished or not self._swept:
            self._log.sweep_everything(self._attempt)
            self._swept = True


def _validated(manifest: Mapping[str, Any]) -> Manifest:
    try:
        return Manifest.model_validate(manifest)
    except ValidationError as error:
        raise CheckpointError(
            f"the fit has come to a state that cannot be committed ({first_problem(error)}). See whether the "
            "data and the settings are what they should be."
        ) from error
