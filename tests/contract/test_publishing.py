"""Folders and files that appear whole: killed and stopped at every step, two at once, beside others."""

import errno
import shutil
import threading
import time
from contextlib import suppress

import pytest
from reliability.boundaries import At
from reliability.publications import TABLE, publish, word_at, written
from reliability.scenarios import SIGCONT, SIGKILL, SIGSTOP
from reliability.zygote import Zygote

from emtau_dask.errors import EmtauError, PathTakenError
from emtau_dask.storage import publishing
from emtau_dask.storage.errors import writing_errors
from emtau_dask.storage.publishing import published


@pytest.fixture(scope="module")
def zygote():
    with Zygote("reliability.scenarios") as found:
        yield found


@pytest.fixture
def place(tmp_path, request):
    return tmp_path / "place [of] results*" / getattr(request, "param", "q.zarr")


FORMS = pytest.mark.parametrize("place", ["q.zarr", f"q{TABLE}"], indirect=True)


def steps_of(zygote, place, *, overwrite):
    """Return the steps of an undisturbed one, and begin anew with the old result, if there is to be one."""
    place.parent.mkdir(exist_ok=True)
    if overwrite:
        written(place, "old", place.suffix)
    error, _, steps = zygote.run(publish, place, "undisturbed", overwrite)
    assert (error, word_at(place)) == ("", "undisturbed")
    return range(1, steps + 1)


def begin_anew(zygote, place, *, overwrite):
    assert zygote.run(publish, place, "old", True)[0] == ""
    if not overwrite:
        place.unlink() if place.is_file() else shutil.rmtree(place)


