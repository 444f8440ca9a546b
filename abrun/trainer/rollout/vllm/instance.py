"""A vLLM engine in this process: it samples and scores token ids, and loads streamed weights."""

import contextlib
import importlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]

from abrun.processes import progress
from abrun.recipe.run import OwnRunConfig, share_of_device
from abrun.trainer.backends.ranks import limit_memory
from abrun.trainer.rollout import Completion
from abrun.trainer.rollout.vllm.startup import (
    LogTail,
    SupportCollector,
    engine_group,
    preserving_globals,
    raising_launch_errors,
    shut_down,
    start_engine,
)

SPARE_BYTES = 2 << 30  # device memory that a waking engine leaves free
# Classes with `process_weights_after_loading` that leave the weights unchanged on a GPU.
UNPROCESSED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "Attention", "MMEncoderAttention"}
# Size limit of constants: larger tensors that are no parameters are caches, or derived from weights.
CONSTANT_BYTES = 1 << 20


class VllmInstance:
    """A vLLM engine, or this rank's part of one. Failures are raised as LaunchError with a one-line message.

    Ranks that share an engine must make the same calls with the same requests in the same order.
    """

    def __init__(
        self, config: OwnRunConfig, device: torch.device, num_ranks: int, end_ids: frozenset[int]
    ) -> None:
        self._rollout, self.device = config.rollout, device
        self._runs_per_gpu = config.cluster.runs_per_gpu
        self.begin_run(end_ids)
        self._tail = LogTail()
        self._llm = start_engine(config, device, num_ranks, self._tail)
        self._support = SupportCollector(self._llm) if self._rollout.records_support else None
        self.group: ProcessGroup | None = engine_group() if config.rollout.tensor_parallel > 1 else None
        self._is_asleep = False
        self._constants: list[tuple[Tensor, Tensor]] = []

    def begin_run(self, end_ids: frozenset[int], beat: Callable[[], None] = progress.report) -> None:
        """Begin a run whose completions end with one of `end_ids`. `beat` is called during sampling."""
        self._end_ids, self._beat = sorted(end_ids), beat

    def end_run(self) -> None:
        """Prepare for another run, whose first sync replaces weights and cache. Frees device memory."""
        with self._calling_vllm("end a run"):
            if self._llm.llm_engine.has_unfinished_requests():
                raise RuntimeError("it has unfinished requests")
        if not self._is_asleep:
            self.sleep()

    def generate(
        self, requests: list[tuple[list[int], int]], temperature: float | None = None
    ) -> list[Completion]:
        """Return a completion for each (prompt, seed).

        `temperature` overrides the recipe; completions then have no support. 0 is greedy decoding.
        """
        with self._calling_vllm("generate"):
            if self._support:
                self._support.switch(on=temperature is None)
            used: float = self._rollout.temperature if temperature is None else temperature
            for row, (prompt, seed) in enumerate(requests):
                parameters = self._sampling_parameters(seed, used)
                self._llm.llm_engine.add_request(str(row), {"prompt_token_ids": prompt}, parameters)
            outputs = self._run_requests(len(requests))
            return [self._to_completion(output, used) for output in outputs]

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Return the log-probs of given tokens at temperature 1 without filters; 0 for the first token.

        A sequence is scored as a prompt in one pass, not token by token as in sampling.
        """
        library: Any = importlib.import_module("vllm.sampling_params")
        parameters = library.SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,  # only those of the given tokens
            detokenize=False,
            output_kind=library.RequestOutputKind.FINAL_ONLY,
        )
        with self._calling_vllm("score"):
            for row, token_ids in enumerate(sequences):
                self._llm.llm_engine.add_request(str(row), {"prompt_token_ids": token_ids}, parameters)
            prompt_logprobs = [list(output.prompt_logprobs) for output in self._run_requests(len(sequences))]
        return [
            [0.0, *(row[token].logprob for token, row in zip(tokens[1:], rows[1:], strict=True))]
            for tokens, rows in zip(sequences, prompt_logprobs, strict=True)
        ]

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load the policy's weights, an iterator of full tensors with their Hugging Face names."""
        with self._calling_vllm("take the policy's weights"):
            if self.device.type == "cuda" and all(self._llm.apply_model(_keeps_checkpoint_values)):
                self._llm.apply_model(partial(_load, weights=weights))
            else:
                self._reload(weights)
            if self._is_asleep:
                self._map_memory("kv_cache")
                self._is_asleep = False
            # The prefix cache still has keys and values of the old weights.
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("its prefix cache is in use")

    def sleep(self) -> int:
        """Free the memory of cache and weights; return the number of bytes.

        vLLM unmaps the pages but keeps their addresses, so torch's allocator still counts them.
        """
        if self.device.type != "cuda":
            return 0
        with self._calling_vllm("sleep"):
            if not self._constants:
                (self._constants,) = self._llm.apply_model(_copy_constants)
            with _keeping_allocator_cache():
                self._llm.sleep(level=2)
            self._is_asleep = True
            # The trainer may use the memory, which torch's limit still counts as the engine's
            limit_memory(self.device, self._runs_per_gpu, unmapped_bytes=_sleeping_bytes())
            return _sleeping_bytes()

    def memory_bytes(self) -> tuple[int, int]:
        """Return the bytes that a sleeping engine allocates when it wakes, and those that it has now."""
        if self.device.type != "cuda":
            return 0, 0
        asleep_bytes = _sleeping_bytes() if self._is_asleep else 0
        return asleep_bytes, torch.cuda.memory_reserved(self.device) - asleep_bytes

    def wake(self) -> bool:
        """Allocate memory for the weights; `load` allocates the cache after the trainer's copies are freed.

        Returns True if the weights must be loaded.
        """
        if self._is_asleep:
            with self._calling_vllm("wake"):
                self._map_memory("weights")
                with torch.inference_mode():  # some constants may be inference tensors
                    for constant, copy in self._constants:
                        constant.copy_(copy)
        return self._is_asleep

    def close(self) -> None:
        # After a failure of the engine, errors in shutting it down must not hide the first error.
        errors = (
            contextlib.suppress(Exception)
            if self._tail.has_failed
            else raising_launch_errors("end", self._tail)
        )
        with preserving_globals(self.device), errors:
            shut_down(self._llm)

    def _reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load through vLLM's `reload_weights`, which copies and processes each layer as at start-up."""
        experts = Counter[tuple[str, str]]()
        self._llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": _count_experts(weights, experts)}
        )
        if self._tail.missing_weights:
            raise RuntimeError(self._tail.missing_weights)
        _check_experts(experts)
        if self.device.type == "cpu":
            self._llm.apply_model(_repack)

    def _map_memory(self, tag: str) -> None:
        """Map memory again; empty torch's cache first if too little memory is free."""
        spare_bytes = SPARE_BYTES // self._runs_per_gpu
        if self._free_bytes() < _sleeping_bytes() + spare_bytes:
            torch.cuda.empty_cache()  # vLLM since 0.27 does this itself, at the trainer's expense
        self._llm.wake_up(tags=[tag])
        limit_memory(self.device, self._runs_per_gpu, unmapped_bytes=_sleeping_bytes())

    def _free_bytes(self) -> int:
        """Return the free memory of the device, or of this run's share of it."""
        free_bytes, device_bytes = torch.cuda.mem_get_info(self.device)
        if self._runs_per_gpu == 1:
            return free_bytes
        mapped_bytes = torch.cuda.memory_reserved(self.device) - _sleeping_bytes()
        return share_of_device(device_bytes, self._runs_per_gpu) - mapped_bytes

    def _run_requests(self, count: int) -> list[Any]:
        """Run the engine until all requests have finished; return the outputs of requests 0 to count - 1."""
        engine, finished = self._llm.llm_engine, {}
        while engine.has_unfinished_requests():
            self._beat()
            for output in engine.step():
                if output.finished:
                    finished[int(output.request_id)] = output
            if self._support:
                self._support.collect()
        return [finished[row] for row in range(count)]

    @contextlib.contextmanager
    def _calling_vllm(self, action: str) -> Iterator[None]:
        with preserving_globals(self.device), raising_launch_errors(action, self._tail):
            yield

    def _sampling_parameters(self, seed: int, temperature: float) -> Any:
        library: Any = importlib.import_module("vllm.sampling_params")
        return library.SamplingParams(
            seed=seed,
            temperature=temperature,
            min_p=self._rollout.min_p,
            # 0 means no limit, but vLLM rejects 0 if it reports sampling masks
            top_k=self._rollout.top_k or (self._support.vocab_size if self._support else 0),
            top_p=self._rollout.top_p,
            max_tokens=self._rollout.max_new_tokens,
            stop_token_ids=self._end_ids,
            ignore_eos=True,  # only stop_token_ids end a completion
            logprobs=0,  # only that of the drawn token
            flat_logprobs=True,  # lists instead of two objects for each token
            detokenize=False,
            output_kind=library.RequestOutputKind.FINAL_ONLY,
        )

    def _to_completion(self, request: Any, temperature: float) -> Completion:
        (output,) = request.outputs
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"a completion ended by {output.finish_reason!r}")
        token_ids, longest = list(output.token_ids), self._rollout.max_new_tokens
        if output.finish_reason == "length" and len(token_ids) < longest:
            raise RuntimeError(
                f"a completion was truncated after {len(token_ids)} of {longest} tokens: vLLM lacks "
                "positions or memory for longer sequences"
            )
        flat_logprobs = output.logprobs
        drawn_indices = flat_logprobs.start_indices  # at each position the drawn one is first
        if [flat_logprobs.token_ids[index] for index in drawn_indices] != token_ids:
            raise RuntimeError("the log-probs belong to other tokens than those drawn")
        logprobs = [flat_logprobs.logprobs[index] for index in drawn_indices]
        return Completion(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids) if temperature == 0 else logprobs,
            support=self._support.take(request.request_id, output) if self._support else None,
            truncated=token_ids[-1] not in self._end_ids,
        )


