"""The captures of one arm. Started as `python -m abrun.tools.trace.measure JOB_DIR`.

The baseline trains up to the step, saves its state and the completions that the step samples, captures the
step, and repeats it from the same state for each one-ULP replica. The other arm reads state and completions.
They lie in the folder `recorded` of a job:

    state-RANK.safetensors  weights and optimizer state before the step, in the baseline's layout
    completions.json        the completions of the step; absent if no arm samples
    loss-inputs.safetensors the baseline's log-probs, on which the other arm evaluates its loss too
"""

import contextlib
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from abrun.errors import AbrunError, RecipeError
from abrun.experiment.probe import SCRATCH, read_job, report_refusal
from abrun.processes import progress, run_to_end
from abrun.recipe.run import OwnRunConfig
from abrun.runs.captures import EXACT, Capture, Kind, write_capture
from abrun.runs.files import PUBLIC_MODE, make_folder, read_json, write_json
from abrun.tools.trace.command import write_replicas
from abrun.tools.trace.judge import errors_to_json, measure_errors
from abrun.tools.trace.observe import (
    DATA_FIELDS,
    GRAD_NORM,
    INPUTS,
    LEARNING_RATE,
    LOSS,
    LossInputs,
    StepObserver,
    StepRecord,
    perturb_weights,
)
from abrun.trainer.backends import Backend
from abrun.trainer.backends.ranks import Ranks, join_ranks
from abrun.trainer.backends.shards import Piece, ShardSpec, specs_to_metadata
from abrun.trainer.loop.checkpoint import SavedTensors, load_saved
from abrun.trainer.loop.setup import RunSetup, Sampler, make_setup
from abrun.trainer.models.weights import config_of
from abrun.trainer.rollout import Completion, RolloutEngine
from abrun.trainer.seeds import Draws
from abrun.trainer.training import make_algorithm


def main() -> int:
    progress.report_to_agent()
    directory = Path(sys.argv[1])
    job = read_job(directory)
    try:
        run_job(job, join_ranks(job["config"]["cluster"]))
    except AbrunError as error:
        return report_refusal(error)
    dist.destroy_process_group()
    return 0


def run_job(job: Mapping[str, Any], device: torch.device) -> None:
    """Capture a step of one arm. Called by every rank."""
    config, recorded = OwnRunConfig.model_validate(job["config"]), Path(job["recorded"])
    weights = Path(job["initial_weights"]) if job["initial_weights"] else None
    run_path = Path(job["run"]) if job.get("run") else None  # None: the baseline samples
    setup = make_setup(config, job["seed"], weights, device, run_path)
    tracer = Tracer(setup, job)
    try:
        if job["records"]:
            tracer.record(recorded, num_replicas=job["replicas"])
        else:
            tracer.repeat(recorded)
    finally:
        setup.sampler.close()


