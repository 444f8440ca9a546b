"""`abrun launch --until-decided`: foreign arms that write their curves in milliseconds, pair after pair."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from abrun.api import launching
from abrun.errors import LaunchError, RecipeError
from abrun.experiment.plan import compare_hash
from abrun.launch.stages import add_interim_analyses, refuse_other_interim
from abrun.recipe.experiment import load_recipe
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.report.comparing import compare_sources
from abrun.runs.experiment import planned_runs, read_run_state, write_experiment
from tests.launch.fakes import FORKING
from tests.snapshot import Snapshot

# A curve that a seed shares between arms; `own` is the sd of what each run adds, `shift` the treatment's.
# Of the seeds in `fails` the treatment exits with 1, until the file beside it says that it is mended.
# `apart`: the baseline's distance of trainer and engine, of which the treatment's is nine times; where it is
# given, the lengths of prompts show that both arms saw the same.
ARM = """
import json, os, random, sys
seed, shift, own, apart = int(sys.argv[1]), *map(float, sys.argv[2:5])
fails, path = sys.argv[5:]
if shift and str(seed) in fails.split("+") and not os.path.exists(os.environ["MENDED"]):
    sys.exit(1)
shared, alone = random.Random(seed), random.Random(f"{seed} {shift}")
level, added = shared.gauss(0, 0.03), shift + alone.gauss(0, own)
with open(path, "w") as file:
    for step in range(1, 11):
        reward = 0.1 + 0.08 * step + level + shared.gauss(0, 0.001) + (added if step > 1 else 0.0)
        row = {"step": step, "train/reward": reward}
        if apart:
            row |= {"train/mean_prompt_length": 10 + seed, "train/gen_kl_error": apart * (9 if shift else 1)}
        file.write(json.dumps(row) + chr(10))
"""
RECIPE = """
name: staged
trainer:
  type: command
  argv: ["{python}", SCRIPT, "{seed}", "{shift}", "{own}", "{apart}", "{fails}", "{run_dir}/curve.jsonl"]
  parameters: {shift: 0.0, own: 0.004, apart: 0.0, fails: none}
  metrics: {format: jsonl, path: "{run_dir}/curve.jsonl"}
steps: 10
arms:
  baseline: {}
  treatment: {trainer.parameters.shift: 0.0001}
