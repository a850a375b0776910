"""Data that could be read as other numbers than they mean: read right, or refused or warned of by name."""

import numpy as np
import pandas as pd
import pytest
from fits import ROWS

from emtau_dask import GaussianMixture, InvalidDataError
from emtau_dask.data.opening import as_dask, open_source


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def values(*arguments, **options):
    return as_dask(open_source(*arguments, **options)).compute()


class TestFirstLineOfNumbers:
    """pandas writes 0,1,… above columns without names, and years may name columns."""

    @pytest.mark.parametrize("names", [[0, 1], [2019, 2020]])
    def test_is_a_header_above_other_numbers(self, names):
        pd.DataFrame(ROWS, columns=names).to_csv("a.csv", index=False)
        with pytest.warns(UserWarning, match="it is read as the header"):
            source = open_source("a.csv")
        assert source.names == tuple(map(str, names))
        np.testing.assert_array_equal(values("a.csv", columns=source.names), ROWS)

    def test_is_refused_where_it_may_be_a_row(self):
        pd.DataFrame(np.arange(12).reshape(6, 2)[::-1]).to_csv("a.csv", index=False)
        with pytest.raises(InvalidDataError, match="may be a header.*names with letters"):
            open_source("a.csv")

    @pytest.mark.parametrize(
        "text", ["3,4\n5,6\n", "0\n1\n1\n", "1,2\n3.5,4\n5,\n", "0,0\n1.5,2.5\n", "1.0,2\n3.5,4.5\n"]
    )
    def test_is_a_row_otherwise(self, text):
        with open("a.csv", "w") as file:
            file.write(text)
        assert open_source("a.csv").names is None
        np.testing.assert_array_equal(values("a.csv"), pd.read_csv("a.csv", header=None).to_numpy(float))
