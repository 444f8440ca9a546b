"""What every algorithm starts from: the policy on its backend, the task, this rank's share of the batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from abrun.backends import Backend, Critic, Objective
from abrun.backends.critic import DtensorCritic
from abrun.backends.dtensor import DtensorBackend
from abrun.errors import RecipeError
from abrun.models import LanguageModel, load_model
from abrun.recipe import Optimizer, Ppo, RunConfig, not_built
from abrun.rl.batch import Batch, collate
from abrun.rl.metrics import all_reduce, merge
from abrun.rollout import Completion
from abrun.tasks import Example, Task, hold_out, make_task
from abrun.train.phases import Phases
from abrun.train.seeds import derive

T = TypeVar("T")
OF_CRITIC = "critic/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One rank's view of a run."""

    config: RunConfig
    seed: int
    device: torch.device
    initial_weights: Path | None
    model: LanguageModel
    backend: Backend
    task: Task
    validation_examples: list[Example]  # held out of the task's stream; none without a validation
    phases: Phases
    critic: Critic | None = None  # of PPO

    def local_state(self) -> dict[str, Tensor]:
        """This rank's shards of all that is trained, in place: what its checkpoint holds."""
        state = self.backend.local_state()
        if self.critic is not None:
            state |= {f"{OF_CRITIC}{name}": tensor for name, tensor in self.critic.local_state().items()}
        return state

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `local_state` of the same rank of an equal run gave."""
        self.backend.load_local_state(state)
        if self.critic is not None:
            self.critic.load_local_state(
                {
                    name.removeprefix(OF_CRITIC): tensor
                    for name, tensor in state.items()
                    if name.startswith(OF_CRITIC)
                }
            )

    def make_reference(self) -> Backend:
        """A frozen policy with the run's initial weights."""
        model = _load(self.config, self.initial_weights, self.seed)
        return _backend(self.config, model, self.device, trainable=False)

    def global_examples(self, step: int, fetch: int = 0) -> list[Example]:
        """The examples of a step's global batch, in order.

        A step that fetches several times takes the later ones from streams of their own: its first are those
        of a run that fetches once, whatever the steps before it needed.
        """
        size = self.batch_size
        names = ("data", fetch) if fetch else ("data",)
        return self.task.examples(derive(self.seed, *names), (step - 1) * size, size)

    def rewards(self, examples: list[Example], completions: list[Completion]) -> list[float]:
        """The verifier's rewards on this rank; truncated completions are judged like any other. Collective.

        Where a verifier fails on one rank, every rank raises its RecipeError: rank 0, which writes down why a
        run failed, would otherwise wait for the others.
        """
        rewards, failure = [], ""
        try:
            for example, completion in zip(examples, completions, strict=True):
                rewards.append(self.task.reward(example, self.model.decode(completion.token_ids)))
        except RecipeError as error:
            failure = str(error)
        if self.total(bool(failure))[0]:
            failures: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(failures, failure)
            raise RecipeError(next(filter(None, failures)))
        return rewards

    def encoded(self, texts: Sequence[tuple[str, str]]) -> Batch:
        """This rank's prompts and completions as a batch. Collective.

        Raises RecipeError, on every rank, where one is too long for the model.
        """
        prompts = [self.model.encode_prompt(prompt) for prompt, _ in texts]
        completions = [self.model.encode_completion(completion) for _, completion in texts]
        batch = collate(prompts, completions, pad_id=self.model.pad_id).to(self.device)
        check_length(self.model, max(self.gather([batch.token_ids.shape[1]])), "task: got an example")
        return batch

    def share(self, num_rows: int) -> slice:
        """This rank's consecutive rows of `num_rows` of the global batch."""
        count = num_rows // dist.get_world_size()
        return slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)

    @property
    def batch_size(self) -> int:
        """Examples of a global batch."""
        return self.config.algorithm.batch_size

    def train_on(self, batch: Batch, objective: Objective, step: int) -> dict[str, float]:
        """One optimizer step on this rank's `batch`; the metrics of all ranks. Collective."""
        return self.train_on_each([(batch, objective)], step)

    def train_on_each(
        self,
        updates: Sequence[tuple[Batch, Objective]],
        step: int,
        before_each: Callable[[Batch], None] = lambda batch: None,
    ) -> dict[str, float]:
        """An optimizer step for each batch and its objective; the metrics of all ranks. Collective.

        The batches' contributions to the metrics add up as those of microbatches do. The gradient's norm is
        the mean over the optimizer steps.
        """
        learning_rate = learning_rate_at(step, self.config.policy.optimizer)
        parts, norms = [], []
        with self.phases("policy_training", memory=False):
            for batch, objective in updates:
                before_each(batch)
                with self.phases("forward_backward"):
                    parts.append(self.backend.forward_backward(batch, objective))
                with self.phases("optimizer"):
                    norms.append(self.backend.optimizer_step(learning_rate))
        return {
            **all_reduce(merge(parts), self.backend.group),
            "train/grad_norm": sum(norms) / len(norms),
            "train/lr": learning_rate,
        }

    def total(self, *values: float) -> list[float]:
        """Sums over all ranks."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals, group=self.backend.group)
        return totals.tolist()

    def gather(self, values: list[T]) -> list[T]:
        """The values of all ranks, in the order of the ranks."""
        by_rank: list[list[T]] = [[] for _ in range(self.backend.group.size())]
        dist.all_gather_object(by_rank, values, group=self.backend.group)
        return [value for of_rank in by_rank for value in of_rank]


def make_setup(config: RunConfig, seed: int, initial_weights: Path | None, device: torch.device) -> Setup:
    """Load the model and the task of a run.

    Raises RecipeError where they do not fit together, and for what this version has not built.
    """
    for line in not_built(config):
        raise RecipeError(line)
    if config.validation:
        task, validation_examples = hold_out(config.task, config.validation)
    else:
        task, validation_examples = make_task(config.task), []
    model = _load(config, initial_weights, seed)
    backend = _backend(config, model, device, trainable=True)
    critic = None
    if isinstance(config.algorithm, Ppo):
        assert isinstance(backend, DtensorBackend)
        backbone = _load(config, initial_weights, seed) if config.algorithm.value_backbone == "own" else None
        critic = DtensorCritic(backend, config.algorithm, backbone, seed=derive(seed, "value_head"))
    trained = [backend] if critic is None else [backend, critic]
    return Setup(
        config=config,
        seed=seed,
        device=device,
        initial_weights=initial_weights,
        model=model,
        backend=backend,
        task=task,
        validation_examples=validation_examples,
        phases=Phases(device, lambda: [tensor for each in trained for tensor in each.resident_tensors()]),
        critic=critic,
    )


def _load(config: RunConfig, initial_weights: Path | None, seed: int) -> LanguageModel:
    return load_model(config.model, weights=initial_weights, seed=derive(seed, "init"))


def _backend(config: RunConfig, model: LanguageModel, device: torch.device, *, trainable: bool) -> Backend:
    return DtensorBackend(model, config.policy, config.rollout, device, trainable=trainable)


def learning_rate_at(step: int, optimizer: Optimizer) -> float:
    """Linear warm-up to the recipe's learning rate, then constant."""
    return optimizer.learning_rate * min(1.0, step / max(optimizer.warmup_steps, 1))


def check_length(model: LanguageModel, longest: int, got: str) -> None:
    """Raises RecipeError where sequences of `longest` tokens, which `got` asks for, exceed the positions."""
    positions = getattr(model.network.config, "max_position_embeddings", None)
    if isinstance(positions, int) and longest > positions:
        raise RecipeError(
            f"{got}, which makes sequences of {longest} tokens; this model takes {positions}: "
            "make them shorter"
        )
