"""The codec of checkpoints: names on disk, the same values back, and what is refused."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Literal

import numpy as np
import pytest

from emtau_dask.checkpoint.codec import MAX_COUNT, Codec, FormatError
from emtau_dask.checkpoint.manifest import (
    NOT_FINITE,
    Attempt,
    ChunkDigests,
    Content,
    Manifest,
    SourceEntry,
    array_layouts,
)
from emtau_dask.checkpoint.state import CONTENT, MANIFEST, Frame
from emtau_dask.data.row_random import Samples
from emtau_dask.em.acceleration import EvaluatedPoint, Kind, Pair, Proposal, QuasiNewtonState
from emtau_dask.em.history import IterationRecord
from emtau_dask.em.moments import FrozenMoments
from emtau_dask.em.settings import Acceleration, EmSettings
from emtau_dask.em.starts import GivenParameters
from emtau_dask.em.state import Cycle, FitState, KMeansProgress, Progress, RunState
from emtau_dask.em.sums import FrozenStatistics
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import SufficientStatistics
from emtau_dask.policies.tau import EMTau
from emtau_dask.settings import Settings
from emtau_dask.storage.row_state import RowFields, RowStateRef, StateObject

K, D = 2, 3
ATTEMPT = f"0-{'a' * 32}"
RNG = np.random.default_rng(0)
CONFIG = EmSettings(
    Settings(K, "diag", EMTau(tau=3), max_iter=9, n_init=2), EMTau(tau=3), 0.0, 1e-9,
    Acceleration(2, Samples(5, (0.25, 0.5)), True), (1, 2), -1.5,
)  # fmt: skip
SOURCE = SourceEntry((50, D), "<f8", ((20, 2), (10, 1)))
MADE = Manifest(
    CONFIG, ("a", "b", "c"), {"data": {"path": "x"}}, SOURCE, SOURCE, None, "b" * 32, 7, ATTEMPT,
    (Attempt(ATTEMPT, ("active", "label"), ("bool", "uint8"), 50, ("label",)),), {"numpy": "2"},
    "2026-01-01T00:00:00+00:00",
)  # fmt: skip


def vector():
    return RNG.normal(size=K + 2 * K * D)


def parameters():
    weights, means, variances = np.array([0.25, 0.75]), RNG.normal(size=(K, D)), RNG.uniform(1, 2, (K, D))
    return MixtureParameters("diag", weights, means, variances, 1 / np.sqrt(variances))


def quasi_newton():
    point = EvaluatedPoint(parameters(), -1.25, vector(), vector())
    pairs = (Pair(vector(), vector()), Pair(vector(), vector()))
    return QuasiNewtonState(means(), pairs, point, Proposal(vector(), Kind.EXTRAPOLATED, 0.5, math.nan), 2.5)


def means():
    return RNG.normal(size=(K, D))


def content():
    """All that a commit may say."""
    cycle = Cycle(replace(quasi_newton(), radius=math.inf), FrozenMoments(means(), vector(), 0.5), math.nan)
    record = IterationRecord(1, -1.5, 50, True, 3, 0, 1200, 0.125, 50)
    stored = StateObject(
        f"attempts/{ATTEMPT}/rows/c.4.0.0.0",
        "c" * 64,
        RowFields(("active", "label"), ("bool", "uint8"), 50, ("label",)),
    )
    run = RunState(
        parameters(),
        -1.5,
        (record, replace(record, iteration=2, gap=1e-3, accepted=False)),
        FrozenStatistics(SufficientStatistics(np.array([3.0, 0.0]), means(), RNG.uniform(size=(K, D))), 0.25),
        1,
        False,
        {0: 20, 2: 4},
        {0: RowStateRef(stored, 0), 2: RowStateRef(stored, 20)},
        "max-iter",
        Progress(quasi_newton(), 1, 2, cycle, 0.5, 1, math.nan, 3, False, 1.5, True),
    )
    digests = RNG.integers(0, 255, (3, 16)).astype(np.uint8)
    return Content(
        GivenParameters(np.array([0.5, 0.5]), None, (means(), means())),
        FitState(1, KMeansProgress(means(), 0.5, 2), run, run, ("why",), False, ("a note",)),
        (ChunkDigests("X", "", digests),),
    )


class Kept:
    """The arrays of a commit in memory."""

    def __init__(self):
        self.arrays = []
        layouts = array_layouts(CONFIG, D, 3, "", 1)
        self.frame = Frame("diag", layouts, np.array([20, 20, 10]), MADE.attempts)

    def put(self, name, values):
        assert values.shape == self.frame.layouts[name].chunks[1:], name
        assert values.dtype == self.frame.layouts[name].dtype, name
        self.arrays.append(values)
        return f"array {len(self.arrays) - 1} of {name}"

    def get(self, name, plain):
        _, number, _, found = plain.split()
        assert found == name
        return self.arrays[int(number)]


def same(one, other):
    """Whether two records have the same values, bit for bit; NaN is NaN."""
    if is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one)
        )
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return repr(one) == repr(other)


def test_a_commit_comes_back_as_it_was():
    before, arrays = content(), Kept()
    plain = json.loads(json.dumps(CONTENT.encode(before, arrays), allow_nan=False))
    assert same(CONTENT.decode(plain, arrays), before)
    assert same(MANIFEST.decode(json.loads(json.dumps(MANIFEST.encode(MADE, arrays))), arrays), MADE)


def names(plain):
    """The names in JSON, as a text: those in an object, with what is below in brackets."""
    if isinstance(plain, dict):
        return " ".join(f"{name}{below and f'({below})'}" for name in plain for below in [names(plain[name])])
    if isinstance(plain, list):
        return names(plain[0]) if plain else ""
    return plain.split()[-1].join("<>") if str(plain).startswith("array ") else ""


ARRAYS = (
    "weights(<weights>) means(<means>) covariances(<covariances>) precisions_cholesky(<precisions_cholesky>)"
)
ASCENT = (
    f"origins pairs(step decrease) point(parameters({ARRAYS}) objective moments response) "
    "trial(moments kind length predicted_gain) radius"
)
RUN = (
    f"parameters({ARRAYS}) bound frozen(statistics(frozen_weights(<frozen_weights>) "
    "frozen_means(<frozen_means>) frozen_scatter(<frozen_scatter>)) entropy) stop_reason "
    f"progress(ascent({ASCENT}) cycle(outer({ASCENT}) held(origins moments entropy) gap) damping chosen "
    "failed_cycles uncertainty gap_margin gap_of_all_rows sample sample_began annealed_passes_left) "
    "since_full_pass full_pass_next "
    "history(iteration lower_bound active_rows full_pass chunks_processed chunks_skipped bytes_read seconds "
    "rows accepted gap repeated) chunks(<chunks>) digests(<digests>) "
    "origins(<origins>) moments(<moments>)"
)


def test_the_names_on_disk_are_those_of_the_format():
    """Where this fails, the format is another: `VERSION` in `storage.commits` rises, and its page changes."""
    assert names(MANIFEST.encode(MADE, Kept())) == (
        "config(tol gap_tol acceleration(memory samples(seed shares) annealed) seeds previous_bound "
        "settings(n_components covariance_type algorithm(name kind params(revisit tau)) tol reg_covar "
        "max_iter n_init init_params random_state warm_start checkpoint_every acceleration missing) "
        "algorithm(name kind params(revisit tau))) feature_names run_config(data(path)) "
        "data(shape dtype chunks) sample_weight(shape dtype chunks) responsibilities_init "
        "run number attempt attempts(id fields dtypes object_rows kept) environment(numpy) written"
    )
    assert names(CONTENT.encode(content(), Kept())) == (
        "given(weights(<weights>) means precisions(<precisions>)) fit(run start(centres(<centres>) tolerance "
        f"passes) current({RUN}) best({RUN}) left_out finished notes) "
        "contents(source made_on contents(<contents>))"
    )
    assert [kind.value for kind in Kind] == ["given", "plain", "extrapolated", "cycle"]


def test_values_that_may_not_be_finite_are_of_fields_that_there_are():
    """Else a state with NaN could not be committed."""
    assert all(name in {field.name for field in fields(record)} for record, name in NOT_FINITE)


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    n: int


@dataclass(frozen=True)
class Record:
    flag: bool = True
    count: int = 1
    number: float = 0.5
    gap: float = math.nan
    text: str = "a"
    one: Literal["x", "y"] = "x"
    colour: Colour = Colour.RED
    pair: tuple[int, str] = (1, "b")
    many: tuple[float, ...] = (1.0, 2.0)
    rows: tuple[Inner, ...] = (Inner(1), Inner(2))
    inner: Inner | None = None
    by_name: Mapping[str, int] = None
    anything: dict[str, Any] = None


RECORD = Codec(
    not_finite={(Record, "gap"): math.nan}, by_column=frozenset({Inner}), names={Inner: {"n": "count"}}
).record(Record)
EXAMPLE = Record(by_name={"c": 3}, anything={"list": [1, None, {"deep": "text"}]})
PLAIN = RECORD.encode(EXAMPLE, None)


def nested(depth):
    return json.loads('{"x":' * depth + "1" + "}" * depth)


WRONG = {
    "flag": [1, None, "true"],
    "count": [-1, MAX_COUNT + 1, 10**400, 1.0, True, "1", None],
    "number": ["nan", math.nan, math.inf, -math.inf, 10**400, None, True, [0.5]],
    "gap": ["nan", math.nan, math.inf],
    "text": [1, None, "\ud800", ["a"]],
    "one": ["z", None, ["x"], {}],
    "colour": ["RED", "os.system", 1, []],
    "pair": [[1], [1, "b", 2], ["b", 1], {"0": 1}, "1b"],
    "many": [{}, None, ["a"], "12"],
    "inner": [[], 1, {}, {"n": 1}, {"count": 1, "more": 1}],
    "by_name": [[], {"c": "3"}, {"\ud800": 1}, None],
    "anything": [nested(40), {"x": math.nan}, {"x": 10**400}, {"x": "\ud800"}, [1]],
    "rows": [[{"count": 1}], {"count": 1}, {}, {"count": [1], "more": [1]}, {"count": [-1]}],
}


def test_values_of_all_kinds_come_back_and_nan_is_null():
    assert PLAIN["gap"] is None
    assert PLAIN["rows"] == {"count": [1, 2]}
    assert same(RECORD.decode(json.loads(json.dumps(PLAIN, allow_nan=False)), None), EXAMPLE)
    assert RECORD.decode(PLAIN | {"number": 3}, None).number == 3.0


@pytest.mark.parametrize("field", WRONG)
def test_what_is_not_of_the_annotated_type_is_refused_by_name(field):
    for value in WRONG[field]:
        with pytest.raises(FormatError, match=rf"^{field}.* (is|has) .*") as caught:
            RECORD.decode(PLAIN | {field: value}, None)
        assert len(str(caught.value)) < 300
        assert str(caught.value).isprintable()


def test_a_field_that_is_missing_or_unknown_is_named():
    with pytest.raises(FormatError, match=r"^text is missing$"):
        RECORD.decode({name: value for name, value in PLAIN.items() if name != "text"}, None)
    with pytest.raises(FormatError, match=r"^extra is 5: there is no such field$"):
        RECORD.decode(PLAIN | {"extra": 5}, None)
    with pytest.raises(FormatError, match=r"^it is 5: it must be an object$"):
        RECORD.decode(5, None)


@pytest.mark.parametrize("field", ["count", "number", "text", "one", "colour"])
def test_what_could_not_be_read_is_not_written(field):
    for value in WRONG[field]:
        with pytest.raises(FormatError, match=rf"^{field} is "):
            RECORD.encode(replace(EXAMPLE, **{field: value}), None)


@pytest.mark.parametrize(
    "place", [("progress", "ascent", "trial", "moments"), ("progress", "ascent", "origins")]
)
@pytest.mark.parametrize("number", [-1, 100, 2**60, True, 0.0, "0", {"key": "x"}])
def test_a_row_that_is_not_there_is_refused(place, number):
    arrays = Kept()
    plain = json.loads(json.dumps(CONTENT.encode(content(), arrays)))
    *holders, last = ("fit", "current", *place)
    holder = plain
    for name in holders:
        holder = holder[name]
    holder[last] = number
    with pytest.raises(FormatError, match=rf"^fit\.current\.{'.'.join(place)} is "):
        CONTENT.decode(plain, arrays)
