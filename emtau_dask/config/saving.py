"""A run config as a file that `load_config` reads."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emtau_dask.config.yaml import to_yaml
from emtau_dask.errors import ConfigError, EmtauError
from emtau_dask.io.files import writing_errors
from emtau_dask.messages import masked_values

ENDINGS = (".yaml", ".yml")


def save_config(content: Mapping[str, Any], path: Path, *, overwrite: bool) -> None:
    """Write the plain values of a config to a YAML file, whole; a file that holds the same may be there.

    Raises
    ------
    ConfigError
        The name does not end as that of a config, or the values hold the password or the query of a URL.
    EmtauError
        Another file is there and ``overwrite`` is not set, or nothing can be written there.
    """
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(
            f"{path} must end in {' or '.join(ENDINGS)}, so that emtau fit takes it for a config"
        )
    if masked_values(content) != content:
        raise ConfigError(
            f"{path} would hold a secret: the user, password or query of a URL. Give credentials by the "
            "environment, or save no config"
        )
    text = to_yaml(content)
    with writing_errors("the config", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not overwrite and path.read_bytes() != text.encode():
            raise EmtauError(f"{path} already exists; use --overwrite to replace it, or choose another name")
        with tempfile.TemporaryDirectory(prefix=".emtau-", dir=path.parent) as folder:
            private = Path(folder) / path.name
            private.write_text(text, encoding="utf-8")
            private.replace(path)
