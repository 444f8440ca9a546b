"""The policy-gradient family in the trainer: paths and cuts agree, each option does what it says."""

import math
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from abrun.recipe.algorithms import Grpo
from abrun.runs.lines import read_json_lines
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.loop.grpo import GrpoAlgorithm, PolicyObjective, Rollouts
from abrun.trainer.loop.setup import Learner, RunSetup, make_setup
from abrun.trainer.rl.batch import RolloutBatch, ScoredBatch, TrainBatch
from abrun.trainer.rl.losses import loss_weights
from tests.trainer.loop import runs
from tests.trainer.loop.runs import Rows, train_here
from tests.trainer.loop.test_batch_cuts_of_a_run import assert_same_up_to_rounding
from tests.written_runs import make_run, run_config

ONE_PASS = "policy.logprobs={impl: chunked, one_pass: true}"
CHUNKED = "policy.logprobs={impl: chunked, chunk_size: 17}"
PACKED = ("policy.packing=true", "policy.micro_batch_tokens=90")
PPO = "algorithm={type: ppo, prompts_per_step: 4, group_size: 8}"
TERMS = (
    "algorithm.kl_coefficient=0.1",
    "algorithm.entropy_coefficient=0.02",
    "algorithm.importance_correction={type: truncated, low: 0.5, high: 2.0}",
    "algorithm.epochs_per_step=2",
    "algorithm.minibatches_per_step=2",
    "algorithm.metrics=full",
    "task.max_operand=6",
)
FAMILY: dict[str, tuple[str, ...]] = {
    "dapo": ("algorithm.clip_high=0.28", "algorithm.dual_clip=3.0", "algorithm.grad_divisor=documents"),
    "gspo": ("algorithm.loss=gspo", "algorithm.loss_reduction=sequence_mean"),
    "cispo": ("algorithm.loss=cispo", "algorithm.clip_low=1.0", "algorithm.loss_reduction=document_sum"),
    "rloo": (
        "algorithm.loss=reinforce",
        "algorithm.advantage_baseline=leave_one_out",
        "algorithm.normalize_advantages=false",
        "algorithm.kl_in=reward",
        "algorithm.kl_estimator=k1",
    ),
    "reinforce++": (
        "algorithm.advantage_baseline=batch_mean",
        "algorithm.normalize_over=batch",
        "algorithm.kl_in=reward_to_go",
        "algorithm.kl_estimator=k1",
    ),
    "dr-grpo": ("algorithm.normalize_advantages=false", "algorithm.loss_reduction=sequence_sum_constant"),
}


def train(directory: Path, weights: Path, *overrides: str) -> Rows:
    return runs.train(directory, run_config(*overrides), initial_weights=weights)


# --- paths and cuts ---


