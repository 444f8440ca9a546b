"""Recipes: what is refused, in one line each; inheritance."""

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from abrun.errors import RecipeError
from abrun.experiment.plan import make_plan
from abrun.recipe import reading
from abrun.recipe.claims import parse_claim
from abrun.recipe.command import CommandRunConfig, build_invocation
from abrun.recipe.experiment import ExperimentDeclaration, Recipe, load_recipe, parse_stored_recipe
from abrun.recipe.policy import Policy
from abrun.recipe.reading import Loader, dotted, nested
from abrun.recipe.run import OwnRunConfig
from abrun.runs.layout import RUN_FILES
from tests.fuzzing import rounds
from tests.snapshot import Snapshot

SMALL = Path(__file__).parents[1] / "launch" / "small.yaml"
FOREIGN = Path(__file__).parents[1] / "external" / "foreign.yaml"


def own(path: Path, *overrides: str) -> Recipe:
    """A recipe of our own trainer."""
    recipe = load_recipe(path, overrides)
    assert isinstance(recipe, Recipe)
    return recipe


def own_run(recipe: ExperimentDeclaration, arm: str) -> OwnRunConfig:
    config = recipe.run_config(arm)
    assert isinstance(config, OwnRunConfig)
    return config


def command_run(recipe: ExperimentDeclaration, arm: str) -> CommandRunConfig:
    config = recipe.run_config(arm)
    assert isinstance(config, CommandRunConfig)
    return config


def refused(path: Path, *overrides: str) -> str:
    """The one line with which a recipe is refused."""
    with pytest.raises(RecipeError) as caught:
        make_plan(load_recipe(path, overrides))
    line = str(caught.value)
    assert line and len(line.splitlines()) == 1 and len(line) < 1000
    return line


TWO_RANKS = "cluster.cpu_ranks=2"
SIXTEEN = "cluster={nodes: 2, gpus_per_node: 8}"  # ranks
EXPERTS = "model.preset=qwen3-moe-tiny"
# Overrides, one or several, that are refused: of abrun's trainer, of another, and what is no override
REFUSED: dict[str, list[Any]] = json.loads(Path(__file__).with_name("refused.json").read_text())
LONG = [
    f"algorithm={{type: {'a' * 5000}}}",
    f"compare.claims=[{{metric: a, above: 1{'0' * 400}}}]",
]


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("compare.primary=[]", "claims"),
        ("compare.primary.0.margin=0.1", "claims"),
        ("compare.looks=[2, 4]", "interim"),
        ("compare.looks_spending=rising", "alpha_spending"),
        ("planted_fault=no_old_logprobs", "injected_fault"),
    ],
)
def test_an_old_spelling_is_refused_with_the_new_name(override, name):
    with pytest.raises(RecipeError, match=f": was renamed; use {name}$"):
        load_recipe(SMALL, [override])


@pytest.mark.parametrize(
    "override",
    [*REFUSED["own"], *LONG],
    ids=lambda given: (given if isinstance(given, str) else "; ".join(given))[:160],
)
def test_each_rule_is_one_line_that_says_field_value_and_what_is_allowed(
    override: str | tuple[str, ...], snapshot: Snapshot
) -> None:
    snapshot(refused(SMALL, *([override] if isinstance(override, str) else override)))


def test_a_misspelt_key_is_named_before_the_key_that_it_leaves_missing(tmp_path: Path) -> None:
    recipe = yaml.safe_load(SMALL.read_text())
    recipe["step"] = recipe.pop("steps")
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(recipe))
    assert refused(path).endswith(": step: unknown key; did you mean 'steps'? (and 1 more: steps)")


def test_batches_are_shared_by_the_replicas_and_not_by_the_ranks() -> None:
    for backend, data_parallel in (
        ("{tensor_parallel: 2, context_parallel: 2}", 4),
        ("{type: megatron, tensor_parallel: 4, pipeline_parallel: 4}", 1),
        ("{type: megatron, tensor_parallel: 2, pipeline_parallel: 2, context_parallel: 2}", 2),
    ):
        recipe = own(SMALL, SIXTEEN, f"policy.backend={backend}")
        assert recipe.data_parallel == own_run(recipe, "treatment").data_parallel == data_parallel
    fits = "policy.backend={tensor_parallel: 2, context_parallel: 2, expert_parallel: 4}"
    assert own(SMALL, "cluster={gpus_per_node: 8}", EXPERTS, fits).policy.backend.expert_parallel == 4


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_the_fused_paths_take_all_that_fits_them(impl: str) -> None:
    for setting, values in (("chunk_size: 32", (None, 32)), ("one_pass: true", (False, True))):
        override = f"arms.treatment.policy.logprobs={{impl: {impl}, {setting}}}"
        assert make_plan(load_recipe(SMALL, [override])).treatment_diff["treatment"] == {
            "policy.logprobs.impl": ("logits", impl),
            f"policy.logprobs.{setting.split(':')[0]}": values,
        }