seeds: [0, 1, 7]
compare:
  claims: [{metric: train/reward, margin: 0.02}]
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abrun: Run) -> Run:
    """`abrun launch` of the recipe in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(LOCAL_LAUNCHERS, "local", FORKING)
    monkeypatch.setenv("MENDED", str(tmp_path / "mended"))
    in_json = functools.partial(compare_sources, formats=["json"])  # figures take seconds
    monkeypatch.setattr("abrun.report.comparing.compare_sources", in_json)
    (tmp_path / "arm.py").write_text(ARM)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("SCRIPT", str(tmp_path / "arm.py")))

    return lambda *arguments: abrun("launch", "recipe.yaml", "--jobs", "4", *arguments)


STAGED = ("--until-decided", "--max-seeds", "5")


def begun() -> set[int]:
    """The seeds of which a run was begun."""
    experiment_dir = Path("runs/staged")
    states = [read_run_state(experiment_dir, name) for name in planned_runs(experiment_dir)]
    return {state.name.seed for state in states if state.status != "pending"}


def verdict() -> dict:
    return json.loads(Path("runs/staged/report/verdict.json").read_text())


def test_equal_arms_stop_at_the_first_look_and_what_was_not_needed_is_not_begun(run: Run) -> None:
    code, output, errors = run(*STAGED)
    assert (code, errors) == (0, "") and "MATCH: staged" in output
    assert begun() == {0, 1, 7}
    content = verdict()
    assert content["verdict"] == "MATCH" and not content["post_hoc"]
    interim = content["arms"]["treatment"]["interim_analyses"]
    assert [(one["num_pairs"], one["verdict"]) for one in interim] == [(3, "MATCH"), (4, None), (5, None)]
    said = next(line for line in content["not_tested"] if "not recorded by the runs" in line)
    assert "exit status" not in said  # of those that were never begun nothing is missed
    # Decided is decided: taken up again, nothing more runs
    code, output, _ = run(*STAGED, "--resume")
    assert code == 0 and begun() == {0, 1, 7} and "MATCH: staged" in output


@pytest.mark.slow
def test_open_looks_go_on_to_the_last(run: Run) -> None:
    code, output, _ = run(*STAGED, "--set", "trainer.parameters.own=0.05")
    assert code == 4 and begun() == {0, 1, 7, 2, 3}
    assert "After 3 pairs: not decided yet." in output and "After 4 pairs: not decided yet." in output
    content = verdict()
    assert content["verdict"] == "INCONCLUSIVE" and not content["post_hoc"]


def test_a_step_one_that_is_open_takes_no_more_seeds(run: Run) -> None:
    code, output, errors = run(*STAGED, "--set", "trainer.parameters.apart=0.0002")
    assert (code, errors, begun()) == (4, "", {0, 1, 7}) and verdict()["verdict"] == "INCONCLUSIVE"
    assert "After 3 pairs: " in output and "step one" in output
    assert "was rounding" in output
    assert "not decided yet" not in output and "still to come" not in output


@pytest.mark.slow
def test_a_mismatch_stops_at_the_first_look(run: Run) -> None:
    shifted = ("--set", "arms.treatment={trainer.parameters.shift: 0.06}", "--name", "shifted")
    code, output, _ = run(*STAGED, *shifted)
    assert code == 3 and "MISMATCH: shifted" in output and "declared at 3, 4, 5 pairs" in output
    assert "decided after 3 pairs" in output


@pytest.mark.slow
def test_a_failed_run_decides_until_it_is_mended(run: Run) -> None:
    fails = ("--set", "trainer.parameters.fails=1")
    code, output, _ = run(*STAGED, *fails)
    assert code == 1 and "Resume with: abrun launch recipe.yaml --jobs 4 --until-decided" in output
    assert verdict()["verdict"] == "MISMATCH" and begun() == {0, 1, 7}
    Path("mended").touch()
    code, output, _ = run(*STAGED, *fails, "--resume")
    assert code == 0 and verdict()["verdict"] == "MATCH" and begun() == {0, 1, 7}


@pytest.mark.slow
def test_a_launch_that_stopped_between_looks_goes_on_where_it_was(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    noisy = (*STAGED, "--set", "trainer.parameters.own=0.05")
    with monkeypatch.context() as patch:
        patch.setattr(launching, "interim_state", interrupted)
        code, output, _ = run(*noisy)
    assert code == 130 and output.rstrip().endswith("--set trainer.parameters.own=0.05 --resume")
    assert begun() == {0, 1, 7}
    code, output, errors = run(*noisy[:2], "6", *noisy[3:], "--resume")
    assert code == 2 and "got interim analyses at [3, 4, 6] pairs" in errors
    code, output, _ = run(*noisy, "--resume")
    assert code == 4 and begun() == {0, 1, 7, 2, 3} and output.count("not decided yet") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-seeds", "8"), "--max-seeds: got 8, which requires --until-decided"),
        (("--until-decided", "--max-seeds", "3"), "--max-seeds: got 3 with 3 seeds"),
        (("--until-decided", "--no-compare"), "--until-decided: got --no-compare"),
        (("--until-decided", "--detach"), "--detach: the local launcher"),
        (("--until-decided", "--launcher", "slurm"), "--until-decided: got launcher slurm"),
        (("--until-decided", "--set", "compare.claims=[]"), "--until-decided needs a claim"),
        ((*STAGED, "--set", "compare.interim=[2, 3]"), "--max-seeds: got 5, but compare.interim is [2, 3]"),
    ],
)
def test_what_cannot_be_staged_is_refused_in_a_line(run: Run, arguments: tuple[str, ...], said: str) -> None:
    code, _, errors = run(*arguments)
    assert code == 2 and said in errors and errors.count("\n") == 1 and not Path("runs").exists()


@pytest.mark.parametrize(
    ("seeds", "max_seeds", "all_seeds", "interim"),
    [
        ([0, 1, 7], 8, [0, 1, 7, 2, 3, 4, 5, 6], [3, 6, 8]),
        ([5, 6], None, [5, 6, 0, 1, 2, 3, 4, 7, 8, 9, 10, 11], [4, 8, 12]),
        ([0, 1], 3, [0, 1, 2], [2, 3]),
        ([0, 1, 2, 3, 4], 6, [0, 1, 2, 3, 4, 5], [5, 6]),
    ],
)
def test_looks_are_evenly_spaced_and_seeds_continued(
    run: Run, seeds: list[int], max_seeds: int | None, all_seeds: list[int], interim: list[int]
) -> None:
    staged = add_interim_analyses(load_recipe(Path("recipe.yaml"), [f"seeds={seeds}"]), max_seeds)
    assert (staged.seeds, staged.compare.interim) == (all_seeds, interim)


@pytest.mark.parametrize(
    ("interim", "said"), [([3, 5], "with interim analyses at"), ([], "without interim analyses")]
)
def test_a_resumed_launch_keeps_the_looks_that_it_declared(
    run: Run, tmp_path: Path, interim: list[int], said: str, snapshot: Snapshot
) -> None:
    recipe = add_interim_analyses(load_recipe(Path("recipe.yaml")), 4)
    write_experiment(tmp_path / "same", {"recipe": recipe.model_dump(mode="json")})
    refuse_other_interim(recipe, tmp_path / "same")
    write_experiment(tmp_path / "mine", {"recipe": {"compare": {"interim": interim}}})
    with pytest.raises(LaunchError) as refusal:
        refuse_other_interim(recipe, tmp_path / "mine")
    snapshot(refusal.value)


def test_looks_that_a_plain_resume_has_dropped_are_those_of_the_first_launch(
    run: Run, tmp_path: Path, snapshot: Snapshot
) -> None:
    plain = load_recipe(Path("recipe.yaml"))
    recipe = add_interim_analyses(plain, 4)
    content = {"recipe": plain.model_dump(mode="json"), "compare_sha256": compare_hash(recipe.compare)}
    write_experiment(tmp_path / "same", content)
    refuse_other_interim(recipe, tmp_path / "same")
    with pytest.raises(LaunchError) as refusal:
        refuse_other_interim(add_interim_analyses(plain, 6), tmp_path / "same")
    snapshot(refusal.value)


def test_declared_looks_are_kept(run: Run, snapshot: Snapshot) -> None:
    recipe = load_recipe(Path("recipe.yaml"), ["compare.interim=[2, 3]"])
    assert add_interim_analyses(recipe, None) is recipe and add_interim_analyses(recipe, 3) is recipe
    with pytest.raises(RecipeError) as refusal:
        add_interim_analyses(recipe.model_copy(update={"arms": {"baseline": {}}}), None)
    snapshot(refusal.value)
