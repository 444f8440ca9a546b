"""Recipes: what is refused, in one line each; inheritance; and a fuzz test over the recipes that ship."""

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from abrun.errors import RecipeError
from abrun.plan import make_plan
from abrun.recipe import (
    dotted,
    invocation,
    load_recipe,
    merge,
    nested,
    parse_primary,
)
from abrun.recipe.reading import Loader
from tests.test_shipped_recipes import RECIPES, each_recipe

SMALL = Path(__file__).parent / "launch" / "small.yaml"
FOREIGN = Path(__file__).parent / "external" / "foreign.yaml"


def refused(path: Path, *overrides: str) -> str:
    """The one line with which a recipe is refused."""
    with pytest.raises(RecipeError) as caught:
        make_plan(load_recipe(path, overrides))
    line = str(caught.value)
    assert line and len(line.splitlines()) == 1 and len(line) < 1000
    return line


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stepz=3", ["stepz", "did you mean 'steps'"]),
        ("arms.treatment.policy.logprob.impl=chunked", ["policy.logprob", "did you mean 'logprobs'"]),
        ("arms.treatment.seeds=[1]", ["arms.treatment.seeds", "unknown key"]),
        ("steps=1e3", ["steps", "1000.0", "integer"]),
        ("steps='3'", ["steps", "'3'", "integer"]),
        ("steps=0", ["steps", "0", "greater than or equal to 1"]),
        ("steps=99999999999999999999", ["steps", "less than"]),
        ("policy.optimizer.learning_rate=.nan", ["policy.optimizer.learning_rate", "nan", "finite"]),
        ("policy.logprobs.impl=triton9", ["policy.logprobs.impl", "triton9", "'chunked'"]),
        ("algorithm={type: sftt}", ["algorithm.type", "sftt", "'grpo'"]),
        (f"algorithm={{type: {'a' * 5000}}}", ["algorithm.type", "aaa...", "'grpo'"]),
        ("task={type: gsm8k}", ["task.path", "missing"]),
        ("task=null", ["task", "None", "a mapping"]),
        ("task={type: arithmetic, operations: [+]}", ["task.operations", "'+'", "'multiply'"]),
        ("task={type: arithmetic, operations: []}", ["task.operations", "at least 1 item"]),
        ("task={type: word_problems, topics: [chess]}", ["task.topics", "'chess'", "'sharing'"]),
        ("task={type: jsonl, path: x, verifier: judge}", ["task.verifier", "'judge'", "module:function"]),
        (
            "task={type: gsm8k, path: x, verifier: a.b:c()}",
            ["task.verifier", "'a.b:c()'", "my_rewards:judge"],
        ),
        ("validation={}", ["validation.every", "missing"]),
        ("validation={every: 2, temperature: -1}", ["validation.temperature", "-1", "or equal to 0"]),
        ("validation={every: 2, path: x}", ["validation.path", "'x'", "'arithmetic'", "path: null"]),
        (
            "validation={every: 2, num_prompts: 7}",
            ["validation.num_prompts", "7", "2 data-parallel ranks", "multiple of 2"],
        ),
        (
            "arms.treatment.validation={every: 2}",
            ["arms.treatment.validation", "all arms are validated alike"],
        ),
        ("algorithm.group_size=1", ["algorithm.group_size", "2 or more"]),
        ("algorithm.loss=ppo", ["algorithm.loss", "'ppo'", "'gspo'"]),
        ("algorithm.clip_low=1.5", ["algorithm.clip_low", "1.5", "less than or equal to 1"]),
        ("algorithm.dual_clip=1.0", ["algorithm.dual_clip", "1.0", "greater than 1"]),
        (
            "algorithm={type: grpo, loss: cispo, dual_clip: 3.0}",
            ["algorithm.dual_clip", "3.0", "'cispo'", "clipped or gspo", "dual_clip: null"],
        ),
        (
            "algorithm={type: grpo, normalize_over: batch, normalize_advantages: false}",
            ["algorithm.normalize_over", "'batch'", "normalize_over: group"],
        ),
        (
            "algorithm={type: grpo, ratio: on_policy, epochs_per_step: 2, minibatches_per_step: 3}",
            ["algorithm.ratio", "'on_policy'", "6 optimizer steps", "ratio: old"],
        ),
        (
            "algorithm={type: grpo, dynamic_sampling: {}, advantage_baseline: batch_mean}",
            ["algorithm.dynamic_sampling", "'batch_mean'", "leave_one_out", "dynamic_sampling: null"],
        ),
        (
            "algorithm.kl_in=reward_to_go",
            ["algorithm.kl_in", "'reward_to_go'", "'group_mean'", "batch_mean or none", "kl_in: reward"],
        ),
        (
            "algorithm={type: grpo, kl_in: reward_to_go, advantage_baseline: leave_one_out, "
            "normalize_advantages: false}",
            ["algorithm.kl_in", "'reward_to_go'", "'leave_one_out'", "batch_mean or none"],
        ),
        (
            "algorithm={type: grpo, kl_in: reward_to_go, advantage_baseline: none}",
            ["algorithm.kl_in", "'reward_to_go'", "normalize_over 'group'", "normalize_over: batch"],
        ),
        ("algorithm.dynamic_sampling={max_tries: 0}", ["algorithm.dynamic_sampling.max_tries", "0"]),
        ("algorithm.minibatches_per_step=3", ["algorithm.prompts_per_step", "16", "multiple of 3"]),
        (
            "algorithm={type: grpo, prompts_per_step: 6, minibatches_per_step: 3, dynamic_sampling: {}, "
            "documents_per_step: 40}",
            ["algorithm.documents_per_step", "40", "groups of 8", "multiple of 24"],
        ),
        ("algorithm.importance_correction={type: tis}", ["algorithm.importance_correction", "'icepop'"]),
        (
            "algorithm.importance_correction={type: icepop, low: 3.0, high: 2.0}",
            ["algorithm.importance_correction.low", "3.0", "above high, 2.0"],
        ),
        (
            "arms.treatment={algorithm.loss: gspo, policy.logprobs: {impl: chunked, one_pass: true}}",
            ["algorithm.loss", "'gspo'", "one_pass", "whole sequence", "one_pass: false"],
        ),
        (
            "arms.treatment={algorithm: {type: dpo}, policy.logprobs: {impl: chunked, one_pass: true}}",
            ["algorithm.type", "'dpo'", "one_pass", "both completions", "one_pass: false"],
        ),
        (
            "arms.treatment={algorithm: {type: dpo}, policy.micro_batch_size: 3}",
            ["policy.micro_batch_size", "3", "'dpo'", "even number"],
        ),
        (
            "arms.treatment={algorithm: {type: dpo}, task: {type: word_problems}}",
            ["task.type", "'word_problems'", "'dpo'", "preferences or arithmetic"],
        ),
        (
            "task={type: preferences, path: x}",
            ["task.type", "'preferences'", "'grpo'", "judge a completion", "jsonl"],
        ),
        ("task={type: completions}", ["task.path", "missing"]),
        ("algorithm={type: dpo, beta: 0}", ["algorithm.beta", "0", "greater than 0"]),
        ("algorithm={type: dpo, logprob_reduction: max}", ["algorithm.logprob_reduction", "'mean'"]),
        (
            "algorithm={type: dpo, batch_size: 7}",
            ["algorithm.batch_size", "7", "2 data-parallel ranks", "of 2"],
        ),
        ("rollout.top_p=0.9", ["rollout.top_p", "0.9", "chunked", "impl: logits"]),
        (
            "arms.treatment={rollout.top_p: 0.9, policy.logprobs: {impl: triton, one_pass: true}}",
            ["rollout.top_p", "0.9", "'triton'", "top_p: 1.0", "impl: logits with one_pass: false"],
        ),
        (
            "arms.baseline.policy.logprobs.chunk_size=32",
            ["policy.logprobs.chunk_size", "32", "'logits'", "chunked or triton", "chunk_size: null"],
        ),
        (
            "arms.baseline.policy.logprobs.memory_budget_mib=64",
            ["policy.logprobs.memory_budget_mib", "64", "'logits'", "memory_budget_mib: null"],
        ),
        (
            "arms.baseline.policy.logprobs.one_pass=true",
            ["policy.logprobs.one_pass", "true", "'logits'", "one pass already", "one_pass: false"],
        ),
        (
            "arms.treatment.policy.logprobs={one_pass: true, chunk_size: 32}",
            ["policy.logprobs.chunk_size", "32", "one_pass", "memory_budget_mib", "chunk_size: null"],
        ),
        ("policy.logprobs.memory_budget_mib=0", ["policy.logprobs.memory_budget_mib", "0", "or equal to 1"]),
        ("policy.logprobs.memory_budget_mib=0.5", ["policy.logprobs.memory_budget_mib", "0.5", "integer"]),
        ("policy.logprobs.one_pass=1", ["policy.logprobs.one_pass", "1", "boolean"]),
        (
            "arms.treatment.policy.logprobs.impl=logits",
            ["arms.treatment", "baseline's", "at least one value"],
        ),
        ("arms={../up: {steps: 3}}", ["arms", "'../up'", "letters"]),
        ("arms={other: null}", ["arms.other", "None", "a mapping"]),
        ("seeds=[0]", ["seeds", "one seed with an equivalence margin"]),
        ("seeds=[1, 1]", ["seeds", "twice"]),
        ("seeds=[]", ["seeds", "at least 1 item"]),
        ("model.path=x", ["model", "both", "exactly one"]),
        ("cluster={cpu_ranks: 3}", ["algorithm.prompts_per_step", "16", "multiple of 3"]),
        ("cluster={gpus_per_node: 2, cpu_ranks: 2}", ["cluster.cpu_ranks", "drop one"]),
        ("policy.backend={type: fsdp}", ["policy.backend.type", "'fsdp'", "'megatron'"]),
        ("policy.backend=megatron", ["policy.backend", "'megatron'", "a mapping"]),
        (
            "policy.backend.pipeline_parallel=2",
            ["policy.backend.pipeline_parallel", "unknown key", "tensor_parallel"],
        ),
        (
            "policy.backend.context_parallel=3",
            ["context_parallel 3 = 3 ranks a replica", "2 ranks", "divides 2"],
        ),
        (
            "policy.backend={type: megatron, sequence_parallel: true}",
            ["policy.backend.sequence_parallel", "true", "tensor_parallel 1", "2 or more"],
        ),
        (
            "policy.backend={type: megatron, tensor_parallel: 2, expert_parallel: 2}",
            ["policy.backend.sequence_parallel", "false", "expert_parallel 2", "sequence_parallel: true"],
        ),
        (
            "policy.backend={type: megatron, expert_parallel: 4}",
            ["policy.backend.expert_parallel", "4", "2 ranks", "divisor of 2"],
        ),
        ("rollout.engine=sglang", ["rollout.engine", "'sglang'", "'vllm'"]),
        ("rollout.tensor_parallel=2", ["rollout.tensor_parallel", "2", "'torch'", "engine: vllm"]),
        (
            "rollout.gpu_memory_utilization=0.5",
            ["rollout.gpu_memory_utilization", "0.5", "'torch'", "gpu_memory_utilization: null"],
        ),
        (
            "rollout={engine: vllm, tensor_parallel: 4}",
            ["rollout.tensor_parallel", "4", "2 ranks a node", "divisor of 2"],
        ),
        (
            "compare.primary=[{metric: a, margin: 0.1, window: last week}]",
            ["window", "last week", "last 20%"],
        ),
        ("compare.primary=[{metric: a, margin: 0.1, window: steps 9-2}]", ["ends before it begins"]),
        ("name=a/b", ["name", "'a/b'", "letters"]),
        ("controls.aa_reruns=1000000000", ["controls.aa_reruns", "1000"]),
    ],
)
def test_each_rule_is_one_line_that_says_field_value_and_what_is_allowed(
    override: str, words: list[str]
) -> None:
    ranks = (
        ["cluster.cpu_ranks=2"] if any(word.startswith("2 ") and "ranks" in word for word in words) else []
    )
    line = refused(SMALL, override, *ranks)
    assert all(word in line for word in words), line