@pytest.mark.parametrize("override", REFUSED["foreign"])
def test_each_rule_of_command_arms_is_one_line(override: str, snapshot: Snapshot) -> None:
    snapshot(refused(FOREIGN, override))


@pytest.mark.parametrize("path", ["{{run_dir}}/{}", "{{run_dir}}//x/.././{}/below", "{{run_dir}}/{{label}}"])
def test_a_command_s_metrics_are_none_of_abrun_s_files(path: str, snapshot: Snapshot) -> None:
    for name in RUN_FILES:
        overrides = [
            f"trainer.metrics.path='{path.format(name)}'",
            f"trainer.parameters.label={name.upper()}",
        ]
        line = refused(FOREIGN, *overrides)
    snapshot(line)


def test_a_command_s_metrics_may_lie_elsewhere_where_every_run_has_its_own(snapshot: Snapshot) -> None:
    run = {"experiment": "e", "seed": 3, "rerun": 1, "run_dir": "/runs/x"}
    for template, path in (
        ("/scratch/{arm}/{seed}-{rerun}//a/../log", "/scratch/treatment/3-1/log"),
        ("/scratch/{run_dir}/log", "/scratch/runs/x/log"),
        ("{run_dir}/a/..//./log", "/runs/x/log"),
    ):
        recipe = load_recipe(FOREIGN, [f"trainer.metrics.path='{template}'"])
        filled = build_invocation(command_run(recipe, "treatment"), arm="treatment", **run)
        assert filled.metrics_path == path
    recipe = load_recipe(FOREIGN, ["trainer.metrics.path='/runs/{arm}/{seed}{rerun}/../result.json'"])
    with snapshot.refused(RecipeError):
        build_invocation(command_run(recipe, "treatment"), arm="x", **run)


@pytest.mark.parametrize(
    "line",
    [
        "(echo >{run_dir}/result.json)",
        "echo >{run_dir}/result.json&&true",
        'echo > "{run_dir}"/result.json',
        "echo > $ABRUN_RUN_DIR/result.json",
        "echo > ${{ABRUN_RUN_DIR}}/logs/../result.json",
        "cp x {run_dir}/../seed-1/result.json",
    ],
)
def test_a_line_of_shell_names_no_file_of_abrun(line: str, snapshot: Snapshot) -> None:
    snapshot(refused(FOREIGN, f"trainer.env.LINE='{line}'"))
    load_recipe(FOREIGN, ["trainer.env.LINE='" + line.replace("result", "results") + "'"])


def test_an_arm_named_like_a_file_of_abrun_does_not_write_it(snapshot: Snapshot) -> None:
    recipe = load_recipe(FOREIGN, ["trainer.metrics.path='{run_dir}/{arm}'", "trainer.parameters.format=csv"])
    run = {"experiment": "e", "seed": 0, "rerun": 0, "run_dir": "/runs/x"}
    assert (
        build_invocation(command_run(recipe, "baseline"), arm="baseline", **run).metrics_path
        == "/runs/x/baseline"
    )
    with snapshot.refused(RecipeError):
        build_invocation(command_run(recipe, "baseline"), arm="result.json", **run)
    command = command_run(load_recipe(FOREIGN, ["trainer.env.OUT='{run_dir}/{arm}.json'"]), "baseline")
    assert build_invocation(command, arm="a", **run).env["OUT"] == "/runs/x/a.json"
    with snapshot.refused(RecipeError):
        build_invocation(command, arm="result", **run)


def test_templates_are_filled_in_with_the_run_and_its_parameters() -> None:
    recipe = load_recipe(
        FOREIGN,
        [
            "trainer={type: command, argv: [a, '{experiment}/{arm}-{seed}-{rerun}', '{steps}', "
            "'x={{{learning_rate}}}', '{flag}'], env: {OUT: '{run_dir}/out'}, "
            "metrics: {format: csv, path: '{run_dir}/{name}.csv'}, "
            "parameters: {flag: true, name: log, learning_rate: 1e-6}}",
        ],
    )
    filled = build_invocation(
        command_run(recipe, "treatment"), experiment="e", arm="treatment", seed=3, rerun=0, run_dir="/runs/x"
    )
    assert filled.argv == ["a", "e/treatment-3-0", "5", "x={0.1}", "true"]
    assert filled.env["OUT"] == "/runs/x/out" and filled.metrics_path == "/runs/x/log.csv"


