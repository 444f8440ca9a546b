"""vLLM as rollout engine: one in the process of every rank, on the device that trains.

It holds a second copy of the weights, whole, which every sync replaces. While the trainer works on a GPU,
vLLM sleeps: its cache and its weights are given away.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from abrun import progress
from abrun.backends import Backend
from abrun.models import Text
from abrun.recipe import OwnRunConfig
from abrun.rollout import Completion
from abrun.rollout.draws import Draws
from abrun.rollout.vllm.starting import Tail, apart, end, failing, start


def make_engine(config: OwnRunConfig, backend: Backend, text: Text) -> "VllmEngine":
    """See abrun.rollout.make_engine. Collective."""
    return VllmEngine(config, backend, text)


class VllmEngine:
    """See abrun.rollout.RolloutEngine. Every rank of a replica samples its part of the replica's rows."""

    def __init__(self, config: OwnRunConfig, backend: Backend, text: Text) -> None:
        self._rollout, self._ranks = config.rollout, backend.ranks
        self._end_ids = sorted(text.end_ids)
        self._tail = Tail()
        self._llm = start(config, self._ranks, self._tail)
        self._is_asleep = False

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        temperature = self._rollout.temperature if temperature is None else temperature
        own = self._ranks.replica_share(len(prompts))
        with apart(self._ranks.device), failing("generate", self._tail):
            completions = self._generate(prompts[own], draws.seeds()[own], temperature)
        return self._ranks.gather_replica(completions)

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of tokens that are given, 0 of each sequence's first: at temperature 1, unfiltered.

        All of a sequence in one pass, as a prompt: not token by token, as it is sampled.
        """
        with apart(self._ranks.device), failing("score", self._tail):
            return self._score(sequences)

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        with apart(self._ranks.device), failing("take the policy's weights", self._tail):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if self._tail.not_loaded:
                raise RuntimeError(self._tail.not_loaded)
            self._llm.apply_model(_repack_tied_head)
            if self._is_asleep:
                self._llm.wake_up(tags=["kv_cache"])
                self._is_asleep = False
            # Keys and values of the weights before must not be found again.
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("its prefix cache is in use")

    def sleep(self) -> None:
        if self._ranks.device.type == "cuda":
            with apart(self._ranks.device), failing("sleep", self._tail):
                self._llm.sleep(level=2)
            self._is_asleep = True

    def wake(self) -> bool:
        """Room for the weights first: that for the cache is taken once the trainer's copies are gone."""
        if self._is_asleep:
            with apart(self._ranks.device), failing("wake", self._tail):
                torch.cuda.empty_cache()
                self._llm.wake_up(tags=["weights"])
        return self._is_asleep

    def close(self) -> None:
        # After an error the run ends anyway, and that one is to be heard.
        heard = contextlib.suppress(Exception) if self._tail.has_failed else failing("end", self._tail)
        with apart(self._ranks.device), heard:
            end(self._llm)

    def _generate(self, prompts: list[list[int]], seeds: list[int], temperature: float) -> list[Completion]:
        engine = self._llm.llm_engine
        for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            engine.add_request(str(row), {"prompt_token_ids": prompt}, self._parameters(seed, temperature))
        completions: dict[int, Completion] = {}
        while engine.has_unfinished_requests():
            progress.beat()
            for output in engine.step():
                if output.finished:
                    completions[int(output.request_id)] = self._completion(output.outputs[0], temperature)
        return [completions[row] for row in range(len(prompts))]

    def _score(self, sequences: list[list[int]]) -> list[list[float]]:
        library: Any = importlib.import_module("vllm.sampling_params")
        engine, scored = self._llm.llm_engine, {}
        parameters = library.SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,  # the given tokens' own
            detokenize=False,
            output_kind=library.RequestOutputKind.FINAL_ONLY,
        )
        for row, token_ids in enumerate(sequences):
            engine.add_request(str(row), {"prompt_token_ids": token_ids}, parameters)
        while engine.has_unfinished_requests():
            progress.beat()
            for output in engine.step():
                if output.finished:
                    scored[int(output.request_id)] = output.prompt_logprobs
        return [
            [0.0, *(of_token[token].logprob for token, of_token in zip(tokens[1:], found[1:], strict=True))]
            for tokens, found in ((tokens, list(scored[row])) for row, tokens in enumerate(sequences))
        ]

    def _parameters(self, seed: int, temperature: float) -> Any:
        library: Any = importlib.import_module("vllm.sampling_params")
        return library.SamplingParams(
            seed=seed,
            temperature=temperature,
            min_p=self._rollout.min_p,
            top_k=self._rollout.top_k or 0,  # 0: all
            top_p=self._rollout.top_p,
            max_tokens=self._rollout.max_new_tokens,
            stop_token_ids=self._end_ids,
            ignore_eos=True,  # which is one of those, or does not end a completion
            logprobs=0,  # the drawn token's
            detokenize=False,
            output_kind=library.RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, output: Any, temperature: float) -> Completion:
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"a completion ended by {output.finish_reason!r}")
        token_ids = list(output.token_ids)
        logprobs = [
            of_token[token].logprob for token, of_token in zip(token_ids, output.logprobs, strict=True)
        ]
        return Completion(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids) if temperature == 0 else logprobs,  # no other choice
            truncated=token_ids[-1] not in self._end_ids,
        )


def _repack_tied_head(model: Any) -> None:
    """On CPU cores, let a head that is the embedding see its new weights.

    It multiplies with a packed copy, which `reload_weights` does not make anew where head and embedding are
    one parameter.
    """
    head: Any = getattr(model, "lm_head", None)
    if getattr(model.config, "tie_word_embeddings", False) and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)