def test_batches_are_shared_by_the_replicas_and_not_by_the_ranks() -> None:
    """16 ranks; what counts is how many of them hold another part of the batch."""
    sixteen = ["cluster={nodes: 2, gpus_per_node: 8}", "validation={every: 1, num_prompts: 4}"]
    assert "4 for 16 data-parallel ranks" in refused(SMALL, *sixteen)
    for backend, data_parallel in (
        ("{tensor_parallel: 2, context_parallel: 2}", 4),
        ("{type: megatron, tensor_parallel: 4, pipeline_parallel: 4}", 1),
        ("{type: megatron, tensor_parallel: 2, pipeline_parallel: 2, context_parallel: 2}", 2),
    ):
        recipe = load_recipe(SMALL, [*sixteen, f"policy.backend={backend}"])
        assert recipe.data_parallel == recipe.run_config("treatment").data_parallel == data_parallel
    experts = "{type: megatron, tensor_parallel: 2, expert_parallel: 8, sequence_parallel: true}"
    assert "4 for 8 data-parallel ranks" in refused(SMALL, *sixteen, f"policy.backend={experts}")


def test_a_tensor_parallel_group_stays_inside_a_node() -> None:
    line = refused(SMALL, "cluster={nodes: 2, gpus_per_node: 4}", "policy.backend.tensor_parallel=8")
    assert "policy.backend.tensor_parallel: got 8 for 4 ranks a node" in line and "divisor of 4" in line


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_the_fused_paths_take_all_that_fits_them(impl: str) -> None:
    for setting, values in (("chunk_size: 32", (None, 32)), ("one_pass: true", (False, True))):
        override = f"arms.treatment.policy.logprobs={{impl: {impl}, memory_budget_mib: 64, {setting}}}"
        assert make_plan(load_recipe(SMALL, [override])).treatment_diff["treatment"] == {
            "policy.logprobs.impl": ("logits", impl),
            "policy.logprobs.memory_budget_mib": (None, 64),
            f"policy.logprobs.{setting.split(':')[0]}": values,
        }


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.argz=[x]", ["trainer.argz", "did you mean 'argv'"]),
        ("trainer.type=comand", ["trainer.type", "'comand'", "'abrun', 'command'"]),
        ("trainer={type: [1]}", ["trainer.type", "[1]", "'abrun', 'command'"]),
        ("trainer=3", ["trainer", "3", "a mapping"]),
        ("policy={dtype: float32}", ["policy", "unknown key", "trainer"]),
        ("arms.treatment.policy.dtype=bfloat16", ["arms.treatment.policy", "unknown key", "trainer"]),
        ("arms.treatment.trainer.type=comand", ["arms.treatment", "trainer.type", "'comand'"]),
        ("arms.other.trainer={type: abrun}", ["arms.other", "algorithm", "missing"]),
        ("trainer.argv=[]", ["trainer.argv", "at least 1 item"]),
        ("trainer.argv=[a, 3]", ["trainer.argv.1", "3", "string"]),
        (
            "trainer.argv=['{python}', '{sed}']",
            ["trainer.argv.1", "{sed}", "{seed}", "{learning_rate}", "{{"],
        ),
        ("trainer.argv=['{seed!r}']", ["trainer.argv.0", "{seed!r}", "{seed}"]),
        ("trainer.argv=['{seed:>3}']", ["trainer.argv.0", "{seed:>3}"]),
        ("trainer.argv=['{}']", ["trainer.argv.0", "{}", "literal braces"]),
        ("trainer.argv=['{seed.real}']", ["trainer.argv.0", "{seed.real}"]),
        ("trainer.argv=['a}']", ["trainer.argv.0", "'a}'", "single brace", "}}"]),
        ('trainer.argv=["a\\0b"]', ["trainer.argv.0", "NUL"]),
        ("trainer.env.A='{nope}'", ["trainer.env.A", "{nope}", "{run_dir}"]),
        ("trainer.env={'a b': c}", ["trainer.env", "'a b'", "letters"]),
        ("trainer.env.ABRUN_SEED='3'", ["trainer.env", "ABRUN_SEED", "launcher sets itself"]),
        ("trainer.env.CUDA_VISIBLE_DEVICES='0'", ["trainer.env", "CUDA_VISIBLE_DEVICES", "cluster:"]),
        ("arms.treatment.trainer.parameters.lr=3", ["arms.treatment", "parameters.lr", "not used", "{lr}"]),
        ("trainer.parameters.seed=3", ["trainer.parameters", "'seed'", "none of seed"]),
        ("trainer.parameters.a-b=3", ["trainer.parameters", "'a-b'", "letters"]),
        (
            "trainer.parameters.learning_rate=[1]",
            ["trainer.parameters.learning_rate", "[1]", "a finite number"],
        ),
        ("trainer.parameters.learning_rate=.nan", ["trainer.parameters.learning_rate", "nan", "finite"]),
        ("trainer.parameters.learning_rate=null", ["trainer.parameters.learning_rate", "None", "text"]),
        ("trainer.metrics.format=excel", ["trainer.metrics.format", "'excel'", "'tensorboard'"]),
        ("trainer.metrics.path=/tmp/m.jsonl", ["trainer.metrics.path", "/tmp/m.jsonl", "{run_dir}/"]),
        (
            "trainer.metrics.path='{run_dir}/metrics.jsonl'",
            ["trainer.metrics.path", "metrics.jsonl", "abrun's"],
        ),
        ("trainer.metrics.path='{run_dir}'", ["trainer.metrics.path", "{run_dir}/"]),
        ("trainer.aliases=tlr", ["trainer.aliases", "'tlr'", "'trl'", "a mapping"]),
        ("trainer.aliases={a: 3}", ["trainer.aliases", "{'a': 3", "'trl'"]),
        ("steps=0", ["steps", "0", "greater than or equal to 1"]),
    ],
)
def test_each_rule_of_command_arms_is_one_line(override: str, words: list[str]) -> None:
    line = refused(FOREIGN, override)
    assert all(word in line for word in words), line


