"""The command line, from config to results and exit codes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner, Result
from commands import emtau
from processes import EMTAU

from emtau_dask import EMTau, GaussianMixture
from emtau_dask.cli import inputs
from emtau_dask.cli.main import main

REPOSITORY = Path(__file__).parents[2]

CONFIG = """
data: {dataset: example1}
model: {n_components: 2, random_state: 0}
algorithm: {name: em-tau, tau: 5}
stop: {tol: 1e-7}
output: {directory: out}
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def values(path: str, name: str) -> np.ndarray[Any, Any]:
    array = zarr.open_group(path, mode="r")[name]
    assert isinstance(array, zarr.Array)
    return np.asarray(array[...])


def errors_of(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("emtau: ")]


def test_the_main_job_runs_on_a_fresh_machine(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    run = subprocess.run(
        [*EMTAU, "fit", "configs/digits.yaml"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "10 components" in run.stdout
    assert "model saved in runs/digits/model.zarr" in run.stdout
    assert "labels saved in runs/digits/labels.zarr" in run.stdout
    assert "fit: log-likelihood per row -" in run.stderr
    assert len(values(str(tmp_path / "runs/digits/labels.zarr"), "labels")) == 1797


@pytest.mark.usefixtures("workplace")
def test_fit_writes_the_model_and_its_labels() -> None:
    result = emtau("fit", "run.yaml", "--set", "output.probabilities=true", "--set", "output.scores=true")
    assert result.exit_code == 0, result.stderr
    model = GaussianMixture.load("out/model.zarr")
    rows = values("out/example1.zarr", "X")
    labels = values("out/labels.zarr", "labels")
    np.testing.assert_array_equal(labels, model.predict(rows))
    np.testing.assert_array_equal(values("out/labels.zarr", "probabilities"), model.predict_proba(rows))
    np.testing.assert_array_equal(values("out/labels.zarr", "scores"), model.score_samples(rows))
    for weight in model.weights_:
        assert f" {1000 * weight:.0f} " in result.stdout
    for part in ("converged", "passes over 1,000 rows", "log-likelihood per row"):
        assert part in result.stdout


@pytest.mark.usefixtures("workplace")
def test_a_given_dirichlet_start_is_numpys() -> None:
    emtau("fit", "run.yaml", "--set", "model.init={dirichlet_seed: 7}", "--set", "stop.tol=0.001")
    rows = values("out/example1.zarr", "X")
    start = np.random.default_rng(7).dirichlet(np.ones(2), 1000)
    direct = GaussianMixture(2, algorithm=EMTau(tau=5), tol=0.001)
    direct.fit(rows, responsibilities_init=start)
    np.testing.assert_array_equal(GaussianMixture.load("out/model.zarr").means_, direct.means_)


@pytest.mark.usefixtures("workplace")
def test_a_dirichlet_start_too_large_for_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_START_BYTES", 1000)
    result = emtau("fit", "run.yaml", "--set", "model.init={dirichlet_seed: 7}")
    assert result.exit_code == 2
    assert "dirichlet_seed" in errors_of(result)[0]


@pytest.mark.usefixtures("workplace")
def test_results_of_an_earlier_run_are_kept_unless_overwritten() -> None:
    assert emtau("fit", "run.yaml").exit_code == 0
    again = emtau("fit", "run.yaml")
    assert again.exit_code == 1
    assert "out/model.zarr already exists; use --overwrite" in errors_of(again)[0]
    assert emtau("fit", "run.yaml", "--overwrite").exit_code == 0


@pytest.mark.usefixtures("workplace")
def test_another_dataset_is_not_fitted_in_place_of_the_one_asked_for() -> None:
    assert emtau("fit", "run.yaml").exit_code == 0
    seed = ("--set", "data.dataset_options.seed=3")
    other = emtau("fit", "run.yaml", *seed, "--set", "output.model=m.zarr", "--set", "output.labels=l.zarr")
    assert other.exit_code == 1
    assert "is not the dataset example1 with these" in errors_of(other)[0]
    assert emtau("fit", "run.yaml", *seed, "--overwrite").exit_code == 0


@pytest.mark.usefixtures("workplace")
def test_stopping_at_max_iter_exits_3_with_results() -> None:
    result = emtau("fit", "run.yaml", "--set", "stop.max_iter=2")
    assert result.exit_code == 3
    assert "stop.max_iter = 2" in errors_of(result)[0]
    assert GaussianMixture.load("out/model.zarr").n_iter_ == 2
    assert len(values("out/labels.zarr", "labels")) == 1000


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["fit", "run.yaml", "--set", "model.n_componets=3"], "model.n_components"),
        (["fit", "none.yaml"], "none.yaml cannot be read"),
        (["fit", "run.yaml", "--scheduler", "proceses"], "nearest valid value is processes"),
        (["fit", "run.yaml", "--scheduler", "tcp://host:1", "--workers", "2"], "without workers"),
        (["fit", "run.yaml", "--workers", "0"], "--workers"),
        (["fit"], "CONFIG"),
        (["fit", "run.yaml", "--cov", "diag"], "--covariance"),
        (["frobnicate"], "frobnicate"),
        (["compare", "run.yaml"], "algorithm.compare"),
        (["dataset", "mixture", "x.zarr", "--rows", "0"], "--rows"),
    ],
)
@pytest.mark.usefixtures("workplace")
def test_wrong_usage_exits_2(arguments: list[str], part: str) -> None:
    result = emtau(*arguments)
    assert result.exit_code == 2
    assert part in result.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["fit", "run.yaml", "--set", "data={path: none.zarr}"], "none.zarr does not exist"),
        (["fit", "run.yaml", "--set", "data={path: m.zarr, dataset: mnist}"], "emtau dataset mnist m.zarr"),
        (["fit", "run.yaml", "--set", "model.n_components=2000"], "2000"),
        (["predict", "none", "none.zarr", "out.zarr"], "none"),
        (["inspect", "nowhere"], "nowhere"),
    ],
)
@pytest.mark.usefixtures("workplace")
def test_a_failure_is_one_line_and_exits_1(arguments: list[str], part: str) -> None:
    result = emtau(*arguments)
    assert result.exit_code == 1
    (line,) = errors_of(result)
    assert part in line
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("where", [0, 3])
@pytest.mark.usefixtures("workplace")
def test_debug_shows_the_traceback_wherever_it_stands(where: int) -> None:
    arguments = ["predict", "none", "none.zarr", "out.zarr"]
    arguments.insert(where, "--debug")
    result = emtau(*arguments)
    assert result.exit_code == 1
    assert "Traceback" in result.stderr


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("error", "code", "part"),
    [(KeyboardInterrupt(), 130, "interrupted"), (RuntimeError("odd"), 1, "RuntimeError: odd (use --debug")],
)
def test_interrupts_and_surprises_have_their_exit_codes(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, part: str
) -> None:
    def raise_error(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("emtau_dask.cli.fit.run_fit", raise_error)
    result = emtau("fit", "run.yaml")
    assert result.exit_code == code
    assert part in errors_of(result)[0]


def test_row_weights_may_be_a_member_of_the_group(workplace: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((300, 2))
    weights = np.repeat([0.0, 1.0], [100, 200])
    group = zarr.create_group(str(workplace / "points.zarr"))
    group.create_array("X", data=rows)
    group.create_array("w", data=weights)
    given = ("--set", "data={path: points.zarr, weights: w}", "--set", "stop.tol=0.01")
    result = emtau("fit", "run.yaml", *given)
    assert result.exit_code == 0, result.stderr
    direct = GaussianMixture(2, algorithm=EMTau(tau=5), tol=0.01, random_state=0)
    direct.fit(rows, sample_weight=weights)
    np.testing.assert_allclose(GaussianMixture.load("out/model.zarr").means_, direct.means_, rtol=1e-9)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("data={path: points.npy, weights: w}", "has no names"),
        ("data={path: points.npy, weights: short.npy}", "(2,)"),
        ("data={path: points.npy, array: X}", "data.array"),
        ("data={path: points.npy, columns: [a]}", "columns"),
    ],
)
def test_data_that_does_not_fit_its_description_is_refused(workplace: Path, override: str, part: str) -> None:
    np.save(workplace / "points.npy", np.zeros((3, 1)))
    np.save(workplace / "short.npy", np.zeros(2))
    result = emtau("fit", "run.yaml", "--set", override)
    assert result.exit_code in (1, 2)
    assert part in errors_of(result)[0]


