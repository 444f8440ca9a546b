"""Start and end of vLLM in this process, without side effects on the trainer."""

import contextlib
import importlib
import logging
import math
import os
import random
import re
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from abrun.errors import LaunchError
from abrun.processes import progress
from abrun.recipe.extras import MIN_VLLM_WHOSE_ENGINE_SETS_UP_LOG, installed_vllm_release, vllm_refusal
from abrun.recipe.policy import COLOCATED_MEMORY_SHARE, MAX_SMALL_CACHE_SHARE
from abrun.recipe.run import OwnRunConfig, share_of_device
from abrun.runs.redaction import one_line
from abrun.trainer.models.families import max_positions_of
from abrun.trainer.models.weights import config_of

# vLLM reads these variables on import or when an engine starts.
FIXED_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine and its worker are this process
DEFAULT_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the rank has set its threads already
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it cannot return log-probs of the filtered distribution
    "VLLM_HOST_IP": "127.0.0.1",
}
CPU_CACHE_BYTES = 1 << 30  # size of the key-value cache on a CPU without rollout.gpu_memory_utilization
ALONE = 0.9  # memory utilization of a GPU that only vLLM uses
MIN_PROMPT_TOKENS = 1024  # minimum prompt length for which the cache reserves space
BLOCK = 64  # tokens: upper bound of the rounding of a sequence's cache
ATTENTION = {"full_attention", "sliding_attention"}  # types of layers with keys and values
EXPERTS = ".experts.routed_experts."
MAX_LOG_LINES = 4  # lines of vLLM's log quoted in an error
MAX_ERROR_LENGTH, MAX_LINE_LENGTH = 400, 200  # characters


class LogTail(logging.Handler):
    """Log handler that keeps the last lines of vLLM's log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self.missing_weights = ""  # vLLM's warning about weights that it did not load
        self.has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        self._lines.append(line)
        if _reports_missing_weights(line):
            self.missing_weights = line

    def __str__(self) -> str:
        return quote_lines(self._lines)


def quote_lines(lines: Iterable[str]) -> str:
    """Join the last lines of a log for a one-line error message."""
    return " / ".join(one_line(line, MAX_LINE_LENGTH) for line in lines)


def _reports_missing_weights(line: str) -> bool:
    """Return True if a log line says that vLLM did not load some weights.

    Experts are ignored: vLLM always lists them, because it registers them under other names.
    """
    if "weights were not loaded" in line:
        return any(EXPERTS not in name for name in re.findall(r"'([^']+)'", line))
    return line == "RoutedExperts: Failed to load weights"


@contextlib.contextmanager
def raising_launch_errors(action: str, tail: LogTail) -> Iterator[None]:
    """Raise any error inside of vLLM as a one-line LaunchError; `action` completes "failed to"."""
    try:
        yield
    except Exception as error:  # vLLM may raise anything
        tail.has_failed = True
        reason = _describe_error(error)
        if error.__cause__ and (cause := _describe_error(error.__cause__)) not in reason:
            reason += f" (from {cause})"
        if re.search(r"sampling distribution replay|model.runner.*v2|v2 model runner", reason, re.IGNORECASE):
            reason += "; rollout.exact_support: false avoids this"
        if re.search(r"memory|maximum model length", reason, re.IGNORECASE):
            reason += "; rollout.gpu_memory_utilization sets the share of the memory for vLLM"
        raise LaunchError(
            f"rollout.engine: vllm failed to {action}: {reason}; last lines of its log: {str(tail) or 'none'}"
        ) from error


def _describe_error(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}", MAX_ERROR_LENGTH)


@contextlib.contextmanager
def preserving_globals(device: torch.device) -> Iterator[None]:
    """Restore random states, environment variables and thread settings afterwards; vLLM changes them."""
    python_state, numpy_state, environment = random.getstate(), np.random.get_state(), dict(os.environ)
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            torch.set_num_threads = set_threads  # vLLM's CPU worker replaces this function
            torch.set_num_threads(threads)
            _restore_environment(environment)


def _restore_environment(environment: dict[str, str]) -> None:
    """Restore all environment variables except VLLM_*, which vLLM reads again later."""
    for name in {*os.environ, *environment}:
        if name.startswith("VLLM_"):
            continue
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]


def start_engine(config: OwnRunConfig, device: torch.device, num_ranks: int, tail: LogTail) -> Any:
    """Start a `vllm.LLM` with random weights, to be replaced by a sync. Collective over `num_ranks`.

    Raises LaunchError if it does not start.
    """
    progress.report("starting vllm")
    wrong = vllm_refusal(on_gpu=device.type == "cuda") or config.rollout.support_refusal()
    if wrong:
        raise LaunchError(wrong)
    if config.cluster.runs_per_gpu > 1:
        reserves_known_memory(config)  # raises if vLLM cannot share the GPU
    with preserving_globals(device), raising_launch_errors("start", tail):
        os.environ.update(FIXED_ENVIRONMENT)
        if config.rollout.batch_invariant:
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        if config.rollout.records_support:
            os.environ.update(SUPPORT_ENVIRONMENT)
        os.environ.update({**DEFAULT_ENVIRONMENT, **os.environ})
        vllm: Any = importlib.import_module("vllm")
        _configure_log()
        _listen(tail)
        # Keep the trainer's process groups when an engine ends or is collected; vLLM would destroy them.
        core: Any = importlib.import_module("vllm.v1.engine.core")
        core.cleanup_dist_env_and_memory = _end_groups
        if config.rollout.records_support:
            patch_sampler_output()
        if num_ranks > 1:
            _disable_shared_memory()
        with tempfile.TemporaryDirectory(dir=os.environ.get(progress.FOLDER_VARIABLE)) as folder:
            network = config_of(config.model)
            network.save_pretrained(folder)
            try:
                llm = vllm.LLM(model=folder, **_engine_arguments(config, device, num_ranks, network))
            except Exception:
                _end_groups()
                raise
        _listen(tail)
        for handler in logging.getLogger("vllm").handlers:
            if handler is not tail:
                handler.setLevel(logging.ERROR)  # vLLM logs several lines for every sync
        return llm


def _listen(tail: LogTail) -> None:
    """Attach the handler to vLLM's log unless it is attached."""
    log = logging.getLogger("vllm")
    log.addHandler(tail)
    # VLLM_LOGGING_LEVEL may hide lines that the handler needs, such as warnings about missing weights.
    if not log.isEnabledFor(tail.level):
        log.setLevel(tail.level)


