"""The examples run."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example, tmp_path):
    command = [sys.executable, "-W", "error::UserWarning", str(example), "20000"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
