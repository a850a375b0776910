"""The command line, in this process."""

import inspect

from click.testing import CliRunner

from emtau_dask.cli.main import main

SEPARATE = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
"""What click before 8.2 is asked for so that results have a ``stderr``."""


def emtau(*arguments):
    return CliRunner(**SEPARATE).invoke(main, [str(argument) for argument in arguments])
