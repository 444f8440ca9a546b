"""Rollouts of a run as it would go on, scored in other ways.

Started as `python -m abrun.diagnose.logprob_diff.measure JOB_DIR`.

The first job of a budget goes on with the run for one step. Weights before and after it, and the completions
that the next step samples, are what all jobs score; they lie in the folder that a job calls `recorded`:

    before/, now/                 weights and tokenizer, as Hugging Face checkpoints
    recorded.npz                  the completions, and what engine and trainer made of them

A job leaves <scoring>.npz in its own folder, log-probs of the completion tokens and where they were routed,
and a row each: done, or why not.
"""

import gc
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from abrun.backends import Backend, make_backend
from abrun.backends.ranks import Ranks, join_ranks, make_ranks
from abrun.errors import AbrunError, RecipeError
from abrun.experiment.probe import open_row_writer, read_job, report_refusal
from abrun.models import Text, load_text
from abrun.processes import progress
from abrun.recipe.algorithms import Grpo, Ppo
from abrun.recipe.run import OwnRunConfig
from abrun.rl.batch import RolloutBatch, Sequences
from abrun.rollout.torch_engine import TorchEngine
from abrun.runs.files import wrap_write_errors
from abrun.runs.rundir import RunDir
from abrun.train.branch import start_from
from abrun.train.loop import make_algorithm
from abrun.train.rollouts import Rollouts
from abrun.train.setup import RunSetup, make_setup

RECORDED, BEFORE, NOW = "recorded.npz", "before", "now"
NUM_WORST = 10
CONTEXT = 24  # tokens before a worst one
METRIC = "train/token_mult_prob_error"


def main() -> int:
    progress.report_to_agent()
    directory = Path(sys.argv[1])
    job = read_job(directory)
    try:
        run_job(directory, job, join_ranks(job["config"]["cluster"]))
    except AbrunError as error:
        return report_refusal(error)
    dist.destroy_process_group()
    return 0


def run_job(directory: Path, job: Mapping[str, Any], device: torch.device) -> None:
    """Record, where the job says so, and score. Every rank calls this."""
    config, folder = OwnRunConfig.model_validate(job["config"]), Path(job["recorded"])
    backend = config.policy.backend
    ranks = make_ranks(device, backend.shape, expert_parallel=backend.expert_groups)
    writer = open_row_writer(directory) if ranks.is_first else None
    if "run" in job:
        row = record(folder, config, job, device)
        if writer:
            writer.write(row)
        _free(device)
    rollouts = Recorded.read(folder, device)
    for name, asked in job["scorings"].items():
        row = {"scoring": name}
        try:
            found = rollouts.scored(OwnRunConfig.model_validate(asked["config"]), asked, ranks)
            if ranks.is_first:
                _write(directory / f"{name}.npz", found)
        except AbrunError as error:
            row["reason"] = str(error)
        except torch.OutOfMemoryError:
            row["reason"] = "out of memory"
        if writer:
            writer.write(row)
        _free(device)


