"""No secret of a recipe, an environment or a checkout is written or shown; by reference commands get it."""

import os
import stat
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from abrun.cli import main
from abrun.errors import LaunchError, RecipeError
from abrun.experiment.plan import RunName, make_plan
from abrun.external import run as external_run
from abrun.launch import git
from abrun.launch.prepare import write_run_record
from abrun.recipe.experiment import BASELINE, load_recipe
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.runs.lines import read_json_lines
from abrun.runs.rundir import RunDir
from abrun.runs.state import read_state
from tests.launch.fakes import FAKE, FORKING, run_to_end

TOKEN = "hf_aB3dE5gH7jK9mN1pQ3sT5vW7yZ"
FOREIGN = """
name: foreign
trainer:
  type: command
  argv: ["{python}", -c, "{script}", "{run_dir}/log.csv"]
  env:
    HF_TOKEN: ${HF_TOKEN}
    URL: "https://me:${HF_TOKEN}@host/{seed}"
    MODE: ordinary
  parameters:
    script: >-
      import os, sys; seen = os.environ['HF_TOKEN'], os.environ['URL'];
      size = sum(map(len, seen));
      open(sys.argv[1], 'w').write(f'step,reward\\n1,{size}\\n2,{size}\\n')
  metrics: {format: csv, path: "{run_dir}/log.csv"}
steps: 2
arms: {baseline: {}, treatment: {trainer.env.MODE: other}}
seeds: [0]
compare: {claims: []}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(LOCAL_LAUNCHERS, "local", FORKING)
    path = tmp_path / "recipe.yaml"
    path.write_text(FOREIGN)
    return path


@pytest.fixture
def abrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["abrun", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    return run


@pytest.mark.parametrize(
    "override",
    [
        f"trainer.env.HF_TOKEN={TOKEN}",
        "trainer.env.DB_PASSWORD=correct-horse",
        "trainer.env.DB_PASSWORD=123456789123",
        "trainer.env.URL=https://me:correct-horse@host",
        "arms.treatment={trainer.env.HF_TOKEN: correct-horse}",
        f"arms={{baseline: {{}}, {TOKEN}: {{}}}}",
        f"trainer.parameters.script={TOKEN}",
        f"trainer.argv=[train, {TOKEN}]",
        "trainer.argv=[sh, -c, 'curl https://me:correct-horse@host; train']",
        f"trainer.metrics.path='{{run_dir}}/{TOKEN}'",
        f"trainer.versions_of=[{TOKEN}]",
        "launcher={type: slurm, setup: ['curl https://me:correct-horse@host']}",
        "launcher={type: ray, env: {MYSQL_PWD: correct-horse}}",
        f"name={TOKEN}",
        f"steps={TOKEN}",
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_quoted(
    abrun, recipe, monkeypatch, override, snapshot
) -> None:
    monkeypatch.setenv("HF_TOKEN", "x")
    code, said = abrun("launch", str(recipe), "--set", override)
    assert code == 2 and said.count("\n") == 1 and "secret" in said
    snapshot(said)
    assert TOKEN not in said and "correct-horse" not in said and "123456789123" not in said
    assert not (recipe.parent / "runs").exists()


def test_error_lines_do_not_quote_secrets(abrun, recipe) -> None:
    for arguments in (
        ["launch", str(recipe), "--set", TOKEN],
        ["launch", str(recipe), "--set", f"steps.x={TOKEN}=1"],
        ["launch", str(recipe), "--seeds", TOKEN],
        ["launch", f"https://me:correct-horse@host/{TOKEN}.yaml"],
        ["compare", f"wandb:{TOKEN}"],
        ["status", TOKEN],
    ):
        code, said = abrun(*arguments)
        assert code == 2 and TOKEN not in said and "correct-horse" not in said


def test_a_variable_that_is_not_set_is_one_line_before_anything_is_written(
    abrun, recipe, monkeypatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for options in ([], ["--dry-run"]):
        code, said = abrun("launch", str(recipe), *options)
        assert code == 2 and said.count("\n") == 1
        assert "trainer.env.HF_TOKEN: got ${HF_TOKEN}, but HF_TOKEN is not set" in said
    assert not (recipe.parent / "runs").exists()


def test_a_reference_outside_of_env_is_explained(recipe) -> None:
    with pytest.raises(RecipeError, match=r"read only in trainer.env; add HF_TOKEN: \$\{HF_TOKEN\}"):
        load_recipe(recipe, ["trainer.argv=[train, '${HF_TOKEN}']"])


@pytest.mark.parametrize("text", ["${TOKEN:-x}", "${HF-TOKEN}", "${1}", "${A B}"])
def test_a_reference_of_another_form_is_explained(recipe, text) -> None:
    with pytest.raises(RecipeError, match=r"env.MODE: got .* write \$\{NAME\} with letters, digits"):
        load_recipe(recipe, [f"trainer.env.MODE='{text}'"])


def test_by_reference_a_secret_reaches_the_command_and_no_file(recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    plan = make_plan(load_recipe(recipe))
    before = os.umask(0)
    try:
        assert run_to_end(plan, tmp_path / "runs").exit_code == 0
    finally:
        os.umask(before)
    experiment_dir = tmp_path / "runs" / "foreign"
    rows = read_json_lines(experiment_dir / "baseline" / "seed-0" / "metrics.jsonl")
    assert rows[0]["reward"] == len(TOKEN) + len(f"https://me:{TOKEN}@host/0")
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        assert TOKEN.encode() not in path.read_bytes(), path
    assert "${HF_TOKEN}" in (experiment_dir / "experiment.json").read_text()
    for path in (tmp_path / "runs").rglob("*"):
        theirs = path.name in ("log.csv", ".gitignore")
        mode = stat.S_IMODE(path.stat().st_mode)
        assert theirs or mode == (0o755 if path.is_dir() else 0o600), path
    assert (tmp_path / "runs" / ".gitignore").read_text() == "*\n"


def test_what_a_command_prints_of_its_secrets_is_not_repeated(abrun, recipe, tmp_path, monkeypatch) -> None:
    """Its last words become a message of ours, which launch files, events and reports would repeat."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("DB_PASSWORD", "correct-horse")
    script = (
        "import os, sys; raise ValueError('refused ' + os.environ['DB_PASSWORD'] + os.environ['HF_TOKEN'] "
        "+ ' longer' * 100_000)"
    )
    overrides = [f"trainer.parameters.script={script}", "trainer.env.DB_PASSWORD=${DB_PASSWORD}"]
    code, said = abrun("launch", str(recipe), *(word for each in overrides for word in ("--set", each)))
    assert code == 1 and "refused ${DB_PASSWORD}${HF_TOKEN} longer" in said
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    for text in (said.encode(), *(path.read_bytes() for path in files if path.suffix != ".png")):
        assert TOKEN.encode() not in text and b"correct-horse" not in text


