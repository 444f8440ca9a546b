"""Manifests for engines that are not here: what is written, that a typo is found, and what a node does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from abrun import cli
from abrun.errors import LaunchError, RecipeError
from abrun.experiment.plan import make_plan
from abrun.launch.export import jobset, run_node
from abrun.launch.export.command import export_plan
from abrun.launch.export.manifest import RECIPE_VARIABLE, ExportedPlan, dns_label, parse_recipe
from abrun.reasons import Code
from abrun.recipe.experiment import load_recipe
from abrun.recipe.launcher import resolve_launcher_settings
from abrun.runs.experiment import planned_runs, read_run_state
from abrun.runs.rundir import RunDir
from tests.launch.test_local import SMALL
from tests.snapshot import Snapshot

JOBSET = "launcher={type: jobset, image: 'reg/abrun:1', claim: rl}"
SKYPILOT = "launcher={type: skypilot, image: 'reg/abrun:1', volume: rl, accelerator: H100}"
WHOLE_JOBSET = (
    "launcher={type: jobset, image: x, claim: c, namespace: team, queue: gpus, secrets: [wandb], "
    "node_selector: {zone: a}, memory: 64Gi, setup: [module load cuda]}"
)
WHOLE_SKYPILOT = (
    "launcher={type: skypilot, image: x, volume: rl, accelerator: H100, secrets: [TOKEN], "
    "resources: {infra: k8s, use_spot: true, memory: 64+}}"
)
TWO_NODES = "cluster={nodes: 2, gpus_per_node: 8}"


@pytest.fixture(autouse=True)
def _no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def exported(folder: Path, engine: str, *settings: str, name: str = "small") -> dict[str, Any]:
    export_plan(make_plan(load_recipe(SMALL, settings)), engine, folder, name)
    return {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}


def jobs_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return {job["name"]: job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]}


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["template"]["spec"]["containers"]
    return container


def test_a_pair_is_a_jobset_whose_arms_have_pods_that_know_their_first_one(tmp_path: Path) -> None:
    found = exported(tmp_path / "out", "jobset", JOBSET, TWO_NODES, "warm_start={steps: 3}")
    assert sorted(found) == ["compare", "pair-seed-0", "pair-seed-1", "warm-start-0"]
    pair = found["pair-seed-0"]
    assert pair["metadata"] == {"name": "small-pair-seed-0"}
    assert pair["spec"]["network"]["subdomain"] == "small-pair-seed-0"
    assert list(jobs_of(pair)) == ["baseline", "treatment"]
    for arm, job in jobs_of(pair).items():
        assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
        container = container_of(job)
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        first = f"small-pair-seed-0-{arm}-0-0.small-pair-seed-0:29400"
        run = f"/runs/small {arm}/seed-0"
        assert container["command"][2] == (
            f'exec python -P -m abrun.launch.export.run_node {run} "$JOB_COMPLETION_INDEX" "{first}" 110\n'
        )
        volumes = {volume["name"]: volume for volume in job["template"]["spec"]["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "rl"}
        assert {"name": "runs", "mountPath": "/runs"} in container["volumeMounts"]
        (recipe,) = container["env"]
        assert parse_recipe(recipe["value"]) == load_recipe(
            SMALL, [JOBSET, TWO_NODES, "warm_start={steps: 3}"]
        )
    (warm,) = jobs_of(found["warm-start-0"]).values()
    assert " warm-start/" in container_of(warm)["command"][2]
    assert found["compare"]["spec"]["failurePolicy"]["maxRestarts"] == 0


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Expand as Kubernetes does, byte by byte: third_party/forked/golang/expansion/expand.go."""
    content, result, at = text.encode(), bytearray(), 0
    while at < len(content):
        following = content[at + 1 : at + 2]
        closer = content.find(b")", at + 2)
        if content[at : at + 1] != b"$" or not following:
            result += content[at : at + 1]
            at += 1
        elif following == b"$":
            result += b"$"
            at += 2
        elif following == b"(" and closer >= 0:
            name = content[at + 2 : closer].decode(errors="replace")
            result += variables.get(name, f"$({name})").encode()
            at = closer + 1
        else:  # Go's string(byte) is the character of that number
            result += b"$" + chr(following[0]).encode()
            at += 2
    return result.decode(errors="replace")


@given(
    st.text(st.sampled_from('$$$$(()){} aNAME\n"é\u2028😀')) | st.text(),
    st.dictionaries(st.text("aNAME"), st.text(), max_size=3) | st.just({"": "x", "A": "$(a)"}),
)
def test_kubernetes_expands_an_escaped_text_to_itself(text: str, variables: dict[str, str]) -> None:
    assert expanded(jobset.escape(text), variables) == text


