"""One disturbance after the other, each on a fit of its own, each judged against the undisturbed fit.

Every function returns a `Verdict`; `campaign` runs many side by side and
gathers what went wrong.
"""

import errno
import os
import random
import re
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from reliability import scenarios
from reliability.boundaries import GROWING, READS, At, Delays
from reliability.scenarios import SIGCONT, SIGKILL, SIGSTOP, differences

NO_RUN = ("holds no run", "holds no commit")
FULL = At(0, error=errno.ENOSPC, refused=GROWING)
QUOTA = At(0, error=errno.EDQUOT, refused=GROWING)
READ_ONLY = At(0, error=errno.EROFS)
FLAW = At(0, error=errno.EIO, times=1)
"""One step that fails, as by a device that recovers."""
MISREAD = At(0, error=errno.EIO, refused=READS, times=1)


@dataclass(frozen=True)
class Verdict:
    """What became of one disturbance.

    Attributes
    ----------
    what : str
        The kind of end: "resumed", "began anew", "undisturbed", …
    problem : str
        Empty where all is as it should be.
    """

    what: str
    problem: str = ""


@dataclass
class Tally:
    """Verdicts, counted."""

    counts: Counter = field(default_factory=Counter)
    problems: list = field(default_factory=list)

    def add(self, name, verdict):
        self.counts[verdict.what] += 1
        if verdict.problem:
            self.problems.append(f"{name}: {verdict.problem}")

    @property
    def total(self):
        return sum(self.counts.values())


def campaign(cases, workers=None):
    """Judge ``cases``, pairs of a name and a function without arguments; return a `Tally`."""
    tally = Tally()
    cases = list(cases)
    with ThreadPoolExecutor(workers or os.cpu_count() or 2) as pool:
        for (name, _), verdict in zip(cases, pool.map(lambda case: case[1](), cases), strict=True):
            tally.add(name, verdict)
    return tally