USUAL = ("gspo",)  # the others take their time with -m slow


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in FAMILY]
)
def test_dense_fused_and_cut_agree(name: str, trained: Callable[..., Rows], group: None) -> None:
    """All terms of the loss, several updates a step: whichever path and cut, the same up to rounding."""
    settings = ("steps=2", *TERMS, *FAMILY[name])
    whole = trained(*settings)
    assert whole[1]["train/grad_norm"] > 1e-3 and whole[2]["train/kl_penalty"] != 0
    assert whole[2]["train/probs_ratio_max"] > 1.0001
    others = {"chunked": (CHUNKED, "policy.micro_batch_size=13"), "packed": PACKED}
    if name != "gspo":
        others["one-pass"] = (ONE_PASS, *PACKED, "policy.share_prompts=true")
    for overrides in others.values():
        assert_same_up_to_rounding(trained(*settings, *overrides), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (
            *FAMILY["gspo"],
            "algorithm.normalize_over=batch",
            "algorithm.dynamic_sampling={max_tries: 2}",
            "algorithm.documents_per_step=64",
            CHUNKED,
        ),
        (*FAMILY["reinforce++"], "algorithm.documents_per_step=40", ONE_PASS),
    ],
)
def test_two_ranks_change_only_rounding(
    overrides: tuple[str, ...], trained: Callable[..., Rows], group: None
) -> None:
    settings = ("steps=2", *TERMS, *overrides)
    two = trained(*settings, "policy.micro_batch_size=5", "cluster.cpu_ranks=2")
    assert_same_up_to_rounding(two, trained(*settings))


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        ("clipped", "token_mean"),
        ("clipped", "sequence_mean"),
        ("clipped", "sequence_sum_constant"),
        ("reinforce", "token_mean"),
        ("cispo", "token_mean"),
    ],
)
def test_any_tokens_of_a_microbatch_have_the_losses_they_have_in_it(loss: Any, reduction: Any) -> None:
    draw = torch.Generator().manual_seed(3)
    mask = torch.rand(4, 6, generator=draw) > 0.3
    mask[:, 0] = False
    logprobs, entropy, *known = torch.randn(7, 4, 6, generator=draw).masked_fill(~mask, math.nan)
    batch = TrainBatch(
        token_ids=torch.zeros(4, 6, dtype=torch.int64),
        token_mask=mask,
        advantages=known[0],
        old_logprobs=known[1],
        inference_logprobs=known[2],
        reference_logprobs=known[3],
        importance_weights=known[4],
        loss_weights=loss_weights(
            mask, loss_reduction=reduction, num_tokens=40, num_sequences=8, max_completion_tokens=9
        ),
    )
    settings = Grpo(type="grpo", loss=loss, kl_coefficient=0.1, entropy_coefficient=0.2)
    objective = PolicyObjective(settings=settings, num_tokens=40, num_sequences=8, gradient_factor=0.25)
    losses = objective.losses(batch, logprobs, entropy)
    whole = losses.shares
    assert whole.isfinite().all() and (whole[mask] != 0).all()
    tokens = batch.predicted_tokens()
    for part in (slice(0, 7), slice(7, 8), slice(8, 20)):
        values = (one[:, 1:].flatten()[part] for one in (logprobs, entropy))
        assert torch.equal(objective.losses(tokens[part], *values).shares, whole[:, 1:].flatten()[part])
    sums = objective.metrics(batch, logprobs, entropy, losses).sums
    assert sums["train/loss"].item() == pytest.approx(4 * whole.sum().item(), rel=1e-12)
    log_ratio = (known[3] - logprobs)[mask].double()
    token_mean = (log_ratio.exp() - 1 - log_ratio).clamp(max=10).sum().item() / 40
    assert sums["train/kl_penalty"].item() == pytest.approx(token_mean, rel=1e-5)


# --- several updates a step ---


