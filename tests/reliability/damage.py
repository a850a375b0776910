"""What a disk, a stranger or a fool can do to a checkpoint, at random; and resumes of what is left."""

import hashlib
import json
import os
import random
import shutil
import sys
import warnings
from pathlib import Path

import dask
import numpy as np
from numcodecs.zstd import Zstd

from emtau_dask import EmtauError, GaussianMixture
from emtau_dask.errors import CheckpointError
from emtau_dask.storage.objects import digested_document
from reliability import scenarios

MEGABYTES = 1000
"""By how much the address space of a process may grow in all that it does with damaged checkpoints."""
WRITING = {"os.remove", "os.rename", "os.link", "os.mkdir", "os.rmdir", "os.symlink", "os.truncate"}
RUNNING = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"}


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


HOSTILE = [
    None, True, -1, 0, 1, 3, 255, 256, 2**31, 2**48, 2**48 + 1, 2**63, 10**30, 10**400, -0.5, 0.5, 1e-320,
    1e308, -1e308, "", "0", "em", "tol", "bool", "uint64", "../../../etc/passwd",
    "attempts/../../../etc/passwd", "/etc/passwd", "\x00", "\ud800", "x" * 100_000, "f" * 64, [], {},
    [[2**40, 1]], [[0, 2**24]], [[1, 2**24], [2, 2**24]], ["active"] * 1000, list(range(1000)), nested(50),
    nested(300),
]  # fmt: skip


def places(value, path=()):
    """Yield the paths of everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def edited(chance, content):
    """Return a copy of a JSON object with one thing in it replaced, removed or added."""
    content = json.loads(json.dumps(content))
    path = chance.choice(list(places(content)))
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    last, how = path[-1], chance.random()
    if how < 0.1:
        del holder[last]
    elif how < 0.15:
        holder[last] = [holder[last], holder[last]]
    elif how < 0.3 and isinstance(holder[last], (int, float)):
        holder[last] += chance.choice([-1, 1, 2])
    else:
        holder[last] = chance.choice(HOSTILE)
    now = holder.get(last, "removed") if isinstance(holder, dict) else holder
    return content, f"{'.'.join(map(str, path))} = {repr(now)[:60]}"


def newest_commit(folder):
    return max(Path(folder).glob("commits/*/zarr.json"), key=lambda path: int(path.parent.name))


def manifest_of(file):
    content = json.loads(file.read_bytes())["attributes"]
    del content["sha256"]
    return content


def files_of(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def some_file(chance, folder):
    """Return a file with content; one that the newest commits depend on more often than another document."""
    files = [path for path in files_of(folder) if path.stat().st_size]
    important = [
        path for path in files if "commits" in path.parts or path.name != "zarr.json" or path.parent == folder
    ]
    return chance.choice(important if chance.random() < 0.8 else files)


def flip(chance, folder):
    file = some_file(chance, folder)
    data = bytearray(file.read_bytes())
    for _ in range(chance.choice([1, 1, 1, 5])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return f"flipped bits of {file}"


def truncate(chance, folder):
    file = some_file(chance, folder)
    data = file.read_bytes()
    file.write_bytes(data[: chance.randrange(len(data))])
    return f"truncated {file}"


def remove(chance, folder):
    file = some_file(chance, folder)
    file.unlink()
    return f"removed {file}"


def remove_folder(chance, folder):
    file = chance.choice([path for path in folder.rglob("*") if path.is_dir()])
    shutil.rmtree(file)
    return f"removed {file}"


def swap(chance, folder):
    one, other = some_file(chance, folder), some_file(chance, folder)
    data = one.read_bytes(), other.read_bytes()
    one.write_bytes(data[1])
    other.write_bytes(data[0])
    return f"swapped {one} and {other}"


def grow(chance, folder):
    file = some_file(chance, folder)
    file.write_bytes(file.read_bytes() + chance.randbytes(chance.choice([1, 100, 10**6])))
    return f"appended to {file}"


def garbage(chance, folder):
    file = some_file(chance, folder)
    data = chance.choice([b"", b"{}", b"[" * 10**5, b"null", b'{"attributes":' * 5000, chance.randbytes(64)])
    file.write_bytes(data)
    return f"{file} = {data[:20]!r}"


def no_file(chance, folder):
    file = some_file(chance, folder)
    file.unlink()
    how = chance.choice(["folder", "pipe", "loop", "endless"])
    if how == "folder":
        file.mkdir()
    elif how == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(file.name if how == "loop" else "/dev/zero")
    return f"{file} is now: {how}"


def edit(chance, folder):
    file = chance.choice([folder / "zarr.json", *folder.glob("commits/*/zarr.json")])
    document = json.loads(file.read_bytes())
    document, what = edited(chance, document)
    file.write_text(json.dumps(document))
    return f"{file}: {what}"


def lie(chance, folder):
    """Edit a commit or the root, and recompute its digest."""
    file = chance.choice([folder / "zarr.json", *[newest_commit(folder)] * 9])
    content, what = edited(chance, manifest_of(file))
    try:
        file.write_bytes(digested_document(content))
    except RecursionError:
        file.write_bytes(b"[" * 10**6)
    return f"lie in {file.relative_to(folder)}: {what}"


def references_of(content, path=()):
    """Yield every entry of a manifest that refers to an object."""
    if isinstance(content, dict):
        if set(content) == {"key", "sha256"}:
            yield content
        for value in content.values():
            yield from references_of(value)


def lie_in_an_array(chance, folder):
    """Alter an object, and recompute its digest and the commit's."""
    file = newest_commit(folder)
    content = manifest_of(file)
    ref = chance.choice(list(references_of(content)))
    data = bytearray((folder / ref["key"]).read_bytes())
    kind = np.dtype({"chunks": "i8", "digests": "u1", "contents": "u1"}.get(ref["key"].split("/")[2], "f8"))
    values = np.frombuffer(data, dtype=kind).copy()
    strange = [-2, -1, 0, 1, 2, 200, *([] if kind == "u1" else [2**40, 2**62])]
    if kind == "f8":
        strange = [0.0, -1.0, 1e-320, 1e308, -1e308, np.nan, np.inf, 1.0, 1e-8]
    for _ in range(chance.choice([1, 1, len(values)])):
        values[chance.randrange(len(values))] = np.asarray(chance.choice(strange)).astype(kind)
    _rewritten(folder, ref, values.tobytes())
    file.write_bytes(digested_document(content))
    return f"lie in {ref['key']}: {values[:4]}"


