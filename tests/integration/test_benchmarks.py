"""The benchmarks, on tiny data: every part of them runs, and what they compute is right."""

import dataclasses
import gc
import importlib
import itertools
import json
import runpy
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr
from threadpoolctl import threadpool_limits

pytestmark = pytest.mark.docs
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = [
    "--scale", "5000", "--most-features", "20", "--repeats", "1", "--iterations", "1", "2", "--product", "50",
]  # fmt: skip
PEERS = ["--peers", "scikit-learn"]


@pytest.fixture
def main_of(monkeypatch):
    """A benchmark's main, which subtracts no pauses: of times as short as these nothing might remain."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(importlib.import_module("pauses"), "can_watch", lambda: False)
    return lambda name: runpy.run_path(str(BENCHMARKS / f"{name}.py"))["main"]


@pytest.fixture
def speed(main_of):
    return main_of("speed")


@pytest.fixture
def in_process(speed, monkeypatch):
    """Contestants run here, which spares imports; they collect garbage before fits, their own alone."""
    contestant = runpy.run_path(str(BENCHMARKS / "contestants.py"))["main"]

    def run(python, arguments, threads):
        with threadpool_limits(1):
            return contestant(arguments)

    monkeypatch.setitem(speed.__globals__, "run_contestant", run)
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("main_of")
def test_two_threads_and_two_processes_are_timed(capsys):
    tiny = ["--scale", "5000", "--turns", "1", "--iterations", "3"]
    found = importlib.import_module("side_by_side").main(["--work", "full-d4", "tied-d16", *tiny])
    assert [each.work.name for each in found] == ["full-d4", "tied-d16"]
    assert all(each.by_threads > 0 and each.by_processes > 0 for each in found)
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.usefixtures("in_process")
def test_every_row_of_work_is_listed_and_agrees_with_scikit_learn(speed, capsys):
    found = speed([*TINY, *PEERS, "--threads", "2", "1"])
    printed = capsys.readouterr().out
    assert {measured.work.name for measured in found} == set(speed.__globals__["WORK"]) - {"mnist"}
    assert "mnist is left out" in printed
    for measured in found:
        assert printed.count(f"| {measured.work} |") >= 4
        assert set(measured.seconds) >= {
            (name, threads) for name in ("ours", "scikit-learn") for threads in (1, 2)
        }
        assert measured.difference("scikit-learn") < 1e-8
        assert (("ours-float32", 2) in measured.seconds) == measured.work.float32


@pytest.mark.usefixtures("in_process")
def test_a_peer_that_fails_is_named_and_left_out(speed, monkeypatch, capsys):
    run = speed.__globals__["run_contestant"]
    failure = speed.__globals__["subprocess"].CalledProcessError(
        1, "peer", stderr="Traceback\nno such thing\n"
    )

    def failing(python, arguments, threads):
        if arguments[0] == "scikit-learn":
            raise failure
        return run(python, arguments, threads)

    monkeypatch.setitem(speed.__globals__, "run_contestant", failing)
    (measured,) = speed([*TINY, *PEERS, "--threads", "1", "--work", "tied-d16"])
    assert f"scikit-learn fails on {measured.work}: no such thing" in capsys.readouterr().out
    assert set(measured.seconds) == {("ours", 1)}


def test_a_peer_that_is_not_installed_is_left_out(speed, tmp_path, capsys):
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    with pytest.raises(SystemExit):
        speed(["--python", "nobody=python"])
    interpreters = ["--python", f"scikit-learn={bare}"]
    json_file = tmp_path / "found.json"
    told = ["--threads", "1", "--work", "tied-d16", "--json", str(json_file)]
    (measured,) = speed([*TINY, *PEERS, *interpreters, *told])
    (milliseconds,) = json.loads(json_file.read_text()).values()
    assert milliseconds == 1e3 * measured.median("ours", 1)
    assert "scikit-learn is left out: pip install scikit-learn" in capsys.readouterr().out
    assert measured.rate(1) > 0
    assert measured.log_likelihoods.keys() == {"ours"}


def test_scheduling(main_of, capsys, tmp_path):
    """A few tiny chunks in threads and on a cluster: every task of an iteration is seen on both."""
    arguments = ["--chunks", "40", "--chunk-rows", "50", "--features", "3", "--components", "2"]
    arguments += ["--iterations", "2", "--algorithms", "em-tau", "--folder", str(tmp_path)]
    arguments += ["--idle-seconds", "0.5"]
    in_threads, on_cluster = main_of("scheduling")(arguments)
    assert (in_threads.scheduler, on_cluster.scheduler) == ("threads", "cluster")
    assert (in_threads.merges, on_cluster.merges) == (0, 1)
    for cost in (in_threads, on_cluster):
        assert (cost.chunks, cost.tasks) == (40, 5)
        assert 0 < cost.outside < 1
        assert 0 < cost.driver < 1
    assert in_threads.idle is None
    assert 0 < on_cluster.idle < 1
    assert capsys.readouterr().out.count("| em-tau | 40 | 5 |") == 2


def test_cluster_tasks(main_of, capsys, tmp_path):
    """Twenty chunks have a task each: three nodes of at most eight, and their root. A cluster keeps none."""
    size = ["--chunks", "20", "--features", "3", "--components", "2", "--workers", "1", "--simulated", "10"]
    found = main_of("cluster_tasks")([*size, "--idle-seconds", "0.1", "--folder", str(tmp_path)])
    assert [(cost.alone, cost.workers) for cost in found] == [(False, 2), (True, 2), (True, 1)]
    for cost in found:
        assert (cost.chunks, cost.of["tasks"], cost.of["merges"]) == (20, 20, 4)
        assert min(cost.of["sent"], cost.of["received"]) >= cost.tasks
        assert (cost.kept["keys"], cost.kept["known"]) == (0, 0)
        assert cost.of["scheduler"] < cost.of["seconds"]
    *_, simulated = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines())
    assert simulated[:4] == ["200", "1", "10", "229"]
    assert float(simulated[5]) >= float(simulated[7]) == 3.4


def test_scale(main_of, capsys, tmp_path):
    """Small chunks share a task by eight, large ones do not; the bytes of ten chunks, by hand."""
    tiny = ["--divide", "100", "--iterations", "2", "--idle-seconds", "0.1", "--folder", str(tmp_path)]
    size = ["--workers", "1", "--workers-of-scheduler", "3", "--chunks", "20", "--rows", "10000000"]
    found = main_of("scale")(["growth", "workers", "scheduler", "paper", *tiny, *size])
    assert all(ms > 0 for each in found["growth"].values() for ms in each)
    assert [len(each) for each in found["growth"].values()] == [4, 4, 4, 5, 4]
    (by_one,) = found["workers"]
    assert (by_one["tasks"], by_one["merges"]) == (4, 1)
    assert 0 < by_one["idle"] < 1
    (load,) = found["scheduler"]
    assert (load.of["tasks"], load.of["merges"], load.workers) == (20, 4, 3)
    assert load.of["sent"] >= load.tasks
    assert found["paper"]["bytes"] == 10_000_000 * 16 * 8
    assert found["paper"]["chunks"] == 10
    assert "| 3 | 20 | 20 | 4 |" in capsys.readouterr().out


def test_a_simulated_cluster_waits_for_its_scheduler_or_its_workers(main_of):
    """Six tasks of 2 s on two workers, from the first second on: by hand."""
    wall = main_of("cluster_tasks").__globals__["wall"]
    assert wall([2.0] * 6, 2, 1.0, 0.0) == 7.0
    assert wall([2.0] * 6, 2, 1.0, 0.5) == 8.0
    assert wall([2.0] * 6, 2, 1.0, 3.0) == 1.0 + 6 * 3.0 + 2.0


def test_small_chunks(main_of, capsys, tmp_path):
    """Row state in no object, and in as many as there are tasks: 40 chunks travel by eights."""
    size = ["--chunks", "40", "--many", "80", "--chunk-rows", "20", "--iterations", "2"]
    found = main_of("small_chunks")([*size, "--folder", str(tmp_path)])
    assert [(cost.case, cost.chunks, cost.objects) for cost in found] == [
        ("em", 40, 0),
        ("em-tau", 40, 0),
        ("em-tau, checkpoint", 40, 5),
        ("em", 80, 0),
    ]
    assert all(cost.seconds > 0 and cost.processor > 0 and cost.peak > 0 for cost in found)
    assert capsys.readouterr().out.count("| em-tau, checkpoint | 40 |") == 1


def test_kernels(main_of, capsys):
    """A line for each shape, with what the rule of the kernel chooses there."""
    arguments = ["--types", "full", "diag", "--components", "2", "--features", "2", "32"]
    main_of("kernels")([*arguments, "--repeats", "1"])
    printed = capsys.readouterr().out.splitlines()
    end = printed.index("| exponents | NumPy | ours |")
    assert [line.split(" | ")[0] for line in printed[end + 2 :]] == [
        "| -100 to 0",
        "| -745 to -708",
        "| -3000 to 0",
    ]
    lines = [line.split(" | ") for line in printed if " ns " in line]
    shapes = [("| full", "2"), ("| full", "32"), ("| diag", "2"), ("| diag", "32")]
    assert [(line[0], line[2]) for line in lines[:4]] == shapes
    assert [line[5] for line in lines[:4]] == ["features", "centred", "features", "features"]


def test_blocks(main_of, capsys):
    from emtau_dask.mixture import plan

    before = plan.BLOCK_BYTES
    sizes = ["--mebibytes", "1", "2", "--repeats", "2", "--iterations", "3"]
    found = main_of("blocks")(["--work", "full-d4", "full-d42", "--scale", "100", *sizes])
    assert before == plan.BLOCK_BYTES
    assert {tuple(times) for times in found.values()} == {((1, 1), (1, 2), (2, 1), (2, 2))}
    assert all(0 < time < 1e5 for times in found.values() for time in times.values())
    assert capsys.readouterr().out.count("| MiB of a block | one thread | two threads |") == 2


def test_compiled(main_of, capsys):
    shapes = ["full-3-4", "tied-3-4", "full-64-80"]
    arguments = ["--work", "full-d4", "diag-near", "--shapes", *shapes, "--repeats", "1"]
    found = main_of("compiled")([*arguments, "--iterations", "3", "--scale", "1000"])
    assert list(found) == ["full-d4 float64", "diag-near float64", "diag-near float32", *shapes]
    assert all(pair.gain > 0 for pairs in found.values() for pair in pairs.values())
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| full-")]
    assert [line[1] for line in lines] == ["15", "3321"] * 2
    assert all(float(rate.rstrip(" |")) > 0 for line in lines[2:] for rate in line[2:])


def test_soak(main_of, capsys, tmp_path):
    """Few of each kind of disturbance, none of which goes wrong; each draw of instants is a kill."""
    arguments = ["--only", "kills", "stops", "meetings", "faults", "damage", "--scenarios", "3"]
    arguments += ["--stride", "200", "--instants", "1", "--meetings", "1", "--mutations", "5"]
    arguments += ["--folder", str(tmp_path)]
    assert main_of("soak")(arguments) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0].split(",")[0] for line in lines] == [
        "| killed",
        "| killed",
        "| one stopped at every step",
        "| two at once",
        "| full",
        "| damaged and made up",
    ]
    assert (lines[1][1], lines[3][1]) == ("1", "2")
    assert "ended before" not in lines[1][2]


def test_worker_kills(main_of, capsys):
    """One fit at least, and it is the threaded one."""
    arguments = ["--minutes", "0", "--every", "0.3", "--workers", "2", "--rows", "4000", "--iterations", "3"]
    assert main_of("worker_kills")(arguments) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("FullEM")
    assert line.endswith("same")


def test_mnist_starts(main_of, capsys, tmp_path):
    """Clusters far apart, of which a random start finds some; rows as few as these are not the paper's."""
    labels = np.repeat(np.arange(5), 40)
    rows = np.random.default_rng(0).normal(size=(200, 3)) + 20 * labels[:, np.newaxis]
    group = zarr.create_group(tmp_path / "mnist.zarr")
    group.create_array("X", data=rows)
    group.create_array("labels", data=labels)
    starts = main_of("mnist_starts")([str(tmp_path / "mnist.zarr"), "--seeds", "0", "1"])
    assert [start.seed for start in starts] == [0, 1]
    for start in starts:
        assert start.iterations > 1
        assert 0 <= start.error <= 0.8
        assert not start.is_the_papers
    assert capsys.readouterr().out.endswith("0 of 2 starts\n")


