"""abrun bisect: one experiment in which the good candidate is the baseline, and each tested one an arm.

The state is what is on disk: the same command judges again what has run, and goes on from there.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from abrun.diagnose.bisect.candidates import Candidate
from abrun.diagnose.bisect.environments import Environments, SetupError
from abrun.diagnose.bisect.search import Answer, Design, Found, search
from abrun.errors import LaunchError, RecipeError
from abrun.experiment.plan import ExperimentPlan, compare_hash, make_plan
from abrun.messages import sentence
from abrun.reasons import Code
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.experiment import BASELINE, CommandRecipe, load_recipe, parse_stored_recipe
from abrun.recorded.stored import load_experiment
from abrun.regular_files import is_file
from abrun.runs.experiment import is_experiment, planned_runs, read_run_state
from abrun.runs.files import read_as, write_json
from abrun.runs.layout import RunName
from abrun.verdict.decide import ArmVerdict, judge

FILE = "bisect.json"
AGAIN = "good-again"  # the good candidate's reruns, judged as if they were an arm

Launch = Callable[
    [ExperimentPlan, Collection[RunName]], int
]  # runs of a plan to be made; a signal's exit code, or 0


class StoppedError(Exception):
    """Somebody asked the runs to stop."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


class EndpointError(LaunchError):
    """The good or the bad candidate cannot be set up, run or compared: there is no search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """What became of one candidate."""

    candidate: str
    answer: Answer
    num_pairs: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a bisection."""

    tests: list[Test]
    found: Found | None  # None: good does not match itself
    sentence: str
    exit_code: int  # 0: one candidate is named; 4: several are left, or it is open; 5: nothing to bisect


def bisect_recipe(path: Path, overrides: Sequence[str]) -> CommandRecipe:
    """A recipe whose baseline is what every candidate runs. Raises RecipeError where it is abrun's own."""
    recipe = load_recipe(path, [*overrides, "arms.candidate={}"])
    if not (isinstance(recipe, CommandRecipe) and isinstance(recipe.run_config(BASELINE), CommandRunConfig)):
        raise RecipeError(Code.BISECT_NEEDS_COMMAND(recipe=path))
    if not recipe.compare.claims:
        raise RecipeError(Code.BISECT_NEEDS_CLAIM(recipe=path))
    if recipe.compare.reference is not None:
        raise RecipeError(Code.BISECT_REFUSES_REFERENCE(recipe=path, reference=recipe.compare.reference))
    if not recipe.compare.paired:
        raise RecipeError(Code.BISECT_NEEDS_PAIRS(recipe=path))
    if recipe.launcher is not None and recipe.launcher.type != "local":
        raise RecipeError(Code.BISECT_RUNS_HERE(recipe=path, launcher=recipe.launcher.type))
    return recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """The fields of a bisection's file that are read again."""

    declared: Mapping[str, Any] = field(default_factory=dict)


