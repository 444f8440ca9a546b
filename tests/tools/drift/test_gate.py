"""`abrun gate`: answers and exit codes, state over calls, kills and two gates at once, refusals."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner

from abrun import cli
from abrun.api import launch
from abrun.errors import AbrunError
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.sources import open_sources
from abrun.logs.recorded.stored import load_experiment
from abrun.messages.codes import Code
from abrun.runs.lines import json_line
from abrun.stats.online import OLD_RUNS_SD, lord_level, spent_level
from abrun.tools.drift.audit import audit_rule
from abrun.tools.drift.gate import Source, _judge, _name_runs, _test_candidate, ask_gate, caveats
from abrun.tools.drift.store import Answer, KnownRun, Runs, State, read_state
from tests.reasons import refused
from tests.verdict.simulate import fail, write_experiment

CLAIM = "train/reward:last 50%:better 0"
READING = ReadingOptions(allows_one_arm=True)
BASE = list(np.linspace(0.47, 0.53, 12))
BASE_CURVE = np.random.default_rng(5).uniform(0.5, 0.6, 80)


def write_runs(folder: Path, levels: Sequence[float], metric: str = "train/reward", end: int = 4) -> Path:
    """Write one CSV file a seed, whose mean over the last half is the level."""
    folder.mkdir(exist_ok=True, parents=True)
    for seed, level in enumerate(levels):
        rows = [f"{step},{level if step > 2 else 0.1 + seed / 1000}" for step in range(1, end + 1)]
        (folder / f"seed-{seed}.csv").write_text("\n".join([f"step,{metric}", *rows]) + "\n")
    return folder


class Typed(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def typed(*arguments: object) -> Typed:
    """Run the command; an error that a user can fix is code 2 and its line, as in `cli.main`.

    A candidate without a control is judged by old runs alone.
    """
    words = [*map(str, arguments)]
    has_control = words[0].startswith("--") or {"--start", "--control", "--audit"} & {*words}
    result = CliRunner().invoke(cli.app, ["gate", *words, *([] if has_control else ["--old-runs"])])
    if isinstance(result.exception, AbrunError):
        return Typed(2, result.stdout, f"abrun: {result.exception}")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Typed(result.exit_code, result.stdout, result.stderr)


def start(tmp_path: Path, levels: Sequence[float] = BASE, claim: str = CLAIM, **options: str) -> Path:
    base, ledger = write_runs(tmp_path / "base", levels), tmp_path / "gate.jsonl"
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert typed(base, "--against", ledger, "--start", "--claim", claim, *words).exit_code == 0
    return ledger


def ask(store: Path, source: Path, **fields: Any) -> Answer:
    """Ask about a candidate, by old runs alone unless it has a control."""
    fields = {"old_runs": "control" not in fields, **fields}
    return ask_gate(store, Source(path=str(source), reading=READING, **fields))[0]


def ask_json(ledger: Path, source: Path) -> dict:
    result = typed(source, "--against", ledger, "--json")
    return {**json.loads(result.stdout), "exit_code": result.exit_code}


def test_each_answer_has_its_exit_code_and_the_incumbent_changes_on_better(tmp_path):
    ledger = start(tmp_path)
    alike = ask_json(ledger, write_runs(tmp_path / "alike", [0.5, 0.49, 0.51]))
    assert (alike["answer"], alike["exit_code"], alike["incumbent"]) == ("ALIKE", 6, "base")
    open_answer = ask_json(ledger, write_runs(tmp_path / "idea", [0.55]))
    assert (open_answer["answer"], open_answer["exit_code"]) == ("OPEN", 4)
    assert 1 <= open_answer["seeds_to_add"] <= 7
    values = {"incumbent": "base", "moved": OLD_RUNS_SD}
    assert open_answer["note_codes"] == [{"code": "gate_old_runs", "values": values}]
    better = ask_json(ledger, write_runs(tmp_path / "idea", [0.55, 0.57, 0.56, 0.58, 0.55]))
    assert (better["answer"], better["exit_code"], better["num_discoveries"]) == ("BETTER", 0, 1)
    assert better["improvement"] == pytest.approx(0.0541, abs=1e-4)  # of the first four
    assert better["num_read"] == 4  # as if they had been shown when asked for: 1, 2, 4
    assert better["p"] <= better["reading_level"]
    assert better["level"] == open_answer["level"]  # of the candidate, not of the reading
    worse = ask_json(ledger, write_runs(tmp_path / "worse", [0.5, 0.49, 0.51]))
    assert (worse["answer"], worse["exit_code"], worse["incumbent"]) == ("WORSE", 3, "idea")
    assert worse["num_old"] == 5


def test_lower_is_better_is_known_from_the_metric_or_the_claim(tmp_path):
    base = write_runs(tmp_path / "base", BASE, "validation/loss")
    typed(base, "--against", tmp_path / "l", "--start", "--claim", "validation/loss:last 50%:better 0")
    lower = write_runs(tmp_path / "lower", [0.41, 0.42, 0.4, 0.41], "validation/loss")
    answer = ask(tmp_path / "l", lower)
    assert answer.outcome == "BETTER" and answer.improvement > 0


def test_asking_again_without_new_runs_repeats_the_answer_and_writes_nothing(tmp_path):
    ledger = start(tmp_path)
    idea = write_runs(tmp_path / "idea", [0.55, 0.53])
    first = ask(ledger, idea)
    content = ledger.read_bytes()
    for name in ("x", "y"):  # the ledger's own state has moved on meanwhile
        ask(ledger, write_runs(tmp_path / name, [0.5]))
    moved = ledger.read_bytes()
    assert ask(ledger, idea) == first and ledger.read_bytes() == moved != content


def test_a_kept_candidate_is_answered_as_before_and_its_new_runs_join_the_baseline(tmp_path):
    ledger = start(tmp_path)
    levels = [0.65, 0.66, 0.64, 0.67]
    idea = write_runs(tmp_path / "idea", levels)
    assert ask(ledger, idea).outcome == "BETTER" == ask(ledger, idea).outcome
    extended = ask(ledger, write_runs(idea, [*levels, 0.61, 0.62, 0.66]))
    assert extended.outcome == "INCUMBENT" and len(read_state(ledger).incumbent.values) == 7
    ask(ledger, write_runs(tmp_path / "next", [0.9, 0.91, 0.89, 0.9]))
    assert read_state(ledger).incumbent.name == "next"
    with refused("new runs of an earlier incumbent; to judge it against next"):
        ask(ledger, write_runs(idea, [*levels, 0.61, 0.62, 0.66, 0.7]))


def test_runs_that_were_judged_cannot_be_taken_back(tmp_path):
    ledger = start(tmp_path)
    ask(ledger, write_runs(tmp_path / "idea", [0.45, 0.56]))
    with refused("idea/seed-0 was judged with another value"):
        ask(ledger, write_runs(tmp_path / "idea", [0.58, 0.56, 0.59]))
    shutil.rmtree(tmp_path / "idea")
    answer = ask(ledger, write_runs(tmp_path / "idea", [0.45]))  # the other one still counts
    assert sorted(answer.candidate.values) == [0.45, 0.56]


def test_the_answer_about_an_open_candidate_is_against_the_incumbent_of_the_day(tmp_path):
    ledger = start(tmp_path)
    slow = write_runs(tmp_path / "slow", [0.55])
    assert ask(ledger, slow).incumbent == "base"
    ask(ledger, write_runs(tmp_path / "fast", [0.7, 0.71, 0.69, 0.7]))
    answer = ask(ledger, write_runs(slow, [0.55, 0.54, 0.56]))
    assert (answer.incumbent, answer.outcome) == ("fast", "WORSE")


def test_levels_are_spent_and_earned_as_the_procedure_says(tmp_path):
    ledger = start(tmp_path)
    for number in range(3):
        answer = ask(ledger, write_runs(tmp_path / f"c{number}", [0.5 + number / 1000]))
        assert answer.level == lord_level(number + 1, [])
    ask(ledger, write_runs(tmp_path / "good", [0.7, 0.71, 0.69, 0.7]))
    assert ask(ledger, write_runs(tmp_path / "c9", [0.5])).level == lord_level(5, [4])


def test_the_ledger_is_shown_and_so_is_its_next_level(tmp_path):
    ledger = start(tmp_path)
    ask(ledger, write_runs(tmp_path / "idea", [0.5, 0.49, 0.51]))
    result = typed("--against", ledger)
    assert result.exit_code == 0 and re.search(r"idea +ALIKE +3\+0 +base", result.stdout)
    shown = json.loads(typed("--against", ledger, "--json").stdout)
    assert (shown["num_candidates"], shown["incumbent"], shown["num_runs"]) == (1, "base", 12)


def test_experiments_of_abrun_are_judged_by_arm(tmp_path):
    incumbent = write_experiment(tmp_path / "first")
    ledger = tmp_path / "gate.jsonl"
    words = ("--against", ledger, "--start", "--claim", "train/reward:last 20%:better 0")
    result = typed(incumbent, *words)
    assert result.exit_code == 2 and "--arm" in result.stderr
    assert typed(incumbent, "--arm", "baseline", *words).exit_code == 0
    answer, *_ = ask_gate(
        ledger, Source(path=str(incumbent), reading=READING, arm="treatment", old_runs=True)
    )
    assert answer.candidate.name == "first/treatment" and answer.incumbent == "first/baseline"


def test_folders_of_runs_are_candidates_of_their_names(tmp_path):
    experiment, ledger = write_experiment(tmp_path / "first"), tmp_path / "gate.jsonl"
    for name, arm in (("base", "baseline"), ("bad", "treatment")):  # whose runs say another arm
        shutil.copytree(experiment / arm, tmp_path / "g" / name)
    words = ("--against", ledger, "--start", "--claim", "train/reward:last 20%:better 0")
    assert typed(tmp_path / "g" / "base", *words).exit_code == 0
    assert ask(ledger, tmp_path / "g" / "bad").candidate.name == "bad"
    assert read_state(ledger).incumbent.name == "base"
    single = write_experiment(
        tmp_path / "idea-7", arms={"baseline": {}}, controls={"faults": [{"name": "flipped_advantages"}]}
    )
    named = Source(path=f"x={tmp_path / 'g' / 'bad'}", reading=READING)
    assert _name_runs(named, open_sources([named.path], READING, []), "x") == "x"
    stored = Source(path=str(single), reading=READING)
    assert _name_runs(stored, load_experiment(single), "baseline") == "idea-7"


def test_old_runs_their_age_and_another_machine_are_caveats(tmp_path):
    ledger = start(tmp_path)
    idea = Source(path=str(write_runs(tmp_path / "idea", [0.5])), reading=READING, old_runs=True)
    answer, state, _ = ask_gate(ledger, idea)
    assert [reason.code for reason in caveats(answer, state, 0.0)] == [Code.GATE_OLD_RUNS]

    def marked(runs: Runs, **marks: Any) -> Runs:
        return replace(runs, runs=tuple(replace(run, **marks) for run in runs.runs))

    old = marked(state.incumbent, end_s=1e9, environment_sha256="a")
    moved = replace(answer, candidate=marked(answer.candidate, environment_sha256="b"))
    reasons = {
        reason.code: reason for reason in caveats(moved, State(start=state.start, incumbent=old), 1e9 + 3e6)
    }
    assert reasons.keys() == {Code.GATE_OLD_RUNS, Code.GATE_AGE, Code.GATE_ENVIRONMENT}
    assert reasons[Code.GATE_AGE]["days"] == 35
    beside = replace(moved, controls=marked(answer.candidate, end_s=1e9, environment_sha256="b"))
    assert caveats(beside, State(start=state.start, incumbent=old), 1e9 + 3e6) == []


def test_two_gates_at_once_both_count(tmp_path):
    ledger = start(tmp_path)
    sources = [write_runs(tmp_path / f"c{number}", [0.5 + number / 1000]) for number in range(12)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda source: ask(ledger, source), sources))
    assert len({answer.level for answer in answers}) == 12  # no level was given twice
    assert len(read_state(ledger).candidates) == 12


def test_a_killed_gate_leaves_an_answer_or_none(tmp_path):
    ledger = start(tmp_path)
    idea = write_runs(tmp_path / "idea", [0.5, 0.52])
    script = (
        "import os, signal; from pathlib import Path; from abrun.runs import files\n"
        "from abrun.tools.drift.gate import Source, ask_gate\n"
        "from abrun.logs.recorded.selection import ReadingOptions\n"
        "files.os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"source = Source(path={str(idea)!r}, reading=ReadingOptions(allows_one_arm=True), old_runs=True)\n"
        f"ask_gate(Path({str(ledger)!r}), source)"
    )
    ended = subprocess.run([sys.executable, "-c", script], env=os.environ, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL and len(ledger.read_bytes().splitlines()) == 2
    assert ask(ledger, idea).level == pytest.approx(read_state(ledger).level("idea"))
    assert len(read_state(ledger).candidates) == 1


@pytest.mark.parametrize(
    ("claim", "words", "problem"),
    [
        ("train/reward:last 50%:0.02", (), "better NUMBER"),
        ("train/reward:last 50%:better 1 sigma", (), "better NUMBER"),
        ("train/rewards:last 50%:better 0", (), "did you mean"),
        ("mystery:last 50%:better 0", (), "higher is better"),
        (CLAIM, ("--worth", "much"), "--worth"),
        (CLAIM, ("--worth", "0"), "--worth"),
        ("train/reward:last 50%:better 0.1", ("--worth", "0.05"), "--worth"),
    ],
)
def test_a_start_that_cannot_be_used_is_one_line(tmp_path, claim, words, problem):
    base = write_runs(tmp_path / "base", BASE, "mystery" if claim.startswith("mystery") else "train/reward")
    result = typed(base, "--against", tmp_path / "gate.jsonl", "--start", "--claim", claim, *words)
    assert result.exit_code == 2 and problem in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "gate.jsonl").exists()


def test_a_candidate_with_a_diverged_run_is_worse(tmp_path):
    ledger = start(tmp_path)
    levels = [0.9, 0.9, float("nan")]
    result = typed(write_runs(tmp_path / "wild", levels), "--against", ledger)
    assert result.exit_code == 3 and "NaN or infinite in 1 run" in result.stdout
    with refused("wild/seed-2 was judged with another value"):
        ask(ledger, write_runs(tmp_path / "wild", [0.9, 0.9, 0.9]))
    with refused("wild: was answered WORSE"):
        ask(ledger, write_runs(tmp_path / "wild", [*levels, 0.91]))
    with refused("1 run failed or became NaN or infinite"):
        ask(ledger, write_runs(tmp_path / "base", [*BASE, float("nan")]))


def test_final_scores_in_a_table_are_judged(tmp_path):
    for name, scores in {"base": [51, 53, 49, 52, 50], "idea": [71, 73, 69, 72]}.items():
        rows = [f"{name},{seed},{score}" for seed, score in enumerate(scores)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["arm,seed,ifeval", *rows]) + "\n")
    words = ("--against", tmp_path / "gate.jsonl")
    claim = ("--claim", "ifeval:all:better 0, higher is better")
    assert typed(tmp_path / "base.csv", *words, "--start", *claim).exit_code == 0
    result = typed(tmp_path / "idea.csv", *words)
    assert result.exit_code == 0 and "improvement of ifeval +20" in result.stdout, result


def test_a_failed_run_is_a_result_that_cannot_be_taken_back(tmp_path):
    experiment = write_experiment(tmp_path / "first")
    ledger = tmp_path / "gate.jsonl"
    words = ("--against", ledger, "--start", "--claim", "train/reward:last 20%:better 0")
    assert typed(experiment, "--arm", "baseline", *words).exit_code == 0
    failed_run = experiment / "treatment/seed-1"
    kept = tmp_path / "kept"
    shutil.copytree(failed_run, kept)
    fail(failed_run, after_steps=30)
    result = typed(experiment, "--arm", "treatment", "--against", ledger)
    assert result.exit_code == 3 and "WORSE: of first/treatment, treatment/seed-1 failed" in result.stdout
    (answer,) = read_state(ledger).candidates.values()
    assert answer.candidate.failed == ["treatment/seed-1"]
    hidden = ask(ledger, experiment, arm="treatment")
    assert hidden == answer
    shutil.rmtree(failed_run)
    shutil.copytree(kept, failed_run)  # it was run again
    again, *_ = ask_gate(
        ledger, Source(path=str(experiment), reading=READING, arm="treatment", old_runs=True)
    )
    assert len(again.candidate.values) == 5 and not again.candidate.failed


def write_curves(folder: Path, curves: Mapping[str, np.ndarray], digits: int = 6) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    for name, curve in curves.items():
        rows = [f"{step},{value:.{digits}f}" for step, value in enumerate(curve, 1)]
        (folder / f"{name}.csv").write_text("\n".join(["step,train/reward", *rows]) + "\n")
    return folder


def draw_curves(seed: int, num_runs: int, level: float = 0.5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    levels = level + 0.02 * rng.standard_normal(num_runs)
    noise = 0.01 * rng.standard_normal((num_runs, 80))
    return {f"seed-{number}": levels[number] + noise[number] for number in range(num_runs)}


def test_copies_are_no_seeds(tmp_path):
    base = write_curves(tmp_path / "base", draw_curves(0, 8))
    words = ("--against", tmp_path / "gate.jsonl")
    copies = write_curves(tmp_path / "copies", dict.fromkeys(["seed-0", "seed-1", "seed-2"], BASE_CURVE))
    result = typed(copies, *words, "--start", "--claim", CLAIM)
    assert result.exit_code == 2 and "copies/seed-1 repeats the numbers of copies/seed-0" in result.stderr
    assert typed(base, *words, "--start", "--claim", CLAIM).exit_code == 0
    before = (tmp_path / "gate.jsonl").read_bytes()
    with refused("run copies with seeds that no other run has"):
        ask(tmp_path / "gate.jsonl", copies)
    rng = np.random.default_rng(1)
    noisy = {f"seed-{seed}": BASE_CURVE + 1e-5 * rng.standard_normal(80) for seed in range(3)}
    with refused("run noisy with seeds that no other run has"):
        ask(tmp_path / "gate.jsonl", write_curves(tmp_path / "noisy", noisy))
    assert (tmp_path / "gate.jsonl").read_bytes() == before


@pytest.mark.parametrize("change", ["same", "fewer digits", "noise", "another seed"])
def test_runs_that_the_ledger_knows_are_refused_under_another_name(tmp_path, change):
    """The best runs of the incumbent and of an earlier candidate, and runs of their own seeds that pass."""
    ledger = tmp_path / "gate.jsonl"
    known = {"base": draw_curves(0, 8), "idea": draw_curves(1, 5)}
    base = write_curves(tmp_path / "base", known["base"])
    assert typed(base, "--against", ledger, "--start", "--claim", CLAIM).exit_code == 0
    ask(ledger, write_curves(tmp_path / "idea", known["idea"]))
    rng = np.random.default_rng(2)
    for name, curves in known.items():
        best = sorted(curves.values(), key=lambda curve: -curve[40:].mean())[:2]
        renamed = {f"seed-{7 - number}": curve for number, curve in enumerate(best)}
        if change == "noise":
            renamed = {seed: curve + 1e-5 * rng.standard_normal(80) for seed, curve in renamed.items()}
        if change == "another seed":
            renamed = draw_curves(3 + [*known].index(name), 2)
        folder = write_curves(
            tmp_path / f"{name}-again", renamed, digits=4 if change == "fewer digits" else 6
        )
        if change == "another seed":
            assert ask(ledger, folder).candidate.name == folder.name
            continue
        with refused(f"run {folder.name} with seeds that no other run has") as error:
            ask(ledger, folder)
        assert f"of {name}/seed-" in str(error.value) or f"as in {name}/seed-" in str(error.value)


def test_a_coarse_metric_is_recognised_by_the_rest_of_the_log(tmp_path):
    """Scores of a few evaluations are often equal by chance; all else of a run is not."""
    ledger = tmp_path / "gate.jsonl"

    def write_log(path: Path, losses: np.ndarray, score: float) -> None:
        path.parent.mkdir(exist_ok=True)
        rows = [f"{step},{loss:.6f},{step * 512}" for step, loss in enumerate(losses, 1)]
        scores = ["" if step % 20 else f"{score if step > 40 else 0.25}" for step in range(1, 81)]
        lines = [f"{row},{value}" for row, value in zip(rows, scores, strict=True)]
        header = "step,train/loss,tokens,validation/score"
        path.write_text("\n".join([header, *lines]) + "\n")

    losses = 2 + np.random.default_rng(0).standard_normal((9, 80))
    for seed, score in enumerate([0.5, 0.5, 0.75, 0.5, 0.25]):
        write_log(tmp_path / f"base/seed-{seed}.csv", losses[seed], score)
    words = ("--start", "--claim", "validation/score:last 50%:better 0, higher is better")
    assert typed(tmp_path / "base", "--against", ledger, *words).exit_code == 0
    for seed, original in enumerate([5, 6, 7]):
        write_log(tmp_path / f"idea/seed-{seed}.csv", losses[original], 0.5)
    for seed, original in enumerate([2, 8]):
        write_log(tmp_path / f"best/seed-{seed}.csv", losses[original], 0.75)
    assert ask(ledger, tmp_path / "idea").candidate.values == [0.5, 0.5, 0.5]
    with refused("run best with seeds that no other run has") as error:
        ask(ledger, tmp_path / "best")
    assert "best/seed-0 repeats the numbers of base/seed-2" in str(error.value)


def test_runs_that_are_left_out_are_said_and_recorded(tmp_path):
    """A crashed run hidden by --seeds, runs without --seeds, and those that --exclude drops."""
    ledger = start(tmp_path)
    idea = write_runs(tmp_path / "idea", [0.65, 0.66, 0.64, 0.67, 0.66])
    (idea / "seed-4.csv").write_text("step,train/reward\n1,0.1\n2,0.1\n")
    assert typed(idea, "--against", ledger).exit_code == 2
    result = typed(idea, "--against", ledger, "--seeds", "0-3")
    assert result.stdout.startswith("BETTER") and "seed 4 (idea/seed-4 ends at step 2 of 4)" in result.stdout
    again = json.loads(typed(idea, "--against", ledger, "--seeds", "0-3", "--json").stdout)
    assert again["left_out"] == ["idea/seed-4"] and again["note_codes"][0]["code"] == "seeds_left_out"
    kept = read_state(ledger).incumbent
    assert kept.left_out == ("idea/seed-4",) and [run.name for run in kept.runs][3] == "idea/seed-3"
    base = write_runs(tmp_path / "next", [0.5, 0.51, 0.52, 0.1])
    words = (base, "--against", tmp_path / "second.jsonl", "--start", "--claim", CLAIM)
    result = typed(*words, "--exclude", "*seed-3*", "--json")
    assert json.loads(result.stdout)["notes"] == ["left out by --exclude: seed-3.csv"]
    assert read_state(tmp_path / "second.jsonl").incumbent.left_out == ("seed-3.csv",)


def test_a_ledger_of_an_earlier_version_says_what_to_do(tmp_path):
    (tmp_path / "old.jsonl").write_bytes(json_line({"kind": "start", "version": 1}))
    with refused("is of an earlier abrun, without controls; start a new store with --start"):
        ask(tmp_path / "old.jsonl", write_runs(tmp_path / "idea", [0.5]))


def write_round(folder: Path, values: Sequence[float], fresh: Sequence[float], first: int = 0) -> Path:
    """Write candidates `idea` and controls `base` of the same seeds, from `first` on."""
    for arm, levels in (("idea", values), ("base", fresh)):
        (folder / arm).mkdir(parents=True, exist_ok=True)
        for seed, level in enumerate(levels, first):
            # The first steps, outside of the window, tell a seed from others
            rows = [f"{step},{level if step > 2 else 0.1 + seed / 1000}" for step in range(1, 5)]
            text = "\n".join(["step,train/reward", *rows]) + "\n"
            (folder / arm / f"seed-{seed}.csv").write_text(text)
    return folder


FRESH = [0.71, 0.69, 0.7, 0.72, 0.68, 0.7, 0.71, 0.69]
ROUND = {"arm": "idea", "control": "base"}


def test_a_round_is_judged_by_its_pairs_whatever_the_machine_adds(tmp_path):
    """Both arms are .2 above the old runs, which are 10 sd of a run."""
    store = start(tmp_path)
    equal = write_round(tmp_path / "equal", [0.7, 0.71, 0.69, 0.7], FRESH[:4], 20)
    assert ask(store, equal, name="equal", **ROUND).outcome != "BETTER"
    better = write_round(tmp_path / "better", [level + 0.09 for level in FRESH], FRESH[::-1], 30)
    answer = ask(store, better, **ROUND)
    assert answer.outcome == "BETTER" and answer.improvement == pytest.approx(0.1)  # of the first four
    kept = read_state(store)
    assert kept.incumbent.name == "idea" and len(kept.superseded["base"].runs) == 12 + 4 + 8


def test_pairs_are_added_and_their_level_is_spent_once(tmp_path):
    store, spent = start(tmp_path), 0.0
    values = [level + 0.03 for level in FRESH]
    for count in (1, 2, 4, 8):
        folder = write_round(tmp_path / "r", values[:count], FRESH[::-1][:count], 20)
        answer = ask(store, folder, **ROUND)
        assert (
            answer.reading_level == pytest.approx(answer.spent - spent) and len(answer.controls.runs) == count
        )
        assert answer.spent == spent_level(answer.level, count, 8)
        spent = answer.spent
        assert answer.seeds_to_add == (count if answer.outcome == "OPEN" and count < 8 else 0)
    assert len(read_state(store).candidates) == 1


def test_a_candidate_that_repeats_its_controls_changes_nothing(tmp_path):
    store = start(tmp_path)
    result = typed(
        write_round(tmp_path / "r", FRESH, FRESH, 20),
        "--against",
        store,
        "--arm",
        "idea",
        "--control",
        "base",
    )
    assert result.exit_code == 6 and "repeats base bit for bit in 8 pairs" in result.stdout
    assert read_state(store).discoveries == []


def test_byte_identical_candidates_are_never_better(tmp_path):
    """1,000 rounds of copies of the controls, on a machine that adds what it likes."""
    store, rng = start(tmp_path), np.random.default_rng(0)
    state = read_state(store)
    for number in range(1000):
        fresh = rng.normal(0.5 + rng.normal(), 0.02, int(rng.choice([1, 2, 4, 8])))
        shown = [
            KnownRun(name=f"{number}/{seed}", seed=seed, value=value)
            for seed, value in enumerate(fresh.tolist())
        ]
        runs = Runs(name=f"c{number}", runs=tuple(shown))
        answer = Answer(
            time_s=0,
            outcome="OPEN",
            candidate=runs,
            controls=replace(runs, name="controls"),
            incumbent="base",
            num_old=len(BASE),
            level=state.next_level,
        )
        fields = _test_candidate(state, answer, len(shown))
        assert fields["outcome"] in ("ALIKE", "WORSE"), fields


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("no control", "has no fresh runs of base beside it"),
        ("seed without control", "seed 22 has no control"),
        ("control is old", "controls of idea/seed-21 repeats the numbers of base/seed-3"),
        ("failed control", "a control needs runs that end"),
        ("candidate is old", "seeds that no other run has"),
        ("unknown control", "--control: got 'x'; allowed: base, idea"),
    ],
)
def test_a_round_that_shows_nothing_is_refused(tmp_path, change, problem):
    store, fields = tmp_path / "gate.jsonl", dict(ROUND)
    curves = draw_curves(0, 8)
    base = write_curves(tmp_path / "base", curves)
    assert typed(base, "--against", store, "--start", "--claim", CLAIM).exit_code == 0
    fresh = {f"seed-{20 + number}": curve for number, curve in enumerate(draw_curves(1, 3).values())}
    idea = {f"seed-{20 + number}": curve for number, curve in enumerate(draw_curves(2, 3).values())}
    if change == "no control":
        fields = {"arm": "idea", "old_runs": False}
    if change == "unknown control":
        fields["control"] = "x"
    if change == "seed without control":
        del fresh["seed-22"]
    if change == "control is old":
        fresh["seed-21"] = curves["seed-3"]
    if change == "candidate is old":
        idea["seed-21"] = curves["seed-3"]
    if change == "failed control":
        fresh["seed-21"] = np.where(np.arange(80) > 60, np.nan, fresh["seed-21"])
    write_curves(tmp_path / "round/base", fresh)
    before = (store.read_bytes(), write_curves(tmp_path / "round/idea", idea))[0]
    with refused(problem):
        ask(store, tmp_path / "round", **fields)
    assert store.read_bytes() == before


def test_all_pairs_at_once_are_read_on_the_schedule(tmp_path):
    """Eight pairs that start badly are discarded as when they were shown one by one."""
    values = [level - 0.3 for level in FRESH[:4]] + [level + 0.9 for level in FRESH[4:]]
    answers = []
    for name, counts in (("at once", (8,)), ("by and by", (1, 2, 4, 8))):
        store = start(tmp_path / name)
        for count in counts:
            folder = write_round(tmp_path / name / "r", values[:count], FRESH[::-1][:count], 20)
            answers.append(answer := ask(store, folder, **ROUND))
            if answer.outcome != "OPEN":
                break
    assert [answers[0].outcome, answers[0].num_read] == [answers[-1].outcome, answers[-1].num_read]
    assert answers[0].outcome == "WORSE" and answers[0].num_read < 8
    assert answers[0].interval == answers[-1].interval and len(answers[0].candidate.runs) == 8


def test_a_run_that_failed_gives_no_level_back(tmp_path):
    state = read_state(start(tmp_path))
    shown = [KnownRun(name=f"idea/{seed}", seed=seed, value=level + 0.03) for seed, level in enumerate(FRESH)]
    fresh = [replace(run, name=f"base/{seed}", value=FRESH[-1 - seed]) for seed, run in enumerate(shown)]

    def judged(runs: Sequence[KnownRun]) -> Answer:
        controls = Runs(name="controls", runs=tuple(fresh[: len(runs)]))
        answer = _judge(state, Runs(name="idea", runs=tuple(runs)), controls, old_runs=False)
        state.add(answer)
        return answer

    first = judged(shown[:3])
    assert first.outcome == "OPEN" and first.spent > 0
    with refused("seed 0 has several controls"):
        _judge(
            *(state, Runs(name="x", runs=tuple(shown[:1]))),
            Runs(name="c", runs=(fresh[0], replace(fresh[0], name="base/again"))),
            old_runs=False,
        )
    crashed = judged([*shown[:3], replace(shown[3], value=None, failed=True)])
    assert crashed.outcome == "WORSE" and crashed.spent == first.spent
    again = judged(shown[:4])
    assert again.reading_level == pytest.approx(spent_level(again.level, 4, 8) - first.spent)


def test_a_control_has_the_settings_of_the_incumbent_and_a_candidate_one_of_its_own(tmp_path):
    state = read_state(start(tmp_path))
    kept = replace(state.incumbent.runs[0], name="old", settings_sha256="a")
    state.incumbent = replace(state.incumbent, runs=(*state.incumbent.runs, kept))
    run = KnownRun(name="idea/1", seed=1, value=0.5, settings_sha256="b")
    for candidate, control, problem in (
        ((run,), "c", "its controls have other settings than base, the incumbent"),
        (
            (run, replace(run, name="idea/2", seed=2, settings_sha256="d")),
            "a",
            "its runs have 2 configurations",
        ),
    ):
        controls = [replace(run, name=f"base/{run.seed}", settings_sha256=control) for run in candidate]
        with refused(problem):
            _judge(
                *(state, Runs(name="idea", runs=candidate), Runs(name="c", runs=tuple(controls))),
                old_runs=False,
            )


def test_pairs_beside_an_earlier_incumbent_do_not_count_on(tmp_path):
    store = start(tmp_path)
    first = [level + 0.02 for level in FRESH]
    slow = write_round(tmp_path / "slow", first[:1], FRESH[:1], 20)
    assert ask(store, slow, name="slow", **ROUND).outcome == "OPEN"
    fast = write_round(tmp_path / "fast", [level + 0.3 for level in FRESH], FRESH[::-1], 30)
    assert ask(store, fast, name="fast", **ROUND).outcome == "BETTER"
    with refused("slow: its controls are runs of base, but the incumbent is now fast"):
        ask(store, write_round(tmp_path / "slow", first[:2], FRESH[:2], 20), name="slow", **ROUND)


def test_a_round_is_launched_with_new_seeds_judged_and_resumed(tmp_path, monkeypatch):
    """The candidate learns at a fifth of the incumbent's rate."""
    external = Path(__file__).parents[2] / "external"
    recipe = tmp_path / "idea.yaml"
    text = (external / "foreign.yaml").read_text().replace("tests/external", str(external))
    recipe.write_text(text.replace("name: foreign", "name: idea"))
    monkeypatch.chdir(tmp_path)
    launch(recipe, seeds=range(3), name="base", quiet=True)
    store = ("--against", "gate.jsonl")
    words = ("--arm", "baseline", "--start", "--claim", "train/reward:last 40%:better 0, higher is better")
    assert typed("base", *store, *words).exit_code == 0
    result = typed("--round", recipe, *store, "--json")
    assert result.exit_code != 2, result.stderr
    answer = json.loads(result.stdout)
    assert (answer["candidate"], answer["num_seeds"], answer["num_controls"]) == ("idea", 1, 1)
    rounds = sorted(Path("runs").glob("idea*"))
    (seed,) = {int(path.name.removeprefix("seed-")) for path in rounds[0].glob("*/seed-*")}
    assert seed > 1000 and [path.name for path in rounds] == ["idea-round-1"]
    assert answer["next"][0]["argv"][0] == "abrun" if answer["answer"] == "OPEN" else answer["next"] == []
    shutil.rmtree(rounds[0] / "treatment" / f"seed-{seed}")  # killed before it was judged
    Path("gate.jsonl").unlink()
    assert typed("base", *store, *words).exit_code == 0
    again = json.loads(typed("--round", recipe, *store, "--json").stdout)
    assert again["improvement"] == pytest.approx(answer["improvement"]) and again["num_seeds"] == 1
    if answer["answer"] != "OPEN":
        assert f"was answered {answer['answer']}" in typed("--round", recipe, *store).stderr
    Path("gate.jsonl").unlink()
    assert typed("base", *store, *words).exit_code == 0
    recipe.write_text(recipe.read_text().replace("steps: ", "steps: 1"))  # an edited recipe is no resumed one
    result = typed("--round", recipe, *store)
    assert result.exit_code == 2 and "steps is" in result.stderr
    for words, problem in (
        (("--old-runs",), "--old-runs as well"),
        (("--arm", "x"), "give the one to compare"),
    ):
        result = typed("--round", recipe, *store, *words, "--name", "other")
        assert result.exit_code == 2 and problem in result.stderr


