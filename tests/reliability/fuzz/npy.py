"""``.npy`` files."""

import shutil
import struct

import numpy as np
from numpy.lib import format as npy_format

from reliability.fuzz import binaries
from reliability.fuzz.rows import read_like

DTYPES = ["<f8", ">f8", "<f4", "<f2", "<i8", "<u2", "|i1", "|b1"]
STRANGE_DTYPES = [
    *DTYPES, "|O", "<c16", "<U3", "<U999999999", "|S0", "|V8", "|V0", "<M8[s]", "<m8", "<f16", "(3,)<f8",
    "(1000000,)<f8", "(100000,100000,1000)<f8", "<i8,<f8", "f8\x1b[31m", "", "0", "object", "<f8" * 1000,
]  # fmt: skip
SIZES = [-1, 0, 1, 2, 20, 41, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30, 1.5, True, None, "40", (2,), 2j]
CODE = [
    "__import__('os').system('true')", "[].append(1)", "(lambda: 1)()", "1+1", "2**10**8", "-40", "f'{1}'",
]  # fmt: skip


def make(folder):
    """Write the originals."""
    random = np.random.default_rng(1)
    for name in DTYPES:
        values = (random.normal(size=(40, 3)) * 10).astype(name)
        np.save(folder / f"rows-{name[1:]}-{'big' if name[0] == '>' else 'little'}.npy", values)
    np.save(folder / "columns.npy", np.asfortranarray(random.normal(size=(30, 4))))
    np.save(folder / "long.npy", random.normal(size=(700, 2)))
    np.save(folder / "none.npy", np.empty((0, 3)))
    np.save(folder / "flat.npy", random.normal(size=40))
    np.save(folder / "solid.npy", random.normal(size=(4, 3, 2)))
    for version in ((2, 0), (3, 0)):
        with (folder / f"version-{version[0]}.npy").open("wb") as file:
            npy_format.write_array(file, random.normal(size=(20, 2)), version)


def mutate(case):
    """Write a mutated file; return what was done."""
    chance, how = case.chance, case.chance.random()
    shutil.copyfile(case.original, case.place)
    if how < 0.2:
        return _said_otherwise(case)
    if how < 0.6:
        return _with_header(case)
    if how < 0.85:
        return binaries.damaged(chance, case.place, headers=(0, 6, 8, 64, 128))
    if how < 0.9:
        return binaries.strange(chance, case.place)
    if how < 0.93:
        np.savez(case.place.with_suffix(".npz"), x=np.zeros((3, 2)))
        case.place.with_suffix(".npz").rename(case.place)
        return "an .npz file"
    if how < 0.97:
        header = npy_format.magic(1, 0)
        text = b"{'descr': '|O', 'fortran_order': False, 'shape': (1, 1), }".ljust(117) + b"\n"
        case.place.write_bytes(header + struct.pack("<H", len(text)) + text + binaries.payload(case.place))
        return "an object that runs code"
    case.place.write_bytes(binaries.payload(case.place))
    return "a pickle"


def _said_otherwise(case):
    """Write a header that means the same, or nearly, and alter values."""
    chance, data = case.chance, bytearray(case.place.read_bytes())
    array = np.load(case.original)
    begin = len(data) - array.nbytes
    descr = npy_format.dtype_to_descr(array.dtype)
    names = [descr, descr, array.dtype.name, array.dtype.char, descr.replace("<", "="), descr.upper()]
    sizes = "".join(f"{size},{' ' * chance.randrange(3)}" for size in array.shape)
    entries = [
        ("descr", repr(chance.choice(names))),
        ("fortran_order", repr(bool(array.flags.f_contiguous and not array.flags.c_contiguous))),
        ("shape", f"({sizes})"),
    ]
    chance.shuffle(entries)
    space, quote = chance.choice(["", " ", "  "]), chance.choice("'\"")
    text = "{" + ",".join(f"{space}{quote}{key}{quote}:{space}{value}" for key, value in entries)
    raw = (text + chance.choice(["}", ",}", ", }"])).encode().ljust(
        chance.choice([0, 118, 500, 9000])
    ) + b"\n"
    version = chance.choice([1, 2, 3])
    length = struct.pack("<H" if version == 1 else "<I", len(raw))
    for _ in range(chance.choice([0, 1, 5]) if array.nbytes else 0):
        data[chance.randrange(begin, len(data))] ^= 1 << chance.randrange(8)
    case.place.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + length + raw + data[begin:])
    return f"said otherwise, version {version}: {text[:160]!r}"


def _with_header(case):
    """Write the file anew with another header."""
    chance, data = case.chance, case.place.read_bytes()
    array = np.load(case.original)
    begin = len(data) - array.nbytes
    entries = {
        "descr": repr(npy_format.dtype_to_descr(array.dtype)),
        "fortran_order": repr(bool(array.flags.f_contiguous and not array.flags.c_contiguous)),
        "shape": repr(array.shape),
    }
    for _ in range(chance.choice([1, 1, 2])):
        key = chance.choice(["shape", "shape", "descr", "fortran_order", "more", "text"])
        if key == "shape":
            shape = list(array.shape)
            for _ in range(chance.choice([1, 1, 2])):
                shape[chance.randrange(len(shape))] = chance.choice(SIZES)
            near = [
                tuple(shape),
                tuple(shape),
                shape,
                shape[::-1],
                (*shape, 1),
                (*shape, 0),
                (2,) * 70,
                (2**62, 4),
            ]
            entries[key] = repr(chance.choice(near))
        elif key == "descr":
            near = [repr(chance.choice(STRANGE_DTYPES))] * 3
            near += [
                "[('a', '<f8')]",
                "[('a', '<f8', (10**9,))]",
                "[]",
                "None",
                "('<f8', (2,))",
                "('<f8', (2**40,))",
            ]
            near += [
                "[('a', [('b', '|O')])]",
                "[(('t', 'a'), '<f8')]",
                "{'names': ['a'], 'formats': ['<f8']}",
            ]
            entries[key] = chance.choice(near)
        elif key == "fortran_order":
            entries[key] = chance.choice(["True", "False", "1", "None", "'no'", "[]"])
        elif key == "more":
            entries[chance.choice(["allow_pickle", "shape ", "\x1b[2J", "x" * 5000])] = "1"
        else:
            entries[chance.choice(list(entries))] = chance.choice(
                [*CODE, "(" * 300 + ")" * 300, "[" * 99, "1" * 5000]
            )
    text = "{" + ", ".join(f"{key!r}: {value}" for key, value in entries.items()) + ", }"
    text = chance.choice(
        [text] * 8 + [text[:-1], text.replace("'", '"'), text + " #" + "x" * 20_000, "[" + text + "]"]
    )
    raw = text.encode(chance.choice(["latin1"] * 4 + ["utf-16"]), "replace")
    raw = raw.ljust(chance.choice([0, 118, 2000, 70_000])) + b"\n"
    version = chance.choice([1, 1, 1, 2, 2, 3, 4, 255])
    size = chance.choice([len(raw)] * 6 + [len(raw) - 3, len(raw) + 5, 0, 2**16 - 1, 2**31, 2**32 - 1])
    length = struct.pack("<H", min(size, 2**16 - 1)) if version == 1 else struct.pack("<I", size)
    case.place.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + length + raw + data[begin:])
    return f"version {version}, header of {size}: {text[:160]!r}"


def target(case):
    """Open and read, beside NumPy."""
    return read_like(case, case.place, _loaded)


def _loaded(case):
    return np.load(case.place, mmap_mode="r", allow_pickle=False)
