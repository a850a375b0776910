"""The folder in which a selection keeps what is done, so that a killed one goes on.

``selection.json`` says what is selected from what. Each candidate that is done has a document and, where it
could be fitted, a saved model. ``scores.json`` and ``finalists.json`` hold what a pass found; ``fits/`` has
the checkpoints of the fits to all rows. Every document is written whole, and last.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from emtau_dask.checkpoint import SourceEntry, check_same, first_problem
from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
)
from emtau_dask.io.files import writing_errors
from emtau_dask.io.objects import LocalObjects, object_store
from emtau_dask.messages import short
from emtau_dask.selection.criteria import Score

ROOT = "selection.json"
LARGEST = 2**26
"""Bytes of a document that is read."""
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


D = TypeVar("D", bound=_Document)


class SelectionEntry(_Document):
    """What is selected from what; all of it but the id must be the same where a selection goes on."""

    format: Literal["emtau-selection"] = "emtau-selection"
    version: Literal[1] = 1
    id: str
    candidates: list[list[Any]]
    settings: dict[str, Any]
    random_state: int | None
    seeds: Annotated[list[Count], Field(min_length=2, max_length=2)]
    share: Number
    data: SourceEntry


class CandidateEntry(_Document):
    """A candidate that is done; with a reason it could not be fitted, else there is a model."""

    converged: bool
    mean: Number | None
    seconds: Annotated[Number, Field(ge=0)]
    reason: str


class ScoreEntry(_Document):
    """See `Score`."""

    log_likelihood: Number
    entropy: Number
    held_out_sum: Number
    rows: Annotated[int, Field(ge=1)]
    held_out_rows: Count
    parameters: Annotated[int, Field(ge=1)]


class ScoresEntry(_Document):
    """The scores of a pass, by the names of candidates."""

    scores: dict[str, ScoreEntry]


@dataclass(frozen=True)
class SelectionFolder:
    """A folder, whose path ``root`` is absolute; see the module."""

    root: Path

    @property
    def _objects(self) -> LocalObjects:
        return LocalObjects(str(self.root))

    def model(self, name: str) -> Path:
        """Return where the model of a candidate is, fitted to the sample."""
        return self.root / "candidates" / f"{name}.zarr"

    def free_model(self, name: str) -> Path:
        """Return that place after removing what is there, which a killed process or a damage has left."""
        place = self.model(name)
        with writing_errors("the model", place), suppress(FileNotFoundError):
            shutil.rmtree(place)
        return place

    def fit(self, name: str) -> Path:
        """Return where the checkpoint of a fit to all rows is."""
        return self.root / "fits" / f"{name}.zarr"

    def entry(self) -> SelectionEntry | None:
        """Return what the folder's selection is; None for an empty folder, or none.

        Raises
        ------
        CheckpointExistsError
            Something else is there.
        CheckpointCorruptError
            The document is damaged.
        """
        found = self._read(ROOT, SelectionEntry)
        if found is None and not self._objects.empty():
            raise CheckpointExistsError(
                f"{self.root} holds something that is not a selection; choose another place, or remove it."
            )
        return found

    def begin(self, entry: SelectionEntry) -> SelectionEntry:
        """Return the entry of the folder's selection: the one that is there, or this one as a new one.

        Raises
        ------
        CheckpointMismatchError
            The selection there is of other data or has other settings.
        CheckpointError
            The folder cannot be written, or holds something else.
        """
        found = self.entry()
        if found is None:
            self._objects.prepare()
            if not self._objects.create(ROOT, _encoded(entry)):
                return self.begin(entry)
            return entry
        check_same("X", found.data, entry.data)
        _check_settings(found, entry, self.root)
        return found

    def candidate(self, name: str) -> CandidateEntry | None:
        """Return a candidate that is done."""
        return self._read(f"candidates/{name}.json", CandidateEntry)

    def keep_candidate(self, name: str, entry: CandidateEntry) -> None:
        """Note that a candidate is done; its model is there by now."""
        self._write(f"candidates/{name}.json", entry)

    def scores(self, which: str, names: Sequence[str]) -> dict[str, Score] | None:
        """Return the scores of a pass, if it was of just these candidates."""
        found = self._read(f"{which}.json", ScoresEntry)
        if found is None or found.scores.keys() != set(names):
            return None
        return {name: Score(**found.scores[name].model_dump()) for name in names}

    def keep_scores(self, which: str, scores: Mapping[str, Score]) -> None:
        """Keep the scores of a pass."""
        entries = {name: ScoreEntry(**asdict(score)) for name, score in scores.items()}
        self._write(f"{which}.json", ScoresEntry(scores=entries))

    def _write(self, key: str, entry: _Document) -> None:
        self._objects.put(key, _encoded(entry))
        self._objects.sync([key])

    def _read(self, key: str, kind: type[D]) -> D | None:
        data = self._objects.get(key, LARGEST)
        if data is None:
            return None
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise CheckpointCorruptError(
                f"{self.root / key} is damaged or of another version ({first_problem(error)}). Remove it to "
                "have that part done again, or the folder to begin anew."
            ) from error


def _encoded(entry: _Document) -> bytes:
    return (json.dumps(entry.model_dump(mode="json"), indent=1) + "\n").encode()


def _check_settings(found: SelectionEntry, entry: SelectionEntry, root: Path) -> None:
    """Raise `CheckpointMismatchError` where a selection was begun with other settings."""
    if entry.random_state is not None and entry.random_state != found.random_state:
        raise _mismatch(root, "random_state", found.random_state, entry.random_state)
    for name in ("candidates", "share"):
        if getattr(found, name) != getattr(entry, name):
            raise _mismatch(root, name, getattr(found, name), getattr(entry, name))
    for name, value in entry.settings.items():
        if found.settings.get(name) != value:
            raise _mismatch(root, name, found.settings.get(name), value)


def _mismatch(root: Path, name: str, theirs: object, ours: object) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{name} is {short(ours)}; the selection in {root} has {short(theirs)}. Give the same to go on, or "
        "choose another checkpoint."
    )


def new_id() -> str:
    """Return the id of a new selection."""
    return uuid.uuid4().hex


def selection_folder(where: object) -> SelectionFolder | None:
    """Return the folder of a local path; None for None.

    Raises
    ------
    CheckpointError
        It is something else.
    """
    if where is None:
        return None
    objects = object_store(where) if isinstance(where, str | Path) else None
    if not isinstance(objects, LocalObjects):
        raise CheckpointError(
            f"checkpoint is {short(where)}; a selection keeps what is done in a local folder."
        )
    return SelectionFolder(Path(objects.root))
