"""Observation of one training step: activations, gradients and updates, as each rank sees them.

Nothing is replaced: hooks on modules see the states of forward passes, and torch's hooks on optimizers see
gradients and weights. The loss is evaluated once more, on the baseline's inputs (`loss_inputs`). Modules,
gradients and updates are kept up to the first optimizer step. Of later ones only what surrounds the network
is kept: data, log-probs and losses, named `NAME@2` and so on.

Letters: b sequences and s positions of a micro-batch, n tokens that are kept, F features.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from abrun.runs.captures import MANTISSA_BITS
from abrun.trainer.backends import Backend, Objective, TracedModule, Trainable
from abrun.trainer.backends.head import EntropyMode
from abrun.trainer.backends.microbatches import Microbatch, Microbatches
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.backends.shards import ShardSpec
from abrun.trainer.loop.grpo import PolicyObjective
from abrun.trainer.loop.setup import VALUE_MODEL_PREFIX, RunSetup
from abrun.trainer.rl.batch import Sequences, sequence_lengths
from abrun.trainer.rl.metrics import MetricParts
from abrun.trainer.seeds import derive_seed

MOMENT = "optimizer/exp_avg/"  # the optimizer's state that tells which parameter a shard belongs to
# Fields of a batch that do not depend on the policy; all others are derived from its log-probs
# The mask comes first, because the captured tokens of the others end with it
DATA_FIELDS = ("token_mask", "token_ids", "inference_logprobs")
LOGPROBS, ENTROPY, LOSS = "lm_head.logprobs", "lm_head.entropy", "loss"
# Fields of a batch that the loss reads and rounding changes
INPUT_FIELDS = ("old_logprobs", "reference_logprobs", "advantages")
INPUTS = (LOGPROBS, ENTROPY, *(f"batch.{name}" for name in INPUT_FIELDS))
GRAD_NORM, LEARNING_RATE = "optimizer.grad_norm", "optimizer.learning_rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbered(Sequences):
    """A batch whose rows are known by their numbers in the global batch."""

    row: Tensor  # [B] int64


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """Record of a step as this rank has seen it."""

    # [n, 2] of each micro-batch, row and position, by optimizer step
    tokens: dict[int, list[Tensor]] = field(default_factory=dict)
    # [n, F] of each micro-batch, by optimizer step and name
    activations: dict[tuple[int, str], list[Tensor]] = field(default_factory=dict)
    loss_gradients: dict[tuple[int, str], list[Tensor]] = field(default_factory=dict)
    shards: dict[str, Tensor] = field(default_factory=dict)  # this rank's gradients and updates
    specs: dict[str, ShardSpec] = field(default_factory=dict)
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    step_time_s: float = 0.0


@dataclass(slots=True)
class _Stepped:
    """A tensor that an optimizer has updated."""

    optimizer: torch.optim.Optimizer
    parameter: Tensor
    gradient: Tensor
    before: Tensor
    after: Tensor | None = None  # None: nothing has changed it again


# The inputs of the loss as the baseline computed them, on which every other capture evaluates its loss.
#
# A loss clips and masks: where log-probs of two arms differ by rounding, a token may fall on the other
# side of a bound. A replica that does so differs as much as an arm with a faulty loss. On the same inputs
# a loss differs by the rounding of its own arithmetic alone.

LOSS_INPUTS = "loss-inputs.safetensors"
Key = tuple[int, int, str]  # optimizer step, row of the global batch, name


class LossInputs:
    """Values of the kept rows by optimizer step, row and name: each [s], from a sequence's first token."""

    def __init__(self, rows: Mapping[Key, Tensor]) -> None:
        self._rows = rows

    @classmethod
    def gather(
        cls,
        tokens: Mapping[int, Sequence[Tensor]],  # [n, 2] of each micro-batch, row and position
        values: Mapping[tuple[int, str], Sequence[Tensor]],  # [n, 1] of each, by optimizer step and name
        ranks: Ranks,
    ) -> "LossInputs":
        """Return the values that all ranks have seen. Collective."""
        local: dict[Key, Tensor] = {}
        for (update, name), seen in values.items():
            rows, column = torch.cat([*tokens[update]])[:, 0], torch.cat([*seen])[:, 0]
            local |= {(update, row, name): column[rows == row] for row in rows.unique().tolist()}
        gathered = ranks.all_gather_world(local)
        return cls({key: row for rank_rows in gathered for key, row in rank_rows.items()})

    def write(self, folder: Path) -> None:
        save_file({"/".join(map(str, key)): row for key, row in self._rows.items()}, folder / LOSS_INPUTS)

    @classmethod
    def read(cls, folder: Path) -> "LossInputs":
        rows = {}
        for key, row in load_file(folder / LOSS_INPUTS).items():
            update, number, name = key.split("/", 2)
            rows[int(update), int(number), name] = row
        return cls(rows)

    def replace_rows(
        self,
        values: Tensor,  # [b, s]
        update: int,
        name: str,
        rows: Sequence[int],
        perturbation: tuple[int, int] | None,
    ) -> Tensor:
        """Return `values` of the global batch's `rows` with the baseline's instead, as far as it has them.

        `perturbation`, a seed and the number of a replica, moves them by one ULP.
        """
        replaced = values.detach().clone()
        for index, row in enumerate(rows):
            recorded = self._rows.get((update, row, name))
            if recorded is None or len(recorded) > values.shape[1]:
                continue
            if perturbation is not None:
                seed, replica = perturbation
                names = "inputs", str(replica), str(update), str(row), name
                recorded = one_ulp_away(recorded, "float32", seed, *names)
            replaced[index, : len(recorded)] = recorded.to(values)
        return replaced


