"""A submission against reference convergence points (RCPs), as MLPerf's rcp_checker judges it.

Source: mlcommons/logging, mlperf_logging/rcp_checker/rcp_checker.py (version 4.1.59), with its default
`pruned_rcps`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from abrun.diagnose.mlperf.submission import SubmittedRun, read_submission
from abrun.errors import ComparisonError, StoreError
from abrun.logs.mlperf import is_number
from abrun.reasons import Code, Reason
from abrun.redaction import printable
from abrun.runs.files import read_json
from abrun.stats.reference_points import (
    ReferencePoint,
    Rules,
    failure_rate_of_equals,
    interpolate,
    make_point,
    olympic_mean,
    passes,
    prune,
)

FAILED = 3  # exit code
CONVERGENCE_KEYS = ("samples to converge", "Epochs to converge")
IN_STEPS = "sd"  # benchmark of round 3.1's references for Stable Diffusion, which count steps
# Runs of a submission by benchmark; references have twice as many
NUM_RUNS = {
    **dict.fromkeys(("gpt3", "llama31_405b", "deepseekv3_671b", "qwen35_397b_grpo"), 3),
    **dict.fromkeys(("maskrcnn", "resnet", "ssd", "retinanet", "deepcam", "oc20"), 5),
    **dict.fromkeys(("bert", "dlrm_dcnv2", "rnnt", "stable_diffusion", "gnn", "rgat", "llama2_70b_lora"), 10),
    **dict.fromkeys(("flux1", "llama31_8b", "gpt_oss_20b", "dlrmv4", "cosmoflow", "openfold"), 10),
    "unet3d": 40,
}
NUM_TRIMMED = {"unet3d": 4}
ALLOWANCES = {"llama31_405b": 46080}  # samples


@dataclass(frozen=True, slots=True, kw_only=True)
class RcpCheck:
    """Outcome of a check."""

    result: Literal["PASS", "FAIL"]
    reasons: tuple[Reason, ...]
    warnings: tuple[Reason, ...]
    benchmark: str
    batch_size: float
    convergence: tuple[float, ...]  # samples or epochs of each run; 1e9 for a run that did not converge
    mean: float | None  # olympic; None if too many runs did not converge
    point: ReferencePoint | None  # that it was compared with
    limit: float | None  # smallest mean that passes
    scaling: float  # factor by which MLPerf multiplies the score of a submission that is faster by chance


def check_submission(folder: Path, points_file: Path) -> RcpCheck:
    """Judge the runs in a folder by a file of reference points.

    Raises StoreError or ComparisonError for files that cannot be read, or do not belong together.
    """
    benchmark, references, axis = _read_points(points_file)
    rules = make_rules(benchmark)
    runs = read_submission(folder, benchmark, axis=axis)
    if len(runs) <= 2 * rules.num_trimmed:
        raise ComparisonError(
            f"{printable(str(folder))}: got {len(runs)} of the {rules.num_runs} runs that {benchmark} takes; "
            "the fastest and slowest do not count"
        )
    points = [make_point(batch_size, values, rules) for batch_size, values in references]
    return judge_runs(runs, prune(points, rules), rules)


def make_rules(benchmark: str) -> Rules:
    """Return the rules of a benchmark. Raises ComparisonError if it is unknown."""
    if benchmark not in NUM_RUNS:
        raise ComparisonError(
            f"Benchmark: got {benchmark!r}; allowed: {', '.join(sorted(NUM_RUNS))}; give one of their files"
        )
    return Rules(
        num_runs=NUM_RUNS[benchmark],
        num_trimmed=NUM_TRIMMED.get(benchmark, 1),
        allowance=ALLOWANCES.get(benchmark, 0.0),
    )


def judge_runs(runs: Sequence[SubmittedRun], points: Sequence[ReferencePoint], rules: Rules) -> RcpCheck:
    """Judge runs by the points that count, in order of their batch size."""
    batch_size, values = runs[0].batch_size, [run.convergence for run in runs]
    num_failed = sum(not run.has_converged for run in runs)
    if num_failed > rules.num_trimmed:
        reason = Code.RCP_NOT_CONVERGED(num=num_failed, of=len(runs), allowed=rules.num_trimmed)
        return _make_check(runs, reason, rules, passed=False)
    mean = olympic_mean(values, rules.num_trimmed)
    point, is_bound = _find_point(batch_size, points, rules)
    if point is None:
        reason = Code.RCP_MISSING(batch_size=batch_size, nearest=points[-1].batch_size, smaller=False)
        return _make_check(runs, reason, rules, passed=False, mean=mean)
    passed = passes(mean, point, rules)
    if is_bound and not passed:
        reason = Code.RCP_MISSING(batch_size=batch_size, nearest=points[0].batch_size, smaller=True)
        return _make_check(runs, reason, rules, passed=False, mean=mean, point=point)
    code = Code.RCP_PASSES if passed else Code.RCP_FAILS
    reason = code(
        mean=mean,
        limit=point.limit - rules.allowance,
        reference_mean=point.mean,
        batch_size=batch_size,
        point_batch_size=point.batch_size,
        interpolated=not point.values,
        scaling=max(1.0, point.mean / mean),
    )
    return _make_check(runs, reason, rules, passed=passed, mean=mean, point=point)


def _find_point(
    batch_size: float, points: Sequence[ReferencePoint], rules: Rules
) -> tuple[ReferencePoint | None, bool]:
    """Return the point for a batch size, and if it is that of the smallest one, which is only a bound.

    None above the largest batch size.
    """
    exact = next((point for point in points if point.batch_size == batch_size), None)
    if exact is not None:
        return exact, False
    below = [point for point in points if point.batch_size < batch_size]
    above = [point for point in points if point.batch_size > batch_size]
    if not above:
        return None, False
    return (interpolate(batch_size, below[-1], above[0], rules), False) if below else (points[0], True)


def _make_check(
    runs: Sequence[SubmittedRun],
    reason: Reason,
    rules: Rules,
    *,
    passed: bool,
    mean: float | None = None,
    point: ReferencePoint | None = None,
) -> RcpCheck:
    warnings = []
    if point is not None and point.sd == 0 and point.values:
        share, rate = failure_rate_of_equals(len(point.values), rules)
        warnings.append(
            Code.RCP_WITHOUT_SPREAD(
                num=len(point.values), value=point.mean, batch_size=point.batch_size, share=share, rate=rate
            )
        )
    if len(runs) != rules.num_runs:
        warnings.append(Code.RCP_OTHER_NUM_RUNS(num=len(runs), needed=rules.num_runs))
    return RcpCheck(
        result="PASS" if passed else "FAIL",
        reasons=(reason,),
        warnings=tuple(warnings),
        benchmark=runs[0].benchmark,
        batch_size=runs[0].batch_size,
        convergence=tuple(run.convergence for run in runs),
        mean=mean,
        point=point,
        limit=None if point is None else point.limit - rules.allowance,
        scaling=max(1.0, point.mean / mean) if passed and point and mean else 1.0,
    )


def _read_points(path: Path) -> tuple[str, list[tuple[float, list[float]]], str | None]:
    """Return benchmark, runs by batch size, and the axis if it is not the benchmark's, of an rcps_*.json."""
    content, place = read_json(path), printable(str(path))
    if not content or not all(isinstance(record, dict) for record in content.values()):
        raise StoreError(f"{place}: not a file of reference points; give an rcps_*.json of mlcommons/logging")
    references = [
        (_read_batch_size(record, place, name), _read_runs(record, place, name))
        for name, record in content.items()
    ]
    benchmarks = sorted({str(record.get("Benchmark")) for record in content.values()})
    if len(benchmarks) > 1:
        raise StoreError(f"{place}: has references of {' and '.join(map(printable, benchmarks))}; keep one")
    if benchmarks[0] == IN_STEPS:
        return "stable_diffusion", references, "step_num"
    return printable(benchmarks[0]), references, None


def _read_batch_size(record: Mapping[str, Any], place: str, name: str) -> float:
    value = record.get("BS")
    if not _is_positive(value):
        raise StoreError(f"{place}: {printable(name)}: BS: got {value!r:.40}; allowed: a number above 0")
    return value


def _read_runs(record: Mapping[str, Any], place: str, name: str) -> list[float]:
    values = next((record[key] for key in CONVERGENCE_KEYS if key in record), None)
    rules = make_rules(record["Benchmark"]) if record.get("Benchmark") in NUM_RUNS else Rules(num_runs=3)
    min_runs = 2 * rules.num_trimmed + 1
    if not isinstance(values, list) or len(values) < min_runs or not all(map(_is_positive, values)):
        raise StoreError(
            f"{place}: {printable(name)}: {CONVERGENCE_KEYS[1]}: got {values!r:.40}; allowed: at least "
            f"{min_runs} numbers above 0"
        )
    return values


def _is_positive(value: Any) -> TypeGuard[int | float]:
    return is_number(value) and value > 0
