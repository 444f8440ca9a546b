"""Training data of a run: the examples of a step as texts and token ids, and their rewards."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from abrun.errors import RecipeError
from abrun.recipe.algorithms import PolicyGradientSettings
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.models import Text
from abrun.trainer.rl.batch import Sequences, collate
from abrun.trainer.rollout import Completion
from abrun.trainer.seeds import derive_seed
from abrun.trainer.tasks import Example, TrainingTask, hold_out, make_task

Texts = Sequence[tuple[str, str]]  # prompts with their completions


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The task of a run, and the tokenizer of its model."""

    task: TrainingTask
    text: Text
    ranks: Ranks
    seed: int
    batch_size: int  # examples in a global batch, or in one fetch of a step
    fetches_per_step: int  # of which each step consists, unless it selects groups and fetches more
    held_out: list[Example]  # validation examples; [] without validation

    def examples(self, step: int, fetch: int = 0) -> list[Example]:
        """Return the examples of one fetch of a step's global batch, in order.

        The fetches of a step continue one stream, so that no prompt repeats before its epoch ends. Fetches
        beyond `fetches_per_step` redraw from another part of the epoch: the stream therefore does not depend
        on how often earlier steps fetched.
        """
        redraw, fetch = divmod(fetch, self.fetches_per_step)
        start = ((step - 1) * self.fetches_per_step + fetch) * self.batch_size
        return self.task.examples(derive_seed(self.seed, "data"), start, self.batch_size, redraw)

    def examples_of_steps(self, steps: range) -> list[Example]:
        """Return the examples of consecutive steps, in order, without redraws."""
        size = self.fetches_per_step * self.batch_size
        return self.task.examples(derive_seed(self.seed, "data"), (steps.start - 1) * size, len(steps) * size)

    def local_examples(self, step: int) -> list[Example]:
        return self.examples(step)[self.ranks.data_slice(self.batch_size)]

    def collate_texts(self, texts: Texts) -> Sequences:
        """Return this rank's prompts and completions as a batch on the CPU."""
        prompts, completions = zip(*texts, strict=True)
        return collate(
            self.text.encode_prompts(prompts),
            self.text.encode_completions(completions),
            pad_id=self.text.pad_id,
        )

    def check_and_move(self, batch: Sequences) -> Sequences:
        """Check a batch from `collate_texts` and move it to the device. Collective.

        Raises RecipeError on all ranks if a sequence is too long for the model, or if no completion has a
        token.
        """
        sizes = self.ranks.all_gather_data([(batch.token_ids.shape[1], int(batch.token_mask.sum()))])
        check_length(self.text, max(length for length, _ in sizes), "task: got an example")
        if not any(num_tokens for _, num_tokens in sizes):
            raise RecipeError(
                "task: got a batch of empty completions, and this model's tokenizer has no end token; remove "
                "empty completions"
            )
        return batch.to(self.ranks.device)

    def encode(self, texts: Texts) -> Sequences:
        """Return this rank's prompts and completions as a batch. Collective; errors: see `check_and_move`."""
        return self.check_and_move(self.collate_texts(texts))

    def rewards(self, examples: list[Example], completions: list[Completion]) -> list[float]:
        """Return the verifier's rewards of this rank's completions. Collective.

        Truncated completions are judged like any other. If a verifier fails on one rank, all ranks raise its
        RecipeError. Otherwise rank 0, which records failures, would wait for the others.
        """
        rewards, failure = [], ""
        try:
            texts = self.text.decode([completion.token_ids for completion in completions])
            for example, text in zip(examples, texts, strict=True):
                rewards.append(self.task.reward(example, text))
        except RecipeError as error:
            failure = str(error)
        if self.ranks.all_reduce_sum_data(bool(failure))[0]:
            raise RecipeError(next(filter(None, self.ranks.all_gather_world(failure))))
        return rewards


class PrefetchedBatches:
    """This rank's batches of texts, step by step.

    The batch of the next step is tokenized in a thread during the current step, so that the GPU does not
    wait.
    """

    def __init__(self, data: Data, texts_of: Callable[[list[Example]], Texts], num_steps: int) -> None:
        self._data, self._texts_of, self._num_steps = data, texts_of, num_steps
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._batches: dict[int, Future[Sequences]] = {}  # of the next step

    def batch(self, step: int) -> Sequences:
        """Return the batch of a step. Collective; errors as in `Data.check_and_move`."""
        batch = self._batches.pop(step, None) or self._prefetch(step)
        checked_batch = self._data.check_and_move(batch.result())
        if step < self._num_steps:
            self._batches = {step + 1: self._prefetch(step + 1)}
        return checked_batch

    def _prefetch(self, step: int) -> Future[Sequences]:
        return self._thread.submit(
            lambda: self._data.collate_texts(self._texts_of(self._data.local_examples(step)))
        )


def check_length(text: Text, longest: int, got: str) -> None:
    """Raise RecipeError if sequences of `longest` tokens exceed the model's positions.

    `got` is the setting or example that requires them; the message starts with it.
    """
    if text.max_positions is not None and longest > text.max_positions:
        raise RecipeError(
            f"{got}, which needs sequences of {longest} tokens; this model allows {text.max_positions}: "
            "shorten them"
        )


def make_data(config: OwnRunConfig, text: Text, ranks: Ranks, seed: int) -> Data:
    """Load the task of a run. Raises RecipeError if its files do not fit the recipe."""
    algorithm = config.algorithm
    if config.validation:
        task, held_out = hold_out(config.task, config.validation)
    else:
        task, held_out = make_task(config.task), []
    return Data(
        task=task,
        text=text,
        ranks=ranks,
        seed=seed,
        batch_size=algorithm.batch_size,
        fetches_per_step=algorithm.fetches_per_step if isinstance(algorithm, PolicyGradientSettings) else 1,
        held_out=held_out,
    )
