"""MLPerf's reference check: limits as its own checker computes them, an oracle, logs, and bad input."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from abrun.diagnose.mlperf.check import check_submission, judge_runs, make_rules
from abrun.diagnose.mlperf.submission import FAILED_CONVERGENCE, SubmittedRun
from abrun.errors import AbrunError
from abrun.reasons import Code
from abrun.stats.reference_points import ReferencePoint, Rules, make_point, prune

REFERENCES = Path(__file__).parent / "references"
# (batch size, mean, sd, limit) of the points that count, printed by mlperf_logging.rcp_checker 4.1.59
PUBLISHED = {
    "qwen35_397b_grpo": [(256, 4608.0, 0.0, 4608.0), (512, 5120.0, 0.0, 5120.0), (1024, 7168.0, 0.0, 7168.0)],
    "llama31_405b": [
        (1152, 313344.0, 10641.720161703182, 285344.1411244869),
        (2304, 368640.0, 10641.720161703182, 340640.1411008835),
        (4608, 493056.0, 14077.67253490434, 456015.66833361983),
    ],
    "rgat": [
        (4096, 0.7888888888888889, 0.03391164991562634, 0.7641879611545139),
        (32768, 0.9388888888888888, 0.03391164991562632, 0.9142189873589408),
        (262144, 2.458333333333334, 0.11412712210513329, 2.375396092732748),
    ],
}


def read_points(benchmark: str) -> list[ReferencePoint]:
    content = json.loads((REFERENCES / f"rcps_{benchmark}.json").read_text())
    rules = make_rules(benchmark)
    return prune([make_point(row["BS"], row["Epochs to converge"], rules) for row in content.values()], rules)


def judged(benchmark: str, batch_size: float, values: Sequence[float]) -> tuple[str, Code]:
    runs = [
        SubmittedRun(
            path=Path(),
            benchmark=benchmark,
            batch_size=batch_size,
            convergence=value,
            has_converged=value != FAILED_CONVERGENCE,
        )
        for value in values
    ]
    check = judge_runs(runs, read_points(benchmark), make_rules(benchmark))
    return check.result, check.reasons[0].code


@pytest.mark.parametrize("benchmark", PUBLISHED)
def test_limits_are_those_of_the_published_checker(benchmark: str) -> None:
    points = [(p.batch_size, p.mean, p.sd, p.limit) for p in read_points(benchmark)]
    assert np.array(points) == pytest.approx(np.array(PUBLISHED[benchmark]), rel=1e-12)


def limit_by_t_tests(values: Sequence[float], num_runs: int, num_trimmed: int) -> float:
    """Bisect the smallest mean that scipy's two-sample t-test does not reject, as the rules describe it."""
    counted = sorted(values)[num_trimmed : len(values) - num_trimmed]
    mean, sd = sum(counted) / len(counted), float(np.std(values))
    low, high = 0.0, mean
    while high - low > 1e-4:
        middle = (low + high) / 2
        test = stats.ttest_ind_from_stats(middle, sd, len(counted), mean, sd, num_runs - 2)
        p = test.pvalue / 2 if test.statistic < 0 else 1 - test.pvalue / 2
        low, high = (low, middle) if p > 0.05 else (middle, high)
    return (low + high) / 2


def test_the_limit_agrees_with_t_tests_of_scipy() -> None:
    rng = np.random.default_rng(0)
    for num_runs, num_trimmed in [(3, 1), (5, 1), (10, 1), (40, 4)]:
        for scale in (1.0, 1e5):
            values = (scale * (1 + 0.1 * rng.random(2 * num_runs))).tolist()
            point = make_point(8, values, Rules(num_runs=num_runs, num_trimmed=num_trimmed))
            assert point.limit == pytest.approx(
                limit_by_t_tests(values, num_runs, num_trimmed), abs=1e-9 * scale
            )


