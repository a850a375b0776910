"""Small disks that can be filled up."""

import errno
import os
import resource
import subprocess
from contextlib import contextmanager


class SmallDisk:
    """A file system of its own where one can be mounted; elsewhere a folder.

    Attributes
    ----------
    folder : Path
    real : bool
        Whether it was mounted.
    """

    def __init__(self, folder, options="size=1m"):
        self.folder = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        self.real = subprocess.run(command, capture_output=True, check=False).returncode == 0

    def remount(self, options):
        if self.real:
            subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True)

    @contextmanager
    def full(self, room=0):
        """Let only ``room`` more bytes be written inside the block; gives the number of the error.

        Where there is no file system of its own, that is a limit to the size of every file of this process.
        """
        if not self.real:
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
            try:
                yield errno.EFBIG
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            return
        filler = self.folder / "filler"
        about = os.statvfs(self.folder)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(about.f_bavail * about.f_frsize - room, 1))
        try:
            yield errno.ENOSPC
        finally:
            filler.unlink()

    def close(self):
        if self.real:
            subprocess.run(["umount", str(self.folder)], check=True)
