"""One vLLM in this process: tokens in, tokens out, and weights taken as they come."""

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
from abrun.recipe.run import OwnRunConfig
from abrun.rollout import Completion
from abrun.rollout.vllm.kept import KeptSets
from abrun.rollout.vllm.starting import Tail, apart, end, failing, sharing, start

SPARE_BYTES = 2 << 30  # of a device, that a waking engine leaves to others
# What vLLM lets process weights once they are loaded, and leaves them as they are on a GPU.
PLAIN = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "Attention", "MMEncoderAttention"}
CONSTANT_BYTES = 1 << 20  # at most: larger tensors beside a model's own are caches, or made from its weights


class Instance:
    """An engine, or this rank's part of one. What it raises is a LaunchError of one line.

    Ranks that share one make the same calls with the same requests, all in one order.
    """

    def __init__(
        self,
        config: OwnRunConfig,
        device: torch.device,
        num_ranks: int,
        end_ids: frozenset[int],
        beat: Callable[[], None] = progress.report,  # called while it samples
    ) -> None:
        self._beat = beat
        self._rollout, self._device = config.rollout, device
        self._end_ids = sorted(end_ids)
        self._tail = Tail()
        self._llm = start(config, device, num_ranks, self._tail)
        self._kept_sets = KeptSets(self._llm) if self._rollout.records_support else None
        self.group: ProcessGroup | None = sharing() if config.rollout.tensor_parallel > 1 else None
        self._is_asleep = False
        self._constants: list[tuple[Tensor, Tensor]] = []

    def generate(
        self, requests: list[tuple[list[int], int]], temperature: float | None = None
    ) -> list[Completion]:
        """Return a completion for each prompt and its seed.

        With a `temperature` in the recipe's place it has no support; at 0 every token is the most likely one.
        """
        with self._called("generate"):
            if self._kept_sets:
                self._kept_sets.switch(on=temperature is None)
            temperature = self._rollout.temperature if temperature is None else temperature
            for row, (prompt, seed) in enumerate(requests):
                parameters = self._parameters(seed, temperature)
                self._llm.llm_engine.add_request(str(row), {"prompt_token_ids": prompt}, parameters)
            outputs = self._outputs(len(requests))
            return [self._completion(output, temperature) for output in outputs]

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of tokens that are given, 0 of each sequence's first: at temperature 1, unfiltered.

        All of a sequence in one pass, as a prompt: not token by token, as it is sampled.
        """
        library: Any = importlib.import_module("vllm.sampling_params")
        parameters = library.SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,  # the given tokens' own
            detokenize=False,
            output_kind=library.RequestOutputKind.FINAL_ONLY,
        )
        with self._called("score"):
            for row, token_ids in enumerate(sequences):
                self._llm.llm_engine.add_request(str(row), {"prompt_token_ids": token_ids}, parameters)
            found = [list(output.prompt_logprobs) for output in self._outputs(len(sequences))]
        return [
            [0.0, *(of_token[token].logprob for token, of_token in zip(tokens[1:], rows[1:], strict=True))]
            for tokens, rows in zip(sequences, found, strict=True)
        ]

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take the policy's weights, whole and one by one under their Hugging Face names."""
        with self._called("take the policy's weights"):
            if self._device.type == "cuda" and all(self._llm.apply_model(_is_as_in_checkpoints)):
                self._llm.apply_model(partial(_load, weights=weights))
            else:
                self._reload(weights)
            if self._is_asleep:
                self._map("kv_cache")
                self._is_asleep = False
            # Keys and values of the weights before must not be found again.
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("its prefix cache is in use")

    def sleep(self) -> int:
        """Give memory away, and the weights with it; returns how many bytes.

        Its pages are unmapped, and torch's allocator, from which it has their addresses, counts them on.
        """
        if self._device.type != "cuda":
            return 0
        with self._called("sleep"):
            if not self._constants:
                (self._constants,) = self._llm.apply_model(_constants)
            with _kept_by_the_trainer():
                self._llm.sleep(level=2)
            self._is_asleep = True
            return _away_bytes()

    def wake(self) -> bool:
        """Room for the weights first: that for the cache is taken once the trainer's copies are gone.

        True where there are none, and they have to be loaded.
        """
        if self._is_asleep:
            with self._called("wake"):
                self._map("weights")
                with torch.inference_mode():  # where some may have been made
                    for constant, copy in self._constants:
                        constant.copy_(copy)
        return self._is_asleep

    def close(self) -> None:
        """End the engine."""
        # After an error the run ends anyway, and that one is to be heard.
        heard = contextlib.suppress(Exception) if self._tail.has_failed else failing("end", self._tail)
        with apart(self._device), heard:
            end(self._llm)

    def _reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """By copies of each layer, which vLLM processes as it did when it started."""
        experts = Counter[tuple[str, str]]()
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": _counted(weights, experts)})
        if self._tail.not_loaded:
            raise RuntimeError(self._tail.not_loaded)
        _check_experts(experts)
        if self._device.type == "cpu":
            self._llm.apply_model(_repack)

    def _map(self, tag: str) -> None:
        """Take memory again, with what torch has kept of the trainer's where too little is free beside it."""
        if torch.cuda.mem_get_info(self._device)[0] < _away_bytes() + SPARE_BYTES:
            torch.cuda.empty_cache()  # as vLLM does itself from 0.27 on; the trainer has to ask for it again
        self._llm.wake_up(tags=[tag])

    def _outputs(self, count: int) -> list[Any]:
        """Of the requests 0 to `count`, once all have finished."""
        engine, finished = self._llm.llm_engine, {}
        while engine.has_unfinished_requests():
            self._beat()
            for output in engine.step():
                if output.finished:
                    finished[int(output.request_id)] = output
            if self._kept_sets:
                self._kept_sets.collect()
        return [finished[row] for row in range(count)]

    @contextlib.contextmanager
    def _called(self, doing: str) -> Iterator[None]:
        with apart(self._device), failing(doing, self._tail):
            yield

    def _parameters(self, seed: int, temperature: float) -> Any:
        library: Any = importlib.import_module("vllm.sampling_params")
        return library.SamplingParams(
            seed=seed,
            temperature=temperature,
            min_p=self._rollout.min_p,
            # 0: all, which vLLM does not take with sets
            top_k=self._rollout.top_k or (self._kept_sets.vocab_size if self._kept_sets else 0),
            top_p=self._rollout.top_p,
            max_tokens=self._rollout.max_new_tokens,
            stop_token_ids=self._end_ids,
            ignore_eos=True,  # which is one of those, or does not end a completion
            logprobs=0,  # the drawn token's
            flat_logprobs=True,  # in lists: else they are two objects a token, and garbage soon
            detokenize=False,
            output_kind=library.RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, request: Any, temperature: float) -> Completion:
        (output,) = request.outputs
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"a completion ended by {output.finish_reason!r}")
        token_ids, longest = list(output.token_ids), self._rollout.max_new_tokens
        if output.finish_reason == "length" and len(token_ids) < longest:
            raise RuntimeError(
                f"a completion was cut after {len(token_ids)} of {longest} tokens: vLLM has no positions, or "
                "no memory, for longer sequences"
            )
        found = output.logprobs
        drawn = found.start_indices  # at each position the drawn one is first
        if [found.token_ids[at] for at in drawn] != token_ids:
            raise RuntimeError("log-probs of other tokens than were drawn")
        logprobs = [found.logprobs[at] for at in drawn]
        return Completion(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids) if temperature == 0 else logprobs,  # no other choice
            support=self._kept_sets.take(request.request_id, output) if self._kept_sets else None,
            truncated=token_ids[-1] not in self._end_ids,
        )