class TestAlone:
    def test_it_appears_when_the_block_ends(self, place):
        with published(place) as folder:
            written(folder, "new")
            assert not place.exists()
        assert word_at(place) == "new"
        assert list(place.parent.iterdir()) == [place]

    def test_nothing_stays_of_a_block_that_fails(self, place):
        def fail():
            with published(place) as folder:
                written(folder, "new")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert list(place.parent.iterdir()) == []

    def test_what_may_not_be_replaced_stays(self, place):
        place.parent.mkdir()
        for make in (lambda: place.write_text("a file"), lambda: written(place, "old")):
            make()
            with pytest.raises(PathTakenError, match=r"q\.zarr already exists"), published(place) as folder:
                written(folder, "new")
            assert [path.name for path in place.parent.iterdir()] == ["q.zarr"]
            if place.is_file():
                place.unlink()
        assert word_at(place) == "old"

    def test_an_empty_folder_is_replaced(self, place):
        place.mkdir(parents=True)
        with published(place) as folder:
            written(folder, "new")
        assert word_at(place) == "new"

    def test_a_link_is_replaced_and_what_it_leads_to_stays(self, place, tmp_path):
        place.parent.mkdir()
        written(tmp_path / "far", "old")
        place.symlink_to(tmp_path / "far")
        with published(place, replaceable=lambda path: True) as folder:
            written(folder, "new")
        assert (word_at(place), word_at(tmp_path / "far")) == ("new", "old")
        assert list(place.parent.iterdir()) == [place]

    def test_an_interrupt_between_old_and_new_leaves_the_old(self, place, monkeypatch):
        written(place, "old")
        plain = publishing._set_aside

        def interrupted(folder, target):
            plain(folder, target)
            assert not target.exists()
            raise KeyboardInterrupt

        monkeypatch.setattr(publishing, "_set_aside", interrupted)
        with pytest.raises(KeyboardInterrupt), published(place, replaceable=lambda path: True) as folder:
            written(folder, "new")
        assert word_at(place) == "old"
        assert list(place.parent.iterdir()) == [place]

    def test_what_cannot_be_put_back_is_kept_and_named(self, place, monkeypatch):
        written(place, "old")
        plain = publishing._moved

        def failing(source, target):
            if not target.exists():
                raise OSError(errno.EIO, "Input/output error")
            return plain(source, target)

        monkeypatch.setattr(publishing, "_moved", failing)
        with (
            pytest.raises(
                EmtauError, match=r"what was at .*q\.zarr cannot be put back .*Input/output"
            ) as raised,
            published(place, replaceable=lambda path: True) as folder,
        ):
            written(folder, "new")
        assert word_at(folder.parent / "old") == "old"
        assert str(folder.parent / "old") in str(raised.value)

    def test_where_the_block_fails_nothing_stays_of_what_its_threads_still_write(self, tmp_path):
        """As zarr's do: where one write fails, others have begun, and make their folders."""
        failed, writers = threading.Event(), []

        def write(folder):
            failed.wait()
            end = time.monotonic() + 0.03
            while time.monotonic() < end:
                with suppress(OSError):
                    (folder / "x" / "y").mkdir(parents=True, exist_ok=True)
                    (folder / "x" / "y" / "z").write_text("late")

        def failing():
            with published(tmp_path / "q") as folder:
                folder.mkdir()
                writers.append(threading.Thread(target=write, args=[folder]))
                writers[0].start()
                failed.set()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            failing()
        writers[0].join()
        assert list(tmp_path.iterdir()) == []

    def test_a_place_that_cannot_be_written_is_refused_at_once(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        with (
            pytest.raises(EmtauError, match=r"the model cannot be written to .*q \(.*/file.*remove it"),
            writing_errors("the model", tmp_path / "file" / "q"),
            published(tmp_path / "file" / "q"),
        ):
            raise AssertionError("the block has begun")


@pytest.mark.kills
@FORMS
@pytest.mark.parametrize("overwrite", [pytest.param(True), pytest.param(False, marks=pytest.mark.sample)])
def test_a_process_killed_at_any_step_leaves_the_old_or_the_new(zygote, place, overwrite):
    """At the place, or for the next one to put back there, which also removes what was left."""
    put_back = 0
    for step in steps_of(zygote, place, overwrite=overwrite):
        begin_anew(zygote, place, overwrite=overwrite)
        assert zygote.run(publish, place, "new", overwrite, At(step, SIGKILL)) is None
        found = word_at(place)
        assert found in ("old", "new", None)
        error, said, _ = zygote.run(publish, place, "next", False)
        if overwrite or found is not None:
            assert error == "PathTakenError", step
            assert str(place) in said
            assert word_at(place) == (found or "old"), step
            put_back += found is None
        else:
            assert (error, word_at(place)) == ("", "next"), step
        assert zygote.run(publish, place, "last", True)[0] == ""
        left = [path for path in place.parent.iterdir() if path != place]
        # One that was killed before its folder had a lock cannot be told from one that is about to have one.
        assert all(
            list(path.iterdir()) == [] or [each.name for each in path.iterdir()] == ["lock.new"]
            for path in left
        )
        for path in left:
            shutil.rmtree(path)
    assert put_back == overwrite


@pytest.mark.kills
@FORMS
@pytest.mark.parametrize("overwrite", [True, False])
def test_one_that_was_stopped_while_another_ran_to_its_end(zygote, place, overwrite):
    """One of the two is there, whole; without overwriting the other one is told."""
    for step in steps_of(zygote, place, overwrite=overwrite):
        begin_anew(zygote, place, overwrite=overwrite)
        first = zygote.start(publish, place, "first", overwrite, At(step, SIGSTOP))
        while not first.stopped and not first.ended:
            time.sleep(0.001)
        second = zygote.run(publish, place, "second", overwrite)
        first.signal(SIGCONT)
        ends = {"first": first.result(), "second": second}
        won = {word for word, (error, _, _) in ends.items() if not error}
        assert word_at(place) in won, (step, ends)
        assert len(won) == (2 if overwrite else 1), (step, ends)
        assert all(str(place) in said for error, said, _ in ends.values() if error)
        assert [path for path in place.parent.iterdir() if path != place] == [], step
