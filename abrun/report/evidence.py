"""The evidence of a verdict as labelled lines and tables, for the terminal, Markdown, the page and plans."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from abrun.logs.recorded.reference import REFERENCE_ARM as REFERENCE
from abrun.messages import sentence, sentences
from abrun.messages.not_tested import summarize_not_tested
from abrun.messages.numbers import (
    SCORES_TEXT,
    counted,
    deviation_text,
    difference_text,
    interval_level_text,
    interval_text,
    more_text,
    percent_text,
)
from abrun.report.injected import caught_sentence
from abrun.report.present.tables import Table, columns
from abrun.runs.redaction import yaml_text
from abrun.verdict.decide import ArmSection
from abrun.verdict.evidence import Evidence, Kind
from abrun.verdict.results import ClaimResult
from abrun.verdict.seed_noise import PAIR_COUNTS
from abrun.verdict.verdict_file import VerdictFile

MAX_LEVELS = 2  # per arm; the page has all
MAX_PARAGRAPHS = 3  # treatments that have their own lines
MAX_METRICS = 6  # rows of a table without a claim, on the terminal and in Markdown; the page has all


def evidence_lines(content: VerdictFile) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each kind of evidence and arm, other than the claims."""
    for arm, section in content.arms.items():
        label_prefix = f"{arm}, " if len(content.arms) > 1 else ""
        if label_prefix:
            yield arm, section.verdict
        yield from ((f"{label_prefix}{line.label}", line.text) for line in _arm_lines(content, arm, section))
    if faults := content.select("injected fault"):
        yield "sensitivity", caught_sentence(faults, paired=content.paired)
    if content.not_tested:
        yield "not tested", "; ".join(sentences(content.not_tested))
    for guess in content.guessed:
        yield "guessed", sentence(guess)
    if content.notes:
        omitted = [f"and {len(content.notes) - 3} more"] * (len(content.notes) > 3)
        yield "notes", "; ".join([*sentences(content.notes[:3]), *omitted])


def short_lines(content: VerdictFile) -> Iterator[tuple[str, str]]:
    """Yield the lines that a reader of the verdict needs: what did not pass, and in a word what did."""
    several, passes = len(content.arms) > 1, ""
    has_many = len(content.arms) > MAX_PARAGRAPHS
    arms_of: dict[tuple[str, str, str], list[str]] = {}  # of many arms, those that have the same line
    for arm, section in content.arms.items():
        lines = list(_arm_lines(content, arm, section))
        passes = ", ".join(line.passed for line in lines if line.passed)
        state = "; ".join(filter(None, (section.verdict, passes and f"passed: {passes}")))
        rows = [("", state)] * several
        rows += [(line.label, line.text) for line in lines if line.is_main and not line.passed]
        for label, text in rows:
            arms_of.setdefault((arm * (not has_many), label, text), []).append(arm)
    for (_, label, text), arms in arms_of.items():
        name = arms[0] if len(arms) == 1 else f"{len(arms)} arms"
        yield ", ".join(filter(None, (name * several, label))), text
    if faults := content.select("injected fault"):
        yield "sensitivity", caught_sentence(faults, paired=content.paired)
    for guess in content.guessed:
        yield "guessed", sentence(guess)
    rest = [f"not tested: {summarize_not_tested(content.not_tested)}"] * bool(content.not_tested)
    rest += [counted(content.notes, "note")] * bool(content.notes)
    rest += ["all: compare -v"] * bool(rest)
    if passes and not several:
        yield "passed", "; ".join([passes, *rest])
    elif rest:
        yield "more", "; ".join(rest)


@dataclass(frozen=True, slots=True)
class ArmLine:
    """A line on one arm. What `passed`, in a few words, need not be read; what is not main is a detail."""

    label: str
    text: str
    is_main: bool = True
    passed: str | None = None