def test_dollars_of_a_recipe_arrive_in_a_pod(tmp_path: Path) -> None:
    setup = ["echo $$ $HOME $(hostname) $$$$(id) $é > /tmp/pid", "cost=5$"]
    argv = ["sh", "-c", "kill -0 $$ && echo $(date) $$$$(id) {label} $"]
    content = {
        "name": "dollars",
        "launcher": {"type": "jobset", "image": "x", "claim": "y", "setup": setup},
        "trainer": {
            "type": "command",
            "argv": argv,
            "env": {"MARK": "$$(NAME)$"},
            "parameters": {"label": "a"},
            "metrics": {"format": "jsonl", "path": "{run_dir}/out.jsonl"},
        },
        "steps": 3,
        "arms": {"baseline": {}, "treatment": {"trainer.parameters.label": "$$b"}},
        "seeds": [0],
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    plan = make_plan(load_recipe(tmp_path / "r.yaml"))
    export_plan(plan, "jobset", tmp_path / "k", "dollars")
    document = yaml.safe_load((tmp_path / "k" / "pair-seed-0.yaml").read_text())
    variables = {"NAME": "wrong", "hostname": "wrong", "id": "wrong", "date": "wrong"}
    for job in jobs_of(document).values():
        container = container_of(job)
        script = expanded(container["command"][2], variables)
        assert script.splitlines()[:2] == setup and '"$JOB_COMPLETION_INDEX"' in script
        assert parse_recipe(expanded(container["env"][0]["value"], variables)) == plan.recipe
    export_plan(plan, "skypilot", tmp_path / "s", "dollars")  # which expands nothing
    document = yaml.safe_load((tmp_path / "s" / "run-baseline-seed-0.yaml").read_text())
    assert parse_recipe(document["envs"][RECIPE_VARIABLE]) == plan.recipe


def test_what_is_written_is_said_to_be_never_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["abrun", "launch", str(SMALL), "--export", "jobset", "--set", JOBSET])
    for expected in (0, 2):  # the second time it is in the way
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == expected
    said, wrong = capsys.readouterr()
    assert "never launched" in said
    assert "small-jobset: already exists" in wrong and wrong.count("\n") == 1
    files = list((tmp_path / "small-jobset").iterdir())
    assert len(files) == 4 and all("never launched" in file.read_text() for file in files)


@pytest.mark.parametrize(
    "section",
    [
        "{type: jobset, image: r, claim: c, setup: ['curl https://me:hunter2hunter2@host']}",
        "{type: skypilot, setup: ['export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567']}",
        "{type: slurm, setup: ['curl https://me:hunter2hunter2@host']}",
        "{type: ray, env: {WANDB_API_KEY: 0123456789abcdef0123456789abcdef01234567}}",
    ],
)
def test_no_secret_gets_into_what_is_handed_over(section: str, tmp_path: Path, snapshot: Snapshot) -> None:
    kind, _, fields = section.removeprefix("{type: ").partition(", ")
    profile = tmp_path / "config" / "abrun" / "launchers.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(f"{kind}: {{{fields}")
    with pytest.raises(RecipeError) as refused:
        load_recipe(SMALL, [f"launcher={section}"])
    assert refused.value.code is Code.SECRET_IN_RECIPE
    snapshot(refused.value)
    assert "hunter2" not in str(refused.value) and "0123456789abcdef" not in str(refused.value)
    with pytest.raises(RecipeError) as refusal:
        resolve_launcher_settings(None, kind)
    assert refusal.value.code is Code.SECRET_IN_RECIPE
    snapshot(refusal.value)


def test_the_script_submits_in_order(tmp_path: Path) -> None:
    """Against commands that note what they are asked; kubectl knows a state the second time."""
    (tmp_path / "bin").mkdir()
    seen = tmp_path / "seen"
    for command in ("kubectl", "sky", "sleep"):
        file = tmp_path / "bin" / command
        file.write_text(
            f'#!/bin/sh\necho "{command} $*" >> {seen}\n'
            f'[ "$1" = get ] && [ $(grep -c "$*" {seen}) -gt 1 ] && echo Failed || true\n'
        )
        file.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    exported(tmp_path / "k", "jobset", JOBSET, "warm_start={steps: 3}", "controls.aa_reruns=1")
    subprocess.run(["sh", tmp_path / "k" / "submit.sh"], env={"PATH": path}, check=True, timeout=30)
    applied = [line.split()[-1] for line in seen.read_text().splitlines() if "apply" in line]
    assert applied[0] == "warm-start-0.yaml" and applied[-1] == "compare.yaml" and len(applied) == 5
    waits = [line for line in seen.read_text().splitlines() if " get " in line]
    assert len(waits) == 10  # each of five, twice
    seen.unlink()
    exported(tmp_path / "s", "skypilot", SKYPILOT, "warm_start={steps: 3}")
    subprocess.run(["sh", tmp_path / "s" / "submit.sh"], env={"PATH": path}, check=True, timeout=30)
    launched = [line.split()[-1] for line in seen.read_text().splitlines()]
    assert launched[0] == "warm-start-0.yaml" and launched[-1] == "compare.yaml" and len(launched) == 6


def test_skypilot_gets_a_task_a_run(tmp_path: Path) -> None:
    secret = "launcher.secrets=[WANDB_API_KEY]"
    found = exported(tmp_path / "out", "skypilot", SKYPILOT, TWO_NODES, secret)
    assert len(found) == 5
    task = found["run-treatment-seed-1"]
    assert task["num_nodes"] == 2 and task["volumes"] == {"/runs": "rl"}
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["image_id"] == "docker:reg/abrun:1"
    assert task["secrets"] == {"WANDB_API_KEY": None}
    nodes = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}
    script = task["run"].replace("exec python", "echo python")
    said = subprocess.run(["sh", "-c", script], env=nodes, capture_output=True, text=True, check=True)
    assert said.stdout.endswith("run_node /runs/small treatment/seed-1 1 10.0.0.7:29400 110\n")


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("jobset", [JOBSET]),
        ("jobset", [WHOLE_JOBSET, TWO_NODES, "warm_start={steps: 3}", "controls.aa_reruns=1"]),
        ("skypilot", [SKYPILOT]),
        ("skypilot", [WHOLE_SKYPILOT, TWO_NODES, "warm_start={steps: 3}"]),
    ],
)
def test_manifests_keep_the_schema_of_their_engine(engine: str, settings: list[str], tmp_path: Path) -> None:
    validator = Draft202012Validator(schema_of(engine))
    for manifest in exported(tmp_path / "out", engine, *settings).values():
        assert list(validator.iter_errors(manifest)) == []
        wrong = {**manifest, "spek": {}}
        assert "'spek' was unexpected" in str(best_match(validator.iter_errors(wrong)))


