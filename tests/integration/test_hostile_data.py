"""Stored data made to run code, to take memory or to wait for ever: refused at once, by errors of ours."""

import importlib
import json
import pickle
import zipfile
from pathlib import Path

import dask.array as da
import numcodecs.abc
import numcodecs.pickles
import numcodecs.registry
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from fits import ROWS, mixture
from reliability import hostile
from reliability.zygote import Zygote

from emtau_dask import GaussianMixture, InvalidDataError
from emtau_dask.data.opening import open_source

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
PATIENCE = 60


@pytest.fixture(scope="module")
def apart():
    """Runs a function in a process of its own, which has little memory and must end."""
    with Zygote("reliability.hostile") as zygote:

        def run(function, *arguments):
            return zygote.start(hostile.ends, function, *arguments).result(PATIENCE)

        yield run


class Trap:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return Path.touch, (Path("sprung"),)


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """Where a pickle would make its file, with numcodecs as it was before 0.16.6, which unpickled."""
    monkeypatch.setattr(numcodecs.pickles, "ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not Path("sprung").exists()


PICKLE = {"id": "pickle", "protocol": 5}


def format_two(**changes):
    return {
        "zarr_format": 2,
        "shape": [4, 2],
        "chunks": [4, 2],
        "dtype": "<f8",
        "order": "C",
        "fill_value": None,
        "filters": None,
        "compressor": PICKLE,
        **changes,
    }


OBJECTS = format_two(dtype="|O", filters=[{"id": "vlen-utf8"}])


def plain_array(place, metadata, name=""):
    (place / name).mkdir(parents=True)
    (place / name / ".zarray").write_text(json.dumps(metadata))
    (place / name / "0.0").write_bytes(pickle.dumps(Trap()))


def in_a_group(place, metadata):
    plain_array(place, metadata, "X")
    (place / ".zgroup").write_text('{"zarr_format": 2}')


def consolidated(place, metadata):
    in_a_group(place, format_two(compressor=None))
    documents = {".zgroup": {"zarr_format": 2}, "X/.zarray": metadata}
    (place / ".zmetadata").write_text(json.dumps({"zarr_consolidated_format": 1, "metadata": documents}))


def consolidated_only(place, metadata):
    """Format 3, the array described in the root alone."""
    place.mkdir()
    inline = {"kind": "inline", "must_understand": False, "metadata": {"X": {**metadata, "attributes": {}}}}
    root = {"zarr_format": 3, "node_type": "group", "attributes": {}, "consolidated_metadata": inline}
    (place / "zarr.json").write_text(json.dumps(root))
    (place / "X").mkdir()
    (place / "X/0.0").write_bytes(pickle.dumps(Trap()))


PLACES = [plain_array, in_a_group, consolidated, consolidated_only]
PICKLED = {
    "compressor": format_two(),
    "filter": format_two(compressor=None, filters=[PICKLE]),
    "filter before a compressor": format_two(compressor={"id": "zlib", "level": 1}, filters=[PICKLE]),
    "objects": OBJECTS,
    "objects by a filter": format_two(dtype="|O", filters=[PICKLE], compressor=None),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("metadata", PICKLED)
def test_data_run_no_pickle(trap, place, metadata):
    place(trap / "rows.zarr", PICKLED[metadata])
    with pytest.raises(InvalidDataError):
        mixture().fit(trap / "rows.zarr")


def test_what_is_refused_is_named_with_a_remedy(trap):
    plain_array(trap / "rows.zarr", format_two())
    with pytest.raises(InvalidDataError, match=r"codec 'pickle'.*copy"):
        open_source(str(trap / "rows.zarr"))


@pytest.mark.parametrize("name", ["numcodecs.pickle", "pickle", "vlen-bytes", "json2", "numcodecs.msgpack2"])
def test_format_three_has_no_such_codecs_either(trap, name):
    content = hostile.document([4, 2], [4, 2], [BYTES, {"name": name, "configuration": {}}])
    hostile.written(trap / "rows.zarr", content, pickle.dumps(Trap()))
    with pytest.raises(InvalidDataError, match=name.removeprefix("numcodecs.")):
        open_source(str(trap / "rows.zarr"))


@pytest.mark.parametrize("inner", ["codecs", "index_codecs"])
def test_nor_inside_of_shards(trap, inner):
    sharding = {"chunk_shape": [2, 2], "codecs": [BYTES], "index_codecs": [BYTES], "index_location": "end"}
    sharding[inner] = [BYTES, {"name": "numcodecs.pickle", "configuration": {}}]
    codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    hostile.written(trap / "rows.zarr", hostile.document([4, 2], [4, 2], codecs), b"")
    with pytest.raises(InvalidDataError, match="pickle"):
        open_source(str(trap / "rows.zarr"))


@pytest.mark.parametrize("codecs", [[], [{"name": "crc32c"}]], ids=str)
def test_nor_an_index_of_shards_that_is_not_encoded(trap, codecs):
    sharding = {"chunk_shape": [2, 2], "codecs": [BYTES], "index_codecs": codecs, "index_location": "end"}
    shards = [{"name": "sharding_indexed", "configuration": sharding}]
    hostile.written(trap / "rows.zarr", hostile.document([4, 2], [4, 2], shards), b"")
    with pytest.raises(InvalidDataError, match=r"rows\.zarr"):
        open_source(str(trap / "rows.zarr")).ranges.read(0, 4)


HANDED_OVER = {
    "array": lambda path: zarr.open_array(path, mode="r"),
    "dask array": lambda path: da.from_zarr(zarr.open_array(path, mode="r")),
}


@pytest.mark.parametrize("given", HANDED_OVER)
def test_an_array_that_the_user_opened_is_read_as_it_is_stored_now(trap, given):
    zarr.create_array(trap / "rows.zarr", data=np.ones((4, 2)), zarr_format=2)
    opened = HANDED_OVER[given](trap / "rows.zarr")
    (trap / "rows.zarr/.zarray").write_text(json.dumps(format_two()))
    (trap / "rows.zarr/0.0").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InvalidDataError, match="pickle"):
        mixture().fit(opened)


class Owned(numcodecs.abc.Codec):
    """A user's own codec, known to zarr in this process."""

    codec_id = "test_hostile_data.owned"

    def encode(self, buf):
        return buf

    def decode(self, buf, out=None):
        return buf


@pytest.mark.parametrize("given", HANDED_OVER)
def test_codecs_that_the_user_registered_are_not_run_in_our_tasks(trap, given, monkeypatch):
    monkeypatch.setitem(numcodecs.registry.codec_registry, Owned.codec_id, Owned)
    zarr.create_array(trap / "rows.zarr", data=ROWS, zarr_format=2, compressors=Owned())
    with pytest.raises(InvalidDataError, match=r"hostile_data\.owned.*copy"):
        mixture().fit(HANDED_OVER[given](trap / "rows.zarr"))


def test_a_group_that_the_user_opened_is_read_by_its_own_documents(trap):
    consolidated(trap / "rows.zarr", OBJECTS)
    (trap / "rows.zarr/X/0.0").write_bytes(np.arange(8.0).tobytes())
    group = zarr.open_group(trap / "rows.zarr", mode="r", zarr_format=2, use_consolidated=False)
    assert np.array_equal(GaussianMixture(1, max_iter=2).fit(group).means_, [[3, 4]])


@pytest.fixture
def model(trap):
    mixture().fit(ROWS).save(trap / "model.zarr")
    return trap / "model.zarr"


def smuggled_by_consolidated_metadata(path):
    root = json.loads((path / "zarr.json").read_text())
    described = {**OBJECTS, "shape": [3], "chunks": [3], "attributes": {}}
    root["consolidated_metadata"] = {
        "kind": "inline",
        "must_understand": False,
        "metadata": {"weights": described},
    }
    (path / "zarr.json").write_text(json.dumps(root))
    (path / "weights/0").write_bytes(pickle.dumps(Trap()))


def test_a_model_runs_no_pickle_that_consolidated_metadata_describes(model):
    expected = GaussianMixture.load(model).means_
    smuggled_by_consolidated_metadata(model)
    (model / "weights/.zarray").write_text(json.dumps(OBJECTS))
    assert np.array_equal(GaussianMixture.load(model).means_, expected)


def with_a_codec(path, codec):
    content = json.loads((path / "weights/zarr.json").read_text())
    content["codecs"].append(codec)
    (path / "weights/zarr.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["numcodecs.pickle", "numcodecs.zlib", "blosc", "vlen-utf8"])
def test_a_model_with_a_codec_that_its_chunks_were_not_written_by_is_refused(model, name):
    with_a_codec(model, {"name": name, "configuration": {}})
    with pytest.raises(InvalidDataError, match=r"model\.zarr"):
        GaussianMixture.load(model)


def test_commands_run_no_pickle(model):
    """`predict` with such a model and such data, `inspect` and `compare`."""
    place = model.parent
    plain_array(place / "rows.zarr", format_two())
    np.save(place / "rows.npy", ROWS)
    smuggled_by_consolidated_metadata(model)
    (place / "weights.json").write_text("")
    assert hostile.command("predict", model, place / "rows.npy", place / "labels.zarr")[0] == 0
    code, said = hostile.command("predict", model, place / "rows.zarr", place / "other.zarr")
    assert (code, "pickle" in said) == (1, True)
    assert hostile.command("inspect", model)[0] == 0
    config = place / "run.yaml"
    config.write_text(
        f"data: {{path: {place}/rows.npy, labels: {place}/rows.zarr}}\n"
        "model: {n_components: 2}\nalgorithm: {compare: [{name: em}]}\n"
    )
    code, said = hostile.command("compare", config)
    assert (code, "pickle" in said) == (1, True)


MANY = 2**25


def test_a_plan_of_very_many_chunks_takes_no_memory_for_each(apart, tmp_path):
    """352 bytes that took 5.9 GB."""
    hostile.written(tmp_path / "rows.zarr", hostile.document([MANY, 1], [1, 1]))
    (tmp_path / "run.yaml").write_text(f"data: {{path: {tmp_path}/rows.zarr}}\nmodel: {{n_components: 2}}\n")
    ended, said = apart(hostile.command, "fit", tmp_path / "run.yaml", "--plan")
    assert ended == "returned"
    assert said.startswith("(0,"), said


@pytest.mark.parametrize(
    "content",
    [
        hostile.document([2**61, 2], [2**20, 2]),
        hostile.document([2**61, 2], [1, 2]),
        hostile.document([10, 2], [2**40, 2]),
        hostile.document([2**40, 2], [2**40, 2]),
    ],
    ids=["chunks", "grouped chunks", "chunk beyond the array", "one chunk"],
)
def test_numbers_of_a_document_take_no_memory(apart, tmp_path, content):
    hostile.written(tmp_path / "rows.zarr", content)
    ended, said = apart(hostile.first_rows, tmp_path / "rows.zarr")
    assert ended in ("refused", "returned"), said
    if content["shape"] != [2**40, 2]:
        assert ended == "refused"
        assert "MemoryError" not in said
        assert "again" in said


def test_consecutive_small_chunks_are_read_as_one(tmp_path, monkeypatch):
    rows = np.arange(600.0).reshape(300, 2)
    array = zarr.create_array(tmp_path / "rows.zarr", data=rows, chunks=(1, 2))
    monkeypatch.setattr("emtau_dask.data.zarr_arrays.MANY_CHUNKS", 100)
    monkeypatch.setattr("emtau_dask.data.zarr_arrays.MAX_GROUPED", 64)
    source = open_source(str(tmp_path / "rows.zarr"))
    assert source.chunk_rows == (64, 64, 64, 64, 44)
    assert np.array_equal(source.ranges.read(3, 290)[0], array[3:290])


def test_an_index_of_a_shard_that_is_damaged_is_refused(tmp_path):
    """It says that a chunk is 2**62 bytes long."""
    sharding = {"chunk_shape": [500, 2], "codecs": [BYTES], "index_codecs": [BYTES], "index_location": "end"}
    codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    index = np.array([0, 2**62, 0, 2**62], "<u8").tobytes()
    place = hostile.written(
        tmp_path / "rows.zarr", hostile.document([1000, 2], [1000, 2], codecs), bytes(99) + index
    )
    with pytest.raises(InvalidDataError, match=r"rows 0 to 1 of the zarr array .* cannot be read"):
        open_source(str(place)).ranges.read(0, 1)


def test_a_model_nested_deeply(apart, tmp_path):
    mixture().fit(ROWS).save(tmp_path / "model.zarr")
    file = tmp_path / "model.zarr/zarr.json"
    deep = "[" * 10**5 + "]" * 10**5
    file.write_text(file.read_text().replace('"attributes": {', f'"attributes": {{"deep": {deep}, ', 1))
    ended, said = apart(hostile.loaded, tmp_path / "model.zarr")
    assert (ended, "nested" in said) == ("refused", True), said


def chunk_pipe(place):
    hostile.pipe(hostile.written(place / "rows.zarr", hostile.document([4, 2], [4, 2])) / "c/0/0")
    return place / "rows.zarr"


def document_pipe(place):
    hostile.pipe(place / "rows.zarr/zarr.json")
    return place / "rows.zarr"


PIPES = {
    "npy": lambda place: hostile.pipe(place / "rows.npy"),
    "parquet": lambda place: hostile.pipe(place / "rows.parquet"),
    "parquet in a folder": lambda place: hostile.pipe(place / "rows/one.parquet").parent,
    "zarr chunk": chunk_pipe,
    "zarr document": document_pipe,
}


@pytest.mark.parametrize("kind", PIPES)
def test_a_pipe_is_refused_at_once(apart, tmp_path, kind):
    ended, said = apart(hostile.first_rows, PIPES[kind](tmp_path))
    assert (ended, "is no regular file but a pipe" in said) == ("refused", True), said


@pytest.mark.parametrize("name", ["zarr.json", "means/zarr.json", "means/c/0/0"])
def test_a_pipe_in_a_model_is_refused_at_once(apart, tmp_path, name):
    mixture().fit(ROWS).save(tmp_path / "model.zarr")
    hostile.pipe(tmp_path / "model.zarr" / name)
    ended, said = apart(hostile.loaded, tmp_path / "model.zarr")
    assert (ended, "is no regular file but a pipe" in said) == ("refused", True), said


def test_a_device_is_refused_at_once(apart, tmp_path):
    (tmp_path / "rows.npy").symlink_to("/dev/zero")
    ended, said = apart(hostile.first_rows, tmp_path / "rows.npy")
    assert (ended, "a device" in said) == ("refused", True)


@pytest.mark.parametrize("name", ["rows.npy", "rows.parquet", "rows.zarr"])
def test_a_link_that_leads_to_itself_is_refused(tmp_path, name):
    (tmp_path / name).symlink_to(name)
    mixture().fit(ROWS).save(tmp_path / "model.zarr")
    code, said = hostile.command("predict", tmp_path / "model.zarr", tmp_path / name, tmp_path / "out.zarr")
    assert code == 1
    assert "--debug" not in said
    assert name in said


def npy_header(text):
    text = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def npy_of(shape, descr="'<f8'"):
    return npy_header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}")


NPY = {
    "nested": npy_header("(" * 9000),
    "nested in a dict": npy_header("{'descr': " + "[" * 4000),
    "shape of no bytes": npy_of((2**60, 0)),
    "values of no bytes": npy_of((2**60, 2), "'|V0'"),
    "negative": npy_of((-1, 2)),
    "no rows of very many features": npy_of((0, 10**30)),
    "longer than the file": npy_of((2**60, 2)),
    "long strings": npy_of((1, 2), "'<U2000000000'"),
    "objects": npy_of((1, 2), "'|O'") + pickle.dumps(Trap()),
    "an integer of 5,000 digits": npy_of("(" + "9" * 5000 + ", 2)"),
    "nothing": b"",
}


@pytest.mark.parametrize("name", NPY)
def test_a_strange_npy_header_is_refused(apart, tmp_path, name):
    (tmp_path / "rows.npy").write_bytes(NPY[name])
    ended, said = apart(hostile.first_rows, tmp_path / "rows.npy")
    assert (ended, "rows.npy" in said) == ("refused", True), said


def test_images_that_are_many_on_paper_only(apart, tmp_path):
    with zipfile.ZipFile(tmp_path / "mnist.npz", "w") as archive:
        archive.writestr("X.npy", npy_of((2**40, 784)))
        archive.writestr("y.npy", npy_of((2**40,)))
    ended, said = apart(
        hostile.command, "dataset", "mnist", tmp_path / "out.zarr", "--source", tmp_path / "mnist.npz"
    )
    assert ended == "returned"
    assert "cannot be read as an .npz file" in said


def test_a_pipe_of_images_is_refused_at_once(apart, tmp_path):
    source = hostile.pipe(tmp_path / "mnist.npz")
    ended, said = apart(hostile.command, "dataset", "mnist", tmp_path / "out.zarr", "--source", source)
    assert (ended, "a pipe" in said) == ("returned", True)


def test_an_npz_named_npy_is_refused_with_a_remedy(tmp_path):
    np.savez(tmp_path / "rows.npz", X=ROWS)
    (tmp_path / "rows.npz").rename(tmp_path / "rows.npy")
    with pytest.raises(InvalidDataError, match=r"\.npz archive.*numpy\.save"):
        open_source(str(tmp_path / "rows.npy"))


@pytest.mark.parametrize("method", ["fit", "predict", "score_samples"])
def test_integers_beyond_float64_are_refused(method):
    with pytest.raises(InvalidDataError, match="too large"):
        getattr(mixture().fit(ROWS), method)(hostile.huge_integers())


@pytest.mark.parametrize("what", ["sample_weight", "responsibilities_init"])
def test_so_are_weights_of_such(what):
    values = np.ones((len(ROWS), 3) if what == "responsibilities_init" else len(ROWS), dtype=object)
    values[0] = 10**400
    with pytest.raises(InvalidDataError, match="too large"):
        mixture().fit(ROWS, **{what: values})


ROWS_OF_EACH = {"plain": {}, "sharded": {"chunks": (2, 2), "shards": (4, 2)}, "format 2": {"zarr_format": 2}}


def rewritten(place, change):
    """Write rows by zarr, change what their document says, and return the folder."""
    kind, change = change
    zarr.create_array(place, data=np.arange(8.0).reshape(4, 2), **ROWS_OF_EACH[kind])
    file = place / (".zarray" if kind == "format 2" else "zarr.json")
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return place


NOT_UNDERSTOOD = {
    "an extension": ("plain", lambda content: content.update(scale={"factor": 2})),
    "an extension's name": ("plain", lambda content: content.update(scale="x")),
    "no fill value": ("plain", lambda content: content.pop("fill_value")),
    "a setting of shards": (
        "sharded",
        lambda content: content["codecs"][0]["configuration"].update(scale=2),
    ),
    "no fill value in format 2": ("format 2", lambda content: content.pop("fill_value")),
    "no order": ("format 2", lambda content: content.pop("order")),
    "another order": ("format 2", lambda content: content.update(order="A")),
}


@pytest.mark.parametrize("what", NOT_UNDERSTOOD)
def test_what_a_document_says_is_understood_or_refused(tmp_path, what):
    """As zarr does, and its specification asks for."""
    with pytest.raises(InvalidDataError, match=r"rows\.zarr"):
        open_source(str(rewritten(tmp_path / "rows.zarr", NOT_UNDERSTOOD[what])))


def test_extensions_that_need_not_be_understood_are_not(tmp_path):
    more = {"note": {"must_understand": False, "name": "x"}}
    place = rewritten(tmp_path / "rows.zarr", ("plain", lambda content: content.update(more)))
    assert np.array_equal(open_source(str(place)).ranges.read(1, 3)[0], [[2, 3], [4, 5]])


@pytest.mark.parametrize("rows", [0, 5, 9, 11])
def test_row_groups_with_another_number_of_rows_than_values(tmp_path, rows):
    """pyarrow would read the rows of one group as those of the next."""
    table = pa.table({"a": np.arange(20.0), "b": np.arange(20.0)})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=10)
    data = (tmp_path / "rows.parquet").read_bytes()
    # Thrift's compact form of the field num_rows (i64, zigzag), and the head of the next, file_offset.
    declared, other = b"\x16\x14\x26", bytes([0x16, 2 * rows, 0x26])
    assert data.count(declared) == 2
    (tmp_path / "rows.parquet").write_bytes(data.replace(declared, other, 1))
    with pytest.raises(InvalidDataError, match=rf"its column 'a' has 10 values for {rows} rows"):
        open_source(str(tmp_path / "rows.parquet"))


