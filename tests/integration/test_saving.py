"""Saving a model where it cannot be written: our own error, nothing left behind, and the next save works."""

import errno
import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zarr
from disks import SmallDisk
from reliability.boundaries import At
from reliability.campaigns import FULL, READ_ONLY, spread
from reliability.savings import MODEL, bits, save
from reliability.zygote import Zygote

from emtau_dask import GaussianMixture, InvalidDataError, StorageError

pytest_plugins = "s3server"


@pytest.fixture
def disk(tmp_path):
    made = SmallDisk(tmp_path / "disk")
    yield made
    made.close()


@pytest.fixture(scope="module")
def zygote():
    with Zygote("reliability.savings") as found:
        yield found


def assert_saved(path, model=MODEL):
    assert bits(GaussianMixture.load(path)) == bits(model)


@pytest.mark.parametrize("room", [0, 2**12, 2**16])
def test_a_full_disk(disk, room):
    path = disk.folder / "model.zarr"
    large = GaussianMixture(4, random_state=0, tol=10.0, init_params="random_from_data")
    large.fit(np.random.default_rng(0).normal(size=(2000, 100)))
    with disk.full(room) as number, pytest.raises(StorageError) as failed:
        large.save(path)
    message = str(failed.value)
    assert str(path) in message
    assert os.strerror(number) in message
    if disk.real:
        assert re.search(r"\d \w*B free", message)
    assert list(disk.folder.iterdir()) == []
    large.save(path)
    assert_saved(path, large)


@pytest.mark.kills
@pytest.mark.parametrize("wanted", [4, pytest.param(10**6, marks=pytest.mark.soak)], ids=["some", "every"])
@pytest.mark.parametrize("fault", [FULL, READ_ONLY], ids=["full", "read-only"])
def test_every_step_fails(zygote, tmp_path, fault, wanted):
    """On a disk from which nothing can be removed either, something is left, which is in nobody's way."""
    kinds, _, steps = zygote.run(save, tmp_path / "undisturbed.zarr")
    assert not kinds
    for step in spread(steps, wanted):
        folder = tmp_path / f"at-{step}"
        folder.mkdir()
        path = folder / "model.zarr"
        at = At(step, error=fault.error, refused=fault.refused)
        kinds, message, _ = zygote.run(save, path, at)
        if not kinds:
            assert_saved(path)
            continue
        assert os.strerror(fault.error) in message, step
        assert str(folder) in message, step
        assert not path.exists(), step
        if fault is FULL:
            assert list(folder.iterdir()) == [], step
        assert zygote.run(save, path)[0] == [], step
        assert_saved(path)


def is_put(method, path):
    return method == "PUT"


def changes(method, path):
    return method in ("PUT", "POST", "DELETE")


def assert_uploaded(s3, folder, model=MODEL):
    s3.files.get(f"{s3.bucket}/model.zarr", str(folder / "model.zarr"), recursive=True)
    assert_saved(folder / "model.zarr", model)


def puts_of_a_save(s3):
    MODEL.save(s3.url("undisturbed.zarr"))
    puts = [path for method, path in s3.proxy.requests if method == "PUT"]
    assert puts[-1].endswith("undisturbed.zarr/zarr.json")
    s3.proxy.reset()
    return len(puts)


@pytest.mark.kills
def test_an_object_store_that_refuses_a_write(s3, tmp_path):
    """The first, one in between, the last; those that went well before are removed."""
    total = puts_of_a_save(s3)
    for after in (0, total // 2, total - 1):
        s3.proxy.fail("403", match=is_put, after=after, times=1)
        with pytest.raises(StorageError, match=r"model\.zarr .*Access is denied"):
            MODEL.save(s3.url("model.zarr"))
        assert not s3.files.find(f"{s3.bucket}/model.zarr"), after
        s3.proxy.reset()
    MODEL.save(s3.url("model.zarr"))
    assert_uploaded(s3, tmp_path)


def test_a_model_in_an_object_store_is_replaced_on_request(s3, tmp_path):
    MODEL.save(s3.url("model.zarr"))
    other = GaussianMixture(3, random_state=1, tol=10.0).fit(np.random.default_rng(1).normal(size=(200, 2)))
    with pytest.raises(InvalidDataError, match="overwrite=True"):
        other.save(s3.url("model.zarr"))
    other.save(s3.url("model.zarr"), overwrite=True)
    assert_uploaded(s3, tmp_path, other)


def test_a_save_that_is_torn_is_no_model(s3):
    """As if the process had been killed: nothing that was written can be removed."""
    s3.proxy.fail("403", match=changes, after=puts_of_a_save(s3) - 1)
    with pytest.raises(StorageError):
        MODEL.save(s3.url("model.zarr"))
    s3.proxy.reset()
    assert s3.files.find(f"{s3.bucket}/model.zarr")
    assert not s3.files.exists(f"{s3.bucket}/model.zarr/zarr.json")
    with pytest.raises(InvalidDataError, match="already holds"):
        MODEL.save(s3.url("model.zarr"))


def test_of_two_saves_to_one_url_one_wins(s3, tmp_path):
    other = GaussianMixture(3, random_state=0, tol=1e-3).fit(np.random.default_rng(1).normal(size=(60, 2)))

    def attempt(model):
        try:
            model.save(s3.url("model.zarr"))
        except InvalidDataError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        won = list(pool.map(attempt, [MODEL, other]))
    assert sum(won) == 1
    assert_uploaded(s3, tmp_path, MODEL if won[0] else other)


def test_a_local_store_of_zarr(tmp_path):
    store = zarr.storage.LocalStore(tmp_path / "model.zarr")
    MODEL.save(store)
    assert_saved(store)
    with pytest.raises(InvalidDataError, match="already holds"):
        MODEL.save(store)


def test_a_zip_file(tmp_path):
    with zarr.storage.ZipStore(tmp_path / "model.zip", mode="w") as store:
        MODEL.save(store)
    with zarr.storage.ZipStore(tmp_path / "model.zip", mode="r") as store:
        assert_saved(store)


def test_a_store_that_fails(monkeypatch):
    """A mock: the store of zarr raises at one write, each in turn."""
    plain, written = zarr.storage.MemoryStore.set, []

    async def failing(self, key, value, byte_range=None):
        if self is target:
            written.append(key)
            if len(written) == step:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return await plain(self, key, value, byte_range)

    monkeypatch.setattr(zarr.storage.MemoryStore, "set", failing)
    target, step = zarr.storage.MemoryStore(), 0
    MODEL.save(target)
    for step in range(1, len(written) + 1):  # noqa: B007
        target = zarr.storage.MemoryStore()
        written.clear()
        with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
            MODEL.save(target)
        assert not target._store_dict
    target, step = zarr.storage.MemoryStore(), 0
    MODEL.save(target)
    assert_saved(target)
