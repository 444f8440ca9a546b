"""Files and terminal: complete, readable, and the same bytes for the same runs."""

import hashlib
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from abrun.errors import ComparisonError
from abrun.logs.recorded.sources import ReadingOptions
from abrun.logs.recorded.stored import load_experiment
from abrun.recipe.claims import Claim
from abrun.report.comparing import compare, compare_sources
from abrun.report.write import unique_slugs
from abrun.runs.launches import write_wandb_location
from abrun.runs.rundir import RunDir
from tests.installed import SEES_TRAINER
from tests.verdict.simulate import fail

TWO_CLAIMS = {
    "claims": [{"metric": "train/reward", "margin": 0.02}, {"metric": "train/grad_norm", "margin": 0.3}]
}


def hashes(directory):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.iterdir())}


def shown(comparison, width=120, *, verbose=False):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison.summary(verbose=verbose))
    return console.export_text()


@pytest.mark.parametrize(
    "option",
    [{"pattern": "x"}, {"group": "g"}, {"aliases": ("trl",)}, {"step_column": "s"}],
)
def test_what_an_experiment_says_itself_is_no_option(simulated, tmp_path, option):
    (name,) = option
    flag = {"aliases": "--alias", "step_column": "--step-column"}.get(name, f"--{name}")
    with pytest.raises(ComparisonError, match=f"^{flag}: got .* is an experiment that") as caught:
        compare_sources([str(simulated(seeds=[0, 1]))], ReadingOptions(**option), output=tmp_path / "report")
    assert "\n" not in str(caught.value) and not (tmp_path / "report").exists()


def test_another_process_gives_the_same_bytes(simulated, tmp_path):
    experiment_dir = simulated(seeds=[0, 1], controls={"aa_reruns": 0})
    compare_sources([str(experiment_dir)], ReadingOptions(), output=tmp_path / "here")
    code = (
        f"{SEES_TRAINER}import sys; from pathlib import Path; "
        "from abrun.report.comparing import compare_sources, ReadingOptions; "
        "compare_sources([sys.argv[1]], ReadingOptions(), output=Path(sys.argv[2])); "
        "forbidden = {'torch', 'triton', 'transformers', 'vllm', 'megatron'} & set(sys.modules); "
        "assert not forbidden, forbidden"
    )
    there = [str(experiment_dir), str(tmp_path / "there")]
    subprocess.run([sys.executable, "-c", code, *there], check=True)
    assert hashes(tmp_path / "here") == hashes(tmp_path / "there")


def unfolded(lines):
    return lines[: next(at for at, line in enumerate(lines) if line.startswith("<details>"))]


def test_the_report_is_short_and_leads_with_the_verdict(simulated, judged):
    experiment_dir = simulated(compare=TWO_CLAIMS, noise=0.05)
    judged(experiment_dir, formats=("markdown", "png"))
    lines = (experiment_dir / "report/report.md").read_text().splitlines()
    assert lines[0] == "# INCONCLUSIVE: simulated"
    assert len(unfolded(lines)) <= 30
    fold = lines.index("<details><summary>Evidence and curves</summary>")
    assert lines[fold - 2].startswith("|") and lines[fold - 1] == lines[fold + 1] == ""
    assert lines[-2:] == ["", "</details>"]
    assert [line for line in lines if line.startswith("!")] == [
        "![claims](claims.png)",
        "![train-reward](train-reward.png)",
        "![train-grad_norm](train-grad_norm.png)",
    ]


def test_even_a_broken_experiment_has_a_short_report(simulated, judged):
    experiment_dir = simulated(seeds=list(range(12)), controls={"aa_reruns": 0})
    for seed in range(12):
        fail(experiment_dir / f"baseline/seed-{seed}", after_steps=2, message=f"reason {max(seed, 2)}")
    judged(experiment_dir, formats=("markdown", "png", "svg"))
    lines = (experiment_dir / "report/report.md").read_text().splitlines()
    assert lines[0] == "# INVALID: simulated"
    assert len(unfolded(lines)) <= 30
    assert any("baseline/seed-0 and 2 more failed (" in line for line in lines)
    assert any("and 4 more" in line for line in lines)


