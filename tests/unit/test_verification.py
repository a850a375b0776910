"""What is said where a chunk holds other values than before, and which chunks were compared."""

import warnings

import pytest

from emtau_dask.data.chunk import ChunkDigest
from emtau_dask.data.source import NONE_UNSTORED, ChunkRange, Unstored
from emtau_dask.em.verification import DataVerifier
from emtau_dask.errors import CheckpointMismatchError, InvalidDataError

RANGES = {chunk: ChunkRange(chunk, 10 * chunk, 10 * chunk + 10) for chunk in range(4)}
OLD, NEW = b"a" * 16, b"b" * 16


def rows(chunk, digest=OLD, made_on="", unstored=NONE_UNSTORED, source="X"):
    return ChunkDigest(source, chunk, digest, made_on, unstored)


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_what_this_process_read_before_is_the_fit_s():
    verifier = DataVerifier()
    verifier.compare([rows(0), rows(2)], RANGES)
    verifier.compare([rows(0), rows(1)], RANGES)
    with pytest.raises(InvalidDataError, match=r"X holds other .*this fit first .*chunk 2 \(rows 20 to 30\)"):
        verifier.compare([rows(2, NEW)], RANGES)


def test_what_the_run_knew_is_the_checkpoint_s():
    verifier = DataVerifier({("X", ""): {2: OLD}, ("sample_weight", ""): {1: NEW}})
    verifier.compare([rows(1)], RANGES)
    with pytest.raises(CheckpointMismatchError, match=r"in the checkpointed run: chunk 2 \(rows 20 to 30\)"):
        verifier.compare([rows(2, NEW)], RANGES)
    with pytest.raises(CheckpointMismatchError, match="sample_weight holds other values"):
        verifier.compare([rows(1, source="sample_weight")], RANGES)


def test_new_chunks_are_remembered_and_make_another_object():
    verifier = DataVerifier({("X", ""): {0: OLD}})
    before = verifier.known
    verifier.compare([rows(0)], RANGES)
    assert verifier.known is before
    verifier.compare([rows(3, NEW)], RANGES)
    assert (before, verifier.known) == ({("X", ""): {0: OLD}}, {("X", ""): {0: OLD, 3: NEW}})


class TestGraphs:
    def test_on_one_kind_of_machine_other_values_are_refused(self):
        verifier = DataVerifier()
        verifier.compare([rows(1, made_on="cpu A")], RANGES)
        with pytest.raises(InvalidDataError, match=r"graph gave other values for chunk 1 .*same kind of"):
            verifier.compare([rows(1, NEW, made_on="cpu A")], RANGES)

    def test_on_another_they_are_noted_once_and_known_for_it(self):
        verifier = DataVerifier({("X", "cpu A"): {1: OLD, 2: OLD}})
        verifier.compare([rows(1, made_on="cpu B")], RANGES)
        assert verifier.notes == []
        with pytest.warns(UserWarning, match="graph of X gave other values with cpu A than with cpu B"):
            verifier.compare([rows(2, NEW, made_on="cpu B")], RANGES)
        verifier.compare([rows(2, NEW, made_on="cpu B"), rows(2, made_on="cpu A")], RANGES)
        assert len(verifier.notes) == 1
        with pytest.raises(InvalidDataError, match="your graph gave other values for chunk 2"):
            verifier.compare([rows(2, OLD, made_on="cpu B")], RANGES)

    def test_values_that_are_stored_now_must_be_the_graph_s_and_the_other_way_round(self):
        for before, now in (("cpu A", ""), ("", "cpu A")):
            verifier = DataVerifier({("X", before): {1: OLD}})
            verifier.compare([rows(1, made_on=now)], RANGES)
            verifier = DataVerifier({("X", before): {1: OLD}})
            with pytest.raises(CheckpointMismatchError, match="X holds other values"):
                verifier.compare([rows(1, NEW, made_on=now)], RANGES)

    def test_a_chunk_that_is_the_same_on_another_kind_was_compared(self):
        verifier = DataVerifier({("X", "cpu A"): {1: OLD}})
        verifier.compare([rows(1, made_on="cpu B")], RANGES)
        assert verifier.not_read_again() is None


class TestUnstored:
    def test_some_are_said_and_warned_of_once_all_chunks_were_read(self):
        verifier = DataVerifier()
        verifier.compare([rows(chunk, unstored=Unstored(chunk, 5, "0")) for chunk in range(3)], RANGES)
        assert verifier.notes == []
        with pytest.warns(UserWarning, match=r"^4 of 20 chunks of X are not stored: zarr reads them as 0$"):
            verifier.compare([rows(3, unstored=Unstored(1, 5, "0"))], RANGES)
        verifier.compare([rows(chunk, unstored=Unstored(chunk, 5, "0")) for chunk in range(3)], RANGES)
        assert len(verifier.notes) == 1

    def test_where_none_is_stored_that_is_only_said(self):
        verifier = DataVerifier()
        verifier.compare([rows(chunk, unstored=Unstored(2, 2, "nan")) for chunk in range(4)], RANGES)
        assert verifier.notes == ["8 of 8 chunks of X are not stored: zarr reads them as nan"]

    def test_a_chunk_that_goes_is_named_as_gone(self):
        verifier = DataVerifier()
        verifier.compare([rows(1, unstored=Unstored(0, 1, "0"))], RANGES)
        with pytest.raises(InvalidDataError, match="1 of its stored chunks are gone, which zarr reads as 0"):
            verifier.compare([rows(1, NEW, unstored=Unstored(1, 1, "0"))], RANGES)


def test_which_chunks_were_not_read_again():
    verifier = DataVerifier({("X", ""): dict.fromkeys(range(4), OLD)})
    verifier.compare([rows(0), rows(3)], RANGES)
    assert verifier.not_read_again().startswith("2 of 4 chunks of X were not read again")
    verifier.compare([rows(1), rows(2)], RANGES)
    assert verifier.not_read_again() is None
