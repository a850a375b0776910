"""Many inputs of a kind, in processes of their own, each named by its seed.

A process takes a batch of seeds and writes to a journal which it begins and how
it ended. Where it dies, of a signal, of its memory or of its time, the journal tells at
which input, and another process goes on with the next.
"""

import faulthandler
import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from random import Random

from reliability import scenarios
from reliability.fuzz import checkpoints, commands, configs, models, npy, oracle, parquet, zarrs
from reliability.fuzz.oracle import FAULTS, FOREIGN, HUNG, Case, Ending


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes
    ----------
    make : callable
        Writes the originals to a folder.
    mutate : callable
        Writes a mutated copy of a case's original; returns what was done.
    target : callable
        Reads it, and returns the word for a right end; see `oracle.ended`.
    share : int
        Of all inputs, relative to the others'.
    first : tuple of str
        Modules or functions of the package that an input meets first, such as a parser's; empty where
        errors do not tell.
    suffix : str
        Of the mutated file's name.
    originals : callable
        Given the folder, it returns what may be mutated.
    """

    make: Callable
    mutate: Callable
    target: Callable
    share: int
    first: tuple
    suffix: str = ""
    originals: Callable = lambda folder: list(folder.iterdir())


OPENED = ("storage.files.", "data.opening.")
ZARR = (
    *OPENED,
    "storage.zarr_check.document_at",
    "storage.zarr_check._parsed",
    "data.zarr_arrays.open_zarr",
)
COMMITS = (
    *OPENED,
    *(f"storage.{name}." for name in ("objects", "commits", "stores")),
)
KINDS = {
    "npy": Kind(npy.make, npy.mutate, npy.target, 4, (*OPENED, "data.npy._"), ".npy"),
    "zarr 3": Kind(zarrs.make_v3, zarrs.mutate, zarrs.target, 5, ZARR, ".zarr"),
    "zarr 2": Kind(zarrs.make_v2, zarrs.mutate, zarrs.target, 4, ZARR, ".zarr"),
    "parquet": Kind(
        parquet.make, parquet.mutate, parquet.target, 5, (*OPENED, "data.parquet_files.part_at"), ".parquet"
    ),
    "config": Kind(configs.make, configs.mutate, configs.target, 4, ("cli.yaml.",), ".yaml"),
    "model": Kind(
        models.make, models.mutate, models.target, 3, (*ZARR, "storage.zarr_check.own_group"), ".zarr"
    ),
    "checkpoint": Kind(
        checkpoints.make, checkpoints.mutate, checkpoints.target, 2, COMMITS, ".zarr", checkpoints.originals
    ),
    "command line": Kind(commands.make, commands.mutate, commands.target, 3, (), "", commands.originals),
}
BATCH = 250
ACCEPTED = ("right", "described", "fitted")
"""Words of ends at which an input was read: all of it, too much for all, or as the fit that it describes."""


@dataclass
class Totals:
    """Ends, counted.

    Attributes
    ----------
    ends : Counter
        By word or error.
    faults : Counter
        By `oracle.FAULTS`.
    refused_by : Counter
        By function of the package.
    problems : list of str
        What went wrong, each with what reproduces it.
    """

    ends: Counter = field(default_factory=Counter)
    faults: Counter = field(default_factory=Counter)
    refused_by: Counter = field(default_factory=Counter)
    problems: list = field(default_factory=list)

    def add(self, name, ending):
        self.ends[ending.what] += 1
        if ending.where:
            self.refused_by[ending.where] += 1
        if ending.fault:
            self.faults[ending.fault] += 1
            self.problems.append(f"{name}: {ending.fault}: {ending.problem}")

    @property
    def inputs(self):
        """How many were tried; a target may say "not tried" of what would reach for a network."""
        return self.ends.total() - self.ends["not tried"]

    @property
    def accepted(self):
        """Inputs that were read, and rightly."""
        return sum(self.ends[what] for what in ACCEPTED)

    @property
    def refused(self):
        """Inputs that were refused by an error of the package, as they should be."""
        return self.inputs - self.accepted - len(self.problems)

    def beyond(self, first):
        """Return how many inputs were not refused by what stands first, as `Kind` has it."""
        return self.inputs - sum(count for name, count in self.refused_by.items() if name.startswith(first))


def shares(inputs):
    """Return seeds' numbers of all kinds, by name, that sum to ``inputs`` at least."""
    whole = sum(kind.share for kind in KINDS.values())
    return {name: -(-inputs * kind.share // whole) for name, kind in KINDS.items()}


def table(totals):
    """Yield the lines of a table of `Totals` by name of kind, and of all."""
    names = ("kind", "inputs", "past the first parser", "refused", "accepted and right", *FAULTS)
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    rows = []
    for name, each in totals.items():
        first = KINDS[name].first
        deep = each.beyond(first) if first else None
        rows.append(
            [each.inputs, deep, each.refused, each.accepted, *(each.faults[fault] for fault in FAULTS)]
        )
        yield _line(name, rows[-1])
    yield _line("all", [sum(filter(None, column)) for column in zip(*rows, strict=True)])


def _line(name, cells):
    return f"| {name} | {' | '.join('-' if cell is None else f'{cell:,}' for cell in cells)} |"


def prepared(name, folder):
    """Write a kind's originals; to be run in a process of its own."""
    warnings.simplefilter("ignore")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    KINDS[name].make(folder)


def batch(name, corpus, place, journal, seeds, keep):
    """Try one input after the other in this process; every end is a line of ``journal``.

    Parameters
    ----------
    name : str
        Of `KINDS`.
    corpus, place : Path
        The originals; a folder for this process.
    journal : Path
    seeds : sequence of int
    keep : bool
        Keep what went wrong, beside ``place``.
    """
    warnings.simplefilter("ignore")
    kind = KINDS[name]
    with journal.open("a") as file, journal.with_suffix(".trace").open("w") as trace:
        faulthandler.enable(trace)
        watch = oracle.installed_watch(place)
        _warmed(kind, corpus, place, watch)
        scenarios.limited_memory(oracle.MEGABYTES, oracle.STACK)
        for seed in seeds:
            case = _case(kind, name, corpus, place, seed)
            what = kind.mutate(case)
            _note(file, seed=seed, began=f"{case.original.name}: {what}")
            faulthandler.dump_traceback_later(oracle.SECONDS, exit=True, file=trace)
            ending = oracle.ended(kind.target, case, watch)
            faulthandler.cancel_dump_traceback_later()
            if ending.problem and keep:
                shutil.rmtree(kept(place, seed), ignore_errors=True)
                shutil.copytree(place, kept(place, seed), symlinks=True, ignore=_pipes)
            _note(file, seed=seed, **asdict(ending))
    return True


def kept(place, seed):
    """Return where an input that went wrong is kept."""
    return place.with_name(f"{place.name}-{seed}")


def _pipes(folder, names):
    return [name for name in names if not any((Path(folder, name).is_file(), Path(folder, name).is_dir()))]


def _note(file, **entry):
    file.write(json.dumps(entry) + "\n")
    file.flush()


def _case(kind, name, corpus, place, seed):
    """Return a case with an empty folder of its own."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    chance = Random(f"{name} {seed}")
    original = chance.choice(sorted(kind.originals(corpus)))
    suffix = kind.suffix or original.suffix or ".zarr"
    return Case(chance, place / f"input{suffix}", original, corpus)


def _warmed(kind, corpus, place, watch):
    """Read every original, which is right, or refused; libraries load what they load late."""
    for number, original in enumerate(sorted(set(kind.originals(corpus)))):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        suffix = kind.suffix or original.suffix or ".zarr"
        case = Case(Random(number), place / f"input{suffix}", original, corpus)
        (shutil.copytree if original.is_dir() else shutil.copyfile)(original, case.place)
        ending = oracle.ended(kind.target, case, watch)
        assert ending.what not in ("wrong", "crashed"), f"{original}: {ending}"


def attempted(zygote, name, seeds, folder, keep=True):
    """Try inputs of a kind; return `Totals`.

    Parameters
    ----------
    zygote : Zygote
        Of this module.
    name : str
    seeds : sequence of int
    folder : Path
        For this kind alone.
    keep : bool
        Keep what went wrong.
    """
    corpus, place = folder / "corpus", folder / checkpoints.INPUT
    zygote.run(prepared, name, corpus)
    totals, left, number = Totals(), list(seeds), 0
    while left:
        journal = folder / f"journal-{number}"
        journal.unlink(missing_ok=True)
        child = zygote.start(batch, name, corpus, place, journal, left[:BATCH], keep)
        killed = child.result() is None
        left = left[_counted(totals, name, journal, killed) :]
        number += 1
    shutil.rmtree(place, ignore_errors=True)
    return totals


def _counted(totals, name, journal, killed):
    """Add a journal's entries to totals; return how many inputs it is about."""
    began, count = {}, 0
    for entry in map(json.loads, journal.read_text().splitlines()):
        if "began" in entry:
            began = entry
            continue
        ending = Ending(*(entry[each.name] for each in fields(Ending)))
        totals.add(_named(name, began), ending)
        count, began = count + 1, {}
    if not killed:
        return count
    trace = _trace(journal.with_suffix(".trace").read_text())
    if not began:
        raise AssertionError(f"{name}: a process died between two inputs, after {count}: {trace}")
    fault = HUNG if trace.startswith("Timeout") else FOREIGN
    totals.add(_named(name, began), Ending("killed", fault, f"it killed its process: {trace}"))
    return count + 1


def _trace(text):
    """Return the first line of a dead process's trace, and where in the package it was."""
    lines = text.splitlines() or ["nothing was said"]
    where = [line.split("emtau_dask/")[1] for line in lines if "emtau_dask/" in line]
    return f"{lines[0]} at {' < '.join(where[:4])}"


def _named(name, began):
    return f"{name}, seed {began['seed']}, {began['began']}"