class Tracer:
    """Captures of one step of a run."""

    def __init__(self, setup: RunSetup, job: Mapping[str, Any]) -> None:
        self._setup, self._step, self._folder = setup, int(job["step"]), Path(job["captures"])
        self._arm = job["arm"]
        self._inputs: LossInputs | None = None  # None: the first capture is the baseline's
        self._observer = StepObserver(setup, job["max_tokens"])
        specs = setup.learner.shard_specs()
        local = {
            full_name.replace("weights/", "", 1): piece.shape
            for name, spec in specs.items()
            if "weights/" in name
            for full_name, piece in spec.pieces
        }
        self._shapes = {
            name: shape for part in setup.ranks.all_gather_world(local) for name, shape in part.items()
        }
        self._model = (config_of(setup.config.model).architectures or [""])[0]

    def record(self, recorded: Path, *, num_replicas: int) -> None:
        """Train up to the step, record it, and capture it and its replicas. Collective."""
        setup, step = self._setup, self._step
        recording = Recording(step)
        engines = record_with(setup.sampler, recording)
        algorithm = make_algorithm(setup)
        for earlier in range(1, step):
            algorithm.step(earlier)
        state = {name: tensor.clone() for name, tensor in setup.learner.local_state().items()}
        make_folder(recorded)
        specs = specs_to_metadata(setup.learner.shard_specs(), state)
        save_file(state, recorded / f"state-{setup.ranks.rank:06d}.safetensors", specs)
        baseline = self._capture(algorithm, self._arm, None)
        if self._inputs and setup.ranks.is_first:
            self._inputs.write(recorded)
        if engines:
            recording.write(recorded, setup.ranks)
        for engine in engines:
            engine.is_recorded = True
        errors = []
        for number, _ in enumerate(self._replicas(algorithm, state, num_replicas), start=1):
            replica = self._capture(algorithm, SCRATCH, number)
            if baseline and replica:
                errors.append(errors_to_json(measure_errors(baseline, replica)))
                shutil.rmtree(replica.folder)
        if baseline:
            write_replicas(self._folder, errors)

    def _replicas(self, algorithm: Any, state: dict[str, Tensor], count: int) -> Iterator[None]:
        """Set the weights of all models of the run for each replica, from the state before the step."""
        setup, dtype = self._setup, self._setup.config.policy.dtype
        reference: Backend | None = getattr(algorithm, "reference", None)
        reference_state = {}
        if reference is not None:
            self._observer.perturb_too(reference, "reference")
            reference_state = {name: tensor.clone() for name, tensor in reference.local_state().items()}
        for number in range(1, count + 1):
            progress.report_step()
            setup.learner.load_local_state(state)
            perturb_weights(setup.policy, dtype, setup.seed, f"policy {number}")
            if setup.value_model is not None:
                perturb_weights(setup.value_model, dtype, setup.seed, f"value model {number}")
            if reference is not None:
                reference.load_local_state(reference_state)
                perturb_weights(reference, dtype, setup.seed, f"reference {number}")
            yield

    def repeat(self, recorded: Path) -> None:
        """Capture the step from the recorded state, on the recorded completions. Collective."""
        setup = self._setup
        load_saved(sorted(recorded.glob("state-*.safetensors")), setup.learner, setup.ranks)
        if (recorded / COMPLETIONS).exists():
            recording = Recording.read(recorded)
            setup.sampler._make_engine = lambda: RecordedEngine(recording, None)
        self._inputs = LossInputs.read(recorded)
        self._capture(make_algorithm(setup), self._arm, None)

    def _capture(self, algorithm: Any, name: str, replica: int | None) -> Capture | None:
        record = self._observer.observe(lambda: algorithm.step(self._step), replica, self._inputs)
        if not record.tokens and self._setup.ranks.pipeline is None:
            raise RecipeError(f"step {self._step}: no forward pass to capture")
        if self._inputs is None:
            values = {key: rows for key, rows in record.activations.items() if key[1] in INPUTS}
            self._inputs = LossInputs.gather(record.tokens, values, self._setup.ranks)
        return gather_capture(
            self._folder / name,
            record,
            self._setup.config,
            self._setup.ranks,
            self._shapes,
            step=self._step,
            model=self._model,
            perturbation=replica,
        )


# From what every rank has seen of a step to one capture with logical shapes.
#
# Each rank writes its part into a scratch folder, and rank 0 puts them together.
#
# Letters: n tokens, F features.

PARTS, TOKENS = ".parts", "tokens"
CapturedRow = tuple[Kind, str, str, np.ndarray]


def gather_capture(
    folder: Path,
    record: StepRecord,
    config: OwnRunConfig,
    ranks: Ranks,
    weight_shapes: Mapping[str, tuple[int, ...]],
    *,
    step: int,
    model: str,
    perturbation: int | None,
) -> Capture | None:
    """Write the capture of a step into `folder`; return it on rank 0. Collective.

    `weight_shapes` has every trained parameter, also one without a gradient, which counts as 0.
    """
    parts, policy = folder / PARTS, config.policy
    if ranks.is_first:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
    ranks.barrier()
    _write_part(parts, record, ranks)
    ranks.barrier()
    capture = None
    (seconds,) = ranks.all_reduce_max_world([record.step_time_s])
    if ranks.is_first:
        states = _merge_states(parts)
        parameters = _merge_parameters(parts, weight_shapes)
        capture = write_capture(
            folder,
            list(_in_order(states, parameters, record, policy.dtype)),
            step=step,
            model=model,
            layout={
                "ranks": ranks.size,
                **policy.backend.model_dump(mode="json"),
                "packing": policy.packing,
                "logprobs": policy.logprobs.model_dump(mode="json"),
            },
            dtype=policy.dtype,
            perturbation=perturbation,
            step_time_s=seconds,
        )
        shutil.rmtree(parts)
    ranks.barrier()
    return capture


