"""Sentences of checks before a launch: missing requirements of a run, and settings without effect."""

import json
from typing import Any

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.numbers import count_text


def _yaml_text(got: str | bool) -> str:
    return str(got).lower() if isinstance(got, bool) else repr(got)


def _without_package(field: str, got: str | bool, package: str, install: str, instead: str | None) -> str:
    remedy = f"{install}, or use {instead}" if instead else install
    return f"{field}: got {_yaml_text(got)}, but the package {package} is missing; {remedy}"


def _devices(ranks: int, engines: int) -> str:
    return f"{ranks}" + (f" and rollout.devices {engines}" if engines else "")


def _too_few_gpus(ranks: int, engines: int, gpus: int) -> str:
    remedy = f"use at most {gpus}{' in total' if engines else ''}" if gpus else "use a machine with GPUs"
    return (
        f"cluster.gpus_per_node: got {_devices(ranks, engines)}, but this machine has "
        f"{count_text(gpus, 'visible GPU')}; {remedy} (0 trains on CPU cores)"
    )


def _too_few_cores(ranks: int, engines: int, cores: int) -> str:
    return (
        f"cluster.cpu_ranks: got {_devices(ranks, engines)}, but this machine has "
        f"{count_text(cores, 'usable CPU core')}; use at most {cores}{' in total' if engines else ''}"
    )


def _too_many_jobs(jobs: int, gpus_per_run: int, gpus: int, runs_per_gpu: int) -> str:
    shared = f" and {runs_per_gpu} runs to a GPU" * (runs_per_gpu > 1)
    return (
        f"--jobs: got {jobs} runs at once with {count_text(gpus_per_run, 'GPU')} each{shared}, but this "
        f"machine has {gpus}; use at most {gpus * runs_per_gpu // gpus_per_run}"
    )


def _unset_variable(field: str, variable: str, is_placeholder: bool) -> str:
    hint = f" (the placeholder is {{{variable}}}, without $)" if is_placeholder else ""
    return f"{field}: got ${{{variable}}}, but {variable} is not set here; export {variable} first{hint}"


def _clipping(settings: dict[str, Any]) -> str:
    got = ", ".join(f"{name} {json.dumps(value)}" for name, value in settings.items())
    return (
        f"algorithm.{next(iter(settings))}: got {got}, but with one update per step nothing is ever clipped; "
        "use algorithm.minibatches_per_step: 2 or more, or drop it"
    )


UNITS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "intermediate_size": "columns of its MLP",
    "num_hidden_layers": "layers",
    "num_experts": "experts",
    "num_local_experts": "experts",
}


def _sharded_unevenly(field: str, got: int, size: int, dimension: str) -> str:
    return f"{field}: got {got} with a model of {size} {UNITS[dimension]}; use a divisor of {size}"


def _start_after_last_step(folder: str, step: int, steps: int) -> str:
    return (
        f"checkpoint.start_from: got {folder!r} of step {step}, but steps is {steps} and counts from the "
        f"start of that run; use steps: {step + 1} or more"
    )