def test_an_arm_of_another_trainer_keeps_only_what_every_run_has() -> None:
    command = "{trainer: {metrics: {path: '{run_dir}/m', format: csv}, argv: [x], type: command}}"
    recipe = load_recipe(SMALL, [f"arms.other={command}", "cluster.cpu_ranks=2"])
    config = command_run(recipe, "other")
    assert config.model_dump().keys() == {"steps", "cluster", "limits", "trainer"}
    assert (config.steps, config.cluster.cpu_ranks, config.trainer.argv) == (3, 2, ["x"])
    ours = "algorithm: {type: grpo}, model: {preset: qwen2-tiny}, task: {type: arithmetic}"
    config = own_run(load_recipe(FOREIGN, [f"arms.other={{trainer: {{type: abrun}}, {ours}}}"]), "other")
    assert (config.steps, config.trainer.type, config.algorithm.type) == (5, "abrun", "grpo")


@pytest.mark.parametrize(
    "algorithm",
    [
        "loss: gspo, loss_reduction: sequence_mean, dual_clip: 3.0",
        "group_size: 1, advantage_baseline: batch_mean, normalize_over: batch, kl_in: reward",
        "group_size: 1, advantage_baseline: batch_mean, normalize_over: batch, kl_in: reward_to_go",
        "advantage_baseline: none, normalize_advantages: false, kl_in: reward_to_go",
        "loss: reinforce, advantage_baseline: leave_one_out, normalize_advantages: false, metrics: none",
        "loss: cispo, clip_low: 1.0, clip_high: 4.0, epochs_per_step: 2, minibatches_per_step: 4",
        "clip_high: 0.28, dynamic_sampling: {max_tries: 3}, documents_per_step: 64, metrics: full",
        "advantage_baseline: leave_one_out, normalize_over: leave_one_out, group_size: 3, metrics: full",
        "kl_estimator: k3+, kl_coefficient: 0.1, overlong_punishment: {buffer: 4}",
        "kl_estimator: k1, loss: gspo, metrics: full",
        "ratio: on_policy, importance_correction: {type: sequence_mask, low: 0.99, high: 1.01}",
    ],
)
def test_the_family_of_grpo_plans(algorithm: str) -> None:
    recipe = load_recipe(SMALL, [f"algorithm={{type: grpo, prompts_per_step: 16, {algorithm}}}"])
    assert make_plan(recipe).runs


def test_arms_need_a_baseline_and_a_treatment(tmp_path: Path, snapshot: Snapshot) -> None:
    tree = yaml.load(SMALL.read_text(), Loader)
    path = tmp_path / "arms.yaml"
    for arms in ({}, {"baseline": {}}, {"treatment": {"steps": 3}, "other": {"steps": 4}}, {"candidate": {}}):
        path.write_text(yaml.safe_dump(tree | {"arms": arms}))
        snapshot(refused(path))
    alone = load_recipe(path, ["compare={reference: runs.json}"])
    assert alone.baseline == "candidate" and load_recipe(SMALL).baseline == "baseline"
    assert {run.name.arm for run in make_plan(alone).runs} == {"candidate"}
    one_of_two = "arms={candidate: {}, other: {steps: 4}}"
    snapshot(refused(path, "compare={reference: runs.json}", one_of_two))
    del tree["task"]["type"]
    path.write_text(yaml.safe_dump(tree))
    snapshot(refused(path))


@pytest.mark.parametrize(
    "override", [*REFUSED["unreadable"], f"{'a' * 5000}=[", f"steps={'9' * 5000}", "steps=\udcff"]
)
def test_an_override_that_cannot_be_read_is_refused(override: str, snapshot: Snapshot) -> None:
    snapshot(refused(SMALL, override))


def test_a_number_in_a_key_reaches_into_a_list() -> None:
    recipe = load_recipe(SMALL, ["compare.claims.0.sigma=0.1", "seeds.1=7"])
    (claim,) = recipe.compare.claims
    assert (claim.metric, claim.margin, claim.sigma) == ("train/reward", 0.05, 0.1)
    assert recipe.seeds == [0, 7]
    # In a mapping it is a key like any other
    assert load_recipe(SMALL, ["arms.0.steps=9"]).run_config("0").steps == 9