def test_templates_are_filled_in_with_the_run_and_its_parameters() -> None:
    recipe = load_recipe(
        FOREIGN,
        [
            "trainer={argv: [a, '{experiment}/{arm}-{seed}-{rerun}', '{steps}', 'x={{{learning_rate}}}', "
            "'{flag}'], env: {OUT: '{run_dir}/out'}, metrics: {format: csv, path: '{run_dir}/{name}.csv'}, "
            "parameters: {flag: true, name: log, learning_rate: 1e-6}}",
            *(
                f"trainer.env.{name.upper()}='{{{name}}}'"
                for name in ("script", "behaviour", "step_s", "format")
            ),
            "trainer.env.LABEL='{label}'",
        ],
    )
    filled = invocation(
        recipe.run_config("treatment"), experiment="e", arm="treatment", seed=3, rerun=0, run_dir="/runs/x"
    )
    assert filled.argv == ["a", "e/treatment-3-0", "5", "x={0.1}", "true"]
    assert filled.env["OUT"] == "/runs/x/out" and filled.metrics_path == "/runs/x/log.csv"


def test_an_arm_of_another_trainer_keeps_only_what_every_run_has() -> None:
    command = "{trainer: {metrics: {path: '{run_dir}/m', format: csv}, argv: [x], type: command}}"
    recipe = load_recipe(SMALL, [f"arms.other={command}", "cluster.cpu_ranks=2"])
    config = recipe.run_config("other")
    assert config.model_dump().keys() == {"steps", "cluster", "trainer"}
    assert (config.steps, config.cluster.cpu_ranks, config.trainer.argv) == (3, 2, ["x"])
    ours = "algorithm: {type: grpo}, model: {preset: qwen2-tiny}, task: {type: arithmetic}"
    config = load_recipe(FOREIGN, [f"arms.other={{trainer: {{type: abrun}}, {ours}}}"]).run_config("other")
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
        "ratio: on_policy, importance_correction: {type: sequence_mask, low: 0.99, high: 1.01}",
    ],
)
def test_the_family_of_grpo_plans(algorithm: str) -> None:
    recipe = load_recipe(SMALL, [f"algorithm={{type: grpo, prompts_per_step: 16, {algorithm}}}"])
    assert make_plan(recipe).runs


