"""The code blocks of README and documentation, and how each language is run."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from emtau_dask.cli.config import load_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WRITTEN = ("_build", "api")
"""Folders of documentation that Sphinx writes."""
PAGES = (
    ROOT / "README.md",
    *sorted(page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in WRITTEN),
)
STORIES = {DOCS / "stories" / f"{name}.md" for name in ("cells", "icechunk", "land-cover")}
"""Pages that need the extra `stories`."""
FENCE = re.compile(r"^```(.*)$")
REASON = re.compile(r"^<!-- not run: (.+) -->$")
DIRECTIVE = re.compile(r"^\{[a-z-]+\}")
"""Of Sphinx, such as a table of contents; it is no code."""
MOST_SECONDS = 300
"""After which a block of shell counts as one that never ends."""
NAME = re.compile(r"^# (\S+\.yaml)$")


def script(name):
    """A script of the documentation, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its first line in the page, and why it is not run, if so."""

    page: Path
    line: int
    language: str
    code: str
    reason: str | None

    def __str__(self):
        return f"{self.page.name}:{self.line} ({self.language})"


def blocks_of(page):
    """The blocks of a page in order, but for directives."""
    found, opened, reason = [], None, None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None:
            if fence:
                opened, code = (number + 1, fence[1]), []
            else:
                marked = REASON.match(line)
                reason = marked[1] if marked else None
        elif fence:
            if not DIRECTIVE.match(opened[1]):
                found.append(Block(page, *opened, "\n".join(code) + "\n", reason))
            opened = reason = None
        else:
            code.append(line)
    assert opened is None, f"{page}: a block is not closed"
    return found


class Reader:
    """Somebody who does what a page says, in a folder of their own with the tools of this environment."""

    def __init__(self, folder):
        self.folder = folder
        self.module = ModuleType("page")

    def run(self, block):
        getattr(self, f"_{block.language}")(block)

    def _bash(self, block):
        """Any command that fails ends the block."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        command = ["bash", "-euo", "pipefail", "-c", block.code]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            errors += f"\nstill running after {MOST_SECONDS} s"
        assert process.returncode == 0, f"{block}\n{output[-2000:]}\n{errors[-2000:]}"

    def _python(self, block):
        """The names of earlier blocks of the page are there, as in a notebook; no block warns."""
        code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            # Tests run side by side, and a cluster of another one may have dask's port.
            warnings.filterwarnings("ignore", "Port 8787 is already in use")
            # AnnData and xarray write it in every store.
            warnings.filterwarnings("ignore", "Consolidated metadata is currently not part")
            exec(code, vars(self.module))

    def _yaml(self, block):
        """A config, stored under the name in its first line."""
        name = NAME.match(block.code.partition("\n")[0])
        assert name, f"{block}: the first line must name the file, as in '# fit.yaml'"
        path = self.folder / name[1]
        path.write_text(block.code, encoding="utf-8")
        load_config(path, [])
