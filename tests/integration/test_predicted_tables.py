"""Predictions as tables, beside columns of the input: parquet and CSV, compared with what pandas reads."""

import datetime
import decimal
import gc
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from commands import emtau

from emtau_dask import GaussianMixture
from emtau_dask.cli import predict as command
from emtau_dask.em import predict
from emtau_dask.storage import tables

N = 60
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2)) + 6 * (np.arange(N) % 2)[:, None]
NAMES = [None if i % 7 == 0 else f'Zürich, "{i}"' if i % 3 else f"line\n{i}" for i in range(N)]
DAYS = [None if i % 11 == 0 else datetime.date(2024, 1, 1) + datetime.timedelta(i) for i in range(N)]
TABLE = pa.table(
    {
        "name": pa.array(NAMES, pa.string()),
        "x": X[:, 0],
        "day": pa.array(DAYS, pa.date32()),
        "time": pa.array(
            [datetime.datetime(2024, 1, 1, i % 24) for i in range(N)], pa.timestamp("us", "UTC")
        ),
        "fare": pa.array([decimal.Decimal(i) / 4 for i in range(N)], pa.decimal128(10, 2)),
        "kind": pa.array([["a", "b", None][i % 3] for i in range(N)]).dictionary_encode(),
        "y": X[:, 1],
        "parts": pa.array([[i, None][: i % 3] for i in range(N)], pa.list_(pa.int16())),
        "place": pa.array([{"lat": float(i), "zone": str(i)} for i in range(N)]),
        "count": pa.array([None if i % 5 == 0 else i for i in range(N)], pa.int64()),
    }
)
ALL = [name for name in TABLE.schema.names if name not in "xy"]
FLAT = [name for name in ALL if name not in ("parts", "place")]


@pytest.fixture(scope="module")
def model():
    frame = pd.DataFrame(X, columns=["x", "y"])
    return GaussianMixture(2, algorithm="em", tol=1e-3, random_state=0).fit(frame)


@pytest.fixture
def place(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    model.save("m.zarr")
    return tmp_path


def predicted(*arguments):
    result = emtau("predict", "m.zarr", *arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments, code):
    before = sorted(Path().rglob("*"))
    result = emtau("predict", "m.zarr", *arguments)
    assert result.exit_code == code, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("emtau: ")]
    assert "--debug" not in line
    assert sorted(Path().rglob("*")) == before
    return line


def read(path):
    """A table of parquet, or of CSV as text."""
    if path.endswith((".parquet", ".pq")):
        return pq.ParquetFile(path).read()
    separator = "\t" if path.endswith(".tsv") else ","
    return pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False)


def labels_of(model, table=TABLE):
    return model.predict(table.select(["x", "y"]).to_pandas())


@pytest.mark.parametrize("out", ["o.parquet", "o.pq"])
def test_any_column_of_parquet_is_kept_as_it_is(place, model, out):
    pq.write_table(TABLE, "t.parquet", row_group_size=17)
    assert "60 rows labelled in" in predicted("t.parquet", out, "--keep", ",".join(ALL)).output
    found = read(out)
    assert found.schema.names == [*ALL, "label"]
    assert found.schema.field("label").type == pa.int32()
    assert found.select(ALL).equals(TABLE.select(ALL))
    np.testing.assert_array_equal(found["label"], labels_of(model))


@pytest.mark.parametrize("out", ["o.csv", "o.tsv"])
def test_values_of_parquet_are_text(place, model, out):
    pq.write_table(TABLE, "t.parquet", row_group_size=17)
    predicted("t.parquet", out, "--keep", ",".join(FLAT))
    found = read(out)
    assert list(found) == [*FLAT, "label"]
    expected = {
        "name": [name or "" for name in NAMES],
        "day": [str(day or "") for day in DAYS],
        "fare": [f"{i / 4:.2f}" for i in range(N)],
        "kind": [["a", "b", ""][i % 3] for i in range(N)],
        "count": ["" if i % 5 == 0 else str(i) for i in range(N)],
        "label": [str(label) for label in labels_of(model)],
    }
    assert {name: found[name].tolist() for name in expected} == expected
    np.testing.assert_array_equal(pd.to_datetime(found["time"]), TABLE["time"].to_pandas())


