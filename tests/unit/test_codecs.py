"""Codecs that are read: what zarr encodes comes back, and nothing of a chunk that was cut off or is another.

Rows are compared with those that zarr reads, or with those that were written.
"""

import json
import warnings

import numcodecs
import numpy as np
import pytest
import zarr
from numcodecs.registry import get_codec

from emtau_dask import InvalidDataError
from emtau_dask.data.opening import open_source
from emtau_dask.storage.zarr_check import COMPRESSORS

VALUES = np.round(np.random.default_rng(0).normal(size=(500, 3)), 1)


def in_one_chunk(path, name, zarr_format):
    """Write `VALUES` in a chunk by one compressor; return its file."""
    named = {"blosc": "Blosc", "gzip": "Gzip", "zstd": "Zstd"}
    compressor = get_codec({"id": name})
    if zarr_format == 3:
        compressor = getattr(zarr.codecs, f"{named[name]}Codec")()
    zarr.create_array(path, data=VALUES, chunks=(500, 3), zarr_format=zarr_format, compressors=compressor)
    return path / ("c/0/0" if zarr_format == 3 else "0.0")


COMPRESSED = [(name, 2) for name in sorted(COMPRESSORS)] + [("blosc", 3), ("gzip", 3), ("zstd", 3)]


def refused(path):
    with pytest.raises(InvalidDataError, match=r"rows 0 to 500 of the zarr array .*cannot be read"):
        open_source(str(path)).ranges.read(0, 500)


@pytest.mark.parametrize(("name", "zarr_format"), COMPRESSED)
def test_what_was_cut_off_is_refused(tmp_path, name, zarr_format):
    file = in_one_chunk(tmp_path / "rows.zarr", name, zarr_format)
    whole = file.read_bytes()
    for length in {*range(40), len(whole) // 2, len(whole) - 1}:
        file.write_bytes(whole[:length])
        refused(tmp_path / "rows.zarr")


@pytest.mark.parametrize(("name", "zarr_format"), COMPRESSED)
@pytest.mark.parametrize("n_values", [1499, 1501])
def test_a_chunk_of_another_size_is_refused(tmp_path, name, zarr_format, n_values):
    file = in_one_chunk(tmp_path / "rows.zarr", name, zarr_format)
    file.write_bytes(get_codec({"id": name}).encode(np.resize(VALUES, n_values)))
    refused(tmp_path / "rows.zarr")


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("local", [False, True], ids=["by zarr", "here"])
def test_a_blosc_buffer_that_states_more_bytes_than_there_are(tmp_path, local, cut):
    """Its decoder would read on: without its last byte it has decoded to other values."""
    file = in_one_chunk(tmp_path / "rows.zarr", "blosc", 3)
    if cut:
        file.write_bytes(file.read_bytes()[:-1])
    ranges = open_source(str(tmp_path / "rows.zarr")).ranges
    if cut:
        with pytest.raises(InvalidDataError, match="it was cut off"):
            ranges.read(0, 500 if local else 499)
    else:
        assert np.array_equal(ranges.read(0, 500 if local else 499)[0], VALUES[: 500 if local else 499])


FILTERS = {
    "delta": numcodecs.Delta(dtype="<f8"),
    "delta to less": numcodecs.Delta(dtype="<f8", astype="<f4"),
    "fixed": numcodecs.FixedScaleOffset(offset=0, scale=10, dtype="<f8", astype="<i2"),
    "quantize": numcodecs.Quantize(digits=2, dtype="<f8"),
    "bitround": numcodecs.BitRound(keepbits=40),
    "astype": numcodecs.AsType(encode_dtype="<f4", decode_dtype="<f8"),
    "shuffle": numcodecs.Shuffle(elementsize=8),
    "crc32": numcodecs.CRC32(),
    "adler32": numcodecs.Adler32(),
    "fletcher32": numcodecs.Fletcher32(),
    "zlib": numcodecs.Zlib(),
}


@pytest.mark.parametrize("compressor", sorted(COMPRESSORS))
@pytest.mark.parametrize("name", FILTERS)
def test_format_two_with_filters(tmp_path, name, compressor):
    array = zarr.create_array(
        tmp_path / "rows.zarr",
        shape=VALUES.shape,
        chunks=(200, 2),
        dtype="<f8",
        zarr_format=2,
        filters=[FILTERS[name]],
        compressors=get_codec({"id": compressor}),
    )
    array[:] = VALUES
    assert np.array_equal(open_source(str(tmp_path / "rows.zarr")).ranges.read(3, 450)[0], array[3:450])


def test_bits_packed(tmp_path):
    array = zarr.create_array(
        tmp_path / "rows.zarr",
        data=VALUES > 0,
        chunks=(100, 3),
        zarr_format=2,
        filters=[numcodecs.PackBits()],
    )
    assert np.array_equal(open_source(str(tmp_path / "rows.zarr")).ranges.read(0, 500)[0], array[:])


CODECS = {
    "zstd": zarr.codecs.ZstdCodec(),
    "gzip": zarr.codecs.GzipCodec(),
    "blosc": zarr.codecs.BloscCodec(),
    "crc32c": zarr.codecs.Crc32cCodec(),
}
CHAINS = [[name] for name in CODECS] + [["gzip", "zstd"], ["zstd", "crc32c"], ["crc32c", "zstd", "blosc"]]


@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
@pytest.mark.parametrize("layout", [{"chunks": (200, 2)}, {"chunks": (50, 1), "shards": (200, 2)}], ids=str)
def test_format_three(tmp_path, chain, layout):
    chosen = [CODECS[name] for name in chain]
    array = zarr.create_array(tmp_path / "rows.zarr", data=VALUES, compressors=chosen, **layout)
    assert np.array_equal(open_source(str(tmp_path / "rows.zarr")).ranges.read(3, 450)[0], array[3:450])


def test_codecs_of_numcodecs_in_format_three(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from numcodecs import zarr3

        array = zarr.create_array(
            tmp_path / "rows.zarr",
            data=VALUES,
            chunks=(200, 2),
            filters=[zarr3.Delta(dtype="<f8")],
            compressors=[zarr3.Shuffle(elementsize=8), zarr3.BZ2(level=1), zarr3.LZMA()],
        )
        assert np.array_equal(open_source(str(tmp_path / "rows.zarr")).ranges.read(3, 450)[0], array[3:450])


SHARDS = zarr.codecs.ShardingCodec(chunk_shape=(50, 3)).to_dict()
INNER = SHARDS | {"configuration": SHARDS["configuration"] | {"codecs": [SHARDS]}}


@pytest.mark.parametrize(
    ("codecs", "named"),
    [
        (["bytes", {"name": "numcodecs.pickle"}], "'pickle'"),
        (["bytes", "vlen-utf8"], "'vlen-utf8'"),
        ([{"name": 3}], "'3'"),
        ([{"id": "bytes"}], "cannot be read"),
        ([None], "'None'"),
        ([SHARDS, "zstd"], "'sharding_indexed'"),
        ([INNER], "'sharding_indexed'"),
        (
            [SHARDS | {"configuration": SHARDS["configuration"] | {"index_codecs": ["bytes", "zstd"]}}],
            "'zstd'",
        ),
    ],
    ids=str,
)
def test_other_codecs_are_refused(tmp_path, codecs, named):
    zarr.create_array(tmp_path / "rows.zarr", data=VALUES, chunks=(100, 3))
    file = tmp_path / "rows.zarr/zarr.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "codecs": codecs}, default=list))
    with pytest.raises(InvalidDataError, match=named):
        open_source(str(tmp_path / "rows.zarr"))
