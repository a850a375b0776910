"""The checkpoint of a selection: the runs of its fits, and one document.

``candidates/full-3.zarr`` is the run of a candidate's fit to the sample, ``fits/full-3.zarr`` that of its fit
to all rows. ``selection.json`` has the candidates, the data, and the results of the passes over all rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from emtau_dask.checkpoint.codec import Codec
from emtau_dask.checkpoint.fingerprints import check_same
from emtau_dask.checkpoint.manifest import SourceEntry
from emtau_dask.em.verification import DataVerifier
from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointMismatchError,
    listed,
    short,
)
from emtau_dask.selection.criteria import Candidate, Score
from emtau_dask.storage.objects import ObjectStore
from emtau_dask.storage.stores import object_store, objects_below, warn_unless_exclusive

ROOT, FORMAT, VERSION = "selection.json", "emtau-selection", 5
MAX_DOCUMENT_BYTES = 2**26
"""Maximum bytes of the document."""


@dataclass(frozen=True)
class SelectionEntry:
    """The candidates and data of a selection, and the results of passes.

    Attributes
    ----------
    id : str
    settings : dict
        Everything but the data that must be the same to continue a selection; JSON.
    seeds : (int, int)
        Of the sample, and of the fits to it.
    share : float
        Of the rows in the sample.
    data, sample_weight : SourceEntry
    samples : tuple of (str, str, int, str)
        Digests of chunks: source, ``made_on``, chunk, and the digest in hexadecimal; see `ChunkDigest`.
    scores, finalists : mapping of str to Score
        Of the fits to the sample, and of those to all rows, by the names of candidates.
    reasons : mapping of str to str
        Why fits to the sample collapsed, by the names of their runs; complete if there are scores.
    """

    id: str
    settings: dict[str, Any]
    seeds: tuple[int, int]
    share: float
    data: SourceEntry
    sample_weight: SourceEntry | None
    samples: tuple[tuple[str, str, int, str], ...] = ()
    scores: Mapping[str, Score] = field(default_factory=dict)
    finalists: Mapping[str, Score] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def verifier(self) -> DataVerifier:
        """Return the verifier of the data of the selection; raises ValueError for an impossible digest."""
        stored: dict[tuple[str, str], dict[int, bytes]] = {}
        for source, made_on, chunk, digest in self.samples:
            stored.setdefault((source, made_on), {})[chunk] = bytes.fromhex(digest)
        return DataVerifier(stored)

    def candidates(self) -> list[Candidate]:
        """Return the candidates; raises KeyError or TypeError for impossible ones."""
        return [Candidate(*each) for each in self.settings["candidates"]]


ENTRY = Codec().record(SelectionEntry)


@dataclass(frozen=True)
class SelectionCheckpoint:
    """The objects of one selection; see the module. The store's errors are raised as `CheckpointError`."""

    objects: ObjectStore

    @property
    def location(self) -> str:
        """Names the place in messages."""
        return self.objects.location

    def run(self, folder: str, name: str) -> ObjectStore:
        """Return the place of the run of a fit."""
        return objects_below(self.objects, f"{folder}/{name}.zarr")

    def entry(self) -> SelectionEntry | None:
        """Return the entry of the selection; None for an empty place.

        Raises `CheckpointExistsError` if something else is there, and `CheckpointCorruptError` if the
        document is damaged or of another version.
        """
        data = self.objects.get(ROOT, MAX_DOCUMENT_BYTES)
        if data is None:
            if self.objects.empty():
                return None
            raise CheckpointExistsError(
                f"{self.location} holds something that is not a selection; choose another place, or remove "
                "it."
            )
        try:
            document = json.loads(data)
            header = document.pop("format"), document.pop("version")
            if header == (FORMAT, VERSION):
                entry: SelectionEntry = ENTRY.decode(document, None)
                entry.verifier()
                entry.candidates()
                return entry
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise CheckpointCorruptError(
                f"{self.location}/{ROOT} is damaged ({error}). Remove all objects there to begin again."
            ) from error
        raise CheckpointCorruptError(
            f"{self.location} holds format {short(header[0])} version {short(header[1])}; this version of "
            f"emtau_dask reads {FORMAT!r} version {VERSION}. Continue with the version that wrote it, or "
            "remove all objects there to begin again."
        )

    def prepare(self) -> None:
        """Make the folder; warn if two processes could continue the selection without noticing each other."""
        self.entry()
        self.objects.prepare()
        warn_unless_exclusive(self.objects)

    def begin(self, entry: SelectionEntry) -> SelectionEntry:
        """Return the stored entry of the selection; store this one if there is none.

        Raises `CheckpointMismatchError` if the stored selection has other data or settings.
        """
        stored = self.entry()
        if stored is None:
            return entry if self.objects.create(ROOT, _encoded(entry)) else self.begin(entry)
        check_same("X", stored.data, entry.data)
        check_same("sample_weight", stored.sample_weight, entry.sample_weight)
        for name, value in entry.settings.items():
            if stored.settings.get(name) != value and (name, value) != ("random_state", None):
                raise CheckpointMismatchError(
                    f"the selection in {self.location} has {_difference(name, stored, entry)}. "
                    "Give the same to continue it, choose another place (emtau select: -o FOLDER), or begin "
                    "anew (emtau select: --overwrite; in Python remove what is there)."
                )
        return stored

    def keep(self, entry: SelectionEntry) -> None:
        """Store the entry with the results of a pass, in place of the entry before."""
        self.objects.put(ROOT, _encoded(entry))
        self.objects.sync([ROOT])

    def remove(self) -> None:
        """Remove all objects, ``selection.json`` last."""
        self.objects.delete([key for key in self.objects.list("") if key != ROOT])
        self.objects.delete([ROOT])


def _difference(name: str, stored: SelectionEntry, asked: SelectionEntry) -> str:
    """Return what a stored selection has as a setting, and what is asked for."""
    if name != "candidates":
        return f"{name} = {short(stored.settings.get(name))}, not {short(asked.settings[name])}"
    had, wanted = stored.candidates(), asked.candidates()
    parts = {
        "not": [str(each) for each in wanted if each not in had],
        "also": [str(each) for each in had if each not in wanted],
    }
    differing = "; ".join(f"{word} {listed(names)}" for word, names in parts.items() if names)
    return f"other candidates: {differing}" if differing else "the same candidates in another order"


def _encoded(entry: SelectionEntry) -> bytes:
    document = {"format": FORMAT, "version": VERSION, **ENTRY.encode(entry, None)}
    return (json.dumps(document, indent=1) + "\n").encode()


def selection_checkpoint(where: object) -> SelectionCheckpoint | None:
    """Return the checkpoint at a path, a URL or a zarr store; None for None. Raises as `object_store`."""
    return None if where is None else SelectionCheckpoint(object_store(where))