@pytest.mark.parametrize("out", ["o.csv", "o.parquet"])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_columns_of_csv_are_text_as_it_stands(place, model, ending, out):
    frame = pd.DataFrame({"id": [f"{i:03}" for i in range(N)], "näme": [name or "NA" for name in NAMES]})
    frame["x"], frame["y"], frame["when, UTC"] = X[:, 0], X[:, 1], [str(day) for day in DAYS]
    for number, rows in enumerate((frame[:20], frame[20:])):
        rows.to_csv(f"t{number}.{ending}", index=False, sep="\t" if ending == "tsv" else ",")
    predicted(f"t*.{ending}", out, "--keep", "näme", "--keep", "id")
    found = read(out)
    found = found if out.endswith("csv") else found.to_pandas()
    assert list(found) == ["näme", "id", "label"]
    assert found["id"].tolist() == frame["id"].tolist()
    assert found["näme"].tolist() == frame["näme"].tolist()
    assert found["label"].astype(int).tolist() == labels_of(model).tolist()


def test_probabilities_scores_and_outliers_are_columns_and_the_same_as_in_zarr(place, model):
    pq.write_table(TABLE, "t.parquet", row_group_size=17)
    asked = ("--proba", "--scores", "--outliers", 0.1)
    predicted("t.parquet", "o.zarr", *asked)
    group = zarr.open_group("o.zarr", mode="r")
    frame = TABLE.select(["x", "y"]).to_pandas()
    for out in ("o.parquet", "o.csv"):
        predicted("t.parquet", out, *asked)
        found = pd.read_parquet(out) if out == "o.parquet" else pd.read_csv(out, float_precision="round_trip")
        assert list(found) == ["label", "probability_0", "probability_1", "score", "outlier"]
        both = found[["probability_0", "probability_1"]].to_numpy()
        np.testing.assert_allclose(both, model.predict_proba(frame), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found["score"], model.score_samples(frame), rtol=1e-9)
        np.testing.assert_array_equal(both, group["probabilities"][:])
        np.testing.assert_array_equal(found["score"], group["scores"][:])
        np.testing.assert_array_equal(found["outlier"], group["outliers"][:])
        np.testing.assert_array_equal(found["label"], group["labels"][:])
    types = pq.read_schema("o.parquet").types
    assert types == [pa.int32(), pa.float64(), pa.float64(), pa.float64(), pa.int8()]


def test_other_inputs_are_labelled_into_tables_too(place, model):
    np.save("t.npy", X)
    zarr.create_array(store="t.zarr", data=X, chunks=(17, 2))
    for data in ("t.npy", "t.zarr"):
        predicted(data, f"{data}.csv")
        np.testing.assert_array_equal(pd.read_csv(f"{data}.csv")["label"], labels_of(model))


