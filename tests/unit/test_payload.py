"""What is pickled once: how often, what it weighs, and that it comes out as it went in."""

import pickle

import cloudpickle
import numpy as np
import pytest

from emtau_dask.errors import CheckpointCorruptError, ClusterError, UnusableRowError
from emtau_dask.execution.graph import Payload, in_use, unpickled
from emtau_dask.mixture.covariance_types import STRUCTURES
from emtau_dask.process import software

PICKLED, UNPICKLED = [], []


class Digested:
    """Tells when it is pickled."""

    def __init__(self, arrays):
        self.arrays = arrays

    def __getstate__(self):
        PICKLED.append(self)
        return self.__dict__


class Untold:
    """Tells when it is unpickled."""

    def __setstate__(self, state):
        UNPICKLED.append(self)

    def __getstate__(self):
        return {"some": "state"}


class Unwilling:
    """Cannot be unpickled."""

    def __reduce__(self):
        return divmod, (1, 0)


@pytest.fixture(autouse=True)
def forgotten():
    PICKLED.clear()
    UNPICKLED.clear()


@pytest.fixture
def noted():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(50, 40))
    return Digested([values, np.asfortranarray(values), values[::2, ::3], np.arange(3.0)[:0], np.float32(2)])


def travelled(thing, buffers):
    """Send it as distributed does, with buffers apart, or as a pool of processes does."""
    if buffers == "within":
        return pickle.loads(cloudpickle.dumps(thing))
    apart = []
    message = cloudpickle.dumps(thing, protocol=5, buffer_callback=apart.append)
    return pickle.loads(message, buffers=[bytes(buffer.raw()) for buffer in apart])


def test_it_is_unpickled_when_it_is_asked_for():
    made = travelled(Payload.of(Untold()), "within")
    assert not UNPICKLED
    assert made.value is made.value
    assert len(UNPICKLED) == 1


def test_what_is_not_sealed_is_open(noted):
    assert unpickled(noted) is noted
    assert unpickled(Payload.of(3)) == 3


def test_what_cannot_be_unpickled_says_so():
    with pytest.raises(ClusterError, match=r"process .* cannot unpickle .*\(ZeroDivisionError: .*importable"):
        _ = Payload.of(Unwilling()).value


@pytest.mark.parametrize("buffers", ["apart", "within"])
def test_it_is_pickled_once_however_far_it_travels(noted, buffers):
    sealed = Payload.of(noted)
    for _ in range(3):
        sealed = travelled(sealed, buffers)
        for found, expected in zip(sealed.value.arrays, noted.arrays, strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
    assert len(PICKLED) == 1


def test_large_arrays_are_not_copied(noted):
    sealed = Payload.of(noted)
    noted.arrays[0][0, 0] = 17.0
    assert sealed.value.arrays[0][0, 0] == 17.0


def test_its_size_is_that_of_all_that_is_sent(noted):
    sealed = Payload.of(noted)
    assert sealed.nbytes == pytest.approx(len(pickle.dumps(noted)), rel=0.02)


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=list(STRUCTURES))
def test_a_covariance_structure_travels_by_name(structure):
    pickled = pickle.dumps(structure)
    assert pickle.loads(pickled) is structure
    assert len(pickled) < 100


def used(sealed, error):
    with in_use(sealed):
        raise error


THEIRS = software() | {"zarr": "2.99.9"}


@pytest.mark.parametrize("error", [AttributeError("no such thing"), CheckpointCorruptError("unreadable")])
def test_what_fails_with_other_versions_names_them(error):
    says = rf"process .* failed \({type(error).__name__}: {error}\).*zarr .*, the process that fits 2\.99\.9"
    with pytest.raises(ClusterError, match=says):
        used(Payload.of(3, made_with=THEIRS), error)


@pytest.mark.parametrize(
    ("made_with", "error"),
    [
        (THEIRS, UnusableRowError("row 3 contains NaN", 3)),
        (software(), AttributeError("no such thing")),
        (None, AttributeError("no such thing")),
    ],
)
def test_any_other_failure_stays_what_it_is(made_with, error):
    with pytest.raises(type(error)) as raised:
        used(Payload.of(3, made_with=made_with), error)
    assert raised.value is error


def test_another_version_of_this_package_opens_nothing():
    sealed = Payload.of(Untold(), made_with=software() | {"emtau_dask": "0.0.7"})
    UNPICKLED.clear()
    with pytest.raises(ClusterError, match=r"has emtau_dask .*, the process that fits 0\.0\.7.*same version"):
        _ = sealed.value
    assert UNPICKLED == []
