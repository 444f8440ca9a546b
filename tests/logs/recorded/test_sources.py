"""Runs that were interrupted, left out, dated, restarted, or made by two versions of a stack."""

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import ComparisonError
from abrun.logs import Log
from abrun.logs.recorded.selection import last_step
from abrun.logs.recorded.sources import ReadingOptions, open_sources
from abrun.logs.starts import merge_starts, without_times
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.claims import Compare, parse_claim
from abrun.report.comparing import Comparison, compare, compare_sources
from abrun.stats.series import build_series
from tests.logs.layouts import rows, write_csv
from tests.reasons import only
from tests.snapshot import Snapshot

CLAIM = "train/reward:last 20%:0.05"
SEEDS = (1, 2, 3)
COMMAND = "abrun compare old new"


def write_arms(folder: Path, **layout: str) -> None:
    """A file for each run, at `layout[arm]` with the seed filled in."""
    for arm, path in layout.items():
        for seed in SEEDS:
            write_csv(folder / path.format(seed=seed), rows(arm, seed))


def judged(sources: Sequence[object], output: Path, **reading: object) -> Comparison:
    return compare_sources(
        [str(source) for source in sources],
        ReadingOptions(**reading),  # type: ignore[arg-type]
        claims=[parse_claim(CLAIM)],
        output=output,
        formats=("json", "markdown"),
    )


def log(name: str, first: int, last: int, **fields: object) -> Log:
    steps = range(first, last + 1)
    series, _ = build_series(list(steps), [step + 0.5 * (first > 1) for step in steps])
    metrics = {"train/reward": series, "profiling/x": build_series([0], [1.0])[0]}
    return replace(
        Log(name=name, place=f"{name}@{first}-{last}", metrics=metrics, config={"seed": 2, "lr": 1e-3}),
        **fields,
    )


# --- interrupted jobs ---


def test_starts_whose_steps_go_on_are_one_run(snapshot: Snapshot) -> None:
    run = merge_starts(
        [log("s2", 31, 60, status="finished"), log("s2", 1, 33, status="failed")], "new/seed-2"
    )
    assert run is not None and run.status == "finished" and run.left_out == ()
    series = run.metrics["train/reward"]
    assert series.steps.tolist() == list(range(1, 61)) and series.recounted == 0
    assert series.value_at(30) == 30 and series.value_at(31) == 31.5  # the later start counts
    (guess,) = run.guesses
    snapshot(guess)


def test_an_interrupted_start_that_is_repeated_is_left_out(snapshot: Snapshot) -> None:
    first, whole = log("s2", 1, 33, status="failed"), log("s2", 1, 60, status="finished")
    run = merge_starts([first, whole], "new/seed-2")
    assert run is not None and len(run.metrics["train/reward"]) == 60
    (left_out,) = run.left_out
    assert left_out == Code.START_LEFT_OUT(
        place="s2@1-33", run="new/seed-2", first=1, last=33, repeated_by="s2@1-60"
    )
    snapshot(sentence(left_out))
    third = log("s2", 1, 20, status="failed")
    run = merge_starts([third, log("s2", 1, 33), log("s2", 31, 60)], "new/seed-2")
    assert run is not None and len(run.metrics["train/reward"]) == 60 and len(run.left_out) == 1


@pytest.mark.parametrize(
    "other",
    [
        log("s2", 1, 60, status="finished"),  # both are whole
        log("s2", 31, 60, config={"seed": 2, "lr": 1e-4}),
        log("s2", 31, 60, environment={"versions": {"trl": "0.14"}}),
        log("s3", 31, 60),
        log("s2", 31, 60, group="sweep"),
    ],
)
def test_runs_that_may_be_different_are_not_joined(other: Log) -> None:
    last = 60 if other.status == "finished" else 33
    assert merge_starts([log("s2", 1, last, status="finished"), other], "x") is None


def test_where_a_job_is_started_again_its_times_and_checkpoint_differ() -> None:
    configs = [
        {"seed": 2, "logging_dir": f"out/runs/{time}", "resume_from_checkpoint": checkpoint}
        for time, checkpoint in (("Nov24_23-59-00_vm", None), ("Nov25_04-00-00_node7", "checkpoint-30"))
    ]
    starts = [log("s2", 1, 33, config=configs[0]), log("s2", 31, 60, config=configs[1])]
    assert merge_starts(starts, "x") is not None


