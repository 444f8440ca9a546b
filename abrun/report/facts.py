"""Facts about an experiment and its verdict, computed on demand for the rules of next steps."""

import difflib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from abrun.errors import StoreError
from abrun.experiment.plan import compare_hash
from abrun.logs.completions import read_run_samples
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim
from abrun.runs.files import is_directory
from abrun.runs.layout import RunName
from abrun.runs.metric_names import DIVERGENCE_RATE, GEN_KL_ERROR, REWARD, TOKEN_MULT_PROB_ERROR
from abrun.runs.rundir import RunDir
from abrun.verdict.description import build_claim, find_claimable_metric
from abrun.verdict.evidence import Evidence
from abrun.verdict.results import ClaimResult
from abrun.verdict.sensitivity import check_signal
from abrun.verdict.verdict_file import VerdictFile, values_of

# Reasons that name the runs which make a comparison invalid
_CODES_OF_RUNS = (
    *(Code.METRIC_MISSING, Code.STEPS_MISSING, Code.TEXT_VALUES, Code.BASELINE_NOT_FINITE),
    *(Code.RUN_UNREADABLE, Code.RUN_NOT_FINISHED, Code.BASELINE_FAILED, Code.UNPAIRED_BASELINE_FAILED),
    *(Code.RUNS_EXCHANGED, Code.RUN_COPIED),
)
ENGINE_ERRORS = (TOKEN_MULT_PROB_ERROR, GEN_KL_ERROR)