CANARY = "Canary horse/staple+9"
QUOTING = """
import csv, json, os, sys, time, urllib.parse
secret, log = os.environ["DB_PASS"], sys.argv[1]
with open(log, "w") as file:
    json.dump({"step": 1, f"reward/{secret}": 1.0, "reward": 1.0, f"text/{secret}": secret}, file)
    file.write("\\n" + json.dumps({"step": 2, f"reward/{secret}": 2.0, "reward": 1.0}) + "\\n")
for character in f"connecting as {secret}":
    print(character, end="", flush=True)
print(urllib.parse.quote(secret, safe=""), repr(secret), file=sys.stderr)
if os.environ["ABRUN_ARM"] == "treatment":
    time.sleep(2.5)
    print("x" * 1990 + secret, file=sys.stderr)
    sys.exit(f"cannot log in with {secret}")
"""


def test_a_value_given_by_reference_is_masked_wherever_it_is_stored_or_shown(
    abrun, recipe, tmp_path, monkeypatch
) -> None:
    """Its name says nothing; the trainer quotes it in metrics, on both streams, and in its last line."""
    (tmp_path / "quoting.py").write_text(QUOTING)
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setenv("HF_TOKEN", "x")
    monkeypatch.setenv("PLACE", CANARY)
    path = f"{logs}/{{arm}}-{{seed}}-{{rerun}}.jsonl"
    code, said = abrun(
        *("launch", str(recipe), "--set", "trainer.env.DB_PASS=${PLACE}", "--set", "trainer.parameters={}"),
        *("--set", f"trainer.argv=['{{python}}', '{tmp_path}/quoting.py', '{path}']"),
        *("--set", f"trainer.metrics={{format: jsonl, path: '{path}'}}", "--set", "limits.retries=0"),
    )
    monkeypatch.delenv("PLACE")
    assert code == 1
    for command in ("status", "compare"):
        said += abrun(command, "runs/foreign")[1]
    said += abrun("logs", "runs/foreign/treatment/seed-0")[1]
    assert "reward/${PLACE}" in (tmp_path / "runs/foreign/baseline/seed-0/metrics.jsonl").read_text()
    log = (tmp_path / "runs/foreign/treatment/seed-0/stdout.log").read_text()
    assert "connecting as ${PLACE}" in log
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file() and path.suffix != ".png"]
    assert any("report" in path.parts for path in files)
    for text in (said, *(path.read_bytes().decode(errors="replace") for path in files)):
        for form in (CANARY, urllib.parse.quote(CANARY, safe=""), urllib.parse.quote(CANARY), "staple"):
            assert form not in text