def test_cluster_memory(main_of, capsys):
    """Without a limit that matters nothing happens, and the peak is below what the plan says."""
    arguments = ["--rows", "4000", "--chunk-rows", "1000", "--features", "3", "--components", "2"]
    outcome = main_of("cluster_memory")([*arguments, "--iterations", "3", "--workers", "2"])
    assert outcome.undisturbed
    assert len(outcome.workers) == 2
    for worker in outcome.workers.values():
        assert 0 < worker.peak <= outcome.predicted
    assert "0 pauses, 0 departures" in capsys.readouterr().out


def test_checkpoint_cost(main_of, monkeypatch, capsys, tmp_path):
    arguments = ["--rows", "4000", "--chunk-rows", "1000", "--features", "3", "--components", "2"]
    arguments += ["--repeats", "1", "--every", "1", "--iterations", "4", "--folder", str(tmp_path)]
    main = main_of("checkpoint_cost")

    def run(arguments):
        main(arguments)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setitem(main.__globals__, "run", run)
    found = main([*arguments, "--json", str(tmp_path / "found.json")])
    (plain,), (kept,) = found[0], found[1]
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "checkpoint_every none, s": plain["seconds"],
        "checkpoint_every 1, s": kept["seconds"],
        "checkpoint_every 1, bytes": sum(kept["stored"]),
    }
    assert plain["parts"] == {"commits": 0, "fingerprint": 0}
    assert plain["stored"] == []
    assert 0 < kept["parts"]["commits"] + kept["parts"]["fingerprint"] < kept["seconds"]
    assert len(kept["stored"]) == 3 + len(kept["active"])  # the settings, Θ₀, each iteration, the end
    printed = capsys.readouterr().out
    assert "one fsync of 64 kB" in printed


