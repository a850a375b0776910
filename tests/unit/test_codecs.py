"""Decoding to a declared size: what zarr and numcodecs encode comes back, and nothing of another size."""

import warnings

import numcodecs
import numpy as np
import pytest
import zarr
from numcodecs.registry import get_codec

from emtau_dask import InvalidDataError
from emtau_dask.data.opening import open_source
from emtau_dask.storage.zarr_check import COMPRESSORS, Encoded, checked_chain, decompressed, encoded_by

VALUES = np.round(np.random.default_rng(0).normal(size=(500, 3)), 1)
DATA = VALUES.tobytes()


def compressed(name, data=DATA):
    return bytes(get_codec({"id": name}).encode(data))


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
@pytest.mark.parametrize("exact", [True, False])
def test_what_was_compressed_comes_back(name, exact):
    made = Encoded(len(DATA) + (0 if exact else 7), exact)
    assert decompressed(name, compressed(name), made).tobytes() == DATA


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
@pytest.mark.parametrize(
    "made", [Encoded(len(DATA) - 1), Encoded(len(DATA) + 1), Encoded(len(DATA) - 1, False)]
)
def test_another_size_than_is_declared_is_refused(name, made):
    with pytest.raises(ValueError, match="declared"):
        decompressed(name, compressed(name), made)


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
@pytest.mark.parametrize("exact", [True, False])
def test_what_was_cut_off_is_refused(name, exact):
    whole = compressed(name)
    for length in {*range(40), len(whole) // 2, len(whole) - 1}:
        with pytest.raises(ValueError):  # noqa: PT011 (of whichever part is missing)
            decompressed(name, whole[:length], Encoded(len(DATA), exact))


@pytest.mark.parametrize("name", ["gzip", "bz2", "lzma", "zstd"])
def test_several_streams_are_one(name):
    both = compressed(name, DATA[:5000]) + compressed(name, DATA[5000:])
    assert decompressed(name, both, Encoded(len(DATA))).tobytes() == DATA
    with pytest.raises(ValueError, match="declared"):
        decompressed(name, both, Encoded(len(DATA) + 1))


@pytest.mark.parametrize("name", ["zlib", "gzip", "bz2", "lzma"])
def test_streams_longer_than_a_piece(name):
    noise = np.random.default_rng(0).bytes(700_000)
    assert decompressed(name, compressed(name, noise), Encoded(len(noise))).tobytes() == noise


@pytest.mark.parametrize("size", [1, 255, 256, 300, 65_791, 65_792, 200_000])
def test_the_size_that_a_frame_of_zstd_states(size):
    """Its field has one, two or four bytes."""
    data = bytes(size)
    assert len(decompressed("zstd", compressed("zstd", data), Encoded(size + 5, exact=False))) == size


def test_a_frame_of_zstd_may_keep_its_size_to_itself():
    raw = bytes.fromhex("28b52ffd0050") + (len(DATA) << 3 | 1).to_bytes(3, "little") + DATA
    assert decompressed("zstd", raw, Encoded(len(DATA))).tobytes() == DATA
    with pytest.raises(ValueError, match="does not state"):
        decompressed("zstd", raw, Encoded(len(DATA), exact=False))


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


@pytest.mark.parametrize(
    ("codec", "named"),
    [
        ({"id": "delta", "dtype": "|O"}, "of numbers"),
        ({"id": "astype", "encode_dtype": "<f4", "decode_dtype": "<U1000000"}, "of numbers"),
        ({"id": "shuffle", "elementsize": 0}, "element size"),
        ({"id": "pickle"}, "'pickle'"),
        ({"id": "categorize", "labels": ["a"], "dtype": "|O"}, "'categorize'"),
        ({"name": "zstd", "configuration": {"id": "pickle"}}, "a codec is"),
        ({"name": 3}, "a codec is"),
        (None, "a codec is"),
    ],
    ids=str,
)
def test_a_codec_that_is_not_of_numbers_is_refused(codec, named):
    names = frozenset({"delta", "astype", "shuffle", "zstd"})
    with pytest.raises((InvalidDataError, ValueError), match=named):
        checked_chain([codec], names, Encoded(80), 10, "the array")


def test_sizes_follow_what_each_codec_makes():
    """Ten float64, cast to two bytes each, summed up, and compressed."""
    sizes, before = [], Encoded(80)
    for name, configuration in [("fixedscaleoffset", {"astype": "<i2"}), ("crc32", {}), ("zlib", {})]:
        before = encoded_by(name, configuration, before, 10)
        sizes.append((before.size, before.exact))
    assert sizes[:2] == [(20, True), (24, True)]
    assert 24 < sizes[2][0] < 2**13
    assert not sizes[2][1]
