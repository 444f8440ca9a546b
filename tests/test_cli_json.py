"""What the command line says to machines: JSON alone on the standard output, versions, completion."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from abrun import __version__
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from tests.launch.fakes import FAKE
from tests.launch.test_local import SMALL
from tests.verdict.simulate import write_experiment

pytestmark = pytest.mark.usefixtures("trainer_installed")

Answer = Callable[..., tuple[int, Any]]


@pytest.fixture
def answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abrun: Callable[..., tuple[int, str, str]]
) -> Answer:
    """`abrun ARGUMENTS` in an empty folder, with the fake trainer: exit code, and the JSON it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(LOCAL_LAUNCHERS, "local", FAKE[1])

    def run(*arguments: str | Path) -> tuple[int, Any]:
        code, output, _ = abrun(*arguments)
        return code, json.loads(output) if output and "--json" in arguments else output

    return run


def test_the_state_of_all_experiments_and_of_the_runs_of_one(answer: Answer, tmp_path: Path) -> None:
    assert answer("launch", SMALL, "--seeds", "4,7", "--jobs", "4", "--no-compare")[0] == 0
    code, everything = answer("status", "--json")
    assert code == 0 and everything["notes"] == []
    assert everything["experiments"] == [
        {
            "experiment": "small",
            "runs": {"finished": 4},
            "step": 12,
            "num_steps": 12,
            "verdict": None,
            "is_verdict_old": False,
            "launched_by": None,
        }
    ]
    code, one = answer("status", "small", "--json")
    assert code == 0 and [run["run"] for run in one["runs"]] == [
        "baseline/seed-4", "treatment/seed-4", "baseline/seed-7", "treatment/seed-7"
    ]  # fmt: skip
    assert {(run["status"], run["step"], run["num_steps"]) for run in one["runs"]} == {("finished", 3, 3)}
    assert "train/reward" in one["runs"][0]["latest"] and one["directory"].endswith("runs/small")


def test_a_plan_has_its_power_by_pairs(answer: Answer) -> None:
    _, plan = answer("power", SMALL, "--json", "--sigma", "0.02", "--correlation", "0.5")
    (claim,) = plan["claims"]
    assert claim["spread"]["sd_difference"] == pytest.approx(0.02)  # sigma sqrt(2 (1 - rho))
    powers = [claim["power"][str(count)] for count in (2, 3, 4, 5, 10)]
    assert powers == sorted(powers) and powers[-1] > 0.9
    assert claim["power"][str(claim["pairs_needed"])] >= 0.8 > claim["power"][str(claim["pairs_needed"] - 1)]
    _, unknown = answer("power", SMALL, "--json")
    assert unknown["claims"][0]["power"] is None and unknown["num_pairs"] == 2


def test_a_dry_run_lists_runs_the_difference_and_what_is_lacking(answer: Answer, tmp_path: Path) -> None:
    code, plan = answer("launch", SMALL, "--dry-run", "--json", "--seeds", "0-1", "--jobs", "2")
    assert code == 0 and list(tmp_path.iterdir()) == []
    assert [run["run"] for run in plan["runs"]][:2] == ["baseline/seed-0", "treatment/seed-0"]
    assert plan["treatment_diff"] == {"treatment": {"policy.logprobs.impl": ["logits", "chunked"]}}
    assert (plan["runs_at_once"], plan["refusals"]) == (2, [])
    code, plan = answer("launch", SMALL, "--dry-run", "--json", "--set", "cluster.nodes=2")
    assert code == 2 and plan["runs_at_once"] is None and "cluster.nodes" in plan["refusals"][0]
    assert answer("launch", SMALL, "--plan-only", "--json", "--set", "cluster.nodes=2") == (0, plan)
    for folder in ("/no/such/folder", "no/such/folder"):  # a hub's names have one slash
        code, plan = answer("launch", SMALL, "--dry-run", "--json", "--set", f"model={{path: {folder}}}")
        assert code == 2 and "is not a folder here" in plan["refusals"][0]


def test_a_dry_run_exits_with_2_where_a_reference_of_the_task_is_broken(
    answer: Answer, tmp_path: Path
) -> None:
    rows = [{"prompt": f"1/2 of {number}", "answer": "\\frac{1}{2"} for number in range(20)]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f"task={{type: jsonl, path: {tmp_path}/task.jsonl}}"
    code, plan = answer("launch", SMALL, "--dry-run", "--json", "--set", task)
    assert code == 2 and len(plan["runs"]) == 4
    assert len(plan["refusals"]) == 1 and "task.jsonl" in plan["refusals"][0]


def test_an_open_verdict_names_its_next_command_as_arguments(answer: Answer, tmp_path: Path) -> None:
    write_experiment(tmp_path / "runs/open", noise=0.2)
    code, verdict = answer("compare", "open", "--json")
    assert code == verdict["exit_code"] == 4
    assert {"verdict", "reasons", "claims", "evidence", "guessed", "not_tested"} <= verdict.keys()
    assert all(shlex.join(step["argv"]) == step["command"] and step["text"] for step in verdict["next"])
    assert verdict["next"][0]["argv"][:2] == ["abrun", "launch"]


def test_an_agent_reads_how_to_use_it(answer: Answer) -> None:
    code, text = answer("skill")
    assert code == 0 and text.startswith("---\nname: abrun\ndescription: ")


def test_the_version_is_the_package_s(answer: Answer) -> None:
    assert answer("--version") == (0, f"abrun {__version__}\n")


def test_a_shell_completes_commands_recipes_and_experiments(tmp_path: Path) -> None:
    write_experiment(tmp_path / "runs/apart", seeds=[0, 1], controls={}, steps=2)

    def completions(*words: str) -> set[str]:
        asked = {"_ABRUN_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words)}
        asked["COMP_CWORD"] = str(len(words) - 1)
        done = subprocess.run(
            [sys.executable, "-m", "abrun"],
            cwd=tmp_path,
            env=os.environ | asked,
            capture_output=True,
            text=True,
        )
        return set(done.stdout.split())

    assert completions("abrun", "lau") == {"launch"}
    assert {"quickstart", "quickstart-faults"} <= completions("abrun", "launch", "quick")
    assert completions("abrun", "status", "ap") == {"apart"}
