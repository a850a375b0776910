"""Types of numbers, containers, files, entrances: a fit has what another reader finds, or refuses it."""

from datetime import date
from decimal import Decimal
from pathlib import Path

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
import xarray as xr
import zarr
from commands import emtau

from emtau_dask import EmtauError, GaussianMixture, select_components

ROWS = np.random.default_rng(0).integers(-50, 50, size=(60, 3)) / 4
FRAME = pd.DataFrame(ROWS, columns=["a", "b", "c"])
WHOLE = (ROWS * 4).astype(int)
LACKING = FRAME.mask(np.random.default_rng(1).random(ROWS.shape) < 0.1)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def stored(frame, **options):
    frame.to_parquet("a.parquet", **options)
    return "a.parquet"


def text(content, name="a.csv", encoding="utf-8"):
    Path(name).write_bytes(content.encode(encoding))
    return name


def npy(array):
    np.save("a.npy", array)
    return "a.npy"


def array(values, **options):
    attributes = options.pop("attributes", {})
    made = zarr.create_array("a.zarr", data=values, **options)
    made.attrs.update(attributes)
    return "a.zarr"


def group_of(**arrays):
    group = zarr.open_group("g.zarr", mode="w")
    for name, values in arrays.items():
        group.create_array(name, data=values)
    return "g.zarr"


def arrow(table):
    pq.write_table(table, "a.parquet")
    return "a.parquet"


def pieces(write, ending):
    Path("many").mkdir()
    for number, part in enumerate(np.array_split(ROWS, 12)):
        write(part, f"many/part-{number}{ending}")
    return f"many/*{ending}"


def cube(values, **attributes):
    return xr.DataArray(values.reshape(6, 10, 3), dims=("y", "x", "f"), attrs=attributes)


def dataset():
    return xr.Dataset({name: (("y", "x"), FRAME[name].to_numpy().reshape(6, 10)) for name in "abc"})


def netcdf(**encoding):
    dataset().to_netcdf("a.nc", encoding=dict.fromkeys("abc", encoding))
    return "a.nc"


