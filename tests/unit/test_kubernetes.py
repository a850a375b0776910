"""kubernetes.yaml: its fit finds its cluster; all of it has one image and one place of data."""

from pathlib import Path

import yaml
from commands import emtau
from dask.utils import parse_bytes

CLUSTER, JOB = yaml.safe_load_all((Path(__file__).parents[2] / "kubernetes.yaml").read_text(encoding="utf-8"))
PODS = {name: CLUSTER["spec"][name]["spec"] for name in ("scheduler", "worker")}
PODS["fit"] = JOB["spec"]["template"]["spec"]
CONTAINERS = {name: pod["containers"][0] for name, pod in PODS.items()}


def test_all_run_one_image():
    assert {container["image"] for container in CONTAINERS.values()} == {"emtau_dask"}


def test_the_fit_asks_the_scheduler_of_the_cluster():
    """By the name that the operator gives its service, at the port of both."""
    name, (port, _) = CLUSTER["metadata"]["name"], CONTAINERS["scheduler"]["ports"]
    assert f"--scheduler=tcp://{name}-scheduler:{port['containerPort']}" in CONTAINERS["fit"]["args"]
    service = CLUSTER["spec"]["scheduler"]["service"]
    assert service["selector"]["dask.org/cluster-name"] == name
    assert service["ports"][0] == {"name": port["name"], "port": 8786, "targetPort": port["name"]}


def test_workers_and_the_fit_see_the_same_folder():
    assert PODS["worker"]["volumes"] == PODS["fit"]["volumes"]
    assert CONTAINERS["worker"]["volumeMounts"] == CONTAINERS["fit"]["volumeMounts"]


def test_dask_acts_before_the_kernel_does():
    args, resources = CONTAINERS["worker"]["args"], CONTAINERS["worker"]["resources"]
    assert parse_bytes(args[args.index("--memory-limit") + 1]) < parse_bytes(
        resources["limits"]["memory"] + "B"
    )
    assert args[args.index("--nthreads") + 1] == resources["limits"]["cpu"]


def test_the_command_is_one_that_exists():
    """It ends at data that are not there, and no sooner."""
    program, *arguments = CONTAINERS["fit"]["args"]
    assert program == "emtau"
    assert "/shared/points.zarr does not exist" in emtau(*arguments).output
