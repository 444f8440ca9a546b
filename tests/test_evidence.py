"""docs/evidence.py: pages of experiments with a real model, from what is committed alone."""

import importlib
import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from abrun.recipe.experiment import load_recipe
from abrun.recorded.stored import load_experiment
from abrun.report.comparing import compare
from tests.verdict.simulate import RECIPE, edit, write, write_experiment

ROOT = Path(__file__).parents[1]
LATE = "fault-late_half_batch-0.25"
LATE_FAULT = {"name": "late_half_batch", "size": 0.25}
FAULTS = {"aa_reruns": 1, "ulp_reruns": 1, "faults": ["misgrouped", LATE_FAULT]}
# What pages have
LEFT_OPEN = "## What is still open"
ADVICE = "Next steps:"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("evidence")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A checkout without recipes of evidence."""
    for folder in ("recipes/evidence", "docs"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    for name in (".mkdocs.yml", "docs/evidence.md"):
        shutil.copy(ROOT / name, tmp_path / "root" / name)
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


def page_of(generator: ModuleType, site: Path) -> str:
    recipe = site / "recipes/evidence/demo.yaml"
    generator.write_record(site.parent / "runs/demo", recipe, site / "docs/evidence/demo")
    return generator.pages(site)["docs/evidence/demo.md"]


def index_of(generator: ModuleType, site: Path) -> str:
    return generator.pages(site)["docs/evidence.md"]


def test_the_committed_pages_are_what_the_committed_records_give(generator: ModuleType) -> None:
    pages = generator.pages(ROOT)
    differing = [path for path, text in pages.items() if (ROOT / path).read_text() != text]
    assert differing == [], "write them again: python docs/evidence.py"
    there = {f"docs/evidence/{path.name}" for path in (ROOT / "docs/evidence").glob("*.md")}
    assert there == set(pages) - {"docs/evidence.md", ".mkdocs.yml"}


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
        assert len(recipe.seeds) >= 5 and recipe.controls.aa_reruns and recipe.controls.faults, recipe.name


def test_a_page_has_the_verdict_and_all_that_it_rests_on(generator: ModuleType, site: Path) -> None:
    comment = "# Claim: alike.\n#\n# Offline:\n# abrun launch recipes/evidence/demo.yaml\n#\n# From nowhere."
    directory = run(site, comment, controls=FAULTS, shift={LATE: -0.2})
    sample: dict[str, Any] = {"prompt": "2+1=", "text": "a | b\nc", "reward": 1.0, "truncated": False}
    sample |= {"logprob_error": 0.0, "num_tokens": 2}
    for arm in ("baseline", "treatment"):
        kept = [{"step": step, "attempt": 1, "samples": [sample]} for step in (1, 9, 40)]
        path = directory / f"{arm}/seed-0/samples.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    page = page_of(generator, site)
    assert page.startswith("# demo: MATCH\n")
    for part in (
        "\n\nClaim: alike.\n\nFrom nowhere.\n",
        "| hardware | NVIDIA H200, torch 2.11.0, Python 3.11.9 |",
        "| ran | 2001-09-09 01:46 to 01:48 UTC |",
        "| spent | 0.55 run hours, 22 runs (",  # of 90 s
        "| seeds | 0, 1, 2, 3, 4 |",
        "- train/reward: equivalent within ±0.02",
        "; largest deviation: train/loss, ",
        "| late_half_batch | 0.25 of the rows | MISMATCH | claim: train/reward | 40 |",
        "| misgrouped | 1 rows off | MATCH | nothing |",
        "- Not caught: misgrouped (1 rows off)",
        f"\n{LEFT_OPEN}\n\n- ",
        "Step 1, seed 0:",
        "Step 40, seed 0:",
        "| 2+1= | a \\| b<br>c<br>*reward 1.0* | a \\| b<br>c<br>*reward 1.0* |",
    ):
        assert part in page, part
    assert "Step 9" not in page and ADVICE not in page
    floor = re.search(
        r"^\| train/reward \| (0\.\S+) \| (0\.\S+) \| (0\.\S+) \| (0\.\S+) \| - \|$", page, re.M
    )
    assert floor and len(set(floor.groups())) == 4  # the arms, a rerun, one ULP, the seeds
    row = (
        r"\| \[demo\]\(evidence/demo\.md\) \| - \| MATCH "
        r"\| train/reward ±0\.02: \S+ \[\S+ \S+\], bound 0\.\d+, equivalent \| 5 "
        r"\| misgrouped: MATCH \(nothing\)<br>late_half_batch: MISMATCH \(claim: train/reward\) "
        r"\| NVIDIA H200, .*<br>2001-09-09 01:46 to 01:48 UTC \| 0\.55 run hours, 22 runs \|"
    )
    assert re.search(f"^{row}$", index_of(generator, site), re.M)


def test_what_is_committed_is_enough_and_small_and_names_no_host(generator: ModuleType, site: Path) -> None:
    directory = run(site)
    elsewhere = directory / "treatment/seed-0/environment.json"
    edit(elsewhere, lambda content: content.update(hosts=["node-2"]))
    compare(load_experiment(directory), output=directory / "report", formats=("json",))
    noise = np.random.default_rng(0).integers(256, size=(300, 400), dtype=np.uint8)  # hard to compress
    for name in ("claims.png", "train-reward.png"):
        Image.fromarray(noise).save(directory / "report" / name)
    page = page_of(generator, site)
    assert page.index("(demo/train-reward.png)") < page.index("(demo/claims.png)")
    shutil.rmtree(site.parent / "runs")
    assert generator.pages(site)["docs/evidence/demo.md"] == page
    files = {path.name: path.read_bytes() for path in (site / "docs/evidence/demo").iterdir()}
    pictures = {"train-reward.png", "claims.png"}
    assert set(files) == {"record.json", "verdict.json", "reference.json", *pictures}
    assert all(f"({'demo/' + name})" in page for name in files.keys() - {"record.json"})
    assert all(len(content) < 150_000 and b"node-" not in content for content in files.values())
    assert "      - demo: evidence/demo.md\n" in generator.pages(site)[".mkdocs.yml"]


def test_what_was_run_otherwise_than_written_is_in_its_command(generator: ModuleType, site: Path) -> None:
    run(site, model={"path": "/somewhere/SmolLM2"})
    recipe = site / "recipes/evidence/demo.yaml"
    text = recipe.read_text().replace("steps: 40", "steps: 50")
    recipe.write_text(text.replace("/somewhere/SmolLM2", "name/of-a-hub"))
    page = page_of(generator, site)
    assert "\nabrun launch recipes/evidence/demo.yaml --set steps=40 --set model.path=FOLDER\n" in page
    files = [path.read_text() for path in (site / "docs/evidence/demo").iterdir()]
    assert len(files) == 3 and not any("/somewhere" in text for text in files)


def test_an_unfinished_experiment_is_shown_and_freezes_nothing(generator: ModuleType, site: Path) -> None:
    directory = run(site)
    page_of(generator, site)  # with a reference
    (directory / "baseline/seed-2/result.json").unlink()
    write(directory / "baseline/seed-2/attempts/0001.json", {"status": "failed", "message": "out of memory"})
    compare(load_experiment(directory), output=directory / "report", formats=("json",))
    page = page_of(generator, site)
    assert page.startswith("# demo: INVALID\n") and "out of memory" in page
    assert re.search("^# no reference .*: baseline/seed-2 ", page, re.M) and "--reference" not in page
    assert not (site / "docs/evidence/demo/reference.json").exists()
    assert "| unknown run hours, " in page and "--name demo --resume`" in page


def test_a_recipe_without_a_run_is_listed_and_bad_input_is_one_line(
    generator: ModuleType, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generator, "ROOT", site)
    directory = run(site)
    assert generator.main([]) == 0
    assert "| demo | - | not run yet | - | - | - | - | - |\n" in (site / "docs/evidence.md").read_text()
    (site / "recipes/evidence/other.yaml").write_text((site / "recipes/evidence/demo.yaml").read_text())
    shutil.copytree(directory, directory.parent / "other")
    (directory / "report/verdict.json").unlink()
    for folder, message in ((directory.parent, f"first: abrun compare {directory}"), (site, "no experiment")):
        assert generator.main([str(folder)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and message in lines[0]
    assert (site / "docs/evidence/other.md").is_file()  # of one that was judged