class TestSeveralFiles:
    def test_of_a_folder_are_in_natural_order_with_the_columns_of_hive(self, place, model):
        order = []
        for number, kind in enumerate(["a=b", "__HIVE_DEFAULT_PARTITION__", "c"]):
            for part in (9, 10):
                folder = Path(f"t/year={2020 + number}/kind={kind}")
                folder.mkdir(parents=True, exist_ok=True)
                rows = TABLE.slice(10 * len(order), 10)
                pq.write_table(rows, folder / f"part-{part}.parquet", row_group_size=4)
                order.append((2020 + number, None if kind.startswith("__") else kind))
        Path("t/_hidden").mkdir()
        pq.write_table(TABLE, "t/_hidden/part-1.parquet")
        stored = TABLE.drop_columns("kind")
        for file in Path("t").rglob("part-*.parquet"):
            pq.write_table(pq.ParquetFile(file).read().drop_columns("kind"), file)
        predicted("t", "o.parquet", "--columns", "x,y", "--keep", "kind,name,year")
        found = read("o.parquet")
        order.sort(key=lambda each: each[0])
        assert found["name"].to_pylist() == stored["name"].to_pylist()
        assert found["kind"].to_pylist() == [kind for _, kind in order for _ in range(10)]
        assert found["year"].to_pylist() == [year for year, _ in order for _ in range(10)]
        assert found.schema.types == [pa.string(), pa.string(), pa.int32(), pa.int32()]
        predicted("t", "hive.csv", "--keep", "year")
        assert pd.read_csv("hive.csv")["year"].tolist() == found["year"].to_pylist()
        np.testing.assert_array_equal(found["label"], labels_of(model))

    def test_of_a_list_are_in_its_order_and_types_that_fit_are_joined(self, place, model):
        small = TABLE.set_column(9, "count", TABLE["count"].cast(pa.int32()))
        pq.write_table(small.slice(0, 30), "part-10.parquet")
        pq.write_table(TABLE.slice(30), "part-9.parquet")
        predicted("part-*.parquet", "o.parquet", "--keep", "count,kind")
        expected = pa.concat_tables([TABLE.slice(30), TABLE.slice(0, 30)])
        found = read("o.parquet")
        assert found.schema.field("count").type == pa.int64()
        assert found.select(["count", "kind"]).to_pylist() == expected.select(["count", "kind"]).to_pylist()
        np.testing.assert_array_equal(found["label"], labels_of(model, expected))

    def test_values_that_the_joint_type_cannot_hold_are_refused(self, place):
        large = pa.array([2**53 + 1] * 30)
        pq.write_table(TABLE.slice(0, 30).set_column(9, "count", large), "part-1.parquet")
        pq.write_table(TABLE.slice(30).set_column(9, "count", pa.array([0.5] * 30)), "part-2.parquet")
        line = refused("part-*", "o.parquet", "--keep", "count", code=1)
        assert "part-1.parquet has a value to keep that" in line
        assert "leave it out of --keep" in line

    def test_of_two_formats_are_joined_where_both_are_text(self, place, model):
        pq.write_table(TABLE.slice(0, 30), "a.parquet")
        TABLE.slice(30).select(["x", "y", "kind", "count"]).to_pandas().to_csv("b.csv", index=False)
        for number, name in enumerate(("a.parquet", "b.csv")):
            Path(name).rename(f"part-{number}{Path(name).suffix}")
        line = refused("part-*", "o.csv", "--keep", "count", code=1)
        assert "part-1.csv has a column to keep of another type than" in line
        texts = TABLE.set_column(0, "name", pa.array([str(i) for i in range(N)]))
        pq.write_table(texts.slice(0, 30), "part-0.parquet")
        texts.slice(30).select(["x", "y", "name"]).to_pandas().to_csv("part-1.csv", index=False)
        predicted("part-*", "o.csv", "--keep", "name")
        found = read("o.csv")
        assert found["name"].tolist() == texts["name"].to_pylist()
        assert found["label"].astype(int).tolist() == labels_of(model).tolist()


def test_the_index_of_a_frame_is_kept_where_it_is_named(place):
    frame = pd.DataFrame(X, columns=["x", "y"], index=pd.Index([f"r{i}" for i in range(N)], name="row"))
    frame.to_parquet("t.parquet")
    predicted("t.parquet", "o.parquet", "--keep", "row")
    assert pd.read_parquet("o.parquet")["row"].tolist() == frame.index.tolist()


def test_a_file_of_other_features_is_refused_by_name(place):
    np.save("wide.npy", np.zeros((5, 4)))
    assert "wide.npy has 4 features; the fit had 2." in refused("wide.npy", "o.zarr", code=1)