LOG = "'{run_dir}/log.csv'"


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.env.HTTPS_PROXY=u:correct-horse@proxy:3128",),
        ("trainer.parameters={hub_token: correct-horse}", f"trainer.argv=[train, '{{hub_token}}', {LOG}]"),
        ("trainer.parameters={}", f"trainer.argv=[train, --hub_token, correct-horse, {LOG}]"),
        ("trainer.parameters={}", f"trainer.argv=[sh, -c, 'HF_TOKEN=correct-horse train', {LOG}]"),
        ("launcher={type: slurm, sbatch: {api-key: correct-horse}}",),
    ],
)
def test_no_key_option_or_line_of_shell_is_taken_for_a_secret_s(recipe, overrides) -> None:
    assert "correct-horse" in load_recipe(recipe, overrides).model_dump_json()


def test_a_run_started_by_hand_without_its_variable_says_so(recipe, tmp_path, monkeypatch, snapshot) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    directory = tmp_path / "baseline" / "seed-0"
    write_run_record(
        directory, "by-hand", RunName(arm=BASELINE, seed=0), load_recipe(recipe).run_config(BASELINE)
    )
    monkeypatch.delenv("HF_TOKEN")
    assert external_run.run(directory) == external_run.FAILED
    message = read_state(RunDir(directory), RunName(arm=BASELINE, seed=0)).message
    assert message
    snapshot(message)


