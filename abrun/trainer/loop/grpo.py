"""One step of GRPO and its family: roll out, score, compute advantages, update the policy.

    RolloutBatch  token_ids, token_mask, inference_logprobs [B, S], rewards [B]             loop/rollouts.py
    ScoredBatch   + old_logprobs, reference_logprobs, importance_weights, loss_weights [B, S]
    TrainBatch    + advantages [B, S], - rewards; by microbatches into PolicyObjective

With several updates a step (epochs, minibatches), the log-probs at the start of the step are computed in a
pass before the first update, so that the importance ratio can differ from 1 and clipping applies. A single
update uses the log-probs of its own forward pass.

A completion truncated at `rollout.max_new_tokens` counts in all metrics and in the loss like any other, with
the verifier's reward for its text; `train/truncation_rate` is their share. With `overlong_filtering` its
tokens are masked, but its reward still counts, including for the baseline of its group.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, filterfalse
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from abrun.errors import LaunchError
from abrun.recipe.algorithms import Grpo, Ppo
from abrun.recipe.run import KeptSamples
from abrun.runs.lines import Sample
from abrun.runs.metric_names import AGAINST_SAMPLER, OVERLONG_PENALTY, REWARD, SIGNAL_SHARE
from abrun.runs.rollouts import RecordedStep
from abrun.trainer.backends.head import EntropyMode
from abrun.trainer.loop.data import Group, check_length, origin_of, record_groups
from abrun.trainer.loop.setup import RunSetup, make_reference
from abrun.trainer.rl.advantages import group_advantages, overlong_penalties, reward_to_go_advantages
from abrun.trainer.rl.batch import (
    RolloutBatch,
    ScoredBatch,
    TrainBatch,
    collate,
    scatter_support,
    scatter_to_completions,
)
from abrun.trainer.rl.losses import (
    PolicyLoss,
    TokenLosses,
    cispo_loss,
    clipped_policy_loss,
    gradient_factor,
    gspo_loss,
    importance_weights,
    kl_penalty,
    loss_weights,
    reinforce_loss,
    weighted_losses,
)
from abrun.trainer.rl.metrics import MetricParts, document_metrics, merge_keys, policy_metrics
from abrun.trainer.rollout import Completion, RolloutEngine
from abrun.trainer.seeds import Draws

# Rollouts of a step: groups of completions, one group a prompt, fetched until the step has enough.
#
# Prompts and token draws are functions of seed, step and row of the step. A resumed run needs
# nothing from earlier steps, and arms with the same seed start each step with the same prompts.
# Groups are counted and selected over all ranks in the order of the global batch, so the number of
# ranks has no effect.

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

            def fetch_groups(fetch: int) -> list[Group]:
                groups = self.fetch(engine, step, fetch)
                if self._records:  # all ranks' groups
                    self._fetched += [(fetch, group) for group in self._setup.ranks.all_gather_data(groups)]
                return groups

            yield fetch_groups

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


Settings = TypeVar("Settings", Grpo, Ppo)
Batch = TypeVar("Batch", bound=TrainBatch)
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The sequences of one optimizer step, and the reduction of the loss over its global batch."""

    rows: slice | Tensor  # selects rows of this rank's batch
    num_tokens: float  # completion tokens of the global minibatch
    num_sequences: float  # sequences with completion tokens in the global minibatch
    reduction: dict[str, Any]  # arguments of loss_weights


# Loss and metrics of a policy gradient on one microbatch; see abrun.trainer.rl for the formulas.