@dataclass(frozen=True)
class Facts:
    """An experiment, its verdict, and facts derived from them."""

    experiment: RecordedExperiment
    content: VerdictFile

    @property
    def launched(self) -> bool:
        return self.experiment.directory is not None

    @cached_property
    def is_declared(self) -> bool:
        is_launched = compare_hash(self.experiment.compare) == self.experiment.launched_compare_sha256
        return is_launched and not self.experiment.launched_baseline

    # --- failures ---

    @cached_property
    def failed_guards(self) -> list[Evidence]:
        return [guard for guard in self.content.select("guard") if guard.result == "fail"]

    @cached_property
    def failed_checks(self) -> list[Evidence]:
        return [check for check in self.content.select("step one") if check.result == "fail"]

    @cached_property
    def failed_claims(self) -> list[ClaimResult]:
        return [claim for claim in self.content.claims if claim.result == "different"]

    @property
    def has_engine_mismatch(self) -> bool:
        codes = {guard.reason.code for guard in self.failed_guards if guard.reason}
        by_check = any(check["metric"] in ENGINE_ERRORS for check in self.failed_checks)
        return by_check or Code.TOKEN_ERROR_EXCEEDED in codes

    @cached_property
    def first_failing_run(self) -> RunName:
        """The first failing arm's run: its seed is its step-one check's, else its first."""
        failures = [*self.failed_checks, *self.failed_guards, *self.failed_claims]
        arm = failures[0].arm if failures else self.experiment.treatments[0]
        seeds = [check["seed"] for check in self.failed_checks[:1]]
        seeds += [pair.seed for pair in self.experiment.pairs(arm)]
        return RunName(arm=arm, seed=next(iter(seeds), 0))

    @property
    def can_trace(self) -> bool:
        """True if abrun's own trainer trained both arms of this experiment, and the failure is not traced."""
        failed = [(check.arm, check["step"]) for check in self.failed_checks[:1]]
        if any((trace.arm, trace["step"]) in failed for trace in self.content.select("trace")):
            return False
        return self.is_own_trainer and self.has_initial_weights and not self.experiment.regression

    @property
    def is_own_trainer(self) -> bool:
        """True if abrun's own trainer trained all runs of an experiment that abrun launched."""
        configs = [run.config or {} for run in self.experiment.runs.values()]
        return self.launched and all(config.get("trainer.type") != "command" for config in configs)

    @cached_property
    def has_initial_weights(self) -> bool:
        """True if the weights of each warm start are here; copied runs may come without them."""
        with suppress(StoreError):
            weights = [RunDir(Path(run.place)).initial_weights for run in self.experiment.runs.values()]
            return all(folder is None or is_directory(folder) for folder in weights)
        return False

    @property
    def has_completions(self) -> bool:
        """True if the failing run and the baseline's run of that seed both kept completions."""
        name = self.first_failing_run
        runs = [self.experiment.arm(arm).get(name.seed) for arm in (name.arm, self.experiment.baseline)]
        with suppress(StoreError):
            return all(run is not None and read_run_samples(Path(run.place)) for run in runs)
        return False

    # --- open questions ---

    @cached_property
    def arms_with_open_checks(self) -> set[str]:
        """Arms with an open step-one check, which more pairs cannot settle."""
        return {check.arm for check in self.content.select("step one") if check.result == "open"}

    @cached_property
    def waiting_arms(self) -> set[str]:
        """Undecided arms with a declared interim analysis still to come."""
        return {
            arm
            for arm, section in self.content.arms.items()
            if section.verdict in ("INCONCLUSIVE", "DESCRIPTION")
            and any(analysis.verdict is None for analysis in section.interim_analyses)
        }

    @cached_property
    def has_untestable_claims(self) -> bool:
        return any(claim.problem for claim in self.content.claims)

    @cached_property
    def runs_of_a_spread(self) -> int | None:
        """The pairs that an untested spread needs, if there are fewer; None: no such claim."""
        for claim in self.content.claims:
            num_runs = min(claim.claim.num_runs or [claim.claim.num_pairs])
            if claim.problem and claim.problem.code == Code.SPREAD_NOT_SHOWN:
                needed = claim.problem["needed"]
                return needed if num_runs < needed else None
        return None

    @cached_property
    def undecided_claims(self) -> list[ClaimResult]:
        """Undecided claims that more pairs decide; logs of others may lack an estimate."""
        claims = [claim for claim in self.content.claims if claim.result == "undecided"]
        return [c for c in claims if self.launched or c.estimate.interval or c.estimate.diverged]

    @property
    def is_float32_conclusive(self) -> bool:
        """True if a step in float32 would tell rounding from a fault: no arm is about the dtype."""
        diff = self.experiment.treatment_diff or {}
        changed = {key for arm_diff in diff.values() for key in arm_diff}
        configs = [run.config or {} for run in self.experiment.runs.values()]
        trained_by_abrun = all(config.get("trainer.type") == "abrun" for config in configs)
        return "policy.dtype" not in changed and trained_by_abrun

    # --- possible claims ---

    @property
    def nothing_shown(self) -> Reason | None:
        """The reason why the reward of launched runs without a claim carries no signal, if so."""
        sides = self.experiment.sides(self.experiment.treatments[0]).finished
        return check_signal(sides, REWARD, may_repeat=True) if min(sides.sizes) else None

    @cached_property
    def redefined_metrics(self) -> set[str]:
        """Metrics that step one shows to be defined otherwise in a treatment."""
        return {check["metric"] for check in self.content.select("step one") if check.result == "redefined"}

    @cached_property
    def claimable(self) -> Evidence | None:
        return self._claimable if isinstance(self._claimable, Evidence) else None

    @property
    def claim_problem(self) -> Reason | None:
        """The reason why no claim could be tested on these runs; None if one could, or if it is unknown."""
        return self._claimable if isinstance(self._claimable, Reason) else None

    @cached_property
    def _claimable(self) -> Evidence | Reason | None:
        return find_claimable_metric(self.experiment, self.redefined_metrics)

    @cached_property
    def testable_claims(self) -> list[Claim]:
        """Declared claims that these runs can test."""
        untestable = [claim.claim for claim in self.content.claims if claim.problem]
        places = {(terms.metric, terms.window) for terms in untestable}
        declared = self.experiment.compare.claims
        return [claim for claim in declared if (claim.metric, claim.window) not in places]

    @cached_property
    def replacement_claims(self) -> list[Claim]:
        """Claims to make instead, if some declared ones cannot be tested with any number of seeds."""
        if not self.has_untestable_claims:
            return []
        if self.testable_claims or not self.claimable or self.claimable["left_out"]:
            return self.testable_claims
        return [build_claim(self.claimable)]

    # --- shared seeds ---

    @cached_property
    def reference_seeds(self) -> tuple[set[int], set[int]]:
        """The seeds of the reference, and those of the runs compared with it."""
        arm = self.experiment.arm
        return set(arm(self.experiment.baseline)), set(arm(self.experiment.treatments[0]))

    @cached_property
    def can_unpair(self) -> bool:
        unpaired = values_of(self.content, Code.NO_SHARED_SEED, Code.UNPAIRED_SEEDS)
        return any(values["can_unpair"] for values in unpaired)

    @cached_property
    def shared_seeds(self) -> list[int]:
        experiment = self.experiment
        seeds_by_arm = [{pair.seed for pair in experiment.pairs(arm)} for arm in experiment.treatments]
        return sorted(set.intersection(*seeds_by_arm)) if seeds_by_arm else []

    # --- broken runs ---

    @cached_property
    def unfinished_runs(self) -> list[RecordedRun]:
        runs = self.experiment.runs.values()
        return [run for run in runs if not run.finished and not run.thinned]

    @cached_property
    def excludable_runs(self) -> list[str]:
        """The runs without which the comparison may be valid; none if they are more than half of an arm.

        None where a claim counts the runs that diverge: leaving out those that ended early would hide some.
        """
        if any(claim.claim.metric == DIVERGENCE_RATE for claim in self.content.claims):
            return []
        values = values_of(self.content, *_CODES_OF_RUNS)
        runs = {run for found in values for run in (found.get("runs") or [found.get("run")]) if run}
        for arm in self.experiment.arms:
            is_named = [str(run) in runs for run in self.experiment.arm(arm).values()]
            if not 2 * sum(is_named) <= len(is_named) > 1:
                return []
        return sorted(runs)

    @property
    def has_misplaced_runs(self) -> bool:
        return bool(values_of(self.content, Code.RUNS_EXCHANGED, Code.RUN_COPIED))

    @property
    def is_claim_unrecorded(self) -> bool:
        missing = values_of(self.content, Code.METRIC_MISSING)
        return not self.experiment.regression and any(values["role"] == "claim" for values in missing)

    @cached_property
    def suggested_aliases(self) -> dict[str, str]:
        """Claimed metric -> closest logged name, for recipe aliases that name no logged metric."""
        aliases: dict[str, str] = {}
        for run in [run for run in self.experiment.runs.values() if run.finished][:1]:
            for metric in dict.fromkeys(claim.metric for claim in self.experiment.compare.claims):
                alias = (run.config or {}).get(f"trainer.aliases.{metric}")
                if alias and metric not in run.metrics:
                    aliases[metric] = (difflib.get_close_matches(str(alias), run.metrics, 1) or ["NAME"])[0]
        return aliases