def _configure_log() -> None:
    """Configure vLLM's log now, if this release would do so at engine start and remove our handler."""
    release = installed_vllm_release()
    if release and release >= MIN_VLLM_WHOSE_ENGINE_SETS_UP_LOG:
        logger: Any = importlib.import_module("vllm.logger")
        settings: Any = importlib.import_module("vllm.config.logging")
        logger.configure_logging_if_needed(settings.LoggingConfig())


def _disable_shared_memory() -> None:
    """Make ranks that share an engine communicate through their process group.

    vLLM's shared-memory segments and sockets would outlive a killed process. On CPU, all engines of a host
    would even use the same names.
    """
    communicators = "vllm.distributed.device_communicators"
    library: Any = importlib.import_module(f"{communicators}.cpu_communicator")
    library.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda communicator: False
    library = importlib.import_module(f"{communicators}.shm_broadcast")
    library.MessageQueue.create_from_process_group = lambda *arguments, **options: None


def shut_down(llm: Any) -> None:
    """End an engine and its process groups."""
    llm.llm_engine.engine_core.shutdown()


def _end_groups() -> None:
    parallel_state: Any = importlib.import_module("vllm.distributed.parallel_state")
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None


def engine_group() -> ProcessGroup:
    """Return the process group, for CPU tensors, of the ranks that share this rank's engine."""
    parallel_state: Any = importlib.import_module("vllm.distributed.parallel_state")
    return parallel_state.get_tp_group().cpu_group


def _engine_arguments(
    config: OwnRunConfig, device: torch.device, num_ranks: int, network: Any
) -> dict[str, Any]:
    rollout, on_gpu = config.rollout, device.type == "cuda"
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,  # prompts and completions are token ids
        "load_format": "dummy",
        "generation_config": "vllm",  # ignore the sampling defaults of the checkpoint
        "dtype": config.policy.dtype,
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are drawn from
        "max_model_len": -1,  # the limit of the model, or of the cache if that is smaller
        "seed": 0,  # every request has its own seed
        "enforce_eager": not on_gpu,
        "enable_sleep_mode": on_gpu and not rollout.devices,
        "disable_log_stats": True,
    }
    if config.engine_head_dtype != config.policy.dtype:
        arguments["hf_overrides"] = {"head_dtype": config.engine_head_dtype}
    if rollout.records_support:
        arguments |= SUPPORT_ARGUMENTS
    if rollout.batch_size:
        arguments["max_num_seqs"] = rollout.batch_size
    if num_ranks > 1:  # use the existing process group
        arguments["distributed_executor_backend"] = "external_launcher"
        arguments["tensor_parallel_size"] = rollout.tensor_parallel
    device_bytes = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
    return arguments | _memory_arguments(config, network, device_bytes)