def test_what_is_set_replaces_what_was_there() -> None:
    assert load_recipe(SMALL, ["arms={baseline: {}, other: {steps: 4}}"]).arms == {
        "baseline": {},
        "other": {"steps": 4},
    }
    recipe = own(SMALL, "policy.optimizer.weight_decay=0.3", "policy.optimizer={eps: 1e-6}")
    fresh = type(recipe.policy.optimizer)()
    assert recipe.policy.optimizer == fresh.model_copy(update={"eps": 1e-6})
    changes = ["arms.treatment.policy.logprobs={impl: triton, chunk_size: 4}"]
    changes += ["arms.treatment.policy.logprobs={impl: chunked}"]
    assert load_recipe(SMALL, changes).arms["treatment"] == {"policy.logprobs.impl": "chunked"}
    # Of another type, what only the old one has is gone where it is its default
    changes = ["policy.backend={type: megatron, expert_parallel: 1}", "policy.backend.type=dtensor"]
    assert own(SMALL, *changes).policy == own(SMALL).policy


def test_absurdly_deep_and_recursive_input_is_refused(tmp_path: Path, snapshot: Snapshot) -> None:
    snapshot(refused(SMALL, f"arms.treatment.{'a.' * 5000}b=3"))
    path = tmp_path / "recipe.yaml"
    path.write_text("[" * 5000)
    snapshot(refused(path))
    for text in ("a: &a [1]\nb: *a\n", "a: &a {b: *a}\n"):
        path.write_text(text)
        snapshot(refused(path))


def test_missing_and_unreadable_files_are_refused(tmp_path: Path, snapshot: Snapshot) -> None:
    snapshot(refused(tmp_path / "nowhere.yaml"))
    (tmp_path / "child.yaml").write_text("defaults: quickstart")
    snapshot(refused(tmp_path / "child.yaml"))
    snapshot(refused(tmp_path))
    snapshot(refused(SMALL / "below-a-file.yaml"))
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    snapshot(refused(tmp_path / "binary.yaml"))
    (tmp_path / "empty.yaml").touch()
    snapshot(refused(tmp_path / "empty.yaml"))
    (tmp_path / "named.yaml").write_text("name: named\n")
    snapshot(refused(tmp_path / "named.yaml"))
    (tmp_path / "named.yaml").write_text("".join(f"{'x' * 30}{number}: 1\n" for number in range(9)))
    snapshot(refused(tmp_path / "named.yaml"))


def test_only_regular_files_are_read(tmp_path: Path, snapshot: Snapshot) -> None:
    """A pipe that nobody writes to would be waited for, and a device never ends."""
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / "recipe.yaml"
    for odd in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path)):
        path.write_text(f"defaults: {odd}\n")
        snapshot(refused(path))
    snapshot(refused(tmp_path / "pipe"))


def test_a_recipe_of_any_size_is_read_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("a: [" + "1," * 3_000_000 + "1]\n")
    snapshot(refused(path))
    arms = ", ".join(f"a{number}: {{steps: 9}}" for number in range(1001))
    snapshot(refused(SMALL, f"arms={{baseline: {{}}, {arms}}}"))
    copies: list[Any] = []
    monkeypatch.setattr(reading, "dict", lambda one: copies.append(one) or dict(one), raising=False)
    flat = {"a": {"c": 0}} | {f"a.b{number}": number for number in range(100)}
    assert len(nested(flat)["a"]) == 101 and copies == [{"c": 0}]  # a branch once, not for each of its names


def test_numbers_of_thousands_of_digits_are_one_line(snapshot: Snapshot) -> None:
    snapshot(refused(SMALL, f"steps=0x{'f' * 6000}"))
    assert own(SMALL, "steps=0x1F").steps == 31