@pytest.mark.usefixtures("workplace")
def test_predict_streams_labels_probabilities_and_scores() -> None:
    emtau("fit", "run.yaml")
    emtau("dataset", "example1", "new.zarr", "--seed", "9", "--chunk-rows", "64")
    result = emtau("predict", "out", "new.zarr", "p.zarr", "--proba", "--scores", "--workers", "2")
    assert result.exit_code == 0, result.stderr
    assert "1,000 rows labelled in p.zarr" in result.stdout
    model, rows = GaussianMixture.load("out/model.zarr"), values("new.zarr", "X")
    np.testing.assert_array_equal(values("p.zarr", "labels"), model.predict(rows))
    np.testing.assert_allclose(values("p.zarr", "probabilities"), model.predict_proba(rows), rtol=1e-12)
    np.testing.assert_allclose(values("p.zarr", "scores"), model.score_samples(rows), rtol=1e-12)
    assert emtau("predict", "out/model.zarr", "new.zarr", "p.zarr").exit_code == 1
    assert emtau("predict", "out/model.zarr", "new.zarr", "p.zarr", "--overwrite").exit_code == 0
    assert "scores" not in zarr.open_group("p.zarr", mode="r")


def test_predict_refuses_other_features_and_bad_values(workplace: Path) -> None:
    emtau("fit", "run.yaml")
    np.save(workplace / "wide.npy", np.zeros((3, 2)))
    assert "has 2 features" in errors_of(emtau("predict", "out", "wide.npy", "p.zarr"))[0]
    rows = np.zeros((300, 1))
    rows[205] = np.nan
    group = zarr.create_group(str(workplace / "bad.zarr"))
    group.create_array("X", data=rows, chunks=(100, 1))
    (line,) = errors_of(emtau("predict", "out", "bad.zarr", "p.zarr"))
    assert "row 205 (chunk 2, its row 5)" in line
    assert not list(workplace.glob("p.zarr*"))


