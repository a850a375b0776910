"""The page of a config's keys says what the schema is."""

import re

import pytest
from documentation import script

from emtau_dask.cli.config import RunConfig
from emtau_dask.cli.sections import valid_keys
from emtau_dask.mixture.covariance_types import STRUCTURES
from emtau_dask.policies.registry import ALGORITHMS

draw = script("draw_configuration")


@pytest.fixture(scope="module")
def rows():
    found = re.findall(r"^\| `([\w.\[\]]+)`(.*) \|$", draw.page(), flags=re.MULTILINE)
    return {key: rest.split(" | ") for key, rest in found}


def test_the_page_is_what_the_script_writes_now():
    assert draw.PAGE.read_text(encoding="utf-8") == draw.page(), "run: python docs/draw_configuration.py"


def test_every_key_is_there(rows):
    keys = {key for key in valid_keys(RunConfig) if "." in key}
    parameters = {f"algorithm.compare.{key}" for policy in ALGORITHMS.values() for key in policy.constraints}
    # Parameters of algorithms are shown once, not for comparisons again.
    assert {key.replace("[]", "") for key in rows} == keys - parameters


def test_a_key_has_values_a_default_and_a_meaning(rows):
    for key, (_, values, default, meaning) in rows.items():
        assert all((values, default, meaning)), key


def test_the_values_of_a_key_are_a_type_a_range_or_names(rows):
    values = {key: value for key, (_, value, *_) in rows.items()}
    assert values["data.dataset_options"] == "section"
    assert values["model.n_init"] == "integer 1 to 10,000 or `auto`"
    assert values["stop.tol"] == "number ≥ 0 or `auto`, `statistical`"
    assert values["checkpoint.path"] == "a path"


def test_names_to_choose_from_are_listed(rows):
    for name in STRUCTURES:
        assert f"`{name}`" in rows["model.covariance_type"][1]
    for name in ALGORITHMS:
        assert f"`{name}`" in rows["algorithm.name"][1]


def test_a_key_without_a_meaning_is_noticed():
    class Undocumented(RunConfig):
        pass

    with pytest.raises(LookupError, match="stop of Undocumented"):
        draw.meaning_of(Undocumented, "stop")
