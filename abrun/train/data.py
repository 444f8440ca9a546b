"""What a run trains on: the examples of a step, as texts and as token ids, and what their verifier says."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from abrun.backends.ranks import Ranks
from abrun.errors import RecipeError
from abrun.models import Text
from abrun.recipe.run import OwnRunConfig
from abrun.rl.batch import Sequences, collate
from abrun.rollout import Completion
from abrun.seeds import derive_seed
from abrun.tasks import Example, Task, hold_out, make_task

Texts = Sequence[tuple[str, str]]  # prompts with their completions


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A run's task, and the text that its model reads and writes."""

    task: Task
    text: Text
    ranks: Ranks
    seed: int
    batch_size: int  # examples of a global batch
    held_out: list[Example]  # of the task's stream, for validation; none without one

    def examples(self, step: int, fetch: int = 0) -> list[Example]:
        """The examples of a step's global batch, in order.

        A step that fetches several times takes the later ones from streams of their own: its first are those
        of a run that fetches once, whatever the steps before it needed.
        """
        names = ("data", fetch) if fetch else ("data",)
        return self.task.examples(
            derive_seed(self.seed, *names), (step - 1) * self.batch_size, self.batch_size
        )

    def share_of(self, step: int) -> list[Example]:
        """This rank's examples of a step."""
        return self.examples(step)[self.ranks.data_slice(self.batch_size)]

    def collated(self, texts: Texts) -> Sequences:
        """This rank's prompts and completions, on the CPU."""
        prompts, completions = zip(*texts, strict=True)
        return collate(
            self.text.encode_prompts(prompts),
            self.text.encode_completions(completions),
            pad_id=self.text.pad_id,
        )

    def checked(self, batch: Sequences) -> Sequences:
        """What `collated` gave, on the device. Collective.

        Raises RecipeError, on every rank, where one is too long for the model, or no completion has a token.
        """
        sizes = self.ranks.all_gather_data([(batch.token_ids.shape[1], int(batch.token_mask.sum()))])
        check_length(self.text, max(length for length, _ in sizes), "task: got an example")
        if not any(num_tokens for _, num_tokens in sizes):
            raise RecipeError(
                "task: got a batch of completions without a token, and this model's tokenizer has none that "
                "ends a text: leave empty completions out"
            )
        return batch.to(self.ranks.device)

    def encoded(self, texts: Texts) -> Sequences:
        """This rank's prompts and completions as a batch. Collective; errors as of `checked`."""
        return self.checked(self.collated(texts))

    def rewards(self, examples: list[Example], completions: list[Completion]) -> list[float]:
        """The verifier's rewards on this rank; truncated completions are judged like any other. Collective.

        Where a verifier fails on one rank, every rank raises its RecipeError: rank 0, which writes down why a
        run failed, would otherwise wait for the others.
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


class Ahead:
    """This rank's batches of texts, step by step. The next step's is made beside the present one: a GPU would
    wait for the tokenizer."""

    def __init__(self, data: Data, texts_of: Callable[[list[Example]], Texts], num_steps: int) -> None:
        self._data, self._texts_of, self._num_steps = data, texts_of, num_steps
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._batches: dict[int, Future[Sequences]] = {}  # of the next step

    def batch(self, step: int) -> Sequences:
        """Collective; errors as of `Data.checked`."""
        batch = self._batches.pop(step, None) or self._begun(step)
        checked = self._data.checked(batch.result())
        if step < self._num_steps:
            self._batches = {step + 1: self._begun(step + 1)}
        return checked

    def _begun(self, step: int) -> Future[Sequences]:
        return self._thread.submit(lambda: self._data.collated(self._texts_of(self._data.share_of(step))))


def check_length(text: Text, longest: int, got: str) -> None:
    """Raises RecipeError where sequences of `longest` tokens, which `got` asks for, exceed the positions."""
    if text.max_positions is not None and longest > text.max_positions:
        raise RecipeError(
            f"{got}, which makes sequences of {longest} tokens; this model takes {text.max_positions}: "
            "make them shorter"
        )


def make_data(config: OwnRunConfig, text: Text, ranks: Ranks, seed: int) -> Data:
    """Load a run's task. Raises RecipeError where its files do not fit the recipe."""
    if config.validation:
        task, held_out = hold_out(config.task, config.validation)
    else:
        task, held_out = make_task(config.task), []
    return Data(
        task=task,
        text=text,
        ranks=ranks,
        seed=seed,
        batch_size=config.algorithm.batch_size,
        held_out=held_out,
    )
