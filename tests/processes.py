"""Other processes, which live as long as a test wants them to."""

import multiprocessing
import socket
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

EMTAU = [sys.executable, "-c", "from emtau_dask.cli.main import main; main()"]
"""The command line in a process of its own, for what is about signals, streams or imports."""


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


def free_port():
    """A port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


KILLED_IN_ITERATION_3 = """
import os, signal, sys
from emtau_dask.checkpoint.writer import CheckpointStateStore
save = CheckpointStateStore.save
def counted(self, state, *, commit):
    save(self, state, commit=commit)
    if state.current is not None and state.current.iteration == 3:
        os.kill(os.getpid(), signal.SIGKILL)
CheckpointStateStore.save = counted
"""
"""The beginning of a program whose fit with a checkpoint is killed once iteration 3 is saved."""
