"""What the report says beside the verdict: levels, what to do next, when it was made, what the arms said."""

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from abrun.cli import app
from abrun.logs.recorded.reference import freeze, load_reference, make_regression_experiment
from abrun.logs.recorded.stored import load_experiment
from abrun.messages.validity import alias_hint
from abrun.recipe.claims import Claim, Compare
from abrun.report.commands import fill_placeholders
from abrun.report.comparing import compare
from abrun.report.completions import MAX_CHARACTERS, MAX_PROMPTS, MAX_STEPS, collect_completions
from abrun.report.context import make_context
from abrun.report.next_step import next_steps
from abrun.runs.lines import Sample, sample_row
from tests.commands import commands_in
from tests.verdict.simulate import edit_rows, write_experiment

STEPS = list(range(1, 41, 3))


def sample(prompt: str, text: str = "4", reward: float = 1.0) -> Sample:
    return Sample(prompt=prompt, text=text, reward=reward, logprob_error=0.001, num_tokens=1, truncated=False)


def keep(run: Path, steps: list[int], *samples: Sample) -> None:
    rows = [json.dumps(sample_row(step, 1, list(samples))) + "\n" for step in steps]
    (run / "samples.jsonl").write_text("".join(rows))


def beside(comparison, experiment_dir):
    return make_context(load_experiment(experiment_dir), comparison.content, "abrun compare x")


@pytest.fixture
def here(simulated, tmp_path, monkeypatch):
    """Makes `runs` of what `simulated` writes into, from which commands are pasted."""
    (tmp_path / "runs").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)


def pasted(command):
    """What it prints; nothing is launched."""
    printed = ""
    for words in commands_in(command):
        words += ["--dry-run"] * (words[0] == "launch")
        found = CliRunner().invoke(app, words)
        assert found.exit_code != 2, (words, found.output)
        printed += found.stdout
    return printed


def commands(comparison, experiment_dir):
    return [step.command for step in beside(comparison, experiment_dir).next_steps]


def test_a_match_is_asked_what_it_would_have_caught_and_held_on_to(simulated, judged, here):
    experiment_dir = simulated()
    found = commands(judged(experiment_dir), experiment_dir)
    assert found == [
        "abrun faults run runs/simulated",
        "abrun reference save simulated --output simulated.json",
    ]
    assert "simulated.json: 5 seeds of baseline; compare" in pasted(found[1])


def test_a_next_command_has_what_was_typed_in_it(simulated, judged, here):
    experiment_dir = simulated()
    content = judged(experiment_dir).content

    def typed(line):
        return [step.command for step in next_steps(load_experiment(experiment_dir), content, line)]

    assert typed("abrun launch 'my/own a.yaml' --resume")[0] == "abrun faults run 'my/own a.yaml'"
    assert typed("abrun launch quickstart --jobs 2")[0] == "abrun faults run quickstart"
    set_so = "abrun launch quickstart --set seeds=[1] --name x --set=steps=9 --launcher slurm --seeds 0-3"
    assert typed(set_so)[0] == ("abrun faults run quickstart --set steps=9 --launcher slurm --seeds 0-3")
    keys = "--set steps=9 --set compare.claims.0.margin=1 --set policy.seed=1 --set policy.seed=2"
    suggested = "abrun launch RECIPE --set steps=80 --set 'compare={}' --name x"
    assert fill_placeholders(
        suggested, load_experiment(experiment_dir), f"abrun launch quickstart {keys}".split()
    ) == suggested.replace("RECIPE", "quickstart --set policy.seed=2")
    typed_seeds = ["abrun", "launch", "quickstart", "--set", "seeds=[1]", "--seeds", "0-3"]
    quoted = "abrun launch RECIPE --set 'trainer.command=train --seeds 9'"
    assert fill_placeholders(quoted, load_experiment(experiment_dir), typed_seeds) == quoted.replace(
        "RECIPE", "quickstart --seeds 0-3"
    )
    own = load_experiment(experiment_dir)
    foreign_runs = {name: replace(run, config={"trainer.type": "command"}) for name, run in own.runs.items()}
    (only,) = next_steps(replace(own, runs=foreign_runs), content)  # nothing can be injected in those
    assert only.command == "abrun reference save simulated --output simulated.json"
    foreign = replace(own, launched_compare_sha256=None, directory=None)
    (again, *_) = next_steps(foreign, replace(content, verdict="INVALID"), "abrun compare A B --alias x=y")
    repaired = "abrun compare NEW NEW --claim 'train/reward:last 20%:0.02'"
    assert again.command == f"{repaired} --alias x=y"
    assert next_steps(foreign, replace(content, verdict="INVALID"))[0].command == repaired
    held = replace(foreign, launched_compare_sha256="0" * 64, regression=True)
    assert next_steps(held, content)[0].command == "abrun compare NEW --reference FILE"
    fresh = "abrun reference save NEW --claim 'train/reward:last 20%:0.02' --output simulated-fresh.json"
    assert next_steps(held, replace(content, verdict="MISMATCH"))[0].command == fresh


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        (["loss", "reward", "step_s"], "; map its name: --alias train/reward=reward"),
        (["Actor/Loss"], "; map its name: --alias train/loss=Actor/Loss"),
        (["a", "b"], "; map names with --alias (recorded: a, b)"),
        ([], "; map names with --alias"),
    ],
)
def test_a_metric_of_step_one_under_another_name_is_recognised(recorded, said):
    assert alias_hint(recorded) == said