def lie_in_row_state(chance, folder):
    """Alter a chunk's row state, and recompute all digests."""
    file = newest_commit(folder)
    content = manifest_of(file)
    run = content["fit"]["current"]
    table = np.frombuffer((folder / run["chunks"]["key"]).read_bytes(), "<i8").reshape(-1, 5)
    chunk = chance.choice([number for number, row in enumerate(table) if row[0] >= 0])
    attempt = content["attempts"][table[chunk, 0]]["id"]
    slot = folder / f"attempts/{attempt}/rows/c.{table[chunk, 1]}.{table[chunk, 2]}.0.0"
    values = np.frombuffer(Zstd().decode(slot.read_bytes()), np.uint8).copy()
    how = chance.choice(["zeros", "ones", "random", "short", "bomb", "no frame"])
    made = {
        "zeros": values * 0,
        "ones": values * 0 + 1,
        "random": np.frombuffer(chance.randbytes(len(values)), np.uint8),
        "short": values[: len(values) // 2],
        "bomb": np.zeros(2**26, np.uint8),
        "no frame": values,
    }[how]
    data = values.tobytes() if how == "no frame" else Zstd().encode(made)
    slot.write_bytes(data)
    digests = bytearray((folder / run["digests"]["key"]).read_bytes())
    for other in np.flatnonzero((table[:, :3] == table[chunk, :3]).all(axis=1)):
        digests[32 * other : 32 * other + 32] = hashlib.sha256(data).digest()
    _rewritten(folder, run["digests"], digests)
    file.write_bytes(digested_document(content))
    return f"lie in the row state of chunk {chunk}: {how}"


def _rewritten(folder, ref, data):
    (folder / ref["key"]).write_bytes(data)
    ref["sha256"] = hashlib.sha256(data).hexdigest()


DAMAGE = (flip, truncate, remove, remove_folder, swap, grow, garbage, no_file, edit)
LIES = (lie, lie, lie, lie_in_an_array, lie_in_row_state)


def resumes(scenario, half, expected, seeds, lies):
    """Resume copies of a run, each damaged in another way; return what was wrong, and counts.

    Parameters
    ----------
    scenario : Scenario
    half : str
        A run that was interrupted.
    expected : dict
        Bits of the undisturbed fit.
    seeds : iterable of int
    lies : bool
        Whether digests fit what was altered, so that another fit may follow.
    """
    warnings.simplefilter("ignore")
    place = Path(f"{half}.damaged-{os.getpid()}")
    watched = _watch(place)
    counts, problems = {}, []
    with dask.config.set(scheduler=scenario.scheduler):
        scenarios.limited_memory(MEGABYTES)
        for seed in seeds:
            chance = random.Random(seed)
            scenarios.copied(half, place)
            what = chance.choice(LIES if lies else DAMAGE)(chance, place)
            watched.clear()
            ended, problem = _judged(scenario, place, expected, lies)
            counts[ended] = counts.get(ended, 0) + 1
            problem = problem or "; ".join(watched)
            if problem:
                problems.append(f"seed {seed}, {what}: {problem}")
    shutil.rmtree(place, ignore_errors=True)
    return counts, problems


def _judged(scenario, place, expected, lies):
    try:
        model = GaussianMixture.resume(
            place, scenarios.rows_of(scenario), max_iter=8 if lies else None, **scenario.fit_options
        )
    except EmtauError as error:
        fitting = lies or isinstance(error, CheckpointError)
        return type(error).__name__, "" if fitting else repr(error)
    except Exception as error:
        return "crashed", repr(error)[:500]
    if lies:
        return "finished", ""
    try:
        bits = scenarios.bits_of(model, place)
    except CheckpointError as error:
        return "finished", f"its last commit cannot be read: {error}"
    parts = scenarios.differences(bits, expected)
    return "finished", f"other bits in {', '.join(parts)}" if parts else ""


def _watch(place):
    """Note everything that is written outside ``place`` and everything that is run."""
    found = []

    def hook(event, args):
        if event in RUNNING:
            found.append(f"{event} {args!r}"[:200])
        elif event == "open":
            path, mode, flags = args
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            foreign = "etc" in str(path) or (writes and not str(path).startswith(str(place)))
            if foreign and isinstance(path, (str, os.PathLike)):
                found.append(f"opened {path} {mode}")
        elif event in WRITING:
            path = args[0] if event != "os.link" else args[1]
            relative = isinstance(path, str) and not Path(path).is_absolute()
            if not relative and not str(path).startswith(str(place)):
                found.append(f"{event} {args!r}"[:200])

    sys.addaudithook(hook)
    return found
