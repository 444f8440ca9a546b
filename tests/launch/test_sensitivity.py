"""`abrun faults run` on the recipe that ships for it: what it says is caught is caught, run by run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from abrun.cli import app
from abrun.recipe.faults import FAULTS

RECIPE = str(Path(__file__).parents[2] / "recipes" / "quickstart-faults.yaml")
PPO = {"value_unshifted", "critic_mask_of_other_rows"}
RANKS = {"rank_mean", "whiten_per_rank", "local_grad_norm"}
NOT_THERE = {
    *PPO,
    *RANKS,
    "gspo_padding",
    "sequence_weight_sum",
    "retokenised",
    "stale_prefix_cache",
}  # what they need this recipe has not
BY_GUARD = {"stale_rollout_weights", "partial_weight_sync"}
# Of these step one and the guards see nothing here, and a claim on three seeds may or may not.
BY_A_CLAIM_OR_NOTHING = {"late_half_batch", "forced_eos"}


def run_faults(tmp_path: Path, *words: str) -> tuple[str, Path]:
    """Return what the command prints, and the folder of its report."""
    command = ["faults", "run", RECIPE, *words, "--runs-dir", str(tmp_path)]
    said = CliRunner().invoke(app, command, catch_exceptions=False)
    assert said.exit_code == 0, said.output
    return said.output, tmp_path / "quickstart-faults-sensitivity" / "report"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_fault_is_called_a_mismatch_where_the_table_of_measured_md_says(tmp_path: Path) -> None:
    """Half an hour on two cores."""
    said, report = run_faults(tmp_path)
    found = json.loads((report / "sensitivity.json").read_text())
    seen = {one["fault"]: one["caught_by"] for one in found["faults"]}
    assert seen.keys() | NOT_THERE == {fault.name for fault in FAULTS}
    assert found["not_injected"].keys() == NOT_THERE
    for name, caught_by in seen.items():
        if name in BY_GUARD:
            assert caught_by == "guard", name
        elif name not in BY_A_CLAIM_OR_NOTHING:
            assert caught_by == "step one", name
    assert all(one["verdict"] == "MISMATCH" for one in found["faults"] if one["caught_by"] != "nothing")
    assert "not injected: value_unshifted, which needs algorithm.type: ppo" in said


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_faults_of_two_ranks_are_called_a_mismatch(tmp_path: Path) -> None:
    """Six to sixteen minutes on two cores."""
    settings = ("--set", "cluster.cpu_ranks=2", "--set", "algorithm.normalize_over=batch")
    _, report = run_faults(tmp_path, *settings, "--faults", ",".join(sorted(RANKS)))
    found = json.loads((report / "sensitivity.json").read_text())
    assert {one["fault"]: one["caught_by"] for one in found["faults"]} == dict.fromkeys(RANKS, "step one")
    assert "| rank_mean |" in (report / "sensitivity.md").read_text().replace("\\", "")
