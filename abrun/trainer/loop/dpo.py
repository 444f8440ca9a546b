"""One step of direct preference optimisation, on the task's pairs of completions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from abrun.recipe.algorithms import Dpo
from abrun.runs.lines import Sample
from abrun.runs.rollouts import RecordedStep
from abrun.trainer.backends.head import EntropyMode
from abrun.trainer.loop.data import PrefetchedBatches, Texts
from abrun.trainer.loop.setup import RunSetup, make_reference
from abrun.trainer.loop.validation import Evaluation
from abrun.trainer.rl.batch import Pairs, Sequences
from abrun.trainer.rl.losses import PreferenceLoss, TokenLosses, dpo_loss, spread_over_tokens, weighted_losses
from abrun.trainer.rl.metrics import MetricParts, merge_keys, preference_metrics
from abrun.trainer.tasks import Example


class DpoAlgorithm:
    """DPO, for `algorithm: {type: dpo}`; the reference is the initial policy of the run."""

    recording: RecordedStep | None = None
    samples: Sequence[Sample] = ()

    def __init__(self, setup: RunSetup, settings: Dpo) -> None:
        self._setup, self._settings = setup, settings
        self.reference = make_reference(setup)
        self._batches = PrefetchedBatches(setup.data, _to_texts, setup.config.steps)

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        return self.update(replace(self._batches.batch(step), rows_per_sample=2), step)

    def update(self, batch: Sequences, step: int) -> dict[str, float]:
        """Compute reference log-probs and gradients of this rank's `batch` of pairs; update the policy."""
        with self._setup.phases("reference_logprobs"):
            pairs = self._with_reference(batch)
        objective = self._objective(pairs)
        return self._setup.learner.update_on_each([(pairs, objective)], step) | {
            "train/num_valid_samples": objective.num_pairs,
            "train/global_valid_toks": objective.num_tokens,
        }

    def evaluate(self, examples: list[Example], step: int) -> Evaluation:
        """Return the loss on these pairs and the share that the policy ranks correctly. Collective.

        The reward of a pair is its margin. Before the first update it is 0, which counts as incorrect.
        """
        ranks = self._setup.ranks
        batch = self._setup.data.encode(_to_texts(examples[ranks.data_slice(len(examples))]))
        pairs = self._with_reference(replace(batch, rows_per_sample=2))
        logprobs, objective = self._setup.policy.compute_logprobs(pairs), self._objective(pairs)
        (loss,) = ranks.all_reduce_sum_data(float(objective.losses(pairs, logprobs, None).shares.sum()))
        margins = ranks.all_gather_data(objective.preference_loss(pairs, logprobs).margins.tolist())
        lengths = ranks.all_gather_data(pairs.token_mask[::2].sum(dim=1).tolist())
        accuracy = sum(margin > 0 for margin in margins) / len(margins)
        metrics = {"validation/loss": loss, "validation/accuracy": accuracy}
        return Evaluation(rewards=margins, lengths=lengths, metrics=metrics)

    def _with_reference(self, batch: Sequences) -> Pairs:
        return batch.with_fields(Pairs, reference_logprobs=self.reference.compute_logprobs(batch))

    def _objective(self, batch: Pairs) -> "PreferenceObjective":
        """Return the objective with the counts of the global batch. Collective."""
        counts = len(batch) / 2, float(batch.token_mask.sum()), float(batch.token_mask[::2].sum())
        num_pairs, num_tokens, num_chosen_tokens = self._setup.ranks.all_reduce_sum_data(*counts)
        return PreferenceObjective(
            settings=self._settings,
            num_pairs=num_pairs,
            num_tokens=num_tokens,
            num_chosen_tokens=max(num_chosen_tokens, 1.0),  # all chosen completions may be empty
        )


def _to_texts(examples: list[Example]) -> Texts:
    return [(example.prompt, text) for example in examples for text in (example.completion, example.rejected)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLosses(TokenLosses):
    """Token losses [B, S] and the loss of their pairs."""

    preference: PreferenceLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceObjective:
    """The DPO loss, optionally with an SFT term: minus the mean log-prob of the chosen tokens.

    See abrun.trainer.backends.Objective. The counts are of the global batch.
    """

    settings: Dpo
    num_pairs: float
    num_tokens: float  # of both completions
    num_chosen_tokens: float

    @property
    def entropies(self) -> EntropyMode:
        return "none"

    def losses(self, batch: Pairs, logprobs: Tensor, entropy: Tensor | None) -> PreferenceLosses:
        preference = self.preference_loss(batch, logprobs)
        shares = spread_over_tokens(preference.loss / self.num_pairs, batch.token_mask)
        if self.settings.sft_coefficient:
            chosen = batch.token_mask.clone()
            chosen[1::2] = False
            weights = chosen.double() * self.settings.sft_coefficient / self.num_chosen_tokens
            shares = shares + weighted_losses(-logprobs, weights)
        return PreferenceLosses(shares=shares, preference=preference)

    def metrics(
        self, batch: Pairs, logprobs: Tensor, entropy: Tensor | None, losses: PreferenceLosses
    ) -> MetricParts:
        loss = MetricParts(sums={"train/loss": losses.shares.sum()}, maxima={}, minima={})
        return merge_keys(loss, preference_metrics(losses.preference, num_pairs=self.num_pairs))

    def preference_loss(self, batch: Pairs, logprobs: Tensor) -> PreferenceLoss:
        return dpo_loss(
            logprobs,
            batch.reference_logprobs,
            batch.token_mask,
            beta=self.settings.beta,
            logprob_reduction=self.settings.logprob_reduction,
        )