def test_digest_cost(main_of, monkeypatch, capsys):
    main = main_of("digest_cost")
    monkeypatch.setitem(main.__globals__, "SHAPES", {"d4": (4000, 4, 2)})
    main(["--shapes", "d4", "--pairs", "3", "--threads", "1"])
    printed = capsys.readouterr().out
    assert printed.count("| 4,000 x 4, 2 |") == 2


def test_out_of_core_prints_both_ratios_and_what_they_are_compared_with(
    main_of, monkeypatch, capsys, tmp_path
):
    main = main_of("out_of_core")

    def run(kind, folder, arguments, inside):
        assert inside is None
        main(["--measure", kind, "--folder", str(folder), *arguments])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setitem(main.__globals__, "run", run)
    size = ["--memory", "50kB", "--chunk-rows", "300", "--features", "4", "--components", "2"]
    found = main([*size, "--repeats", "1", "--json", str(tmp_path / "found.json")])
    figures = json.loads((tmp_path / "found.json").read_text())
    assert figures["rows in plain, s per million"] == 1e6 / found.rows["plain"]
    assert figures["limit of zstd / reached"] == found.zstd_limit / found.rows["zstd"]
    assert found.plain_limit == min(found.rows["memory"], found.rows["files"])
    assert all(rate > 0 for rate in (*found.rows.values(), *found.core_seconds.values()))
    *_, plain, zstd = capsys.readouterr().out.splitlines()
    assert plain.startswith(f"plain: {found.rows['plain'] / found.plain_limit:.3f} of the lower of")
    assert zstd.startswith(f"zstd: {found.rows['zstd'] / found.zstd_limit:.3f} of {found.cores} cores /")


