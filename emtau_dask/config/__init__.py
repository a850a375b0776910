"""Run configs: what a YAML file may say, checked before any work starts."""

from emtau_dask.config.algorithms import KMeansSettings, PublishedFigures, algorithm_of, policy_of
from emtau_dask.config.data import (
    DataSection,
    DatasetOptions,
    DigitsOptions,
    Example1Options,
    MixtureOptions,
    MnistOptions,
)
from emtau_dask.config.resuming import override_keys, portable, resumed_config
from emtau_dask.config.saving import ENDINGS, save_config
from emtau_dask.config.schema import (
    ClusterSection,
    OutputSection,
    RunConfig,
    checked_config,
    complete_values,
    config_values,
    load_config,
)
from emtau_dask.config.yaml import in_yaml, parse_yaml, to_yaml

__all__ = [
    "ENDINGS",
    "ClusterSection",
    "DataSection",
    "DatasetOptions",
    "DigitsOptions",
    "Example1Options",
    "KMeansSettings",
    "MixtureOptions",
    "MnistOptions",
    "OutputSection",
    "PublishedFigures",
    "RunConfig",
    "algorithm_of",
    "checked_config",
    "complete_values",
    "config_values",
    "in_yaml",
    "load_config",
    "override_keys",
    "parse_yaml",
    "policy_of",
    "portable",
    "resumed_config",
    "save_config",
    "to_yaml",
]