RIGHT = {
    # types in memory
    "booleans": (lambda: ROWS > 0, ROWS > 0),
    "int8": (lambda: WHOLE.astype("i1"), WHOLE),
    "uint64 beyond int64": (lambda: WHOLE.astype("u8") // 2**3, WHOLE.astype("u8") // 2**3),
    "float16": (lambda: ROWS.astype("f2"), ROWS),
    "big-endian float32": (lambda: ROWS.astype(">f4"), ROWS),
    "Fortran order, every second row": (lambda: np.asfortranarray(ROWS)[::2], ROWS[::2]),
    "a list of lists": (lambda: ROWS.tolist(), ROWS),
    "objects that are numbers": (lambda: ROWS.astype(object), ROWS),
    "decimals": (lambda: FRAME.map(Decimal), ROWS),
    "a read-only memory map": (lambda: np.load(npy(ROWS), mmap_mode="r"), ROWS),
    # frames
    "pandas Int64, Float32, boolean": (
        lambda: pd.DataFrame(WHOLE, columns=list("abc")).astype({"a": "Int64", "b": "Float32"}),
        WHOLE,
    ),
    "pandas of arrow": (lambda: FRAME.convert_dtypes(dtype_backend="pyarrow"), ROWS),
    "polars Int16 and Decimal": (
        lambda: pl.from_pandas(FRAME).with_columns(pl.col("a").cast(pl.Decimal(10, 2))),
        ROWS,
    ),
    "a pyarrow table in chunks": (
        lambda: pa.concat_tables([pa.Table.from_pandas(FRAME[:20]), pa.Table.from_pandas(FRAME[20:])]),
        ROWS,
    ),
    "dask frame of Int64": (
        lambda: dd.from_pandas(pd.DataFrame(WHOLE).astype("Int64"), npartitions=4),
        WHOLE,
    ),
    "dask array in both directions": (lambda: da.from_array(ROWS, chunks=(7, 2)), ROWS),
    "dask array of unknown sizes": (
        lambda: da.from_array(ROWS, chunks=(7, 3))[da.from_array(ROWS[:, 0] > 0, 7)],
        ROWS[ROWS[:, 0] > 0],
    ),
    # files
    "npy, int16, Fortran order": (lambda: npy(np.asfortranarray(WHOLE.astype("i2"))), WHOLE),
    "zarr 2 with a fill value": (lambda: array(ROWS, zarr_format=2, fill_value=0.25, chunks=(7, 2)), ROWS),
    "zarr 3 in shards": (lambda: array(ROWS, chunks=(5, 3), shards=(20, 3)), ROWS),
    "zarr with a scale": (
        lambda: array(WHOLE.astype("i2"), attributes={"scale_factor": 0.25, "add_offset": 3.0}),
        ROWS + 3,
    ),
    "zarr group in a zarr group": (
        lambda: (zarr.open_group("g.zarr", mode="w").create_array("in/X", data=ROWS), "g.zarr/in")[1],
        ROWS,
    ),
    "parquet of float16 and int8": (
        lambda: arrow(
            pa.table({"a": pa.array(WHOLE[:, 0], pa.int8()), "b": pa.array(ROWS[:, 1].astype("f2"))})
        ),
        np.c_[WHOLE[:, 0], ROWS[:, 1]],
    ),
    "parquet in row groups, an index left out": (
        lambda: stored(FRAME.set_axis(FRAME.index + 7), row_group_size=9),
        ROWS,
    ),
    "a folder of parquet with leftovers": (
        lambda: (
            pieces(lambda part, name: pd.DataFrame(part, columns=list("abc")).to_parquet(name), ".parquet"),
            Path("many/.part-0.parquet.crc").touch(),
            "many",
        )[2],
        ROWS,
    ),
    "a pattern of npy": (lambda: pieces(lambda part, name: np.save(name, part), ".npy"), ROWS),
    "CSV with a mark of byte order and CRLF": (
        lambda: text("\ufeff" + FRAME.to_csv(index=False, lineterminator="\r\n")),
        ROWS,
    ),
    "tabs and quoted numbers": (lambda: text(FRAME.to_csv(index=False, sep="\t", quoting=1), "a.tsv"), ROWS),
    "a name with blanks and not of ASCII": (lambda: text(FRAME.to_csv(index=False), "ä b.csv"), ROWS),
    # cubes
    "DataArray, features first": (lambda: (cube(ROWS).transpose("f", "y", "x"), {"features": "f"}), ROWS),
    "DataArray in chunks of the feature": (
        lambda: (cube(ROWS).chunk({"f": 2, "y": 6, "x": 10}), {"features": "f"}),
        ROWS,
    ),
    "Dataset, some of its variables": (lambda: (dataset(), {"features": ["c", "a"]}), ROWS[:, [2, 0]]),
    "netCDF of packed int16": (
        lambda: (
            xr.open_dataset(netcdf(dtype="int16", scale_factor=0.25, _FillValue=-999), chunks={}),
            {"features": ["a", "b", "c"]},
        ),
        ROWS,
    ),
}
MISSING = {
    "NaN in NumPy": lambda: LACKING.to_numpy(),
    "NA in Int64 and Float64": lambda: LACKING.convert_dtypes(),
    "null in polars": lambda: pl.from_pandas(LACKING),
    "null in parquet": lambda: stored(LACKING),
    "nothing in CSV": lambda: text(LACKING.to_csv(index=False)),
    "a fill value in zarr": lambda: array(
        LACKING.fillna(-999).to_numpy(), attributes={"_FillValue": -999.0}, chunks=(7, 3)
    ),
    "NaN in a cube": lambda: (cube(LACKING.to_numpy()).chunk({"y": 2}), {"features": "f"}),
}
REFUSED = {
    "complex numbers": (lambda: ROWS + 0j, r"Complex data not supported.*(X|sample_weight)\.real"),
    "longdouble": (lambda: ROWS.astype("g"), "at most float64"),
    "dates": (lambda: np.full((60, 2), np.datetime64("2020-01-01")), "datetime64"),
    "text that is digits": (lambda: ROWS.astype(str), "real numbers"),
    "records": (lambda: FRAME.to_records(index=False), "record|real numbers"),
    "a masked array": (lambda: np.ma.masked_less(ROWS, 0), "masked array"),
    "a sparse matrix": (lambda: scipy.sparse.csr_array(ROWS), "[Ss]parse"),
    "a generator": (lambda: (row for row in ROWS), "read only once"),
    "one date among objects": (lambda: [*ROWS[:5].tolist(), [1, date(2020, 1, 1), 2]], "row 5, column 1"),
    "categories in pandas": (lambda: FRAME.assign(b=pd.Categorical(["x"] * 60)), "column 'b'"),
    "a period in a dask frame": (
        lambda: dd.from_pandas(FRAME.assign(t=pd.period_range("2020", periods=60)), npartitions=2),
        "'t'",
    ),
    "durations in polars": (
        lambda: pl.from_pandas(FRAME.assign(t=pd.to_timedelta(np.arange(60), "s"))),
        "total_seconds",
    ),
    "a lazy frame": (lambda: pl.from_pandas(FRAME).lazy(), r"\.collect\(\)"),
    "names twice": (lambda: pd.DataFrame(ROWS, columns=["a", "b", "a"]), "several columns 'a'"),
    "timestamps in parquet": (lambda: stored(FRAME.assign(t=pd.Timestamp("2020"))), "'t'.*timestamp"),
    "lists in parquet": (lambda: arrow(pa.table({"a": [[1.0], [2.0]]})), "'a'"),
    "text in CSV": (lambda: text("a,b\n1,2\n3,x\n"), "x"),
    "semicolons": (lambda: text("a;b\n1,5;2\n"), "separates values by ';'"),
    "several arrays": (
        lambda: group_of(a=ROWS, b=ROWS),
        r"arrays are \['a', 'b'\]",
    ),
    "days in zarr": (lambda: array(WHOLE, attributes={"units": "days since 2000-01-01"}), "days since"),
    "an unknown ending": (lambda: text("x", "a.feather"), "Arrow"),
    "a Dataset without features": (dataset, "features="),
    "features of an array": (lambda: (ROWS, {"features": "f"}), "features"),
    "a dimension that is not there": (lambda: (cube(ROWS), {"features": "g"}), "'f'"),
    "dates in a Dataset": (
        lambda: (
            dataset().assign(t=(("y", "x"), np.full((6, 10), np.datetime64("2020-01-01", "ns")))),
            {"features": ["a", "t"]},
        ),
        "'t'",
    ),
}


def given(make):
    """What a case makes: data, and options of `fit`."""
    made = make()
    return made if isinstance(made, tuple) else (made, {})


def fitted(X, options, **settings):
    return GaussianMixture(1, random_state=0, **settings).fit(X, **options)


def agrees(model, rows):
    """Compare a mixture of one component with the mean and the covariance of the rows."""
    rows = np.asarray(rows, dtype=float)
    np.testing.assert_allclose(model.means_[0], rows.mean(axis=0), rtol=1e-6, atol=1e-9)
    expected = np.cov(rows.T, bias=True) + 1e-6 * np.eye(rows.shape[1])
    np.testing.assert_allclose(model.covariances_[0], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", RIGHT)
def test_rows_mean_what_another_reader_finds(name):
    make, rows = RIGHT[name]
    X, options = given(make)
    model = fitted(X, options)
    agrees(model, rows)
    np.testing.assert_allclose(
        model.score(X, **options),
        fitted(np.asarray(rows, float), {}).score(np.asarray(rows, float)),
        rtol=1e-6,
    )


@pytest.mark.parametrize("name", MISSING)
def test_missing_values_are_dropped_where_asked_and_else_refused(name):
    X, options = given(MISSING[name])
    model = fitted(X, options, missing="drop")
    agrees(model, LACKING.dropna())
    labels = np.asarray(model.predict(X, **options)).ravel()
    np.testing.assert_array_equal(pd.isna(labels) | (labels == -1), LACKING.isna().any(axis=1))
    with pytest.raises(EmtauError, match="row"):
        fitted(X, options)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_number_is_refused_by_name(name):
    make, why = REFUSED[name]
    X, options = given(make)
    with pytest.raises(EmtauError, match=why):
        fitted(X, options)


IN_FILES = [
    "npy, int16, Fortran order",
    "zarr 2 with a fill value",
    "zarr 3 in shards",
    "zarr with a scale",
    "zarr group in a zarr group",
    "parquet of float16 and int8",
    "parquet in row groups, an index left out",
    "a folder of parquet with leftovers",
    "a pattern of npy",
    "CSV with a mark of byte order and CRLF",
    "tabs and quoted numbers",
    "a name with blanks and not of ASCII",
]


@pytest.mark.parametrize("name", IN_FILES)
def test_the_command_line_reads_the_same(name):
    make, rows = RIGHT[name]
    result = emtau("fit", make(), "-k", 1, "-o", "out")
    assert result.exit_code == 0, result.stderr
    agrees(GaussianMixture.load("out/model.zarr"), rows)


@pytest.mark.parametrize("name", ["dates", "text that is digits", "complex numbers", "a masked array"])
@pytest.mark.parametrize("entrance", ["predict", "sample_weight", "select", "score"])
def test_every_entrance_refuses_the_same(name, entrance):
    make, why = REFUSED[name]
    X = make()
    entrances = {
        "predict": lambda: GaussianMixture(1).fit(ROWS[:, : X.shape[1]]).predict(X),
        "score": lambda: GaussianMixture(1).fit(ROWS[:, : X.shape[1]]).score(X),
        "sample_weight": lambda: GaussianMixture(1).fit(ROWS, sample_weight=X[:, 0]),
        "select": lambda: select_components(X, [1, 2]),
    }
    with pytest.raises(EmtauError, match=why):
        entrances[entrance]()
