"""Clusters that ask for certificates: those that containers/certificates.sh makes open them, no others."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import LocalCluster, Security

from emtau_dask import ClusterError
from emtau_dask.cli.cluster import computing
from emtau_dask.cli.config import RunConfig, checked_config
from emtau_dask.em.history import SilentObserver

pytestmark = pytest.mark.cluster
SCRIPT = Path(__file__).parents[2] / "containers" / "certificates.sh"


def make(folder: Path, *options: str, days: int = 365) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    surroundings = {**os.environ, "EMTAU_CERTIFICATES": str(folder), "EMTAU_CERTIFICATE_DAYS": str(days)}
    return subprocess.run([SCRIPT, *options], env=surroundings, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    result = make(folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def address(certificates: Path) -> Iterator[str]:
    ca, cert, key = (str(certificates / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    security = Security(
        tls_ca_file=ca,
        tls_scheduler_cert=cert,
        tls_scheduler_key=key,
        tls_worker_cert=cert,
        tls_worker_key=key,
        tls_client_cert=cert,
        tls_client_key=key,
        require_encryption=True,
    )
    with LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=False,
        protocol="tls",
        host="127.0.0.1",
        security=security,
        dashboard_address=None,
    ) as cluster:
        yield str(cluster.scheduler_address)


def config(scheduler: str, folder: Path | None = None, **files: str) -> RunConfig:
    cluster: dict[str, object] = {"scheduler": scheduler}
    if folder is not None:
        names = {"ca_file": "ca.pem", "cert": "cert.pem", "key": "key.pem", **files}
        cluster["tls"] = {name: str(folder / file) for name, file in names.items()}
    return checked_config(
        {
            "data": {"dataset": "digits"},
            "model": {"n_components": 2},
            "output": {"directory": "nothing-is-written"},
            "cluster": cluster,
        }
    )


def refused(run_config: RunConfig) -> str:
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "3s"}),
        pytest.raises(ClusterError) as caught,
        computing(run_config.cluster, SilentObserver()),
    ):
        pass
    return str(caught.value)


def test_nobody_else_can_read_them_and_the_key_of_the_authority_is_gone(certificates: Path) -> None:
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in certificates.iterdir()}
    assert files == dict.fromkeys(["ca.pem", "cert.pem", "key.pem"], 0o400)


def test_they_are_replaced_on_demand_alone(tmp_path: Path) -> None:
    make(tmp_path)
    first = (tmp_path / "key.pem").read_bytes()
    assert make(tmp_path).returncode == 0
    assert (tmp_path / "key.pem").read_bytes() == first
    assert make(tmp_path, "--renew").returncode == 0
    assert (tmp_path / "key.pem").read_bytes() != first


def test_one_that_ends_within_a_day_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    result = make(tmp_path, days=1)
    assert result.returncode == 1
    assert "--renew" in result.stderr


def test_who_has_the_certificate_comes_in(address: str, certificates: Path) -> None:
    with computing(config(address, certificates).cluster, SilentObserver()):
        assert dask.delayed(sum)([1, 2]).compute() == 3


def test_who_has_none_is_told_what_to_set(address: str) -> None:
    said = refused(config(address))
    assert "cluster.tls" in said
    assert "DASK_DISTRIBUTED__COMM__TLS__CA_FILE" in said


def test_the_certificate_of_another_authority_is_refused(address: str, tmp_path: Path) -> None:
    make(tmp_path)
    assert "authority" in refused(config(address, tmp_path))


def test_plain_tcp_is_refused(address: str) -> None:
    assert "tls://" in refused(config(address.replace("tls://", "tcp://")))


def test_plain_tcp_where_dask_requires_encryption_is_an_error_of_ours(address: str) -> None:
    with dask.config.set({"distributed.comm.require-encryption": True}):
        assert "encryption" in refused(config(address.replace("tls://", "tcp://")))


def test_a_file_that_is_not_there_is_named(address: str, certificates: Path) -> None:
    assert str(certificates / "nothing.pem") in refused(config(address, certificates, cert="nothing.pem"))


def test_a_key_of_another_certificate_is_refused(address: str, certificates: Path, tmp_path: Path) -> None:
    make(tmp_path)
    other = str(tmp_path / "key.pem")
    assert other in refused(config(address, certificates, key=other))