AnyBatch = TypeVar("AnyBatch", ScoredBatch, TrainBatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLosses(TokenLosses):
    """Token losses [...] of a policy objective, with the values for its metrics."""

    batch: TrainBatch  # with old log-probs
    policy_loss: PolicyLoss
    kl_penalty: Tensor | None  # [...]; None: not part of the loss
    reported_shares: Tensor  # [...] float64: `shares` without `gradient_factor`; their sum is train/loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """The policy loss of a recipe, with its KL penalty and entropy bonus, if any.

    See trainer.backends.Objective. Metrics are means over the counts, which cover the global batches of all
    updates in a step. The weight of a token in the loss of its update comes with the batch.
    """

    settings: Grpo | Ppo
    num_tokens: float
    num_sequences: float
    num_updates: int = 1
    gradient_factor: float = 1.0  # scales the gradient of the loss, for the recipe's grad_divisor

    @property
    def entropies(self) -> EntropyMode:
        if self.settings.entropy_coefficient:
            return "gradient"
        return "none" if self.settings.metrics == "none" else "value"

    def losses(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None) -> PolicyLosses:
        batch = self.with_old_logprobs(batch, logprobs)
        policy_loss, penalty = self.policy_loss(batch, logprobs), self.kl_penalty(batch, logprobs)
        losses = policy_loss.loss
        if batch.importance_weights is not None:  # of the policy gradient, not of the terms below
            losses = losses * batch.importance_weights
        if penalty is not None:
            losses = losses + self.settings.kl_coefficient * penalty
        if self.settings.entropy_coefficient:
            assert entropy is not None
            losses = losses - self.settings.entropy_coefficient * entropy

        reported_shares = weighted_losses(losses, batch.loss_weights)
        return PolicyLosses(
            shares=reported_shares * self.gradient_factor,
            reported_shares=reported_shares,
            batch=batch,
            policy_loss=policy_loss,
            kl_penalty=penalty,
        )

    def metrics(
        self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None, losses: PolicyLosses
    ) -> MetricParts:
        batch = losses.batch  # with the old log-probs of this pass
        contribution = MetricParts(sums={}, maxima={}, minima={})
        if self.settings.metrics != "none":
            assert entropy is not None
            tensors = batch, logprobs, entropy, losses.policy_loss
            counts = {"num_tokens": self.num_tokens, "num_sequences": self.num_sequences}
            contribution = policy_metrics(*tensors, **counts)
            if self.settings.metrics == "full":
                contribution = merge_keys(
                    contribution, document_metrics(*tensors, num_documents=self.num_sequences)
                )
        if losses.kl_penalty is not None:
            weights = batch.token_mask.double() / self.num_tokens  # a mean over tokens under any reduction
            contribution.sums["train/kl_penalty"] = weighted_losses(losses.kl_penalty, weights).sum()
        contribution.sums["train/loss"] = losses.reported_shares.sum() / self.num_updates
        return contribution

    def with_old_logprobs(self, batch: TrainBatch, logprobs: Tensor) -> TrainBatch:
        """Return the batch with these log-probs as the old ones, unless an earlier pass has set them."""
        if batch.old_logprobs is not None:
            return batch
        return with_old_logprobs(batch, logprobs.detach(), self.settings)

    def policy_loss(self, batch: TrainBatch, logprobs: Tensor) -> PolicyLoss:
        settings = self.settings
        assert batch.old_logprobs is not None
        old_logprobs = logprobs.detach() if settings.on_policy else batch.old_logprobs
        tensors = logprobs, old_logprobs, batch.advantages, batch.token_mask
        if settings.loss == "reinforce":
            return reinforce_loss(*tensors)
        if settings.loss == "cispo":
            return cispo_loss(*tensors, clip_low=settings.clip_low, clip_high=settings.clip_high)
        clipped = gspo_loss if settings.loss == "gspo" else clipped_policy_loss
        return clipped(
            *tensors,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )

    def kl_penalty(self, batch: TrainBatch, logprobs: Tensor) -> Tensor | None:
        """Return the KL penalty of each token [...]; None if it is not part of the loss."""
        if batch.reference_logprobs is None or self.settings.kl_in != "loss":
            return None
        return kl_penalty(
            logprobs, batch.reference_logprobs, batch.token_mask, estimator=self.settings.kl_estimator
        )


def with_old_logprobs(batch: AnyBatch, old_logprobs: Tensor, settings: Grpo | Ppo) -> AnyBatch:
    """Set old log-probs [...] and, if the recipe has a correction, the resulting importance weights."""
    weights, correction = None, settings.importance_correction
    if correction is not None:
        weights = importance_weights(
            old_logprobs,
            batch.inference_logprobs,
            batch.token_mask,
            correction=correction.type,
            low=correction.low,
            high=correction.high,
        )
    return replace(batch, old_logprobs=old_logprobs, importance_weights=weights)


class PolicyGradient(ABC, Generic[Settings, Batch]):
    """The step shared by the GRPO family and PPO; subclasses compute the advantages."""

    def __init__(self, setup: RunSetup, settings: Settings) -> None:
        self.setup, self._settings = setup, settings
        self.rollouts = Rollouts(setup, settings)
        self.reference = make_reference(setup) if settings.kl_coefficient > 0 else None
        self.recording: RecordedStep | None = None
        self.samples: Sequence[Sample] = []  # some completions of the last step, this rank's

    def step(self, step: int) -> Metrics:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        batch, rollout_metrics = self.rollouts.collect(step)
        self.recording = self.rollouts.recording(step)
        self.samples = []
        if is_due(self.setup.config.keep_samples, step):
            self.samples = collect_samples(self.setup, batch, self._settings.group_size)
        metrics = rollout_metrics | self.update(batch, step)
        recorded = self.setup.recorded_rollouts
        if recorded and not recorded.has_logprobs:
            metrics = {key: value for key, value in metrics.items() if key not in AGAINST_SAMPLER}
        penalty = metrics.get("train/kl_penalty_sum_per_sequence")
        if penalty is None:
            return metrics
        # The reward is the mean over all completions drawn, with or without a KL penalty, because
        # dynamic_sampling selects by it. The KL is known only for the completions that are trained on.
        reward = metrics[REWARD]
        return metrics | {
            REWARD: reward - self._settings.kl_coefficient * penalty,
            "train/reward_before_kl": reward,
        }

    def update(self, batch: RolloutBatch, step: int) -> Metrics:
        """Run the step after its rollouts, on the `batch` of this rank: log-probs, advantages and updates."""
        minibatches = self._minibatches(batch)
        scored = self.score(batch, minibatches)
        train_batch, advantage_metrics = self.advantages(scored)
        num_tokens = sum(minibatch.num_tokens for minibatch in minibatches)
        num_sequences = sum(minibatch.num_sequences for minibatch in minibatches)
        epochs = self._settings.epochs_per_step
        updates = [
            (
                train_batch[minibatch.rows],
                PolicyObjective(
                    settings=self._settings,
                    num_tokens=max(num_tokens, 1.0) * epochs,
                    num_sequences=max(num_sequences, 1.0) * epochs,
                    num_updates=len(minibatches) * epochs,
                    gradient_factor=gradient_factor(self._settings.grad_divisor, **minibatch.reduction),
                ),
            )
            for minibatch in minibatches
        ]
        return self.train(updates * epochs, step) | {
            **advantage_metrics,
            "train/num_valid_samples": num_sequences,
            "train/global_valid_toks": num_tokens,
        }

    def score(self, batch: RolloutBatch, minibatches: list[Minibatch]) -> ScoredBatch:
        """Add loss weights, log-probs of the reference and, if needed, old log-probs of the policy."""
        phases, policy, old, routes, reference = self.setup.phases, self.setup.policy, None, None, None
        if self._needs_old_logprobs:
            with phases("logprobs"):
                if self.setup.config.policy.replay_routing:
                    old, routes = policy.compute_logprobs_and_routes(batch)
                else:
                    old = policy.compute_logprobs(batch)
        if self.reference is not None:
            with phases("reference_logprobs"):
                reference = self.reference.compute_logprobs(batch)

        weights = torch.zeros(batch.token_mask.shape, dtype=torch.float64, device=batch.token_mask.device)
        for minibatch in minibatches:
            weights[minibatch.rows] = loss_weights(batch.token_mask[minibatch.rows], **minibatch.reduction)
        scored = batch.with_fields(
            ScoredBatch,
            old_logprobs=None,
            reference_logprobs=reference,
            importance_weights=None,
            loss_weights=weights,
            routes=routes,
        )
        return scored if old is None else with_old_logprobs(scored, old, self._settings)

    @abstractmethod
    def advantages(self, batch: ScoredBatch) -> tuple[Batch, Metrics]:
        """Return the batch with advantages [B, S], and metrics about them. Collective."""

    def train(self, updates: list[tuple[Batch, PolicyObjective]], step: int) -> Metrics:
        """Run one optimizer step for each update. Collective."""
        return self.setup.learner.update_on_each(updates, step)

    @property
    def _needs_old_logprobs(self) -> bool:
        """True if the log-probs at the start of the step are needed before the forward pass of the update."""
        settings, policy = self._settings, self.setup.config.policy
        correction = settings.importance_correction
        return (
            not settings.on_policy
            or policy.replay_routing
            or (self.reference is not None and settings.kl_in != "loss")
            # one_pass sees single tokens, but sequence_mask needs whole sequences.
            or (policy.logprobs.one_pass and correction is not None and correction.type == "sequence_mask")
        )

    def _minibatches(self, batch: RolloutBatch) -> list[Minibatch]:
        """Split the batch into minibatches; count their tokens and sequences over all ranks. Collective."""
        row_sets = list(_minibatch_rows(batch, self._settings))
        masks = [batch.token_mask[rows] for rows in row_sets]
        counts = [float(count) for mask in masks for count in (mask.sum(), mask.any(dim=1).sum())]
        totals = self.setup.ranks.all_reduce_sum_data(*counts)
        return [
            Minibatch(
                rows=rows,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                reduction={
                    "loss_reduction": self._settings.loss_reduction,
                    "num_tokens": max(num_tokens, 1.0),  # all tokens may have been filtered
                    "num_sequences": max(num_sequences, 1.0),
                    "max_completion_tokens": self.setup.config.rollout.max_new_tokens,
                },
            )
            for rows, num_tokens, num_sequences in zip(row_sets, totals[::2], totals[1::2], strict=True)
        ]

    def _kl_in_reward(self, batch: ScoredBatch) -> tuple[Tensor | None, Metrics]:
        """Return the KL penalty of each token's reward [B, S], or None, and its metrics. Collective.

        The metrics are of the KL before its coefficient: the mean over tokens, as for a KL in the loss, and
        the mean over sequences of their sums.
        """
        settings = self._settings
        if batch.reference_logprobs is None or settings.kl_in == "loss":
            return None, {}
        assert batch.old_logprobs is not None
        penalties = settings.kl_coefficient * kl_penalty(
            batch.old_logprobs, batch.reference_logprobs, batch.token_mask, estimator=settings.kl_estimator
        )
        num_tokens, num_sequences, total = self.setup.ranks.all_reduce_sum_data(
            float(batch.token_mask.sum()),
            len(batch),
            float(penalties.sum(dtype=torch.float64)) / settings.kl_coefficient,
        )
        return penalties, {
            "train/kl_penalty": total / max(num_tokens, 1.0),
            "train/kl_penalty_sum_per_sequence": total / num_sequences,
        }


class GrpoAlgorithm(PolicyGradient[Grpo, TrainBatch]):
    """The GRPO family, for `algorithm: {type: grpo}`: advantages are computed from rewards alone."""

    def advantages(self, batch: ScoredBatch) -> tuple[TrainBatch, Metrics]:
        family = self._settings
        penalties, metrics = self._kl_in_reward(batch)
        rewards = batch.rewards.double()  # float32 would lose a small penalty in a large reward
        if penalties is None:
            penalties = torch.zeros_like(batch.inference_logprobs)
        if family.kl_in == "reward_to_go":
            assert family.advantage_baseline in ("batch_mean", "none")
            advantages = reward_to_go_advantages(
                rewards,
                batch.token_mask,
                penalties,
                baseline=family.advantage_baseline,
                normalize=family.normalize_advantages,
                all_reduce_sum=self.setup.ranks.all_reduce_sum_data,
            ).float()
        else:
            advantages = self._sequence_advantages(rewards - penalties.sum(dim=1, dtype=rewards.dtype))
            advantages = advantages.float()[:, None].expand(batch.token_ids.shape)
        return batch.with_fields(TrainBatch, advantages=advantages), metrics

    def _sequence_advantages(self, rewards: Tensor) -> Tensor:  # [B] -> [B]
        family, batch_rewards = self._settings, None
        if family.advantage_baseline == "batch_mean" or family.normalize_over == "batch":
            batch_rewards = rewards.new_tensor(self.setup.ranks.all_gather_data(rewards.tolist()))
        return group_advantages(
            rewards,
            family.group_size,
            baseline=family.advantage_baseline,
            normalize=family.normalize_advantages,
            normalize_over=family.normalize_over,
            batch_rewards=batch_rewards,
        )


def _minibatch_rows(batch: RolloutBatch, settings: Grpo | Ppo) -> Iterator[slice | Tensor]:
    """Yield the rows of each minibatch; groups are dealt out in turn.

    The result therefore does not depend on how many ranks share the step.
    """
    num_minibatches = settings.minibatches_per_step
    if num_minibatches == 1:
        yield slice(None)
        return
    groups = torch.arange(len(batch), device=batch.token_ids.device) // settings.group_size
    minibatch_index = groups % num_minibatches
    for index in range(num_minibatches):
        rows = (minibatch_index == index).nonzero()[:, 0]
        if len(rows):  # in memory profiles, a step may have fewer sequences
            yield rows


# Sample completions of a step for inspection: prompt, text, reward and log-prob error.

INTERVAL = 10  # steps
MAX_TEXT_LENGTH = 4000  # characters of a recorded text


def is_due(settings: KeptSamples | None, step: int) -> bool:
    """Return True at the first step and at every tenth."""
    return settings is not None and (step == 1 or step % INTERVAL == 0)


def collect_samples(setup: RunSetup, batch: RolloutBatch, group_size: int) -> list[Sample]:
    """Return the first completion of each of the first prompts, before the step's first update. Collective.

    Arms with the same seed start a step with the same prompts, so that their samples can be compared side by
    side. Each rank computes the samples of its own share; those of the first rank are the first of the step.
    The log-probs are computed without torch.compile, which would compile again for so few rows.
    `logprob_error` is therefore as exact as in training, but not bit-identical.
    """
    settings = setup.config.keep_samples
    assert settings is not None
    rows = torch.arange(0, len(batch), group_size, device=batch.token_ids.device)[: settings.prompts]
    chosen = batch[rows]
    with torch.compiler.set_stance("force_eager"):
        logprobs = setup.policy.compute_logprobs(chosen)
    error = (logprobs - chosen.inference_logprobs).abs()
    return [
        _make_sample(setup, *row)
        for row in zip(chosen.token_ids, chosen.token_mask, error, chosen.rewards, strict=True)
        if row[1].any()  # rows without tokens are masked in the loss
    ]


def _make_sample(setup: RunSetup, token_ids: Tensor, mask: Tensor, error: Tensor, reward: Tensor) -> Sample:
    tokens = token_ids[mask].tolist()
    prompt, text = setup.data.text.decode([token_ids[: int(mask.nonzero()[0])].tolist(), tokens])
    return Sample(
        prompt=_shorten(prompt),
        text=_shorten(text),
        reward=float(reward),
        logprob_error=float(error[mask].mean()),
        num_tokens=len(tokens),
        truncated=tokens[-1] not in setup.data.text.end_ids,
    )


def _shorten(text: str) -> str:
    """Keep both ends of a long text: a question or an answer may be at either."""
    half = MAX_TEXT_LENGTH // 2
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[:half]} [...] {text[-half:]}"