def _arm_lines(content: VerdictFile, arm: str, section: ArmSection) -> Iterator[ArmLine]:
    levels = [level for level in claim_levels(content) if level.arm == arm]
    yield from (ArmLine("levels", level.text, is_main=False) for level in levels[:MAX_LEVELS])
    if changes := describe_changes(section.treatment_diff or {}):
        yield ArmLine("treatment", "; ".join(changes[:4]) + more_text(len(changes) - 4))
    for kind, (label, word) in LINES.items():
        evidence = content.select(kind, arm)
        text = word(evidence, content, arm)
        if text is not None:
            results = {item.result for item in evidence}
            passes = "pass" in results and results <= {"pass", "not tested", "not recorded"}
            is_main = kind in CHECKS or "differs" in results
            yield ArmLine(label, text, is_main, label if passes and is_main else None)
    yield _size_line(content, arm, section)
    if analyses := section.interim_analyses:
        planned = ", ".join(str(analysis.num_pairs) for analysis in analyses)
        completed = [f"{done.num_pairs} pairs: {done.verdict}" for done in analyses if done.verdict]
        done_text = ", ".join(completed) or "none yet"
        yield ArmLine("interim analyses", f"declared at {planned} pairs; taken: {done_text}")


def _size_line(content: VerdictFile, arm: str, section: ArmSection) -> ArmLine:
    """Return the line on how many runs or pairs were judged; they pass if all planned ones were."""
    num_shared, num_all = section.coverage.shared_steps, section.coverage.all_steps
    shared_steps, is_whole = "", content.axis != "steps" or num_shared == num_all
    if content.axis == "steps":
        shared_steps = f"; {num_shared} of {num_all} steps shared"
        if content.reference and content.baseline == REFERENCE and num_shared < num_all:
            shared_steps += " (the reference keeps all steps in the windows of its claims, and fewer outside)"
    if section.num_runs:
        sizes = f"{section.num_runs[0]} of {content.baseline} and {section.num_runs[1]} of {arm}"
        return ArmLine("runs", f"{sizes}, unpaired{shared_steps}", passed=sizes if is_whole else None)
    num_pairs, num_planned = section.num_pairs, section.num_planned_pairs
    if section.interim_analyses:  # the pairs of the last completed one
        return ArmLine("pairs", f"{num_pairs} compared, of {num_planned} planned{shared_steps}")
    passed = f"{num_pairs} of {num_planned} pairs" if is_whole and 0 < num_pairs == num_planned else None
    return ArmLine("pairs", f"{num_pairs} of {num_planned} finished{shared_steps}", passed=passed)


def evidence_tables(content: VerdictFile) -> dict[Kind, list[Table]]:
    """Return the tables of evidence that stands where claims stand, with few unclaimed rows."""
    evidence_by_kind: dict[Kind, list[Evidence]] = {kind: content.select(kind) for kind in TABLES}
    return {kind: TABLES[kind](evidence, content) for kind, evidence in evidence_by_kind.items() if evidence}


def treatment_name(content: VerdictFile) -> str:
    """Return the treatment's name for column headings, or 'treatment'; without any, the only arm's."""
    if not content.arms:
        return content.baseline
    return next(iter(content.arms)) if len(content.arms) == 1 else "treatment"


def _is_compared_step_by_step(content: VerdictFile, arm: str) -> bool:
    return not content.arms[arm].num_runs and content.axis == "steps"


