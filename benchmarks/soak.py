"""Every disturbance of a checkpointed fit, at every step that changes the disk and at random instants.

    python benchmarks/soak.py                                   # all of it
    python benchmarks/soak.py --only kills --scenarios 0 1      # kills of the first two scenarios
    python benchmarks/soak.py --stride 10                       # every tenth step
    python benchmarks/soak.py --only fuzz --inputs 20000        # files, configs and models of strangers

Prints a table for each kind of disturbance; exits with 1 where anything went
wrong, which is printed and whose folder is left in place.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reliability import damage
from reliability.campaigns import FULL, READ_ONLY, Bench, Tally, Verdict, campaign
from reliability.fuzz import running
from reliability.scenarios import EVERY, SPECIAL, Scenario
from reliability.zygote import Zygote

SCENARIOS = EVERY + SPECIAL
PARTS = ("kills", "stops", "meetings", "faults", "damage", "fuzz")
BATCH = 25


def kills(bench: Bench, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for step in range(1, bench.steps + 1, options.stride):
        yield f"killed at step {step}", partial(bench.killed_at, step)


def instants(bench: Bench, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for number in range(options.instants):
        yield f"random instants, draw {number}", partial(killed_at_instants, bench, options.seed, number)


def killed_at_instants(bench: Bench, seed: int, number: int) -> Verdict:
    """Kill a fit, then its resume, at instants that are drawn again where they come after the end."""
    chance = random.Random(f"{seed} {number}")
    while True:
        first, second = (chance.random() * bench.seconds for _ in range(2))
        verdict = bench.killed_after(first, (second,))
        if verdict.problem:
            return Verdict(verdict.what, f"after {first:.4f} and {second:.4f} s: {verdict.problem}")
        if verdict.what != "ended before that instant":
            return verdict


def stops(bench: Bench, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    chance = random.Random(options.seed)
    for step in range(1, bench.steps + 1, options.stride):
        yield f"stopped at step {step}", partial(bench.stopped_at, step)
        other = chance.randrange(1, bench.steps)
        yield f"stopped at steps {step} and {other}", partial(bench.stopped_at, step, other)


def meetings(bench: Bench, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    half = bench.half_done(bench.steps * 3 // 4)
    for seed in range(options.meetings):
        yield f"met, delays {seed}", partial(bench.met, half, seed)
        yield f"crossed, delays {seed}", partial(bench.crossed, seed)


def faults(bench: Bench, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for step in range(1, bench.steps + 1, options.stride):
        yield f"full at step {step}", partial(bench.starved_at, step, FULL)
        yield f"read-only at step {step}", partial(bench.starved_at, step, READ_ONLY)
        if step > 3:
            yield f"vanished at step {step}", partial(bench.vanished_at, step)


def damaged(zygote: Zygote, folder: Path, options: argparse.Namespace) -> Tally:
    bench = Bench(zygote, Scenario("em-tau, revisit"), folder / "damaged")
    half = bench.half_done(bench.steps * 4 // 5)
    tally = Tally()

    def batch(lies: bool, start: int) -> Verdict:
        counts, problems = zygote.run(
            damage.resumes,
            bench.scenario,
            half,
            bench.undisturbed.bits,
            range(start, min(start + BATCH, options.mutations)),
            lies,
        )
        kind = "lie" if lies else "damage"
        tally.counts.update({f"{kind}: {end}": count for end, count in counts.items()})
        tally.problems.extend(problems)
        return Verdict("")

    campaign(
        (f"mutations {start} …", partial(batch, lies, start))
        for lies in (False, True)
        for start in range(0, options.mutations, BATCH)
    )
    return tally


def disturbances(
    zygote: Zygote, folder: Path, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Tally]]]:
    """Yield each chosen kind of disturbance: its name, and what tries all of its cases."""
    if "kills" in options.only:
        for number in options.scenarios:
            scenario = SCENARIOS[number]
            bench = Bench(zygote, scenario, folder / f"scenario-{number}")
            yield f"killed, every step: {scenario}", partial(tried, kills, bench, options)
            yield f"killed, random instants: {scenario}", partial(tried, instants, bench, options)
    for part, name, cases in (
        ("stops", "one stopped at every step, another resumes", stops),
        ("meetings", "two at once", meetings),
        ("faults", "full, read-only, vanished, from every step on", faults),
    ):
        if part in options.only:
            bench = Bench(zygote, Scenario("em-tau, revisit"), folder / part)
            yield name, partial(tried, cases, bench, options)
    if "damage" in options.only:
        yield "damaged and made up", partial(damaged, zygote, folder, options)


def tried(
    cases: Callable[[Bench, argparse.Namespace], Iterator[Any]], bench: Bench, options: argparse.Namespace
) -> Tally:
    return campaign(cases(bench, options))


def shown(name: str, tally: Tally, seconds: float) -> None:
    ends = ", ".join(f"{count} {end}" for end, count in sorted(tally.counts.items()))
    print(f"| {name} | {tally.total} | {ends} | {len(tally.problems)} | {seconds:.0f} |", flush=True)
    for problem in tally.problems:
        print(f"    {problem}", flush=True)


def fuzzed(folder: Path, options: argparse.Namespace) -> int:
    """Print a table of what became of mutated inputs; return how many went wrong."""
    totals, problems = {}, []
    with Zygote("reliability.fuzz.running") as zygote:
        for name, inputs in running.shares(options.inputs).items():
            began = time.perf_counter()
            seeds = range(options.seed, options.seed + inputs)
            totals[name] = running.attempted(zygote, name, seeds, folder / name.replace(" ", "-"))
            problems += totals[name].problems
            for problem in totals[name].problems:
                print(f"    {problem}", flush=True)
            where = ", ".join(f"{count} {place}" for place, count in totals[name].refused_by.most_common(8))
            print(f"{name}: {time.perf_counter() - began:.0f} s; refused by {where}", flush=True)
    print("\n".join(running.table(totals)), flush=True)
    return len(problems)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="every so many steps (1)")
    parser.add_argument("--instants", type=int, default=200, help="random instants in each scenario (200)")
    parser.add_argument("--meetings", type=int, default=100, help="of two processes (100)")
    parser.add_argument("--mutations", type=int, default=1000, help="of each of two kinds (1000)")
    parser.add_argument("--inputs", type=int, default=20_000, help="mutated, of all kinds (20,000)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="kinds of disturbance (all)")
    parser.add_argument(
        "--scenarios", type=int, nargs="+", default=range(len(SCENARIOS)), help="by number, for kills (all)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="by default a temporary one")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="emtau-soak-"))
    wrong = fuzzed(folder / "fuzz", options) if "fuzz" in options.only else 0
    if set(options.only) == {"fuzz"}:
        return 1 if wrong else 0
    print("| disturbance | cases | ends | wrong | seconds |\n|---|---|---|---|---|")
    with Zygote("reliability.damage") as zygote:
        for name, judged in disturbances(zygote, folder, options):
            began = time.perf_counter()
            tally = judged()
            shown(name, tally, time.perf_counter() - began)
            wrong += len(tally.problems)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