class Bisection:
    """A search over candidates, the first of which is good, with the runs that it needs."""

    def __init__(
        self,
        recipe: CommandRecipe,
        candidates: Sequence[Candidate],
        environments: Environments,
        design: Design,
        experiment_dir: Path,
    ) -> None:
        self._recipe = recipe
        self.candidates = list(candidates)
        self._environments = environments
        self.design = design
        self._dir = experiment_dir
        further = range(max(recipe.seeds) + 1, max(recipe.seeds) + 1 + design.counts[-1])
        self._seeds = [*recipe.seeds, *further][: design.counts[-1]]
        self._tests: list[Test] = []
        # What differs in nothing but code is judged by claims and guards: step one is what code may change
        interim = list(design.counts) if len(design.counts) > 1 else []
        self._compare = recipe.compare.model_copy(
            update={"interim": interim, "step_one": False, "reference": None}
        )

    @property
    def titles(self) -> dict[str, str]:
        """The name of each arm for people."""
        return {AGAIN: "good against itself", **{one.arm: one.title for one in self.candidates}}

    @property
    def most_runs(self) -> int:
        """Runs of the good candidate and its reruns, and of all candidates that may be tested."""
        return self.design.counts[-1] * (2 + self.design.tests)

    def run(self, launch: Launch, say: Callable[[str], None]) -> Outcome:
        """Search to the end. Raises StoppedError, or EndpointError where good or bad cannot run at all."""
        self._check_declared()
        self._write(None)
        again = self._test(AGAIN, launch, say)
        if again.answer == "skipped":
            raise EndpointError(f"good against itself ({self.candidates[0].title}): {again.reason}")
        found = None
        if again.answer == "good":
            found = search(self.design, lambda index: self._test_candidate(index, launch, say).answer)
        sentence, exit_code = self._conclusion(again, found)
        outcome = Outcome(tests=self._tests, found=found, sentence=sentence, exit_code=exit_code)
        self._write(outcome)
        return outcome

    def clean_up(self) -> None:
        """Take the checkouts and environments away; the runs stay."""
        for candidate in self.candidates:
            self._environments.remove(candidate)

    def _test_candidate(self, index: int, launch: Launch, say: Callable[[str], None]) -> Test:
        candidate = self.candidates[index]
        test = self._test(candidate.arm, launch, say)
        if test.answer == "skipped" and index == self.design.num_candidates:
            raise EndpointError(f"bad ({candidate.title}): {test.reason}")
        return test

    def _test(self, arm: str, launch: Launch, say: Callable[[str], None]) -> Test:
        test = self._judge_at_analyses(arm, launch)
        self._tests.append(test)
        self._write(None)
        title = self.titles[arm]
        title += f" ({self.candidates[0].title})" * (arm == AGAIN)
        say(f"{title}: {test.answer} ({test.num_pairs} pairs): {test.reason}")
        return test

    def _judge_at_analyses(self, arm: str, launch: Launch) -> Test:
        """Judge a candidate at each interim analysis, until one decides."""
        answers: dict[str, Answer] = {"MATCH": "good", "MISMATCH": "bad", "INVALID": "skipped"}
        answer, reason = "undecided", ""
        for num_pairs in self.design.counts:
            problem = self._have_run(arm, num_pairs, launch)
            if problem:
                return Test(candidate=arm, answer="skipped", num_pairs=0, reason=problem)
            verdict = self._judged(arm, num_pairs)
            answer, reason = answers.get(verdict.verdict, "undecided"), sentence(verdict.reasons[0])
            if answer != "undecided":
                break
        return Test(candidate=arm, answer=answer, num_pairs=num_pairs, reason=reason)

    def _judged(self, arm: str, num_pairs: int) -> ArmVerdict:
        """Judge one candidate against the good one, over the first pairs."""
        experiment, runs = load_experiment(self._dir), {}
        for seed in self._seeds[:num_pairs]:
            first = RunName(arm=BASELINE, seed=seed)
            second = _second_run(arm, seed)
            runs[first] = experiment.runs[first]
            renamed = RunName(arm=arm, seed=seed)  # a rerun of the good candidate is judged as an arm
            identity = None if arm == AGAIN else experiment.runs[second].identity
            runs[renamed] = replace(experiment.runs[second], name=renamed, identity=identity)
        pairs = replace(
            experiment,
            arms=(BASELINE, arm),
            compare=self._compare,
            runs=runs,
            controls={},
            injected={},
            treatment_diff={arm: (experiment.treatment_diff or {}).get(arm, {})},
        )
        may_repeat = True  # most changes of code change no number
        (verdict,) = judge(pairs, self._compare.claims, alpha=self.design.level, may_repeat=may_repeat)
        return verdict

    def _have_run(self, arm: str, num_pairs: int, launch: Launch) -> str | None:
        """Make the first pairs of a candidate; why it cannot be tested, or None. Raises for the good one."""
        seeds = self._seeds[:num_pairs]
        good = [RunName(arm=BASELINE, seed=seed) for seed in seeds]
        names = [_second_run(arm, seed) for seed in seeds]
        endpoint = arm in (AGAIN, self.candidates[-1].arm)
        states = self._states([*good, *names])
        failed = [name for name in names if states[name] == "failed" and self._ended_by_itself(name)]
        if failed and not endpoint:  # of an earlier call: a launch tries again by itself (limits.retries)
            return self._failure(failed[0])
        missing = [name for name, state in states.items() if state != "finished"]
        if missing:
            problem = self._made(arm)
            if problem:
                return problem
            stopped = launch(self._plan([*good, *names]), missing)
            self._write(None)
            if stopped:
                raise StoppedError(stopped)
            states = self._states([*good, *names])
            failed = [name for name, state in states.items() if state != "finished"]
            of_good = [name for name in failed if name.arm == BASELINE]
            if of_good:
                raise EndpointError(f"good ({self.candidates[0].title}): {self._failure(of_good[0])}")
            if failed:
                return self._failure(failed[0])
        return None

    def _made(self, arm: str) -> str | None:
        """Make ready what an arm needs, the good candidate too; why it cannot be."""
        for candidate in self.candidates:
            is_good = candidate is self.candidates[0]
            if not is_good and candidate.arm != arm:
                continue
            try:
                self._environments.make(candidate)
            except SetupError as error:
                if is_good:
                    raise EndpointError(f"good ({candidate.title}): setup failed: {error}") from None
                return f"setup failed: {error}"
        return None

    def _plan(self, names: Sequence[RunName]) -> ExperimentPlan:
        """The plan of what is on disk, and of these runs."""
        there = planned_runs(self._dir) if is_experiment(self._dir) else []
        wanted = dict.fromkeys([*there, *names])
        known = {candidate.arm: candidate for candidate in self.candidates}
        arms = [arm for arm in dict.fromkeys(name.arm for name in wanted) if arm != BASELINE]
        other = next((arm for arm in arms if arm not in known), None)
        if other:
            raise LaunchError(Code.BISECTION_OF_OTHER_NAME(directory=self._dir, other=other))
        base = self._recipe.arms[BASELINE]
        good = base | self._environments.changes(self.candidates[0])
        # A plan needs an arm beside the baseline: the bad candidate's, which is tested first
        tried = {arm: known[arm] for arm in [self.candidates[-1].arm, *arms]}
        content = {
            **self._recipe.model_dump(mode="json"),
            "name": self._dir.name,
            "arms": {
                BASELINE: good,
                **{arm: base | self._environments.changes(one) for arm, one in tried.items()},
            },
            "seeds": self._seeds,
            "controls": {"aa_reruns": len(self._seeds)},
            "compare": self._compare.model_dump(mode="json"),
        }
        content["trainer"]["env"] = {"PYTHONPATH": "", **content["trainer"]["env"]}
        plan = make_plan(parse_stored_recipe(content, self._recipe.name))
        return replace(plan, runs=tuple(run for run in plan.runs if run.name in wanted))

    def _states(self, names: Sequence[RunName]) -> dict[RunName, str]:
        there = set(planned_runs(self._dir)) if is_experiment(self._dir) else set()
        return {
            name: read_run_state(self._dir, name).status if name in there else "missing" for name in names
        }

    def _ended_by_itself(self, name: RunName) -> bool:
        """Return True if a failed run was seen to end: a killed launcher's runs failed by no code."""
        return read_run_state(self._dir, name).ending is not None

    def _failure(self, name: RunName) -> str:
        state = read_run_state(self._dir, name)
        return f"{name} {state.status}: {state.message or 'no reason is recorded'}"

    def _conclusion(self, again: Test, found: Found | None) -> tuple[str, int]:
        """Return the result's sentence and exit code."""
        good, bad = self.candidates[0], self.candidates[-1]
        if found is None:
            if again.answer == "bad":
                return f"good differs from its own reruns, so that nothing can be told: {again.reason}", 5
            return (
                f"good cannot be told to match itself at {again.num_pairs} pairs, so that nothing would: "
                f"{again.reason}; give more --max-seeds or a wider margin, under another --name"
            ), 4
        if found.endpoint == "good":
            return f"{bad.title} does not differ from {good.title} beyond the claims: nothing to bisect", 5
        if found.endpoint == "undecided":
            return (
                f"whether {bad.title} differs from {good.title} is open at {self.design.counts[-1]} pairs: "
                "give more --max-seeds under another --name"
            ), 4
        suspects = [self.candidates[index].title for index in found.suspects]
        level = (
            f"a wrong answer at most {100 * self.design.alpha:.3g} % of the time, if what one candidate "
            "breaks stays broken after it"
        )
        if len(suspects) == 1:
            return f"{suspects[0]} broke it ({level})", 0
        return f"one of these {len(suspects)} broke it: {'; '.join(suspects)} ({level})", 4

    def _declared(self) -> dict[str, Any]:
        """What must not change once there are results: levels would mean nothing."""
        trainer = self._recipe.trainer.model_dump(mode="json")
        return {
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "design": {**asdict(self.design), "counts": list(self.design.counts)},
            "setup": self._environments.setup,
            "seeds": self._seeds,
            "compare_sha256": compare_hash(self._compare),
            "trainer_sha256": hashlib.sha256(json.dumps(trainer, sort_keys=True).encode()).hexdigest(),
        }

    def _check_declared(self) -> None:
        if not is_file(self._dir / FILE):
            return
        before = read_as(_Stored, self._dir / FILE).declared
        changed = [key for key, value in self._declared().items() if before.get(key) != value]
        if changed:
            raise LaunchError(Code.BISECTION_CHANGED(directory=self._dir, changed=changed[0], file=FILE))

    def _write(self, outcome: Outcome | None) -> None:
        """Levels, tests and result so far; before the first run there is no folder yet."""
        if not is_experiment(self._dir):
            return
        content: dict[str, Any] = {"schema_version": 1, "declared": self._declared()}
        content |= {"level": self.design.level, "tests": [asdict(test) for test in self._tests]}
        if outcome:
            found = outcome.found
            suspects = found.suspects if found and found.endpoint == "bad" else ()
            content |= {
                "result": outcome.sentence,
                "exit_code": outcome.exit_code,
                "suspects": [self.candidates[index].arm for index in suspects],
            }
        write_json(self._dir / FILE, content)


def _second_run(arm: str, seed: int) -> RunName:
    """Return the run that is compared with the good candidate's: its rerun, or a candidate's."""
    return RunName(arm=BASELINE, seed=seed, rerun=1) if arm == AGAIN else RunName(arm=arm, seed=seed)
