"""Processes that cost a fork, not the seconds that the package's imports take.

A `Zygote` is a process that has imported everything and started no thread; on
request it forks a child that runs one function, whose result comes back through
a pipe. A child that is killed closes its pipe without a result.
"""

import array
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[1]
PATIENCE = 300.0


class HangError(AssertionError):
    """A child did not end in `PATIENCE` seconds."""


@dataclass
class Child:
    """A process, and the pipe through which its result comes."""

    pid: int
    pipe: int
    received: bytearray = field(default_factory=bytearray)

    def result(self, patience=PATIENCE):
        """Wait for its end; return what its function returned, None where it was killed."""
        while True:
            if not select.select([self.pipe], [], [], patience)[0]:
                self.kill()
                raise HangError(f"process {self.pid} has not ended in {patience} s")
            data = os.read(self.pipe, 2**16)
            if not data:
                break
            self.received += data
        os.close(self.pipe)
        self.pipe = -1
        if not self.received:
            return None
        failure, value = pickle.loads(self.received)
        if failure is not None:
            raise AssertionError(f"the child process failed:\n{failure}")
        return value

    def signal(self, number):
        """Send a signal; False where it has ended."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def kill(self):
        return self.signal(signal.SIGKILL)

    @property
    def ended(self):
        """Whether its pipe is closed or holds its result."""
        return bool(select.select([self.pipe], [], [], 0)[0])

    @property
    def stopped(self):
        """Whether SIGSTOP has stopped it."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except FileNotFoundError:
            return False
        return status.rpartition(")")[2].split()[0] in "Tt"


class Zygote:
    """Starts children; to be used as a context manager, by several threads too.

    Parameters
    ----------
    module : str
        What it imports, so that children find it imported.
    """

    def __init__(self, module):
        self.module = module
        here, there = socket.socketpair()
        self._socket, self._lock = here, threading.Lock()
        environment = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",
            # Other allocators of pyarrow's take address space by the gigabyte.
            "ARROW_DEFAULT_MEMORY_POOL": "system",
        }
        environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "reliability.zygote", module, str(there.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment)
        there.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._socket.close()
        self._process.wait()

    def start(self, function, *arguments):
        """Fork a child that runs ``function``, which must be of a module, with ``arguments``."""
        request = pickle.dumps((function, arguments))
        reading, writing = os.pipe()
        with self._lock:
            ends = array.array("i", [writing])
            header = struct.pack("!Q", len(request))
            self._socket.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ends)])
            self._socket.sendall(request)
            (pid,) = struct.unpack("!q", _exactly(self._socket, 8))
        os.close(writing)
        return Child(pid, reading)

    def run(self, function, *arguments):
        """Fork a child and wait for what its function returns; None where it was killed."""
        return self.start(function, *arguments).result()


def _exactly(connection, size):
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the zygote has ended")
        data += part
    return bytes(data)


def _serve(module, connection):
    importlib.import_module(module)
    assert threading.active_count() == 1, threading.enumerate()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        header, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(4))
        if not header:
            return
        (pipe,) = array.array("i", ancillary[0][2])
        size = struct.unpack("!Q", header)[0]
        request = _exactly(connection, size)
        pid = os.fork()
        if pid == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(request, pipe)
        os.close(pipe)
        connection.sendall(struct.pack("!q", pid))


def _run(request, pipe):
    try:
        function, arguments = pickle.loads(request)
        answer = None, function(*arguments)
    except BaseException:
        answer = traceback.format_exc(), None
    with os.fdopen(pipe, "wb") as file:
        file.write(pickle.dumps(answer))
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