def claimed(margin):
    return Compare(claims=[Claim(metric="train/reward", margin=margin)])


def test_a_claim_made_afterwards_is_tested_on_fresh_seeds(simulated, judged, here):
    experiment_dir = simulated()
    comparison = judged(experiment_dir, claims=[Claim(metric="train/reward", margin=0.1)])
    experiment = replace(load_experiment(experiment_dir), compare=claimed(0.1))
    fresh, freeze = next_steps(experiment, comparison.content)
    assert fresh.command.startswith("abrun launch runs/simulated --seeds 5-9 --set 'compare=")
    assert "±0.1 " in pasted(fresh.command) and "baseline/seed-9" in pasted(fresh.command)
    assert "--claim 'train/reward:last 20%:0.1' --output" in freeze.command
    pasted(freeze.command)
    assert load_reference(Path("simulated.json")).compare == claimed(0.1)


def test_a_mismatch_is_read(simulated, judged, here):
    experiment_dir = simulated(shift=0.04)
    comparison = judged(experiment_dir)
    fresh = "abrun launch runs/simulated --seeds 5-9 --name simulated-fresh"
    assert commands(comparison, experiment_dir) == [fresh]  # no completions were kept
    for arm in ("baseline", "treatment"):
        keep(experiment_dir / arm / "seed-0", [1], sample("1+3="))
    both = "abrun completions simulated/treatment/seed-0 --against simulated/baseline/seed-0"
    assert commands(comparison, experiment_dir) == [both, fresh]


def test_an_open_question_says_how_many_fresh_seeds_settle_it(simulated, judged, here):
    experiment_dir = simulated(noise=0.05)
    comparison = judged(experiment_dir)
    needed = comparison.content.claims[0].power.pairs_needed
    assert comparison.verdict == "INCONCLUSIVE" and needed
    (fresh, *_) = commands(comparison, experiment_dir)
    assert fresh == f"abrun launch runs/simulated --seeds 5-{4 + needed} --name simulated-fresh"
    planned = " ".join(pasted(fresh).split())
    assert f"2 arms x {needed} seeds" in planned
    assert "noise of 1 earlier experiment" in planned  # with which its power is known


@pytest.mark.parametrize("num_seeds", [1, 5])
def test_without_a_claim_one_is_declared_before_any_more_seeds(simulated, judged, here, num_seeds):
    experiment_dir = simulated(seeds=[*range(num_seeds)], noise=0.05, compare={"claims": []})
    comparison = judged(experiment_dir)
    assert comparison.verdict == "DESCRIPTION"
    first, *others = beside(comparison, experiment_dir).next_steps
    assert first.text.startswith("Declare a margin that you accept (suggested here: ")
    claim = '"claims": [{"metric": "train/reward", "margin": 0.05}]'
    assert claim in first.command and " ±0.05 " in pasted(first.command)
    if num_seeds == 1:
        assert "--seeds 1-3 " in first.command and not others
        return
    (plan,) = others
    assert plan.command.startswith("abrun power runs/simulated --set 'compare=")
    assert " pairs give 80 % power at the observed sd, if the arms are truly equal" in first.text
    assert "measured in simulated over 5 pairs" in " ".join(pasted(plan.command).split())