def schema_of(engine: str) -> Any:
    """The engine's own schema, closed: a server drops keys that it does not know, and so a typo."""
    schema = json.loads(Path(__file__).with_name(f"{engine}.schema.json").read_text())
    if engine == "jobset":  # a CRD leaves open what any kind of object has
        label = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
        labels = {"type": "object", "additionalProperties": {"type": "string"}}
        properties = {"name": label, "namespace": label, "labels": labels}
        schema["properties"]["metadata"] = {"type": "object", "required": ["name"], "properties": properties}
        schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
        schema["properties"]["apiVersion"] = {"const": "jobset.x-k8s.io/v1alpha2"}
    return closed(schema)


def closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    return ({"additionalProperties": False} if named else {}) | {
        key: closed(part) for key, part in schema.items()
    }


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("nomad", []),
        ("jobset", []),
        ("jobset", ["launcher={type: jobset, image: x}"]),
        ("jobset", ["launcher={type: jobset, image: x, claim: y, runs_dir: here}"]),
        ("jobset", ["launcher={type: jobset, imagee: x}"]),
        ("jobset", ["launcher={type: jobset, image: x, claim: y, memory: lots}"]),
        ("jobset", ["launcher={type: jobset, image: x, claim: y, namespace: A_b}"]),
        ("jobset", ["launcher={type: jobset, image: a b}"]),
        ("jobset", ["launcher={type: jobset, claim: A_b}"]),
        ("jobset", ["launcher={type: jobset, queue: Q_}"]),
        ("jobset", ["launcher={type: jobset, secrets: [a b]}"]),
        ("jobset", ["launcher={type: jobset, gpu: a/b/c}"]),
        ("jobset", ["launcher={type: jobset, node_selector: {a: b c}}"]),
        ("jobset", ["launcher={type: jobset, node_selector: {a b: c}}"]),
        ("skypilot", ["launcher={type: skypilot, accelerator: 'H100:8'}"]),
        ("skypilot", [TWO_NODES]),
        ("skypilot", ["launcher={type: skypilot, resources: {cpus: 3}}"]),
        ("skypilot", ["launcher={type: skypilot, secrets: [a b]}"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path, engine: str, settings: list[str], snapshot: Snapshot
) -> None:
    with pytest.raises((LaunchError, RecipeError)) as refused:
        exported(tmp_path / "out", engine, *settings)
    snapshot(refused.value)
    assert not (tmp_path / "out").exists()


def test_what_an_export_tells_to_do_can_be_done(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as refused:
        exported(tmp_path / "out", "jobset")
    assert "dry-run" not in str(refused.value)  # which it has not
    plan = make_plan(load_recipe(SMALL, [JOBSET]))
    assert export_plan(plan, "jobset", tmp_path / "a b", "small").endswith(f"sh '{tmp_path}/a b/submit.sh'")


def test_a_launch_is_refused_what_can_only_be_exported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["--set", JOBSET], ["--launcher", "jobset"]):
        monkeypatch.setattr(sys, "argv", ["abrun", "launch", str(SMALL), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2 and list(tmp_path.iterdir()) == []
        assert "abrun launch RECIPE --export jobset" in capsys.readouterr().err


def test_names_are_labels_of_dns_and_stay_apart() -> None:
    names = ["A_b.c", "a-b-c", "a_b.c", "0", "x" * 70, "x" * 71, "-", "µ"]
    labels = [dns_label(name, 16) for name in names]
    assert len(set(labels)) == len(names) and all(len(label) <= 16 for label in labels)
    assert all(label[0].isalpha() and label[-1].isalnum() and label.isascii() for label in labels)


def test_pods_have_names_that_the_webhook_takes(tmp_path: Path) -> None:
    arm = "an-arm-with-a-name-that-is-much-too-long"
    changes = [
        JOBSET,
        f"arms={{baseline: {{}}, {arm}: {{policy.logprobs.impl: chunked}}}}",
        "seeds=[2147483647]",
    ]
    found = exported(tmp_path / "out", "jobset", *changes, "compare.claims=[]", name="n" * 100)
    for manifest in found.values():
        for name, job in jobs_of(manifest).items():
            assert len(f"{manifest['metadata']['name']}-{name}-0-{job['completions'] - 1}-abcde") <= 63


# --- what a node does ---


@pytest.fixture
def node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Does what a node of a run does, but for becoming the agent: its exit code, stdout, stderr."""

    def node(name: str, *settings: str) -> tuple[int, str, str]:
        recipe = ExportedPlan(
            plan=make_plan(load_recipe(SMALL, settings)), name="small", settings=None
        ).recipe
        monkeypatch.setenv(RECIPE_VARIABLE, recipe)
        arguments = ["member", str(tmp_path / "runs" / "small"), name, "0", "127.0.0.1:1", "5"]
        monkeypatch.setattr(sys, "argv", arguments)
        code = run_node.main()
        output, errors = capsys.readouterr()
        return code, output, errors

    return node


def test_a_node_that_lacks_something_says_so_in_the_run(tmp_path: Path, node: Any) -> None:
    code, _, errors = node("baseline/seed-1", "cluster.gpus_per_node=8")
    assert code == 2 and "cluster.gpus_per_node: got 8" in errors
    experiment = tmp_path / "runs" / "small"
    assert len(planned_runs(experiment)) == 4
    state = read_run_state(experiment, planned_runs(experiment)[2])
    assert state.status == "failed" and state.message and state.message in errors


def test_a_run_waits_for_no_warm_start_that_nobody_makes(node: Any) -> None:
    code, _, errors = node("baseline/seed-0", "warm_start={steps: 3}")
    assert code == 2 and "warm start first" in errors


def test_a_run_of_another_recipe_is_refused(node: Any) -> None:
    node("baseline/seed-0", "cluster.gpus_per_node=8")
    code, _, errors = node("baseline/seed-0", "cluster.gpus_per_node=8", "steps=4")
    assert code == 2 and "steps is 3 there and 4 in the recipe" in errors
    code, _, errors = node("other/seed-0")
    assert code == 2 and "other/seed-0: not a run" in errors


def test_a_finished_run_ends_at_once(tmp_path: Path, node: Any) -> None:
    node("baseline/seed-0", "cluster.gpus_per_node=8")
    run = RunDir(tmp_path / "runs" / "small" / "baseline" / "seed-0")
    run.begin_attempt().finish(3, {})
    code, output, _ = node("baseline/seed-0", "cluster.gpus_per_node=8")
    assert code == 0 and output.endswith("baseline/seed-0: finished before\n")


def test_nodes_that_begin_at_once_make_one_directory(tmp_path: Path) -> None:
    plan = make_plan(load_recipe(SMALL))
    code = (
        "import sys; from pathlib import Path\n"
        "from abrun.launch.export import run_node; from abrun.experiment.plan import make_plan\n"
        "from abrun.recipe.experiment import load_recipe\n"
        "run_node._make_experiment(make_plan(load_recipe(Path(sys.argv[1]))), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(SMALL), str(tmp_path / "runs" / "small")]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in started:
        assert process.wait(60) == 0, process.communicate()[1]
    assert planned_runs(tmp_path / "runs" / "small") == [run.name for run in plan.runs]


def test_a_recipe_that_does_not_read_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["member", "/nowhere", "baseline/seed-0", "0", "127.0.0.1:1", "5"])
    for text in ("", "[]", "{", json.dumps({"name": "x"})):
        monkeypatch.setenv(RECIPE_VARIABLE, text)
        assert run_node.main() == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ABRUN_RECIPE") and said.count("\n") == 1