def one_ulp_away(values: Tensor, dtype: str, seed: int, *names: str) -> Tensor:
    """Return each value moved by one ULP of `dtype`, up or down at random; zeros stay.

    The signs depend on seed, names and shape alone.
    """
    device = values.device
    generator = torch.Generator(device).manual_seed(derive_seed(seed, "trace", *names))
    signs = torch.randint(2, values.shape, generator=generator, dtype=torch.int8, device=device) * 2 - 1
    exponent = torch.frexp(values.float()).exponent - 1 - MANTISSA_BITS[dtype]
    ulp = torch.ldexp(torch.ones_like(values, dtype=torch.float32), exponent)
    return torch.where(values == 0, values, (values.float() + signs * ulp).to(values.dtype))


def perturb_weights(model: Trainable, dtype: str, seed: int, name: str) -> None:
    """Move each weight of a model by one ULP of its compute dtype.

    Ranks with the same shard move it alike. The signs depend on `name`.
    """
    specs, state = model.shard_specs(), model.local_state()
    moved = {
        key: one_ulp_away(weight, dtype, seed, "weights", name, key, repr(specs[key].pieces))
        for key, weight in state.items()
        if key.startswith("weights/")
    }
    model.load_local_state(state | moved)


class StepObserver:
    """Observes steps of one run. Make it before faults are injected, so that it sees what they change."""

    def __init__(self, setup: RunSetup, max_tokens: int) -> None:
        self._setup, self._max_tokens = setup, max_tokens
        self._record: StepRecord | None = None
        self._replica: int | None = None
        self._inputs: LossInputs | None = None
        self._is_forward = False
        self._microbatches: list[tuple[Microbatch[_Numbered], list[slice]]] = []
        self._current = -1  # index of the micro-batch whose forward pass began last
        self._num_updates = 0  # optimizer steps of the policy so far
        self._stepped: dict[int, _Stepped] = {}
        self._observe_policy()
        for model in (setup.policy, setup.value_model):
            if model is not None:
                self._observe_optimizer(model)
        self.perturb_too(setup.policy, "policy")  # first, so that the states noted are the perturbed ones
        for traced in setup.policy.traced_modules():
            traced.module.register_forward_hook(self._make_hook(traced))

    def observe(
        self, step: Callable[[], Any], replica: int | None = None, inputs: LossInputs | None = None
    ) -> StepRecord:
        """Run a step and return what this rank sees of it. Collective.

        `replica` perturbs the output of every module, and its gradient, by one ULP, with signs of its own.
        The loss is evaluated on `inputs`, by default on the step's own.
        """
        self._record, self._replica, self._inputs, self._stepped = StepRecord(), replica, inputs, {}
        self._current, self._num_updates = -1, 0
        record = self._record
        start = time.perf_counter()
        handle = register_optimizer_step_pre_hook(self._note_optimizer)
        try:
            step()
        finally:
            handle.remove()
            self._record = self._replica = None
        self._collect_shards(record)
        record.step_time_s = time.perf_counter() - start
        return record

    # --- forward passes ---

    def _observe_policy(self) -> None:
        policy: Any = self._setup.policy
        forward_backward, around_forward = policy.forward_backward, policy.around_forward

        def observed(batch: Any, objective: Any) -> MetricParts:
            if self._record is None:
                return forward_backward(batch, objective)
            self._start_pass(batch)
            return forward_backward(batch, _ObservedObjective(objective, self._note_losses))

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with around_forward():
                if self._record is not None:
                    self._current += 1
                    self._note_tokens()
                self._is_forward = self._record is not None and not self._num_updates
                try:
                    yield
                finally:
                    self._is_forward = False

        policy.forward_backward, policy.around_forward = observed, around

    def _start_pass(self, batch: Sequences) -> None:
        """Cut the batch into the micro-batches of the pass, to know the global rows of each. Collective."""
        ranks = self._setup.ranks
        first = ranks.data.rank() * len(batch)
        rows = torch.arange(first, first + len(batch), device=batch.token_ids.device)
        (longest,) = ranks.all_reduce_max_world([float(sequence_lengths(batch.token_mask).max())])
        last_row = max(int(self._max_tokens // longest), 1)
        numbered = batch.with_fields(_Numbered, row=rows)
        self._current, self._microbatches = -1, []
        for microbatch in Microbatches(numbered, self._setup.config.policy, ranks):
            lengths = sequence_lengths(microbatch.batch.token_mask).tolist()
            kept = [
                slice(0, length if row < last_row else 0)
                for row, length in zip(microbatch.batch.row.tolist(), lengths, strict=True)
            ]
            self._microbatches.append((microbatch, kept))

    def _note_tokens(self) -> None:
        assert self._record is not None
        microbatch, kept = self._microbatches[self._current]
        positions = torch.arange(microbatch.batch.token_ids.shape[1])
        tokens = [
            torch.stack([torch.full_like(positions[part], row), positions[part]], dim=1)
            for row, part in zip(microbatch.batch.row.tolist(), kept, strict=True)
        ]
        self._record.tokens.setdefault(self._num_updates, []).append(torch.cat(tokens))

    def _note(self, name: str, rows: Tensor) -> None:  # [b, s, ...]
        assert self._record is not None
        self._record.activations.setdefault((self._num_updates, name), []).append(self._kept(rows))

    def _kept(self, rows: Tensor) -> Tensor:  # [b, s, ...] -> [n, F] float32
        """Return the kept tokens' values, on the CPU."""
        _, kept = self._microbatches[self._current]
        tokens = torch.cat([row[part] for row, part in zip(rows, kept, strict=True)])
        return tokens.detach().reshape(len(tokens), rows.shape[2:].numel()).float().cpu()

    def _make_hook(self, traced: TracedModule) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if not self._is_forward:
                return
            microbatch, packing = self._microbatches[self._current][0]
            with torch.no_grad():
                if packing is None:
                    rows = traced.full_states(output, microbatch.token_ids.shape[1])
                else:  # [1, local tokens, F] -> [b, s, F]
                    stream = packing.to_full(traced.full_states(output, packing.num_local_tokens))
                    rows = packing.unpack_with_prompts(stream)
                self._note(traced.name, rows)

        return hook

    def perturb_too(self, model: Backend, name: str) -> None:
        """Let replicas perturb a model: the output of every traced module, and of every part with weights.

        Of compiled layers only the layer's output: a hook inside would compile other code than the run's.
        """
        parts = {
            part: None
            for traced in model.traced_modules()
            for part in ([traced.module] if traced.is_compiled else traced.module.modules())
            if part is traced.module or part._parameters
        }
        for index, part in enumerate(parts):

            def hook(module: Any, inputs: Any, output: Any, name: str = f"{name} {index}") -> Any:
                return None if self._replica is None else self._perturbed_output(output, name)

            part.register_forward_hook(hook)

    def _perturbed_output(self, output: Any, name: str) -> Any:
        """Return a module's output with states moved by one ULP, whose gradient will be moved by one as well.

        Alike on ranks with the same tokens.
        """
        states = output[0] if isinstance(output, tuple) else output
        if not isinstance(states, Tensor) or not states.is_floating_point():
            return output
        names = str(self._replica), name, str(self._setup.ranks.data.rank())

        def moved(values: Tensor, kind: str) -> Tensor:
            return one_ulp_away(values, self._setup.config.policy.dtype, self._setup.seed, kind, *names)

        perturbed = states + (moved(states.detach(), "output") - states.detach())
        if perturbed.requires_grad:
            perturbed.register_hook(lambda gradient: moved(gradient, "gradient"))
        return (perturbed, *output[1:]) if isinstance(output, tuple) else perturbed

    def _note_losses(self, objective: Any, batch: Any, logprobs: Tensor, entropy: Tensor | None) -> None:
        """Note a micro-batch's data, log-probs and losses [b, s], and the loss's gradient by log-prob."""
        assert self._record is not None
        values = {f.name: getattr(batch, f.name) for f in fields(batch)}
        tensors = {name: v for name, v in values.items() if isinstance(v, Tensor) and v.ndim == 2}
        for name in DATA_FIELDS:
            if name in tensors:
                self._note(f"batch.{name}", tensors.pop(name))
        self._note(LOGPROBS, logprobs)
        if entropy is not None:
            self._note(ENTROPY, entropy)
        batch, outputs = self._loss_inputs(objective, batch, logprobs, entropy)
        if tensors.get("importance_weights") is not None:
            tensors["importance_weights"] = batch.importance_weights
        for name, derived in tensors.items():
            self._note(f"batch.{name}", derived)
        leaves = {name: output.detach().clone().requires_grad_() for name, output in outputs.items()}
        with torch.enable_grad():
            shares = objective.losses(batch, leaves["logprobs"], leaves.get("entropy")).shares
            gradients = torch.autograd.grad(shares.sum(), list(leaves.values()), allow_unused=True)
        self._note(LOSS, shares)
        for (name, output), gradient in zip(outputs.items(), gradients, strict=True):
            kept = self._kept(torch.zeros_like(output) if gradient is None else gradient)
            self._record.loss_gradients.setdefault((self._num_updates, f"{LOSS}.{name}"), []).append(kept)

    def _loss_inputs(
        self, objective: Any, batch: Any, logprobs: Tensor, entropy: Tensor | None
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return a micro-batch, log-probs and entropy [b, s] with the baseline's values.

        Importance weights are computed again from its old log-probs.
        """
        outputs = {"logprobs": logprobs} | ({} if entropy is None else {"entropy": entropy})
        inputs = self._inputs
        if inputs is None:
            return batch, outputs
        rows = self._microbatches[self._current][0].batch.row.tolist()
        perturbation = None if self._replica is None else (self._setup.seed, self._replica)

        def recorded(name: str, values: Tensor) -> Tensor:
            return inputs.replace_rows(values, self._num_updates, name, rows, perturbation)

        outputs = {name: recorded(f"lm_head.{name}", output) for name, output in outputs.items()}
        present = {name: getattr(batch, name, None) for name in INPUT_FIELDS}
        fields_of_batch = {name: recorded(f"batch.{name}", v) for name, v in present.items() if v is not None}
        batch = replace(batch, **fields_of_batch)
        if isinstance(objective, PolicyObjective) and batch.importance_weights is not None:
            old_logprobs = batch.old_logprobs
            batch = replace(batch, old_logprobs=None, importance_weights=None)
            batch = objective.with_old_logprobs(batch, old_logprobs)
        return batch, outputs

    # --- optimizer ---

    def _observe_optimizer(self, model: Any) -> None:
        optimizer_step = model.optimizer_step

        def observed(learning_rate: float) -> float:
            norm = optimizer_step(learning_rate)
            if self._record is not None and model is self._setup.policy:
                if not self._num_updates:
                    self._record.grad_norm, self._record.learning_rate = norm, learning_rate
                self._num_updates += 1
            return norm

        model.optimizer_step = observed

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the gradients, clipped, and the weights before and after an optimizer's first step."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.numel():
                    continue
                stepped, weight = self._stepped.get(id(parameter)), parameter.detach()
                if stepped is None:
                    gradient = parameter.grad.detach().float().cpu().clone()
                    before = weight.float().cpu().clone()
                    self._stepped[id(parameter)] = _Stepped(optimizer, parameter, gradient, before)
                elif stepped.after is None:
                    stepped.after = weight.float().cpu().clone()

    def _collect_shards(self, record: StepRecord) -> None:
        """Name the gradients and updates by the optimizer's state, which the learner names."""
        state, specs = self._setup.learner.local_state(), self._setup.learner.shard_specs()
        keys = {id(tensor): key for key, tensor in state.items() if MOMENT in key}
        clip = self._setup.config.policy.optimizer.max_grad_norm
        for stepped in self._stepped.values():
            key = keys[id(stepped.optimizer.state[stepped.parameter]["exp_avg"])]
            is_policy = not key.startswith(VALUE_MODEL_PREFIX)
            scale = max((record.grad_norm + 1e-6) / clip, 1.0) if is_policy else 1.0
            after = stepped.parameter.detach().float().cpu() if stepped.after is None else stepped.after
            for kind, tensor in (("gradient", stepped.gradient * scale), ("update", after - stepped.before)):
                spec = specs[key]
                # `kind/NAME` for `optimizer/exp_avg/NAME`, which the value model's prefix may precede
                names = (f"{kind}/{name.replace(MOMENT, '', 1)}" for name, _ in spec.pieces)
                pieces = tuple(zip(names, (piece for _, piece in spec.pieces), strict=True))
                record.shards[f"{kind}/{key}"] = tensor.contiguous()
                record.specs[f"{kind}/{key}"] = replace(spec, pieces=pieces)
        self._stepped = {}


class _ObservedObjective:
    """An objective that passes on each micro-batch after its metrics; see trainer.backends.Objective."""

    def __init__(self, inner: Objective[Any], note: Callable[..., None]) -> None:
        self._inner, self._note = inner, note

    @property
    def entropies(self) -> EntropyMode:
        return self._inner.entropies

    def losses(self, batch: Any, logprobs: Tensor, entropy: Tensor | None) -> Any:
        return self._inner.losses(batch, logprobs, entropy)

    def metrics(self, batch: Any, logprobs: Tensor, entropy: Tensor | None, losses: Any) -> MetricParts:
        self._note(self._inner, batch, logprobs, entropy)
        return self._inner.metrics(batch, logprobs, entropy, losses)