def test_brackets_in_messages_are_no_markup(simulated, judged):
    experiment_dir = simulated()
    fail(experiment_dir / "treatment/seed-0", after_steps=3, message="[red]index [/] out of range")
    assert "[red]index [/] out of range" in shown(judged(experiment_dir), width=400)


def test_only_asked_formats_are_written(simulated, judged):
    comparison = judged(simulated(), formats=("json",))
    assert [path.name for path in comparison.files] == ["verdict.json"]
    with pytest.raises(ComparisonError, match="formats: got 'pdf'; allowed: json, html, markdown, png, svg"):
        judged(simulated(), formats=("pdf",))


def test_slugs_never_collide():
    assert list(unique_slugs(["train/reward", "train-reward", "a b/c", "claims", "../../x"])) == [
        "train-reward",
        "train-reward-2",
        "a-b-c",
        "claims-2",
        "x",
    ]


def test_runs_mirrored_in_wandb_are_linked(simulated, tmp_path):
    """Their address is a run's to say, so what is none is left out."""
    experiment_dir = simulated()
    runs = [RunDir(experiment_dir / "baseline" / f"seed-{seed}") for seed in range(2)]
    write_wandb_location(runs[0], {"id": "a", "url": "https://wandb.ai/team/p/runs/a"})
    write_wandb_location(runs[1], {"id": "b", "url": "javascript:alert(1)"})
    found = compare(
        load_experiment(experiment_dir), output=tmp_path / "out", formats=["markdown", "json", "html"]
    )
    assert found.content.wandb == {"baseline/seed-0": "https://wandb.ai/team/p/runs/a"}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "**wandb**: [baseline/seed-0](https://wandb.ai/team/p/runs/a)" in text
    page = (tmp_path / "out" / "report.html").read_text()
    assert "https://wandb.ai/team/p/runs/a" in page and "javascript:alert" not in page


def test_nothing_is_written_without_a_folder(simulated, tmp_path, monkeypatch):
    experiment_dir = simulated()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    found = compare_sources([str(experiment_dir)], ReadingOptions())
    assert found.files == [] and sorted(tmp_path.rglob("*")) == before
    summary = "not tested: 4 things (which bugs would be caught, rare failures, ...); all: compare -v"
    assert summary in shown(found, width=200) and "\nreport " not in shown(found)


def test_a_report_post_hoc_does_not_replace_the_declared_one(simulated, tmp_path):
    experiment_dir = simulated()
    report, claims = experiment_dir / "report", [Claim(metric="train/reward", margin=0.5)]
    compare_sources([str(experiment_dir)], ReadingOptions(), output=report, formats=["json"])
    before = (report / "verdict.json").read_bytes()
    post_hoc = [{"claims": claims}, {"step_one": False}, {"reading": ReadingOptions(unpaired=True)}]
    for options in post_hoc:
        given = {"reading": ReadingOptions(), "formats": ["json"], **options}
        with pytest.raises(ComparisonError, match="has the report of the comparison declared at launch"):
            compare_sources([str(experiment_dir)], output=report, **given)
        assert compare_sources([str(experiment_dir)], output=tmp_path / "other", **given).content.post_hoc
    assert (report / "verdict.json").read_bytes() == before
    again = [Claim(metric="train/reward", window="last 20%", margin=0.02, transform="identity")]
    found = compare_sources(
        [str(experiment_dir)], ReadingOptions(), claims=again, formats=["json"], output=report
    )
    assert found.files == [report / "verdict.json"]


def test_a_comparison_of_other_runs_does_not_replace_an_experiments_report(simulated, tmp_path):
    experiment_dir = simulated()
    report = experiment_dir / "report"
    compare_sources([str(experiment_dir)], ReadingOptions(), output=report, formats=["json"])
    before = (report / "verdict.json").read_bytes()
    other_dir, link = tmp_path / "other", tmp_path / "link"
    shutil.copytree(experiment_dir, other_dir)
    link.symlink_to(report)
    arms = [str(other_dir / "baseline"), str(other_dir / "treatment")]
    for sources, output in ([str(other_dir)], report), (arms, report), ([str(other_dir)], link):
        with pytest.raises(ComparisonError, match=f"of the experiment {experiment_dir.name}; choose"):
            compare_sources(sources, ReadingOptions(), output=output, formats=["json"])
    assert (report / "verdict.json").read_bytes() == before