def test_arms_need_a_baseline_and_a_treatment(tmp_path: Path) -> None:
    tree = yaml.load(SMALL.read_text(), Loader)
    path = tmp_path / "arms.yaml"
    for arms in ({}, {"baseline": {}}, {"treatment": {"steps": 3}, "other": {"steps": 4}}):
        path.write_text(yaml.safe_dump(tree | {"arms": arms}))
        assert "an experiment needs an arm named 'baseline'" in refused(path)
    del tree["task"]["type"]
    path.write_text(yaml.safe_dump(tree))
    assert "task.type: missing" in refused(path)


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=3", ".a=3", "a\nb=3", "steps=[", "steps=*x"])
def test_an_override_that_cannot_be_read_is_refused(override: str) -> None:
    assert "--set" in refused(SMALL, override)


def test_absurdly_deep_and_recursive_input_is_refused(tmp_path: Path) -> None:
    assert "too deeply" in refused(SMALL, f"arms.treatment.{'a.' * 5000}b=3")
    path = tmp_path / "recipe.yaml"
    path.write_text("[" * 5000)
    assert f"{path}: not readable as YAML" in refused(path)
    for text in ("a: &a [1]\nb: *a\n", "a: &a {b: *a}\n"):
        path.write_text(text)
        assert "aliases (*name) are not supported" in refused(path)


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "no such recipe" in refused(tmp_path / "nowhere.yaml")
    assert "cannot be read" in refused(tmp_path)
    assert "cannot be read" in refused(SMALL / "below-a-file.yaml")
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    assert "cannot be read" in refused(tmp_path / "binary.yaml")


def test_overrides_reach_nested_values_and_arms() -> None:
    recipe = load_recipe(SMALL, ["policy.optimizer.learning_rate=1e-4", "arms.treatment.steps=7"])
    assert recipe.run_config("baseline").policy.optimizer.learning_rate == 1e-4
    assert recipe.run_config("baseline").steps == 3
    assert recipe.run_config("treatment").steps == 7
    assert recipe.run_config("treatment").policy.logprobs.impl == "chunked"


def test_a_change_of_type_replaces_the_whole_section() -> None:
    base = {"task": {"type": "arithmetic", "digits": 2}, "steps": 3}
    assert merge(base, {"task": {"type": "gsm8k", "path": "x"}})["task"] == {"type": "gsm8k", "path": "x"}
    assert merge(base, {"task": {"digits": 1}})["task"] == {"type": "arithmetic", "digits": 1}
    assert base == {"task": {"type": "arithmetic", "digits": 2}, "steps": 3}


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

    def test_a_path(self, tmp_path: Path, base: str) -> None:
        path = self.write(tmp_path, base=base, child="defaults: base.yaml\nname: child\nsteps: 5\n")
        recipe = load_recipe(path)
        assert (recipe.name, recipe.steps, recipe.algorithm.type) == ("child", 5, "grpo")

    def test_in_a_list_the_later_wins_and_the_file_itself_last(self, tmp_path: Path, base: str) -> None:
        files = {"one": "steps: 11\nseeds: [7, 8]\n", "two": "steps: 12\ncheckpoint: {every: 3}\n"}
        child = "defaults: [base.yaml, one.yaml, two.yaml]\ncheckpoint: {keep: 9}\n"
        recipe = load_recipe(self.write(tmp_path, base=base, child=child, **files))
        assert (recipe.steps, recipe.seeds) == (12, [7, 8])
        assert (recipe.checkpoint.every, recipe.checkpoint.keep) == (3, 9)

    def test_relative_to_the_file_that_says_it(self, tmp_path: Path, base: str) -> None:
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "middle.yaml").write_text("defaults: ../base.yaml\nsteps: 4\n")
        assert load_recipe(self.write(tmp_path, base=base, child="defaults: deep/middle.yaml\n")).steps == 4

    def test_the_same_base_twice_is_no_cycle(self, tmp_path: Path, base: str) -> None:
        files = {"one": "defaults: base.yaml\n", "two": "defaults: base.yaml\nsteps: 6\n"}
        assert load_recipe(
            self.write(tmp_path, base=base, child="defaults: [one.yaml, two.yaml]", **files)
        ).steps

    def test_cycles_are_refused(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, child="defaults: other.yaml", other="defaults: child.yaml")
        assert "cycle" in refused(path) and "child.yaml > other.yaml > child.yaml" in refused(path)
        assert "cycle" in refused(self.write(tmp_path, child="defaults: child.yaml"))

    @pytest.mark.parametrize("value", ["3", "{a: b}", "[1]", '"a\\nb"'])
    def test_what_is_no_path_is_refused(self, tmp_path: Path, value: str) -> None:
        assert "a path or a list of paths" in refused(self.write(tmp_path, child=f"defaults: {value}"))

    def test_a_missing_base_names_both_files(self, tmp_path: Path) -> None:
        line = refused(self.write(tmp_path, child="defaults: gone.yaml"))
        assert "child.yaml" in line and "gone.yaml" in line