def record(
    folder: Path, config: OwnRunConfig, job: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """One step of the run from its weights on, and what the next one samples: as the run would have.

    `config` is the run's, on one rank, with steps enough. Returns what is to be known of it.
    """
    setup = make_setup(config, job["seed"], RunDir(Path(job["run"])).initial_weights, device)
    try:
        step = _load(job["checkpoint"], setup)
        _save(setup, folder / BEFORE)
        values = make_algorithm(setup).step(step + 1)
        _save(setup, folder / NOW)
        settings = config.algorithm
        assert isinstance(settings, Grpo | Ppo)
        batch, _ = Rollouts(setup, settings).collect(step + 2)
    finally:
        setup.sampler.close()
    prompts = torch.arange(len(batch), device=device) // settings.group_size
    rows = batch.token_mask.any(dim=1).nonzero()[: job["sequences"], 0]
    if not len(rows):
        raise RecipeError(f"--step: no completion of step {step + 2} has a token that counts; give another")
    batch = next(batch[rows].split(None))
    own = _with_routes(setup.policy, batch, _top_k(folder / NOW))
    mask = batch.token_mask
    inference = batch.inference_logprobs
    _write(
        folder / RECORDED,
        {
            "token_ids": batch.token_ids,
            "token_mask": mask,
            "inference_logprobs": inference,
            "prompts": prompts[rows],
            **({} if batch.support is None else {"support": batch.support}),
            **{f"own_{name}": tensor for name, tensor in own.items()},
        },
    )
    differences = (inference[mask].double() - own["logprobs"].double()).abs()
    error = float(differences.exp().mean())
    return {
        "step": step,
        "grad_norm": values["train/grad_norm"],
        "metrics": [(step + 1, values.get(METRIC)), (step + 2, None if job["sequences"] else error)],
        "num_sequences_sampled": len(prompts),
        "worst": _worst(batch, own["logprobs"], setup.data.text),
    }


def _load(checkpoint: str | None, setup: RunSetup) -> int:
    """The step after which the run goes on."""
    if checkpoint is None:
        return 0
    return start_from(checkpoint, setup.learner, setup.ranks, setup.config.steps, field="--step").step


def _save(setup: RunSetup, folder: Path) -> None:
    folder.mkdir()
    setup.policy.save(folder)
    setup.data.text.save(folder)


def _worst(batch: RolloutBatch, own: Tensor, text: Text) -> list[dict[str, Any]]:
    """The tokens that engine and trainer differ most on, with what stands before them."""
    rows, places = batch.token_mask.nonzero(as_tuple=True)
    inference = batch.inference_logprobs[batch.token_mask]
    order = (inference.double() - own.double()).abs().argsort(descending=True)[:NUM_WORST]
    starts = batch.token_mask.int().argmax(dim=1)
    found = []
    for index in order.tolist():
        row, place = int(rows[index]), int(places[index])
        token_ids = batch.token_ids[row].tolist()
        found.append(
            {
                "sequence": row,
                "position": place - int(starts[row]),
                "token": str(text.tokenizer.decode([token_ids[place]])),
                "context": str(text.tokenizer.decode(token_ids[max(place - CONTEXT, 0) : place])),
                "inference_logprob": float(inference[index]),
                "trainer_logprob": float(own[index]),
            }
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The completions that are scored."""

    folder: Path
    batch: Sequences

    @classmethod
    def read(cls, folder: Path, device: torch.device) -> "Recorded":
        with np.load(folder / RECORDED, allow_pickle=False) as arrays:
            token_ids, token_mask = (torch.from_numpy(arrays[name]) for name in ("token_ids", "token_mask"))
            support = torch.from_numpy(arrays["support"]) if "support" in arrays else None
        batch = Sequences(token_ids=token_ids, token_mask=token_mask, support=support).to(device)
        return cls(folder=folder, batch=batch)

    def scored(self, config: OwnRunConfig, asked: Mapping[str, Any], ranks: Ranks) -> dict[str, Tensor]:
        """Log-probs [N] of the completion tokens, and routes [N, L, K]. Every rank calls this.

        Raises AbrunError where that cannot be done here.
        """
        weights = self.folder / asked["weights"]
        decodes = asked["method"] == "decode"  # as a policy that trains does, not as a frozen one
        batch = self.batch if asked["on_recorded_sets"] else replace(self.batch, support=None)
        policy = make_backend(config, ranks, weights=weights, seed=0, trainable=decodes)
        if asked["method"] == "trainer":
            return _with_routes(policy, batch, _top_k(weights))
        text = load_text(config.model, weights=weights)
        if decodes:
            engine = TorchEngine(config.rollout, policy, text)
            logprobs = engine.score(*self._parts(), self._support())
        else:
            logprobs = self._by_vllm(config, policy, text)
        return {"logprobs": torch.tensor([value for each in logprobs for value in each])}

    def _parts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts and completions."""
        mask = self.batch.token_mask
        starts, ends = mask.int().argmax(dim=1).tolist(), (mask.cumsum(dim=1).argmax(dim=1) + 1).tolist()
        rows = list(zip(self.batch.token_ids.tolist(), starts, ends, strict=True))
        return [row[:start] for row, start, _ in rows], [row[start:end] for row, start, end in rows]

    def _support(self) -> list[Tensor] | None:
        """Of each completion."""
        support = self.batch.support
        if support is None:
            return None
        return [of_row[mask] for of_row, mask in zip(support, self.batch.token_mask, strict=True)]

    def _by_vllm(self, config: OwnRunConfig, policy: Backend, text: Text) -> list[list[float]]:
        from abrun.rollout.vllm.instance import VllmInstance

        engine = VllmInstance(config, self.batch.token_ids.device, 1, text.end_ids)
        prompts, completions = self._parts()
        try:
            engine.load(policy.gather_weights())
            scored = engine.score(
                [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
            )
        finally:
            engine.close()
        return [found[len(prompt) :] for prompt, found in zip(prompts, scored, strict=True)]


def _with_routes(policy: Backend, batch: Sequences, top_k: int) -> dict[str, Tensor]:
    """Log-probs [N] of the completion tokens; of a mixture of experts also their routes [N, L, K]."""
    if not top_k:
        return {"logprobs": policy.compute_logprobs(batch)[batch.token_mask]}
    logprobs, routes = policy.compute_logprobs_and_routes(batch)
    routes = routes[batch.token_mask]
    return {"logprobs": logprobs[batch.token_mask], "routes": routes.view(len(routes), -1, top_k)}


def _top_k(folder: Path) -> int:
    """How many experts a token goes to; 0 where there are none."""
    config: Any = AutoConfig.from_pretrained(folder).get_text_config()
    return getattr(config, "num_experts_per_tok", None) or 0


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with wrap_write_errors(path), path.open("wb") as file:
        np.savez(file, allow_pickle=False, **{name: tensor.cpu().numpy() for name, tensor in tensors.items()})


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