def test_a_pause_of_all_processors_is_not_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pauses = importlib.import_module("pauses")
    first = [(0.0, 2.0), (3.0, 4.0), (6.0, 9.0)]
    second = [(1.0, 3.5), (7.0, 7.5), (8.5, 10.0)]
    assert pauses.common(first, second) == [(1.0, 2.0), (3.0, 3.5), (7.0, 7.5), (8.5, 9.0)]
    with pauses.Pauses() as watching:
        monkeypatch.setattr(watching, "so_far", lambda: pauses.common(first, second))
        assert watching.seconds_without((1.5, 8.75)) == 7.25 - 0.5 - 0.5 - 0.5 - 0.25
    with pauses.Pauses() as watching:
        assert all(0 < began < ended for began, ended in watching.so_far())


def test_passes(main_of, capsys, tmp_path):
    """From the same start every accelerator ends in EM's optimum, and none of its passes is free."""
    arguments = ["--data", "D", "A", "--scale", "300", "--seeds", "1", "--json", str(tmp_path / "found.json")]
    main = main_of("passes")
    found = main([*arguments, "--passes", "200"])
    printed = capsys.readouterr().out
    assert "D is left out" in printed
    methods = main.__globals__["METHODS"]
    assert [outcome.method for outcome in found] == methods
    by_em = pytest.approx(found[0].optimum, abs=1e-9)
    for outcome in found:
        assert outcome.optimum == by_em or "own start" in outcome.method
        assert (outcome.stopped is None) == (outcome.method in ("auto", "auto (own start)"))
        passes = outcome.fit.passes
        assert all(before.work < after.work for before, after in itertools.pairwise(passes))
        assert 1 <= outcome.reached(1e-4).work <= passes[-1].work
        assert f"\n| {outcome.method} | " in printed
    assert printed.count(" ends above ") == 3
    assert len(json.loads((tmp_path / "found.json").read_text())) == len(methods)


