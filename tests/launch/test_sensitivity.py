"""`abrun sensitivity` on the recipe that ships for it: what it says is caught is caught, run by run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from abrun.cli import app
from abrun.recipe import FAULTS

RECIPE = str(Path(__file__).parents[2] / "recipes" / "quickstart-faults.yaml")
PPO = {"value_unshifted", "critic_mask_of_other_rows"}
BY_GUARD = {"stale_rollout_weights", "partial_weight_sync"}
# Of these step one and the guards see nothing here, and a claim on three seeds may or may not.
BY_A_CLAIM_OR_NOTHING = {"late_half_batch", "forced_eos"}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_fault_is_called_a_mismatch_where_the_table_of_measured_md_says(tmp_path: Path) -> None:
    """Half an hour on two cores."""
    said = CliRunner().invoke(
        app,
        ["sensitivity", RECIPE, "--runs-dir", str(tmp_path)],
        catch_exceptions=False,
    )
    assert said.exit_code == 0, said.output
    found = json.loads(
        (tmp_path / "quickstart-faults-sensitivity" / "report" / "sensitivity.json").read_text()
    )
    seen = {one["fault"]: one["caught_by"] for one in found["faults"]}
    assert seen.keys() | PPO == {fault.name for fault in FAULTS} and found["not_planted"].keys() == PPO
    for name, caught_by in seen.items():
        if name in BY_GUARD:
            assert caught_by == "guard", name
        elif name not in BY_A_CLAIM_OR_NOTHING:
            assert caught_by == "step one", name
    assert all(one["verdict"] == "MISMATCH" for one in found["faults"] if one["caught_by"] != "nothing")
    assert "not planted: value_unshifted, which needs algorithm.type: ppo" in said.output
