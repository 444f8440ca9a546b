"""One step of direct preference optimisation, on the task's pairs of completions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from abrun.backends.head import Entropies
from abrun.recipe.algorithms import Dpo
from abrun.rl.batch import Pairs, Sequences
from abrun.rl.dpo import PreferenceLoss, dpo_loss, preference_metrics, spread_over_tokens
from abrun.rl.losses import TokenLosses, weighted
from abrun.rl.metrics import MetricParts, merge_keys
from abrun.runs.samples import Sample
from abrun.tasks import Example
from abrun.train.data import Ahead, Texts
from abrun.train.setup import Setup, make_reference
from abrun.train.validation import Evaluation


class DpoAlgorithm:
    """The algorithm of a recipe with `algorithm: {type: dpo}`; the reference is the run's initial policy."""

    samples: Sequence[Sample] = ()  # it draws none

    def __init__(self, setup: Setup, settings: Dpo) -> None:
        self._setup, self._settings = setup, settings
        self.reference = make_reference(setup)
        self._batches = Ahead(setup.data, _texts, setup.config.steps)

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        return self.update(replace(self._batches.batch(step), rows_per_sample=2), step)

    def update(self, batch: Sequences, step: int) -> dict[str, float]:
        """Reference log-probs and gradients of this rank's `batch`, whose rows alternate, and one update."""
        with self._setup.phases("reference_logprobs"):
            pairs = self._with_reference(batch)
        objective = self._objective(pairs)
        return self._setup.learner.update(pairs, objective, step) | {
            "train/num_valid_samples": objective.num_pairs,
            "train/global_valid_toks": objective.num_tokens,
        }

    def evaluate(self, examples: list[Example], step: int) -> Evaluation:
        """The loss on these pairs, and the share of them that the policy orders right. Collective.

        A pair's reward is its margin: 0 before the first update, which is not right.
        """
        ranks = self._setup.ranks
        batch = self._setup.data.encoded(_texts(examples[ranks.data_slice(len(examples))]))
        pairs = self._with_reference(replace(batch, rows_per_sample=2))
        logprobs, objective = self._setup.policy.logprobs(pairs), self._objective(pairs)
        (loss,) = ranks.all_reduce_sum_data(float(objective.losses(pairs, logprobs, None).shares.sum()))
        margins = ranks.all_gather_data(objective.preference_loss(pairs, logprobs).margins.tolist())
        lengths = ranks.all_gather_data(pairs.token_mask[::2].sum(dim=1).tolist())
        accuracy = sum(margin > 0 for margin in margins) / len(margins)
        metrics = {"validation/loss": loss, "validation/accuracy": accuracy}
        return Evaluation(rewards=margins, lengths=lengths, metrics=metrics)

    def _with_reference(self, batch: Sequences) -> Pairs:
        return batch.with_fields(Pairs, reference_logprobs=self.reference.logprobs(batch))

    def _objective(self, batch: Pairs) -> "PreferenceObjective":
        """Of the global batch that this rank's `batch` is a part of. Collective."""
        counts = len(batch) / 2, float(batch.token_mask.sum()), float(batch.token_mask[::2].sum())
        num_pairs, num_tokens, num_chosen_tokens = self._setup.ranks.all_reduce_sum_data(*counts)
        return PreferenceObjective(
            settings=self._settings,
            num_pairs=num_pairs,
            num_tokens=num_tokens,
            num_chosen_tokens=max(num_chosen_tokens, 1.0),  # they may be empty
        )


def _texts(examples: list[Example]) -> Texts:
    return [(one.prompt, text) for one in examples for text in (one.completion, one.rejected)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLosses(TokenLosses):
    """The loss of tokens [B, S], computed once, and that of their pairs."""

    preference: PreferenceLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceObjective:
    """DPO, with minus the mean log-prob of the chosen tokens where the recipe has it.

    See abrun.backends.Objective. The counts are of the global batch.
    """

    settings: Dpo
    num_pairs: float
    num_tokens: float  # of both completions
    num_chosen_tokens: float

    @property
    def entropies(self) -> Entropies:
        return "none"

    def losses(self, batch: Pairs, logprobs: Tensor, entropy: Tensor | None) -> PreferenceLosses:
        preference = self.preference_loss(batch, logprobs)
        shares = spread_over_tokens(preference.loss / self.num_pairs, batch.token_mask)
        if self.settings.sft_coefficient:
            chosen = batch.token_mask.clone()
            chosen[1::2] = False
            weights = chosen.double() * self.settings.sft_coefficient / self.num_chosen_tokens
            shares = shares + weighted(-logprobs, weights)
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
