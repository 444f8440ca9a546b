"""vLLM in this process, started so that the trainer beside it goes on as if it were not there."""

import contextlib
import importlib
import logging
import math
import os
import random
import re
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from abrun.errors import LaunchError
from abrun.models import config_of
from abrun.models.families import positions_of
from abrun.processes import progress
from abrun.recipe.packages import MIN_VLLM_WHOSE_ENGINE_SETS_UP_LOG, installed_vllm_release, vllm_refusal
from abrun.recipe.policy import COLOCATED_MEMORY_SHARE, MAX_SMALL_CACHE_SHARE
from abrun.recipe.run import OwnRunConfig
from abrun.redaction import one_line
from abrun.rollout.vllm import kept

# Read as vLLM is imported, or as its engine starts.
ALWAYS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine and its worker are this process
UNLESS_SET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a rank has its own threads already
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it cannot return the log-probs of what it draws from
    "VLLM_HOST_IP": "127.0.0.1",
}
CPU_CACHE_BYTES = 1 << 30  # of keys and values, where no share of the memory is asked for
ALONE = 0.9  # the share that it takes of a GPU of its own
LEAST_PROMPT = 1024  # tokens, for which the cache has room beside each sequence's own
BLOCK = 64  # tokens: the most by which the cache of a sequence is rounded up
ATTENTION = {"full_attention", "sliding_attention"}  # kinds of layers that keep keys and values
EXPERTS = ".experts.routed_experts."
MOST_LINES = 4  # of vLLM's log, in an error
MOST_OF_AN_ERROR, MOST_OF_A_LINE = 400, 200  # characters


class Tail(logging.Handler):
    """The last lines that vLLM has logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self.not_loaded = ""  # what vLLM says of weights that it goes on without
        self.has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        self._lines.append(line)
        if _says_not_loaded(line):
            self.not_loaded = line

    def __str__(self) -> str:
        return quoted(self._lines)


def quoted(lines: Iterable[str]) -> str:
    """The last lines of a log, as part of an error's one line."""
    return " / ".join(one_line(line, MOST_OF_A_LINE) for line in lines)


def _says_not_loaded(line: str) -> bool:
    """Whether vLLM goes on without some weights.

    It lists experts in any case, for it notes them under other names than it has looked for.
    """
    if "weights were not loaded" in line:
        return any(EXPERTS not in name for name in re.findall(r"'([^']+)'", line))
    return line == "RoutedExperts: Failed to load weights"


@contextlib.contextmanager
def failing(doing: str, tail: Tail) -> Iterator[None]:
    """Raises LaunchError, in a line, for whatever goes wrong inside of vLLM."""
    try:
        yield
    except Exception as error:  # some hundred thousand foreign lines: what they raise is theirs
        tail.has_failed = True
        reason = _words(error)
        if error.__cause__ and (cause := _words(error.__cause__)) not in reason:
            reason += f" (from {cause})"
        if re.search(r"sampling distribution replay|model.runner.*v2|v2 model runner", reason, re.IGNORECASE):
            reason += "; rollout.exact_support: false needs neither"
        if re.search(r"memory|maximum model length", reason, re.IGNORECASE):
            reason += "; rollout.gpu_memory_utilization is the share of the memory that vLLM takes"
        raise LaunchError(
            f"rollout.engine: vllm failed to {doing}: {reason}; last in its log: {str(tail) or 'nothing'}"
        ) from error


def _words(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}", MOST_OF_AN_ERROR)


@contextlib.contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Random numbers, environment and threads are afterwards as before: vLLM sets its own, globally."""
    python, arrays, environment = random.getstate(), np.random.get_state(), dict(os.environ)
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
            torch.set_num_threads = set_threads  # which its worker on CPU cores replaces
            torch.set_num_threads(threads)
            _put_back(environment)


def _put_back(environment: dict[str, str]) -> None:
    """All but its own variables, which it reads again."""
    for name in {*os.environ, *environment}:
        if name.startswith("VLLM_"):
            continue
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]


def start(config: OwnRunConfig, device: torch.device, num_ranks: int, tail: Tail) -> Any:
    """A `vllm.LLM` with random weights: they come by `reload_weights`. Collective over `num_ranks`.

    Raises LaunchError where it does not start.
    """
    progress.report("starting vllm")
    wrong = vllm_refusal(on_gpu=device.type == "cuda") or config.rollout.support_refusal()
    if wrong:
        raise LaunchError(wrong)
    with apart(device), failing("start", tail):
        os.environ.update(ALWAYS)
        if config.rollout.batch_invariant:
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        if config.rollout.records_support:
            os.environ.update(kept.ENVIRONMENT)
        for name, value in UNLESS_SET.items():
            os.environ.setdefault(name, value)
        vllm: Any = importlib.import_module("vllm")
        _set_up_log()
        _listen(tail)
        _keep_process_groups()
        if config.rollout.records_support:
            kept.report_bits()
        if num_ranks > 1:
            _without_shared_memory()
        with tempfile.TemporaryDirectory(dir=os.environ.get(progress.FOLDER_VARIABLE)) as folder:
            network = config_of(config.model)
            network.save_pretrained(folder)
            try:
                llm = vllm.LLM(model=folder, **_arguments(config, device, num_ranks, network))
            except Exception:
                _end_groups()
                raise
        _listen(tail)
        for handler in logging.getLogger("vllm").handlers:
            if handler is not tail:
                handler.setLevel(logging.ERROR)  # it has lines for every sync
        return llm


def _listen(tail: Tail) -> None:
    """Attach the tail to vLLM's log, unless it is attached."""
    log = logging.getLogger("vllm")
    log.addHandler(tail)
    if not log.isEnabledFor(tail.level):  # by VLLM_LOGGING_LEVEL: weights are missed at WARNING
        log.setLevel(tail.level)


