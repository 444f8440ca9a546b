"""The captures of one arm. Started as `python -m abrun.diagnose.trace.measure JOB_DIR`.

The baseline trains up to the step, saves its state and the completions that the step samples, captures the
step, and repeats it from the same state for each one-ULP replica. The other arm reads state and completions.
They lie in the folder `recorded` of a job:

    state-RANK.safetensors  weights and optimizer state before the step, in the baseline's layout
    completions.json        the completions of the step; absent if no arm samples
    loss-inputs.safetensors the baseline's log-probs, on which the other arm evaluates its loss too
"""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from abrun.backends import Backend
from abrun.backends.ranks import join_ranks
from abrun.backends.shards import specs_to_metadata
from abrun.diagnose.trace.command import SCRATCH, write_replicas
from abrun.diagnose.trace.gather import gather_capture
from abrun.diagnose.trace.judge import errors_to_json, measure_errors
from abrun.diagnose.trace.loss_inputs import LossInputs
from abrun.diagnose.trace.observe import INPUTS, Observer
from abrun.diagnose.trace.perturb import perturb_weights
from abrun.diagnose.trace.replay import FILE, Recording, record_with, replay_with
from abrun.errors import AbrunError, RecipeError
from abrun.experiment.probe import read_job, report_refusal
from abrun.models import config_of
from abrun.processes import progress, run_to_end
from abrun.recipe.run import OwnRunConfig
from abrun.runs.captures import Capture
from abrun.runs.files import make_folder
from abrun.train.branch import load_saved
from abrun.train.loop import make_algorithm
from abrun.train.setup import RunSetup, make_setup


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
        self._observer = Observer(setup, job["max_tokens"])
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
        if (recorded / FILE).exists():
            replay_with(setup.sampler, Recording.read(recorded))
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


if __name__ == "__main__":
    run_to_end(lambda: sys.exit(main()))
