"""The command line, in this process."""

import inspect
from types import SimpleNamespace

from click.testing import CliRunner

from emtau_dask.cli.main import main

BEFORE_82 = "mix_stderr" in inspect.signature(CliRunner).parameters
"""Whether click is older than 8.2, whose results have both streams, each apart and both as ``output``."""


def emtau(*arguments):
    command = [str(argument) for argument in arguments]
    if not BEFORE_82:
        return CliRunner().invoke(main, command)
    result = CliRunner(mix_stderr=False).invoke(main, command)
    return SimpleNamespace(
        exit_code=result.exit_code,
        exception=result.exception,
        stdout=result.stdout,
        stderr=result.stderr,
        output=result.stderr + result.stdout,
    )
