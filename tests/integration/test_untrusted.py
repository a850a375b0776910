"""Data and policies that are not what they say: refused, never fitted wrongly."""

import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from distributed import Client
from fits import ROWS, assert_same_bits, mixture

from emtau_dask import ConfigError, GaussianMixture, InvalidDataError
from emtau_dask.data.opening import open_source
from emtau_dask.policies.policy import RowArray
from emtau_dask.policies.tau import EMTau


@pytest.mark.parametrize("kind", [pa.int16(), pa.int64(), pa.bool_(), pa.float64()], ids=str)
def test_a_parquet_null_is_not_a_number(tmp_path, kind):
    values = [1, None, 0] * 10
    pq.write_table(
        pa.table({"a": pa.array(values).cast(kind), "b": pa.array(range(30), pa.int16())}),
        tmp_path / "x.parquet",
    )
    with pytest.raises(InvalidDataError, match=r"row 1 .*NaN \(feature 0, 'a'\)"):
        GaussianMixture(2).fit(open_source(str(tmp_path / "x.parquet")))


def test_parquet_columns_are_features_by_name(tmp_path):
    pq.write_table(pa.table({"a": ROWS[:, 0], "b": ROWS[:, 1]}), tmp_path / "x.parquet")
    model = mixture().fit(tmp_path / "x.parquet")
    assert model.feature_names_in_.tolist() == ["a", "b"]
    with pytest.raises(InvalidDataError, match="same order"):
        model.predict(open_source(str(tmp_path / "x.parquet"), columns=["b", "a"]))


def test_paths_and_groups_are_opened(tmp_path):
    zarr.create_group(tmp_path / "x.zarr").create_array("X", data=ROWS, chunks=(300, 2))
    expected = mixture().fit(ROWS)
    for X in (tmp_path / "x.zarr", str(tmp_path / "x.zarr"), zarr.open_group(tmp_path / "x.zarr", mode="r")):
        model = mixture().fit(X)
        assert_same_bits(model, expected)
        assert np.array_equal(model.predict(X).compute(), expected.predict(ROWS))


def lying(make):
    return da.map_blocks(make, da.from_array(ROWS, chunks=(100, 2)), dtype=float, meta=np.empty((0, 0)))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda block: block[:, :1], r"shape \(100, 1\)"),
        (lambda block: block[:50], r"shape \(50, 2\)"),
        (lambda block: block[:, 0], r"shape \(100,\)"),
        (lambda block: block + 1j, "complex128"),
        (lambda block: block.astype(object), "object"),
        (lambda block: np.ma.masked_less(block, 0), "masked"),
    ],
    ids=["features", "rows", "axes", "complex", "object", "masked"],
)
def test_blocks_that_are_not_as_declared(make, found):
    with pytest.raises(InvalidDataError, match=f"chunk [012] .*{found}"):
        mixture().fit(lying(make))


def test_a_masked_array_is_refused():
    with pytest.raises(InvalidDataError, match="filled"):
        mixture().fit(np.ma.masked_less(ROWS, 0))


@pytest.mark.parametrize("dtype", [complex, "datetime64[s]", "U8"])
def test_lazy_rows_that_are_no_numbers_are_not_labelled(dtype):
    model = mixture().fit(ROWS)
    with pytest.raises(InvalidDataError, match="dtype"):
        model.predict(da.zeros((10, 2), chunks=5).astype(dtype))


def test_no_lazy_rows_have_no_score():
    with pytest.raises(InvalidDataError, match="no rows"):
        mixture().fit(ROWS).score(da.zeros((0, 2)))


def test_a_persisted_array_stays_where_it_is():
    expected = mixture().fit(da.from_array(ROWS, chunks=(100, 2)))
    with Client(processes=False, dashboard_address=None):
        persisted = da.from_array(ROWS, chunks=(100, 2)).persist()
        assert_same_bits(mixture().fit(persisted), expected)


class Careless(EMTau):
    """A policy that returns what ``spoil`` makes of an honest answer."""

    spoil = staticmethod(lambda state, stays: (state, stays))

    def update(self, state, evidence):
        return type(self).spoil(*super().update(state, evidence))


SPOILT = {
    "integer mask": lambda state, stays: (state, stays.astype("i1")),
    "list": lambda state, stays: (state, stays.tolist()),
    "short mask": lambda state, stays: (state, stays[:-1]),
    "no pair": lambda state, stays: stays,
    "missing array": lambda state, stays: ({"label": state["label"]}, stays),
    "array too large": lambda state, stays: ({**state, "count": np.full(len(stays), 999)}, stays),
    "float array": lambda state, stays: ({**state, "count": np.zeros(len(stays))}, stays),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_policys_answer_that_does_not_fit_is_refused(how, monkeypatch):
    monkeypatch.setattr(Careless, "spoil", staticmethod(SPOILT[how]))
    with pytest.raises(ConfigError, match=r"Careless\.update returned"):
        mixture(algorithm=Careless(3)).fit(ROWS)


def test_a_policy_may_not_take_the_active_mask(monkeypatch):
    monkeypatch.setattr(Careless, "row_arrays", lambda self, K, n: (RowArray("active", 3),))
    with pytest.raises(ConfigError, match="row_arrays"):
        mixture(algorithm=Careless(3)).fit(ROWS)


def test_a_policys_schedule_is_checked(monkeypatch):
    monkeypatch.setattr(Careless, "schedule", lambda self, summary: "all")
    with pytest.raises(ConfigError, match="schedule"):
        mixture(algorithm=Careless(3)).fit(ROWS)
