"""Experiments of other trainers' logs: arms, baseline, pairs, status and notes."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import AbrunError, ComparisonError, StoreError
from abrun.logs.log import NOTHING_RECORDED
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.sources import open_sources
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim
from abrun.report.comparing import compare, with_options
from abrun.runs.files import write_json
from abrun.runs.layout import RunName
from abrun.runs.lines import LineWriter
from tests.reasons import only
from tests.snapshot import Snapshot


def write(
    folder: Path, name: str, values: Sequence[float] = (0.5, 0.25), metric: str = "train/reward"
) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(f"{step},{value}\n" for step, value in enumerate(values, 1))
    path.write_text(f"step,{metric}\n{rows}")
    return path


def load(*sources: object, **options: Any) -> RecordedExperiment:
    return open_sources([str(source) for source in sources], ReadingOptions(may_unpair=True, **options))


def names(experiment: RecordedExperiment) -> list[str]:
    return [str(name) for name in experiment.runs]


def test_one_folder_of_all_arms(tmp_path: Path) -> None:
    for arm in ("fused", "baseline"):
        for seed in (10, 2):
            write(tmp_path / "exp 1", f"{arm}-s{seed}.csv")
    write(tmp_path / "exp 1", "baseline-s2-aa1.csv")
    experiment = load(tmp_path / "exp 1")
    assert experiment.arms == ("baseline", "fused") and experiment.name == "exp-1"
    assert names(experiment) == [
        "baseline/seed-2",
        "baseline/seed-2-aa1",
        "fused/seed-2",
        "baseline/seed-10",
        "fused/seed-10",
    ]
    first, second = experiment.pairs("fused")
    assert (first.seed, second.seed) == (2, 10) and len(first.reruns) == 1 and second.reruns == ()
    run = first.baseline
    assert run.place.endswith("baseline-s2.csv") and run.status == "unknown" and run.finished
    assert run.identity is run.config is run.environment is None
    assert run.series("train/reward").values.tolist() == [0.5, 0.25]
    assert experiment.treatment_diff is None and experiment.launched_compare_sha256 is None


def test_sources_are_arms(tmp_path: Path) -> None:
    for arm in ("old", "new"):
        for seed in (0, 1):
            write(tmp_path, f"{arm}/run-{seed}/seed{seed}.csv")
    experiment = load(tmp_path / "old", tmp_path / "new")
    assert experiment.arms == ("old", "new") and experiment.name == "old-vs-new"
    assert names(experiment) == ["old/seed-0", "new/seed-0", "old/seed-1", "new/seed-1"]
    assert load(tmp_path / "old", tmp_path / "new", baseline="new").arms == ("new", "old")
    assert load(f"x={tmp_path / 'old'}", f"baseline=csv:{tmp_path / 'new'}").arms == ("baseline", "x")
    by_pattern = load(tmp_path / "old", tmp_path / "new", pattern="run-{seed}")
    assert names(by_pattern) == names(experiment)


def test_files_given_one_by_one(tmp_path: Path) -> None:
    files = [write(tmp_path, f"{arm}-s{seed}.csv") for arm in ("a", "b") for seed in (0, 1)]
    assert names(load(*files)) == ["a/seed-0", "b/seed-0", "a/seed-1", "b/seed-1"]
    files = [write(tmp_path, f"{arm}/seed-{seed}.csv") for arm in ("a", "b") for seed in (0, 1)]
    assert names(load(*files)) == ["a/seed-0", "b/seed-0", "a/seed-1", "b/seed-1"]
    one, other = write(tmp_path, "before.csv"), write(tmp_path, "after.csv")
    assert names(load(one, other)) == ["before/seed-0", "after/seed-0"]


def test_patterns_with_arms_over_several_sources(tmp_path: Path) -> None:
    for host in ("host1", "host2"):
        for arm in ("a", "b"):
            write(tmp_path, f"{host}/{arm}_{host[-1]}.csv")
    experiment = load(tmp_path / "host1", tmp_path / "host2", pattern="{arm}_{seed}")
    assert names(experiment) == ["a/seed-1", "b/seed-1", "a/seed-2", "b/seed-2"]
    with pytest.raises(ComparisonError, match="but the sources name their arms"):
        load(f"x={tmp_path / 'host1'}", f"y={tmp_path / 'host2'}", pattern="{arm}_{seed}")


def test_aliases_and_step_columns(tmp_path: Path, snapshot: Snapshot) -> None:
    for arm in ("baseline", "b"):
        write(tmp_path, f"{arm}-s0.csv", metric="critic/score/mean")
    assert load(tmp_path, aliases=["verl"]).metrics() == ["train/reward"]
    assert load(tmp_path, aliases=["x=critic/score/mean"]).metrics() == ["x"]
    recognised = load(tmp_path, step_column="step")
    assert recognised.metrics() == ["train/reward"]
    assert "critic/score/mean is train/reward" in recognised.guessed[-1]["guess"]
    with snapshot.refused(ComparisonError):
        load(tmp_path, aliases=["x=critic/score"])


def test_a_run_that_recorded_nothing_is_kept_an_arm_of_them_is_refused(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    for name in ("baseline-s0", "baseline-s1", "b-s1"):
        write(tmp_path, f"{name}.csv")
    (tmp_path / "b-s0.csv").touch()
    experiment = load(tmp_path)
    empty = experiment.runs[RunName(arm="b", seed=0)]
    assert empty.metrics == {} and empty.notes == (NOTHING_RECORDED,)
    (tmp_path / "b-s1.csv").write_text("step,loss\n")
    with pytest.raises(ComparisonError, match=f"'b' has no numbers in 2 runs: .*{NOTHING_RECORDED}") as error:
        load(tmp_path)
    snapshot(error.value)
    (tmp_path / "b-s0.csv").unlink()
    with pytest.raises(ComparisonError, match=r"'b' .* in 1 run: .*: no metric has a number in it"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("files", "options"),
    [
        (["a-s0", "b-s0"], {"baseline": "c"}),
        (["a-s0", "a-s1"], {}),
        (["a", "b"], {"allows_one_arm": True}),
        (["baseline-s0", "b-s0", "b-s1-aa1"], {}),
        (["baseline-s0", "b-s0"], {"group": "g"}),
        ([], {}),
    ],
)
def test_what_cannot_be_told_is_one_line(
    tmp_path: Path, files: list[str], options: dict[str, Any], snapshot: Snapshot
) -> None:
    for name in files:
        write(tmp_path, f"{name}.csv")
    with pytest.raises(AbrunError) as caught:
        load(tmp_path, **options)
    assert str(caught.value).isprintable()
    snapshot(caught.value)


def test_two_sources_of_one_name(tmp_path: Path) -> None:
    for folder in ("x/logs", "y/logs"):
        write(tmp_path, f"{folder}/s0.csv")
        write(tmp_path, f"{folder}/s1.csv")
    assert load(tmp_path / "x/logs", tmp_path / "y/logs").arms == ("x", "y")
    for folder in ("z/a/logs", "z/b/logs"):
        write(tmp_path, f"{folder}/s0.csv")
    with pytest.raises(ComparisonError, match="would all be named 'logs'"):
        load(tmp_path / "x/logs", f"logs={tmp_path / 'y/logs'}")
    with pytest.raises(StoreError, match="no such file"):
        load("baseline=nowhere", tmp_path)


def _stored(directory: Path, arm: str, seed: int, rerun: int = 0, **attempt: Any) -> None:
    config = {
        "experiment": "e",
        "arm": arm,
        "seed": seed,
        "rerun": rerun,
        "config": {"steps": 2, "policy": {"dtype": "bf16"}},
    }
    write_json(directory / "config.json", config)
    write_json(directory / "environment.json", {"python": "3.11.7"})
    write_json(directory / "attempts/0001.json", {"status": "finished", **attempt})
    writer = LineWriter(directory / "metrics.jsonl")
    for step in (1, 2):
        writer.write({"step": step, "attempt": 1, "time_s": 0.0, "train/reward": float(seed)})
    writer.close()


def test_run_directories_of_abrun(tmp_path: Path) -> None:
    _stored(tmp_path / "baseline" / "seed-1", "baseline", 1)
    write_json(tmp_path / "baseline" / "seed-1" / "result.json", {"step": 2})
    _stored(tmp_path / "b" / "seed-1", "b", 1, status="failed", message="out of memory")
    _stored(tmp_path / "copied" / "elsewhere", "b", 2)
    (tmp_path / "b" / "seed-1" / "checkpoints").mkdir()
    write(tmp_path / "b" / "seed-1" / "checkpoints", "x.csv")  # not a run
    runs = {str(name): run for name, run in load(tmp_path).runs.items()}
    assert sorted(runs) == ["b/seed-1", "b/seed-2", "baseline/seed-1"]
    assert [runs[name].status for name in sorted(runs)] == ["failed", "unknown", "finished"]
    assert runs["b/seed-1"].failure == "out of memory"
    assert runs["b/seed-1"].identity == {"arm": "b", "seed": 1, "rerun": 0}
    assert runs["b/seed-1"].config == {"steps": 2, "policy.dtype": "bf16", "initial_weights": None}
    assert runs["b/seed-1"].environment == {"python": "3.11.7"}
    assert runs["b/seed-2"].series("train/reward").values.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", '{"arm": "b", "seed": "x", "rerun": 0, "config": {}}', "seed: got 'x'"),
        ("config.json", "{ cut", "not readable as JSON"),
        ("config.json", None, "no such file"),
        ("metrics.jsonl", "garbage\n" * 3, "line 1: got 'garbage'"),
    ],
)
def test_a_damaged_run_of_abrun_is_named_and_not_taken_for_missing(
    tmp_path: Path, file: str, content: str | None, problem: str
) -> None:
    for arm in ("baseline", "b"):
        for seed in (0, 1, 2):
            _stored(tmp_path / arm / f"seed-{seed}", arm, seed)
    damaged = tmp_path / "b" / "seed-1" / file
    damaged.write_text(content) if content else damaged.unlink()
    arms = [tmp_path / "baseline", tmp_path / "b"]
    for sources in ([tmp_path], arms):
        experiment = load(*sources)
        run = experiment.runs[RunName(arm="b", seed=1)]
        assert run.status == "unreadable" and str(damaged) in run.failure and problem in run.failure
        reason = only(compare(experiment).content.reasons, Code.RUN_UNREADABLE)
        assert reason["run"] == "b/seed-1" and not reason["forbidden"]
    left_out = only(load(*arms, seeds=(0, 2)).left_out, Code.SEEDS_LEFT_OUT)
    assert left_out["broken"] == ["b/seed-1 cannot be read"]
    if file == "config.json":  # nothing else says which run it is
        damaged.parent.rename(tmp_path / "b" / "copy")
        with pytest.raises(StoreError, match=re.escape(problem)):
            load(*arms)


def test_folders_of_two_experiments_are_paired_by_their_runs_seeds(tmp_path: Path) -> None:
    """Runs of one name, and A/A reruns in both folders."""
    for name in ("old", "new"):
        for seed, rerun in ((0, 0), (0, 1), (3, 0)):
            suffix = f"-aa{rerun}" if rerun else ""
            _stored(tmp_path / name / "baseline" / f"seed-{seed}{suffix}", "baseline", seed, rerun=rerun)
    old, new = tmp_path / "old" / "baseline", tmp_path / "new" / "baseline"
    for sources, arms, rerun in (
        ([old, new], ("old", "new"), "new/seed-0-aa1"),
        ([f"a={old}", f"b={new}"], ("a", "b"), "b/seed-0-aa1"),
        ([*sorted(old.iterdir()), *sorted(new.iterdir())], None, "new/baseline/seed-0-aa1"),
    ):
        for may_unpair in (True, False):
            contents = ReadingOptions(may_unpair=may_unpair)
            experiment = open_sources([str(source) for source in sources], contents)
            arms = arms or ("old/baseline", "new/baseline")
            assert experiment.arms == arms and experiment.compare.paired and experiment.seeds_known
            first, second = experiment.pairs(arms[1])
            assert (first.seed, second.seed) == (0, 3) and not experiment.guessed
            assert [run.name.rerun for run in first.reruns] == [1] and second.reruns == ()
            assert only(experiment.left_out, Code.RERUNS_LEFT_OUT)["runs"] == [rerun]
    in_one = load(tmp_path)  # the folder of both experiments
    assert in_one.arms == ("new/baseline", "old/baseline") and len(in_one.pairs("old/baseline")) == 2
    by_pattern = load(old, new, pattern="seed-{seed}*", exclude=("*-aa1",))
    assert [pair.seed for pair in by_pattern.pairs("new")] == [0, 3]


def test_an_experiment_is_no_arm(tmp_path: Path) -> None:
    """Runs of several arms would be pooled as seeds of one."""
    for name, first in (("old", 0), ("new", 0), ("later", 2)):
        for arm in ("baseline", "fused"):
            for seed in (first, first + 1):
                _stored(tmp_path / name / arm / f"seed-{seed}", arm, seed)
    several_arms = r"several arms \('baseline', 'fused'\); .*/{}/baseline"
    for old, new in (("old", "new"), ("old", "new/fused"), ("a={}/old", "b={}/later")):
        with pytest.raises(ComparisonError, match=several_arms.format("old")):
            load(*(one.format(tmp_path) if "{" in one else tmp_path / one for one in (old, new)))
    for seed in (0, 1):
        write(tmp_path, f"csv/seed-{seed}/m.csv")
    with pytest.raises(ComparisonError, match=several_arms.format("old")):
        load(tmp_path / "old", tmp_path / "csv")
    with pytest.raises(ComparisonError, match=several_arms.format("above/old")):
        (tmp_path / "above").mkdir()
        load((tmp_path / "old").rename(tmp_path / "above/old").parent, tmp_path / "csv")
    (tmp_path / "above/old").rename(tmp_path / "old")
    assert load(tmp_path / "old/fused", tmp_path / "csv").arms == ("fused", "csv")
    assert load(tmp_path / "old/fused", tmp_path / "new/fused").arms == ("old", "new")
    # More seeds of the same arms: the runs say which they are
    pooled = load(tmp_path / "old", tmp_path / "later")
    assert pooled.arms == ("baseline", "fused") and len(pooled.pairs("fused")) == 4


def test_one_folder_as_both_arms_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "runs/s0.csv")
    write(tmp_path, "runs/s1.csv")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    for other in ("runs", "runs/", "link", "runs/s0.csv"):
        with pytest.raises(ComparisonError, match=r"both hold .* always agrees"):
            load(f"baseline={tmp_path / 'runs'}", f"treatment={tmp_path / other}")


def test_one_file_as_both_arms_of_a_folder_is_refused(tmp_path: Path) -> None:
    for seed in (0, 1):
        held = write(tmp_path, f"runs/baseline/s{seed}.csv")
        link = tmp_path / f"runs/treatment/s{seed}.csv"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(held) if seed else link.hardlink_to(held)
    with pytest.raises(ComparisonError, match=r"are one file, .* always agrees"):
        load(tmp_path / "runs")
    with pytest.raises(ComparisonError, match=r"both hold .* always agrees"):
        load(tmp_path / "runs/baseline", tmp_path / "runs/treatment")


def _judged(folder: Path, metrics: Sequence[str], **arms: Callable[[int, int], str]) -> Any:
    """The verdict on logs whose cells are by arm a function of step and seed."""
    for arm, cells in arms.items():
        for seed in (0, 1, 2):
            lines = [f"{step},{cells(step, seed)}" for step in range(1, 5)]
            (folder / f"{arm}-s{seed}.csv").write_text(
                "\n".join([",".join(["step", *metrics]), *lines]) + "\n"
            )
    claim = Claim(metric="train/reward", window="all", margin=0.2)
    return compare(with_options(load(folder), [claim]), output=folder / "report", formats=("json",)).content


@pytest.mark.parametrize(
    ("metric", "baseline", "treatment"),
    [
        ("train/reward", (0.0, ""), (0.15, "")),
        # However far: what would be open is set aside as what would fail is
        ("train/gen_kl_error", (1e-4, ",0.001"), (5e-4, ",0.005")),
        ("train/gen_kl_error", (1e-4, ",0.001"), (2e-2, ",0.2")),
    ],
)
def test_without_shared_prompts_step_one_is_not_tested(
    tmp_path: Path, metric: str, baseline: tuple[float, str], treatment: tuple[float, str], snapshot: Snapshot
) -> None:
    def cells(shift: float, more: str) -> Callable[[int, int], str]:
        return lambda step, seed: f"{0.1 * step + 0.01 * seed + shift}{more}"

    metrics = dict.fromkeys(["train/reward", metric])
    content = _judged(tmp_path, [*metrics], baseline=cells(*baseline), b=cells(*treatment))
    assert content.select("step one") == []
    why = only(content.not_tested, Code.STEP_ONE_NOT_READ)["why"]
    assert (why.code, why["metric"], why["seed"]) == (Code.PROMPTS_NOT_KNOWN, metric, 0)
    snapshot(sentence(why))
    finished = next(guard for guard in content.select("guard") if guard["guard"] == "finished")
    assert (finished.result, finished.reason) == ("not recorded", Code.ENDINGS_NOT_KNOWN())


REWARD, LOSS, NORM = "train/reward", "train/loss", "train/grad_norm"


@pytest.mark.parametrize(
    ("metrics", "differing", "baseline", "treatment"),
    [
        # Another gradient from the same loss is the treatment's doing, whether or not prompts are hashed
        (
            [REWARD, LOSS, NORM],
            NORM,
            lambda step, seed: f"{0.1 * step},{2 + 0.1 * seed - 0.01 * step},{1 + 0.01 * seed}",
            lambda step, seed: f"{0.1 * step},{2.000001 + 0.1 * seed - 0.01 * step},{1.3 + 0.01 * seed}",
        ),
        (
            [REWARD, LOSS, NORM],
            LOSS,
            lambda step, seed: f"{0.1 * step + 0.01 * seed},0.9,{2 + 0.01 * seed}",
            lambda step, seed: f"{0.1 * step + 0.01 * seed},0.002,{0.6 + 0.01 * seed}",
        ),
    ],
)
def test_what_is_alike_within_pairs_at_step_one_shows_that_prompts_were_shared(
    tmp_path: Path,
    metrics: list[str],
    differing: str,
    baseline: Callable[[int, int], str],
    treatment: Callable[[int, int], str],
) -> None:
    content = _judged(tmp_path, metrics, baseline=baseline, b=treatment)
    assert content.verdict == "MISMATCH"
    reasons = [reason["metric"] for reason in content.reasons if reason.code is Code.STEP_ONE_DIFFERS]
    assert differing in reasons
    assert Code.STEP_ONE_NOT_READ not in [reason.code for reason in content.not_tested]


def test_a_baseline_that_stops_early_is_invalid(tmp_path: Path, snapshot: Snapshot) -> None:
    for arm, last in (("baseline", 15), ("b", 20)):
        for seed in (0, 1):
            write(tmp_path, f"{arm}-s{seed}.csv", [0.1 * step + 0.01 * seed for step in range(1, last + 1)])
    claim = Claim(metric="train/reward", margin=0.5)
    content = compare(with_options(load(tmp_path), [claim])).content
    assert content.verdict == "INVALID"
    missing = content.reasons[0]
    assert missing.code is Code.STEPS_MISSING and missing["runs"] == ["baseline/seed-0", "baseline/seed-1"]
    assert (missing["run_ends"], missing["first"], missing["last"]) == (15, 17, 20)
    snapshot(sentence(missing))


def test_a_setting_in_a_column_of_its_own_does_not_head_the_description(tmp_path: Path) -> None:
    for arm in ("a", "b"):
        for seed in (0, 1):
            rows = "".join(f"{step},0.001,{step + seed}\n" for step in range(1, 11))
            (tmp_path / f"{arm}-s{seed}.csv").write_text("step,Lernrate,Verlust\n" + rows)
    comparison = compare(load(tmp_path))
    assert [row["metric"] for row in comparison.content.select("description")] == ["Verlust", "Lernrate"]
