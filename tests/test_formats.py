"""What earlier versions wrote stays readable and resumable: see tests/formats/README.md."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from abrun.errors import ComparisonError, RecipeError
from abrun.experiment.plan import compare_hash, launched_compare_hash, make_plan
from abrun.logs.recorded.reference import add_entry, load_reference
from abrun.logs.recorded.stored import load_experiment
from abrun.recipe.claims import Compare
from abrun.recipe.experiment import CommandRecipe, Recipe, load_recipe, parse_stored_recipe, parse_stored_run
from abrun.recipe.refusals import sections_in, type_name
from abrun.report.comparing import compare, find_post_hoc_reason
from abrun.runs import migrations
from abrun.runs.experiment import planned_runs, read_reported_verdict, read_run_state
from abrun.runs.migrations import REMOVED_LAUNCHERS, RENAMED, drop_removed, earlier_forms, migrate
from abrun.runs.rundir import RunDir

FORMATS = Path(__file__).parent / "formats"
NAMES = sorted(path.parent.name for path in FORMATS.glob("*/expected.json"))
Abrun = Callable[..., tuple[int, str, str]]
# The oldest and the newest, of tests that take seconds; those between are slow
of_few_formats = pytest.mark.parametrize(
    "stored",
    [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:-1]), NAMES[-1]],
    indirect=True,
)


@pytest.fixture(params=NAMES)
def stored(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of one format's folder, as if this machine had written it."""
    folder = tmp_path / request.param
    shutil.copytree(FORMATS / request.param, folder)
    shutil.copy(FORMATS / "trainer.py", folder)
    for path in folder.rglob("*.json"):
        path.write_text(path.read_text().replace('"host": "host"', f'"host": "{os.uname().nodename}"'))
    monkeypatch.chdir(folder)
    return folder


def expected_verdicts(folder: Path) -> dict[str, str]:
    return json.loads((folder / "expected.json").read_text())["verdicts"]


def test_a_stored_experiment_has_its_verdict_by_its_declared_claims(stored: Path) -> None:
    experiment = load_experiment(stored / "runs" / "pairs")
    assert find_post_hoc_reason(experiment, experiment.compare) is None
    assert len(experiment.compare.claims) == 3 and experiment.compare.interim == [2, 3]
    comparison = compare(experiment, output=stored / "new", formats=("json", "markdown"))
    reported = read_reported_verdict(experiment.directory or stored)
    assert (
        reported and reported.verdict == comparison.verdict == expected_verdicts(stored)["pairs"] == "MATCH"
    )
    own = load_experiment(stored / "runs" / "own")
    assert find_post_hoc_reason(own, own.compare) is None
    assert own.treatment_diff and "injected_fault.name" in own.treatment_diff["treatment"]
    assert compare(own, output=stored / "own", formats=("json",)).verdict == "INCONCLUSIVE"  # of two steps


def test_changed_claims_of_a_stored_experiment_are_still_noticed(stored: Path) -> None:
    path = stored / "runs" / "pairs" / "experiment.json"
    text = path.read_text()
    assert text.count('"margin": 0.05') == 1
    path.write_text(text.replace('"margin": 0.05', '"margin": 0.06'))
    experiment = load_experiment(path.parent)
    assert find_post_hoc_reason(experiment, experiment.compare) is not None


@of_few_formats
def test_commands_read_a_stored_experiment(stored: Path, abrun: Abrun) -> None:
    code, output, _ = abrun("status", "--json")
    assert code == 0
    states = {each["experiment"]: each for each in json.loads(output)["experiments"]}
    assert states.keys() == {"pairs", "killed", "own"}
    assert abrun("status", "killed")[0] == 0
    code, output, _ = abrun("logs", "killed/baseline/seed-0")
    assert code == 0
    claim = ("--claim", "train/reward:last 40%:0.05")
    code, output, errors = abrun("compare", "pairs", *claim, "-o", "report")
    assert code == 0 and "MATCH" in output, errors
    assert {"report.html", "report.md", "verdict.json"} <= {path.name for path in Path("report").iterdir()}
    arms = ("runs/pairs/baseline", "runs/pairs/treatment")
    code, output, errors = abrun("compare", *arms, *claim)
    assert code == 0 and "MATCH" in output, errors
    files = [f"{arm}=jsonl:runs/pairs/{arm}/seed-0/metrics.jsonl" for arm in ("baseline", "treatment")]
    code, output, errors = abrun("compare", *files, "-v")
    assert code == 0 and "10 of 10 steps shared" in output, errors


def test_references_and_ledgers_are_read_and_extended(stored: Path, abrun: Abrun) -> None:
    reference = load_reference(Path("runs/reference.json"))
    assert reference.ledger and len(reference.ledger.entries) == 1
    code, output, errors = abrun(
        "compare", "pairs", "--reference", "runs/reference.json", "--arm", "treatment"
    )
    assert code == 0 and "MATCH" in output, errors
    assert abrun("reference", "show", "runs/reference.json")[0] == 0
    entry = reference.ledger.entries[0].model_dump(mode="json", exclude={"previous", "sha256"})
    add_entry(Path("runs/reference.json"), lambda current: entry)
    extended = load_reference(Path("runs/reference.json")).ledger
    assert extended and [each.seeds for each in extended.entries] == [[0, 1]] * 2
    if Path("runs/gate.jsonl").is_file():
        code, output, errors = abrun("gate", "--against", "runs/gate.jsonl")
        assert code == 2 and "of an earlier abrun, without controls; start a new store" in errors