@contextlib.contextmanager
def _keeping_allocator_cache() -> Iterator[None]:
    """Disable `empty_cache`, which vLLM calls in `sleep`: training would allocate the memory again."""
    libraries: tuple[Any, ...] = torch.cuda, torch.accelerator  # vLLM 0.33 asks the second
    originals = [library.empty_cache for library in libraries]
    for library in libraries:
        library.empty_cache = lambda: None
    try:
        yield
    finally:
        for library, original in zip(libraries, originals, strict=True):
            library.empty_cache = original


def _sleeping_bytes() -> int:
    """Return how many bytes vLLM has freed by sleeping."""
    pool: Any = importlib.import_module("vllm.device_allocator.cumem")
    data = pool.CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(allocation.handle[1] for allocation in data if allocation.is_asleep)


def _keeps_checkpoint_values(model: Any) -> bool:
    """Return True if vLLM keeps the values of a checkpoint on GPUs, at most concatenated.

    False for models with experts (rearranged), MLA (multiplied), attention sinks (copied in float32) or
    quantisation.
    """
    layers = list(model.modules())
    if any(getattr(impl, "sinks", None) is not None for layer in layers for impl in _attentions(layer)):
        return False
    processing = [layer for layer in layers if hasattr(layer, "process_weights_after_loading")]
    methods = [method for layer in layers if (method := getattr(layer, "quant_method", None)) is not None]
    return {type(processor).__name__ for processor in (*processing, *methods)} <= UNPROCESSED