def _set_up_log() -> None:
    """Let vLLM set up its log now, where it would as an engine starts, and drop the tail."""
    release = installed_vllm_release()
    if release and release >= MIN_VLLM_WHOSE_ENGINE_SETS_UP_LOG:
        logger: Any = importlib.import_module("vllm.logger")
        settings: Any = importlib.import_module("vllm.config.logging")
        logger.configure_logging_if_needed(settings.LoggingConfig())


def _without_shared_memory() -> None:
    """Ranks that share an engine talk through their process group.

    The segments in which they would outlive a killed process, as do the sockets beside them. Those of CPU
    cores are named alike by all engines of a host.
    """
    communicators = "vllm.distributed.device_communicators"
    library: Any = importlib.import_module(f"{communicators}.cpu_communicator")
    library.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda communicator: False
    library = importlib.import_module(f"{communicators}.shm_broadcast")
    library.MessageQueue.create_from_process_group = lambda *arguments, **options: None


def end(llm: Any) -> None:
    """End an engine and its process groups."""
    llm.llm_engine.engine_core.shutdown()


def _keep_process_groups() -> None:
    """Keep the trainer's process groups when an engine is shut down, or collected: vLLM destroys all."""
    core: Any = importlib.import_module("vllm.v1.engine.core")
    core.cleanup_dist_env_and_memory = _end_groups


def _end_groups() -> None:
    parallel_state: Any = importlib.import_module("vllm.distributed.parallel_state")
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None


def sharing() -> ProcessGroup:
    """The ranks that share this one's engine, in its order, as a group of CPU tensors."""
    parallel_state: Any = importlib.import_module("vllm.distributed.parallel_state")
    return parallel_state.get_tp_group().cpu_group


def _arguments(config: OwnRunConfig, device: torch.device, num_ranks: int, network: Any) -> dict[str, Any]:
    rollout, on_gpu = config.rollout, device.type == "cuda"
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,  # tokens come in, and tokens go out
        "load_format": "dummy",
        "generation_config": "vllm",  # nothing that a checkpoint says of sampling
        "dtype": config.policy.dtype,
        "logprobs_mode": "processed_logprobs",  # of the distribution a token is drawn from
        "max_model_len": -1,  # the model's, or what the cache has room for: no reason not to start
        "seed": 0,  # every request has its own
        "enforce_eager": not on_gpu,
        "enable_sleep_mode": on_gpu and not rollout.devices,
        "disable_log_stats": True,
    }
    if config.engine_head_dtype != config.policy.dtype:
        arguments["hf_overrides"] = {"head_dtype": config.engine_head_dtype}
    if rollout.records_support:
        arguments |= kept.ARGUMENTS
    if rollout.batch_size:
        arguments["max_num_seqs"] = rollout.batch_size
    if num_ranks > 1:  # in the process group that is there
        arguments["distributed_executor_backend"] = "external_launcher"
        arguments["tensor_parallel_size"] = rollout.tensor_parallel
    device_bytes = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
    return arguments | _memory(config, num_ranks, network, device_bytes)


def _memory(config: OwnRunConfig, num_ranks: int, network: Any, device_bytes: int | None) -> dict[str, float]:
    """The arguments that say how much of the device's memory it takes; `device_bytes`: None on CPU cores."""
    rollout = config.rollout
    if rollout.gpu_memory_utilization:
        return {"gpu_memory_utilization": rollout.gpu_memory_utilization}
    if device_bytes is None:
        return {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    if rollout.devices:
        return {"gpu_memory_utilization": ALONE}
    needed = cache_bytes(config, num_ranks, network)
    if needed is None or needed > MAX_SMALL_CACHE_SHARE * device_bytes:
        return {"gpu_memory_utilization": COLOCATED_MEMORY_SHARE}
    # No larger, for all of it is mapped at each waking. A size that is given keeps vLLM from measuring what
    # the device has left, which others change meanwhile; it starts where its share is free.
    return {"kv_cache_memory_bytes": needed, "gpu_memory_utilization": needed / device_bytes}


def cache_bytes(config: OwnRunConfig, num_ranks: int, network: Any) -> int | None:
    """Of a step's keys and values, on each of an engine's devices; `network`: its configuration.

    A sequence has room for a completion and for a prompt as long as that, LEAST_PROMPT tokens at least.
    Longer ones wait for each other, unless they share their beginning. One of all the positions fits in any
    case: vLLM would cut it short. None: layers differ in size, or keep something else, such as states.
    """
    rollout, text = config.rollout, network.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or ()
    if getattr(text, "is_heterogeneous", False) or not ATTENTION.issuperset(kinds):
        return None
    sampled = config.algorithm.batch_size * getattr(config.algorithm, "group_size", 1)
    at_once = min(rollout.batch_size or sampled, math.ceil(sampled * rollout.tensor_parallel / num_ranks))
    length = rollout.max_new_tokens + max(rollout.max_new_tokens, LEAST_PROMPT) + BLOCK
    tokens = max(at_once * length, (positions_of(network) or 0) + BLOCK)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    heads = math.ceil(heads / rollout.tensor_parallel)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    itemsize = getattr(torch, config.policy.dtype).itemsize
    return 2 * text.num_hidden_layers * heads * head_dim * itemsize * tokens