@of_few_formats
def test_a_killed_launch_is_resumed_by_its_own_recipe(stored: Path, abrun: Abrun) -> None:
    experiment = stored / "runs" / "killed"
    results = {path: path.read_bytes() for path in experiment.glob("*/*/result.json")}
    assert 0 < len(results) < len(planned_runs(experiment))
    other = stored / "other.yaml"
    other.write_text((stored / "killed.yaml").read_text().replace("steps: 10", "steps: 11"))
    code, _, errors = abrun("launch", "other.yaml", "--name", "killed", "--resume", "--no-compare")
    assert code == 2 and "steps is 10 there and 11 in the recipe" in errors
    code, output, errors = abrun("launch", "killed.yaml", "--resume", "--no-compare")
    assert code == 0, output + errors
    assert {read_run_state(experiment, name).status for name in planned_runs(experiment)} == {"finished"}
    assert all(path.read_bytes() == content for path, content in results.items())
    loaded = load_experiment(experiment)
    assert find_post_hoc_reason(loaded, loaded.compare) is None
    assert compare(loaded, output=stored / "new", formats=("json",)).verdict == "MATCH"


def test_a_new_recipe_in_an_old_spelling_is_refused_unless_it_resumes(tmp_path: Path) -> None:
    recipe = FORMATS / "2026-11-24" / "killed.yaml"
    with pytest.raises(RecipeError, match=r"compare.primary: was renamed; use claims"):
        load_recipe(recipe)
    assert len(load_recipe(recipe, is_launched=True).compare.claims) == 1
    copy = tmp_path / "renamed.yaml"
    copy.write_text(recipe.read_text().replace("primary", "primaries"))
    with pytest.raises(RecipeError, match=r"compare\.primaries"):
        load_recipe(copy, is_launched=True)