def test_a_claim_that_no_seed_can_test_is_replaced_on_fresh_seeds(simulated, judged, here):
    flat, reward = ({"metric": metric, "margin": 0.05} for metric in ("train/entropy", "train/reward"))
    for declared in ([flat], [flat, reward]):
        experiment_dir = simulated(compare={"claims": declared})
        for run in experiment_dir.glob("*/seed-*"):
            edit_rows(run, lambda row: row.update({"train/entropy": 1.5}))
        comparison = judged(experiment_dir)
        assert comparison.verdict == "INCONCLUSIVE"
        longer, other = commands(comparison, experiment_dir)
        assert longer.endswith(" --set steps=80 --name simulated-longer")
        assert f"--seeds 5-9 --set 'compare={json.dumps({'claims': [reward]})}'" in other
        assert " ±0.05 " in pasted(other)


def test_fresh_seeds_of_a_launch_with_looks_are_looked_at_once(simulated, judged, here):
    claims = {"claims": [{"metric": "train/reward", "margin": 0.02}], "interim": [3, 5]}
    experiment_dir = simulated(noise=0.05, compare=claims)
    (fresh,) = commands(judged(experiment_dir), experiment_dir)
    assert " --set compare.interim=[] --name simulated-fresh" in fresh and "3, 5 pairs" not in pasted(fresh)


def test_an_experiment_that_is_elsewhere_is_named_by_its_path(simulated, judged, tmp_path, monkeypatch):
    experiment_dir = simulated(noise=0.05)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    (fresh,) = commands(judged(experiment_dir), experiment_dir)
    assert fresh.startswith(f"abrun launch {experiment_dir} --runs-dir {tmp_path} --seeds 5-")
    pasted(fresh)
    monkeypatch.chdir(tmp_path.parent)
    below = f"{tmp_path.name}/simulated"
    (first, freeze) = commands(judged(simulated()), experiment_dir)
    assert first == f"abrun faults run {below} --runs-dir {tmp_path.name}"
    assert freeze == f"abrun reference save {below} --output simulated.json"


@pytest.mark.parametrize("typed", ["abrun compare later --reference ref.json", "abrun launch later.yaml"])
def test_of_a_reference_the_next_change_is_compared_with_it(simulated, here, typed):
    freeze(load_experiment(simulated(seeds=[0, 1, 2])), "baseline", Path("ref.json"))

    def proposed(**scenario):
        later = write_experiment(Path("later"), **scenario)
        experiment = make_regression_experiment(
            load_experiment(later), load_reference(Path("ref.json")), "treatment"
        )
        comparison = compare(experiment, output=later / "report", formats=("json",))
        return next_steps(experiment, comparison.content, typed)

    by_hand = " --no-compare && abrun compare NEW --reference ref.json" if "compare" in typed else ""
    recipe = "runs/later" if "compare" in typed else "later.yaml"
    assert proposed(seeds=[0, 1, 2])[0].command == f"abrun launch {recipe} --name NEW{by_hand}"
    (left,) = proposed(seeds=[0, 1], noise=0.05)
    again = typed if by_hand else "abrun compare later"
    assert (
        left.command == f"abrun launch {recipe} --seeds 0,1,2 --name later --resume --no-compare && {again}"
    )
    (more,) = proposed(seeds=[0, 1, 2], noise=0.05)
    assert more.text.startswith("Train more pairs to narrow the interval: the reference has none, ")
    assert "train its arm on seeds 3-5 " in more.text
    named = "--output later-s-arm-treatment-against-simulated-fresh.json"
    assert more.command == f"abrun reference save NEW --claim 'train/reward:last 20%:0.02' {named}"