class TestAnotherType:
    """A section that gets another type keeps what both types have; the rest is refused by name."""

    ways = pytest.mark.parametrize("way", ["arm", "set", "file"])

    def changed(self, tmp_path: Path, way: str, section: str, base: str, **change: Any) -> Any:
        """Return the section of a run to which a change was made in one of the three ways."""
        more = {"validation": None, "warm_start": None, "cluster": {"cpu_ranks": 4}, "name": "base"}
        tree = (
            yaml.load(SMALL.read_text(), Loader)
            | more
            | {"arms": {"baseline": {}, "treatment": {"steps": 4}}}
        )
        *parents, last = section.split(".")
        owner = tree
        for parent in parents:
            owner = owner.setdefault(parent, {})
        owner[last] = yaml.load(base, Loader)
        tree["compare"] = {}
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(tree))
        if way == "file":
            child = {"defaults": "base.yaml", **nested({f"{section}.{key}": change[key] for key in change})}
            (tmp_path / "child.yaml").write_text(yaml.safe_dump(child))
            config = load_recipe(tmp_path / "child.yaml").run_config("baseline")
        else:
            prefix, arm = ("arms.other.", "other") if way == "arm" else ("", "baseline")
            sets = [f"{prefix}{section}.{key}={json.dumps(value)}" for key, value in change.items()]
            config = load_recipe(tmp_path / "base.yaml", sets).run_config(arm)
        for name in section.split("."):
            config = getattr(config, name)
        return config

    @ways
    @pytest.mark.parametrize(
        ("section", "base", "change", "kept"),
        [
            (
                "policy.backend",
                "{tensor_parallel: 2, sequence_parallel: true, keep_gathered: false}",
                {"type": "megatron", "pipeline_parallel": 2},
                {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2},
            ),
            (
                "policy.backend",
                "{type: megatron, context_parallel: 2, pipeline_parallel: 1}",
                {"type": "dtensor"},
                {"context_parallel": 2},
            ),
            (
                "algorithm",
                "{type: grpo, prompts_per_step: 64, group_size: 4, minibatches_per_step: 2, clip_high: 0.28}",
                {"type": "ppo"},
                {"prompts_per_step": 64, "group_size": 4, "minibatches_per_step": 2, "clip_high": 0.28},
            ),
            ("algorithm", "{type: sft, batch_size: 8}", {"type": "dpo", "beta": 0.2}, {"batch_size": 8}),
            ("algorithm", "{type: grpo, group_size: 4}", {"batch_size": 8, "type": "sft"}, {"batch_size": 8}),
            (
                "task",
                "{type: gsm8k, path: x.jsonl, answer: boxed}",
                {"type": "jsonl", "prompt_field": "question"},
                {"path": "x.jsonl", "answer": "boxed", "prompt_field": "question"},
            ),
            ("task", "{type: arithmetic, max_operand: 3}", {"type": "word_problems"}, {"max_number": 20}),
        ],
    )
    def test_common_keys_stay(
        self, tmp_path: Path, way: str, section: str, base: str, change: dict[str, Any], kept: dict[str, Any]
    ) -> None:
        found = self.changed(tmp_path, way, section, base, **change)
        assert found.type == change["type"]
        assert {key: getattr(found, key) for key in kept} == kept

    @ways
    @pytest.mark.parametrize(
        ("section", "base", "kind", "lost", "only"),
        [
            ("policy.backend", "{keep_gathered: true}", "megatron", "keep_gathered", "dtensor"),
            (
                "policy.backend",
                "{type: megatron, pipeline_parallel: 2, tensor_parallel: 2}",
                "dtensor",
                "pipeline_parallel",
                "megatron",
            ),
            (
                "algorithm",
                "{type: grpo, prompts_per_step: 16, dynamic_sampling: {max_tries: 3}}",
                "ppo",
                "dynamic_sampling",
                "grpo",
            ),
            ("algorithm", "{type: ppo, gae_lambda: 1.0, group_size: 2}", "grpo", "gae_lambda", "ppo"),
            ("algorithm", "{type: dpo, beta: 0.2, batch_size: 8}", "sft", "beta", "dpo"),
        ],
    )
    def test_a_key_of_the_old_type_alone_is_refused_until_null_drops_it(
        self, tmp_path: Path, way: str, section: str, base: str, kind: str, lost: str, only: str
    ) -> None:
        line = rf"{section}\.{lost}: not a key of this type; use type: '{only}', or drop it \(null"
        with pytest.raises(RecipeError, match=line):
            self.changed(tmp_path, way, section, base, type=kind)
        for change in ({"type": kind, lost: None}, {lost: None, "type": kind}):
            assert self.changed(tmp_path, way, section, base, **change).type == kind

    def test_an_arm_keeps_what_the_baseline_resolves_to(self, tmp_path: Path) -> None:
        base = "{type: grpo, prompts_per_step: 16}"
        assert self.changed(tmp_path, "arm", "algorithm", base, type="ppo").group_size == 8
        assert self.changed(tmp_path, "set", "algorithm", base, type="ppo").group_size == 1, "PPO's default"

    def test_one_model_with_several_types_keeps_all(self) -> None:
        base = "algorithm.importance_correction={type: truncated, low: 0.5, high: 2.0}"
        for key in ("algorithm.importance_correction", "arms.treatment.algorithm.importance_correction"):
            recipe = load_recipe(SMALL, [base, f"{key}.type=icepop"])
            config: Any = own_run(recipe, "treatment").algorithm
            assert config.importance_correction.model_dump() == {"type": "icepop", "low": 0.5, "high": 2.0}

    def test_a_launcher_keeps_what_both_have(self, snapshot: Snapshot) -> None:
        launcher = "launcher={type: slurm, cpus_per_rank: 4, interface: ib0}"
        recipe = load_recipe(SMALL, [launcher, "launcher.type=ray"])
        assert recipe.launcher and recipe.launcher.type == "ray"
        assert (recipe.launcher.cpus_per_rank, recipe.launcher.interface) == (4, "ib0")
        snapshot(refused(SMALL, "launcher={type: slurm, account: lab}", "launcher.type=ray"))

    def test_the_plan_names_the_type_and_no_default_of_one_type(self) -> None:
        arm = "arms={baseline: {}, other: {policy.backend.type: megatron}}"
        plan = make_plan(load_recipe(SMALL, [arm]))
        assert plan.treatment_diff == {"other": {"policy.backend.type": ("dtensor", "megatron")}}
        more = ["arms.other.policy.backend.pipeline_parallel=2", TWO_RANKS]
        plan = make_plan(load_recipe(SMALL, [arm, *more]))
        assert plan.treatment_diff["other"]["policy.backend.pipeline_parallel"] == (None, 2)

    def test_what_a_launch_decides_is_no_matter_of_a_type_without_it(self) -> None:
        arm = "arms.treatment.policy.backend.type=megatron"
        recipe = load_recipe(SMALL, ["policy.backend.keep_gathered=auto", arm]).with_auto_values()
        assert own_run(recipe, "treatment").policy.backend.type == "megatron"
        baseline: Any = own_run(recipe, "baseline").policy.backend
        assert baseline.keep_gathered is True


