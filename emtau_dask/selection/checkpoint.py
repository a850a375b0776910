"""Where a selection keeps what is done, so that a killed one goes on: objects in a folder or behind a URL.

``selection.json`` says what is selected from what. Each candidate that is done has a document and, where it
could be fitted, a saved model. ``scores.json`` and ``finalists.json`` hold what a pass found; ``fits/`` has
the checkpoints of the fits to all rows. Every document is written whole, and last; of two processes one
creates that of a candidate.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from emtau_dask.checkpoint.codec import Codec
from emtau_dask.checkpoint.fingerprints import check_same
from emtau_dask.checkpoint.manifest import SourceEntry
from emtau_dask.em.contents import Contents
from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointTakenError,
    short,
)
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.model_file import read_model, write_model
from emtau_dask.selection.criteria import Score
from emtau_dask.storage.objects import ObjectStore
from emtau_dask.storage.stores import object_store, objects_below, warn_unless_exclusive

ROOT = "selection.json"
LARGEST = 2**26
"""Bytes of a document that is read."""
D = TypeVar("D")
CODEC = Codec()


@dataclass(frozen=True)
class SampleEntry:
    """What a sampled chunk holds, see `ChunkContents`; the digest is hexadecimal."""

    source: str
    made_on: str
    chunk: int
    digest: str

    def __post_init__(self) -> None:
        bytes.fromhex(self.digest)


@dataclass(frozen=True)
class SelectionEntry:
    """What is selected from what; all of it but the id must be the same where a selection goes on."""

    id: str
    candidates: tuple[tuple[int, str], ...]
    settings: dict[str, Any]
    random_state: int | None
    seeds: tuple[int, int]
    share: float
    data: SourceEntry
    sample_weight: SourceEntry | None
    samples: tuple[SampleEntry, ...]
    format: Literal["emtau-selection"] = "emtau-selection"
    version: Literal[3] = 3

    def contents(self) -> Contents:
        """Return what the data held when the selection began."""
        stored: dict[tuple[str, str], dict[int, bytes]] = {}
        for one in self.samples:
            stored.setdefault((one.source, one.made_on), {})[one.chunk] = bytes.fromhex(one.digest)
        return Contents(stored)


@dataclass(frozen=True)
class CandidateEntry:
    """A candidate that is done; with a reason it could not be fitted, else there is a model."""

    converged: bool
    mean: float | None
    seconds: float
    reason: str


@dataclass(frozen=True)
class ScoresEntry:
    """The scores of a pass, by the names of candidates."""

    scores: dict[str, Score]


@dataclass(frozen=True)
class SelectionCheckpoint:
    """The objects of one selection; see the module. The store's errors are raised as `CheckpointError`."""

    objects: ObjectStore

    @property
    def location(self) -> str:
        """Names the place in messages."""
        return self.objects.location

    def _model(self, name: str) -> ObjectStore:
        return objects_below(self.objects, f"candidates/{name}.zarr")

    def fit(self, name: str) -> ObjectStore:
        """Return where the checkpoint of a fit to all rows is."""
        return objects_below(self.objects, f"fits/{name}.zarr")

    def entry(self) -> SelectionEntry | None:
        """Return what the selection is; None where nothing is.

        Raises
        ------
        CheckpointExistsError
            Something else is there.
        CheckpointCorruptError
            The document is damaged.
        """
        found = self._read(ROOT, SelectionEntry)
        if found is None and not self.objects.empty():
            raise CheckpointExistsError(
                f"{self.location} holds something that is not a selection; choose another place, or remove "
                "it."
            )
        return found

    def begin(self, entry: SelectionEntry) -> SelectionEntry:
        """Return the entry of the selection: the one that is there, or this one as a new one.

        Raises
        ------
        CheckpointMismatchError
            The selection there is of other data or has other settings.
        CheckpointError
            The place cannot be written, or holds something else.
        """
        found = self.entry()
        if found is None:
            if not self.objects.create(ROOT, _encoded(entry)):
                return self.begin(entry)
            return entry
        check_same("X", found.data, entry.data)
        check_same("sample_weight", found.sample_weight, entry.sample_weight)
        _check_settings(found, entry, self.location)
        return found

    def prepare(self) -> None:
        """Make the folder; warn where two processes could go on from here without noticing each other.

        Raises
        ------
        CheckpointError
            Something else is there, or the place cannot be written.
        """
        self.entry()
        self.objects.prepare()
        warn_unless_exclusive(self.objects)

    def candidate(self, name: str) -> CandidateEntry | None:
        """Return a candidate that is done."""
        return self._read(_document(name), CandidateEntry)

    def model(self, name: str) -> GaussianMixture:
        """Return a candidate's model, fitted to the sample; raises `InvalidDataError` if it is damaged."""
        found: GaussianMixture = read_model(GaussianMixture, self._model(name))
        return found

    def keep_candidate(self, name: str, entry: CandidateEntry, model: GaussianMixture | None) -> None:
        """Keep what was found of a candidate: its model, then its document, which says that it is done.

        What a killed process has left of a model is removed first.

        Raises
        ------
        CheckpointTakenError
            Another process has kept it meanwhile, or is about to.
        """
        if self.candidate(name) is not None:
            raise self._taken(name)
        place = self._model(name)
        place.delete(place.list(""))
        if model is not None:
            place.prepare()
            try:
                write_model(model, place)
            except CheckpointExistsError as error:
                raise self._taken(name) from error
            place.sync(place.list(""))
        if not self.objects.create(_document(name), _encoded(entry)):
            raise self._taken(name)

    def _taken(self, name: str) -> CheckpointTakenError:
        return CheckpointTakenError(
            f"another process goes on with the selection in {self.location}: it has fitted the candidate "
            f"{name} meanwhile. Let it finish, or stop it and give the same call again."
        )

    def forget_candidate(self, name: str) -> None:
        """Remove the document of a candidate whose model is damaged, so that it is not done any more."""
        self.objects.delete([_document(name)])

    def remove(self) -> None:
        """Remove all that is there, what says that it is a selection last."""
        self.objects.delete([key for key in self.objects.list("") if key != ROOT])
        self.objects.delete([ROOT])

    def scores(self, which: str, names: Sequence[str]) -> dict[str, Score] | None:
        """Return the scores of a pass, if it was of just these candidates."""
        found = self._read(f"{which}.json", ScoresEntry)
        if found is None or found.scores.keys() != set(names):
            return None
        return {name: found.scores[name] for name in names}

    def keep_scores(self, which: str, scores: Mapping[str, Score]) -> None:
        """Keep the scores of a pass."""
        key = f"{which}.json"
        self.objects.put(key, _encoded(ScoresEntry(dict(scores))))
        self.objects.sync([key])

    def _read(self, key: str, kind: type[D]) -> D | None:
        data = self.objects.get(key, LARGEST)
        if data is None:
            return None
        try:
            found: D = CODEC.record(kind).decode(json.loads(data), None)
            return found
        except (ValueError, RecursionError) as error:
            raise CheckpointCorruptError(
                f"{self.location}/{key} is damaged or of another version ({error}). Remove it "
                "to have that part done again, or all that is there to begin anew."
            ) from error