@pytest.mark.usefixtures("workplace")
def test_dataset_writes_what_it_says() -> None:
    result = emtau("dataset", "mixture", "m.zarr", "--rows", "250", "--features", "3", "--chunk-rows", "100")
    assert result.exit_code == 0, result.stderr
    assert "250 rows × 3 features written to m.zarr" in result.stdout
    assert values("m.zarr", "X").shape == (250, 3)


def test_help_lists_the_commands_that_exist() -> None:
    result = emtau("--help")
    assert result.exit_code == 0
    _, _, commands = result.stdout.partition("Commands:\n")
    listed = [line.split()[0] for line in commands.splitlines() if re.match("  [a-z]", line)]
    expected = ["compare", "dataset", "doctor", "fit", "inspect", "predict", "report", "resume", "select"]
    assert listed == expected


def test_overwrite_never_replaces_what_the_run_reads(workplace: Path) -> None:
    assert emtau("fit", "run.yaml").exit_code == 0
    data = "out/example1.zarr"
    before = sorted(path.name for path in (workplace / data).iterdir())
    for command in (
        ["predict", "out", data, data, "--overwrite"],
        ["predict", "out", data, f"{data}/X", "--overwrite"],
        ["predict", "out/model.zarr", data, "out/model.zarr", "--overwrite"],
        ["fit", "run.yaml", "--overwrite", "--set", "output.labels=example1.zarr"],
        ["fit", "run.yaml", "--overwrite", "--set", "output.labels=model.zarr"],
    ):
        result = emtau(*command)
        assert result.exit_code == 1, command
        assert "which this run reads" in result.output, command
    assert sorted(path.name for path in (workplace / data).iterdir()) == before


def test_overwrite_spares_zarr_data_of_others(workplace: Path) -> None:
    zarr.create_group(workplace / "mine.zarr").create_array("precious", data=np.arange(3.0))
    given = ("--set", "data.path=mine.zarr", "--set", "data.dataset=example1")
    result = emtau("fit", "run.yaml", "--overwrite", *given)
    assert result.exit_code == 1
    assert "was not written by emtau" in result.output
    assert (workplace / "mine.zarr" / "precious").is_dir()


def test_a_place_that_cannot_be_written_is_found_before_the_fit(workplace: Path) -> None:
    (workplace / "blocked").write_text("a file", encoding="utf-8")
    result = emtau("fit", "run.yaml", "--set", "output.directory=blocked", "--set", "data.path=d.zarr")
    assert result.exit_code == 1
    assert "nothing can be written in blocked" in result.output
    assert not (workplace / "d.zarr").exists()


def test_help_imports_nothing_large() -> None:
    code = "import sys; from emtau_dask.cli.main import main"
    for command in ([], ["fit"], ["predict"], ["dataset", "mixture"]):
        code += f"; main({[*command, '--help']}, standalone_mode=False)"
    code += "; print(sorted({'dask', 'numpy', 'pydantic', 'rich', 'sklearn', 'zarr'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.count("Usage: ") == 4, run.stderr
    assert run.stdout.endswith("[]\n"), run.stdout + run.stderr


COMPLETING = """
eval "$(_EMTAU_COMPLETE=bash_source emtau)"
COMP_WORDS=(emtau fit --sch) COMP_CWORD=2
_emtau_completion emtau
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_an_option() -> None:
    """As the documentation sets it up."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    surroundings = {**os.environ, "PATH": path}
    run = subprocess.run(["bash", "-c", COMPLETING], env=surroundings, capture_output=True, text=True)
    assert run.stdout.split() == ["--scheduler"]


@pytest.mark.parametrize(("words", "completed"), [("res", "resume"), ("dataset mi", "mixture")])
def test_commands_are_completed(words: str, completed: str) -> None:
    asked = {"_EMTAU_COMPLETE": "bash_complete", "COMP_WORDS": f"emtau {words}"}
    asked["COMP_CWORD"] = str(len(words.split()))
    result = CliRunner().invoke(main, [], prog_name="emtau", env=asked)
    assert result.stdout.split() == [f"plain,{completed}"]


@pytest.mark.parametrize(("shell", "command"), [("zsh", "compdef"), ("fish", "complete")])
def test_other_shells_get_their_completion(shell: str, command: str) -> None:
    result = CliRunner().invoke(main, [], prog_name="emtau", env={"_EMTAU_COMPLETE": f"{shell}_source"})
    assert command in result.stdout
