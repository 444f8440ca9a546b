"""Runs of other trainers as they lie on disk: one command, no flags, and what was guessed is said."""

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import ComparisonError
from abrun.logs.recorded.sources import ReadingOptions, open_sources
from abrun.messages import sentence, sentences
from abrun.messages.codes import Code
from abrun.recipe.claims import parse_claim
from abrun.report.comparing import compare_sources
from abrun.verdict.verdict_file import values_of
from tests.commands import commands_in
from tests.logs.layouts import ARMS, LAST, LAYOUTS, SEEDS, rows, write_csv
from tests.snapshot import Snapshot

EVERY_10TH = ("Trainer checkpoints", "LLaMA-Factory", "torchtitan")
ONE_EACH = ("two CSV files", "LLaMA-Factory", "SkyRL")
NO_REWARD = ("LLaMA-Factory", "torchtitan")


def described(sources: list[str], output: Path, claims: str | None = None, **options: Any) -> Any:
    return compare_sources(
        sources,
        ReadingOptions(**options),
        claims=[parse_claim(claims)] if claims else None,
        output=output,
        formats=("json",),
        command="abrun compare A B",
    )


def pasted(command: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[int, str, list[str]]:
    """What a command line prints, and the next steps that it proposes, none of them wrapped."""
    (words,) = commands_in(command)
    monkeypatch.setattr(sys, "argv", ["abrun", *words, *more])
    verbose = ["-v"] if words[0] == "compare" else []
    found = CliRunner().invoke(app, [*words, *more, *verbose], env={"COLUMNS": "1000"})
    steps = [line.rpartition(": abrun ")[2] for line in found.output.splitlines() if line.startswith("next ")]
    return found.exit_code, found.output, [f"abrun {step.strip()}" for step in steps]


def test_what_the_report_proposes_of_others_runs_works_when_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arm, of in (("old", "old"), ("new", "new"), ("later", "new")):
        for seed in SEEDS:
            write_csv(Path(f"r/{arm}/seed-{seed}.csv"), rows(of, seed), reward="Reward/x")
    reads = "--alias train/reward=Reward/x"
    claim = f"abrun compare r/old r/new --claim 'Reward/x:last 20%:0.05' {reads}"
    code, _, (fresh, freeze) = pasted(claim, monkeypatch)
    last = SEEDS[-1] + 1
    assert code == 0 and fresh == f"{claim} --seeds {last}-{last + len(SEEDS) - 1}"
    for arm in ("old", "new"):  # what its sentence asks for, before
        for seed in range(last, last + len(SEEDS)):
            write_csv(Path(f"r/{arm}/seed-{seed}.csv"), rows(arm, seed), reward="Reward/x")
    code, output, (_,) = pasted(fresh, monkeypatch)
    assert code == 0 and f"{len(SEEDS)} of {len(SEEDS)} finished" in output
    _, output, _ = pasted(freeze, monkeypatch)
    held = f"abrun compare NEW --reference old-vs-new.json {reads}"
    assert output.endswith(f": {held}\n") and f"{2 * len(SEEDS)} seeds of old;" in output
    code, output, (after,) = pasted(held.replace("NEW", "r/later"), monkeypatch)
    assert code == 0 and "MATCH: later against old-vs-new" in output and "post hoc" not in output
    assert after == held


def test_a_reference_of_one_arm_and_what_is_proposed_without_its_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/seed-0", "a/seed-1", "a/seed-2", "b/seed-0", "b/seed-1", "mixed/x-0", "mixed/y-1"):
        write_csv(Path(f"{name}.csv"), rows("old", int(name[-1])))
    for sources in ("a", "a/seed-0.csv a/seed-1.csv a/seed-2.csv", "A=a"):
        _, output, _ = pasted(f"abrun reference save {sources} -o a.json", monkeypatch)
        assert "a.json: 3 seeds of a, without a claim (--claim" in output.lower()
    _, output, (claim,) = pasted("abrun compare b --reference a.json", monkeypatch)
    assert claim == "abrun compare b --reference a.json --claim METRIC:WINDOW:MARGIN"
    claimed = claim.replace("METRIC:WINDOW:MARGIN", "'reward:last 20%:1e-9'")
    write_csv(Path("b/seed-1.csv"), rows("new", 1))
    code, output, (more,) = pasted(claimed, monkeypatch)
    assert code == 4 and "(2), then compare again" in output and more == claimed
    with pytest.raises(
        ComparisonError, match=r"the 2 runs in mixed give seeds but no arms.*: abrun compare new=mixed$"
    ):
        open_sources(["mixed"], ReadingOptions(allows_one_arm=True))


def mean_of_last_fifth(arm: str, key: str, seeds: tuple[int, ...], every: int) -> float:
    """With plain loops: every seed's mean, then theirs."""
    means = []
    for seed in seeds:
        found = [row for row in rows(arm, seed) if row["step"] == 1 or row["step"] % every == 0 or every == 1]
        first = LAST - LAST // 5 + 1 if every == 1 else 50  # of 6 or 7 steps the last two
        inside = [row[key] for row in found if row["step"] >= first]
        means.append(sum(inside) / len(inside))
    return sum(means) / len(means)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_described_by_one_command(tmp_path: Path, name: str) -> None:
    found = described(LAYOUTS[name](tmp_path / "runs"), tmp_path / "report").content
    assert (found.verdict, found.exit_code) == ("DESCRIPTION", 0), found.reasons
    ours, key = ("train/loss", "loss") if name in NO_REWARD else ("train/reward", "reward")
    one = found.select("description")[0]
    every, seeds = (10 if name in EVERY_10TH else 1), (SEEDS[:1] if name in ONE_EACH else SEEDS)
    assert one["metric"] == ours and one["num_runs"] == (len(seeds), len(seeds)) and found.paired
    baseline = "new" if "new" in found.baseline else "old"
    treatment = next(arm for arm in ARMS if arm != baseline)
    assert one["baseline"] == pytest.approx(mean_of_last_fifth(baseline, key, seeds, every), rel=1e-6)
    assert one["treatment"] == pytest.approx(mean_of_last_fifth(treatment, key, seeds, every), rel=1e-6)
    assert (one["interval"] is None) == (name in ONE_EACH)
    assert found.guessed


def test_the_command_to_copy_gives_a_verdict(tmp_path: Path) -> None:
    sources = LAYOUTS["CSV, Step and Reward/mean"](tmp_path / "runs")
    found = described(sources, tmp_path / "report")
    one = found.content.select("description")[0]
    claim = f"{one['metric']}:{one['window']}:{one['margin']:g}"
    assert found.next_steps[0].command == f"abrun compare A B --claim '{claim}'"
    decided = described(sources, tmp_path / "claimed", claim)
    assert decided.verdict == "MATCH" and decided.content.select("description") == []
    assert decided.content.claims[0].estimate.certified_bound == pytest.approx(one["certified_bound"])
    # by its own name, or the end of ours, it is the same claim
    for name in ("Reward/mean", "reward"):
        again = described(sources, tmp_path / "again", claim.replace(one["metric"], name))
        assert again.content.claims == decided.content.claims


@pytest.mark.parametrize(
    ("claim", "shift", "verdict"),
    [
        (None, 0.0, "DESCRIPTION"),
        ("train/reward:last 20%:0.1", 0.0, "MATCH"),
        ("train/reward:last 20%:0.1", 0.5, "MISMATCH"),
        ("train/reward:last 20%:<9", 0.0, "PASS"),
    ],
)
def test_where_nothing_was_launched_no_settings_are_spoken_of(
    tmp_path: Path, claim: str | None, shift: float, verdict: str, snapshot: Snapshot
) -> None:
    """There is no recipe to set them in, and no one has said a precision."""
    for arm, moved, norm in zip(ARMS, (0.0, shift), (1.0, 1.02), strict=True):
        for seed in SEEDS:
            first, *later = rows(arm, seed)
            changed = [{**row, "reward": row["reward"] + moved} for row in later]
            write_csv(tmp_path / arm / f"s{seed}.csv", [{**first, "grad_norm": norm**seed}, *changed])
    found = described([str(tmp_path / arm) for arm in ARMS], tmp_path / "report", claim)
    assert found.verdict == verdict
    screen = io.StringIO()
    Console(file=screen, width=1000).print(found.summary())
    content = found.content
    reasons = [*content.reasons, *content.not_tested, *content.guessed, *content.notes]
    reasons += [guard.reason for guard in content.select("guard")]
    text = " ".join(sentences(reasons)) + screen.getvalue()
    unsettled = [one for one in found.content.not_tested if one.code is Code.STEP_ONE_NOT_SETTLED]
    unsettled = [reason for reason in unsettled if reason["metric"] == "train/grad_norm"]
    assert len(unsettled) == 1 and not unsettled[0]["has_recipe"]
    snapshot(sentence(unsettled[0]))
    for word in ("recipe", "bfloat16", "controls.", "compare.", "environment.json"):
        assert word not in text, word


def test_the_suggested_margin_owes_nothing_to_the_treatment(tmp_path: Path) -> None:
    margins = set()
    for shift in (0.0, 0.3):
        for seed in SEEDS:
            moved = [{**row, "reward": row["reward"] + shift} for row in rows("new", seed)]
            write_csv(tmp_path / str(shift) / "old" / f"s{seed}.csv", rows("old", seed))
            write_csv(tmp_path / str(shift) / "new" / f"s{seed}.csv", moved)
        folders = [str(tmp_path / str(shift) / arm) for arm in ARMS]
        one = described(folders, tmp_path / "report").content.select("description")[0]
        margins.add((one["metric"], one["margin"], one["margin_is"]))
    ((metric, margin, why),) = margins
    first, last = ([row["reward"] for row in rows("old", 1)][part] for part in (slice(6), slice(-6, None)))
    assert metric == "train/reward" and (why.code, why["of"]) == (Code.MARGIN_OFFERED, "climb")
    assert margin == pytest.approx(0.1 * (sum(last) - sum(first)) / 6, rel=0.25)


def test_seeds_that_no_one_says_are_independent_runs_until_a_claim_is_made(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    for arm, names in zip(ARMS, (("apple", "pear", "plum"), ("fig", "kiwi", "lime")), strict=True):
        for seed, name in zip(SEEDS, names, strict=True):
            write_csv(tmp_path / arm / f"{name}.csv", rows(arm, seed))
    sources = [str(tmp_path / arm) for arm in ARMS]
    found = described(sources, tmp_path / "report")
    assert not found.content.paired and found.content.select("description")[0]["num_runs"] == (3, 3)
    assert Code.NOTHING_SAYS_SEEDS() in found.content.guessed
    command = found.next_steps[0].command
    assert command.startswith("abrun compare A B --unpaired --claim 'train/reward:last 20%:")
    with snapshot.refused(ComparisonError):
        described(sources, tmp_path / "claimed", "train/reward:last 20%:0.1")


def test_seeds_can_be_chosen(tmp_path: Path) -> None:
    sources = LAYOUTS["s1.csv, s2.csv"](tmp_path)
    missing = tmp_path / "old" / "s3.csv"
    other = tmp_path / "new" / "s3.csv"
    kept = missing.read_bytes()
    missing.unlink()
    found = described(sources, tmp_path / "report")
    assert (found.verdict, found.exit_code) == ("DESCRIPTION", 0)
    assert values_of(found.content, Code.SEEDS_NOT_SHARED)[0]["seeds"] == [3]
    assert described(sources, tmp_path / "claimed", "train/reward:last 20%:0.1").verdict == "MATCH"
    missing.write_bytes(kept)
    other.unlink()  # the treatment's run may have failed
    assert described(sources, tmp_path / "claimed", "train/reward:last 20%:0.1").verdict == "INVALID"
    found = described(sources, tmp_path / "report", seeds=(1, 2))
    assert found.content.select("description")[0]["num_runs"] == (2, 2) and found.verdict == "DESCRIPTION"
    with pytest.raises(ComparisonError, match="there is no run of 9; there are 1, 2, 3"):
        described(sources, tmp_path / "report", seeds=(9,))


def test_where_a_claim_cannot_be_tested_another_is_proposed_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, reward in (("r", {}), ("dead", {"reward": 0.5})):
        for arm in ARMS:
            for seed in SEEDS:
                flat = [{**row, **reward, "loss": 0.5} for row in rows(arm, seed)]
                write_csv(Path(f"{name}/{arm}/seed-{seed}.csv"), flat)
    loss, reward = "--claim loss:all:0.1", "--claim 'reward:last 20%:0.5'"
    _, output, (other, again) = pasted(f"abrun compare r/old r/new {loss} --no-step-one", monkeypatch)
    assert (
        other.count("--claim") == 1
        and "train/reward:" in other
        and again == "abrun compare NEW NEW --claim train/loss:all:0.1"
    )
    code, output, _ = pasted(other, monkeypatch)
    assert code == 0 and "train/reward: equivalent within" in output and "train/loss: not" not in output
    _, output, (left, _) = pasted(f"abrun compare r/old r/new {loss} {reward}", monkeypatch)
    assert left == f"abrun compare r/old r/new {reward.replace('reward', 'train/reward')}"
    _, _, found = pasted("abrun compare dead/old dead/new", monkeypatch)
    assert found == ["abrun compare NEW NEW"]
    repaired = "abrun compare NEW NEW --claim train/loss:all:0.1"
    assert pasted(f"abrun compare dead/old dead/new {loss}", monkeypatch)[2] == [repaired]


def test_nothing_shared_and_one_arm_alone_say_what_to_do(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", rows("old", 1), reward="foo", loss="bar", grad_norm="baz")
    write_csv(tmp_path / "b.csv", rows("new", 1), reward="qux", loss="quux", grad_norm="corge")
    found = described([str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], tmp_path / "report")
    assert found.verdict == "INCONCLUSIVE"
    assert found.content.reasons[0].code is Code.NO_SHARED_METRIC
    assert found.content.reasons[0]["baseline"][:3] == ["bar", "baz", "foo"]
    assert "--alias train/reward=NAME" in found.next_steps[0].command
    sources = LAYOUTS["s1.csv, s2.csv"](tmp_path / "runs")
    assert described(sources[:1], tmp_path / "report").content.reasons[0].code is Code.NORMAL_GAP


def test_a_single_text_and_a_column_that_is_none_of_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arm in ("a", "b"):
        for seed in (0, 1):
            values = ["n/a" if (arm, seed, step) == ("b", 1, 3) else 0.04 * step for step in range(1, 21)]
            Path(arm).mkdir(exist_ok=True)
            table = "".join(f"{step},{value}\n" for step, value in enumerate(values, 1))
            Path(f"{arm}/seed-{seed}.csv").write_text(f"step,train/reward\n{table}")
    compare = "abrun compare a b"
    code, output, _ = pasted(f"{compare} --claim 'train/reward:all:0.1'", monkeypatch)
    where = "(first: step 3): b/seed-1.csv, line 4, column train/reward: got 'n/a'; write"
    assert code == 5 and where in output
    for path in Path("b").iterdir():
        header, *lines = path.read_text().replace(",", ";").replace(".", ",").splitlines()
        path.write_text("\n".join([f"{header};n", *(f"{line};1" for line in lines), ""]))
    named = "b/seed-0.csv, line 2, column train/reward: got '0,04' (a decimal comma?); write a number"
    code, output, (after,) = pasted(compare, monkeypatch)
    assert code == 4 and f": {named}" in output and after == "abrun compare NEW NEW"
    for path in Path("b").iterdir():
        path.write_text("".join(f"{line[:-2]}\n" for line in path.read_text().splitlines()))
    with pytest.raises(ComparisonError, match=re.escape(f"'b' has no numbers in 2 runs: {named}")):
        described(["a", "b"], tmp_path / "out")
