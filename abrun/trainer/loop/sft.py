"""One step of supervised fine-tuning: imitate the task's reference completions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from abrun.runs.lines import Sample
from abrun.runs.rollouts import RecordedStep
from abrun.trainer.backends.head import EntropyMode
from abrun.trainer.loop.data import PrefetchedBatches, Texts
from abrun.trainer.loop.setup import RunSetup
from abrun.trainer.loop.validation import Evaluation
from abrun.trainer.rl.batch import Sequences
from abrun.trainer.rl.losses import TokenLosses, weighted_losses
from abrun.trainer.rl.metrics import MetricParts
from abrun.trainer.tasks import Example


class SftAlgorithm:
    """Supervised fine-tuning, for `algorithm: {type: sft}`."""

    recording: RecordedStep | None = None
    samples: Sequence[Sample] = ()

    def __init__(self, setup: RunSetup) -> None:
        self._setup = setup
        self._batches = PrefetchedBatches(setup.data, _to_texts, setup.config.steps)

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        return self.update(self._batches.batch(step), step)

    def update(self, batch: Sequences, step: int) -> dict[str, float]:
        """Compute the gradients of this rank's `batch` and run one optimizer step."""
        num_tokens, num_sequences = self._setup.ranks.all_reduce_sum_data(
            float(batch.token_mask.sum()), len(batch)
        )
        objective = SupervisedObjective(num_tokens=num_tokens)
        return self._setup.learner.update_on_each([(batch, objective)], step) | {
            "train/num_valid_samples": num_sequences,
            "train/global_valid_toks": num_tokens,
        }

    def evaluate(self, examples: list[Example], step: int) -> Evaluation:
        """Return the loss on these examples; the reward of a prompt is minus its loss. Collective."""
        ranks = self._setup.ranks
        batch = self._setup.data.encode(_to_texts(examples[ranks.data_slice(len(examples))]))
        logprobs = self._setup.policy.compute_logprobs(batch).double()  # 0 outside of the mask
        lengths = ranks.all_gather_data(batch.token_mask.sum(dim=1).tolist())
        sums = ranks.all_gather_data(logprobs.sum(dim=1).tolist())
        return Evaluation(
            rewards=[total / max(length, 1) for total, length in zip(sums, lengths, strict=True)],
            lengths=lengths,
            metrics={"validation/loss": -math.fsum(sums) / sum(lengths)},
        )


def _to_texts(examples: list[Example]) -> Texts:
    return [(example.prompt, example.completion) for example in examples]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedObjective:
    """Minus the mean log-prob of the completion tokens; see abrun.trainer.backends.Objective."""

    num_tokens: float  # of the global batch

    @property
    def entropies(self) -> EntropyMode:
        return "none"

    def losses(self, batch: Sequences, logprobs: Tensor, entropy: Tensor | None) -> TokenLosses:
        return TokenLosses(shares=weighted_losses(-logprobs, batch.token_mask.double() / self.num_tokens))

    def metrics(
        self, batch: Sequences, logprobs: Tensor, entropy: Tensor | None, losses: TokenLosses
    ) -> MetricParts:
        return MetricParts(sums={"train/loss": losses.shares.sum()}, maxima={}, minima={})