def test_dotted_and_nested_are_inverse() -> None:
    tree = {"a": {"b": {"c": 1, "d": {}}}, "e": [1]}
    assert dotted(tree) == {"a.b.c": 1, "a.b.d": {}, "e": [1]}
    assert nested(dotted(tree)) == tree


class TestDefaults:
    def write(self, folder: Path, **files: str) -> Path:
        for name, text in files.items():
            (folder / f"{name}.yaml").write_text(text)
        return folder / "child.yaml"

    @pytest.fixture
    def base(self) -> str:
        return SMALL.read_text()

    def test_in_a_list_the_later_wins_and_the_file_itself_last(self, tmp_path: Path, base: str) -> None:
        files = {"one": "steps: 11\nseeds: [7, 8]\n", "two": "steps: 12\ncheckpoint: {every: 3}\n"}
        child = "defaults: [base.yaml, one.yaml, two.yaml]\ncheckpoint: {keep: 9}\n"
        recipe = own(self.write(tmp_path, base=base, child=child, **files))
        assert (recipe.steps, recipe.seeds) == (12, [7, 8])
        assert (recipe.checkpoint.every, recipe.checkpoint.keep) == (3, 9)

    def test_each_file_is_read_once_however_many_name_it(self, tmp_path: Path, base: str) -> None:
        layers = {f"l{number}": f"defaults: [l{number + 1}.yaml, l{number + 1}.yaml]" for number in range(40)}
        path = self.write(tmp_path, **layers, l40=base, child="defaults: l0.yaml\nsteps: 7\n")
        assert own(path).steps == 7

    def test_what_a_link_inherits_lies_beside_the_link(self, tmp_path: Path, base: str) -> None:
        for folder, steps in (("one", 3), ("two", 4)):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "near.yaml").write_text(f"steps: {steps}\n")
            (tmp_path / folder / "link.yaml").symlink_to(tmp_path / "link.yaml")
        child = "defaults: [base.yaml, one/link.yaml, two/link.yaml]"
        path = self.write(tmp_path, base=base, link="defaults: near.yaml", child=child)
        assert own(path).steps == 4

    def test_there_are_at_most_so_many(self, tmp_path: Path, snapshot: Snapshot) -> None:
        layers = {f"l{number}": f"defaults: l{number + 1}.yaml" for number in range(100)}
        snapshot(refused(self.write(tmp_path, **layers, child="defaults: l0.yaml")))
        snapshot(refused(self.write(tmp_path, child=f"defaults: [{'a.yaml, ' * 17}]")))

    def test_cycles_are_refused(self, tmp_path: Path, snapshot: Snapshot) -> None:
        path = self.write(tmp_path, child="defaults: other.yaml", other="defaults: child.yaml")
        assert "cycle" in refused(path) and "child.yaml > other.yaml > child.yaml" in refused(path)
        snapshot(refused(self.write(tmp_path, child="defaults: child.yaml")))

    @pytest.mark.parametrize("value", ["3", "{a: b}", "[1]", '"a\\nb"'])
    def test_what_is_no_path_is_refused(self, tmp_path: Path, value: str, snapshot: Snapshot) -> None:
        snapshot(refused(self.write(tmp_path, child=f"defaults: {value}")))

    def test_a_missing_base_names_both_files(self, tmp_path: Path, snapshot: Snapshot) -> None:
        snapshot(refused(self.write(tmp_path, child="defaults: gone.yaml")))