def test_passes_over_all_data(main_of):
    """Every data set but MNIST is drawn, and fitted a little."""
    main = main_of("passes")
    found = main(["--scale", "5000", "--passes", "4", "--polish", "2", "--methods", "em"])
    assert [outcome.data for outcome in found] == [name for name in main.__globals__["NAMES"] if name != "D"]
    assert all(0 < len(outcome.fit.passes) <= 4 for outcome in found)


def test_gaps_against_work_are_drawn(main_of, tmp_path):
    picture = tmp_path / "passes.svg"
    few = ["--data", "A", "--scale", "5000", "--passes", "4", "--polish", "2", "--methods", "em"]
    main_of("passes")([*few, "--picture", str(picture)])
    assert b"<svg" in picture.read_bytes()


def test_a_pass_after_which_a_default_fit_ends_is_found_in_a_longer_one(main_of):
    """What is said of a fit's own stop is what the estimator does."""
    passes = main_of("passes").__globals__
    data = passes["made"]("A", 20, None)
    begun = passes["start"](data, 0, 0.0)
    setting = passes["Setting"](threads=1, passes=200, polish=1, reg_covar=0.0)
    for method in ("em", "quasi-newton", "em-sampled", "auto", "auto (own start)"):
        engine = passes["ENGINE"][method]
        longer = passes["fit_engine"](engine, data, begun, 0, setting)
        alone = passes["fit_engine"](dataclasses.replace(engine, short=True), data, begun, 0, setting)
        assert len(alone.passes) == alone.stop + 1
        if not engine.auto:
            assert len(longer.passes) > longer.stop + 1 == len(alone.passes)
        else:
            assert longer.stop is None  # It measures its gap before it ends.
        for ours, theirs in zip(longer.passes, alone.passes, strict=False):
            assert ours.bound == theirs.bound
            assert engine.auto or ours.work == theirs.work


def test_final_likelihoods(main_of, capsys):
    """Ours end no lower than scikit-learn's."""
    found = main_of("final_likelihoods")(["--data", "A", "--scale", "100", "--seeds", "2", "--threads", "1"])
    assert list(found) == ["A"]
    ends = found["A"]
    assert {len(each) for each in ends.values()} == {2}
    best = max(end.likelihood for end in ends["scikit-learn"])
    for method, each in ends.items():
        assert all(end.likelihood > best - 1e-2 for end in each) or method == "scikit-learn"
        assert all(end.work >= 1 for end in each)
    assert capsys.readouterr().out.count("| A |") == 3


def test_seconds_to_optimum(main_of, capsys):
    """The iterations that are timed are those of EM here: bounds agree with scikit-learn's."""
    main = main_of("seconds_to_optimum")
    (race,) = main(["--data", "A", "--scale", "100", "--passes", "200", "--threads", "1"])
    assert race.difference < 1e-9
    assert race.there
    assert race.iterations > 3
    assert race.ours > 0
    assert "| A | 0 |" in capsys.readouterr().out