def test_points_below_the_fastest_and_above_their_neighbours_do_not_count() -> None:
    rules = Rules(num_runs=5)
    means = {1: 30.0, 2: 20.0, 4: 26.0, 6: 24.0, 8: 29.0}
    points = [make_point(size, [mean - 1, mean, mean + 1], rules) for size, mean in means.items()]
    assert [point.batch_size for point in prune(points, rules)] == [2, 6, 8]


@pytest.mark.parametrize(
    ("benchmark", "batch_size", "values", "result", "code"),
    [
        ("rgat", 32768, [0.9] * 9 + [1.0], "FAIL", Code.RCP_FAILS),
        ("rgat", 32768, [0.95] * 10, "PASS", Code.RCP_PASSES),
        ("rgat", 16384, [0.9] * 10, "PASS", Code.RCP_PASSES),  # its own point is pruned: interpolated
        ("rgat", 2048, [0.8] * 10, "PASS", Code.RCP_PASSES),  # slower than the smallest batch size
        ("rgat", 2048, [0.7] * 10, "FAIL", Code.RCP_MISSING),
        ("rgat", 524288, [9.0] * 10, "FAIL", Code.RCP_MISSING),
        ("rgat", 32768, [0.95] * 9 + [FAILED_CONVERGENCE], "PASS", Code.RCP_PASSES),
        ("rgat", 32768, [0.95] * 8 + [FAILED_CONVERGENCE] * 2, "FAIL", Code.RCP_NOT_CONVERGED),
        ("llama31_405b", 1152, [285344.15 - 46080] * 3, "PASS", Code.RCP_PASSES),
        ("llama31_405b", 1152, [285344.1 - 46080] * 3, "FAIL", Code.RCP_FAILS),
        ("qwen35_397b_grpo", 256, [4608] * 3, "PASS", Code.RCP_PASSES),
        ("qwen35_397b_grpo", 256, [4352, 4352, 4608], "FAIL", Code.RCP_FAILS),
        ("qwen35_397b_grpo", 384, [4863, 4863, 4863], "FAIL", Code.RCP_FAILS),
    ],
)
def test_results(benchmark: str, batch_size: float, values: Sequence[float], result: str, code: Code) -> None:
    assert judged(benchmark, batch_size, values) == (result, code)


# --- logs ---


