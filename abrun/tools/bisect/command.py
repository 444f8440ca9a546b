"""abrun bisect: one experiment whose baseline is the good candidate and whose arms are the tested ones.

All state is on disk: the same command judges the finished runs again and continues from there.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.plan import ExperimentPlan, compare_hash, make_plan
from abrun.logs.recorded.stored import load_experiment
from abrun.messages import sentence
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.experiment import BASELINE, CommandRecipe, load_recipe, parse_stored_recipe
from abrun.runs.experiment import is_experiment, planned_runs, read_run_state
from abrun.runs.files import is_file, read_as, write_json
from abrun.runs.layout import RunName
from abrun.tools.bisect.candidates import Candidate
from abrun.tools.bisect.environments import Environments, SetupError
from abrun.tools.bisect.search import Answer, Design, SearchResult, search
from abrun.verdict.decide import FAILING, PASSING, ArmVerdict, judge

FILE = "bisect.json"
AGAIN = "good-again"  # arm name of the good candidate's reruns

# Runs the named runs of a plan; returns the exit code of a signal, or 0
Launch = Callable[[ExperimentPlan, Collection[RunName]], int]


class StoppedError(Exception):
    """The runs were stopped by a signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


class EndpointError(LaunchError):
    """The good or the bad candidate cannot be set up, run or compared, so there is no search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTest:
    """The result of testing one candidate."""

    candidate: str
    answer: Answer
    num_pairs: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectionOutcome:
    """The result of a bisection."""

    tests: list[CandidateTest]
    search: SearchResult | None  # None: the good candidate does not match itself
    sentence: str
    exit_code: int  # 0: one candidate named; 4: several left, or undecided; 5: nothing to bisect


def bisect_recipe(path: Path, overrides: Sequence[str]) -> CommandRecipe:
    """Return the recipe whose baseline command all candidates run. Raises RecipeError for abrun's trainer."""
    recipe = load_recipe(path, [*overrides, "arms.candidate={}"])
    config = recipe.run_config(recipe.baseline)
    if not (isinstance(recipe, CommandRecipe) and isinstance(config, CommandRunConfig)):
        raise RecipeError(
            f"{path}: trainer.type: got 'abrun', but a bisection runs a command in each checkout or "
            "environment; use trainer: {type: command, ...} (docs/tutorials/own-trainer.md)"
        )
    if not recipe.compare.claims:
        raise RecipeError(
            f"{path}: compare.claims: empty, but a bisection needs a claim that broke; declare one"
        )
    if recipe.compare.reference is not None:
        raise RecipeError(
            f"{path}: compare.reference: got {recipe.compare.reference!r}, but a bisection compares with the "
            "good candidate; --set compare.reference=null"
        )
    if not recipe.compare.paired:
        raise RecipeError(
            f"{path}: compare.paired: got false, but a bisection pairs candidates by seed; --set "
            "compare.paired=true"
        )
    if recipe.launcher is not None and recipe.launcher.type != "local":
        raise RecipeError(
            f"{path}: launcher.type: got {recipe.launcher.type!r}, but candidates run only on this machine; "
            "--set launcher=null"
        )
    return recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """The fields of bisect.json that are read back."""

    declared: Mapping[str, Any] = field(default_factory=dict)


