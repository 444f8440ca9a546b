"""`abrun launch --until-decided`: foreign arms that write their curves in milliseconds, pair after pair."""

from collections.abc import Callable
from pathlib import Path

import pytest

from abrun.api import launching
from abrun.errors import LaunchError, RecipeError
from abrun.experiment.plan import compare_hash
from abrun.launch.derived_recipes import add_interim_analyses, refuse_other_interim
from abrun.recipe.experiment import load_recipe
from abrun.runs.experiment import write_experiment
from tests.launch.curves import begin_in, begun, verdict_of
from tests.snapshot import Snapshot

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abrun: Run) -> Run:
    """`abrun launch` of the recipe in an empty folder: exit code, stdout, stderr."""
    begin_in(tmp_path, monkeypatch, "staged", [0, 1, 7])
    return lambda *arguments: abrun("launch", "staged.yaml", "--jobs", "4", *arguments)


STAGED = ("--until-decided", "--max-seeds", "5")


def test_equal_arms_stop_at_the_first_look_and_what_was_not_needed_is_not_begun(run: Run) -> None:
    code, output, errors = run(*STAGED)
    assert (code, errors) == (0, "") and "MATCH: staged" in output
    assert begun("staged") == {0, 1, 7}
    content = verdict_of("staged")
    assert content["verdict"] == "MATCH" and not content["post_hoc"]
    interim = content["arms"]["treatment"]["interim_analyses"]
    assert [(one["num_pairs"], one["verdict"]) for one in interim] == [(3, "MATCH"), (4, None), (5, None)]
    said = next(line for line in content["not_tested"] if "not recorded by the runs" in line)
    assert "exit status" not in said  # of those that were never begun nothing is missed
    # Decided is decided: taken up again, nothing more runs
    code, output, _ = run(*STAGED, "--resume")
    assert code == 0 and begun("staged") == {0, 1, 7} and "MATCH: staged" in output


@pytest.mark.slow
def test_open_looks_go_on_to_the_last(run: Run) -> None:
    code, output, _ = run(*STAGED, "--set", "trainer.parameters.own=0.05")
    assert code == 4 and begun("staged") == {0, 1, 7, 2, 3}
    assert "After 3 pairs: not decided yet." in output and "After 4 pairs: not decided yet." in output
    content = verdict_of("staged")
    assert content["verdict"] == "INCONCLUSIVE" and not content["post_hoc"]


def test_a_step_one_that_is_open_takes_no_more_seeds(run: Run) -> None:
    code, output, errors = run(*STAGED, "--set", "trainer.parameters.apart=0.0002")
    assert (code, errors, begun("staged")) == (4, "", {0, 1, 7}) and verdict_of("staged")[
        "verdict"
    ] == "INCONCLUSIVE"
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
    assert code == 1 and "Resume with: abrun launch staged.yaml --jobs 4 --until-decided" in output
    assert verdict_of("staged")["verdict"] == "MISMATCH" and begun("staged") == {0, 1, 7}
    Path("mended").touch()
    code, output, _ = run(*STAGED, *fails, "--resume")
    assert code == 0 and verdict_of("staged")["verdict"] == "MATCH" and begun("staged") == {0, 1, 7}


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
    assert begun("staged") == {0, 1, 7}
    code, output, errors = run(*noisy[:2], "6", *noisy[3:], "--resume")
    assert code == 2 and "got interim analyses at [3, 4, 6] pairs" in errors
    code, output, _ = run(*noisy, "--resume")
    assert code == 4 and begun("staged") == {0, 1, 7, 2, 3} and output.count("not decided yet") == 2


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
    staged = add_interim_analyses(load_recipe(Path("staged.yaml"), [f"seeds={seeds}"]), max_seeds)
    assert (staged.seeds, staged.compare.interim) == (all_seeds, interim)


@pytest.mark.parametrize(
    ("interim", "said"), [([3, 5], "with interim analyses at"), ([], "without interim analyses")]
)
def test_a_resumed_launch_keeps_the_looks_that_it_declared(
    run: Run, tmp_path: Path, interim: list[int], said: str, snapshot: Snapshot
) -> None:
    recipe = add_interim_analyses(load_recipe(Path("staged.yaml")), 4)
    write_experiment(tmp_path / "same", {"recipe": recipe.model_dump(mode="json")})
    refuse_other_interim(recipe, tmp_path / "same")
    write_experiment(tmp_path / "mine", {"recipe": {"compare": {"interim": interim}}})
    with snapshot.refused(LaunchError):
        refuse_other_interim(recipe, tmp_path / "mine")


def test_looks_that_a_plain_resume_has_dropped_are_those_of_the_first_launch(
    run: Run, tmp_path: Path, snapshot: Snapshot
) -> None:
    plain = load_recipe(Path("staged.yaml"))
    recipe = add_interim_analyses(plain, 4)
    content = {"recipe": plain.model_dump(mode="json"), "compare_sha256": compare_hash(recipe.compare)}
    write_experiment(tmp_path / "same", content)
    refuse_other_interim(recipe, tmp_path / "same")
    with snapshot.refused(LaunchError):
        refuse_other_interim(add_interim_analyses(plain, 6), tmp_path / "same")


def test_declared_looks_are_kept(run: Run, snapshot: Snapshot) -> None:
    recipe = load_recipe(Path("staged.yaml"), ["compare.interim=[2, 3]"])
    assert add_interim_analyses(recipe, None) is recipe and add_interim_analyses(recipe, 3) is recipe
    with snapshot.refused(RecipeError):
        add_interim_analyses(recipe.model_copy(update={"arms": {"baseline": {}}}), None)