def write_log(
    path: Path, samples: Sequence[int], *, status: str = "success", batch_size: float = 256, **changes: object
) -> None:
    """Write a log as mlperf_logging.mllog does, among other output."""
    facts = {
        "submission_benchmark": "qwen35_397b_grpo",
        "seed": 7,
        "global_batch_size": batch_size,
        **changes,
    }
    events: list[tuple[str, object, dict[str, object]]] = [(key, value, {}) for key, value in facts.items()]
    events.append(("run_start", None, {}))
    for index, count in enumerate(samples):
        events.append(("eval_accuracy", 0.1 + index / 10, {"samples_count": count}))
    events.append(("run_stop", None, {"status": status} if status else {}))
    lines = ["a banner"]
    for index, (key, value, metadata) in enumerate(events):
        content = {"namespace": "", "time_ms": 1000 * index, "event_type": "POINT_IN_TIME", "key": key}
        content |= {"value": value, "metadata": {"file": "run.py", "lineno": 1, **metadata}}
        lines.append(f" 0: :::MLLOG {json.dumps(content)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def write_submission(folder: Path, last: Sequence[int], **changes: object) -> Path:
    for index, count in enumerate(last):
        write_log(folder / f"result_{index}.txt", [count - 256, count], **changes)  # type: ignore[arg-type]
    return folder


def test_the_command_names_limit_and_missing_spread(
    tmp_path: Path, abrun: Callable[..., tuple[int, str, str]]
) -> None:
    folder = write_submission(tmp_path / "grpo", [4608, 4352, 4864])
    points = str(REFERENCES / "rcps_qwen35_397b_grpo.json")
    code, output, _ = abrun("reference", "mlperf", folder, points)
    passed, warning = output.split("warning: ")
    assert code == 0
    assert passed.startswith(
        "PASS: qwen35_397b_grpo: olympic mean 4608 at batch size 256 is not below the limit"
    )
    # 1 - 0.05**(1/6) = 0.393, and 3 * 0.393**2 * 0.607 + 0.393**3 = 0.342
    assert "all 4608" in warning and "up to 39 %" in warning and "34 % of equal submissions fail" in warning
    write_submission(folder, [4352, 4352, 4864])
    code, output, _ = abrun("reference", "mlperf", folder, points, "--json")
    content = json.loads(output)
    assert code == 3
    assert (content["result"], content["mean"], content["limit"]) == ("FAIL", 4352, 4608)
    assert content["reason_codes"][0]["code"] == "rcp_fails"


def test_a_run_that_did_not_succeed_is_infinitely_slow(tmp_path: Path) -> None:
    points = REFERENCES / "rcps_qwen35_397b_grpo.json"
    folder = write_submission(tmp_path / "grpo", [4608, 4608, 4608])
    write_log(folder / "result_2.txt", [4352], status="aborted")
    assert check_submission(folder, points).convergence == (4608, 4608, FAILED_CONVERGENCE)
    write_log(folder / "result_1.txt", [4352], status="")
    assert check_submission(folder, points).result == "FAIL"


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    points = REFERENCES / "rcps_qwen35_397b_grpo.json"
    three = [4608, 4608, 4608]
    other_size = write_submission(tmp_path / "sizes", three)
    write_log(other_size / "result_1.txt", [4608], batch_size=512)
    damaged = tmp_path / "rcps.json"
    damaged.write_text('{"a": {"Benchmark": "rgat", "BS": 8, "Epochs to converge": [1, 2, "x"]}}')
    chess = tmp_path / "chess.json"
    chess.write_text('{"a": {"Benchmark": "chess", "BS": 8, "Epochs to converge": [1, 2, 3]}}')
    no_size = tmp_path / "size.json"
    no_size.write_text('{"a": {"Benchmark": "rgat", "BS": null, "Epochs to converge": [1, 2, 3]}}')
    (tmp_path / "empty").mkdir()
    cases = [
        (tmp_path / "none", points, "no such folder"),
        (tmp_path / "empty", points, "no MLPerf logs found"),
        (other_size, points, r"global_batch_size is 256 in result_0.txt and 512 in result_1.txt"),
        (
            write_submission(tmp_path / "two", three[:2]),
            points,
            "got 2 of the 3 runs that qwen35_397b_grpo takes",
        ),
        (
            write_submission(tmp_path / "chess", three, submission_benchmark="chess"),
            points,
            "is a run of chess, but",
        ),
        (
            write_submission(tmp_path / "none2", three, submission_benchmark=None),
            points,
            "no event submission_b",
        ),
        (
            write_submission(tmp_path / "size0", three, batch_size=0),
            points,
            "no event global_batch_size above 0",
        ),
        (
            write_submission(tmp_path / "ok", three),
            REFERENCES / "rcps_rgat.json",
            "run of qwen35_397b_grpo, but the references are of rgat; give rcps_qwen35_397b_grpo",
        ),
        (tmp_path / "ok", damaged, r"a: Epochs to converge: got \[1, 2, 'x'\]; allowed: at least 3"),
        (tmp_path / "ok", chess, "Benchmark: got 'chess'"),
        (tmp_path / "ok", no_size, "a: BS: got None; allowed: a number above 0"),
        (tmp_path / "ok", tmp_path / "absent.json", "no such file"),
        (tmp_path / "ok", tmp_path / "ok" / "result_0.txt", "JSON"),
    ]
    for folder, file, message in cases:
        with pytest.raises(AbrunError, match=message) as caught:
            check_submission(folder, file)
        assert str(caught.value).isprintable()
    lacking = tmp_path / "ok" / "result_0.txt"
    lacking.write_text(lacking.read_text().replace("samples_count", "epoch_num"))
    with pytest.raises(AbrunError, match=r"line 6: eval_accuracy lacks samples_count in its metadata"):
        check_submission(tmp_path / "ok", points)