def test_out_of_core_passes(main_of):
    """What the process read is at least what chunks and iterations are, and each full pass is among that."""
    found = main_of("out_of_core_passes")(["--rows", "20000", "--chunk-rows", "2000", "--threads", "1"])
    assert found.full_passes >= 1
    assert found.chunks >= found.full_passes
    assert found.iterations >= found.full_passes
    assert found.process > max(found.iterations, found.chunks)
    assert found.work > found.full_passes


@pytest.mark.usefixtures("main_of")
def test_four_rules_choose_a_number_of_components(capsys):
    module = importlib.import_module("choosing_k")
    found = module.main(["--sets", "1", "--rows", "2000", "--sample-rows", "500"])
    assert set(found) == set(module.CASES)
    for counts in found.values():
        assert all(counts[rule].total() == 1 for rule in module.RULES)
    assert found["even"]["select_components"] == {3: 1}
    assert "K: times" in capsys.readouterr().out


def test_predictions(main_of, monkeypatch, capsys, tmp_path):
    """Two of the contestants have a process, which spares the imports of the others."""
    main = main_of("predictions")
    apart, here = main.__globals__["in_its_own_process"], main.__globals__["run_one"]

    def run(name, folder, threads):
        if name in ("labels", "all outputs written"):
            return apart(name, folder, threads)
        with dask.config.set(scheduler="threads", num_workers=threads):
            return here(name, folder, threads)

    monkeypatch.setitem(main.__globals__, "in_its_own_process", run)
    found = main(["--rows", "4000", "--components", "3", "--repeats", "1", "--folder", str(tmp_path)])
    printed = capsys.readouterr().out
    assert [line.split(" | ")[0].strip("| ") for line in printed.splitlines()[4:]] == list(found)
    assert len({line.count("|") for line in printed.splitlines()[2:]}) == 1
    counts = {name: runs[0]["counts"] for name, runs in found.items() if "counts" in runs[0]}
    assert counts["labels"] == counts["scikit-learn"] == counts["all outputs written"]
    assert sum(counts["labels"]) == 4 * sum(counts["labels, quarter"]) == 4000


@pytest.mark.usefixtures("main_of")
def test_the_first_compilation_is_loaded_later(capsys):
    pytest.importorskip("numba")
    module = importlib.import_module("first_compilation")
    found = module.main(["--rows", "2000", "--repeats", "1", "--algorithms", "em"])
    ((_, _, functions),) = found["em"]
    assert functions >= 1
    assert f"{functions} functions compiled" in capsys.readouterr().out


def test_first_result(main_of, tmp_path):
    """Every line is timed; nothing is said of how long it took."""
    json_file = tmp_path / "found.json"
    found = main_of("first_result")(["--rows", "4000", "--json", str(json_file)])
    assert len(found) == 5
    assert min(found.values()) > 0
    assert json.loads(json_file.read_text()) == found


def test_partial(main_of, capsys):
    size = ["--rows", "20000", "--chunks", "4", "--features", "3", "--components", "2", "--repeats", "1"]
    found = main_of("partial")(size)
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(found) == 8
    stored = {cost.iterations: cost.megabytes for cost in found if cost.rows_in == "zarr"}
    assert stored["a tenth active"] < 0.15 * stored["full, EM"]


@pytest.mark.usefixtures("main_of")
def test_sources(main_of, monkeypatch, capsys):
    kinds = ["npy", "zarr-packed", "parquet-folder", "cube", "netcdf"]
    arguments = ["sources.py", "--rows", "3000", "--chunk-rows", "1000", "--only", *kinds]
    monkeypatch.setattr("sys.argv", arguments)
    main_of("sources")()
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == kinds
    assert "failed" not in " ".join(lines)


def test_small_fits(main_of):
    found = main_of("small_fits")(["--shapes", "300x2x3", "--data-sets", "2", "--repeats", "1"])
    assert [ratio > 0 for ratio, _ in found] == [True]
    assert found[0][1] > -1e-3


def test_missing_values(main_of):
    assert main_of("missing_values")(["--rows", "2000", "--features", "3", "--pairs", "1"])[3] > 0