class Bisection:
    """A search over candidates, the first of which is good, and the runs that it needs."""

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
        self._tests: list[CandidateTest] = []
        # Candidates differ only in code, which may change the first step: claims and guards decide.
        interim = list(design.counts) if len(design.counts) > 1 else []
        self._compare = recipe.compare.model_copy(
            update={"interim": interim, "step_one": False, "reference": None}
        )

    @property
    def titles(self) -> dict[str, str]:
        return {
            AGAIN: "good against itself",
            **{candidate.arm: candidate.title for candidate in self.candidates},
        }

    @property
    def max_runs(self) -> int:
        """Return the maximum number of runs: the good candidate, its reruns and all that may be tested."""
        return self.design.counts[-1] * (2 + self.design.tests)

    def run(self, launch: Launch, say: Callable[[str], None]) -> BisectionOutcome:
        """Run the search. Raises StoppedError, or EndpointError if the good or bad candidate cannot run."""
        self._check_declared()
        self._write(None)
        self_test = self._test(AGAIN, launch, say)
        if self_test.answer == "skipped":
            raise EndpointError(f"good against itself ({self.candidates[0].title}): {self_test.reason}")

        def test(index: int) -> Answer:
            candidate = self.candidates[index]
            candidate_test = self._test(candidate.arm, launch, say)
            if candidate_test.answer == "skipped" and index == self.design.num_candidates:
                raise EndpointError(f"bad ({candidate.title}): {candidate_test.reason}")
            return candidate_test.answer

        result = search(self.design, test) if self_test.answer == "good" else None
        sentence, exit_code = self._conclusion(self_test, result)
        outcome = BisectionOutcome(tests=self._tests, search=result, sentence=sentence, exit_code=exit_code)
        self._write(outcome)
        return outcome

    def clean_up(self) -> None:
        """Remove the checkouts and environments, but not the runs."""
        for candidate in self.candidates:
            self._environments.remove(candidate)

    def _test(self, arm: str, launch: Launch, say: Callable[[str], None]) -> CandidateTest:
        test = self._judge_at_analyses(arm, launch)
        self._tests.append(test)
        self._write(None)
        title = self.titles[arm]
        title += f" ({self.candidates[0].title})" * (arm == AGAIN)
        say(f"{title}: {test.answer} ({test.num_pairs} pairs): {test.reason}")
        return test

    def _judge_at_analyses(self, arm: str, launch: Launch) -> CandidateTest:
        """Judge a candidate at each interim analysis, until one decides."""
        answers: dict[str, Answer] = {
            **dict.fromkeys(PASSING, "good"),
            **dict.fromkeys(FAILING, "bad"),
            "INVALID": "skipped",
        }
        answer, reason = "undecided", ""
        for num_pairs in self.design.counts:
            problem = self._ensure_runs(arm, num_pairs, launch)
            if problem:
                return CandidateTest(candidate=arm, answer="skipped", num_pairs=0, reason=problem)
            verdict = self._judge_pairs(arm, num_pairs)
            answer, reason = answers.get(verdict.verdict, "undecided"), sentence(verdict.reasons[0])
            if answer != "undecided":
                break
        return CandidateTest(candidate=arm, answer=answer, num_pairs=num_pairs, reason=reason)

    def _judge_pairs(self, arm: str, num_pairs: int) -> ArmVerdict:
        """Return the verdict on one candidate against the good one, over the first pairs."""
        experiment, runs = load_experiment(self._dir), {}
        for seed in self._seeds[:num_pairs]:
            good_run = RunName(arm=BASELINE, seed=seed)
            candidate_run = _counterpart(arm, seed)
            runs[good_run] = experiment.runs[good_run]
            renamed = RunName(arm=arm, seed=seed)  # a rerun of the good candidate is judged as an arm
            identity = None if arm == AGAIN else experiment.runs[candidate_run].identity
            runs[renamed] = replace(experiment.runs[candidate_run], name=renamed, identity=identity)
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

    def _ensure_runs(self, arm: str, num_pairs: int, launch: Launch) -> str | None:
        """Run a candidate's first pairs; return why it cannot be tested, or None.

        Raises EndpointError for the good candidate.
        """
        seeds = self._seeds[:num_pairs]
        good_runs = [RunName(arm=BASELINE, seed=seed) for seed in seeds]
        names = [_counterpart(arm, seed) for seed in seeds]
        endpoint = arm in (AGAIN, self.candidates[-1].arm)
        states = self._states([*good_runs, *names])
        for name in names if not endpoint else ():
            # Failed by itself, not with its launcher, in an earlier call; a launch retries (limits.retries)
            if states[name] == "failed" and read_run_state(self._dir, name).ending is not None:
                return self._failure(name)

        missing = [name for name, state in states.items() if state != "finished"]
        if not missing:
            return None
        if problem := self._prepare(arm):
            return problem

        stopped = launch(self._plan([*good_runs, *names]), missing)
        self._write(None)
        if stopped:
            raise StoppedError(stopped)
        states = self._states([*good_runs, *names])
        failed = [name for name, state in states.items() if state != "finished"]
        for name in failed:
            if name.arm == BASELINE:
                raise EndpointError(f"good ({self.candidates[0].title}): {self._failure(name)}")
        return self._failure(failed[0]) if failed else None

    def _prepare(self, arm: str) -> str | None:
        """Set up the environments of an arm and of the good candidate; return why the arm's failed, or None.

        Raises EndpointError if the good candidate's fails.
        """
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
        """Return the plan of the runs on disk and of `names`."""
        planned = planned_runs(self._dir) if is_experiment(self._dir) else []
        run_names = dict.fromkeys([*planned, *names])
        candidates = {candidate.arm: candidate for candidate in self.candidates}
        arms = [arm for arm in dict.fromkeys(name.arm for name in run_names) if arm != BASELINE]
        unknown_arm = next((arm for arm in arms if arm not in candidates), None)
        if unknown_arm:
            raise LaunchError(f"{self._dir}: holds {unknown_arm} of another bisection; choose another --name")
        base = self._recipe.arms[self._recipe.baseline]
        good = base | self._environments.changes(self.candidates[0])
        # A plan needs a treatment: the bad candidate, which is tested first.
        arm_candidates = {arm: candidates[arm] for arm in [self.candidates[-1].arm, *arms]}
        content = {
            **self._recipe.model_dump(mode="json"),
            "name": self._dir.name,
            "arms": {
                BASELINE: good,
                **{
                    arm: base | self._environments.changes(candidate)
                    for arm, candidate in arm_candidates.items()
                },
            },
            "seeds": self._seeds,
            "controls": {"aa_reruns": len(self._seeds)},
            "compare": self._compare.model_dump(mode="json"),
        }
        content["trainer"]["env"] = {"PYTHONPATH": "", **content["trainer"]["env"]}
        plan = make_plan(parse_stored_recipe(content, self._recipe.name))
        return replace(plan, runs=tuple(run for run in plan.runs if run.name in run_names))

    def _states(self, names: Sequence[RunName]) -> dict[RunName, str]:
        planned = set(planned_runs(self._dir)) if is_experiment(self._dir) else set()
        return {
            name: read_run_state(self._dir, name).status if name in planned else "missing" for name in names
        }

    def _failure(self, name: RunName) -> str:
        state = read_run_state(self._dir, name)
        return f"{name} {state.status}: {state.message or 'no reason is recorded'}"

    def _conclusion(self, self_test: CandidateTest, result: SearchResult | None) -> tuple[str, int]:
        """Return the result's sentence and exit code."""
        good, bad = self.candidates[0], self.candidates[-1]
        if result is None:
            if self_test.answer == "bad":
                return (
                    "the good candidate differs from its own reruns, so nothing can be tested: "
                    f"{self_test.reason}"
                ), 5
            return (
                f"the good candidate does not match its own reruns within {self_test.num_pairs} pairs, so "
                f"nothing would: {self_test.reason}; increase --max-seeds or the margin, under another --name"
            ), 4
        if result.endpoint == "good":
            return f"{bad.title} does not differ from {good.title} beyond the claims: nothing to bisect", 5
        if result.endpoint == "undecided":
            return (
                f"undecided after {self.design.counts[-1]} pairs whether {bad.title} differs from "
                f"{good.title}: increase --max-seeds, and use another --name"
            ), 4
        suspects = [self.candidates[index].title for index in result.suspects]
        level = (
            f"wrong in at most {100 * self.design.alpha:.3g} % of searches, if no later candidate repairs "
            "what an earlier one breaks"
        )
        if len(suspects) == 1:
            return f"{suspects[0]} broke it ({level})", 0
        return f"one of these {len(suspects)} broke it: {'; '.join(suspects)} ({level})", 4

    def _declared(self) -> dict[str, Any]:
        """Return what must not change once there are results, or the error rates would not hold."""
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
        recorded = read_as(_Stored, self._dir / FILE).declared
        changed = [key for key, value in self._declared().items() if recorded.get(key) != value]
        if changed:
            raise LaunchError(
                f"{self._dir}: {changed[0]}: differs from the value this bisection began with; restore it "
                f"(see its {FILE}), or choose another --name"
            )

    def _write(self, outcome: BisectionOutcome | None) -> None:
        """Write levels, tests and the result so far; nothing before the first run has made the folder."""
        if not is_experiment(self._dir):
            return
        content: dict[str, Any] = {"schema_version": 1, "declared": self._declared()}
        content |= {"level": self.design.level, "tests": [asdict(test) for test in self._tests]}
        if outcome:
            result = outcome.search
            suspects = result.suspects if result and result.endpoint == "bad" else ()
            content |= {
                "result": outcome.sentence,
                "exit_code": outcome.exit_code,
                "suspects": [self.candidates[index].arm for index in suspects],
            }
        write_json(self._dir / FILE, content)


def _counterpart(arm: str, seed: int) -> RunName:
    """Return the run that is compared with the good candidate's: its rerun, or a candidate's run."""
    return RunName(arm=BASELINE, seed=seed, rerun=1) if arm == AGAIN else RunName(arm=arm, seed=seed)
