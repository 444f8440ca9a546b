"""Rollouts of a continued run, scored in several ways.

Started as `python -m abrun.tools.logprob_diff.measure JOB_DIR`.

The first job of a budget continues the run for one step. It saves the weights before and after that step and
the completions that the next step samples; all jobs score these. They lie in the folder `recorded` of a job:

    before/, now/                 weights and tokenizer, as Hugging Face checkpoints
    recorded.npz                  the completions with the engine's and the trainer's log-probs

A job writes <scoring>.npz into its folder, with the log-probs of the completion tokens and their routes, and
one row per scoring: done, or why not.
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

from abrun.errors import AbrunError, RecipeError
from abrun.experiment.probe import open_row_writer, read_job, report_refusal
from abrun.processes import progress, run_to_end
from abrun.recipe.algorithms import Grpo, Ppo
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import wrap_write_errors
from abrun.runs.rundir import RunDir
from abrun.trainer.backends import Backend, make_backend
from abrun.trainer.backends.ranks import Ranks, join_ranks, make_ranks
from abrun.trainer.loop.checkpoint import start_from
from abrun.trainer.loop.grpo import Rollouts
from abrun.trainer.loop.setup import RunSetup, make_setup
from abrun.trainer.models.text import Text, load_text
from abrun.trainer.rl.batch import RolloutBatch, Sequences
from abrun.trainer.rollout.torch_engine import TorchEngine
from abrun.trainer.training import make_algorithm

RECORDED, BEFORE, NOW = "recorded.npz", "before", "now"
NUM_WORST = 10
CONTEXT = 24  # tokens shown before each of the worst
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
    """Record completions if the job asks for it, then score. Called by every rank."""
    config, folder = OwnRunConfig.model_validate(job["config"]), Path(job["recorded"])
    backend = config.policy.backend
    ranks = make_ranks(device, backend.shape, expert_parallel=backend.expert_groups)
    writer = open_row_writer(directory) if ranks.is_first else None
    if "run" in job:
        row = record(folder, config, job, device)
        if writer:
            writer.write(row)
        _free(device)
    rollouts = RecordedRollouts.read(folder, device)
    for name, scoring in job["scorings"].items():
        row = {"scoring": name}
        try:
            scored = rollouts.scored(OwnRunConfig.model_validate(scoring["config"]), scoring, ranks)
            if ranks.is_first:
                _write(directory / f"{name}.npz", scored)
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
    """Continue the run for one step and record the completions that its next step samples.

    `config` is the run's, on one rank, with enough steps. Returns facts about the step for the budget.
    """
    setup = make_setup(config, job["seed"], RunDir(Path(job["run"])).initial_weights, device)
    try:
        step = 0
        if checkpoint := job["checkpoint"]:
            step = start_from(checkpoint, setup.learner, setup.ranks, config.steps, field="--step").step
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
    trainer_scores = _with_routes(setup.policy, batch, _top_k(folder / NOW))
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
            **{f"own_{name}": tensor for name, tensor in trainer_scores.items()},
        },
    )
    differences = (inference[mask].double() - trainer_scores["logprobs"].double()).abs()
    error = float(differences.exp().mean())
    return {
        "step": step,
        "grad_norm": values["train/grad_norm"],
        "metrics": [(step + 1, values.get(METRIC)), (step + 2, None if job["sequences"] else error)],
        "num_sequences_sampled": len(prompts),
        "worst": _worst_tokens(batch, trainer_scores["logprobs"], setup.data.text),
    }


def _save(setup: RunSetup, folder: Path) -> None:
    folder.mkdir()
    setup.policy.save(folder)
    setup.data.text.save(folder)


def _worst_tokens(batch: RolloutBatch, trainer_logprobs: Tensor, text: Text) -> list[dict[str, Any]]:
    """Return the tokens with the largest difference between engine and trainer, with their context."""
    rows, positions = batch.token_mask.nonzero(as_tuple=True)
    inference = batch.inference_logprobs[batch.token_mask]
    order = (inference.double() - trainer_logprobs.double()).abs().argsort(descending=True)[:NUM_WORST]
    starts = batch.token_mask.int().argmax(dim=1)
    worst_tokens = []
    for index in order.tolist():
        row, position = int(rows[index]), int(positions[index])
        token_ids = batch.token_ids[row].tolist()
        worst_tokens.append(
            {
                "sequence": row,
                "position": position - int(starts[row]),
                "token": str(text.tokenizer.decode([token_ids[position]])),
                "context": str(text.tokenizer.decode(token_ids[max(position - CONTEXT, 0) : position])),
                "inference_logprob": float(inference[index]),
                "trainer_logprob": float(trainer_logprobs[index]),
            }
        )
    return worst_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollouts:
    """The recorded completions."""

    folder: Path
    batch: Sequences

    @classmethod
    def read(cls, folder: Path, device: torch.device) -> "RecordedRollouts":
        with np.load(folder / RECORDED, allow_pickle=False) as arrays:
            token_ids, token_mask = (torch.from_numpy(arrays[name]) for name in ("token_ids", "token_mask"))
            support = torch.from_numpy(arrays["support"]) if "support" in arrays else None
        batch = Sequences(token_ids=token_ids, token_mask=token_mask, support=support).to(device)
        return cls(folder=folder, batch=batch)

    def scored(self, config: OwnRunConfig, scoring: Mapping[str, Any], ranks: Ranks) -> dict[str, Tensor]:
        """Return log-probs [N] of the completion tokens, and routes [N, L, K]. Called by every rank.

        Raises AbrunError if this machine cannot compute them.
        """
        weights = self.folder / scoring["weights"]
        decodes = scoring["method"] == "decode"  # decoding needs a trainable policy, not a frozen one
        batch = self.batch if scoring["on_recorded_sets"] else replace(self.batch, support=None)
        policy = make_backend(config, ranks, weights=weights, seed=0, trainable=decodes)
        if scoring["method"] == "trainer":
            return _with_routes(policy, batch, _top_k(weights))
        text = load_text(config.model, weights=weights)
        if decodes:
            engine = TorchEngine(config.rollout, policy, text)
            support = None  # of each completion, if filters were on
            if batch.support is not None:
                rows = zip(batch.support, batch.token_mask, strict=True)
                support = [row_support[mask] for row_support, mask in rows]
            logprobs = engine.score(*self._prompts_and_completions(), support)
        else:
            logprobs = self._score_with_vllm(config, policy, text)
        return {"logprobs": torch.tensor([value for row in logprobs for value in row])}

    def _prompts_and_completions(self) -> tuple[list[list[int]], list[list[int]]]:
        mask = self.batch.token_mask
        starts, ends = mask.int().argmax(dim=1).tolist(), (mask.cumsum(dim=1).argmax(dim=1) + 1).tolist()
        rows = list(zip(self.batch.token_ids.tolist(), starts, ends, strict=True))
        return [row[:start] for row, start, _ in rows], [row[start:end] for row, start, end in rows]

    def _score_with_vllm(self, config: OwnRunConfig, policy: Backend, text: Text) -> list[list[float]]:
        from abrun.trainer.rollout.vllm.instance import VllmInstance

        engine = VllmInstance(config, self.batch.token_ids.device, 1, text.end_ids)
        prompts, completions = self._prompts_and_completions()
        try:
            engine.load(policy.gather_weights())
            scored = engine.score(
                [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
            )
        finally:
            engine.close()
        return [logprobs[len(prompt) :] for prompt, logprobs in zip(prompts, scored, strict=True)]


def _with_routes(policy: Backend, batch: Sequences, top_k: int) -> dict[str, Tensor]:
    """Return log-probs [N] of the completion tokens; for a mixture of experts also routes [N, L, K]."""
    if not top_k:
        return {"logprobs": policy.compute_logprobs(batch)[batch.token_mask]}
    logprobs, routes = policy.compute_logprobs_and_routes(batch)
    routes = routes[batch.token_mask]
    return {"logprobs": logprobs[batch.token_mask], "routes": routes.view(len(routes), -1, top_k)}


def _top_k(folder: Path) -> int:
    """Return the number of experts per token; 0 for a dense model."""
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
    run_to_end(lambda: sys.exit(main()))
