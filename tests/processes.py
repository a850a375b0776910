"""Other processes, which live as long as a test wants them to."""

import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def process_of(program, *arguments):
    """A Python process with pipes for its input and its output, killed at the end."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()