REFUSALS = {
    "unknown": (["t.parquet", "o.csv", "--keep", "nam"], 1, "no column 'nam'. Did you mean 'name'?"),
    "twice": (["t.parquet", "o.csv", "--keep", "name,day,name"], 2, "names the column 'name' twice"),
    "label": (["l.csv", "o.csv", "--keep", "label"], 2, "has a column 'label' of its own; rename that of"),
    "score": (["l.csv", "o.csv", "--keep", "score", "--scores"], 2, "has a column 'score' of its own"),
    "probability": (["l.csv", "o.csv", "--keep", "probability_1", "--proba"], 2, "of its own"),
    "nested": (["t.parquet", "o.csv", "--keep", "place"], 2, "CSV cannot hold; leave it out"),
    "zarr": (["t.parquet", "o.zarr", "--keep", "name"], 2, "is for tables, and o.zarr is a zarr group; give"),
    "npy": (["t.npy", "o.csv", "--keep", "name"], 2, "columns of parquet or CSV, but t.npy is none; leave"),
    "no names": (["n.csv", "o.csv", "--keep", "a"], 1, "names no columns in its first line; leave out"),
    "input": (["l.csv", "./../{here}/l.csv", "--overwrite"], 1, "which this run reads"),
    "in the input": (["folder", "folder/o.parquet"], 1, "which this run reads"),
    "taken": (["t.parquet", "l.csv"], 1, "l.csv already exists; use --overwrite"),
    "theirs": (["l.csv", "t.parquet", "--overwrite"], 1, "t.parquet was not written by emtau"),
    "their CSV": (["t.parquet", "n.csv", "--overwrite"], 1, "n.csv was not written by emtau"),
    "a folder": (["t.parquet", "f.csv", "--overwrite"], 1, "f.csv was not written by emtau"),
    "URL": (["t.parquet", "s3://bucket/o.parquet"], 1, "is a URL, but results are written to local folders"),
    "archive": (["t.parquet", "o.csv.gz"], 1, "a gzip file, which labels are not written as"),
    "text": (["t.parquet", "o.txt"], 1, "that ends in .zarr, .parquet, .pq, .csv or .tsv"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_written_is_refused_before_rows_are_read(place, name, monkeypatch):
    pq.write_table(TABLE, "t.parquet")
    np.save("t.npy", X)
    frame = pd.DataFrame(X, columns=["x", "y"]).assign(label=1, score=2, probability_1=3)
    frame.to_csv("l.csv", index=False)
    np.savetxt("n.csv", X, delimiter=",")
    Path("f.csv").mkdir()
    Path("folder").mkdir()
    pq.write_table(TABLE, "folder/t.parquet")
    monkeypatch.setattr(command, "open_rows_or_cube", None)
    arguments, code, words = REFUSALS[name]
    arguments = [each.format(here=place.name) for each in arguments]
    assert words in refused(*arguments, code=code)


def test_columns_named_as_results_that_are_not_asked_for_are_kept(place):
    frame = pd.DataFrame(X, columns=["x", "y"]).assign(score=2)
    frame.to_csv("l.csv", index=False)
    predicted("l.csv", "o.csv", "--keep", "score")
    assert pd.read_csv("o.csv")["score"].tolist() == frame["score"].tolist()


@pytest.mark.parametrize("out", ["o.csv", "o.parquet"])
def test_a_table_of_ours_is_replaced_if_asked_and_no_other(place, out):
    pq.write_table(TABLE, "t.parquet")
    predicted("t.parquet", out, "--keep", "name", "--scores")
    predicted("t.parquet", out, "--overwrite")
    assert len(read(out)) == N
    table = read(out)
    assert (list(table) if out == "o.csv" else table.schema.names) == ["label"]
    pd.DataFrame({"label": [1], "mine": [2]}).to_csv("o.csv", index=False)
    pd.DataFrame({"label": [1]}).to_parquet("o.parquet")
    assert "was not written by emtau" in refused("t.parquet", out, "--overwrite", code=1)
    assert sorted(path.name for path in place.iterdir()) == ["m.zarr", "o.csv", "o.parquet", "t.parquet"]


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_rows_that_come_or_go_meanwhile_are_an_error(place, change, monkeypatch):
    frame = pd.DataFrame(X, columns=["x", "y"]).assign(id=range(N))
    frame.to_csv("t.csv", index=False)
    plain = predict.score_rows

    def score_rows(*arguments, **options):
        (frame[:-1] if change == "fewer" else pd.concat([frame, frame])).to_csv("t.csv", index=False)
        return plain(*arguments, **options)

    monkeypatch.setattr(command, "score_rows", score_rows)
    assert f"t.csv have {change} rows than were labelled" in refused("t.csv", "o.csv", "--keep", "id", code=1)


@pytest.mark.parametrize("out", ["o.csv", "o.parquet"])
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_of_two_at_once_one_is_written_or_the_last_one_stays(place, out, overwrite, monkeypatch):
    pq.write_table(TABLE, "t.parquet")
    plain, others = predict.score_rows, []

    def score_rows(*arguments, **options):
        if not others:
            others.append(out)
            predicted("t.parquet", out, "--scores", *overwrite)
        return plain(*arguments, **options)

    monkeypatch.setattr(command, "score_rows", score_rows)
    result = emtau("predict", "m.zarr", "t.parquet", out, *overwrite)
    table = read(out)
    columns = list(table) if out == "o.csv" else table.schema.names
    if overwrite:
        assert (result.exit_code, columns) == (0, ["label"])
    else:
        assert (result.exit_code, columns) == (1, ["label", "score"])
        assert f"{out} already exists" in result.stderr
    assert sorted(path.name for path in place.iterdir()) == ["m.zarr", out, "t.parquet"]


def row_groups(path):
    metadata = pq.read_metadata(path)
    return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]


def test_small_chunks_make_large_row_groups_and_large_ones_are_split(place, model, monkeypatch):
    pq.write_table(TABLE, "t.parquet", row_group_size=7)
    predicted("t.parquet", "o.parquet", "--keep", "name")
    assert row_groups("o.parquet") == [60]
    monkeypatch.setattr(tables, "GROUP_ROWS", 20)
    predicted("t.parquet", "p.parquet", "--keep", "name")
    assert row_groups("p.parquet") == [14, 14, 14, 18]
    np.save("t.npy", X)
    predicted("t.npy", "q.parquet")
    assert row_groups("q.parquet") == [20, 20, 20]
    assert read("p.parquet")["label"].equals(read("o.parquet")["label"])


PROGRAM = """
import os, signal, sys
from emtau_dask.cli import predict as command
from emtau_dask.cli.main import main
from emtau_dask.em import predict

predict.RESULT_BYTES = 1
plain = predict.score_rows

def killed(*arguments, **options):
    for number, found in enumerate(plain(*arguments, **options)):
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield found

command.score_rows = killed
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("out", "old"),
    [
        ("o.csv", False),
        pytest.param("o.parquet", False, marks=pytest.mark.kills),
        pytest.param("o.csv", True, marks=pytest.mark.kills),
        pytest.param("o.parquet", True, marks=pytest.mark.kills),
    ],
)
def test_a_kill_leaves_nothing_or_the_old_table_and_the_next_run_tidies_up(place, out, old):
    pq.write_table(TABLE, "t.parquet", row_group_size=7)
    if old:
        predicted("t.parquet", out, "--scores")
    before = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    overwrite = ["--overwrite"] * old
    arguments = ["predict", "m.zarr", "t.parquet", out, "--workers", "1", *overwrite]
    killed = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    after = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    (left,) = after.keys() - before.keys()
    assert left.startswith(f".{out}.emtau-")
    assert {name: after[name] for name in before} == before
    predicted("t.parquet", out, *overwrite)
    assert len(read(out)) == N
    assert {path.name for path in place.iterdir()} == {*before, out}


@pytest.mark.parametrize("out", ["o.csv", "o.parquet"])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_row_that_cannot_be_labelled_leaves_nothing(place, out, monkeypatch):
    monkeypatch.setattr(predict, "RESULT_BYTES", 1)
    bad = TABLE.set_column(1, "x", pa.array([*X[:50, 0], np.inf, *X[51:, 0]]))
    pq.write_table(bad, "t.parquet", row_group_size=7)
    assert "row 50 (chunk 7, its row 1)" in refused("t.parquet", out, "--keep", "name", code=1)
    gc.collect()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_becomes_full_is_named_and_nothing_is_left(place):
    pq.write_table(TABLE, "t.parquet")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for out in ("o.csv", "o.parquet"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
        try:
            line = refused("t.parquet", out, "--keep", "name", "--proba", code=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "the result cannot be written to" in line
        assert "ulimit -f" in line


MEMORY = """
import pyarrow as pa
from emtau_dask.cli.main import main
from emtau_dask.em import predict
from emtau_dask.storage import tables

predict.RESULT_BYTES, tables.GROUP_BYTES = 2**16, 2**20
for times in (1, 16):
    for ending in ("csv", "parquet"):
        arguments = ["predict", "m.zarr", f"{times}.parquet", f"o{times}.{ending}", "--keep", "name"]
        main([*arguments, "--workers", "1"], standalone_mode=False)
    print(pa.default_memory_pool().max_memory())
"""


def test_memory_does_not_grow_with_the_rows(place):
    """Of 16 times the rows, whose text takes 32 MB, pyarrow allocates no more at once than of 4,000 rows."""
    rows = pa.table({"x": np.zeros(4000), "y": np.ones(4000), "name": ["n" * 500] * 4000})
    for times in (1, 16):
        with pq.ParquetWriter(f"{times}.parquet", rows.schema, use_dictionary=False) as writer:
            for _ in range(times):
                writer.write_table(rows)
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    few, many = (int(line) for line in run.stdout.splitlines() if line.isdigit())
    assert many - few <= 4e6
    assert len(read("o16.csv")) == len(read("o16.parquet")) == 64_000


@pytest.mark.parametrize("labels", ["labels.parquet", "labels.csv"])
def test_a_fit_and_its_resume_write_the_table_that_a_config_names(place, labels):
    np.save("t.npy", X)
    options = ["-k", 2, "-o", "run", "--algorithm", "em", "--set", "checkpoint.path=run/c.zarr"]
    options += ["--set", f"output.labels={labels}", "--set", "output.probabilities=true"]
    assert emtau("fit", "t.npy", *options, "--max-iter", 1, "--tol", 1e-9).exit_code == 3
    short = read(f"run/{labels}")
    result = emtau("resume", "run/c.zarr", "--set", "stop.max_iter=100")
    if labels.endswith("csv"):
        assert "labels.csv already exists; use --overwrite" in result.stderr
        result = emtau("resume", "run/c.zarr", "--set", "stop.max_iter=100", "--overwrite")
    assert result.exit_code == 0, result.output
    found = read(f"run/{labels}")
    names = found.schema.names if labels.endswith("parquet") else list(found)
    assert names == ["label", "probability_0", "probability_1"]
    assert not found.equals(short)
    expected = GaussianMixture.load("run/model.zarr").predict(X)
    np.testing.assert_array_equal(np.asarray(found["label"]).astype(int), expected)


def test_columns_may_be_named_one_by_one_and_hold_commas(place, model):
    frame = TABLE.to_pandas().rename(columns={"kind": "kind, of trip"})
    frame.to_parquet("c.parquet", index=False)
    predicted("c.parquet", "o.parquet", "--keep", "name", "--keep", '"kind, of trip",count')
    assert pq.read_schema("o.parquet").names == ["name", "kind, of trip", "count", "label"]