NUMBERS = pa.array(np.arange(20.0))
PANDAS = {
    "index_columns": ["__index_level_0__"],
    "columns": [
        {
            "name": "a",
            "field_name": "a",
            "pandas_type": "object",
            "numpy_type": "object",
            "metadata": "PICKLE",
        },
        {"name": "b", "field_name": "b", "pandas_type": "bytes", "numpy_type": "object", "metadata": None},
    ],
    "column_indexes": [{"name": None, "pandas_type": "object", "metadata": {"encoding": "pickle"}}],
}


def extension(name, column):
    """A table whose column a says that it is of an extension type, which Arrow's Python once unpickled."""
    said = {"ARROW:extension:name": name, "ARROW:extension:metadata": pickle.dumps(Trap())}
    fields = [pa.field("a", column.type, metadata=said), pa.field("b", pa.float64())]
    return pa.Table.from_arrays([column, NUMBERS], schema=pa.schema(fields))


def tables_of_pickles():
    """Tables with pickles where some reader has unpickled them, by what they are."""
    pickled = pa.array([pickle.dumps(Trap())] * 20)
    both = pa.table({"a": NUMBERS, "b": NUMBERS})
    names = ("py_extension_type", "json", "fixed_shape_tensor", "opaque", "uuid", "bool8")
    return {
        **{f"arrow.{name} of numbers": extension(f"arrow.{name}", NUMBERS) for name in names},
        **{
            f"pandas.{name} of numbers": extension(f"pandas.{name}", NUMBERS)
            for name in ("period", "interval")
        },
        "an extension of pickles": extension("arrow.py_extension_type", pickled),
        "pickles": pa.table({"a": pickled, "b": NUMBERS}),
        "a dictionary of pickles": pa.table({"a": pickled.dictionary_encode(), "b": NUMBERS}),
        "pandas' metadata": both.replace_schema_metadata({"pandas": json.dumps(PANDAS)}),
        "pickled metadata": both.replace_schema_metadata(
            dict.fromkeys(("pandas", "PANDAS_ATTRS", "geo"), pickle.dumps(Trap()))
        ),
    }


@pytest.mark.parametrize("what", tables_of_pickles())
@pytest.mark.parametrize("columns", [None, ["b"], ["a", "b"]], ids=["all", "the other", "both"])
def test_parquet_runs_no_pickle(trap, what, columns):
    """It is read as the numbers that it stores, or refused."""
    importlib.import_module("pandas.core.arrays.arrow.extension_types")  # registers them
    pq.write_table(tables_of_pickles()[what], trap / "rows.parquet", row_group_size=10)
    try:
        read = open_source(str(trap / "rows.parquet"), columns=columns).ranges.read(0, 20)[0]
    except InvalidDataError:
        refused = True
    else:
        refused = False
        expected = np.column_stack([NUMBERS.to_numpy()] * (2 if columns is None else len(columns)))
        assert np.array_equal(read, expected)
    if "pickles" in what:
        assert refused == (columns != ["b"])
    elif "metadata" in what:
        assert not refused