@contextlib.contextmanager
def _kept_by_the_trainer() -> Iterator[None]:
    """Keep what torch has cached, which vLLM hands back: the next step would ask the driver for it again."""
    libraries: tuple[Any, ...] = torch.cuda, torch.accelerator  # vLLM 0.33 asks the second
    originals = [library.empty_cache for library in libraries]
    for library in libraries:
        library.empty_cache = lambda: None
    try:
        yield
    finally:
        for library, original in zip(libraries, originals, strict=True):
            library.empty_cache = original


def _away_bytes() -> int:
    """Of the memory that vLLM gives away in its sleep, how much is away now."""
    pool: Any = importlib.import_module("vllm.device_allocator.cumem")
    data = pool.CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(one.handle[1] for one in data if one.is_asleep)


def _is_as_in_checkpoints(model: Any) -> bool:
    """Whether vLLM computes, on GPUs, with the very numbers of a checkpoint, some of them joined: those of
    experts are rearranged, MLA's are multiplied, sinks are copied in float32, a quantisation's are others."""
    layers = list(model.modules())
    if any(getattr(impl, "sinks", None) is not None for layer in layers for impl in _attentions(layer)):
        return False
    processing = [layer for layer in layers if hasattr(layer, "process_weights_after_loading")]
    methods = [method for layer in layers if (method := getattr(layer, "quant_method", None)) is not None]
    return {type(one).__name__ for one in (*processing, *methods)} <= PLAIN