def test_yaml_reads_as_people_write_it(tmp_path: Path) -> None:
    assert load_recipe(SMALL, ["policy.optimizer.eps=1e-6"]).policy.optimizer.eps == 1e-6
    path = tmp_path / "twice.yaml"
    path.write_text("steps: 1\nsteps: 2\n")
    assert "'steps' is given twice" in refused(path) and "line 1" in refused(path)


def test_primaries_of_the_command_line() -> None:
    claim = parse_primary("timing/train/total_step_time_s:steps 10-50:0.1")
    assert (claim.metric, claim.window, claim.margin) == (
        "timing/train/total_step_time_s",
        "steps 10-50",
        0.1,
    )
    for bad in ("", "a", "a:all", "a:all:b", ":all:1", "a:all:-1", "a:never:1", "a:all:nan", "a:all:1:2"):
        with pytest.raises(RecipeError, match="--primary") as caught:
            parse_primary(bad)
        assert len(str(caught.value).splitlines()) == 1


# --- fuzz: a mutated recipe either plans or is refused in one line ---

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 10**40, 0.0, -0.5, 1e308, float("inf"), float("nan"), "", "x", "1e-6",
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


def corrupt(text: str, draw: random.Random) -> bytes:
    """Bytes flipped, dropped, doubled, or a line repeated elsewhere (which also gives a key twice)."""
    content = bytearray(text.encode())
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(content))
        match draw.randrange(5):
            case 0:
                content[at] = draw.randrange(256)
            case 1:
                content[at] = ord(draw.choice("{}[]:,&*!|>%@`'\"#-? \t\n0"))
            case 2:
                del content[at : at + draw.randint(1, 20)]
            case 3:
                content[at:at] = content[at : at + draw.randint(1, 200)]
            case 4:
                lines = bytes(content).split(b"\n")
                lines.insert(draw.randrange(len(lines)), draw.choice(lines))
                content = bytearray(b"\n".join(lines))
        if not content:
            break
    return bytes(content)