def _write_part(parts: Path, record: StepRecord, ranks: Ranks) -> None:
    save_file(
        record.shards,
        parts / f"shards-{ranks.rank:06d}.safetensors",
        specs_to_metadata(record.specs, record.shards),
    )
    replicas = (group for group in (ranks.tensor, ranks.context) if group is not None)
    if any(group.rank() for group in replicas) or not record.tokens:
        return  # another rank has the same tokens
    tensors = {f"{update}/{TOKENS}": torch.cat(tokens) for update, tokens in record.tokens.items()}
    for kind, noted in (("activation", record.activations), ("gradient", record.loss_gradients)):
        for index, ((update, name), rows) in enumerate(noted.items()):
            tensors[f"{update}/{kind}/{index:06d}/{name}"] = torch.cat(rows)
    save_file(tensors, parts / f"states-{ranks.rank:06d}.safetensors")


def _merge_states(parts: Path) -> dict[str, Tensor]:
    """Return the values [n, F] in the order of the batch, by kind and name in the order of execution."""
    pieces: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for path in sorted(parts.glob("states-*")):
        tensors = load_file(path)
        for key in sorted(tensors, key=lambda key: (int(key.partition("/")[0]), key)):
            update, _, rest = key.partition("/")
            if rest != TOKENS:
                kind, _, name = rest.split("/", 2)
                suffix = f"@{int(update) + 1}" if int(update) else ""
                tokens = tensors[f"{update}/{TOKENS}"]
                pieces.setdefault(f"{kind}/{name}{suffix}", []).append((tokens, tensors[key]))
    merged = {}
    for name, seen in pieces.items():
        tokens = torch.cat([tokens for tokens, _ in seen])
        order = np.lexsort((tokens[:, 1].numpy(), tokens[:, 0].numpy()))
        merged[name] = torch.cat([values for _, values in seen])[torch.from_numpy(order)]
    return merged


