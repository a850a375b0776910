"""Parquet: which files are refused, which of a folder are read, and in which order."""

from pathlib import Path

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet import encryption

from emtau_dask.data.opening import as_dask, open_source
from emtau_dask.data.parquet_files import is_parquet
from emtau_dask.errors import InvalidDataError, InvalidDtypeError

VALUES = np.arange(60.0)
TABLE = pa.table({"a": VALUES, "b": pa.array([None, 1, 2] * 20, pa.int16())})


@pytest.mark.parametrize(
    "end", [b"", b"PAR1", b"\xff\xff\xff\x7fPAR1", b"\x00\x00\x00\x00PARE", b"\x05\x00\x00\x00PAR1"]
)
def test_an_end_that_is_none_is_refused(tmp_path, end):
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + b"\x19" * 20 + end)
    with pytest.raises(InvalidDataError, match=r"x\.parquet cannot be read"):
        open_source(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path, share):
    pq.write_table(TABLE, tmp_path / "x.parquet")
    data = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(data[: int(share * len(data))])
    with pytest.raises(InvalidDataError, match=r"x\.parquet cannot be read"):
        open_source(str(tmp_path / "x.parquet"))


class Keys(encryption.KmsClient):
    """Keys that are not wrapped at all."""

    def __init__(self, config):
        super().__init__()

    def wrap_key(self, key, name):
        return key.hex()

    def unwrap_key(self, wrapped, name):
        return bytes.fromhex(wrapped)


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_an_encrypted_file_is_refused(tmp_path, plaintext_footer):
    settings = encryption.EncryptionConfiguration(
        footer_key="footer", column_keys={"columns": ["a", "b"]}, plaintext_footer=plaintext_footer
    )
    factory = encryption.CryptoFactory(Keys)
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
    pq.write_table(TABLE, tmp_path / "x.parquet", encryption_properties=properties)
    with pytest.raises(InvalidDataError, match=r"x\.parquet cannot be read"):
        open_source(str(tmp_path / "x.parquet")).ranges.read(0, 60)


@pytest.mark.parametrize("column", [[[1.0, 2.0]] * 60, [{"x": 1.0}] * 60], ids=["lists", "structs"])
def test_nested_columns_are_no_features(tmp_path, column):
    """Beside them, others are read, also where a field of theirs has the same name."""
    pq.write_table(pa.table({"n": column, "x": VALUES}), tmp_path / "x.parquet", row_group_size=25)
    with pytest.raises(InvalidDtypeError, match="column 'n' of"):
        open_source(str(tmp_path / "x.parquet"))
    source = open_source(str(tmp_path / "x.parquet"), columns=["x"])
    assert source.chunk_rows == (25, 25, 10)
    np.testing.assert_array_equal(as_dask(source), VALUES[:, None])


@pytest.mark.parametrize("table", [pa.table({}), pa.Table.from_arrays([pa.array(VALUES)] * 2, ["a", "a"])])
def test_columns_are_chosen_by_names_of_their_own(tmp_path, table):
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(InvalidDataError, match="columns"):
        open_source(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("statistics", [True, False])
def test_only_rows_that_may_hold_nulls_are_predicted_as_float64(tmp_path, statistics):
    whole = pa.table({"a": pa.array(range(60), pa.int8())})
    pq.write_table(whole, tmp_path / "x.parquet", write_statistics=statistics, row_group_size=30)
    ranges = open_source(str(tmp_path / "x.parquet")).ranges
    grown = ranges.peak_bytes(0, 10_000_030) - ranges.peak_bytes(0, 30)
    assert grown == pytest.approx(1.05 * 10_000_000 * (1 if statistics else 8), rel=1e-6)


class TestAFolder:
    @pytest.fixture
    def folder(self, tmp_path):
        """Files whose only value is their number in dask's order."""
        for name in ("part.10", "part.9", "part-1", "b/part.2", "b/part.11", "b-last", "A"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            pq.write_table(
                pa.table({"x": [float(len(name)), float(ord(name[0]))]}), tmp_path / f"{name}.parquet"
            )
        return tmp_path

    @staticmethod
    def rows(folder):
        return as_dask(open_source(str(folder))).compute()[:, 0]

    def test_is_read_in_the_order_in_which_dask_reads_it(self, folder):
        np.testing.assert_array_equal(self.rows(folder), dd.read_parquet(folder)["x"].compute())

    @pytest.mark.parametrize(
        "hidden",
        [".part-0", "._part-0", "_metadata-0", ".ipynb_checkpoints/part-0", "_temporary/0/part-0", "b/.x/0"],
    )
    def test_is_read_without_what_is_hidden_by_its_name(self, folder, hidden):
        before = self.rows(folder)
        (folder / hidden).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"x": [-1.0]}), folder / f"{hidden}.parquet")
        np.testing.assert_array_equal(pd.read_parquet(folder)["x"].sort_values(), np.sort(before))
        (folder / "notes.txt").write_text("no rows")
        np.testing.assert_array_equal(self.rows(folder), before)

    def test_of_hidden_files_alone_is_no_parquet(self, tmp_path):
        pq.write_table(TABLE, tmp_path / "_part-0.parquet")
        assert not is_parquet(str(tmp_path))

    def test_that_lies_below_a_hidden_folder_is_read(self, tmp_path):
        place = tmp_path / ".cache" / "_rows"
        place.mkdir(parents=True)
        pq.write_table(TABLE.select(["a"]), place / "part-0.parquet")
        np.testing.assert_array_equal(self.rows(place), VALUES)


def test_a_file_with_other_row_groups_than_when_it_was_opened_is_refused(tmp_path):
    place = Path(tmp_path, "x.parquet")
    pq.write_table(TABLE, place, row_group_size=30)
    ranges = open_source(str(place)).ranges
    seen = ranges.identity()
    pq.write_table(TABLE, place, row_group_size=20)
    assert ranges.identity() != seen
    with pytest.raises(InvalidDataError, match="row group 0 has 20 rows now"):
        ranges.read(0, 30)