def test_resume_asks_for_the_variables_of_unfinished_runs_alone(recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    plan = make_plan(load_recipe(recipe))
    assert run_to_end(plan, tmp_path).exit_code == 0
    monkeypatch.delenv("HF_TOKEN")
    assert run_to_end(plan, tmp_path, resume=True).exit_code == 0
    (tmp_path / "foreign" / "treatment" / "seed-0" / "result.json").unlink()
    with pytest.raises(LaunchError, match=r"arms.treatment: trainer.env.HF_TOKEN"):
        run_to_end(plan, tmp_path, resume=True)


# --- the checkout ---


# A case of a shell script that stands in for git: the settings that it was given
CONFIGURATION = r"*--show-scope*) printf 'command\0core.hookspath\n/dev/null\0';;"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "somebody")
        monkeypatch.setenv(f"{name}_EMAIL", "somebody@example.org")
    (folder / "code.py").write_text("lr = 1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True)
    return folder


def test_a_hash_and_names_of_the_changes_are_recorded_and_with_record_diff_the_changes(
    checkout, tmp_path, monkeypatch, trainer_installed
) -> None:
    monkeypatch.setitem(LOCAL_LAUNCHERS, *FAKE)
    (checkout / "code.py").write_text(f"lr = 2\nTOKEN = '{TOKEN}'\nDB_PASSWORD = 'correct-horse'\n")
    small = Path(__file__).parents[1] / "launch" / "small.yaml"
    runs_dir = tmp_path / "runs"
    (checkout / "new.py").write_text("DB_PASSWORD = 'correct-horse'\n")
    for name, overrides in (("with", ["record_diff=true"]), ("without", [])):
        plan = make_plan(load_recipe(small, overrides))
        run_to_end(plan, runs_dir, launcher="fake", name=name)
    recorded = RunDir(runs_dir / "with" / "baseline" / "seed-0").git()
    assert recorded and recorded["dirty"] and len(recorded["sha"]) == 40
    (diff,) = (runs_dir / "with").glob("git-*.diff")
    assert recorded["diff"] == diff.name and stat.S_IMODE(diff.stat().st_mode) == 0o600
    assert "+lr = 2" in diff.read_text() and diff.name == f"git-{recorded['changes']}.diff"
    assert list(recorded["files"]) == ["code.py", "new.py"]
    assert "lr = 2" not in (runs_dir / "with" / "baseline" / "seed-0" / "launch.json").read_text()
    assert not list((runs_dir / "without").glob("git-*"))
    bare = RunDir(runs_dir / "without" / "baseline" / "seed-0").git()
    assert bare == {**recorded, "diff": None}
    for path in runs_dir.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
        assert not path.is_file() or path == diff or b"correct-horse" not in path.read_bytes()


def test_a_huge_diff_is_cut_and_git_ended(checkout, tmp_path, monkeypatch) -> None:
    """A git that never stops printing stands in for a diff of any size."""
    endless = tmp_path / "bin" / "git"
    endless.parent.mkdir()
    endless.write_text(
        f'#!/bin/sh\ncase "$*" in {CONFIGURATION} *rev-parse*) echo 0123;; *status*) echo " M code.py";; '
        f'*) echo $$ > {tmp_path}/pid; exec yes "+a line {TOKEN}";; esac\n'
    )
    endless.chmod(0o755)
    monkeypatch.setenv("PATH", f"{endless.parent}:{os.environ['PATH']}")
    state = git.record_checkout(tmp_path, diff=True)
    assert state and state["sha"] == "0123"
    text = (tmp_path / state["diff"]).read_text()
    assert len(text) < 2 * git.MAX_DIFF_BYTES and text.endswith("bytes of it]\n") and "hf_" not in text
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_git_that_hangs_is_not_waited_for(checkout, tmp_path, monkeypatch) -> None:
    hanging = tmp_path / "bin" / "git"
    hanging.parent.mkdir()
    hanging.write_text(
        f'#!/bin/sh\ncase "$*" in {CONFIGURATION} *rev-parse*) echo 0123;; *) echo x; sleep 3600;; esac\n'
    )
    hanging.chmod(0o755)
    monkeypatch.setenv("PATH", f"{hanging.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(git, "TIMEOUT_S", 1.0)  # in which a shell has printed its line
    state = git.record_checkout(tmp_path, diff=True)
    assert state and state["dirty"]
    assert state["changes"] is None  # of half a diff there is no hash
    hanging.write_text(
        f'#!/bin/sh\ncase "$*" in {CONFIGURATION} *rev-parse*) echo 0123;; *) sleep 3600;; esac\n'
    )
    state = git.record_checkout(tmp_path, diff=True)
    # nobody knows that nothing was changed
    assert state and state["dirty"] is None and state["changes"] is None
