"""Every fault of the library, injected: what moves and what does not, at the first step and at the second."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import load_file

from abrun.recipe.faults import FAULTS, LIBRARY, ONE_ULP, InjectedFault
from abrun.recipe.implementations import ENGINES
from abrun.runs.rundir import RunDir
from abrun.trainer.faults import BY_SEAM
from abrun.trainer.models.weights import sketch_of
from tests.snapshot import Snapshot
from tests.trainer.loop.runs import Rows, group, single_rank, train, train_here
from tests.trainer.loop.test_implementations import verifier
from tests.trainer.models.conftest import bpe, checkpoint
from tests.written_runs import VOLATILE, make_run, run_config

__all__ = ["bpe", "checkpoint", "group"]

REWARD, LOSS, NORM = "train/reward", "train/loss", "train/grad_norm"
ERROR, ENTROPY, TOKENS = "train/token_mult_prob_error", "train/entropy", "train/global_valid_toks"
RATE, LENGTH, KL = "train/lr", "train/mean_gen_tokens_per_sample", "train/kl_penalty"
CRITIC, RATIO = "train/critic/loss", "train/probs_ratio_max"
GIVEN = ("steps=2", "policy.optimizer.warmup_steps=0", "rollout.max_new_tokens=6")
PPO = ("algorithm={type: ppo, prompts_per_step: 8, group_size: 4}",)
MICROBATCHES = ("policy.micro_batch_size=8",)


@dataclass(frozen=True)
class Case:
    """A fault in the smallest run that shows it."""

    name: str
    moved: Sequence[str]  # by the first step in `step`
    same: Sequence[str] = ()  # to the last bit, at the same step
    step: int = 1  # before which nothing moves
    overrides: Sequence[str] = ()
    size: float | None = None
    engine: str = ENGINES["torch"]

    @property
    def injected(self) -> str:
        size = "" if self.size is None else f", size: {self.size}"
        return f"injected_fault={{name: {self.name}{size}}}"


WARMUP = ("policy.optimizer.warmup_steps=8", "steps=2")  # of which a schedule is made
PENALISED = ("algorithm.kl_coefficient=0.5",)
CASES = (
    Case("flipped_advantages", (LOSS, NORM), (REWARD, ERROR)),
    Case("stale_rollout_weights", (ERROR,), step=2, size=1),
    Case("microbatch_mean", (NORM, LOSS), (REWARD, ERROR), overrides=MICROBATCHES),
    Case("upstream_gradient_first", (NORM,), (LOSS, ERROR)),
    Case("fused_drops_term", (NORM,), (LOSS, ERROR), overrides=("algorithm.entropy_coefficient=0.1",)),
    Case("adam_step_ahead", (LOSS,), step=2),
    Case("late_half_batch", (NORM,), (REWARD, ERROR), step=2),
    Case("last_microbatch_only", (NORM,), (LOSS, ERROR), overrides=MICROBATCHES),
    Case("value_unshifted", (CRITIC, NORM), (REWARD, ERROR), overrides=PPO),
    Case("rewards_of_other_rows", (LOSS, NORM), (REWARD, ERROR)),
    Case("attention_across_packed", (ERROR, ENTROPY), (REWARD,), overrides=("policy.packing=true",)),
    Case("temperature_missing", (ERROR, NORM), (REWARD,), overrides=("rollout.temperature=0.7",)),
    Case("kl_without_gradient", (NORM,), (LOSS, KL), step=2, overrides=PENALISED),
    Case(
        "old_logprobs_from_current",
        (RATIO, LOSS),
        (REWARD,),
        overrides=("algorithm.epochs_per_step=2",),
    ),
    Case("first_rollout_stats", (LOSS, NORM), (REWARD, ERROR)),
    Case("copied_completions", (ENTROPY, NORM)),  # the mean of 32 rewards of 0 and 1 may stay
    Case("eos_not_trained", (TOKENS, NORM), (REWARD, LENGTH)),
    Case("bf16_moments", (ENTROPY, NORM), step=2),
    Case("kl_sign", (LOSS,), step=2, overrides=PENALISED),
    Case("misgrouped", (NORM,), (REWARD, ERROR)),
    Case("padding_in_denominator", (LOSS, NORM), (REWARD, ERROR)),
    Case("dual_clip_everywhere", (NORM, LOSS), (REWARD, ERROR)),
    Case("schedule_by_ranks", (RATE,), (REWARD, LOSS, NORM), overrides=WARMUP),
    Case("partial_weight_sync", (ERROR,), step=2),
    Case("forced_eos", (ERROR,), (LENGTH,), overrides=("rollout.max_new_tokens=1",)),
    Case("critic_mask_of_other_rows", (CRITIC, LOSS), (REWARD, ERROR), overrides=PPO),
    Case("labels_off_by_one", (ERROR, ENTROPY), (REWARD,)),
    Case("dropout_on", (ERROR, NORM), (REWARD,)),
    Case("rope_bf16", (ERROR,), (REWARD,)),
    Case(
        "gspo_padding",
        (NORM,),
        (REWARD, LOSS, ERROR),
        overrides=("algorithm.loss=gspo", "algorithm.loss_reduction=sequence_mean"),
    ),
    Case(
        "sequence_weight_sum",
        (NORM, LOSS),
        (REWARD, ERROR),
        overrides=("algorithm.importance_correction={type: sequence_mask, low: 0.9, high: 1.15}",),
        engine="tests.tools.logprob_diff.injected:Lower",  # weights of 1.1
    ),
    Case("temperature_on_logprobs", (ERROR,), (REWARD, LOSS, NORM), overrides=("rollout.temperature=0.7",)),
    Case(ONE_ULP, (ENTROPY, NORM), (REWARD,)),
)
RANKS = (
    "steps=2",
    "cluster.cpu_ranks=2",
    "algorithm.normalize_over=batch",
    "task.max_operand=6",
    "policy.optimizer.max_grad_norm=0.05",
)
OF_RANKS = (
    Case("rank_mean", (NORM, LOSS), (REWARD, ERROR), overrides=RANKS),
    Case("whiten_per_rank", (NORM, LOSS), (REWARD, ERROR), overrides=RANKS),
    Case("local_grad_norm", (NORM,), (REWARD, LOSS, ERROR), overrides=RANKS),
)
ELSEWHERE = {"retokenised", "stale_prefix_cache"}  # below, and in test_vllm.py


@pytest.fixture(scope="module", autouse=True)
def one_group() -> Iterator[None]:
    with single_rank():
        yield


def rows_of(folder: Path, weights: Path | None, *overrides: str) -> Rows:
    return repeatable(train(folder, run_config(*GIVEN, *overrides), initial_weights=weights))


def repeatable(rows: Rows) -> Rows:
    """The metrics that depend on no clock and no allocator."""
    return {
        step: {key: value for key, value in row.items() if not key.startswith((*VOLATILE, "memory/"))}
        for step, row in rows.items()
    }


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.slow if case in OF_RANKS[1:] else ())
        for case in (*CASES, *OF_RANKS)
    ],
)
def test_a_injected_fault_shows_where_its_row_says(
    case: Case, tmp_path: Path, warm_weights: Path, trained: Callable[..., Rows]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "torch", case.engine)
        right = repeatable(trained(*GIVEN, *case.overrides))
        wrong = rows_of(tmp_path, warm_weights, f"steps={case.step}", *case.overrides, case.injected)
    for before in range(1, case.step):
        assert wrong[before] == right[before]
    for metric in case.moved:
        assert wrong[case.step][metric] != right[case.step][metric], metric
    for metric in case.same:
        assert wrong[case.step][metric] == right[case.step][metric], metric
    assert right[1][NORM] > 0
    if case in OF_RANKS:  # and trains another policy
        assert wrong[2][ENTROPY] != right[2][ENTROPY]


OF_SFT = (
    Case("last_microbatch_only", (NORM,), (LOSS,), overrides=MICROBATCHES),
    Case("labels_off_by_one", (LOSS, NORM)),
    Case("attention_across_packed", (LOSS, NORM), overrides=("policy.packing=true",)),
    Case("adam_step_ahead", (LOSS,), step=2),
    Case("bf16_moments", (LOSS,), step=2),
    Case("schedule_by_ranks", (RATE,), (LOSS, NORM), overrides=WARMUP),
    Case("dropout_on", (LOSS, NORM)),
    Case("rope_bf16", (LOSS, NORM)),
    Case(ONE_ULP, (LOSS, NORM)),
)
OF_DPO = (Case("labels_off_by_one", (LOSS, NORM)), OF_SFT[0])
# Faults of the optimizer and of the network, which do not know the algorithm
ALIKE = tuple(
    case for case in OF_SFT if case.name in ("adam_step_ahead", "bf16_moments", "dropout_on", "rope_bf16")
)


@pytest.mark.parametrize(
    ("algorithm", "case"),
    [
        pytest.param(
            algorithm, case, id=f"{algorithm}-{case.name}", marks=pytest.mark.slow if case in ALIKE else ()
        )
        for algorithm, cases in (("sft", OF_SFT), ("dpo", OF_DPO))
        for case in cases
    ],
)
def test_what_is_no_policy_gradients_shows_in_supervised_runs(
    algorithm: str, case: Case, tmp_path: Path, warm_weights: Path, trained: Callable[..., Rows]
) -> None:
    supervised = f"algorithm={{type: {algorithm}, batch_size: 16}}"
    test_a_injected_fault_shows_where_its_row_says(
        replace(case, overrides=(supervised, *case.overrides)), tmp_path, warm_weights, trained
    )


def test_every_fault_of_any_algorithm_is_tried_on_supervised_runs() -> None:
    several_ranks = {"local_grad_norm"}
    general = {fault.name for fault in LIBRARY.values() if fault.any_algorithm}
    assert general == {case.name for case in OF_SFT} | several_ranks


@pytest.mark.slow
def test_a_local_norm_clips_and_does_nothing_where_there_is_nothing_to_clip(
    tmp_path: Path, warm_weights: Path
) -> None:
    wide, fault = "policy.optimizer.max_grad_norm=1.0e+9", "injected_fault=local_grad_norm"
    settings = {"right": (wide,), "wrong": (wide, fault), "clipped": (fault,)}
    right, wrong, clipped = (
        rows_of(tmp_path / name, warm_weights, *RANKS, *more) for name, more in settings.items()
    )
    assert {metric for metric in right[2] if right[2][metric] != wrong[2][metric]} == {NORM}
    assert clipped[1] == wrong[1] and clipped[2][ENTROPY] != wrong[2][ENTROPY]


def test_tokens_that_are_encoded_again_are_not_those_drawn(tmp_path: Path, checkpoint: Path) -> None:
    """Random weights draw pieces of words that a tokenizer would never cut so."""
    settings = ("steps=1", "task=" + verifier(tmp_path), f"model={{preset: null, path: {checkpoint}}}")
    right = rows_of(tmp_path / "right", None, *settings)
    wrong = rows_of(tmp_path / "wrong", None, *settings, "injected_fault=retokenised")
    assert wrong[1][ERROR] > 1.01 > right[1][ERROR]
    assert wrong[1][REWARD] == right[1][REWARD] > 0 and wrong[1][NORM] != right[1][NORM]


def test_every_fault_has_a_function_at_its_seam_and_a_case() -> None:
    at = {name: seam for seam, functions in BY_SEAM.items() for name in functions}
    assert at == {fault.name: fault.seam for fault in LIBRARY.values()}
    assert {case.name for case in (*CASES, *OF_RANKS)} | ELSEWHERE == set(LIBRARY)
    assert len(FAULTS) == len({fault.source for fault in FAULTS})


def test_a_run_says_where_its_weights_began(tmp_path: Path, warm_weights: Path) -> None:
    run = make_run(tmp_path / "run", run_config(*GIVEN), initial_weights=warm_weights)
    train_here(run)
    first, last = RunDir(run).initial_sketch(), RunDir(run).final_sketch()
    began = load_file(warm_weights / "model.safetensors")
    assert first.keys() == last.keys() == began.keys() and len(first) > 5
    for name, weight in began.items():
        assert np.array_equal(first[name], sketch_of(name, torch.from_numpy(weight)).numpy())
    assert all(not np.array_equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize(
    "override",
    [
        "injected_fault=nonsense",
        "injected_fault=misgroupd",
        "injected_fault=microbatch_mean",
        "injected_fault=value_unshifted",
        "injected_fault=attention_across_packed",
        "injected_fault=temperature_missing",
        "injected_fault=old_logprobs_from_current",
        "injected_fault=rank_mean",
        "injected_fault=local_grad_norm",
        "cluster.cpu_ranks=2 injected_fault=whiten_per_rank",
        "injected_fault=gspo_padding",
        "injected_fault=sequence_weight_sum",
        "injected_fault=temperature_on_logprobs",
        "injected_fault=retokenised",
        "injected_fault=stale_prefix_cache",
        "algorithm={type: sft} injected_fault=misgrouped",
        "injected_fault={name: misgrouped, size: -1}",
        "injected_fault={name: late_half_batch, size: 1.5}",
        "injected_fault={name: flipped_advantages, size: 2}",
    ],
)
def test_a_fault_that_cannot_be_injected_is_refused_with_what_it_needs(
    override: str, snapshot: Snapshot
) -> None:
    with pytest.raises(ValidationError) as refusal:
        run_config(*override.replace(" injected", "\ninjected").split("\n"))
    snapshot(refusal.value)
    assert InjectedFault(name="late_half_batch").amount == 0.5
