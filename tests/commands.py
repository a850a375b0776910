"""The command line, in this process."""

from click.testing import CliRunner

from emtau_dask.cli.main import main


def emtau(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])