def _attentions(layer: Any) -> list[Any]:
    """Return the attention implementations of a layer, including variants; [] if it has no attention."""
    impl = getattr(layer, "impl", None)
    if impl is None:
        return []
    return [impl, *(impl.get_impl_variants() if hasattr(impl, "get_impl_variants") else ())]


def _copy_constants(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Return small tensors that are neither parameters nor buffers, each with a copy on the CPU.

    Examples are ALiBi slopes and the scales of Gemma 3n. vLLM restores only buffers after its sleep.
    """
    holders = [holder for layer in model.modules() for holder in (layer, *_attentions(layer))]
    values = (value for holder in holders for name, value in vars(holder).items() if name != "kv_cache")
    return [
        (value, value.to("cpu", copy=True))
        for value in values
        if isinstance(value, Tensor) and not value.is_meta and value.nbytes <= CONSTANT_BYTES
    ]


def _load(model: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Load weights into the parameters of the model. Raises RuntimeError if some are missing."""
    loaded = model.load_weights(weights)
    missing = {name for name, _ in model.named_parameters()}.difference(loaded or ())
    if missing and loaded is not None:  # None: for some models vLLM does not report the names
        raise RuntimeError(f"weights were not loaded: {', '.join(sorted(missing))}")


def _count_experts(
    weights: Iterator[tuple[str, Tensor]], experts: Counter[tuple[str, str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, and count the experts of each layer and matrix in `experts`."""
    for name, tensor in weights:
        if match := re.fullmatch(r"(.+\.experts)\.\d+\.(.+)", name):
            experts[match[1], match[2]] += 1
        yield name, tensor


def _check_experts(num_experts: Counter[tuple[str, str]]) -> None:
    """Raise RuntimeError if an expert lacks a matrix; vLLM itself ignores that."""
    expected = max(num_experts.values(), default=0)
    layers, matrices = {layer for layer, _ in num_experts}, {matrix for _, matrix in num_experts}
    for layer, matrix in itertools.product(sorted(layers), sorted(matrices)):
        if num_experts[layer, matrix] != expected:
            raise RuntimeError(
                f"{layer}: {matrix} of {num_experts[layer, matrix]} experts, but others have {expected}"
            )


def _repack(model: Any) -> None:
    """Update the packed copies of weights that vLLM's CPU kernels multiply with.

    `reload_weights` does not repack experts, or an LM head that is tied to the embedding.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
    head: Any = getattr(model, "lm_head", None)
    if getattr(model.config, "tie_word_embeddings", False) and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)
