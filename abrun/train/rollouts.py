"""The rollouts of a step: groups of completions, one a prompt, fetched until the step has enough of them.

Which prompts are drawn, and every draw of a token, are functions of seed, step and fetch: a resumed run needs
nothing of the steps before, and arms of one seed begin every step with the same prompts. Groups are counted
and chosen over all ranks, in the order of the global batch: how many ranks there are changes nothing.
"""

import math
from dataclasses import dataclass, replace
from itertools import chain, filterfalse

import torch
from torch import Tensor

from abrun.errors import LaunchError
from abrun.metric_names import OVERLONG_PENALTY, SIGNAL_SHARE
from abrun.recipe.algorithms import Grpo, Ppo
from abrun.rl.advantages import overlong_penalties
from abrun.rl.batch import RolloutBatch, collate, scatter_support, scatter_to_completions
from abrun.rollout import Completion, RolloutEngine
from abrun.rollout.draws import Draws
from abrun.train.data import check_length
from abrun.train.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The completions of one prompt."""

    prompt: list[int]
    completions: list[Completion]
    rewards: list[float]

    @property
    def has_signal(self) -> bool:
        """Whether its rewards differ, so that advantages relative to their mean are not all 0."""
        return any(reward != self.rewards[0] for reward in self.rewards)


class Rollouts:
    """Samples and judges what a step trains on."""

    def __init__(self, setup: Setup, settings: Grpo | Ppo) -> None:
        self._setup, self._settings = setup, settings
        # Whole fetches; only groups chosen for their signal are cut to a number.
        documents = self._settings.documents_per_step
        self._target = (
            math.ceil(documents / self._settings.group_size) if documents else self._settings.prompts_per_step
        )
        self._num_fetches = math.ceil(self._target / self._settings.prompts_per_step)

    def collect(self, step: int) -> tuple[RolloutBatch, dict[str, float]]:
        """This rank's sequences of a step, with rewards, and metrics of all that was drawn. Collective."""
        with self._setup.sampler.awake() as engine:
            if isinstance(self._settings, Grpo) and self._settings.dynamic_sampling:
                return self._collect_with_signal(engine, step, self._settings.dynamic_sampling.max_tries)
            fetches = range(self._num_fetches)
            groups = [group for fetch in fetches for group in self.fetch(engine, step, fetch)]
            return self._batch(groups), self._metrics(groups)

    def _collect_with_signal(
        self, engine: RolloutEngine, step: int, max_tries: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Groups with signal, as drawn; after the last try, those without fill up what is missing."""
        ranks, mine = self._setup.ranks, []
        kept: list[Group] = []
        left_out: list[Group] = []
        num_fetches = 0
        while len(kept) < self._target and num_fetches < self._num_fetches * max_tries:
            fetched = self.fetch(engine, step, num_fetches)
            mine += fetched
            for group in ranks.all_gather_data(fetched):
                (kept if group.has_signal else left_out).append(group)
            num_fetches += 1
        chosen = [*kept, *left_out][: self._target]
        return self._batch(chosen[ranks.data_slice(self._target)]), self._metrics(mine) | {
            "train/dynamic_sampling_kept_share": len(kept) / (len(kept) + len(left_out)),
            "train/dynamic_sampling_tries": num_fetches / self._num_fetches,
        }

    def fetch(self, engine: RolloutEngine, step: int, fetch: int) -> list[Group]:
        """This rank's share of one draw of prompts_per_step prompts."""
        setup, size, rollout = self._setup, self._settings.group_size, self._setup.config.rollout
        examples = setup.data.examples(step, fetch)
        rows = range(len(examples) * size)[setup.ranks.data_slice(len(examples) * size)]
        draws = Draws(seed=setup.seed, stream="sampling", step=step, fetch=fetch, rows=rows)
        examples = examples[setup.ranks.data_slice(len(examples))]
        prompts = setup.data.text.encode_prompts([example.prompt for example in examples])
        longest = max(map(len, prompts)) + rollout.max_new_tokens
        check_length(setup.data.text, longest, f"rollout.max_new_tokens: got {rollout.max_new_tokens}")
        with setup.phases("generation"):
            completions = engine.generate([prompt for prompt in prompts for _ in range(size)], draws)
        _check_finite(completions, step)
        with setup.phases("reward", memory=False):
            rewards = setup.data.rewards([example for example in examples for _ in range(size)], completions)
        return [
            Group(
                prompt=prompt,
                completions=completions[start : start + size],
                rewards=rewards[start : start + size],
            )
            for prompt, start in zip(prompts, range(0, len(completions), size), strict=True)
        ]

    def _batch(self, groups: list[Group]) -> RolloutBatch:
        completions = [completion for group in groups for completion in group.completions]
        sequences = collate(
            [group.prompt for group in groups for _ in group.completions],
            [completion.token_ids for completion in completions],
            pad_id=self._setup.data.text.pad_id,
        )
        batch = sequences.with_fields(
            RolloutBatch,
            inference_logprobs=scatter_to_completions(
                [one.logprobs for one in completions], sequences.token_mask
            ),
            rewards=torch.tensor([reward for group in groups for reward in group.rewards])
            - self._overlong_penalties(completions),
        )
        kept = [one.support for one in completions if one.support is not None]
        if kept:
            batch = replace(batch, support=scatter_support(kept, sequences.token_mask))
        if self._settings.overlong_filtering:
            whole = torch.tensor([not completion.truncated for completion in completions])
            batch = replace(batch, token_mask=batch.token_mask & whole[:, None])
        return batch.to(self._setup.ranks.device)

    def _overlong_penalties(self, completions: list[Completion]) -> Tensor:  # [B]
        lengths = torch.tensor([len(completion.token_ids) for completion in completions])
        punishment = self._settings.overlong_punishment
        if punishment is None:
            return torch.zeros(len(lengths))
        return overlong_penalties(
            lengths,
            max_new_tokens=self._setup.config.rollout.max_new_tokens,
            buffer=punishment.buffer,
            factor=punishment.factor,
        ).float()

    def _metrics(self, groups: list[Group]) -> dict[str, float]:
        completions = [completion for group in groups for completion in group.completions]
        totals = self._setup.ranks.all_reduce_sum_data(
            len(completions),
            sum(sum(group.rewards) for group in groups),
            sum(len(completion.token_ids) for completion in completions),
            sum(completion.truncated for completion in completions),
            sum(len(group.prompt) * len(group.completions) for group in groups),
            sum(len(group.completions) for group in groups if group.has_signal),
            float(self._overlong_penalties(completions).sum(dtype=torch.float64)),
        )
        keys = (
            "reward",
            "mean_gen_tokens_per_sample",
            "truncation_rate",
            "mean_prompt_length",
            "signal_share",
            "overlong_penalty",
        )
        shares = {f"train/{key}": total / totals[0] for key, total in zip(keys, totals[1:], strict=True)}
        if isinstance(self._settings, Ppo):  # its advantages are not relative to a group
            del shares[SIGNAL_SHARE]
        if self._settings.overlong_punishment is None:
            del shares[OVERLONG_PENALTY]
        return shares


def _check_finite(completions: list[Completion], step: int) -> None:
    """Raises LaunchError where an engine has drawn from what is no distribution."""
    for logprob in filterfalse(math.isfinite, chain.from_iterable(one.logprobs for one in completions)):
        raise LaunchError(
            f"policy: got a log-prob of {logprob} at step {step}, so its weights have diverged; use "
            "a lower policy.optimizer.learning_rate"
        )