MESSAGES: dict[Code, Message] = {
    Code.ARMS_CANNOT_RUN: "{arms:plural arm} {arms:list}: {problem}",
    Code.NOT_BUILT: "{field}: got {got!r}, which is not supported yet; allowed: {allowed}",
    Code.ENGINE_DEVICES_NEED_ONE_NODE: "rollout.devices: got {devices} with cluster.nodes {nodes}, which is "
    "not supported yet; use nodes: 1, or devices: null",
    Code.COMMAND_NEEDS_ONE_NODE: "cluster.nodes: got {nodes} with trainer.type 'command', which is not "
    "supported yet; use nodes: 1",
    Code.TOO_FEW_GPUS: _too_few_gpus,
    Code.TOO_FEW_CORES: _too_few_cores,
    Code.TOO_MANY_JOBS: _too_many_jobs,
    Code.VARIABLE_UNSET: _unset_variable,
    Code.VERIFIER_NOT_FOUND: "task.verifier: got {verifier!r}, but module {package} does not exist here; "
    "name an installed module, or one in the directory where abrun is started",
    Code.REASONING_GYM_MISSING: "task.type: got 'reasoning_gym', but the package is missing; pip install "
    "'abrun[reasoning]'",
    # Packages
    Code.PACKAGE_MISSING: "needs {package}: pip install 'abrun[{extra}]'",
    Code.PACKAGE_NOT_INSTALLED: "the package {package} is missing; pip install 'abrun[{extra}]'",
    Code.SETTING_NEEDS_PACKAGE: _without_package,
    Code.PACKAGE_WITHOUT_WHEEL: "{field}: got {got:repr}, but the package {package} has no wheel for Python "
    "{python}; use Python {newest}, or use {instead}",
    Code.PACKAGE_VERSION_UNSUPPORTED: "{field}: got {got:repr} with {package} {version}, but supported are "
    "{supported}; {install}{instead:if , or use {instead}}",
    Code.PACKAGE_OF_PACKAGE_MISSING: "{field}: got {got!r} with {package} {version}, which needs the missing "
    "package {missing}; {install}",
    Code.VLLM_OF_OTHER_DEVICE: "rollout.engine: got 'vllm' with {package} {version}, {on_gpu:if which is "
    "built for CPUs, but cluster.gpus_per_node is above 0|which needs a GPU, but cluster.gpus_per_node is "
    "0}; pip uninstall {package}, then {install}, or use engine: torch",
    Code.VERSION_UNTESTED: "{package} {version}: not tested with abrun; if runs fail: {install}",
    Code.PACKAGE_BROKEN: "{package} cannot be imported: {error}; {unneeded:if pip uninstall {unneeded}, "
    "which abrun does not need|pip install --force-reinstall {package}}",
    Code.IMPORT_TOO_SLOW: "importing {package} took more than {seconds} s; run abrun doctor again when the "
    "machine is idle",
    Code.EXACT_SUPPORT_UNAVAILABLE: "rollout.exact_support: got true {problem}; use engine: torch, or "
    "exact_support: false",
    Code.VLLM_ABSENT: "without vLLM",
    Code.VLLM_WITHOUT_SAMPLING_MASKS: "with {package} {version}, which does not report the tokens it samples "
    "from (vLLM does from {oldest})",
    Code.VLLM_FINDS_NO_TRITON: "with {package} {version}, which finds no Triton for CPUs and so does not "
    "report the tokens it samples from ({package} does from {oldest})",
    Code.TRITON_FOR_CPUS_MISSING: "with {package} {version} but without Triton for CPUs, so vLLM does not "
    "report the tokens it samples from (install triton-cpu)",
    # Devices
    Code.LIGER_NEEDS_GPU: "policy.liger: got true with cluster.gpus_per_node: 0, but its kernels need a GPU; "
    "use false",
    Code.TRITON_NEEDS_GPU: "policy.logprobs.impl: got 'triton' with cluster.gpus_per_node: 0, but on CPU "
    "cores it needs Triton's slow interpreter (TRITON_INTERPRET=1 in the environment); use impl: chunked, or "
    "GPUs",
    Code.NO_GPU: "nvidia-smi lists no GPU; use cluster.gpus_per_node: 0",
    Code.TORCH_WITHOUT_CUDA: "torch {version} is built without CUDA; {install}",
    Code.TORCH_FINDS_NO_GPU: "torch {version}, built for CUDA {cuda}, finds no GPU (is the driver too old?); "
    "see nvidia-smi",
    Code.SBATCH_MISSING: "the command sbatch is not on PATH; run abrun on a login node",
    # Models
    Code.MODEL_FOLDER_DAMAGED: "model.path: got {path!r}, which cannot load: {problem}; give a folder with "
    "config.json, whole safetensors files and a tokenizer",
    Code.MODEL_NOT_ON_HUB: "model.path: got {path!r}, which is not a folder here, and {problem}; give a "
    "checkpoint's folder, or the name of a hub model that is reachable or cached (hf download)",
    Code.HUB_NAME_INVALID: "it is not a valid hub name",
    Code.HUB_MODEL_GATED: "the hub model is gated: request access, then log in (hf auth login)",
    Code.HUB_MODEL_UNKNOWN: "the hub has no such model, or it is private (hf auth login)",
    Code.HUB_STATUS: "the hub answers with status {status}",
    Code.HUB_OFFLINE: "it is not cached, and HF_HUB_OFFLINE is set",
    Code.HUB_UNREACHABLE: "the hub cannot be reached ({error})",
    Code.MODEL_CONFIG_INVALID: "config.json holds a {type}, not a JSON object",
    Code.MODEL_FILE_UNREADABLE: "{file} cannot be read: {error}",
    Code.MODEL_FILE_NOT_JSON: "{file} is not JSON: {error}",
    Code.MODEL_INDEX_INVALID: "{file} has no weight_map of tensors to files",
    Code.MODEL_TENSOR_MISSING: "{file} lacks the tensor {tensor!r} that {index} lists",
    Code.MODEL_FILE_TRUNCATED: "{file} is not a safetensors file, or was truncated: it has {bytes} bytes",
    Code.MODEL_FILE_HEADER_INVALID: "{file} has no valid safetensors header",
    Code.MODEL_FILE_SIZE_WRONG: "{file} has {bytes} bytes, but its header says {expected}",
    Code.MODEL_FAMILY_NOT_TRAINED: "model.path: got {path!r}, {obstacle}; use a causal language model of "
    "another family",
    Code.BACKEND_LACKS_FAMILY: "policy.backend.type: got {backend!r} with a {family} model, which it does "
    "not support; use type: dtensor, or a model of {allowed:list}",
    Code.BACKEND_NEEDS_FULL_ATTENTION: "policy.backend.type: got {backend!r} with a {family} model, "
    "{obstacle}, but it only supports full attention; use type: dtensor",
    Code.STREAM_NEEDS_FULL_ATTENTION: "{setting} with a {family} model, {obstacle}; use {instead}",
    Code.FAMILY_ENCODER_DECODER: "an encoder-decoder model",
    Code.FAMILY_MULTIMODAL: "a multimodal model for which transformers has no causal LM",
    Code.FAMILY_HEAD_BIASED: "an LM head with a bias, which the log-prob kernels do not support",
    Code.FAMILY_ROUTER_SAMPLES: "whose router samples experts in training",
    Code.FAMILY_SHARES_LAYERS: "whose layers share weights, so that they cannot be sharded one by one",
    Code.FAMILY_WITHOUT_CAUSAL_LM: "which transformers has no causal LM for",
    Code.LAYERS_REFUSE_PACKING: "whose layers do not support packed sequences",
    Code.LAYERS_NOT_FULL_ATTENTION: "which has layers of {kinds:list}",
    Code.SOME_LAYERS_PARTIAL: "some of whose layers lack full attention",
    Code.LAYERS_WINDOWED: "whose layers attend to windows of {tokens} tokens",
    Code.FAMILY_WITHOUT_TENSOR_PARALLEL_PLAN: "policy.backend.tensor_parallel: got {got} with a {family} "
    "model, which has no tensor-parallel plan; use 1, or a model of {allowed:list}",
    Code.EXPERTS_STAY_WHOLE: "policy.backend.expert_parallel: got 1 with tensor_parallel {tensor_parallel}, "
    "but experts are not sharded by tensor parallelism; use 2 or more, or tensor_parallel: 1",
    Code.MODEL_HAS_NO_EXPERTS: "policy.backend.expert_parallel: got {got} with a {family} model, which has "
    "no experts; use 1",
    Code.MODEL_CUT_UNEVENLY: _sharded_unevenly,
    Code.EXPERTS_CUT_UNEVENLY: "policy.backend.expert_parallel: got {got} with a model whose layers have "
    "{experts} experts; use a divisor of {experts}",
    Code.WIDTH_CUT_UNEVENLY: "{field}: got {got} with {dimension} {size}; use a divisor of {size}",
    Code.HEADS_CUT_UNEVENLY: "{field}: got {got} with {heads} attention heads and {key_value_heads} "
    "key-value heads; use a divisor of {heads} that divides {key_value_heads} or is a multiple of it",
    # Checkpoints
    Code.START_NOT_A_CHECKPOINT: "checkpoint.start_from: got {folder!r}, which is not a checkpoint "
    "({problem}); give a folder such as runs/EXPERIMENT/ARM/seed-0/checkpoints/step-000050",
    Code.START_DOES_NOT_FIT: "{field}: got {folder!r}: {problem}; give a checkpoint of a run of the same "
    "model",
    Code.START_AFTER_LAST_STEP: _start_after_last_step,
    Code.CHECKPOINT_FILE_UNREADABLE: "{file} cannot be read: {error}",
    Code.CHECKPOINT_FILE_TRUNCATED: "{file} has {bytes} bytes, but {expected} were written",
    # Launchers
    Code.SAVE_TIME_TOO_LONG: "launcher.save_s: got {save_s}, but launcher.time {time!r} is only "
    "{limit_s:.0f} s; lower launcher.save_s, or ask for more time",
    Code.PYXIS_MISSING: "launcher.container: got {image!r}, but Slurm has no pyxis plugin: {problem}",
    Code.ARMS_WITHOUT_EFFECT: "{arms:plural arm} {arms:list}: {problem}",
    Code.COMMANDS_WITHOUT_SEED: "{arms:plural arm} {arms:list}: trainer.argv and trainer.env do not use "
    "{{seed}}, so all seeds run the same command unless it reads ABRUN_SEED",
    Code.LOSS_NEVER_CLIPS: "algorithm.loss: got '{loss}', but with one update per step the importance ratio "
    "is 1 and nothing is ever clipped; use algorithm.minibatches_per_step: 2 or more",
    Code.CLIPPING_WITHOUT_EFFECT: _clipping,
    Code.ARM_EQUALS_BASELINE: "arm {arm}: differs from the baseline only in {keys:list}, but with one update "
    "per step this changes no gradient; use algorithm.minibatches_per_step: 2 or more",
}