def test_every_command_is_one_that_exists(simulated, judged):
    import re

    from abrun.report import commands, next_step
    from tests.commands import all_commands

    known_commands = dict(all_commands())
    text = "".join(inspect.getsource(module) for module in (commands, next_step))
    named = re.findall(
        r'"abrun ((?:faults |reference )?[a-z-]+)([^"]*)', text.replace("{COMPARE}", next_step.COMPARE)
    )
    assert len(named) > 10
    for name, rest in named:
        known = {option for one in known_commands[name].params for option in one.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, name


# --- when and where ---


def test_the_date_is_that_of_the_runs(simulated, judged):
    experiment_dir = simulated()
    for arm, start, end in (("baseline", 1.8e9, 1.8e9 + 60), ("treatment", 1.8e9 + 90, 1.8e9 + 600)):
        for seed in range(5):
            content = {"status": "finished", "started_s": start, "ended_s": end, "exit_code": 0}
            path = experiment_dir / arm / f"seed-{seed}" / "attempts/0001.json"
            path.write_text(json.dumps(content))
    found = beside(judged(experiment_dir), experiment_dir)
    assert found.time_range == "2027-01-15 08:00 to 08:10 UTC"
    assert found.environment == "NVIDIA H200, torch 2.11.0, Python 3.11.9"


def test_a_secret_in_the_command_is_not_shown(simulated, judged):
    experiment_dir = simulated()
    secret = "hf_" + "a1" * 17
    content = judged(experiment_dir).content
    assert (
        secret
        not in make_context(load_experiment(experiment_dir), content, f"abrun compare {secret}").command
    )


# --- completions ---


def test_both_arms_stand_beside_each_other_at_the_steps_that_both_kept(simulated):
    experiment_dir = simulated()
    keep(experiment_dir / "baseline/seed-1", STEPS, sample("2+2="), sample("1+1=", "2"), sample("alone"))
    keep(experiment_dir / "treatment/seed-1", [1, 2, 40], sample("1+1=", "3", 0.0), sample("2+2="))
    found = collect_completions(load_experiment(experiment_dir))
    assert found and (found.seed, found.arms, found.num_steps) == (1, [0, 1], 2)
    assert [step for step, _ in found.steps] == [1, 40]
    prompts = {one.prompt: one.completions for one in found.steps[0][1]}
    assert list(prompts)[-1] == "alone" and prompts["alone"][1] is None
    left, right = prompts["1+1="]
    assert left and right and (left["text"], left["reward"]) == ("2", 1.0)
    assert (right["text"], right["reward"]) == ("3", 0.0)


def test_completions_are_few_short_and_without_secrets(simulated):
    experiment_dir = simulated()
    secret = "hf_" + "a1" * 17
    text = f"begin {secret}\nnext line\n" + "x" * 9000 + "the answer"
    many = [sample(f"prompt {index}", text) for index in range(9)]
    for arm in ("baseline", "treatment"):
        keep(experiment_dir / arm / "seed-0", STEPS, *many)
    found = collect_completions(load_experiment(experiment_dir))
    assert found and len(found.steps) == MAX_STEPS and found.num_steps == len(STEPS)
    assert (found.steps[0][0], found.steps[-1][0]) == (STEPS[0], STEPS[-1])
    for _, prompts in found.steps:
        assert len(prompts) == MAX_PROMPTS
        for said in (one for prompt in prompts for one in prompt.completions):
            assert said and len(said["text"]) < MAX_CHARACTERS + 60 and secret not in said["text"]
            assert said["text"].endswith("the answer") and "\nnext line\n" in said["text"]


def test_without_completions_there_is_no_section_and_a_corrupt_file_is_named(simulated):
    experiment_dir = simulated()
    assert collect_completions(load_experiment(experiment_dir)) is None
    keep(experiment_dir / "baseline/seed-0", [1], sample("2+2="))
    assert collect_completions(load_experiment(experiment_dir)) is None
    (experiment_dir / "treatment/seed-0/samples.jsonl").write_text('{"step": "one"}\n')
    found = collect_completions(load_experiment(experiment_dir))
    assert found and found.problem and "samples.jsonl, line 1" in found.problem