def reserves_known_memory(config: OwnRunConfig) -> bool:
    """Return True if an engine on this process's first device starts without measuring free memory."""
    on_gpu = bool(config.cluster.gpus_per_node)
    device_bytes = torch.cuda.get_device_properties(0).total_memory if on_gpu else None
    return "kv_cache_memory_bytes" in _memory_arguments(config, config_of(config.model), device_bytes)


def _shared_memory_arguments(config: OwnRunConfig, network: Any, device_bytes: int) -> dict[str, float]:
    """Return the arguments for one of several runs on a GPU: those of a run alone, for equal results.

    Raises LaunchError if vLLM would size the cache of a run alone by the GPU, or if it takes most of the
    share.
    """
    cache = cache_bytes(config, config.cluster.ranks, network)
    share_bytes = share_of_device(device_bytes, config.cluster.runs_per_gpu)
    is_sized_by_gpu = cache is None or cache > MAX_SMALL_CACHE_SHARE * device_bytes
    if cache is None or is_sized_by_gpu or cache > COLOCATED_MEMORY_SHARE * share_bytes:
        got = f"cluster.runs_per_gpu: got {config.cluster.runs_per_gpu}, but"
        if cache is None or is_sized_by_gpu:
            raise LaunchError(f"{got} vLLM takes a share of the whole GPU for this model's cache; use 1")
        raise LaunchError(
            f"{got} vLLM's cache of {cache / 2**30:.1f} GiB takes most of a run's share of "
            f"{share_bytes / 2**30:.1f} GiB; use fewer, or auto"
        )
    return {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": cache / device_bytes}


def _memory_arguments(config: OwnRunConfig, network: Any, device_bytes: int | None) -> dict[str, float]:
    """Return the arguments that limit device memory; `device_bytes` is None on a CPU."""
    rollout = config.rollout
    if device_bytes is not None and config.cluster.runs_per_gpu > 1:
        return _shared_memory_arguments(config, network, device_bytes)
    if rollout.gpu_memory_utilization:
        return {"gpu_memory_utilization": rollout.gpu_memory_utilization}
    if device_bytes is None:
        return {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    if rollout.devices:
        return {"gpu_memory_utilization": ALONE}
    needed = cache_bytes(config, config.cluster.ranks, network)
    if needed is None or needed > MAX_SMALL_CACHE_SHARE * device_bytes:
        return {"gpu_memory_utilization": COLOCATED_MEMORY_SHARE}
    # The cache is only as large as needed, because all of it is mapped at each wake. An explicit size also
    # stops vLLM from measuring free memory, which other processes may change meanwhile.
    return {"kv_cache_memory_bytes": needed, "gpu_memory_utilization": needed / device_bytes}


def cache_bytes(config: OwnRunConfig, num_ranks: int, network: Any) -> int | None:
    """Return the bytes of keys and values of a step, on each device of an engine.

    `network` is the configuration of the model. Each sequence gets space for a completion and a prompt of the
    same length, at least MIN_PROMPT_TOKENS. Longer sequences wait for each other unless they share a prefix.
    One sequence of the maximum length always fits, because vLLM would truncate it otherwise. Returns None if
    layers differ in size or have other state than keys and values.
    """
    rollout, text = config.rollout, network.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or ()
    if getattr(text, "is_heterogeneous", False) or not ATTENTION.issuperset(kinds):
        return None
    num_sequences = config.algorithm.batch_size * getattr(config.algorithm, "group_size", 1)
    num_concurrent = min(
        rollout.batch_size or num_sequences, math.ceil(num_sequences * rollout.tensor_parallel / num_ranks)
    )
    length = rollout.max_new_tokens + max(rollout.max_new_tokens, MIN_PROMPT_TOKENS) + BLOCK
    tokens = max(num_concurrent * length, (max_positions_of(network) or 0) + BLOCK)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    heads = math.ceil(heads / rollout.tensor_parallel)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    itemsize = getattr(torch, config.policy.dtype).itemsize
    return 2 * text.num_hidden_layers * heads * head_dim * itemsize * tokens


# The support of vLLM's draws (the tokens that its filters kept), from `return_sampling_mask`.
# vLLM filters by min_p, top_k and top_p, in this order, after the temperature. Its sampler packs one bit
# for each token of the vocabulary, as trainer.rl.sampling does. vLLM then unpacks the bits into token ids on
# the CPU, which takes 23 ms a step for 256 sequences that keep 5,000 of 32,768 tokens. abrun reads the
# packed bits instead. Dimensions: R requests in an engine step, T tokens of a completion, V vocabulary, W
# = ceil(V / 8).

# Only the V2 model runner reports sampling masks, and vLLM 0.28 does not use it for every model by default.
SUPPORT_ARGUMENTS = {"return_sampling_mask": True}
SUPPORT_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


class SupportCollector:
    """Collects the supports of running requests, by request name, as packed bits (see rl.sampling)."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.vocab_size: int = llm.llm_engine.model_config.get_vocab_size()
        self._is_on = True
        self._rows: dict[str, list[np.ndarray]] = defaultdict(list)

    def switch(self, on: bool) -> None:
        """Turn reports of sampling masks on or off; vLLM rejects temperature 0 while they are on."""
        self._rows.clear()
        if on == self._is_on:
            return
        self._llm.llm_engine.model_config.return_sampling_mask = on  # the request validation reads this
        self._llm.collective_rpc(_switch_sampler, args=(on,))
        self._is_on = on

    def collect(self) -> None:
        """Collect the masks that the last engine step added to unfinished requests."""
        if not self._is_on:
            return
        for state in self._llm.llm_engine.output_processor.request_states.values():
            if chunks := state.sampling_mask_chunks:
                # Copied, because all rows of a step are views of one array, in pinned memory on a GPU
                self._rows[state.external_req_id].extend(chunk.token_ids.copy() for chunk in chunks)
                chunks.clear()

    def take(self, name: str, completion: Any) -> Tensor | None:  # [T, W] uint8
        """Return the support of each token of a finished request; None if masks are turned off.

        Raises RuntimeError if a token has no mask, or is not in its mask.
        """
        if not self._is_on:
            return None
        rows, last_mask = self._rows.pop(name, []), completion.sampling_mask
        last_rows = last_mask.token_ids if last_mask else ()
        rows.extend(np.array(row, dtype=np.uint8) for row in last_rows)
        return torch.from_numpy(join_rows(rows, completion.token_ids, self.vocab_size))


def join_rows(rows: list[np.ndarray], token_ids: list[int], vocab_size: int) -> np.ndarray:  # [T, W] uint8
    """Stack the masks of a completion. Raises RuntimeError if one does not fit token or vocabulary."""
    if len(rows) != len(token_ids):
        raise RuntimeError(f"sampling masks for {len(rows)} of {len(token_ids)} tokens")
    width = -(-vocab_size // 8)
    other_width = next((len(row) for row in rows if len(row) != width), width)
    if other_width != width:
        raise RuntimeError(
            f"a sampling mask of {other_width} bytes for a vocabulary of {vocab_size}, which needs {width}"
        )
    support, tokens = np.stack(rows), np.array(token_ids)
    if vocab_size % 8 and (support[:, -1] >> vocab_size % 8).any():
        raise RuntimeError(f"a sampling mask contains a token beyond the vocabulary of {vocab_size}")
    has_token = support[np.arange(len(tokens)), tokens >> 3] >> (tokens & 7) & 1
    if not has_token.all():
        index = int(has_token.argmin())
        raise RuntimeError(f"token {tokens[index]}, drawn at {index}, is not in its sampling mask")
    return support


def patch_sampler_output() -> None:
    """Patch vLLM to report the packed bits of its sampler, W bytes a row, instead of token ids."""
    library: Any = importlib.import_module("vllm.v1.worker.gpu.sample.output")
    library.SamplingMaskTensors.tolists = _packed_rows
    library.MAX_COMPACT_SUPPORT = 1  # token ids that it also copies from the GPU; the default is 2,048 a row


def _packed_rows(tensors: Any, num_sampled: Any = None) -> Any:
    """Return the packed masks of a step in the format that the scheduler splits into requests.

    The scheduler does not read rows without a draw.
    """
    outputs: Any = importlib.import_module("vllm.v1.outputs")
    bits = tensors.packed_mask.cpu().numpy()  # [R, W]
    return outputs.SamplingMaskLists(bits.reshape(-1), np.arange(len(bits) + 1) * bits.shape[1])


def _switch_sampler(worker: Any, on: bool) -> None:
    worker.model_runner.sampler.return_sampling_mask = on