def test_yaml_reads_as_people_write_it(tmp_path: Path, snapshot: Snapshot) -> None:
    assert own(SMALL, "policy.optimizer.eps=1e-6").policy.optimizer.eps == 1e-6
    assert "on" in load_recipe(SMALL, ["arms.on.steps=9"]).arms
    for text in ("010", "1:30", "yes", "2020-01-01"):
        snapshot(refused(SMALL, f"steps={text}"))
    path = tmp_path / "twice.yaml"
    path.write_text("name: a\nsteps: 1\nmodel: {}\nsteps: 2\n")
    snapshot(refused(path))
    snapshot(refused(path))
    path.write_text("name: a\nmodel:\n  preset: a\n  preset: b\n")
    snapshot(refused(path))


def test_claims_of_the_command_line(snapshot: Snapshot) -> None:
    claim = parse_claim("timing/train/total_step_time_s:steps 10-50:0.1")
    assert (claim.metric, claim.window, claim.margin) == (
        "timing/train/total_step_time_s",
        "steps 10-50",
        0.1,
    )
    for bad in ("", "a", "a:all", "a:all:b", ":all:1", "a:all:-1", "a:never:1", "a:all:nan", "a:all:1:2"):
        with pytest.raises(RecipeError) as caught:
            parse_claim(bad)
        snapshot(caught.value)
        assert len(str(caught.value).splitlines()) == 1


RESOLVED = [
    load_recipe(SMALL).model_dump(),
    load_recipe(SMALL, ["algorithm={type: ppo}", "policy.backend={type: megatron}", "wandb={}"]).model_dump(),
    load_recipe(
        SMALL, ["task={type: word_problems}", "validation={every: 1}", "warm_start={steps: 1}"]
    ).model_dump(),
    load_recipe(FOREIGN).model_dump(),
]
PYDANTICS = (
    "Input should",
    "List should",
    "Value error",
    "validation error",
    "valid ",
    "https://",
    "instance",
)


@settings(max_examples=rounds(60), derandomize=True, deadline=None)
@given(data=st.data())
def test_no_refusal_speaks_pydantic(data: st.DataObject) -> None:
    """Any field of a resolved recipe with any value: a line of ours, or none."""
    tree = copy.deepcopy(data.draw(st.sampled_from(RESOLVED)))
    *parents, key = data.draw(st.sampled_from(places(tree)))
    owner: Any = tree
    for parent in parents:
        owner = owner[parent]
    texts = st.text().filter(lambda text: not any(words in text for words in PYDANTICS))  # it would be quoted
    owner[key] = data.draw(st.sampled_from(VALUES) | st.integers() | st.floats() | texts)
    try:
        parse_stored_recipe(tree)
    except RecipeError as error:
        line = str(error)
        assert line.isprintable() and not any(words in line for words in PYDANTICS), line
        assert "another kind of" not in line, line


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("model.path", "a" * 5000),
        ("task.path", f"a/{'b' * 300}"),
        ("compare.reference", "a/" * 2100),
        ("checkpoint.start_from", "ü" * 128),
        ("validation.path", '"a\\0b"'),
        ("model.path", "~nobody-at-all/x"),
    ],
)
def test_a_path_that_no_file_system_takes_is_refused(key: str, path: str, snapshot: Snapshot) -> None:
    sections = {"model.path": "model={path: x}", "task.path": "task={type: jsonl, path: x}"}
    sections["validation.path"] = "validation={every: 1}"
    snapshot(refused(SMALL, *([sections[key]] if key in sections else []), f"{key}={path}"))