def describe_changes(treatment_diff: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return a `key: old -> new` text for each key that a treatment changes."""
    return [f"{key}: {yaml_text(old)} -> {yaml_text(new)}" for key, (old, new) in treatment_diff.items()]


# --- descriptions: levels and differences without a claim ---


def _description_tables(evidence: Sequence[Evidence], content: VerdictFile) -> list[Table]:
    single = {row.arm for row in content.select("new run")}
    described = [row for row in evidence if row.arm not in single]
    has_intervals = any(row["interval"] for row in described)
    difference = "difference [90 % CI]" if has_intervals else "difference"
    titles = ["metric", "steps", content.baseline, treatment_name(content), difference]
    by_arm = [[row for row in described if row.arm == arm] for arm in content.arms]
    first = MAX_METRICS // (1 + (len(content.arms) > 1))
    shown_rows = [row for rows in by_arm for row in rows[:first]]
    arm = ["arm"] * (len(content.arms) > 1)
    cells = [[row.arm for _ in arm] + _description_cells(row) for row in shown_rows]
    table = Table(columns(*arm, *titles, fold=True), cells, optional=("steps",))
    return [table] if shown_rows else []


def _metrics_line(described: Sequence[Evidence], content: VerdictFile, arm: str) -> str | None:
    num_metrics = content.arms[arm].num_metrics
    if not (num_metrics and content.post_hoc):
        return None
    num_in_every_run, num_in_any_run = num_metrics
    metrics = ", ".join(description["metric"] for description in described)
    omitted = more_text(num_in_every_run - len(described))
    return f"{num_in_every_run} of {num_in_any_run} recorded in every run: {metrics}{omitted}"


def _description_cells(description: Evidence) -> list[str]:
    steps = SCORES_TEXT.get(description["axis"]) or f"{description['steps'][0]}-{description['steps'][1]}"
    cells = [description["metric"], steps]
    cells += [f"{description['baseline']:.4g}", f"{description['treatment']:.4g}"]
    if description["interval"] is None:
        return [*cells, f"{description['difference']:+.3g}"]
    return [*cells, difference_text(description["difference"], description["interval"])]


# --- seed noise: one arm alone, and one run beside several ---

ALONE_NOTE = (
    "Gap: the largest between two runs that seed noise alone explains (95 %; 90 % if the levels are skewed). "
    "Shown by N pairs: the smallest difference that N runs of each of two arms detect with 80 % power "
    "(planned with the upper 80 % bound of the sd)."
)


def _noise_cells(noise: Evidence) -> list[str]:
    scale = "" if noise["transform"] == "identity" else f" ({noise['transform'].replace('_', ' ')})"
    level = "-" if noise["mean"] is None else f"{noise['mean']:.4g}"
    spread = "-" if noise["sd"] is None else f"{noise['sd']:.3g}"
    if noise["sd"] is not None and noise["sd_interval"]:
        spread += f" {interval_text(noise['sd_interval'])}"
    gap = "-" if noise["gap"] is None else f"{noise['gap']:.3g}"
    shows = [f"{prospect['difference']:.3g}" for prospect in noise["prospects"]] or ["-"] * len(PAIR_COUNTS)
    metric, steps = f"{noise['metric']}{scale}", _steps_text(noise["steps"])
    return [metric, steps, str(len(noise["levels"])), level, spread, gap, *shows]


def _steps_text(steps: tuple[int, int] | None) -> str:
    return f"{steps[0]}-{steps[1]}" if steps else "-"


def _noise_tables(evidence: Sequence[Evidence], content: VerdictFile) -> list[Table]:
    """Return the table of metrics, and one of the power of claims with a margin, if there are any."""
    claimed = [noise for noise in evidence if noise["claim"] is not None]
    unclaimed = [noise for noise in evidence if noise["claim"] is None and noise["gap"] is not None]
    listed = [*claimed, *unclaimed[:MAX_METRICS]]
    tables = []
    if listed:
        heading = ["metric", "steps", "runs", "level", "sd over runs [90 % CI]", "gap"]
        shows = [f"shown by {PAIR_COUNTS[0]}", *(str(count) for count in PAIR_COUNTS[1:])]
        titles, cells = columns(*heading, *shows, fold=True), [_noise_cells(noise) for noise in listed]
        tables.append(Table(titles, cells, optional=("steps", "runs", *shows[:0:-1])))
    rows = []
    for noise in claimed:
        powers = [prospect["match_power"] for prospect in noise["prospects"]]
        if any(power is not None for power in powers):
            needed = "more than 1000" if noise["pairs_needed"] is None else f"{noise['pairs_needed']} pairs"
            cells = ["-" if power is None else percent_text(power) for power in powers]
            rows.append([f"{noise['metric']}: {noise['claim']}", *cells, needed])
    if rows:
        counts = [f"{count} pairs" for count in PAIR_COUNTS]
        tables.append(Table(columns("P(match or pass) if equal", *counts, "80 % power at"), rows))
    return tables


def _new_run_table(new_runs: Sequence[Evidence]) -> Table:
    """Return the table of an arm that is compared by a single run."""
    new_run = new_runs[0]
    heading = ["metric", "steps", f"{new_run['several']} (runs)", new_run["run"], "difference", "in sds"]
    rows = [
        [
            row["metric"],
            _steps_text(row["steps"]),
            f"{row['mean']:.4g} ({row['num_runs']})",
            f"{row['level']:.4g}",
            f"{row['difference']:+.3g}",
            "-" if row["num_sds"] is None else f"{row['num_sds']:.2g}",
            interval_text(row["interval"]),
            f"{row['p_holm']:.2g}",
        ]
        for row in new_runs[:MAX_METRICS]
    ]
    titles = columns(*heading, "95 of 100 further runs", "p (Holm)", fold=True)
    return Table(titles, rows, optional=("steps", "in sds", "p (Holm)"))


# --- step one, guards and divergence ---


def _step_one_line(checks: Sequence[Evidence], content: VerdictFile, arm: str) -> str | None:
    if not _is_compared_step_by_step(content, arm):
        return None
    if not checks:
        return "not checked"
    failed_metrics = [check["metric"] for check in checks if check.result in ("fail", "redefined")]
    open_metrics = [check["metric"] for check in checks if check.result == "open"]
    untested = [check for check in checks if check.result == "not tested"]
    tested = [check for check in checks if check.result != "not tested"]
    state = f"{len(tested)} metric{'s' * (len(tested) > 1)} agree{'s' * (len(tested) == 1)}"
    if failed_metrics:
        is_redefined = any(check.result == "redefined" for check in checks)
        state = f"fails for {', '.join(failed_metrics)}{' (another definition)' * is_redefined}"
    elif open_metrics:
        state = f"undecided for {', '.join(open_metrics)}"
    clauses = []
    if tested and not any(check["deviation"] for check in tested):
        clauses.append(f"{state} exactly")
    elif tested:
        clauses.append(f"{state}; largest deviation: {_largest_deviation_text(tested)}")
    if untested:
        omitted = f", and {len(untested) - 1} more" * (len(untested) > 1)
        clauses.append(f"not tested: {_largest_deviation_text(untested)}{omitted}")
    return "; ".join(clauses)


def _largest_deviation_text(checks: Sequence[Evidence]) -> str:
    """Return the deviation that is largest relative to its tolerance."""
    check = max(checks, key=lambda check: check["deviation"] / check["tolerance"])
    share = deviation_text(check["deviation"], check["scale"], check["scale_from"])
    return f"{check['metric']}, {share}; tolerance {check['tolerance']:.2g} ({check['tolerance_from']})"


def _guards_line(guards: Sequence[Evidence], content: VerdictFile, arm: str) -> str:
    results = ("fail", "baseline too", "open")
    broken = [f"{guard['guard']}: {guard.result}" for guard in guards if guard.result in results]
    passed = [
        f"{guard['guard']}{' (at its limit)' * bool(guard['limit'] and guard['value'] == guard['limit'])}"
        for guard in guards
        if guard.result == "pass"
    ]
    return "; ".join([*broken, f"pass: {', '.join(passed)}"] if passed else broken) or "not checked"


def _divergence_line(divergences: Sequence[Evidence], content: VerdictFile, arm: str) -> str | None:
    if not _is_compared_step_by_step(content, arm):
        return None
    if not divergences:
        return "not measured: finished pairs share no step of a claimed metric or of a step-one metric"
    main = divergences[0]
    repeating = [row for row in divergences if row["noise_floor"] == "zero"]
    measured = [row for row in divergences[:3] if row["noise_floor"] == "measured"]
    clauses = [f"{row['metric']}: {row['ratio']:.2g}x the A/A noise floor" for row in measured]
    clauses += [_bitwise_reruns_text(repeating)] if repeating else []
    clauses = clauses or ["unknown noise floor (no A/A reruns)"]
    if main["ulp"]:
        clauses.append(f"{main['metric']}: {_ulp_text(main['ulp'])}")
    if main["share_of_seed_spread"] is not None:
        share = f"{main['share_of_seed_spread']:.2g}x its sd over seeds"
        clauses.append(f"over all steps, the mean |difference| of {main['metric']} at a step is {share}")
    return "; ".join(clauses)


def _ulp_text(growth: Mapping[str, Any]) -> str:
    if growth["ratio"] is None:
        return "no ratio to the divergence caused by one ULP, as one of the two is 0"
    interval = f" {interval_text(growth['ci95'])}" if growth["ci95"] else ""
    return f"{growth['ratio']:.2g}x{interval} the divergence caused by one ULP"


def _bitwise_reruns_text(divergences: Sequence[Evidence]) -> str:
    """Return one clause for all metrics in which baseline reruns are bit-identical."""
    divergence_steps = [(row["first_step_apart"], row["metric"]) for row in divergences]
    steps = [step for step, _ in divergence_steps if step is not None]
    is_one = len(divergences) == 1
    treatment = "so is the treatment"
    if steps:
        earliest = [metric for step, metric in divergence_steps if step == min(steps)]
        where = "" if is_one else f", in {earliest[0]}{more_text(len(earliest) - 1)}"
        treatment = f"the arms first differ at step {min(steps)}{where}"
    metrics = divergences[0]["metric"] if is_one else f"{len(divergences)} metrics"
    return f"baseline reruns are bit-identical in {metrics}; {treatment}"


# --- trace, final weights and cost ---


def _final_weights_line(evidence: Sequence[Evidence], content: VerdictFile, arm: str) -> str | None:
    if not evidence:
        return None
    (weights,) = evidence
    equal_text = f"bit-identical in {weights['num_equal']} of {weights['num_pairs']} pairs"
    if weights["num_equal"] == weights["num_pairs"] or weights["seed"] is None:
        return equal_text
    controls = {"A/A": weights["aa_relative_difference"], "one ULP": weights["ulp_relative_difference"]}
    distances = [
        f"; {name} {difference:.2g}" for name, difference in controls.items() if difference is not None
    ]
    return (
        f"{equal_text}; relative distance {weights['relative_difference']:.2g} (seed {weights['seed']}"
        f"{''.join(distances)}); estimated from a sketch, within 8 %"
    )


def _cost_line(evidence: Sequence[Evidence], content: VerdictFile, arm: str) -> str | None:
    savings = []
    for saving in evidence:
        if "," not in saving["quantity"]:
            interval = interval_text(saving["ci95"]).replace("[", " [95 % CI ") if saving["ci95"] else ""
            savings.append(f"{saving['quantity']} {saving['ratio']:.3g}x{interval}")
    return f"{arm} relative to {content.baseline}: {'; '.join(savings)}" if savings else None


# --- all kinds ---

Line = Callable[[Sequence[Evidence], VerdictFile, str], str | None]
# The label of a kind's line on each arm, and the function that words it; None for no line
LINES: dict[Kind, tuple[str, Line]] = {
    "step one": ("step one", _step_one_line),
    "description": ("metrics", _metrics_line),
    "guard": ("guards", _guards_line),
    "divergence": ("divergence", _divergence_line),
    "trace": (
        "trace",
        lambda traces, *_: next((str(trace.reason) for trace in traces if trace.reason), None),
    ),
    "final weights": ("final weights", _final_weights_line),
    "cost": ("cost", _cost_line),
}
CHECKS = ("step one", "guard")  # kinds that pass or fail
TABLES: dict[Kind, Callable[[Sequence[Evidence], VerdictFile], list[Table]]] = {
    "new run": lambda rows, content: [
        _new_run_table(arm_rows)
        for arm in content.arms
        if (arm_rows := [row for row in rows if row.arm == arm])
    ],
    "description": _description_tables,
    "seed noise": _noise_tables,
}


# --- levels of the arms in the windows of claims ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The levels of both arms in the window of a claim, as text."""

    claim: int  # index into verdict.json's claims
    arm: str
    where: str  # metric and steps
    means: str  # of both arms, with the difference and its interval
    details: str  # the margin as a share of the level, and the spreads; may be empty

    @property
    def text(self) -> str:
        return f"{self.where}: {self.means}{'; ' if self.details else ''}{self.details}"


def claim_levels(content: VerdictFile) -> list[Levels]:
    """Return the levels for each claim that has them in both arms, in the order of verdict.json."""
    levels = []
    for index, claim in enumerate(content.claims):
        terms, means = claim.claim, _means_text(claim, content.baseline)
        if means:
            where = terms.metric + (f", steps {terms.steps[0]}-{terms.steps[1]}" if terms.steps else "")
            details = "; ".join(filter(None, (_margin_text(claim), _spread_text(claim))))
            levels.append(Levels(claim=index, arm=claim.arm, where=where, means=means, details=details))
    return levels


def _means_text(claim: ClaimResult, baseline: str) -> str | None:
    terms, estimate = claim.claim, claim.estimate
    base, treatment, interval = estimate.baseline_mean, estimate.treatment_mean, estimate.interval
    if base is None or treatment is None or interval is None:
        return None
    difference = treatment - base
    confidence = interval_level_text(terms.alpha)
    if terms.transform == "identity":
        qualifier = "difference" if terms.num_runs else "paired difference"
        size = f"{difference_text(difference, interval)} ({confidence} CI{_wider_interval_text(claim)})"
        return f"{baseline} {base:.4g}, {claim.arm} {treatment:.4g}; {qualifier} {size}"
    is_excess = terms.transform == "log_excess"
    with np.errstate(over="ignore"):
        low, ratio, high = np.exp([interval[0], difference, interval[1]])
        base_level, level = np.exp([base, treatment]) + is_excess
    both = f"{baseline} {base_level:.4g}, {claim.arm} {level:.4g}"
    qualifier = " of the excess over 1" * is_excess
    ratio_text = f"ratio{qualifier} {ratio:.3g} {interval_text((low, high))} ({confidence} CI)"
    return f"{both} (geometric means), {ratio_text}"


def _wider_interval_text(claim: ClaimResult) -> str:
    """Return a note if discrete values of the metric make the interval wider than its differences do."""
    terms, estimate = claim.claim, claim.estimate
    error, sds, sizes = estimate.standard_error, [estimate.sd_difference], [terms.num_pairs]
    if terms.num_runs:
        sds, sizes = [estimate.baseline_sd, estimate.treatment_sd], terms.num_runs
    known_sds = [sd for sd in sds if sd is not None]
    if error is None or len(known_sds) < len(sds):
        return ""
    spread_error = math.hypot(*(sd / math.sqrt(size) for sd, size in zip(known_sds, sizes, strict=True)))
    is_wider = error > (1 + 1e-9) * spread_error
    return ", widened because the metric takes discrete values" if is_wider else ""


def _margin_text(claim: ClaimResult) -> str | None:
    """Return the margin as a share of the level and climb, or as a factor if the claim is on a log scale."""
    terms, margin = claim.claim, claim.claim.margin
    if not margin:  # unknown, or `better: 0`
        return None
    number = f"{margin:.3g}" if terms.margin_unit else f"{terms.margin_number:g}"
    margin_text = f"{'±' if terms.kind == 'within' else ''}{number}"
    if terms.transform != "identity":
        with np.errstate(over="ignore"):
            low, high = np.exp([-margin, margin])
        return f"margin {margin_text} is a factor of {low:.3g} to {high:.3g}"
    shares = []
    quantities = {"the baseline's level": claim.estimate.baseline_mean, "its climb": claim.estimate.climb}
    for name, quantity in quantities.items():
        if quantity:
            share = margin / abs(quantity)
            shares.append(f"{100 * share:{'.0f' if share >= 1 else '.2g'}} % of {name}")
    return f"margin {margin_text} is {' and '.join(shares)}" if shares else None


def _spread_text(claim: ClaimResult) -> str | None:
    baseline_sd, paired_sd = claim.estimate.baseline_sd, claim.estimate.sd_difference
    treatment_sd = claim.estimate.treatment_sd
    if baseline_sd is None or paired_sd is None:
        return None
    if claim.claim.num_runs:
        return f"sd over the baseline's runs {baseline_sd:.3g}, unpaired"
    # Records of older versions have no sd of the treatment.
    unpaired_sd = 0.0 if treatment_sd is None else math.hypot(baseline_sd, treatment_sd)
    text = f"sd over {claim.claim.unit}s {baseline_sd:.3g}, sd of the paired differences {paired_sd:.3g}"
    # A smaller paired sd is rounding, and a ratio to it means nothing.
    if 1e-6 * unpaired_sd < paired_sd < unpaired_sd:
        ratio = f"{unpaired_sd / paired_sd:.2g}x below that of unpaired differences"
        text += f", {ratio} ({unpaired_sd:.3g})"
    return text