class Bench:
    """A scenario, its undisturbed fit, and folders for disturbed ones.

    Parameters
    ----------
    zygote : Zygote
        Of `reliability.scenarios`.
    scenario : Scenario
    folder : Path
        For this bench alone.
    """

    def __init__(self, zygote, scenario, folder):
        self.zygote, self.scenario, self.folder = zygote, scenario, Path(folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        runs = [zygote.run(scenarios.fit, scenario, str(self.folder / f"undisturbed-{n}")) for n in range(3)]
        self.undisturbed = runs[0]
        for run in runs:
            assert not self.wrong(run), self.wrong(run)
            assert not run.litter, run.litter
        # The fastest: an instant drawn from it seldom comes after a fit's end.
        self.seconds = min(run.seconds for run in runs)

    @property
    def steps(self):
        """Steps by which the undisturbed fit changed the disk."""
        return self.undisturbed.steps

    def wrong(self, outcome):
        """Return what is wrong with an outcome that should have finished; empty for nothing."""
        if outcome is None:
            return "it was killed"
        if outcome.error:
            return str(outcome)
        parts = differences(outcome.bits, self.undisturbed.bits)
        return f"other bits in {', '.join(parts)}" if parts else ""

    def recovered(self, run, what="resumed"):
        """Judge what a resume makes of a disturbed run."""
        outcome = self.zygote.run(scenarios.resume, self.scenario, run)
        if outcome.error and not any(Path(run).glob("commits/*/zarr.json")):
            said = any(text in outcome.message for text in NO_RUN)
            if "CheckpointError" not in outcome.kinds or not said:
                return Verdict("began anew", f"with no commit yet, resume said {outcome}")
            outcome = self.zygote.run(scenarios.fit, self.scenario, run, None, None, True)
            what = "began anew"
        left = f"left behind: {', '.join(outcome.litter[:5])}" if outcome.litter else ""
        return Verdict(what, self.wrong(outcome) or left)

    def _run(self, name):
        run = self.folder / name
        shutil.rmtree(run, ignore_errors=True)
        return str(run)

    def killed_at(self, step):
        """Kill the fit before its step number ``step``, and resume."""
        run = self._run(f"kill-{step}")
        outcome = self.zygote.run(scenarios.fit, self.scenario, run, At(step, SIGKILL))
        if outcome is not None:
            verdict = Verdict("ended before that step", self.wrong(outcome))
        else:
            verdict = self.recovered(run)
        return self._tidied(run, verdict)

    def killed_replacing(self, step):
        """Kill a fit that replaces a finished run before its step number ``step``, and resume."""
        run = scenarios.copied(self.folder / "undisturbed-0", self._run(f"kill-replacing-{step}"))
        at = At(step, SIGKILL)
        assert self.zygote.run(scenarios.fit, self.scenario, run, at, None, True) is None
        return self._tidied(run, self.recovered(run))

    def killed_after(self, seconds, again=()):
        """Kill the fit after a time, its resume after the next one, …; then resume."""
        run = self._run(f"instant-{seconds:.9f}")
        verdict = None
        for attempt, wait in enumerate((seconds, *again)):
            started = any(Path(run).glob("commits/*/zarr.json"))
            arguments = (self.scenario, run)
            child = (
                self.zygote.start(scenarios.resume, *arguments)
                if started
                else self.zygote.start(scenarios.fit, *arguments, None, None, attempt > 0)
            )
            time.sleep(wait)
            child.kill()
            outcome = child.result()
            if outcome is not None:
                verdict = Verdict("ended before that instant", self.wrong(outcome))
                break
        return self._tidied(run, verdict or self.recovered(run))

    def half_done(self, step):
        """Return the folder of a run that was killed before ``step``."""
        run = self._run(f"half-{step}")
        assert self.zygote.run(scenarios.fit, self.scenario, run, At(step, SIGKILL)) is None
        return run

    def met(self, half, seed):
        """Let two processes resume one run, both having read the same commit."""
        run = scenarios.copied(half, self._run(f"met-{seed}"))
        place = Path(f"{run}.meeting")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        children = [
            self.zygote.start(
                scenarios.resume, self.scenario, run, None, Delays(2 * seed + who), (str(place), str(who), 2)
            )
            for who in range(2)
        ]
        problem = self._one_finished([child.result() for child in children])
        shutil.rmtree(place)
        return self._tidied(run, Verdict("one of two", problem or self.recovered(run).problem))

    def crossed(self, seed):
        """Let one process resume while another, the fit or a resume, is at any point of its way."""
        chance = random.Random(seed)
        run = self._run(f"crossed-{seed}")
        first = self.zygote.start(scenarios.fit, self.scenario, run, None, Delays(seed))
        while not any(Path(run).glob("commits/*/zarr.json")):
            time.sleep(0.001)
        time.sleep(chance.random() * self.seconds)
        second = self.zygote.start(scenarios.resume, self.scenario, run, None, Delays(seed + 10**6))
        outcomes = [first.result(), second.result()]
        if not any(outcome.error for outcome in outcomes):
            problem = self.wrong(outcomes[0]) or self.wrong(outcomes[1])
            if outcomes[1].steps:
                problem = problem or "both wrote and both finished"
            return self._tidied(run, Verdict("one after the other", problem))
        problem = self._one_finished(outcomes)
        return self._tidied(run, Verdict("one of two", problem or self.recovered(run).problem))

    def stopped_at(self, step, other_step=None):
        """Stop the fit before ``step`` while another process resumes, then let it go on.

        Where ``other_step`` is given, the other one is stopped before that step
        of its own, and goes on only when the first has ended.
        """
        run = self._run(f"stop-{step}-{other_step}")
        first = self.zygote.start(scenarios.fit, self.scenario, run, At(step, SIGSTOP))
        self._wait_until_stopped(first)
        if not any(Path(run).glob("commits/*/zarr.json")):
            first.signal(SIGCONT)
            return self._tidied(run, Verdict("nothing to resume", self.wrong(first.result())))
        at = None if other_step is None else At(other_step, SIGSTOP)
        other = self.zygote.start(scenarios.resume, self.scenario, run, at)
        self._wait_until_stopped(other)
        first.signal(SIGCONT)
        first_outcome = first.result()
        other.signal(SIGCONT)
        outcomes = [first_outcome, other.result()]
        if not outcomes[0].error and not outcomes[1].error and not outcomes[1].steps:
            problem = self.wrong(outcomes[0]) or self.wrong(outcomes[1])
            return self._tidied(run, Verdict("had finished", problem))
        problem = self._one_finished(outcomes)
        what = "the first was overtaken" if outcomes[0].error else "the second was overtaken"
        return self._tidied(run, Verdict(what, problem or self.recovered(run).problem))

    def replaced_at(self, step, *, overwrite):
        """Stop a fit before ``step`` while another begins and ends in the same place, then let it go on.

        With ``overwrite`` both may replace the finished run that is there, else nothing is there.
        """
        run = self._run(f"replace-{step}-{overwrite}")
        if overwrite:
            scenarios.copied(self.folder / "undisturbed-0", run)
        begin = partial(self.zygote.start, scenarios.fit, self.scenario, run)
        first = begin(At(step, SIGSTOP), None, overwrite)
        self._wait_until_stopped(first)
        second = begin(None, None, overwrite).result()
        first.signal(SIGCONT)
        outcomes = [first.result(), second]
        errors = {outcome.error for outcome in outcomes if outcome.error}
        what = "one of two" if errors else "one after the other"
        if all(outcome.error for outcome in outcomes):
            return self._tidied(run, Verdict(what, f"none finished: {'; '.join(map(str, outcomes))}"))
        told = errors <= {"CheckpointTakenError", "CheckpointExistsError"}
        problem = "" if told else f"not clear: {'; '.join(map(str, outcomes))}"
        return self._tidied(run, Verdict(what, problem or self.recovered(run).problem))

    def starved_at(self, step, fault):
        """Let steps that change the disk fail from ``step`` on, then resume without the fault."""
        run = self._run(f"fault-{fault.error}-{step}")
        outcome = self.zygote.run(scenarios.fit, self.scenario, run, replace(fault, step=step))
        if not outcome.error:
            return self._tidied(run, Verdict("ended all the same", self.wrong(outcome)))
        clear = "CheckpointError" in outcome.kinds and os.strerror(fault.error) in outcome.message
        if not clear:
            return self._tidied(run, Verdict("refused", f"not clear: {outcome}"))
        return self._tidied(run, self._promised(run, outcome) or self.recovered(run))

    def misread_at(self, half, step):
        """Let a resume fail to read or list an object at ``step``, then resume without the fault."""
        run = scenarios.copied(half, self._run(f"misread-{step}"))
        outcome = self.zygote.run(scenarios.resume, self.scenario, run, replace(MISREAD, step=step))
        if not outcome.error:
            return self._tidied(run, Verdict("ended before that step", self.wrong(outcome)))
        if outcome.error != "CheckpointError" or os.strerror(errno.EIO) not in outcome.message:
            return self._tidied(run, Verdict("refused", f"not clear: {outcome}"))
        return self._tidied(run, self.recovered(run))

    @staticmethod
    def _promised(run, outcome):
        """Return a verdict where the message promises another commit than the newest, or hides one."""
        numbers = [int(path.parent.name) for path in Path(run).glob("commits/*/zarr.json")]
        promised = re.findall(r"The last commit, (\d+), is intact", outcome.message)
        if promised != [str(number) for number in sorted(numbers)[-1:]]:
            return Verdict("refused", f"with the commits {sorted(numbers)} it said: {outcome}")
        if not numbers and "resume" in outcome.message and "nothing can be resumed" not in outcome.message:
            return Verdict("refused", f"with no commit it said: {outcome}")
        return None

    def vanished_at(self, step):
        """Rename the folder at ``step``, at least 4 (it is made by those before); resume once it is back."""
        run = self._run(f"vanish-{step}")
        outcome = self.zygote.run(scenarios.fit, self.scenario, run, At(step, vanish=run))
        if Path(run).exists():
            return Verdict("refused", "the folder that had vanished was made again")
        Path(f"{run}.gone").rename(run)
        if not outcome.error:
            return self._tidied(run, Verdict("ended all the same"))
        if "CheckpointError" not in outcome.kinds or run not in outcome.message:
            return self._tidied(run, Verdict("refused", f"not clear: {outcome}"))
        return self._tidied(run, self.recovered(run))

    def _one_finished(self, outcomes):
        finished = [outcome for outcome in outcomes if not outcome.error]
        others = [outcome for outcome in outcomes if outcome.error]
        if len(finished) != 1:
            return f"{len(finished)} of {len(outcomes)} finished: {'; '.join(map(str, outcomes))}"
        if others[0].error != "CheckpointTakenError":
            return f"the other ended with {others[0]}"
        return self.wrong(finished[0])

    @staticmethod
    def _wait_until_stopped(child):
        while not child.stopped and not child.ended:
            time.sleep(0.002)

    @staticmethod
    def _tidied(run, verdict):
        """Remove what is not needed to see what went wrong."""
        if not verdict.problem:
            shutil.rmtree(run, ignore_errors=True)
        return verdict


def spread(total, wanted, offset=0):
    """Return about ``wanted`` of the steps 1 … total, evenly spread from an offset on."""
    stride = max(1, total // wanted)
    return range(1 + offset % stride, total + 1, stride)