def _encoded(entry: Any) -> bytes:
    return (json.dumps(CODEC.record(type(entry)).encode(entry, None), indent=1) + "\n").encode()


def _document(name: str) -> str:
    return f"candidates/{name}.json"


def _check_settings(found: SelectionEntry, entry: SelectionEntry, location: str) -> None:
    """Raise `CheckpointMismatchError` where a selection was begun with other settings."""
    if entry.random_state is not None and entry.random_state != found.random_state:
        raise _mismatch(location, "random_state", found.random_state, entry.random_state)
    for name in ("candidates", "share"):
        if getattr(found, name) != getattr(entry, name):
            raise _mismatch(location, name, getattr(found, name), getattr(entry, name))
    for name, value in entry.settings.items():
        if found.settings.get(name) != value:
            raise _mismatch(location, name, found.settings.get(name), value)


def _mismatch(location: str, name: str, theirs: object, ours: object) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{name} is {short(ours)}; the selection in {location} has {short(theirs)}. Give the same to go on, "
        "or choose another place."
    )


def new_id() -> str:
    """Return the id of a new selection."""
    return uuid.uuid4().hex


def selection_checkpoint(where: object) -> SelectionCheckpoint | None:
    """Return that of a path, a URL or a zarr store; None for None. Raises as `object_store` does."""
    return None if where is None else SelectionCheckpoint(object_store(where))
