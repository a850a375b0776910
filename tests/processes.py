"""Other processes, which live as long as a test wants them to."""

import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
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


def pool_of_two():
    """A pool for dask's processes, which it would otherwise start anew for each pass."""
    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
