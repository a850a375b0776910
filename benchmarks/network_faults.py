"""Faults between hosts, in containers on a network of their own; needs a Docker engine.

Prints a row of a table for each kind of fault, and exits with 1 where one ended otherwise than promised.

    python benchmarks/network_faults.py --repeat 5
    python benchmarks/network_faults.py --only worker-back --only clocks --json faults.json
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reliability.containers import session, why_no_engine
from reliability.network_cases import CASES, NUMBA, run_case, undisturbed


def terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", action="append", choices=sorted(CASES), help="a kind of fault")
    parser.add_argument(
        "--image", help="made from tests/reliability/faults.Dockerfile; by default it is built"
    )
    parser.add_argument("--base", help="BASE of the Dockerfile, where python:3.11-slim cannot be had")
    parser.add_argument(
        "--mount", action="append", default=[], help="a volume for all containers, as of docker run -v"
    )
    parser.add_argument("--json", type=Path, help="where each run's outcome goes")
    options = parser.parse_args(arguments)
    if (why := why_no_engine()) is not None:
        print(f"nothing was run: {why}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, terminated)
    runs: list[dict[str, Any]] = []
    bad = 0
    expected: dict[Any, str] = {}
    with session(options.image, options.base, options.mount) as made:
        print("| fault | runs | outcomes | seconds, longest | limit |\n|---|---|---|---|---|", flush=True)
        for name in options.only or CASES:
            case, outcomes = CASES[name], []
            compiled = NUMBA if name == "late-no-numba" else {}
            key = (case.fit.rows, case.fit.iterations, bool(compiled))
            if key not in expected:
                expected[key] = undisturbed(made, case.fit, compiled)
            for repetition in range(options.repeat):
                began = time.monotonic()
                outcome = run_case(case, made, expected[key], repetition)
                outcomes.append(outcome)
                runs.append(
                    {
                        "case": name,
                        "repetition": repetition,
                        "whole": time.monotonic() - began,
                        **asdict(outcome),
                    }
                )
                print(
                    f"{name} {repetition}: {outcome.kind}, {outcome.seconds:.1f} s"
                    f" of {runs[-1]['whole']:.0f} s. "
                    f"{outcome.message}",
                    file=sys.stderr,
                    flush=True,
                )
                if options.json:
                    options.json.write_text(json.dumps(runs, indent=1), encoding="utf-8")
            bad += sum(not outcome.is_good for outcome in outcomes)
            kinds = ", ".join(
                f"{number} {kind}" for kind, number in Counter(o.kind for o in outcomes).items()
            )
            longest = max(outcome.seconds for outcome in outcomes)
            print(
                f"| {case.title} (`{name}`) | {len(outcomes)} | {kinds} | {longest:.0f} | {case.limit:.0f} |",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
