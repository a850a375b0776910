"""What may become of an input: refused by an error of the package, or read rightly, in bounds."""

import contextlib
import os
import sys
import threading
import time
import traceback
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from emtau_dask import EmtauError, kernels
from reliability.damage import RUNNING, WRITING
from reliability.fuzz.binaries import MARKER

MEGABYTES = 700
"""By how much the address space of a process may grow, libraries' threads and their stacks included."""
SLACK = 48 * 2**20
"""Resident bytes that a small input may take, whatever it says; what it decodes to is allowed beside that."""
CPU_SECONDS = 10.0
SECONDS = 30
"""For an input that takes milliseconds; the second kills, so that a hang is noticed."""
STACK = 2**22
COMPILED = Path(kernels.__file__).with_name("__pycache__")
"""Where numba keeps what it compiled of the package."""
OWN_PICKLES = ("dask", "emtau_dask", "numpy")
"""Modules whose objects dask copies by pickling them, in any fit."""


WRONG, CODE, HUNG, MEMORY, FOREIGN = FAULTS = ("wrong", "code run", "hung", "memory", "foreign")
"""What may be wrong with an end: read as something else; code run, or a connection made; no end in time;
memory by a number from the file; an error of another library, or a dead process."""


class WrongError(AssertionError):
    """An input was accepted, and read as something else than it is."""

    fault = WRONG


class ForeignError(WrongError):
    """A command ended by an error that is none of the package's."""

    fault = FOREIGN


@dataclass
class Case:
    """One input.

    Attributes
    ----------
    chance : Random
        What was and will be drawn for it.
    place : Path
        The mutated file or folder.
    original : Path
        What it was made of.
    corpus : Path
        The folder of all originals of its kind.
    allowed : int
        Bytes of memory that it may take.
    """

    chance: Random
    place: Path
    original: Path
    corpus: Path
    allowed: int = SLACK


@dataclass(frozen=True)
class Ending:
    """How an input ended.

    Attributes
    ----------
    what : str
        The word for a right end, or the name of the error that refused it.
    fault : str
        Of `FAULTS`; empty where all is as it should be.
    problem : str
        What is wrong, in words.
    where : str
        The innermost function of the package that refused it.
    """

    what: str
    fault: str = ""
    problem: str = ""
    where: str = ""


@dataclass
class Watch:
    """What this process did that reading does not: code run, connections, files written elsewhere."""

    place: Path
    found: list = field(default_factory=list)

    def __call__(self, event, args):
        unpickled = event == "pickle.find_class" and not str(args[0]).startswith(OWN_PICKLES)
        if event in RUNNING or event == "socket.connect" or unpickled:
            self.found.append(f"{event} {args!r}"[:200])
        elif event == "open" and isinstance(args[0], (str, os.PathLike)):
            path, mode, flags = args
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if str(path).startswith("/etc/passwd") or (writes and self._foreign(path)):
                self.found.append(f"opened {path} {mode}")
        elif event in WRITING and self._foreign(args[1] if event == "os.link" else args[0]):
            self.found.append(f"{event} {args!r}"[:200])

    def _foreign(self, path):
        return (
            isinstance(path, str)
            and Path(path).is_absolute()
            and not path.startswith((str(self.place), str(COMPILED), "/proc/"))
        )


def installed_watch(place):
    """Watch this process from now on; a hook cannot be removed, so that a process has one."""
    sys.dont_write_bytecode = True  # For modules that an input is the first to need.
    watch = Watch(place)
    sys.addaudithook(watch)
    return watch


def _memory(name):
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def _reset_peak():
    Path("/proc/self/clear_refs").write_text("5")


def unprintable(text):
    """Return the first character that a terminal would obey, or that cannot be written; "" for none."""
    bad = (char for char in text if unicodedata.category(char) in ("Cc", "Cs") and char != "\n")
    return next(bad, "")


def _causes(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _of_error(error):
    """Return the fault of an error of the package, its text or what caused it, and words for it."""
    if bad := unprintable(str(error)):
        return WRONG, f"its message holds {bad!r}: {str(error)[:300]!r}"
    if any(isinstance(cause, MemoryError) for cause in _causes(error)):
        return MEMORY, f"memory by a number from the file: {_head(error)}"
    return "", ""


def _where(error):
    """Return the function that an error's first cause came from, such as ``storage.files.followed``."""
    for cause in reversed([*_causes(error)]):
        codes = [frame.f_code for frame, _ in traceback.walk_tb(cause.__traceback__)]
        inside = [code for code in codes if "emtau_dask/" in code.co_filename]
        if inside:
            module = inside[-1].co_filename.rpartition("emtau_dask/")[2].removesuffix(".py").replace("/", ".")
            return f"{module}.{inside[-1].co_qualname}"
    return ""


def _head(error):
    """Return the end of an error's traceback in one line."""
    frames = traceback.extract_tb(next(e for e in reversed([*_causes(error)])).__traceback__)[-4:]
    where = " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames)
    )
    return f"{type(error).__name__}: {str(error)[:300]!r} at {where}"


def ended(work, case, watch):
    """Do ``work`` with a case; return an `Ending`."""
    watch.found.clear()
    _reset_peak()
    before, began, threads = _memory("VmRSS"), time.process_time(), threading.active_count()
    fault = problem = where = ""
    try:
        what = work(case)
    except EmtauError as error:
        what, where = type(error).__name__, _where(error)
        fault, problem = _of_error(error)
    except WrongError as error:
        what, fault, problem = "wrong", error.fault, str(error)
    except BaseException as error:
        what, fault, problem = "crashed", MEMORY if isinstance(error, MemoryError) else FOREIGN, _head(error)
    grown, seconds = _memory("VmHWM") - before, time.process_time() - began
    witness = case.place.parent / MARKER
    if watch.found or witness.exists():
        fault, problem = CODE, "; ".join([*watch.found, problem])
        with contextlib.suppress(OSError):
            witness.rmdir()
    elif not fault and grown > case.allowed:
        fault = MEMORY
        problem = f"it took {grown >> 20} MB where {case.allowed >> 20} are accounted for"
    elif not fault and seconds > CPU_SECONDS:
        fault, problem = HUNG, f"it took {seconds:.1f} s of CPU time"
    elif not fault and threading.active_count() > threads + 40:
        fault, problem = HUNG, f"{threading.active_count() - threads} threads are left"
    return Ending(what, fault, problem, where)