ACCEPT = """
import csv, pathlib, sys
def mean(side):
    files = sorted((pathlib.Path(sys.argv[1]) / side).iterdir())
    ends = [list(csv.DictReader(file.open()))[-1] for file in files]
    return sum(float(end["train/reward"]) for end in ends) / len(ends)
sys.exit(mean("candidate") < mean("baseline") - 0.1)
"""


def test_a_rule_is_scored_on_equal_runs_and_on_those_that_differ(tmp_path):
    (tmp_path / "accept.py").write_text(ACCEPT)
    arms = {
        "baseline": {},
        "broken": {"policy.logprobs.impl": "chunked"},
        "subtle": {"policy.optimizer.beta2": 0.9},
    }
    experiment = write_experiment(
        tmp_path / "faulty", arms=arms, seeds=[0, 1, 2, 3], shift={"broken": -0.3, "subtle": -0.01}
    )
    command = f"{sys.executable} {tmp_path / 'accept.py'} {{runs}}"
    content = json.loads(typed(experiment, "--audit", command, "--json").stdout)
    assert [tuple(arm.values()) for arm in content["arms"]] == [
        ("baseline", False, 0, 6),
        ("broken", True, 6, 6),
        ("subtle", True, 0, 6),
    ]
    assert (
        "rejects 0 % of equal runs, and 50 % of runs that differ, and never detects 1" in content["summary"]
    )
    rules = {"true": "without {runs}", "/no/such/rule {runs}": "cannot be asked"}
    rules["sh -c 'kill -9 $$' {runs}"] = "ended with exit code -9"
    for rule, problem in rules.items():
        with refused(problem):
            audit_rule(rule, str(experiment), READING)


