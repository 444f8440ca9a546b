"""docs/evidence.py: results of experiments with a real model, from what is committed alone."""

import importlib
import json
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from abrun.experiment.plan import diff_configs
from abrun.logs.recorded.stored import load_experiment
from abrun.messages.numbers import difference_text
from abrun.recipe.experiment import load_recipe
from abrun.recipe.reading import dotted
from abrun.recipe.run import can_change_numbers
from abrun.report.comparing import compare
from abrun.runs.migrations import REMOVED, migrate_dotted
from abrun.stats.equivalence import equivalence_test
from tests.verdict.simulate import RECIPE, edit, write, write_experiment

ROOT = Path(__file__).parents[1]
LATE = "fault-late_half_batch-0.25"
LATE_FAULT = {"name": "late_half_batch", "size": 0.25}
FAULTS = {"aa_reruns": 1, "ulp_reruns": 1, "faults": ["misgrouped", LATE_FAULT]}


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("evidence")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A checkout without recipes of evidence."""
    for folder in ("recipes/evidence", "docs"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    (tmp_path / "root/docs/evidence.md").write_text("# Evidence\n\n## Results\n\nold\n")
    return tmp_path / "root"


def run(site: Path, comment: str = "# Alike.", **scenario: Any) -> Path:
    """A recipe named demo in the checkout, and beside that its experiment, judged."""
    written = {key: value for key, value in scenario.items() if key not in ("shift", "noise")}
    text = yaml.safe_dump({**RECIPE, "name": "demo", **written})
    (site / "recipes/evidence/demo.yaml").write_text(f"{comment}\n{text}")
    directory = write_experiment(site.parent / "runs/demo", **scenario)
    for path in directory.glob("*/*/attempts/0001.json"):
        edit(path, lambda content: content.update(started_s=1e9, ended_s=1e9 + 90))
    compare(load_experiment(directory), output=directory / "report", formats=("json",))
    return directory


def text_of(generator: ModuleType, site: Path) -> str:
    """Both pages, the list of experiments and the experiment's own."""
    recipe = site / "recipes/evidence/demo.yaml"
    generator.write_record(site.parent / "runs/demo", recipe, site / "docs/evidence/demo")
    return "".join(generator.pages(site).values())