def test_a_run_that_was_begun_over_in_another_folder(tmp_path: Path) -> None:
    write_arms(tmp_path, old="old/seed{seed}/20261124-0900/m.csv", new="new/seed{seed}/20261124-0900/m.csv")
    write_csv(tmp_path / "new/seed2/20261123-2300/m.csv", rows("new", 2)[:25])
    found = judged([tmp_path / "old", tmp_path / "new"], tmp_path / "report")
    assert found.verdict == "MATCH" and found.content.num_pairs == 3
    left_out = only(found.content.reasons, Code.START_LEFT_OUT)
    assert (left_out["run"], left_out["first"], left_out["last"]) == ("new/seed-2", 1, 25)
    assert left_out in found.content.not_tested
    assert "interrupted start" in (tmp_path / "report/report.md").read_text()


# --- left out by an option ---


def test_seeds_apply_before_anything_is_refused_and_the_report_says_what_they_left_out(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    write_arms(tmp_path, old="old/s{seed}.csv", new="new/s{seed}.csv")
    write_csv(tmp_path / "new/s2.csv", rows("new", 2)[:25])
    write_csv(tmp_path / "new/again/s2.csv", rows("new", 2)[:25])
    sources = [tmp_path / "old", tmp_path / "new"]
    with pytest.raises(ComparisonError, match=r"^new/seed-2: ") as error:
        judged(sources, tmp_path / "report")
    snapshot(error.value)
    found = judged(sources, tmp_path / "report", seeds=(1, 3))
    left_out = Code.SEEDS_LEFT_OUT(seeds=[2], broken=["new/seed-2 ends at step 25 of 60"])
    assert found.verdict == "MATCH" and found.content.num_pairs == 2
    assert left_out in found.content.reasons and found.content.not_tested[0] == left_out
    assert sentence(left_out) in found.as_json()["reasons"]
    snapshot(sentence(left_out))


def test_an_excluded_run_takes_its_pair_with_it(tmp_path: Path, snapshot: Snapshot) -> None:
    write_arms(tmp_path, old="runs/old-s{seed}.csv", new="runs/new-s{seed}.csv")
    write_csv(tmp_path / "runs/new-s2.csv", rows("new", 2)[:25])
    said = Code.EXCLUDED(runs=["new/seed-2 ends at step 25 of 60"], partners=["old/seed-2"])
    found = judged([tmp_path / "runs"], tmp_path / "report", exclude=("new/seed-2",))
    assert found.verdict == "MATCH" and found.content.num_pairs == 2 and said in found.content.reasons
    by_log = judged([tmp_path / "runs"], tmp_path / "report", exclude=("*-s2.csv",))
    excluded = only(by_log.content.reasons, Code.EXCLUDED)
    assert by_log.verdict == "MATCH"
    assert any(run.startswith("new-s2.csv ") for run in excluded["runs"])
    snapshot(sentence(said))
    with pytest.raises(ComparisonError, match="'new/seed-7' matches no run") as error:
        judged([tmp_path / "runs"], tmp_path / "report", exclude=("new/seed-7",))
    snapshot(error.value)
    with pytest.raises(ComparisonError, match="leaves no run to compare"):
        judged([tmp_path / "runs"], tmp_path / "report", exclude=("*/*",))


def test_a_frozen_arm_leaves_out_what_it_is_told(tmp_path: Path) -> None:
    write_arms(tmp_path, old="runs/old-s{seed}.csv", new="runs/new-s{seed}.csv")
    file = str(tmp_path / "r.json")
    frozen = CliRunner().invoke(
        app, ["reference", "save", str(tmp_path / "runs"), "--exclude", "new/*", "--seeds", "1,3", "-o", file]
    )
    assert frozen.exit_code == 0 and "2 seeds of old" in frozen.output, frozen.output
    assert "left out by --seeds: seed 2" in frozen.output


# --- a counter that begins anew ---


@pytest.mark.parametrize(
    ("steps", "recounted"),
    [
        ([1, 2, 3, 1, 2, 3], 3),
        ([1, 2, 3, 4, 1, 2], 2),
        ([0, 10, 0, 10, 20], 2),
        ([1, 2, 3, 2, 3, 4], 0),  # goes on from a checkpoint
        ([3, 2, 1], 0),  # the newest first
        ([2, 1, 3, 4], 0),  # written out of order
        ([5, 5], 0),
    ],
)
def test_steps_that_are_counted_again(steps: list[int], recounted: int) -> None:
    assert build_series(steps, [0.0] * len(steps))[0].recounted == recounted


def test_the_pairs_whose_counters_go_on_are_read_at_step_one(tmp_path: Path) -> None:
    write_arms(tmp_path, old="old/s{seed}.csv", new="new/s{seed}.csv")
    again = [*rows("new", 2)[:30], *rows("new", 2)]
    write_csv(tmp_path / "new/s2.csv", again)
    found = judged([tmp_path / "old", tmp_path / "new"], tmp_path / "report")
    assert {one["num_pairs"] for one in found.content.select("step one")} == {2}
    restarted = Code.COUNTER_RESTARTED(runs=["new/seed-2"], num_repeated=30, num_steps=60)
    assert restarted in found.content.reasons


# --- dates name no arm ---


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("seed0/runs/Nov24_10-00-00_vm", "seed0/runs"),
        ("PPO_env_00000_0_seed=0_2026-11-20_10-00-00", "PPO_env_00000_0_seed=0"),
        ("new/1763632800", "new"),
        ("2026-11-20/10-00-00/seed2", "seed2"),
        ("20261120-0900/seed1", "seed1"),
        ("Nov24-vm/seed0", "vm/seed0"),
        ("new/seed-1763632800", "new/seed-1763632800"),
        ("new/seed20261120", "new/seed20261120"),
        ("trl-0.14-s1", "trl-0.14-s1"),
        ("lr1e-5-dec-4-s3", "lr1e-5-dec-4-s3"),
    ],
)
def test_moments_in_names(name: str, expected: str) -> None:
    assert without_times(name) == expected