def test_a_rule_of_new_recipes_lets_stored_ones_be(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    text = (FORMATS / "2026-11-24" / "own.yaml").read_text()
    recipe.write_text(text.replace("group_size: 2", "group_size: 2, kl_coefficient: 0.1, kl_estimator: k1"))
    stored = load_recipe(recipe, is_launched=True)
    assert parse_stored_recipe(stored.model_dump(mode="json")) == stored
    assert parse_stored_run(stored.run_config("baseline").model_dump(mode="json"))
    recipe.write_text(recipe.read_text().replace("primary", "claims").replace("planted", "injected"))
    with pytest.raises(RecipeError, match=r"algorithm\.kl_estimator: got 'k1'"):
        load_recipe(recipe)


def test_earlier_hashes_of_a_declaration() -> None:
    """Written out: the key's old name, and a negative number without the word `level`."""
    compare_section = Compare.model_validate(
        {"claims": [{"metric": "a", "above": "level -0.5"}], "interim": [2, 3], "alpha_spending": "rising"}
    )
    newer, oldest = earlier_forms(compare_section.model_dump(mode="json", exclude_defaults=True))
    assert newer["claims"] == [{"metric": "a", "above": -0.5}]
    claims = [{"metric": "a", "above": -0.5}]
    assert oldest == {"primary": claims, "looks": [2, 3], "looks_spending": "rising"}
    assert migrate({"compare": oldest}) == {"compare": compare_section.model_dump(exclude_defaults=True)}
    # Equal levels were the default, which no hash has
    equal = Compare.model_validate({"interim": [4, 8], "alpha_spending": "equal"})
    launched = hashlib.sha256(json.dumps({"interim": [4, 8]}, sort_keys=True).encode()).hexdigest()
    assert launched_compare_hash(launched, equal) == compare_hash(equal) != launched
    for number in (-1, -1.0, -1e-7, -1e22, -0.1, 0.1, "0.9x"):
        migrated = migrate({"compare": {"claims": [{"above": number}]}})["compare"]
        form = next(earlier_forms(migrated))
        assert json.dumps(form["claims"][0]["above"]) == json.dumps(number)


def test_a_removed_key_is_ignored_in_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(FORMATS / "2026-11-24" / "killed.yaml", is_launched=True)
    monkeypatch.setattr(migrations, "REMOVED", {"limits.gone": None})
    content = recipe.model_dump(mode="json")
    content["limits"]["gone"] = 3
    content["arms"]["treatment"]["limits.gone"] = 4
    assert parse_stored_recipe(content) == recipe
    run = recipe.run_config("baseline").model_dump(mode="json")
    assert parse_stored_run({**run, "limits": {**run["limits"], "gone": 3}}) == recipe.run_config("baseline")
    assert migrations.migrate_dotted({"limits.gone": None, "steps": 1}) == {"steps": 1}
    assert migrations.migrate_dotted({"limits.gone": 3}) == {"limits.gone": 3}  # arms may differ in it


REMOVED_VALUES = {
    "keep_samples.every": 3,
    "policy.backend.distributed_optimizer": False,
    "policy.logprobs.memory_budget_mib": 64,
}


def test_settings_that_went_are_ignored_in_what_is_stored_and_refused_in_new_recipes() -> None:
    path = FORMATS / "2026-11-28" / "own.yaml"
    recipe = load_recipe(path, ["policy.backend={type: megatron}"], is_launched=True)
    content = recipe.model_dump(mode="json")
    assert migrations.REMOVED.keys() == REMOVED_VALUES.keys()
    for key, value in REMOVED_VALUES.items():
        *sections, name = key.split(".")
        section = content
        for step in sections:
            section = section[step]
        section[name] = value
        assert migrations.migrate_dotted({key: migrations.REMOVED[key], "steps": 1}) == {"steps": 1}
        with pytest.raises(RecipeError, match=rf"{re.escape(key)}: was removed; "):
            load_recipe(path, ["policy.backend={type: megatron}", f"{key}={json.dumps(value)}"])
    content["arms"]["treatment"] |= REMOVED_VALUES
    assert parse_stored_recipe(content) == recipe


@pytest.mark.parametrize("kind", REMOVED_LAUNCHERS)
def test_a_launcher_that_went_is_ignored_in_what_is_stored_and_refused_in_new_recipes(kind: str) -> None:
    path, launcher = FORMATS / "2026-11-28" / "own.yaml", {"type": kind, "image": "abrun:1"}
    recipe = load_recipe(path)
    assert parse_stored_recipe({**recipe.model_dump(mode="json"), "launcher": launcher}) == recipe
    overrides = [f"launcher={json.dumps(launcher)}"]
    assert load_recipe(path, overrides, is_launched=True) == recipe
    refusal = rf"launcher\.type: got '{kind}', which was removed; run abrun launch in a SkyPilot task$"
    with pytest.raises(RecipeError, match=refusal):
        load_recipe(path, overrides)


def test_a_number_of_runs_that_auto_decided_is_resumed_and_auto_refused_in_new_recipes() -> None:
    path, auto = FORMATS / "2026-11-28" / "own.yaml", "cluster={gpus_per_node: 1, runs_per_gpu: auto}"
    with pytest.raises(RecipeError, match=r"cluster\.runs_per_gpu: got 'auto', which was removed; write a"):
        load_recipe(path, [auto])
    launched = load_recipe(path, [auto], is_launched=True)
    assert launched == load_recipe(path, ["cluster={gpus_per_node: 1}"])
    decided = load_recipe(path, ["cluster={gpus_per_node: 1, runs_per_gpu: 3}"])
    assert parse_stored_recipe(decided.model_dump(mode="json")) == decided


def test_a_removed_key_changes_no_warm_start_of_an_earlier_version() -> None:
    """Else an experiment with a warm start could not be extended by seeds."""
    quickstart = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
    keys = [
        key
        for override in ("steps=60", "policy.backend={type: megatron}", "keep_samples=null")
        for key in make_plan(load_recipe(quickstart, [override])).warm_starts
    ]
    assert keys == ["139c7a27b877e4c5", "494c8d46fe4a9cb5", "49b2eaff7d178b06"]


@pytest.mark.parametrize(
    "tree", [None, 1, [], {}, {"compare": 1}, {"compare": {"claims": [1, {"above": []}]}}]
)
def test_other_shapes_are_left_to_validation(tree: object) -> None:
    assert migrate(tree) == tree and drop_removed(tree) == tree


def test_the_identity_of_a_run_survives_a_resume(stored: Path) -> None:
    """Else its checkpoints would be another run's."""
    run = RunDir(stored / "runs" / "own" / "baseline" / "seed-0")
    before = run.identity()
    path = run.path / "config.json"
    content = json.loads(path.read_text())
    content["config"]["cluster"]["runs_per_gpu"] = 4
    path.write_text(json.dumps(content))
    assert before in run.identities()


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        yield key
        for inner in sections_in(field.annotation):
            kind = type_name(inner)
            yield from keys_of(inner, f"{key}<{kind}>." if kind else f"{key}.")


def test_no_key_of_recipes_disappears_without_a_migration() -> None:
    """A key that goes gets a line in abrun/runs/migrations.py, a new one a line in keys.txt."""
    stored_keys = set((FORMATS / "keys.txt").read_text().split())
    keys = {*keys_of(Recipe), *keys_of(CommandRecipe)}
    assert keys <= stored_keys
    gone = {key for key in stored_keys - keys if re.sub("<.*?>", "", key) not in migrations.REMOVED}
    gone = {key for key in gone if not re.match(f"launcher<({'|'.join(REMOVED_LAUNCHERS)})>", key)}
    assert {key for key in gone if not any(f"{key}.".startswith(f"{old}.") for old in RENAMED)} == set()


def test_a_reference_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"schema_version": 3, "runs": []}))
    with pytest.raises(ComparisonError, match="3"):
        load_reference(path)