def _merge_parameters(parts: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the full gradients and updates as `gradient/NAME` and `update/NAME`."""
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, "pt")) for path in sorted(parts.glob("shards-*"))]
        saved = SavedTensors(files)
        return {
            f"{kind}/{name}": saved.read_held(ShardSpec.from_piece(f"{kind}/{name}", Piece.full(shape)), None)
            if f"{kind}/{name}" in saved
            else torch.zeros(shape)
            for name, shape in shapes.items()
            for kind in ("gradient", "update")
        }


def _in_order(
    states: Mapping[str, Tensor], parameters: Mapping[str, Tensor], record: StepRecord, dtype: str
) -> Iterable[CapturedRow]:
    """Yield activations, gradients from the loss back, updates, and what later optimizer steps saw."""
    first = [name for name in states if "@" not in name]
    activations = [name.removeprefix("activation/") for name in first if name.startswith("activation/")]
    modules = [name for name in activations if not name.startswith(_AROUND)]
    data = [name for name in activations if name in _DATA]
    rest = [name for name in activations if name not in {*data, *modules}]
    for name in [*data, *modules, *rest]:
        yield _state(f"activation/{name}", states, dtype if name in modules else "float32")
    for name in first:
        if name.startswith("gradient/"):
            yield _state(name, states, "float32")
    by_depth = sorted({name.partition("/")[2] for name in parameters}, key=lambda name: _depth(name, modules))
    for name in reversed(by_depth):
        yield "gradient", name, dtype, parameters[f"gradient/{name}"].numpy()
    yield "gradient", GRAD_NORM, "float32", np.array(record.grad_norm, np.float32)
    yield "update", LEARNING_RATE, "float32", np.array(record.learning_rate, np.float32)
    for name in by_depth:
        yield "update", name, "float32", parameters[f"update/{name}"].numpy()
    later = (name for name in states if "@" in name)
    for name in sorted(later, key=lambda name: int(name.rpartition("@")[2])):
        yield _state(name, states, "float32")


_DATA = tuple(f"batch.{name}" for name in DATA_FIELDS)
_EXACT = ("batch.token_ids", "batch.token_mask")
_AROUND = ("batch.", "lm_head.", LOSS)


def _state(key: str, states: Mapping[str, Tensor], dtype: str) -> CapturedRow:
    kind, _, name = key.partition("/")
    is_exact = name.partition("@")[0] in _EXACT
    values = states[key]
    flat = values[:, 0] if values.shape[1] == 1 else values
    return (
        ("gradient" if kind == "gradient" else "activation"),
        name,
        EXACT if is_exact else dtype,
        flat.numpy(),
    )


def _depth(parameter: str, modules: list[str]) -> tuple[int, str]:
    """Return the place in the order of execution of the innermost module that has the parameter."""
    places = [place for place, name in enumerate(modules) if parameter.startswith(f"{name}.")]
    innermost = max(places, key=lambda place: len(modules[place]), default=len(modules))
    return innermost, parameter


# The completions of a step, recorded by one arm and replayed to the other.
#
# Recordings of whole runs (abrun.runs.rollouts) hold groups after rewards and filters. A trace replays
# the engine alone, with the support of each token, so that faults of verifiers, filters and grouping stay
# visible.

COMPLETIONS = "completions.json"


class Recording:
    """Completions of one step by row, each with its prompt."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._rows: dict[str, dict[str, Any]] = {}

    def add(self, prompts: list[list[int]], draws: Draws, completions: list[Completion]) -> None:
        for row, prompt, completion in zip(draws.rows, prompts, completions, strict=True):
            self._rows[str(row)] = {
                "prompt": prompt,
                "token_ids": completion.token_ids,
                "logprobs": completion.logprobs,
                "support": None if completion.support is None else completion.support.tolist(),
                "truncated": completion.truncated,
            }

    def completions(self, prompts: list[list[int]], draws: Draws) -> list[Completion]:
        """Return the recorded completions. Raises RecipeError if there are none for these prompts."""
        completions = []
        for number, prompt in zip(draws.rows, prompts, strict=True):
            row = self._rows.get(str(number))
            if row is None or row["prompt"] != prompt:
                raise RecipeError(
                    f"step {self.step}: this arm trains on other prompts than the baseline recorded; trace "
                    "arms with the same task, seed, prompts_per_step and group_size"
                )
            support = row["support"]
            completions.append(
                Completion(
                    token_ids=row["token_ids"],
                    logprobs=row["logprobs"],
                    support=None if support is None else torch.tensor(support, dtype=torch.uint8),
                    truncated=row["truncated"],
                )
            )
        return completions

    def write(self, folder: Path, ranks: Ranks) -> None:
        """Write the completions of all ranks. Collective."""
        by_rank = ranks.all_gather_world(self._rows)
        if ranks.is_first:
            rows = {key: row for rows in by_rank for key, row in rows.items()}
            write_json(folder / COMPLETIONS, {"step": self.step, "rows": rows}, mode=PUBLIC_MODE)

    @classmethod
    def read(cls, folder: Path) -> "Recording":
        content = read_json(folder / COMPLETIONS, max_bytes=2**40)
        recording = cls(content["step"])
        recording._rows = content["rows"]
        return recording


class RecordedEngine:
    """A run's engine, of which a step's completions are recorded; once recorded they are replayed.

    Without an engine it replays what the baseline's engine sampled.
    """

    def __init__(self, recording: Recording, engine: RolloutEngine | None) -> None:
        self._recording, self._engine = recording, engine
        self.is_recorded = engine is None

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        if self._engine and draws.step != self._recording.step:
            return self._engine.generate(prompts, draws, temperature=temperature)
        if self._engine is None or self.is_recorded:
            return self._recording.completions(prompts, draws)
        completions = self._engine.generate(prompts, draws, temperature=temperature)
        self._recording.add(prompts, draws, completions)
        return completions

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._engine and not self.is_recorded:
            self._engine.sync(weights)

    def sleep(self) -> int:
        return self._engine.sleep() if self._engine else 0

    def wake(self) -> bool:
        return self._engine.wake() if self._engine else False

    def close(self, *, finished: bool = False) -> None:
        if self._engine:
            self._engine.close(finished=finished)


def record_with(sampler: Sampler, recording: Recording) -> list[RecordedEngine]:
    """Let a sampler record a step. The list holds its engine once that is made."""
    engines: list[RecordedEngine] = []
    make_engine = sampler._make_engine

    def make() -> RolloutEngine:
        engines.append(RecordedEngine(recording, make_engine()))
        return engines[0]

    sampler._make_engine = make
    return engines


if __name__ == "__main__":
    run_to_end(lambda: sys.exit(main()))