@pytest.mark.parametrize(
    "layout",
    ["seed{seed}/runs/Nov2{seed}_10-00-0{seed}_vm/m.csv", "2026-11-2{seed}/10-00-00/seed={seed}/m.csv"],
)
def test_one_folder_of_one_arm(tmp_path: Path, layout: str) -> None:
    write_arms(tmp_path / "trl", old=layout)
    noise = judged([tmp_path / "trl"], tmp_path / "report").content.select("seed noise")
    assert noise[0].arm == "trl" and len(noise[0]["levels"]) == 3
    experiment = open_sources([str(tmp_path / "trl")], ReadingOptions(allows_one_arm=True))
    assert experiment.arms == ("trl",) and len(experiment.runs) == 3


@pytest.mark.parametrize("layout", ["{arm}/{time}/m.csv", "{time}-{arm}.csv"])
def test_unix_times_are_no_seeds(tmp_path: Path, layout: str) -> None:
    for arm in ("old", "new"):
        for seed in SEEDS:
            path = layout.format(arm=arm, time=1763632800 + 977 * seed)
            write_csv(tmp_path / "runs" / path, rows(arm, seed))
    found = compare_sources([str(tmp_path / "runs")], ReadingOptions())
    arms = {arm.removesuffix("-m") for arm in (*found.content.arms, found.content.baseline)}
    assert not found.content.paired and arms == {"old", "new"}


def test_a_source_of_several_arms_is_not_one(tmp_path: Path, snapshot: Snapshot) -> None:
    write_arms(tmp_path, old="both/a-s{seed}.csv", new="both/b-s{seed}.csv")
    write_arms(tmp_path, new="other/s{seed}.csv")
    with pytest.raises(ComparisonError, match="several arms") as error:
        compare_sources(
            [str(tmp_path / "both"), str(tmp_path / "other")], ReadingOptions(), output=tmp_path / "x"
        )
    pattern = shlex.split(str(error.value).partition("--exclude ")[2])[0].rstrip(",")
    snapshot(error.value)
    found = judged([tmp_path / "both", tmp_path / "other"], tmp_path / "report", exclude=(pattern,))
    assert found.content.num_pairs == 3


# --- aliases and versions ---