@each_recipe
def test_fuzz(path: Path, tmp_path: Path) -> None:
    draw = random.Random(f"abrun {path.stem}")
    text = path.read_text()
    tree = yaml.load(text, Loader)  # as abrun reads it: 1e-3 is a number
    shutil.copytree(path.parent, tmp_path / "recipes")  # with what its `defaults:` name
    target = tmp_path / "recipes" / path.name
    outcomes = {"planned": 0, "refused": 0}
    rounds = max(60, 900 // len(RECIPES))
    for round_ in range(rounds):
        if round_ % 2:
            mutated = mutate(tree, draw)
            for _ in range(draw.choice([0, 0, 0, 1, 2])):
                mutated = mutate(mutated, draw) if isinstance(mutated, dict) else mutated
            content = yaml.safe_dump(mutated, allow_unicode=True).encode()
        else:
            content = corrupt(text, draw)
        target.write_bytes(content)
        try:
            make_plan(load_recipe(target))
            outcomes["planned"] += 1
        except RecipeError as error:
            line = str(error)
            assert line and len(line.splitlines()) == 1 and line.isprintable() and len(line) < 1500, line
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"round {round_}: {type(error).__name__} for {content!r}") from error
    assert outcomes["planned"] > rounds / 50 and outcomes["refused"] > rounds / 3, outcomes


@pytest.mark.parametrize("margin", ["-1", "0", ".nan", ".inf", "true", "null", "2 sigmas", "0 sigma", "[1]"])
def test_a_margin_that_is_none_is_one_line(margin: str) -> None:
    line = refused(SMALL, f"compare.primary=[{{metric: x, margin: {margin}}}]")
    assert "compare.primary.0.margin: got " in line and "allowed: a number above 0, or such as" in line
    assert "more)" not in line
