"""What the rules of next steps ask of an experiment and its verdict, each found once and when it is asked."""

import difflib
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from abrun.errors import StoreError
from abrun.experiment.plan import compare_hash
from abrun.metric_names import GEN_KL_ERROR, REWARD, TOKEN_MULT_PROB_ERROR
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim
from abrun.recorded.experiment import Experiment, RecordedRun
from abrun.recorded.samples import samples_in
from abrun.verdict.description import Description, build_claim, find_claimable_metric
from abrun.verdict.guards import Guard
from abrun.verdict.results import ClaimResult
from abrun.verdict.sensitivity import check_signal
from abrun.verdict.step_one import StepOne
from abrun.verdict.verdict_file import VerdictFile, values_of

ENGINE_ERRORS = (TOKEN_MULT_PROB_ERROR, GEN_KL_ERROR)


@dataclass(frozen=True)
class NextStepFacts:
    """An experiment and its verdict, and what follows from them."""

    experiment: Experiment
    content: VerdictFile

    @property
    def launched(self) -> bool:
        return self.experiment.directory is not None

    @property
    def paired(self) -> bool:
        return self.content.paired

    @property
    def regression(self) -> bool:
        return self.experiment.regression

    @cached_property
    def is_declared(self) -> bool:
        return compare_hash(self.experiment.compare) == self.experiment.launched_compare_sha256

    # --- what fails ---

    @cached_property
    def failed_guards(self) -> list[Guard]:
        return [guard for guard in self.content.guards if guard.result == "fail"]

    @cached_property
    def failed_checks(self) -> list[StepOne]:
        return [check for check in self.content.step_one if check.result == "fail"]

    @cached_property
    def failed_claims(self) -> list[ClaimResult]:
        return [claim for claim in self.content.claims if claim.result == "different"]

    @property
    def has_engine_mismatch(self) -> bool:
        by_guard = any(guard.reason.code is Code.TOKEN_ERROR_EXCEEDED for guard in self.failed_guards)
        return by_guard or any(check.metric in ENGINE_ERRORS for check in self.failed_checks)

    @cached_property
    def first_failing_run(self) -> tuple[str, int]:
        """The arm and a seed that fail first: a step-one check names its seed, a claim has several."""
        failures = [*self.failed_checks, *self.failed_guards, *self.failed_claims]
        arm = failures[0].arm if failures else self.experiment.treatments[0]
        if self.failed_checks:
            return arm, self.failed_checks[0].seed
        return arm, next((pair.seed for pair in self.experiment.pairs(arm)), 0)

    @property
    def has_completions(self) -> bool:
        """None are kept where a run draws none, or failed before its first step."""
        arm, seed = self.first_failing_run
        runs = [self.experiment.arm(name).get(seed) for name in (arm, self.experiment.baseline)]
        with suppress(StoreError):
            return all(run is not None and samples_in(Path(run.place)) for run in runs)
        return False

    # --- what is open ---

    @cached_property
    def arms_with_open_checks(self) -> set[str]:
        """Arms with a first step that no further pairs settle."""
        return {check.arm for check in self.content.step_one if check.result == "open"}

    @cached_property
    def waiting_arms(self) -> set[str]:
        """Arms with a declared interim analysis that is still to come."""
        sections = self.content.arms.items()
        return {
            arm
            for arm, section in sections
            if section.verdict == "INCONCLUSIVE"
            and any(analysis.verdict is None for analysis in section.interim_analyses)
        }

    @cached_property
    def treatment_seeds(self) -> list[int]:
        """Those of the treatment with most pairs."""
        seeds_by_arm = (
            [pair.seed for pair in self.experiment.pairs(arm)] for arm in self.experiment.treatments
        )
        return max(seeds_by_arm, key=len)

    @property
    def seeds_to_come(self) -> list[int]:
        """Seeds that the next declared interim analysis of others' runs waits for."""
        missing = next(n for n in self.experiment.compare.interim if n > len(self.treatment_seeds)) - len(
            self.treatment_seeds
        )
        return [*range(max(self.treatment_seeds) + 1, max(self.treatment_seeds) + 1 + missing)]

    @cached_property
    def has_untestable_claims(self) -> bool:
        return any(claim.problem for claim in self.content.claims)

    @cached_property
    def undecided_claims(self) -> list[ClaimResult]:
        claims = [claim for claim in self.content.claims if claim.result == "undecided"]
        return claims if self.launched else [claim for claim in claims if claim.estimate.interval]

    @cached_property
    def is_beyond_margin(self) -> bool:
        return any(map(_is_beyond_margin, self.undecided_claims))

    @cached_property
    def pairs_that_decide(self) -> tuple[Reason, int | None]:
        """How many fresh pairs decide the undecided claims, and their number; None: no such number."""
        undecided, paired = self.undecided_claims, self.content.paired
        needed = [claim.power.pairs_needed for claim in undecided if claim.power.pairs_needed is not None]
        if self.is_beyond_margin:
            return Code.MARGIN_EXCEEDED(paired=paired), None
        if any(claim.estimate.limited is not None for claim in undecided):
            count = 4 * max(undecided[0].claim.num_runs or [undecided[0].claim.num_pairs])
            return Code.HALVE_INTERVAL(paired=paired), count
        if len(needed) < len(undecided):
            return Code.MORE_THAN_1000_PAIRS(paired=paired), None
        count = max(needed)
        observed = [claim.power.pairs_needed_observed for claim in undecided]
        known_counts = [number for number in observed if number is not None]
        count_if_differing = (
            max(known_counts) if len(known_counts) == len(observed) and max(known_counts) > count else None
        )
        return Code.PAIRS_DECIDE(count=count, paired=paired, if_differing=count_if_differing), count

    @property
    def needed(self) -> Reason:
        return self.pairs_that_decide[0]

    @property
    def num_pairs_that_decide(self) -> int | None:
        return self.pairs_that_decide[1]

    # --- rounding at the first step ---

    @property
    def is_float32_conclusive(self) -> bool:
        diff = self.experiment.treatment_diff or {}
        runs = self.experiment.runs.values()
        changed = {key for arm_diff in diff.values() for key in arm_diff}
        trained_by_abrun = all((run.config or {}).get("trainer.type") == "abrun" for run in runs)
        return "policy.dtype" not in changed and trained_by_abrun

    @cached_property
    def rounding_tolerances(self) -> dict[str, float]:
        """Tolerances of the first step that these runs would have kept, and those that are declared."""
        declared = self.experiment.compare.step_one_tolerance
        open_checks = [check for check in self.content.step_one if check.result == "open"]
        tolerances = {check.metric: math.ceil(125 * check.deviation) / 100 for check in open_checks}
        return {**(declared if isinstance(declared, dict) else {}), **tolerances}

    @property
    def untested_metrics(self) -> list[str]:
        """Metrics of the first step that stay untested: they are not told from noise.

        The largest deviation of 5 fresh pairs is beyond 1.25 times that of these 1 time in 3.
        """
        untested = dict.fromkeys(
            check.metric for check in self.content.step_one if check.result == "not tested"
        )
        return [metric for metric in untested if metric not in self.rounding_tolerances]

    # --- what could be claimed ---

    @cached_property
    def nothing_shown(self) -> Reason | None:
        """Why launched runs without a claim could have shown nothing of their reward."""
        if self.content.claims:
            return None
        sides = self.experiment.sides(self.experiment.treatments[0]).finished
        return check_signal(sides, REWARD, may_repeat=True) if min(sides.sizes) else None

    @cached_property
    def claimable(self) -> Description | None:
        return find_claimable_metric(self.experiment)

    @cached_property
    def margin(self) -> Reason:
        """The margin of what is claimable, which owes nothing to the treatment."""
        description = self.claimable
        assert description
        bound, margin = description.certified_bound, description.margin
        passes = bound is not None and margin is not None and bound < margin
        detected = description.detected and asdict(description.detected)
        return Code.MARGIN_SUGGESTED(margin_is=description.margin_is, seen=detected, passes=passes)

    @property
    def has_several_runs(self) -> bool:
        """Whether what is claimable was seen in several runs of each arm."""
        return self.claimable is not None and self.claimable.interval is not None

    @property
    def is_claim_decidable(self) -> bool:
        assert self.claimable
        return not self.has_several_runs or self.claimable.runs_needed is not None

    @property
    def num_pairs_to_claim(self) -> int:
        assert self.claimable
        return max(3, self.claimable.runs_needed or 3)

    @property
    def claim_needs(self) -> Reason | None:
        """How many pairs decide the claim; None: not known of one run of each arm."""
        description = self.claimable
        assert description
        if not self.has_several_runs:
            return None
        return Code.PAIRS_DECIDE(count=self.num_pairs_to_claim, paired=description.paired, if_differing=None)

    @cached_property
    def testable_claims(self) -> list[Claim]:
        """The claims that these runs can show."""
        untestable = {
            (claim.claim.metric, claim.claim.window) for claim in self.content.claims if claim.problem
        }
        declared = self.experiment.compare.claims
        return [claim for claim in declared if (claim.metric, claim.window) not in untestable]

    @cached_property
    def replacement_claims(self) -> list[Claim]:
        """Claims in the place of those that these runs cannot show, however many seeds there are."""
        if not self.has_untestable_claims:
            return []
        return self.testable_claims or ([build_claim(self.claimable)] if self.claimable else [])

    @property
    def other_margin(self) -> Reason | None:
        """The margin of a claim that replaces all; None: it is enough to leave some out."""
        return None if self.testable_claims else self.margin

    # --- seeds and steps that arms share ---

    @cached_property
    def reference_seeds(self) -> tuple[set[int], set[int]]:
        """The seeds of the reference, and those of the later runs."""
        arm = self.experiment.arm
        return set(arm(self.experiment.baseline)), set(arm(self.experiment.treatments[0]))

    @property
    def seeds_left(self) -> list[int]:
        reference_seeds, run_seeds = self.reference_seeds
        return sorted(reference_seeds - run_seeds)

    @cached_property
    def can_unpair(self) -> bool:
        unpaired = values_of(self.content, Code.NO_SHARED_SEED, Code.UNPAIRED_SEEDS)
        return any(values["can_unpair"] for values in unpaired)

    @cached_property
    def shared_seeds(self) -> list[int]:
        experiment = self.experiment
        seeds_by_arm = [{pair.seed for pair in experiment.pairs(arm)} for arm in experiment.treatments]
        return sorted(set.intersection(*seeds_by_arm)) if seeds_by_arm else []

    # --- what broke ---

    @cached_property
    def unfinished_runs(self) -> list[RecordedRun]:
        runs = self.experiment.runs.values()
        return [run for run in runs if not run.finished and not run.thinned]

    @property
    def is_claim_unrecorded(self) -> bool:
        missing = values_of(self.content, Code.METRIC_MISSING)
        return not self.regression and any(values["role"] == "claim" for values in missing)

    @cached_property
    def suggested_aliases(self) -> dict[str, str]:
        """The names that runs log for claimed metrics, where the aliases of their recipe name others."""
        runs = [run for run in self.experiment.runs.values() if run.finished]
        if not runs:
            return {}
        config, recorded = runs[0].config or {}, runs[0].metrics
        metrics = dict.fromkeys(claim.metric for claim in self.experiment.compare.claims)
        aliases = {metric: config.get(f"trainer.aliases.{metric}") for metric in metrics}
        wrong_aliases = {
            metric: str(logged_name)
            for metric, logged_name in aliases.items()
            if logged_name and metric not in recorded
        }
        return {
            metric: _closest_name(logged_name, [*recorded]) for metric, logged_name in wrong_aliases.items()
        }


def _closest_name(name: str, recorded: Sequence[str]) -> str:
    return (difflib.get_close_matches(name, recorded, 1) or ["NAME"])[0]


def _is_beyond_margin(claim: ClaimResult) -> bool:
    """Return whether a difference was detected, and the observed one is no smaller than the margin."""
    estimate, margin = claim.estimate, claim.claim.margin
    if estimate.interval is None or estimate.mean_difference is None or margin is None:
        return False
    low, high = estimate.interval
    is_detected = claim.claim.margin_unit != "sigma" and not low <= 0 <= high
    return is_detected and abs(estimate.mean_difference) >= margin
