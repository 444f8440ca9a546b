"""Facts about an experiment and its verdict, computed on demand for the rules of next steps."""

import difflib
import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from abrun.errors import StoreError
from abrun.experiment.plan import compare_hash
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun
from abrun.logs.recorded.samples import read_run_samples
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim
from abrun.runs.experiment import open_experiment
from abrun.runs.metric_names import GEN_KL_ERROR, REWARD, TOKEN_MULT_PROB_ERROR
from abrun.runs.regular_files import is_directory
from abrun.runs.rundir import RunDir
from abrun.verdict.description import build_claim, find_claimable_metric
from abrun.verdict.evidence import Evidence
from abrun.verdict.outcomes import planned_improvement
from abrun.verdict.results import ClaimResult
from abrun.verdict.sensitivity import check_signal
from abrun.verdict.verdict_file import VerdictFile, values_of

ENGINE_ERRORS = (TOKEN_MULT_PROB_ERROR, GEN_KL_ERROR)


@dataclass(frozen=True)
class NextStepFacts:
    """An experiment, its verdict, and facts derived from them.

    The messages of next steps take their values from the properties of the same name.
    """

    experiment: RecordedExperiment
    content: VerdictFile

    @property
    def launched(self) -> bool:
        return self.experiment.directory is not None

    @property
    def paired(self) -> bool:
        return self.content.paired

    @property
    def has_prompts_as_units(self) -> bool:
        """True if the runs, one of each arm, were compared prompt by prompt."""
        return any(claim.claim.unit == "prompt" for claim in self.content.claims)

    @property
    def regression(self) -> bool:
        return self.experiment.regression

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
    def first_failing_run(self) -> tuple[str, int]:
        """The first failing arm, and the seed of its step-one check, else its first seed."""
        failures = [*self.failed_checks, *self.failed_guards, *self.failed_claims]
        arm = failures[0].arm if failures else self.experiment.treatments[0]
        if self.failed_checks:
            return arm, self.failed_checks[0]["seed"]
        return arm, next((pair.seed for pair in self.experiment.pairs(arm)), 0)

    @property
    def can_trace(self) -> bool:
        """True if abrun's own trainer trained both arms of this experiment, and the failure is not traced."""
        failed = self.failed_checks[:1]
        for trace in self.content.select("trace"):
            if any((trace.arm, trace["step"]) == (check.arm, check["step"]) for check in failed):
                return False
        return self.is_own_trainer and self.has_initial_weights and not self.regression

    @property
    def is_own_trainer(self) -> bool:
        """True if abrun's own trainer trained all runs of an experiment that abrun launched."""
        configs = [run.config or {} for run in self.experiment.runs.values()]
        is_own = all(config.get("trainer.type") != "command" for config in configs)
        return is_own and self.experiment.has_recipe

    @property
    def launches_here(self) -> bool:
        """True if the recipe's launcher starts the runs on this machine."""
        directory = self.experiment.directory
        launcher = open_experiment(directory)["recipe"].get("launcher") if directory else None
        return directory is not None and (launcher or {}).get("type", "local") == "local"

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
        arm, seed = self.first_failing_run
        runs = [self.experiment.arm(name).get(seed) for name in (arm, self.experiment.baseline)]
        with suppress(StoreError):
            return all(run is not None and read_run_samples(Path(run.place)) for run in runs)
        return False

    # --- open questions ---

    @cached_property
    def arms_with_open_checks(self) -> set[str]:
        """Arms with an open step-one check, which more pairs cannot settle."""
        return {check.arm for check in self.open_checks}

    @cached_property
    def open_checks(self) -> list[Evidence]:
        return [check for check in self.content.select("step one") if check.result == "open"]

    @cached_property
    def waiting_arms(self) -> set[str]:
        """Undecided arms with a declared interim analysis still to come."""
        sections = self.content.arms.items()
        return {
            arm
            for arm, section in sections
            if section.verdict == "INCONCLUSIVE"
            and any(analysis.verdict is None for analysis in section.interim_analyses)
        }

    @cached_property
    def treatment_seeds(self) -> list[int]:
        """Seeds of the treatment with the most pairs."""
        arms = self.experiment.treatments
        return max(([pair.seed for pair in self.experiment.pairs(arm)] for arm in arms), key=len)

    @property
    def seeds_to_come(self) -> list[int]:
        """Seeds that the next declared interim analysis needs, for runs not launched by abrun."""
        num_pairs, first_seed = len(self.treatment_seeds), max(self.treatment_seeds) + 1
        needed = next(count for count in self.experiment.compare.interim if count > num_pairs)
        return [*range(first_seed, first_seed + needed - num_pairs)]

    @cached_property
    def has_untestable_claims(self) -> bool:
        return any(claim.problem for claim in self.content.claims)

    @cached_property
    def undecided_claims(self) -> list[ClaimResult]:
        claims = [claim for claim in self.content.claims if claim.result == "undecided"]
        return claims if self.launched else [claim for claim in claims if claim.estimate.interval]

    @property
    def is_level_open(self) -> bool:
        """True if a claim on the level of the only arm is undecided, which more runs may change."""
        return any(claim.result == "undecided" for claim in self.content.claims)

    @cached_property
    def is_beyond_margin(self) -> bool:
        return any(map(_is_beyond_margin, self.undecided_claims))

    @cached_property
    def pairs_that_decide(self) -> tuple[Reason, int | None]:
        """The number of fresh pairs that would decide the undecided claims, as a reason and a count."""
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
        observed = [claim.power.pairs_needed_observed or math.inf for claim in undecided]
        is_more = count < max(observed) < math.inf
        gains = [planned_improvement(claim) for claim in undecided if claim.claim.kind == "better"]
        reason = Code.PAIRS_DECIDE(
            count=count,
            paired=paired,
            if_differing=max(observed) if is_more else None,
            gains=gains,
            if_equal=len(gains) < len(undecided),
        )
        return reason, count

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
        """Declared step-one tolerances, and for open checks tolerances that these runs would have met."""
        declared = self.experiment.compare.step_one_tolerance
        tolerances = {
            check["metric"]: math.ceil(125 * check["deviation"]) / 100 for check in self.open_checks
        }
        return {**(declared if isinstance(declared, dict) else {}), **tolerances}

    @property
    def untested_metrics(self) -> list[str]:
        """Step-one metrics without a test, because their deviation cannot be distinguished from noise.

        The largest deviation of 5 fresh pairs is beyond 1.25 times that of these 1 time in 3.
        """
        checks = self.content.select("step one")
        untested = dict.fromkeys(check["metric"] for check in checks if check.result == "not tested")
        return [metric for metric in untested if metric not in self.rounding_tolerances]

    # --- possible claims ---

    @cached_property
    def nothing_shown(self) -> Reason | None:
        """The reason why the reward of launched runs without a claim carries no signal, if so."""
        if self.content.claims:
            return None
        sides = self.experiment.sides(self.experiment.treatments[0]).finished
        return check_signal(sides, REWARD, may_repeat=True) if min(sides.sizes) else None

    @cached_property
    def claimable(self) -> Evidence | None:
        return find_claimable_metric(self.experiment)

    @cached_property
    def margin(self) -> Reason:
        """The suggested margin, derived from the baseline alone."""
        description = self.claimable
        assert description
        bound, margin = description["certified_bound"], description["margin"]
        passes = bound is not None and margin is not None and bound < margin
        return Code.MARGIN_SUGGESTED(
            margin_is=description["margin_is"],
            seen=description["detected"],
            passes=passes,
            arm=description.arm,
            baseline_arm=self.experiment.baseline,
        )

    @property
    def has_several_runs(self) -> bool:
        """True if each arm has several runs of the claimable metric."""
        return self.claimable is not None and self.claimable["interval"] is not None

    @property
    def is_claim_decidable(self) -> bool:
        assert self.claimable
        return not self.has_several_runs or self.claimable["runs_needed"] is not None

    @property
    def num_pairs_to_claim(self) -> int:
        assert self.claimable
        return max(3, self.claimable["runs_needed"] or 3)

    @property
    def claim_needs(self) -> Reason | None:
        """The number of pairs that would decide the suggested claim; None with one run per arm."""
        description = self.claimable
        assert description
        if not self.has_several_runs:
            return None
        count, paired = self.num_pairs_to_claim, description["paired"]
        return Code.PAIRS_DECIDE(count=count, paired=paired, if_differing=None, gains=[], if_equal=True)

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
        return self.testable_claims or ([build_claim(self.claimable)] if self.claimable else [])

    @property
    def other_margin(self) -> Reason | None:
        """The margin of a claim that replaces all declared ones; None if some of those can be tested."""
        return None if self.testable_claims else self.margin

    # --- shared seeds ---

    @cached_property
    def reference_seeds(self) -> tuple[set[int], set[int]]:
        """The seeds of the reference, and those of the runs compared with it."""
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

    # --- broken runs ---

    @cached_property
    def unfinished_runs(self) -> list[RecordedRun]:
        runs = self.experiment.runs.values()
        return [run for run in runs if not run.finished and not run.thinned]

    @property
    def has_misplaced_runs(self) -> bool:
        return bool(values_of(self.content, Code.RUNS_EXCHANGED, Code.RUN_COPIED))

    @property
    def is_claim_unrecorded(self) -> bool:
        missing = values_of(self.content, Code.METRIC_MISSING)
        return not self.regression and any(values["role"] == "claim" for values in missing)

    @cached_property
    def suggested_aliases(self) -> dict[str, str]:
        """Claimed metric -> closest logged name, for recipe aliases that name no logged metric."""
        runs = [run for run in self.experiment.runs.values() if run.finished]
        if not runs:
            return {}
        config, recorded = runs[0].config or {}, runs[0].metrics
        aliases: dict[str, str] = {}
        for metric in dict.fromkeys(claim.metric for claim in self.experiment.compare.claims):
            alias = config.get(f"trainer.aliases.{metric}")
            if alias and metric not in recorded:
                aliases[metric] = (difflib.get_close_matches(str(alias), [*recorded], 1) or ["NAME"])[0]
        return aliases


def _is_beyond_margin(claim: ClaimResult) -> bool:
    """Return True if no number of pairs shows the claim at the detected difference."""
    estimate, margin = claim.estimate, claim.claim.margin
    if claim.claim.kind in ("not_worse", "better"):
        return estimate.detected is not None and claim.power.pairs_needed_observed is None
    if estimate.interval is None or estimate.mean_difference is None or margin is None:
        return False
    low, high = estimate.interval
    is_detected = claim.claim.margin_unit != "sigma" and not low <= 0 <= high
    return is_detected and abs(estimate.mean_difference) >= margin
