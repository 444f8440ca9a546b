"""Rollouts of a step: groups of completions, one group a prompt, fetched until the step has enough.

Prompts and token draws are functions of seed, step and row of the step. A resumed run needs nothing from
earlier steps, and arms with the same seed start each step with the same prompts. Groups are counted and
selected over all ranks in the order of the global batch, so the number of ranks has no effect.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, filterfalse

import torch
from torch import Tensor

from abrun.errors import LaunchError
from abrun.recipe.algorithms import Grpo, Ppo
from abrun.runs.metric_names import OVERLONG_PENALTY, SIGNAL_SHARE
from abrun.runs.rollouts import RecordedStep
from abrun.trainer.loop.data import Group, check_length, origin_of, record_groups
from abrun.trainer.loop.setup import RunSetup
from abrun.trainer.rl.advantages import overlong_penalties
from abrun.trainer.rl.batch import RolloutBatch, collate, scatter_support, scatter_to_completions
from abrun.trainer.rollout import Completion, RolloutEngine
from abrun.trainer.seeds import Draws

FetchGroups = Callable[[int], list[Group]]  # this rank's groups of a fetch


class Rollouts:
    """Samples the completions of a step and computes their rewards, or reads what another run recorded."""

    def __init__(self, setup: RunSetup, settings: Grpo | Ppo) -> None:
        self._setup, self._settings = setup, settings
        # A step trains on all groups of its fetches; with dynamic_sampling, on `_num_groups` of them.
        self._num_groups, self._num_fetches = settings.groups_per_step, settings.fetches_per_step
        self._records = setup.config.records_rollouts
        self._fetched: list[tuple[int, Group]] = []  # all ranks' groups of the step, with their fetches

    def collect(self, step: int) -> tuple[RolloutBatch, dict[str, float]]:
        """Return this rank's sequences of a step, with rewards, and metrics of all drawn completions.

        Collective.
        """
        self._fetched = []
        with self._open(step) as fetch_groups:
            if isinstance(self._settings, Grpo) and self._settings.dynamic_sampling:
                return self._collect_with_signal(fetch_groups, self._settings.dynamic_sampling.max_tries)
            groups = [group for fetch in range(self._num_fetches) for group in fetch_groups(fetch)]
            return self._make_batch(groups), self._compute_metrics(groups)

    def recording(self, step: int) -> RecordedStep | None:
        """Return all groups of the step that was just collected, if the run records them."""
        if not self._records:
            return None
        setup = self._setup
        return record_groups(step, self._fetched, origin_of(setup.config, setup.data.text, setup.seed))

    @contextlib.contextmanager
    def _open(self, step: int) -> Iterator[FetchGroups]:
        """Yield the source of the step's groups: the engine, or the recording."""
        recorded = self._setup.recorded_rollouts
        if recorded is not None:
            num_groups, size = self._settings.prompts_per_step, self._settings.group_size
            local = self._setup.ranks.data_slice(num_groups)
            yield lambda fetch: recorded.groups(step, fetch, num_groups, size)[local]
            return
        with self._setup.sampler.awake() as engine:
            yield lambda fetch: self._keep(fetch, self.fetch(engine, step, fetch))

    def _keep(self, fetch: int, groups: list[Group]) -> list[Group]:
        """Keep the groups of all ranks for the recording. Collective."""
        if self._records:
            self._fetched += [(fetch, group) for group in self._setup.ranks.all_gather_data(groups)]
        return groups

    def _collect_with_signal(
        self, fetch_groups: FetchGroups, max_tries: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Fetch until there are enough groups with signal; after the last try, add groups without signal."""
        ranks, local_groups = self._setup.ranks, []
        with_signal: list[Group] = []
        without_signal: list[Group] = []
        num_fetches = 0
        while len(with_signal) < self._num_groups and num_fetches < self._num_fetches * max_tries:
            fetched = fetch_groups(num_fetches)
            local_groups += fetched
            for group in ranks.all_gather_data(fetched):
                (with_signal if group.has_signal else without_signal).append(group)
            num_fetches += 1
        chosen = [*with_signal, *without_signal][: self._num_groups]
        return self._make_batch(chosen[ranks.data_slice(self._num_groups)]), self._compute_metrics(
            local_groups
        ) | {
            "train/dynamic_sampling_kept_share": len(with_signal) / (len(with_signal) + len(without_signal)),
            "train/dynamic_sampling_tries": num_fetches / self._num_fetches,
        }

    def fetch(self, engine: RolloutEngine, step: int, fetch: int) -> list[Group]:
        """Sample this rank's share of one fetch, which has prompts_per_step prompts."""
        setup, size, rollout = self._setup, self._settings.group_size, self._setup.config.rollout
        examples = setup.data.examples(step, fetch)
        num_rows = len(examples) * size
        rows = range(fetch * num_rows, (fetch + 1) * num_rows)[setup.ranks.data_slice(num_rows)]
        draws = Draws(seed=setup.seed, stream="sampling", step=step, rows=rows)
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

    def _make_batch(self, groups: list[Group]) -> RolloutBatch:
        completions = [completion for group in groups for completion in group.completions]
        sequences = collate(
            [group.prompt for group in groups for _ in group.completions],
            [completion.token_ids for completion in completions],
            pad_id=self._setup.data.text.pad_id,
        )
        batch = sequences.with_fields(
            RolloutBatch,
            inference_logprobs=scatter_to_completions(
                [sampled.logprobs for sampled in completions], sequences.token_mask
            ),
            rewards=torch.tensor([reward for group in groups for reward in group.rewards])
            - self._overlong_penalties(completions),
        )
        supports = [sampled.support for sampled in completions if sampled.support is not None]
        if supports:
            batch = replace(batch, support=scatter_support(supports, sequences.token_mask))
        if self._settings.overlong_filtering:
            is_complete = torch.tensor([not completion.truncated for completion in completions])
            batch = replace(batch, token_mask=batch.token_mask & is_complete[:, None])
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

    def _compute_metrics(self, groups: list[Group]) -> dict[str, float]:
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
    """Raise LaunchError if a log-prob is not finite."""
    for logprob in filterfalse(
        math.isfinite, chain.from_iterable(completion.logprobs for completion in completions)
    ):
        raise LaunchError(
            f"policy: got a log-prob of {logprob} at step {step}: the weights have diverged; use a lower "
            "policy.optimizer.learning_rate"
        )