def test_old_logprobs_stay_while_the_policy_moves(
    tmp_path: Path, warm_weights: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"optimizer_step": 0, "compute_logprobs": 0}
    for name in counts:
        original = getattr(DtensorBackend, name)

        def counted(self: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            counts[name] += 1
            return original(self, *args)

        monkeypatch.setattr(DtensorBackend, name, counted)
    settings = ("steps=2", "policy.optimizer.warmup_steps=0", "algorithm.clip_high=0.05", "keep_samples=null")
    one = train(tmp_path / "one", warm_weights, *settings)
    assert counts == {"optimizer_step": 2, "compute_logprobs": 0}
    updates = ("steps=1", "algorithm.epochs_per_step=3", "algorithm.minibatches_per_step=2")
    several = train(tmp_path / "several", warm_weights, *settings, *updates)
    assert counts == {"optimizer_step": 2 + 6, "compute_logprobs": 1}
    assert one[2]["train/probs_ratio"] == 1 and one[2]["train/clip_fraction"] == 0
    assert several[1]["train/probs_ratio_max"] > 1.05 > 0.95 > several[1]["train/probs_ratio_min"]
    assert several[1]["train/clip_fraction"] > 0
    assert several[1]["train/probs_ratio_clamped"] != several[1]["train/probs_ratio"]
    for key in ("reward", "num_valid_samples", "global_valid_toks", "token_mult_prob_error", "lr"):
        assert several[1][f"train/{key}"] == pytest.approx(one[1][f"train/{key}"], rel=1e-6)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[TrainBatch]:
    """The batches of all updates that a test's runs take."""
    batches: list[TrainBatch] = []
    original = Learner.update_on_each

    def record(self: Learner, updates: Any, step: int) -> dict[str, float]:
        batches.extend(batch for batch, _ in updates)
        return original(self, updates, step)

    monkeypatch.setattr(Learner, "update_on_each", record)
    return batches


# --- options of the loss ---


def test_the_on_policy_ratio_is_one_to_the_bit(trained: Callable[..., Rows], group: None) -> None:
    settings = ("steps=2", "policy.micro_batch_size=7", CHUNKED)
    old, forced = (trained(*settings, f"algorithm.ratio={ratio}") for ratio in ("old", "on_policy"))
    for step, row in forced.items():
        assert row["train/probs_ratio_min"] == row["train/probs_ratio_max"] == 1
        assert row["train/probs_ratio"] == pytest.approx(1, rel=1e-14)  # a mean of ones
        assert row["train/grad_norm"] == pytest.approx(old[step]["train/grad_norm"], rel=1e-3)
        assert row["train/loss"] == pytest.approx(old[step]["train/loss"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm.metrics=full", "algorithm.kl_coefficient=0.1", "algorithm.entropy_coefficient=0.02"),
        pytest.param(
            ("algorithm.loss=gspo", "algorithm.loss_reduction=sequence_mean", *PACKED), marks=pytest.mark.slow
        ),
        ("algorithm.importance_correction={type: sequence_mask, low: 0.99999999, high: 1.00000001}",),
        (
            "policy.logprobs={impl: chunked, one_pass: true}",
            "algorithm.importance_correction={type: icepop, high: 1.0}",
        ),
        pytest.param(
            (
                *FAMILY["cispo"],
                *PACKED,
                "algorithm.importance_correction={type: truncated, low: 0.9999999, high: 1.0000001}",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param((*FAMILY["reinforce++"], "algorithm.metrics=full"), marks=pytest.mark.slow),
        (PPO, *PACKED),
    ],
    ids=["terms", "gspo", "sequence_mask", "one_pass", "cispo", "reinforce++", "ppo"],
)
def test_one_update_has_its_old_logprobs_from_its_own_pass(
    settings: tuple[str, ...], trained: Callable[..., Rows], group: None
) -> None:
    """And every number is, to the bit, what a pass before it makes of it."""
    old, auto = (trained("steps=2", *settings, f"algorithm.ratio={ratio}") for ratio in ("old", "auto"))
    for step, row in auto.items():
        assert "memory/logprobs/peak_live_tensor_bytes" in old[step].keys() - row.keys()
        values, expected = (
            {key: value.hex() for key, value in one.items() if key.startswith("train/")}
            for one in (row, old[step])
        )
        assert values == expected
    assert auto[2]["train/grad_norm"] != 0


@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward"),
        (
            "policy.logprobs={impl: chunked, one_pass: true}",
            "algorithm.importance_correction={type: sequence_mask, low: 0.9, high: 1.1}",
        ),
    ],
)
def test_what_needs_log_probs_before_its_update_gets_a_pass(
    settings: tuple[str, ...], trained: Callable[..., Rows], group: None
) -> None:
    row = trained("steps=1", *settings)[1]
    assert row["memory/logprobs/peak_live_tensor_bytes"] > 0 and row["train/probs_ratio_max"] == 1


@pytest.mark.parametrize(
    "estimator", ["k3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("k1", "k2"))]
)
def test_kl_in_the_reward_shapes_it_and_leaves_the_loss(
    estimator: str, trained: Callable[..., Rows], group: None
) -> None:
    kl = ("algorithm.kl_in=reward", "algorithm.kl_coefficient=0.3", f"algorithm.kl_estimator={estimator}")
    rows = trained("steps=2", "policy.optimizer.warmup_steps=0", *kl)
    assert rows[1]["train/kl_penalty"] == 0  # the reference is the initial policy
    for step, row in rows.items():
        shaped = row["train/reward_before_kl"] - 0.3 * row["train/kl_penalty_sum_per_sequence"]
        assert row["train/reward"] == pytest.approx(shaped, abs=1e-6)
        assert row["train/loss"] == pytest.approx(-row["train/advantages/mean"], rel=1e-4, abs=1e-6)
        assert step == 1 or row["train/kl_penalty"] != 0
        of_tokens = row["train/kl_penalty_sum_per_sequence"] / row["train/mean_gen_tokens_per_sample"]
        assert row["train/kl_penalty"] == pytest.approx(of_tokens, rel=1e-9)


@pytest.mark.parametrize("kl_in", ["reward", "reward_to_go"])
def test_a_small_kl_comes_off_a_large_reward(kl_in: str, warm_weights: Path, group: None) -> None:
    """Rewards of 10,000, whose float32 neighbours are 0.001 away, and penalties that differ by less."""
    setup, _ = collector(
        warm_weights,
        f"algorithm.kl_in={kl_in}",
        "algorithm.advantage_baseline=batch_mean",
        "algorithm.normalize_advantages=false",
        "algorithm.kl_estimator=k1",
        "algorithm.kl_coefficient=1.0",
        "algorithm.group_size=4",
    )
    assert isinstance(setup.config.algorithm, Grpo)
    zeros, kl = torch.zeros(4, 2), torch.tensor([0.0001, 0.0002, 0.0003, 0.0006])
    scored = ScoredBatch(
        token_ids=torch.ones(4, 2, dtype=torch.int64),
        token_mask=torch.tensor([[False, True]] * 4),
        inference_logprobs=zeros,
        rewards=torch.full((4,), 1e4),
        old_logprobs=zeros,
        reference_logprobs=torch.stack([zeros[:, 0], -kl], dim=1),
        importance_weights=None,
        loss_weights=zeros.double(),
    )
    algorithm = GrpoAlgorithm(setup, setup.config.algorithm)
    advantages = algorithm.advantages(scored)[0].advantages
    assert advantages.dtype == torch.float32
    assert advantages[:, 1].tolist() == pytest.approx([0.0002, 0.0001, 0.0, -0.0003], abs=1e-8)


def test_the_kl_to_go_comes_off_each_tokens_reward(
    tmp_path: Path,
    warm_weights: Path,
    group: None,
    monkeypatch: pytest.MonkeyPatch,
    batches: list[TrainBatch],
) -> None:
    settings = ("steps=2", "policy.optimizer.warmup_steps=0", "algorithm.kl_coefficient=0.3")
    drawn: list[RolloutBatch] = []
    collect = Rollouts.collect

    def listen(self: Rollouts, step: int) -> Any:
        batch, metrics = collect(self, step)
        drawn.append(batch)
        return batch, metrics

    monkeypatch.setattr(Rollouts, "collect", listen)
    rows = train(tmp_path / "run", warm_weights, *settings, *FAMILY["reinforce++"])
    assert rows[1]["train/kl_penalty"] == 0  # the reference is the initial policy
    for sampled, batch, row in zip(drawn, batches, rows.values(), strict=True):
        assert batch.reference_logprobs is not None and batch.old_logprobs is not None
        log_ratio = (batch.old_logprobs - batch.reference_logprobs).tolist()
        rewards, to_go = sampled.rewards.tolist(), []
        for index, mask in enumerate(batch.token_mask.tolist()):
            tokens = [t for t, counted in enumerate(mask) if counted]
            following = [sum(log_ratio[index][s] for s in tokens if s >= t) for t in tokens]
            to_go += [rewards[index] - 0.3 * kl for kl in following]
        mean, std = statistics.fmean(to_go), statistics.stdev(to_go)
        expected = [(value - mean) / (std + 1e-6) for value in to_go]
        assert batch.advantages[batch.token_mask].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        shaped = row["train/reward_before_kl"] - 0.3 * row["train/kl_penalty_sum_per_sequence"]
        assert row["train/reward"] == pytest.approx(shaped, abs=1e-6)
        assert row["train/reward_before_kl"] == pytest.approx(statistics.fmean(rewards), rel=1e-6)
        assert row["train/advantages/mean"] == pytest.approx(0, abs=1e-6)
    of_first = batches[1].advantages
    assert of_first is not None and len(set(of_first[0][batches[1].token_mask[0]].tolist())) > 1


def test_metrics_levels(trained: Callable[..., Rows], group: None) -> None:
    levels = ("none", "basic", "full")
    rows = {level: trained("steps=1", f"algorithm.metrics={level}")[1] for level in levels}
    assert rows["none"].keys() < rows["basic"].keys() < rows["full"].keys()
    assert {"train/loss", "train/reward", "train/grad_norm", "train/global_valid_toks"} <= rows["none"].keys()
    assert "train/entropy" not in rows["none"] and "train/entropy" in rows["basic"]
    added = {
        "old_logprobs", "new_logprobs", "ratio_new_old", "kl_new_old", "clipped_ratio_fraction", "advantage",
        "document_entropy", "ratio_new_old_sum", "ratio_new_old_squared_sum", "num_tokens", "max_advantage",
        "min_advantage",
    }  # fmt: skip
    assert rows["full"].keys() - rows["basic"].keys() == {f"train/{key}" for key in added}
    assert rows["full"]["train/num_tokens"] == rows["full"]["train/global_valid_toks"]
    assert rows["full"]["train/max_advantage"] == rows["basic"]["train/advantages/max"]
    for level in ("none", "full"):  # what is measured does not change what is trained
        for key in ("loss", "grad_norm"):
            assert rows[level][f"train/{key}"] == rows["basic"][f"train/{key}"]


# --- which rollouts a step has ---


def collector(weights: Path, *overrides: str) -> tuple[RunSetup, Rollouts]:
    setup = make_setup(run_config(*overrides), 0, weights, torch.device("cpu"))
    assert isinstance(setup.config.algorithm, Grpo)
    return setup, Rollouts(setup, setup.config.algorithm)


def prompts_of(batch: RolloutBatch) -> list[tuple[int, ...]]:
    """The prompt of each group of 8."""
    rows = zip(batch.token_ids[::8], batch.token_mask[::8], strict=True)
    return [tuple(ids[: int(mask.nonzero()[0])].tolist()) for ids, mask in rows]


def groups_of(batch: RolloutBatch) -> list[list[float]]:
    return batch.rewards.view(-1, 8).tolist()


def test_dynamic_sampling_leaves_out_groups_without_signal(warm_weights: Path, group: None) -> None:
    hard = ("task.max_operand=6", "algorithm.prompts_per_step=8")
    _, without = collector(warm_weights, *hard)
    plain, plain_metrics = without.collect(1)
    signal = [len(set(rewards)) > 1 for rewards in groups_of(plain)]
    assert 0 < sum(signal) < 8  # the first draw has groups of both kinds
    setup, rollouts = collector(warm_weights, *hard, "algorithm.dynamic_sampling={max_tries: 10}")
    batch, metrics = rollouts.collect(1)
    assert len(batch) == 64 and all(len(set(rewards)) > 1 for rewards in groups_of(batch))
    tries = metrics["train/dynamic_sampling_tries"]
    assert 2 <= tries <= 10 and sum(signal) / 64 < metrics["train/dynamic_sampling_kept_share"] < 1
    assert metrics["train/dynamic_sampling_kept_share"] * 8 * tries >= 8
    # It begins with the same prompts and completions, and what it reports is of all that was drawn.
    kept = [prompt for prompt, has in zip(prompts_of(plain), signal, strict=True) if has]
    assert prompts_of(batch)[: len(kept)] == kept
    rows = torch.tensor(signal).repeat_interleave(8).nonzero()[:, 0]
    width = min(plain.token_ids.shape[1], batch.token_ids.shape[1])
    assert torch.equal(batch.inference_logprobs[: len(rows), :width], plain.inference_logprobs[rows, :width])
    assert metrics["train/reward"] != plain_metrics["train/reward"]
    # A pure function of seed and step: again, and without the step before it.
    again, _ = rollouts.collect(1)
    second, _ = rollouts.collect(2)
    assert isinstance(setup.config.algorithm, Grpo)
    alone, _ = Rollouts(setup, setup.config.algorithm).collect(2)
    assert torch.equal(again.token_ids, batch.token_ids) and torch.equal(second.token_ids, alone.token_ids)
    assert not torch.equal(second.token_ids, batch.token_ids)


def test_a_kl_in_the_reward_leaves_it_of_all_that_was_drawn(warm_weights: Path, group: None) -> None:
    settings = (
        "task.max_operand=6",
        "algorithm.prompts_per_step=8",
        "algorithm.dynamic_sampling={max_tries: 2}",
        "algorithm.kl_in=reward",
        "algorithm.kl_coefficient=0.3",
    )
    setup, rollouts = collector(warm_weights, *settings)
    batch, drawn = rollouts.collect(1)
    assert isinstance(setup.config.algorithm, Grpo)
    row = GrpoAlgorithm(setup, setup.config.algorithm).step(1)
    assert row["train/reward"] == row["train/reward_before_kl"] == drawn["train/reward"]  # no KL in step one
    assert row["train/reward"] != pytest.approx(float(batch.rewards.mean()), rel=0.05)


def test_dynamic_sampling_ends_after_its_tries(warm_weights: Path, group: None) -> None:
    """Then groups without signal fill the batch up, after those that have one."""
    hard = ("task.max_operand=6", "algorithm.prompts_per_step=8")
    plain, _ = collector(warm_weights, *hard)[1].collect(1)
    batch, metrics = collector(warm_weights, *hard, "algorithm.dynamic_sampling={max_tries: 1}")[1].collect(1)
    assert metrics["train/dynamic_sampling_tries"] == 1
    signal = [len(set(rewards)) > 1 for rewards in groups_of(batch)]
    assert signal == sorted(signal, reverse=True) and 0 < sum(signal) < 8
    assert metrics["train/dynamic_sampling_kept_share"] == sum(signal) / 8
    assert sorted(prompts_of(batch)) == sorted(prompts_of(plain))


def test_a_step_without_any_signal_still_ends(tmp_path: Path, group: None) -> None:
    """Random weights solve nothing: every reward is 0, and so is every advantage."""
    config = run_config("steps=2", "algorithm.dynamic_sampling={max_tries: 2}")
    rows = train_here(make_run(tmp_path / "run", config))
    for row in rows.values():
        assert row["train/dynamic_sampling_kept_share"] == 0 and row["train/dynamic_sampling_tries"] == 2
        assert row["train/grad_norm"] == 0 and row["train/num_valid_samples"] == 32
        assert all(math.isfinite(value) for value in row.values())


def test_completions_that_were_cut_off_have_a_reward_and_no_tokens(warm_weights: Path, group: None) -> None:
    cut = ("task.max_operand=6", "rollout.max_new_tokens=2")  # two digits and the end are three tokens
    _, without = collector(warm_weights, *cut)
    plain, metrics = without.collect(1)
    _, filtering = collector(warm_weights, *cut, "algorithm.overlong_filtering=true")
    batch, of_all = filtering.collect(1)
    assert of_all == metrics and 0.1 < metrics["train/truncation_rate"] < 0.9
    counted = batch.token_mask.any(dim=1)
    assert 1 - float(counted.double().mean()) == pytest.approx(metrics["train/truncation_rate"])
    assert torch.equal(batch.token_mask, plain.token_mask & counted[:, None])
    assert torch.equal(batch.rewards, plain.rewards) and torch.equal(batch.token_ids, plain.token_ids)


def test_long_completions_are_punished_by_their_length(warm_weights: Path, group: None) -> None:
    """Three tokens at most: a penalty of 0, 0.25 and 0.5 for one, two and three of them."""
    settings = ("task.max_operand=6", "rollout.max_new_tokens=3")
    plain, metrics = collector(warm_weights, *settings)[1].collect(1)
    punished = (*settings, "algorithm.overlong_punishment={buffer: 2, factor: 0.5}")
    batch, of_all = collector(warm_weights, *punished)[1].collect(1)
    lengths = plain.token_mask.sum(dim=1)
    expected = [{1: 0.0, 2: 0.25, 3: 0.5}[int(length)] for length in lengths]
    assert len(set(expected)) > 1
    assert (plain.rewards - batch.rewards).tolist() == pytest.approx(expected)
    assert of_all.pop("train/overlong_penalty") == pytest.approx(sum(expected) / len(expected))
    assert of_all == metrics  # train/reward and signal_share are the verifier's
    filtered, _ = collector(warm_weights, *punished, "algorithm.overlong_filtering=true")[1].collect(1)
    assert torch.equal(filtered.rewards, batch.rewards)


def test_filtered_completions_count_nowhere(tmp_path: Path, warm_weights: Path, group: None) -> None:
    settings = ("steps=1", "task.max_operand=6", "algorithm.overlong_filtering=true", *PACKED)
    row = train(tmp_path / "some", warm_weights, *settings, "rollout.max_new_tokens=2")[1]
    assert row["train/num_valid_samples"] == round(32 * (1 - row["train/truncation_rate"]))
    assert row["train/global_valid_toks"] < 32 * row["train/mean_gen_tokens_per_sample"]
    assert 0 < row["train/grad_norm"] < math.inf
    setup, rollouts = collector(warm_weights)
    batch, _ = rollouts.collect(1)
    assert isinstance(setup.config.algorithm, Grpo)
    nothing = replace(batch, token_mask=torch.zeros_like(batch.token_mask))
    row = GrpoAlgorithm(setup, setup.config.algorithm).update(nothing, 1)
    assert row["train/num_valid_samples"] == row["train/grad_norm"] == row["train/loss"] == 0


def test_documents_are_fetched_until_there_are_enough(warm_weights: Path, group: None) -> None:
    _, rollouts = collector(warm_weights, "algorithm.documents_per_step=70", "task.max_operand=99")
    batch, metrics = rollouts.collect(1)
    assert len(batch) == 96  # 32 a fetch
    prompts = prompts_of(batch)
    assert len(set(prompts)) == 12
    once, _ = collector(warm_weights, "task.max_operand=99")[1].collect(1)
    assert prompts[:4] == prompts_of(once)
    assert not any(key.startswith("train/dynamic_sampling") for key in metrics)


def test_the_realised_count_of_documents_is_the_normaliser(trained: Callable[..., Rows], group: None) -> None:
    overrides = ("steps=2", "algorithm.documents_per_step=70", "algorithm.entropy_coefficient=0.1")
    for row in trained(*overrides).values():
        assert row["train/num_valid_samples"] == 96
        assert row["train/global_valid_toks"] == pytest.approx(96 * row["train/mean_gen_tokens_per_sample"])
        expected = -row["train/advantages/mean"] - 0.1 * row["train/entropy"]
        assert row["train/loss"] == pytest.approx(expected, rel=1e-4)


def test_a_resumed_run_draws_what_it_would_have_drawn(
    tmp_path: Path, warm_weights: Path, group: None
) -> None:
    """The second half from a checkpoint is the second half of the whole run, to the bit."""
    settings = (
        "checkpoint.every=2",
        "task.max_operand=6",
        "algorithm.dynamic_sampling={max_tries: 3}",
        "algorithm.minibatches_per_step=2",
        "algorithm.epochs_per_step=2",
    )
    whole = train(tmp_path / "whole", warm_weights, "steps=4", *settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "halves")
    (tmp_path / "halves" / "result.json").unlink()
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "step-000004")
    halves = train_here(tmp_path / "halves")
    steps = [row["step"] for row in read_json_lines(tmp_path / "halves" / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 3, 4]
    assert halves.keys() == whole.keys()
    for step, row in whole.items():
        for key, value in row.items():
            if key.startswith("train/"):
                assert halves[step][key] == value, (step, key)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY)
def test_reward_climbs(name: str, tmp_path: Path, warm_weights: Path, group: None) -> None:
    updates = () if name == "rloo" else ("algorithm.minibatches_per_step=2",)
    clip = ("algorithm.clip_low=0.05", "algorithm.clip_high=0.05") if name == "gspo" else ()
    rows = train(
        tmp_path / "run",
        warm_weights,
        "steps=50",
        "algorithm.prompts_per_step=32",
        "algorithm.kl_coefficient=0.001",
        *updates,
        *FAMILY[name],
        *clip,
    )
    key = "train/reward_before_kl" if "train/reward_before_kl" in rows[1] else "train/reward"
    reward = [row[key] for row in rows.values()]
    assert sum(reward[-10:]) / 10 > sum(reward[:3]) / 3 + 0.15, reward