# --- recipes, mutated: for the fuzz test, too ---

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 10**40, 10**400,
    0.0, -0.5, 1e308, float("inf"), float("nan"), "", "x", "1e-6",
    "a\nb", "\x00", "ü\u2028", "a" * 5000, [], {}, [None], [[[]]], {"a": {"b": {}}}, {"type": "grpo"},
    {"type": 3}, {"": 1}, {"a.b": 1}, list(range(3000)), ["last 20%"] * 50, {str(i): i for i in range(500)},
    "2020-01-01",
]  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path to a value inside a tree of mappings and lists."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [each for key in keys for each in [(*path, key), *places(tree[key], (*path, key))]]


def mutate(tree: dict[str, Any], draw: random.Random) -> Any:
    tree = copy.deepcopy(tree)
    found = places(tree)
    if not found:
        return draw.choice(VALUES)
    *parents, key = draw.choice(found)
    owner: Any = tree
    for parent in parents:
        owner = owner[parent]
    value = owner[key]
    match draw.randrange(7):
        case 0 | 1:
            owner[key] = copy.deepcopy(draw.choice(VALUES))
        case 2:
            del owner[key]
        case 3 if isinstance(owner, dict):
            del owner[key]
            text = str(key)
            owner[draw.choice([text[:-1], text.upper(), text + "s", f"{text}.{text}", "", "type"])] = value
        case 4:
            owner[key] = draw.choice([[value], {"value": value}, {key: value}, [value] * 40])
        case 5 if isinstance(value, int | float):
            owner[key] = draw.choice([-value, value * 10**9, float(value), str(value), value + 1, value * 2])
        case _:
            other = owner
            for parent in draw.choice(found):
                other = other[parent] if isinstance(other, dict) and parent in other else other
            owner[key] = copy.deepcopy(other) if other is not owner else None
    return tree


@pytest.mark.parametrize(("switch", "means"), [(True, "full"), (False, "none"), ("selective", "selective")])
def test_recomputing_all_or_nothing_may_be_said_as_a_switch(switch: bool | str, means: str) -> None:
    policy = Policy.model_validate({"activation_checkpointing": switch, "compile": True})
    assert policy.activation_checkpointing == means


def test_frozen_runs_and_scripts_may_lie_beside_the_recipe_from_wherever_it_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "the {recipes}", tmp_path / "here"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    metrics = '{format: csv, path: "{run_dir}/m.csv"}'
    trainer = f'{{type: command, argv: ["{{recipe_dir}}/train.sh", "{{seed}}"], metrics: {metrics}}}'
    (there / "a.yaml").write_text(
        f"name: a\ntrainer: {trainer}\nsteps: 3\narms: {{baseline: {{}}}}\nseeds: [0, 1]\n"
        "compare: {reference: runs.json}\n"
    )
    recipe = load_recipe(there / "a.yaml")
    assert recipe.compare.reference == "runs.json"  # it is nowhere: said as it was written
    config = recipe.run_config("baseline")
    names = dict.fromkeys(("experiment", "arm", "rerun", "run_dir"), "/x")
    assert isinstance(config, CommandRunConfig)
    assert config.trainer.argv == ["{recipe_dir}/train.sh", "{seed}"]  # stored and compared as written
    assert build_invocation(config, seed=7, **names).argv == [f"{there}/train.sh", "7"]
    other_trainer = f"arms.other={{trainer: {trainer}}}"
    other = load_recipe(SMALL, [other_trainer]).run_config("other")  # another trainer's arm, by --set
    assert isinstance(other, CommandRunConfig) and other.trainer.recipe_dir == str(SMALL.parent)
    assert "trainer.recipe_dir" not in make_plan(load_recipe(SMALL, [other_trainer])).treatment_diff["other"]
    (there / "runs.json").touch()
    assert load_recipe(there / "a.yaml").compare.reference == str(there / "runs.json")
    (here / "runs.json").touch()
    assert load_recipe(there / "a.yaml").compare.reference == "runs.json"


def test_an_override_that_every_arm_has_its_own_value_for_is_refused(snapshot: Snapshot) -> None:
    arms = "arms={baseline: {policy.logprobs.impl: logits}, treatment: {policy.logprobs.impl: chunked}}"
    for override in ("policy.logprobs.impl=triton", "policy.logprobs={impl: triton}"):
        snapshot(refused(SMALL, arms, override))
    one_arm = "arms={baseline: {}, treatment: {policy.logprobs.impl: chunked}}"
    assert own(SMALL, one_arm, "policy.logprobs.impl=logits").policy.logprobs.impl == "logits"
    both = own(SMALL, arms, "arms.treatment.policy.logprobs.impl=triton")
    assert both.arms["treatment"]["policy.logprobs.impl"] == "triton"
