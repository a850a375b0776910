"""Progress: plain lines, and the live display."""

from __future__ import annotations

import io
import threading
from dataclasses import replace

import numpy as np
import pytest

from emtau_dask.em.history import IterationRecord
from emtau_dask.em.observer import FitObserver, SilentObserver
from emtau_dask.estimator.progress import LineObserver, RichObserver, observer_for
from emtau_dask.mixture.model.parameters import MixtureParameters

RECORD = IterationRecord(
    iteration=1,
    lower_bound=-2.5,
    active_rows=1000,
    full_pass=True,
    chunks_processed=4,
    chunks_skipped=0,
    bytes_read=8000,
    seconds=0.25,
    rows=1000,
)
SECOND = replace(
    RECORD,
    iteration=2,
    lower_bound=-2.25,
    active_rows=123,
    full_pass=False,
    chunks_processed=3,
    chunks_skipped=1,
)
ONE = np.ones((1, 1))
PARAMETERS = MixtureParameters("diag", np.ones(1), ONE, ONE, ONE)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report_two_iterations(observer: FitObserver) -> None:
    observer.stage("k-means 1", 4)
    observer.chunks_done(1)
    observer.stage("iteration 1", 4)
    observer.iteration(RECORD, PARAMETERS)
    observer.stage("iteration 2", 3)
    observer.iteration(SECOND, PARAMETERS)
    observer.note("chunk sizes were unknown")


def test_lines_tell_each_iteration_and_each_other_stage() -> None:
    out = io.StringIO()
    report_two_iterations(LineObserver(out))
    assert out.getvalue().splitlines() == [
        "k-means 1: 4 chunks",
        "iteration 1: bound -2.5, change -, active 100.0%, chunks 4/4, 0.25 s",
        "iteration 2: bound -2.25, change +2.50e-01, active 12.3%, chunks 3/4, 0.25 s",
        "chunk sizes were unknown",
    ]


def test_a_restart_has_no_change() -> None:
    out = io.StringIO()
    observer = LineObserver(out)
    report_two_iterations(observer)
    observer.iteration(RECORD, PARAMETERS)
    assert "change -," in out.getvalue().splitlines()[-1]


def test_the_live_display_shows_iteration_bound_change_active_chunks_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    observer = RichObserver(out)
    try:
        report_two_iterations(observer)
        observer.chunks_done(1)
        observer._live.refresh()
    finally:
        observer.close()
    shown = out.getvalue()
    for part in (
        "iteration",
        "-2.25",
        "+2.50e-01",
        "12.3%",
        "1/3 chunks",
        "0:00:0",
        "chunk sizes were unknown",
    ):
        assert part in shown


def test_the_live_display_counts_chunks_from_many_threads() -> None:
    observer = RichObserver(Terminal())
    try:
        observer.stage("iteration 1", 800)
        threads = [
            threading.Thread(target=lambda: [observer.chunks_done(1) for _ in range(100)]) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert observer._tracker.done == 800
    finally:
        observer.close()


def test_the_stream_decides_the_display() -> None:
    assert isinstance(observer_for(0, io.StringIO()), SilentObserver)
    assert isinstance(observer_for(1, io.StringIO()), LineObserver)
    live = observer_for(1, Terminal())
    live.close()
    assert isinstance(live, RichObserver)


def test_progress_goes_to_standard_output_unless_sent_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = io.StringIO()
    observer_for(1, elsewhere).note("elsewhere")
    observer_for(1).note("here")
    assert elsewhere.getvalue() == "elsewhere\n"
    assert capsys.readouterr().out == "here\n"