def test_versions_that_follow_the_arm_can_be_the_treatment(tmp_path: Path) -> None:
    write_arms(tmp_path, old="old/s{seed}.csv", new="new/s{seed}.csv")
    experiment = open_sources(
        [str(tmp_path / arm) for arm in ("old", "new")], ReadingOptions(may_unpair=True)
    )
    claims = Compare(claims=[parse_claim(CLAIM)])

    def run(versions_differ: bool, odd: str = "0.14") -> Comparison:
        runs = {
            name: replace(
                one,
                config={},
                environment={
                    "versions": {"trl": "0.13" if name.arm == "old" else odd if name.seed == 2 else "0.14"}
                },
            )
            for name, one in experiment.runs.items()
        }
        made = replace(experiment, runs=runs, compare=claims, versions_differ=versions_differ)
        return compare(made, command=COMMAND)

    found = run(versions_differ=False)
    assert found.verdict == "INVALID"
    assert found.next_steps[0].command == f"{COMMAND} --versions-differ"
    found = run(versions_differ=True)
    assert found.verdict == "MATCH" and found.content.arms["new"].treatment_diff == {
        "versions.trl": ["0.13", "0.14"]
    }
    assert Code.STEP_ONE_NOT_READ(why=Code.FIRST_STEP_OTHER_VERSIONS()) in found.content.not_tested
    within = run(versions_differ=True, odd="0.15")
    assert within.verdict == "INVALID"
    assert within.content.reasons[0] == Code.ENVIRONMENT_DIFFERS(
        key="versions", baseline="new/seed-1", run="new/seed-2", values={"trl": ["0.14", "0.15"]}
    )
    assert "--versions-differ" not in run(versions_differ=False, odd="0.15").next_steps[0].command


def test_what_holds_for_all_runs_or_arms_is_said_once(tmp_path: Path) -> None:
    write_arms(tmp_path, old="old/seed-{seed}.csv", new="new/seed-{seed}.csv")
    shutil.copytree(tmp_path / "new", tmp_path / "newer")
    for path in tmp_path.glob("new/*.csv"):  # the last step once more, with other values
        step, *cells = path.read_text().splitlines()[-1].split(",")
        path.write_text(path.read_text() + ",".join([step, *(str(float(cell) + 1) for cell in cells)]) + "\n")
    sources = [str(tmp_path / arm) for arm in ("old", "new", "newer")]
    content = compare_sources(sources, ReadingOptions(), output=tmp_path / "out", formats=("json",)).content
    note = only(content.notes, Code.NOTE_OF_RUNS)
    assert content.notes == [note] and note["runs"] == ["new/seed-1", "new/seed-2", "new/seed-3"]
    assert "3 points" in note["note"]
    assert only(content.reasons, Code.NO_CLAIM)


def test_seeds_to_compare_are_those_of_all_arms(tmp_path: Path) -> None:
    write_arms(tmp_path, old="old/seed-{seed}.csv", new="new/seed-{seed}.csv")
    shutil.copytree(tmp_path / "new", tmp_path / "newer")
    (tmp_path / "newer/seed-3.csv").unlink()
    comparison = judged([tmp_path / arm for arm in ("old", "new", "newer")], tmp_path / "out")
    assert comparison.verdict == "INVALID"
    assert comparison.next_steps[0].command.endswith("--seeds 1,2")


def test_a_run_ends_at_the_last_step_of_its_training_metrics() -> None:
    """TRL's timers in wandb begin at step 0, and end one earlier."""
    reward, _ = build_series(list(range(1, 61)), [1.0] * 60)
    timer, _ = build_series(list(range(60)), [1.0] * 60)
    run = Log(name="x", place="x", metrics={"profiling/x": timer, "train/reward": reward})
    assert last_step(run) == 60


def test_one_run_read_from_two_logs_is_a_copy(tmp_path: Path) -> None:
    """TensorBoard rounds to float32, and holds the same run as wandb, here up to an earlier step."""
    for seed in SEEDS:
        timed = [{**row, "step_time": 1 + 0.1 * np.sin(seed + row["step"])} for row in rows("old", seed)]
        write_csv(tmp_path / f"old/seed-{seed}.csv", timed)
        single = [{key: float(np.float32(value)) for key, value in row.items()} for row in timed]
        whole = [{**row, "step": int(row["step"])} for row in single]
        write_csv(tmp_path / f"new/seed-{seed}.csv", whole[: 58 + seed])
    comparison = judged([tmp_path / "old", tmp_path / "new"], tmp_path / "out")
    assert comparison.verdict == "INVALID"
    copied = Code.RUN_COPIED(run="new/seed-1", original="old/seed-1")
    assert copied in comparison.content.reasons
