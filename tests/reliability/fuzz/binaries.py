"""Bytes, files and folders, altered a little; and bytes that run code where somebody unpickles them."""

import os
import pickle
import shutil
import struct

import numpy as np

MARKER = "witness-of-code"
"""A folder that exists only where a payload was run; beside the input."""
SIZES = [
    0, 1, 0x7F, 0xFF, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1,
]  # fmt: skip


class _Payload:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def payload(place):
    """Return a pickle that makes the witness beside ``place``."""
    return pickle.dumps(_Payload(place.parent / MARKER))


def pickled_array(place):
    """Return the pickle of an object array whose element makes the witness."""
    return pickle.dumps(np.array([_Payload(place.parent / MARKER)], dtype=object))


def mutated(chance, data, headers=(0,)):
    """Return altered bytes and what was done.

    Parameters
    ----------
    chance : random.Random
    data : bytes
    headers : sequence of int
        Where lengths and types stand, which are altered more often than the rest.
    """
    data, how = bytearray(data), chance.random()
    if how < 0.12 or not data:
        cut = chance.randrange(len(data) + 1)
        return bytes(data[:cut]), f"cut at {cut}"
    if how < 0.2:
        more = chance.choice([1, 7, 100, 10_000])
        return bytes(data) + chance.randbytes(more), f"{more} bytes more"
    if how < 0.5:
        begin = chance.choice(list(headers)) + chance.randrange(24)
        width = chance.choice([1, 2, 4, 8])
        value = chance.choice(SIZES) % 2 ** (8 * width)
        code = {1: "B", 2: "H", 4: "I", 8: "Q"}[width]
        found = struct.pack(chance.choice("<>") + code, value)
        data[begin : begin + width] = found
        return bytes(data), f"{width} bytes at {begin} = {value}"
    near = how < 0.75
    for _ in range(chance.choice([1, 1, 2, 8])):
        at = chance.choice(list(headers)) + chance.randrange(48) if near else chance.randrange(len(data))
        data[min(at, len(data) - 1)] ^= 1 << chance.randrange(8)
    return bytes(data), "bits flipped near a header" if near else "bits flipped"


def damaged(chance, file, headers=(0,)):
    """Alter a file's bytes; return what was done."""
    data, what = mutated(chance, file.read_bytes(), headers)
    file.write_bytes(data)
    return f"{file.name}: {what}"


def files_of(folder):
    """Return all files below a folder, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def strange(chance, file):
    """Put something else in the place of a file; return what."""
    how = chance.choice(["nothing", "folder", "pipe", "loop", "endless", "empty", "socket", "text"])
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink()
    if how == "folder":
        file.mkdir()
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "loop":
        file.symlink_to(file.name)
    elif how == "endless":
        file.symlink_to("/dev/zero")
    elif how == "socket":
        os.mknod(file, 0o600 | 0o140000)
    elif how in ("empty", "text"):
        file.write_bytes(b"" if how == "empty" else chance.choice([b"{}", b"null", b"\x00" * 100, b"<html>"]))
    return f"{file.name} is now: {how}"


def swapped(chance, folder):
    """Swap two files of a folder; return which."""
    one, other = (chance.choice(files_of(folder)) for _ in range(2))
    data = one.read_bytes(), other.read_bytes()
    one.write_bytes(data[1])
    other.write_bytes(data[0])
    return f"swapped {one.relative_to(folder)} and {other.relative_to(folder)}"