def _attentions(layer: Any) -> list[Any]:
    """Return the implementations of a layer's attention: none, or one that may hold others."""
    impl = getattr(layer, "impl", None)
    if impl is None:
        return []
    return [impl, *(impl.get_impl_variants() if hasattr(impl, "get_impl_variants") else ())]


def _constants(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Small tensors that are neither parameters nor buffers, such as ALiBi's slopes and the scales of Gemma
    3n, each with a copy: vLLM brings buffers alone back from its sleep."""
    holders = [one for layer in model.modules() for one in (layer, *_attentions(layer))]
    values = (value for one in holders for name, value in vars(one).items() if name != "kv_cache")
    return [
        (value, value.to("cpu", copy=True))
        for value in values
        if isinstance(value, Tensor) and not value.is_meta and value.nbytes <= CONSTANT_BYTES
    ]


def _load(model: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Into the model's own memory. Raises RuntimeError where some did not come."""
    loaded = model.load_weights(weights)
    missing = {name for name, _ in model.named_parameters()}.difference(loaded or ())
    if missing and loaded is not None:  # None: of some models vLLM does not say
        raise RuntimeError(f"weights were not loaded: {', '.join(sorted(missing))}")


def _counted(
    weights: Iterator[tuple[str, Tensor]], experts: Counter[tuple[str, str]]
) -> Iterator[tuple[str, Tensor]]:
    """Weights, and how many experts there are for each layer and matrix."""
    for name, tensor in weights:
        if found := re.fullmatch(r"(.+\.experts)\.\d+\.(.+)", name):
            experts[found[1], found[2]] += 1
        yield name, tensor


def _check_experts(found: Counter[tuple[str, str]]) -> None:
    """Raises RuntimeError where some layer lacks some matrix of some expert: vLLM goes on without."""
    number = max(found.values(), default=0)
    layers, matrices = {layer for layer, _ in found}, {matrix for _, matrix in found}
    for layer, matrix in itertools.product(sorted(layers), sorted(matrices)):
        if found[layer, matrix] != number:
            raise RuntimeError(f"{layer}: {matrix} of {found[layer, matrix]} experts, and {number} elsewhere")


def _repack(model: Any) -> None:
    """On CPU cores, let what multiplies with packed copies see the new weights.

    `reload_weights` packs anew neither experts nor a head that is the embedding, one parameter with it.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
    head: Any = getattr(model, "lm_head", None)
    if getattr(model.config, "tie_word_embeddings", False) and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)
