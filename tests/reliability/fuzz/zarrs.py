"""zarr arrays and groups, of formats 2 and 3: documents, chunks, shards, consolidated metadata."""

import contextlib
import copy
import json
import shutil

import numpy as np
import zarr
import zarr.codecs as codecs
from numcodecs import LZ4, Blosc, Delta, FixedScaleOffset, Shuffle, Zlib, Zstd

from reliability.fuzz import binaries, documents
from reliability.fuzz.rows import read_like

DOCUMENTS = {"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
INNER = [BYTES, {"name": "crc32c"}]
NAMED = [
    BYTES,
    {"name": "bytes"},
    {"name": "bytes", "configuration": {"endian": "big"}},
    {"name": "gzip", "configuration": {"level": 5}},
    {"name": "zstd", "configuration": {"level": 0, "checksum": True}},
    {
        "name": "blosc",
        "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 8, "blocksize": 0},
    },
    {"name": "crc32c"},
    {"name": "transpose", "configuration": {"order": [1, 0]}},
    {"name": "transpose", "configuration": {"order": [0, 0]}},
    {"name": "vlen-utf8"},
    {"name": "vlen-bytes"},
    {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": [5, 3], "codecs": INNER, "index_codecs": INNER},
    },
    {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": [1, 1], "codecs": INNER, "index_codecs": [BYTES]},
    },
    {"name": "numcodecs.pickle", "configuration": {"protocol": 5}},
    {"name": "numcodecs.zlib", "configuration": {"level": 1}},
    {"name": "numcodecs.delta", "configuration": {"dtype": "<f8"}},
    {"name": "numcodecs.lzma"},
    {"name": "https://evil.example/codec"},
    {"name": "cast_value", "configuration": {"data_type": "float64"}},
]
CODECS = [*NAMED, "bytes", {"configuration": {}}]
KEYS = [
    {"name": "default", "configuration": {"separator": "/"}},
    {"name": "default", "configuration": {"separator": "."}},
    {"name": "v2", "configuration": {"separator": "/"}},
    {"name": "v2", "configuration": {"separator": "../"}},
    {"name": "unknown"},
]
V3 = {
    "data_type": [
        *("float64", "float32", "float16", "int8", "uint64", "bool", "complex128", "string", "r64", "bytes"),
        "variable_length_bytes",
        {"name": "null_terminated_bytes", "configuration": {"length_bytes": 2**31}},
        {"name": "fixed_length_utf32", "configuration": {"length_bytes": 2**40}},
        {"name": "structured", "configuration": {"fields": [["a", "float64"]]}},
    ],
    "fill_value": [
        0,
        1.5,
        "NaN",
        "Infinity",
        "-Infinity",
        "0x7ff8000000000000",
        None,
        True,
        [0, 0],
        "AAAA",
        1e400,
    ],
    "codecs": [*CODECS, [BYTES], [], [BYTES, BYTES], [*CODECS[:8]], [NAMED[-8]] * 3, [BYTES] * 200],
    "chunk_key_encoding": KEYS,
    "shape": [
        [40],
        [40, 3, 1],
        [0, 3],
        [40, 0],
        [2**40, 3],
        [2**62, 2**62],
        [40, 2**40],
        [-1, 3],
        [40.0, 3],
        40,
    ],
    "chunk_shape": [
        [1, 1],
        [0, 3],
        [-1, 3],
        [2**40, 3],
        [2**40, 2**40],
        [10],
        [7, 2],
        [[5, 5], 3],
        10,
        [2**33, 1],
    ],
    "node_type": ["array", "group", "Array", None],
    "zarr_format": [2, 3, 4, "3", 3.0],
    "storage_transformers": [[], [{"name": "x"}]],
    "attributes": [{}, None, [], {"\x1b[31m": "\x1b]0;x\x07"}],
    "dimension_names": [["a", "b"], ["a", "a"], [None, "b"], ["a"], "ab"],
    "must_understand": [True, False],
    "order": [[1, 0], [0, 1], [0, 0], [2, 1], [-1, 0], "C", "F"],
    "cname": ["lz4", "zstd", "zlib", "blosclz", "lz4hc", "snappy", "x\x1b[31m"],
    "endian": ["little", "big", "native", None],
    "index_location": ["start", "end", "middle"],
    "consolidated_metadata": [None, {}, {"kind": "inline", "must_understand": False, "metadata": {}}],
}
FILTERS = [
    {"id": "delta", "dtype": "<f8"},
    {"id": "fixedscaleoffset", "scale": 10, "offset": 0, "dtype": "<f8", "astype": "<i4"},
    {"id": "astype", "encode_dtype": "<f4", "decode_dtype": "<f8"},
    {"id": "packbits"},
    {"id": "shuffle", "elementsize": 8},
    {"id": "quantize", "digits": 2, "dtype": "<f8"},
    {"id": "vlen-utf8"},
    {"id": "vlen-array", "dtype": "<f8"},
    {"id": "json2", "encoding": "utf-8", "dtype": "|O", "input": [-1, 1]},
    {"id": "msgpack2"},
    {"id": "categorize", "labels": ["a"], "dtype": "|O"},
    {"id": "pickle", "protocol": 5},
]
COMPRESSORS = [
    None,
    {"id": "zlib", "level": 1},
    {"id": "gzip", "level": 1},
    {"id": "bz2", "level": 1},
    {"id": "lzma", "format": 1, "check": -1, "preset": None, "filters": None},
    {"id": "zstd", "level": 0},
    {"id": "lz4", "acceleration": 1},
    {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
    {"id": "pickle", "protocol": 5},
    {"id": "base64"},
    {"id": "crc32"},
    {"id": "adler32"},
    {"id": "fletcher32"},
    {"id": "jenkins_lookup3"},
    {"id": "zfpy"},
    {"id": "../x\x1b[31m"},
]
COMPRESSED = frozenset({"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"})
"""What decodes its bytes by what they say themselves."""
V2 = {
    "dtype": [
        *("<f8", ">f8", "<f4", "|b1", "<i2", "|O", "<U4", "<U999999999", "|V8", "|S1", "<c16", "<M8[s]"),
        *([["a", "<f8"]], [["a", "|O"]], "<f8\x00", "f8,f8", None),
    ],
    "compressor": COMPRESSORS,
    "filters": [*FILTERS, [FILTERS[0]], [FILTERS[-1]], [FILTERS[6]], FILTERS[:5], []],
    "fill_value": [0, 1.5, "NaN", "Infinity", None, "AAAA", [0], 1e400, True],
    "order": ["C", "F", "A", None],
    "shape": V3["shape"],
    "chunks": V3["chunk_shape"],
    "zarr_format": [2, 3, 1, "2"],
    "dimension_separator": [".", "/", "", "..", "/../"],
    "cname": V3["cname"],
    "blocksize": [0, -1, 2**31 - 1, 2**31],
}


def _values(shape, seed=5):
    return np.round(np.random.default_rng(seed).normal(size=shape) * 100, 3)


def make_v3(folder):
    """Write the originals of format 3."""
    made = {
        "plain": {"compressors": None},
        "zstd": {"compressors": codecs.ZstdCodec(level=1, checksum=True)},
        "gzip": {"compressors": codecs.GzipCodec(level=1)},
        "blosc": {"compressors": codecs.BloscCodec(cname="lz4")},
        "checked": {"compressors": [codecs.ZstdCodec(), codecs.Crc32cCodec()]},
        "transposed": {"filters": codecs.TransposeCodec(order=(1, 0))},
        "sharded": {"chunks": (5, 3), "shards": (20, 3)},
        "sharded-gzip": {"chunks": (5, 3), "shards": (10, 3), "compressors": codecs.GzipCodec()},
    }
    for name, options in made.items():
        zarr.create_array(folder / name, data=_values((40, 3)), **{"chunks": (10, 3), **options})
    for name in ("f4", "i2", "b1", ">f8"):
        zarr.create_array(
            folder / f"type-{name.strip('>')}-{len(name)}", data=_values((24, 2)).astype(name), chunks=(8, 2)
        )
    zarr.create_array(folder / "sparse", shape=(60, 2), chunks=(10, 2), dtype="f4", fill_value=2.5)[:10] = 1
    for name, consolidated in (("group", False), ("consolidated", True)):
        group = zarr.create_group(folder / name)
        group.create_array("X", data=_values((40, 3)), chunks=(20, 3))
        group.create_array("labels", data=np.arange(40), chunks=20)
        if consolidated:
            zarr.consolidate_metadata(folder / name)


def make_v2(folder):
    """Write the originals of format 2."""
    made = {
        "plain": {"compressors": None},
        "zlib": {"compressors": Zlib(1)},
        "zstd": {"compressors": Zstd()},
        "lz4": {"compressors": LZ4()},
        "blosc": {"compressors": Blosc()},
        "delta": {"filters": [Delta("f8")], "compressors": Zlib(1)},
        "shuffle": {"filters": [Shuffle(8)], "compressors": Zstd()},
        "scaled": {"filters": [FixedScaleOffset(0, 1000, "f8", "i4")], "compressors": None},
        "columns": {"order": "F", "compressors": Zlib(1)},
    }
    for name, options in made.items():
        zarr.create_array(
            folder / name,
            data=_values((40, 3)),
            zarr_format=2,
            **{"chunks": (10, 3), "order": "C", **options},
        )
    for name in ("f4", "i2", "b1", ">f8"):
        data = _values((24, 2)).astype(name)
        zarr.create_array(
            folder / f"type-{name.strip('>')}-{len(name)}", data=data, chunks=(8, 2), zarr_format=2
        )
    for name, consolidated in (("group", False), ("consolidated", True)):
        group = zarr.create_group(folder / name, zarr_format=2)
        group.create_array("X", data=_values((40, 3)), chunks=(20, 3))
        group.create_array("labels", data=np.arange(40), chunks=20)
        if consolidated:
            zarr.consolidate_metadata(folder / name, zarr_format=2)


def mutate(case):
    """Write a mutated copy of a folder; return what was done."""
    shutil.copytree(case.original, case.place)
    return altered(case.chance, case.place)


def altered(chance, folder):
    """Alter an array or a group in place; return what was done."""
    files = binaries.files_of(folder)
    papers = [file for file in files if file.name in DOCUMENTS]
    stored = [file for file in files if file.name not in DOCUMENTS]
    how = chance.random()
    if how < 0.55 or not stored:
        file = chance.choice(papers)
        return documents.rewritten(chance, file, V3 if file.name == "zarr.json" else V2)
    if how < 0.78:
        file = chance.choice(stored)
        end = file.stat().st_size
        return binaries.damaged(chance, file, headers=(0, 0, max(0, end - 68), max(0, end - 20)))
    if how < 0.88:
        return code(chance, folder)
    if how < 0.93:
        return binaries.strange(chance, chance.choice(files))
    if how < 0.96:
        return binaries.swapped(chance, folder)
    return _consolidated(chance, folder)


def code(chance, folder):
    """Make chunks pickles, and say so wherever a reader might believe it; return how."""
    how = chance.choice(
        ["compressor", "filter", "format 3", "inline consolidated", "beside", "consolidated 2"]
    )
    array = {
        "zarr_format": 2,
        "shape": [1],
        "chunks": [1],
        "dtype": "|O",
        "compressor": {"id": "pickle", "protocol": 5},
        "filters": [{"id": "vlen-utf8"}],
        "fill_value": None,
        "order": "C",
    }
    if how == "filter":
        array |= {"compressor": None, "filters": [{"id": "pickle", "protocol": 5}]}
    arrays = [file.parent for file in binaries.files_of(folder) if file.name in ("zarr.json", ".zarray")]
    target = chance.choice(arrays)
    payload = chance.choice([binaries.payload, binaries.pickled_array])(folder)
    if how in ("compressor", "filter", "beside"):
        old = json.loads((target / ".zarray").read_bytes()) if (target / ".zarray").exists() else {}
        keep = {key: old[key] for key in ("shape", "chunks", "dtype") if chance.random() < 0.5 and key in old}
        (target / ".zarray").write_text(json.dumps(array | keep))
        if how != "beside":
            (target / "zarr.json").unlink(missing_ok=True)
        (target / "0").write_bytes(payload)
        (target / "0.0").write_bytes(payload)
    elif how == "format 3":
        file = target / "zarr.json"
        content = json.loads(file.read_bytes()) if file.exists() else {"zarr_format": 3, "node_type": "array"}
        content["codecs"] = [BYTES, {"name": "numcodecs.pickle", "configuration": {"protocol": 5}}]
        file.write_text(json.dumps(content))
        _over_chunks(folder, payload)
    else:
        name = chance.choice(["X", "weights", "means", "labels"])
        entry = {f"{name}/.zarray": array, f"{name}/.zattrs": {}, ".zgroup": {"zarr_format": 2}}
        if how == "consolidated 2":
            (folder / ".zgroup").write_text('{"zarr_format": 2}')
            (folder / ".zmetadata").write_text(json.dumps({"zarr_consolidated_format": 1, "metadata": entry}))
            (folder / "zarr.json").unlink(missing_ok=True)
        else:
            file = folder / "zarr.json"
            content = json.loads(file.read_bytes()) if file.exists() else {}
            content = {"zarr_format": 3, "node_type": "group", "attributes": content.get("attributes", {})}
            inner = {**array, "attributes": {}}
            content["consolidated_metadata"] = {
                "kind": "inline",
                "must_understand": False,
                "metadata": {name: inner},
            }
            file.write_text(json.dumps(content))
        (folder / name).mkdir(exist_ok=True)
        for key in ("0", "0.0"):
            if not (folder / name / key).is_dir():
                (folder / name / key).write_bytes(payload)
    return f"pickles, {how}, in {target.name}"


def _over_chunks(folder, data):
    for file in binaries.files_of(folder):
        if file.name not in DOCUMENTS:
            file.write_bytes(data)


def _consolidated(chance, folder):
    """Add consolidated metadata that say something else than the documents."""
    file = folder / "zarr.json"
    if not file.exists():
        file = folder / chance.choice([".zmetadata", ".zgroup", ".zattrs"])
        file.write_text(
            json.dumps({"zarr_consolidated_format": 1, "metadata": {".zgroup": {"zarr_format": 2}}})
        )
        return documents.rewritten(chance, file, V2)

    def change(content):
        inner, what = documents.altered(chance, content, V3)
        metadata = {chance.choice(["X", "../X", "", "labels", "a/b"]): inner}
        content = copy.deepcopy(content)
        content["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": metadata}
        if chance.random() < 0.5:
            content = {key: content[key] for key in ("zarr_format", "consolidated_metadata")} | {
                "node_type": "group"
            }
        return content, f"consolidated: {what}"

    return documents.rewritten(chance, file, V3, change)


def target(case):
    """Open and read, beside zarr itself."""
    return read_like(case, case.place, _opened)


def _opened(case):
    """Return the array that is meant, opened by zarr; what the package accepted runs no code there."""
    for file in sorted(case.place.rglob("*")):
        plainly(file)
    for zarr_format in (3, 2):
        for name in (None, "X"):
            with contextlib.suppress(Exception):
                return zarr.open_array(case.place, path=name, mode="r", zarr_format=zarr_format)
        with contextlib.suppress(Exception):
            node = zarr.open_group(case.place, mode="r", zarr_format=zarr_format, use_consolidated=False)
            (found,) = (array for _, array in node.arrays() if array.ndim == 2)
            return found
    raise FileNotFoundError("zarr finds nothing")


def plainly(file):
    """Leave out of a document what says nothing of how to decode values: attributes, settings of compressors.

    zarr refuses arrays for those, too.
    """
    if file.name in (".zattrs", ".zmetadata"):
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
    if file.name not in ("zarr.json", ".zarray") or not file.is_file():
        return
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError, OSError):
        content = json.loads(file.read_bytes())
        content.pop("consolidated_metadata", None)
        content.pop("attributes", None)
        if "compressor" in content:
            content["compressor"] = _usual(content["compressor"])
            content["filters"] = [_usual(codec) for codec in content.get("filters") or []] or None
        for codecs_of in _chains(content):
            codecs_of[:] = [_usual(codec) for codec in codecs_of]
        file.write_text(json.dumps(content))


def _chains(content):
    """Yield the lists of codecs of an array of format 3, those in its shards first."""
    found = content.get("codecs")
    if isinstance(found, list):
        for codec in found:
            if isinstance(codec, dict) and isinstance(codec.get("configuration"), dict):
                yield from _chains(codec["configuration"])
        yield found


def _usual(codec):
    """Return a compressor with its usual configuration; another codec as it is."""
    if isinstance(codec, str):
        codec = {"name": codec}
    if not isinstance(codec, dict):
        return codec
    for usual in (*NAMED, *COMPRESSORS):
        for key in ("name", "id"):
            if usual and key in usual and usual[key] == codec.get(key) and usual[key] in COMPRESSED:
                return usual
    return codec