RECORDS = sorted((ROOT / "docs/evidence").glob("*/record.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.parent.name)
def test_a_command_trains_the_arms_that_ran(record: Path) -> None:
    """A recipe that others inherit must not change after it ran."""
    words = shlex.split(json.loads(record.read_text())["command"])
    overrides = [word for option, word in pairwise(words) if option == "--set"]
    recipe = load_recipe(ROOT / words[2], overrides)
    baseline = recipe.run_config("baseline")
    ran = migrate_dotted(json.loads((record.parent / "reference.json").read_text())["config"])
    now = dotted(baseline.model_dump(mode="json"))
    assert {key: now.get(key) for key in ran if can_change_numbers(key)} == {
        key: value for key, value in ran.items() if can_change_numbers(key)
    }
    for arm, section in json.loads((record.parent / "verdict.json").read_text())["arms"].items():
        config = recipe.run_config(arm)
        differed = {key: pair for key, pair in section["treatment_diff"].items() if key not in REMOVED}
        assert diff_configs(baseline, config).keys() <= differed.keys()
        arm_now = dotted(config.model_dump(mode="json"))
        assert {key: arm_now.get(key) for key in differed} == {key: pair[1] for key, pair in differed.items()}


def test_the_committed_pages_are_what_the_committed_records_give(generator: ModuleType) -> None:
    texts = generator.pages(ROOT)
    written = {path: (ROOT / path).read_text() for path in texts}
    assert written == texts, "write them again: python docs/evidence.py"
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs/evidence").glob("*/README.md")}
    assert pages == texts.keys() - {"docs/evidence.md"}


def test_the_page_says_why_an_arm_is_not_a_match(generator: ModuleType) -> None:
    text = "".join(generator.pages(ROOT).values())
    assert "all: train/token_mult_prob_error of the first step deviates by 0.044, above 0.04" in text
    assert "is not tested: the baseline is not shown to climb" in text


def test_the_readme_counts_the_experiments() -> None:
    verdicts = [json.loads(record.with_name("verdict.json").read_text())["arms"] for record in RECORDS]
    kinds = [{arm["verdict"] for arm in arms.values()} for arms in verdicts]
    counts = [sum(verdict in kind for kind in kinds) for verdict in ("INCONCLUSIVE", "MISMATCH")]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"[{len(kinds)} experiments](docs/evidence.md)" in text
    assert "four found a MISMATCH, six left an arm undecided" in text
    assert counts == [6, 4]


def test_every_recipe_of_evidence_says_what_was_claimed_elsewhere(generator: ModuleType) -> None:
    for path in generator.recipes_of(ROOT):
        claims = {arm: expected for arm, _, expected in generator.claimed(path)}
        assert set(claims) in ({None}, set(load_recipe(path).arms) - {"baseline"}), path
        assert set(claims.values()) <= {"MATCH", "MISMATCH", None}, path
        last = path.read_text().split("Claimed elsewhere")[-1].split("\nname:")[0]
        assert ("would be" in last) == (list(claims.values())[-1] is not None), path


def test_every_recipe_of_evidence_has_seeds_a_rerun_and_a_fault_to_find(generator: ModuleType) -> None:
    recipes = [load_recipe(path) for path in generator.recipes_of(ROOT)]
    for recipe in recipes:
        is_exact = (
            recipe.run_config("baseline").model_dump()["policy"]["dtype"] == "float32" or recipe.steps <= 10
        )
        assert (
            len(recipe.seeds) >= (3 if is_exact else 4)
            and recipe.controls.aa_reruns
            and recipe.controls.faults
        ), recipe.name


def test_the_page_has_the_verdict_and_all_that_it_rests_on(generator: ModuleType, site: Path) -> None:
    comment = "# Claim: alike. Truly.\n#\n# Claimed elsewhere: identical, which would be a MATCH here."
    run(site, comment, controls=FAULTS, shift={LATE: -0.2})
    page = text_of(generator, site)
    assert page.startswith("# Evidence\n\n## Results\n\n| experiment | claim |") and "old" not in page
    difference = r"\S+ \[\S+ \S+\]"
    row = (
        r"\| \[`demo`\]\(evidence/demo/README.md\) \| train/reward, steps \d+-\d+: ±0\.02 \| identical "
        rf"\| {difference} \| MATCH, as claimed \|"
    )
    assert re.search(f"^{row}$", page, re.M)
    for part in (
        "# demo\n\n- Claim: Alike.\n- Answer: MATCH, as claimed.\n",
        "- How sure (95 %, 5 seeds): train/reward, steps 33-40, differs by less than ",
        "Injected: `misgrouped`, MATCH (nothing); `late_half_batch`, MISMATCH (claim: train/reward).",
        "0.55 GPU hours, 22 runs, NVIDIA H200, torch 2.11.0, Python 3.11.9, "  # of 90 s each
        "2001-09-09 01:46 to 01:48 UTC.",
        "[verdict.json](verdict.json), [reference.json](reference.json)",
    ):
        assert part in page, part


def test_what_is_committed_is_enough_and_small_and_names_no_host(generator: ModuleType, site: Path) -> None:
    directory = run(site)
    elsewhere = directory / "treatment/seed-0/environment.json"
    edit(elsewhere, lambda content: content.update(hosts=["node-2"]))
    compare(load_experiment(directory), output=directory / "report", formats=("json",))
    noise = np.random.default_rng(0).integers(256, size=(300, 400), dtype=np.uint8)  # hard to compress
    for name in ("claims.png", "train-reward.png"):
        Image.fromarray(noise).save(directory / "report" / name)
    page = text_of(generator, site)
    shutil.rmtree(site.parent / "runs")
    assert "".join(generator.pages(site).values()) == page
    files = {path.name: path.read_bytes() for path in (site / "docs/evidence/demo").iterdir()}
    assert set(files) == {"record.json", "verdict.json", "reference.json", "train-reward.png"}
    assert all(f"({name})" in page for name in files.keys() - {"record.json"})
    assert all(len(content) < 150_000 and b"node-" not in content for content in files.values())


def test_what_was_run_otherwise_than_written_is_in_its_command(generator: ModuleType, site: Path) -> None:
    run(site, model={"path": "/somewhere/SmolLM2"})
    recipe = site / "recipes/evidence/demo.yaml"
    text = recipe.read_text().replace("steps: 40", "steps: 50")
    recipe.write_text(text.replace("/somewhere/SmolLM2", "name/of-a-hub"))
    text_of(generator, site)
    record = json.loads((site / "docs/evidence/demo/record.json").read_text())
    expected = "abrun launch recipes/evidence/demo.yaml --set steps=40 --set model.path=FOLDER"
    assert record["command"] == expected
    files = [path.read_text() for path in (site / "docs/evidence/demo").iterdir()]
    assert len(files) == 3 and not any("/somewhere" in text for text in files)


def test_an_unfinished_experiment_is_shown_and_freezes_nothing(generator: ModuleType, site: Path) -> None:
    directory = run(site)
    text_of(generator, site)  # with a reference
    (directory / "baseline/seed-2/result.json").unlink()
    write(directory / "baseline/seed-2/attempts/0001.json", {"status": "failed", "message": "out of memory"})
    compare(load_experiment(directory), output=directory / "report", formats=("json",))
    page = text_of(generator, site)
    assert " | INVALID |\n" in page and " GPU hours, 11 of 12 runs, " in page
    assert "No reference: baseline/seed-2 " in page and "reference.json" not in page
    assert not (site / "docs/evidence/demo/reference.json").exists()


def test_a_recipe_without_a_run_is_listed_and_bad_input_is_one_line(
    generator: ModuleType, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generator, "ROOT", site)
    directory = run(site)
    assert generator.main([]) == 0
    assert "Not run yet: `demo`." in (site / "docs/evidence.md").read_text()
    (site / "recipes/evidence/other.yaml").write_text((site / "recipes/evidence/demo.yaml").read_text())
    shutil.copytree(directory, directory.parent / "other")
    (directory / "report/verdict.json").unlink()
    for folder, message in ((directory.parent, f"first: abrun compare {directory}"), (site, "no experiment")):
        assert generator.main([str(folder)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and message in lines[0]
    assert (site / "docs/evidence/other/README.md").read_text().startswith("# other\n")  # it was judged


def test_the_arms_that_are_no_declared_pair_are_bounded_by_their_intervals() -> None:
    """A difference of two estimates has at most the sum of their standard errors."""
    folder = ROOT / "docs/evidence/smollm2-fp32-head"
    claims = {
        (claim["arm"], claim["window"]): claim
        for claim in json.loads((folder / "verdict.json").read_text())["claims"]
    }
    text = json.loads((folder / "record.json").read_text())["learned"]
    for window in ("steps 1-1", "all"):
        treatment, engine = (
            np.log(claims[arm, window]["limited_interval"]) for arm in ("treatment", "engine")
        )
        center, half = treatment.mean() - engine.mean(), (np.ptp(treatment) + np.ptp(engine)) / 2
        estimate, low, high = np.exp([center, center - half, center + half])
        assert f"{estimate:.2f} [{low:.2f}, {high:.2f}]" in text
    arms = [np.array(claims[arm, "last 50%"]["differences"]) for arm in ("treatment", "engine")]
    rewards = equivalence_test(*arms[::-1], 0.05)  # pyright: ignore
    assert difference_text(rewards.mean_difference, rewards.interval) in text
