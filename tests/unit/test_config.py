"""Run configs: what is accepted, and how the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from emtau_dask import EMLazy, EMStar, EMTau, FullEM, GaussianMixture
from emtau_dask.cli.config import (
    DatasetOptions,
    KMeansSettings,
    RunConfig,
    RunSettings,
    algorithm_models,
    estimator_of,
    load_config,
    policy_of,
)
from emtau_dask.constraints import integer
from emtau_dask.errors import ConfigError
from emtau_dask.policies.registry import ALGORITHMS

CONFIGS = Path(__file__).parents[2] / "configs"

MINIMAL = """
data: {path: points.zarr}
model: {n_components: 3}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path, MINIMAL)


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


SHIPPED = ["cluster", "digits", "example1", "large", "mnist"]


def test_these_are_the_shipped_configs() -> None:
    assert sorted(path.name for path in CONFIGS.iterdir()) == [f"{name}.yaml" for name in SHIPPED]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_are_valid_and_survive_their_own_dump(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    assert config.output.directory == f"runs/{name}"
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_defaults_are_the_estimators(minimal: Path) -> None:
    config = load_config(minimal)
    assert config.algorithm == RunSettings.variants["auto"](acceleration="auto")
    estimator = estimator_of(config)
    given = {"n_components": 3, "random_state": 0}
    assert estimator.get_params() == GaussianMixture(**given).get_params()
    assert config.output.directory == "runs/run"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_the_parameters_and_defaults_of_its_policy(minimal: Path, name: str) -> None:
    policy: Any = policy_of(load_config(minimal, [f"algorithm.name={name}"]).algorithm)
    assert type(policy) is ALGORITHMS[name]
    assert policy.get_params() == ALGORITHMS[name]().get_params()


class EMEvery(FullEM):
    """A policy that the registry does not have."""

    constraints: ClassVar = {"every": integer(2)}

    def __init__(self, every: int = 7) -> None:
        self.every = every


def test_a_new_policy_needs_no_more_than_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emtau_dask.cli.config.ALGORITHMS", {"em-every": EMEvery})
    model = algorithm_models(RunSettings)["em-every"]
    settings = model(every=9)
    assert settings.model_dump() == {
        "name": "em-every",
        "acceleration": "auto",
        "compare": (),
        "every": 9,
    }
    policy: Any = policy_of(settings)
    assert (type(policy), policy.every) == (EMEvery, 9)
    with pytest.raises(ValidationError, match="must be an integer of at least 2"):
        model(every=1)


@pytest.mark.parametrize(
    ("override", "policy"),
    [
        ("{name: em-tau, tau: 0}", EMTau(tau=0)),
        ("{name: em-star, every: 2.5}", EMStar(every=2.5)),  # type: ignore[arg-type]
        ("{name: em-star, tail: 0}", EMStar(tail=0)),
        ("{name: em-lazy, threshold: 2}", EMLazy(threshold=2)),
    ],
)
def test_a_config_and_a_policy_refuse_in_the_same_words(minimal: Path, override: str, policy: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        policy.row_arrays(3, 100)
    words = str(caught.value).rpartition(" must be ")[2].rstrip(".")
    assert f" must be {words}" in refusal(minimal, f"algorithm={override}")


def test_a_section_left_empty_has_its_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, f"{MINIMAL}\nstop:\nalgorithm:\noutput:\n")
    assert load_config(path) == load_config(write(tmp_path, MINIMAL))


def test_a_number_in_scientific_notation_is_a_number(minimal: Path) -> None:
    assert load_config(minimal, ["stop.tol=1e-12"]).stop.tol == 1e-12


def test_overrides_are_yaml_and_the_last_one_wins(minimal: Path) -> None:
    config = load_config(minimal, ["algorithm={name: em}", "model.n_components=5", "model.n_components=7"])
    assert config.algorithm == RunSettings.variants["em"]()
    assert config.model.n_components == 7


def test_dataset_options_follow_the_dataset(minimal: Path) -> None:
    for options in ("{rows: 10}", "{rows: 10, dataset: mixture}"):
        config = load_config(minimal, [f"data={{dataset: mixture, dataset_options: {options}}}"])
        assert config.data.dataset_options == DatasetOptions.variants["mixture"](rows=10)


@pytest.mark.parametrize("figure", ["-.inf", ".inf", ".nan"])
def test_published_figures_are_finite(minimal: Path, figure: str) -> None:
    override = f"algorithm.compare=[{{name: em, published: {{means: [{figure}]}}}}]"
    with pytest.raises(ConfigError, match=r"published\.means.* must be a list of numbers"):
        load_config(minimal, [override])


def test_compare_lists_algorithms_with_published_figures(minimal: Path) -> None:
    entry = "{name: kmeans, published: {seconds: 2.68, means: [1, 2.5]}}"
    config = load_config(minimal, [f"algorithm.compare=[{{name: em}}, {entry}]"])
    kmeans = config.algorithm.compare[1]
    assert isinstance(kmeans, KMeansSettings)
    assert kmeans.published is not None
    assert kmeans.published.means == (1.0, 2.5)


def test_no_checkpoint_and_threads_by_default(minimal: Path) -> None:
    config = load_config(minimal)
    assert (config.checkpoint.path, config.checkpoint.every) == (None, 1)
    cluster = config.cluster
    assert (cluster.scheduler, cluster.workers, cluster.threads) == ("threads", None, 1)
    assert (cluster.memory_limit, cluster.tls) == (None, None)


TLS = "cluster.tls={ca_file: a.pem, cert: b.pem, key: c.pem}"


@pytest.mark.parametrize(
    ("section", "overrides", "found"),
    [
        ("checkpoint", ["path=run.zarr"], {"path": "run.zarr", "every": 1}),
        ("checkpoint", ["path=s3://bucket/run", "every=5"], {"path": "s3://bucket/run", "every": 5}),
        ("cluster", ["memory_limit=2GB"], {"scheduler": "threads", "memory_limit": "2GB"}),
        (
            "cluster",
            ["scheduler=processes", "workers=3", "threads=2"],
            {"scheduler": "processes", "workers": 3, "threads": 2},
        ),
        ("cluster", ["scheduler=tcp://a:8786"], {"scheduler": "tcp://a:8786", "workers": None}),
        (
            "cluster",
            ["scheduler=tls://a:8786", TLS.removeprefix("cluster.")],
            {"scheduler": "tls://a:8786", "tls": {"ca_file": "a.pem", "cert": "b.pem", "key": "c.pem"}},
        ),
    ],
    ids=str,
)
def test_checkpoint_and_cluster_settings(
    minimal: Path, section: str, overrides: list[str], found: dict[str, object]
) -> None:
    given = [f"{section}.{override}" for override in overrides]
    content = getattr(load_config(minimal, given), section).model_dump()
    assert {key: content[key] for key in found} == found


REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "an unknown key": [
        ("model.n_componets=3", ["model.n_componets", "3", "nearest valid key is model.n_components"]),
        ("model.tol=0.5", ["model.tol", "0.5", "nearest valid key is stop.tol"]),
        ("modle.n_init=2", ["modle", "nearest valid key is model"]),
        ("modle=", ["modle is not a known key", "nearest valid key is model"]),
        ("model.init={seed: 3}", ["model.init.seed", "nearest valid key is model.init.dirichlet_seed"]),
        ("data.dataset_options.rows=3", ["data", "given with a dataset if dataset_options are set"]),
        ("algorithm.threshold=0.5", ["algorithm.threshold", "0.5", "auto has no such key"]),
        (
            "algorithm={name: em-tau, threshold: 0.5}",
            ["algorithm.threshold", "0.5", "em-tau has no such key"],
        ),
        ("algorithm.compare=[{name: em, tau: 3}]", ["algorithm.compare[0].tau", "em has no such key"]),
    ],
    "a wrong type": [
        ("model.n_components=ten", ["model.n_components = 'ten'", "an integer of at least 1"]),
        ("model.n_components='10'", ["model.n_components = '10'", "10 (without quotes)"]),
        ("model.n_components=true", ["model.n_components = True", "an integer"]),
        ("model.n_components=3.0", ["model.n_components = 3.0", "nearest valid value is 3"]),
        ("stop.tol=[1]", ["stop.tol = [1]", "finite number of at least 0"]),
        ("output.scores=1", ["output.scores = 1", "true or false"]),
        ("data.columns=x", ["data.columns = 'x'", "a list of column names"]),
        ("data.path=3", ["data.path = 3", "a path"]),
        ("data={dataset: mixture, dataset_options: []}", ["data.dataset_options = []", "a section"]),
        ("stop=3", ["stop = 3", "stop.tol, stop.max_iter"]),
        ("algorithm.compare=3", ["algorithm.compare = 3", "a list"]),
    ],
    "an impossible value": [
        ("model.n_components=0", ["model.n_components = 0", "nearest valid value is 1"]),
        ("stop.tol=-1", ["stop.tol = -1", "nearest valid value is 0"]),
        ("stop.tol=.nan", ["stop.tol = nan", "finite"]),
        ("model.covariance_type=ful", ["model.covariance_type = 'ful'", "nearest valid value is full"]),
        ("algorithm.name=emtau", ["algorithm.name = 'emtau'", "nearest valid value is em-tau"]),
        (
            "algorithm={name: em-tau, revisit: onempty}",
            ["algorithm.revisit = 'onempty'", "nearest valid value is on-empty"],
        ),
        ("algorithm={name: em-tau, revisit: 0}", ["algorithm.revisit = 0", "nearest valid value is 1"]),
        ("algorithm.acceleration=newton", ["algorithm.acceleration = 'newton'", "quasi-newton"]),
        ("algorithm={name: em-star, tail: 1.5}", ["algorithm.tail = 1.5", "nearest valid value is 1"]),
        ("algorithm={name: em-lazy, threshold: 0}", ["algorithm.threshold = 0", "above 0"]),
        ("algorithm.compare=[{tau: 3}]", ["algorithm.compare[0].name is missing"]),
        ("data.dataset=digit", ["data.dataset = 'digit'", "nearest valid value is digits"]),
        ("data={}", ["data", "a path or a dataset"]),
        ("data={dataset: digits, columns: [x]}", ["data", "without columns", "parquet and CSV"]),
        ("model={}", ["model.n_components is missing"]),
        ("model=", ["model is missing"]),
        ("model={n_components: 2, n_init: 2, init: {dirichlet_seed: 0}}", ["n_init=2", "init"]),
        ("output={labels: null, scores: true}", ["output", "labels"]),
    ],
    "checkpoint and cluster": [
        ("cluster.scheduler=proceses", ["'proceses'", "nearest valid value is processes"]),
        ("cluster.scheduler=udp://a:1", ["cluster.scheduler", "tcp://HOST:PORT"]),
        ("cluster.memory_limit=lots", ["cluster.memory_limit = 'lots'", "2GiB"]),
        ("cluster.memory_limit=0", ["cluster.memory_limit = 0", "above 0"]),
        ("cluster.workers=0", ["cluster.workers = 0", "nearest valid value is 1"]),
        ("checkpoint.every=0", ["checkpoint.every = 0", "nearest valid value is 1"]),
        ("checkpoint.path=3", ["checkpoint.path = 3", "'3'"]),
        ("cluster.threads=2", ["cluster", "threads = 2", "processes"]),
        ("cluster.scheduler=tcp://a:1", "cluster.workers=2", ["without workers", "tcp://a:1"]),
        ("cluster.scheduler=tcp://a:1", "cluster.memory_limit=2GB", ["memory_limit", "tcp://a:1"]),
        ("cluster.scheduler=tcp://a:1", TLS, ["without tls", "tls://HOST:PORT"]),
        ("cluster.tls={ca_file: a.pem, cert: b.pem}", ["cluster.tls.key is missing"]),
    ],
}
"""One override or more, and what is said: the key, its value, and what comes nearest."""


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_is_refused_with_what_comes_nearest(minimal: Path, kind: str) -> None:
    for *overrides, parts in REFUSED[kind]:
        message = refusal(minimal, *overrides)
        assert all(part in message for part in parts), message


def test_every_finding_is_reported(minimal: Path) -> None:
    message = refusal(minimal, "stop.tol=-1", "stop.max_iter=0")
    assert "stop.tol" in message
    assert "stop.max_iter" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("data: [", "line"),
        ("- data", "a mapping of sections"),
        ("", "holds nothing"),
        (f"{MINIMAL}\nmodel: {{n_components: 4}}\n", "'model' appears twice"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, part: str) -> None:
    assert part in refusal(write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "none.yaml")


@pytest.mark.parametrize("override", ["model.n_components", "=3", "model..tol=3", "stop.tol.x=1"])
def test_an_override_that_sets_nothing_is_refused(minimal: Path, override: str) -> None:
    assert "--set" in refusal(minimal, "stop.tol=1", override)
