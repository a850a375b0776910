"""Fits of the command line that SIGTERM or Ctrl-C ends at every stage, on a machine with other work on it.

    python benchmarks/terminations.py                     # 300, of which every fifth begins as a user's does
    python benchmarks/terminations.py --tries 40 --seed 7

The others are forked from a process that has imported the package, and begin in milliseconds. Four of five
signals are SIGTERM. Prints tables by way of computing and by stage. Exits with 1 if a process was alive 30 s
after its signal, if it ended otherwise than with exit code 130 and a word on how to go on, or if the run that
it left did not end with the bits of an undisturbed one.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reliability.terminations import INTERRUPTED, STAGES, WAYS, bits, make_rows, terminated, undisturbed
from reliability.zygote import Zygote

REAL, CLUSTERS = 0.2, 0.1
"""Shares of tries that begin as a user's, and that have a local cluster."""


@dataclass(frozen=True)
class Try:
    """A fit to be ended."""

    way: str
    stage: str
    number: signal.Signals
    delay: float
    real: bool

    @classmethod
    def drawn(cls, place: int, seed: int) -> Try:
        chance = random.Random(f"{seed} {place}")
        others = [way for way in WAYS if way != "cluster"]
        way = "cluster" if chance.random() < CLUSTERS else chance.choice(others)
        stage = list(STAGES)[place % len(STAGES)]
        number = signal.SIGTERM if chance.random() < 0.8 else signal.SIGINT
        return cls(way, stage, number, chance.random() * STAGES[stage][1], chance.random() < REAL)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processes busy beside the block."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def tried(one: Try, folder: Path, rows: Path, zygote: Zygote, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Make a try in a new folder, which stays where something is wrong."""
    folder.mkdir()
    shutil.copytree(rows, folder / "rows.zarr")
    found: dict[str, Any] = {"way": one.way, "stage": one.stage, "problem": ""}
    try:
        ended = terminated(one.way, one.stage, one.number, one.delay, folder, None if one.real else zygote)
        assert not ended.resumed or bits(folder) == expected[one.way], "a resume gave other bits"
    except (AssertionError, OSError) as error:
        return found | {"problem": f"{one} in {folder}: {type(error).__name__}: {error}"}
    shutil.rmtree(folder)
    return found | {
        "130": ended.code == INTERRUPTED,
        "cut off": "cut off" in ended.said,
        "resumed": ended.resumed,
        "seconds": ended.seconds,
    }


def table(found: list[dict[str, Any]], by: str) -> None:
    """Print counts by way or stage."""
    print(f"{by:18s} tries  exit 130  cut off  resumed  longest from signal to end")
    for name in [*dict.fromkeys(each[by] for each in found), ""]:
        mine = [each for each in found if not each["problem"] and name in ("", each[by])]
        counts = "".join(f"{sum(each[key] for each in mine):9d}" for key in ("130", "cut off", "resumed"))
        longest = max((each["seconds"] for each in mine), default=0.0)
        print(f"{name or 'all':18s} {len(mine):5d} {counts}  {longest:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=3, help="tries at a time")
    parser.add_argument("--busy", type=int, default=2, help="processes that compute beside them")
    options = parser.parse_args()
    # What a shell runs in the background ignores SIGINT, and so would the command lines.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place = Path(tempfile.mkdtemp(prefix="terminations-"))
    make_rows(place)
    with Zygote("reliability.terminations") as zygote:
        expected = {}
        for way in WAYS:
            folder = place / way
            folder.mkdir()
            shutil.copytree(place / "rows.zarr", folder / "rows.zarr")
            expected[way] = undisturbed(way, folder, zygote)
        with busy(options.busy), ThreadPoolExecutor(options.at_once) as pool:
            begun = [
                pool.submit(
                    tried,
                    Try.drawn(number, options.seed),
                    place / str(number),
                    place / "rows.zarr",
                    zygote,
                    expected,
                )
                for number in range(options.tries)
            ]
            found = []
            for each in begun:
                found.append(each.result())
                if found[-1]["problem"]:
                    print(found[-1]["problem"], flush=True)
                if len(found) % 25 == 0:
                    print(f"{len(found)} tries", file=sys.stderr, flush=True)
    for by in ("way", "stage"):
        table(found, by)
    wrong = sum(bool(each["problem"]) for each in found)
    print(f"{wrong} of {len(found)} went wrong")
    if wrong:
        sys.exit(1)
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
