"""An S3 server (moto) that can be told to hold a request, in a container of its own.

    python held_s3.py PORT BUCKET FOLDER

While FOLDER has a file ``hold``, a PUT whose path contains what the file says is held:
before it is carried out, or after, where the file's second line says ``after``. The file ``held`` then says
which, and the request goes on once ``hold`` is gone. FOLDER/commits gets a file for each commit stored.
"""

import re
import sys
import time
from pathlib import Path
from threading import Thread
from urllib.request import Request, urlopen

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple


def held_back(application, folder):
    """Return a WSGI application that holds what it is told to."""
    commits = folder / "commits"
    commits.mkdir(exist_ok=True)

    def wait(path, moment):
        try:
            wanted, _, which = (folder / "hold").read_text().partition("\n")
        except FileNotFoundError:
            return
        if wanted in path and moment == (which.strip() or "before"):
            (folder / "held").write_text(path)
            while (folder / "hold").exists():
                time.sleep(0.05)

    def answer(environ, start_response):
        path, put = environ["PATH_INFO"], environ["REQUEST_METHOD"] == "PUT"
        if put:
            wait(path, "before")
        body = application(environ, start_response)
        if put:
            if found := re.search(r"/commits/(\d+)/zarr\.json$", path):
                (commits / found[1]).touch()
            wait(path, "after")
        return body

    return answer


def main():
    """Serve until killed."""
    port, bucket, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

    def make_bucket():
        while True:
            try:
                urlopen(Request(f"http://127.0.0.1:{port}/{bucket}", method="PUT"), timeout=5).close()
            except OSError:
                time.sleep(0.1)
            else:
                (folder / "ready").touch()
                return

    Thread(target=make_bucket, daemon=True).start()
    application = held_back(DomainDispatcherApplication(create_backend_app), folder)
    run_simple("0.0.0.0", port, application, threaded=True)


if __name__ == "__main__":
    main()