def test_what_cannot_be_asked_is_one_line(tmp_path):
    ledger, idea = start(tmp_path), write_runs(tmp_path / "idea", [0.5])
    (tmp_path / "other.jsonl").write_text('{"step": 1}\n')
    cases = [
        ((idea, "--against", tmp_path / "none"), "--start"),
        ((idea, "--against", tmp_path / "other.jsonl"), "not a store"),
        ((idea, "--against", ledger, "--worth", "1"), "--worth requires --start"),
        ((idea, "--against", ledger, "--start"), "--claim"),
        (
            (idea, "--against", ledger, "--start", "--claim", CLAIM, "--control", "x"),
            "--start: got --control",
        ),
        (("--against", ledger, "--control", "x"), "--control: got no CANDIDATE"),
        (("--against", ledger, "--start", "--claim", CLAIM), "CANDIDATE"),
        ((idea, "--against", ledger, "--start", "--claim", CLAIM), "allowed: at least 3"),
        ((tmp_path / "base", "--against", ledger, "--start", "--claim", CLAIM), "already exists"),
        ((write_runs(tmp_path / "short", [0.5], end=3), "--against", ledger), "steps 3-4"),
        ((write_runs(tmp_path / "many", [0.5] * 9), "--against", ledger), "at most 8, as planned"),
        ((write_runs(tmp_path / "loss", [0.5], "train/loss"), "--against", ledger), "not recorded"),
        ((tmp_path / "missing", "--against", ledger), "missing"),
    ]
    before = ledger.read_bytes()
    for words, problem in cases:
        result = typed(*words)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), (words, result.stderr)
        assert problem in result.stderr, result.stderr
    assert ledger.read_bytes() == before and (tmp_path / "other.jsonl").read_text() == '{"step": 1}\n'
