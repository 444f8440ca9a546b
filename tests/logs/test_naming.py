"""Arms, seeds and reruns from names; metrics under their canonical names."""

import numpy as np
import pytest

from abrun.errors import ComparisonError
from abrun.logs import Log
from abrun.logs.aliases import FRAMEWORK_MARKERS, FRAMEWORKS, parse_aliases, rename_all, rename_metrics
from abrun.logs.naming import guess_baseline, guess_runs, name_runs, name_seeds
from abrun.runs.layout import RunName
from abrun.stats.series import Series
from tests.snapshot import Snapshot


def log(name: str, **known: object) -> Log:
    return Log(name=name, place=f"place/{name}", metrics={}, **known)  # type: ignore[arg-type]


def named(*names: str, pattern: str | None = None) -> list[str] | str:
    runs = name_runs([log(name) for name in names], pattern)
    return runs if isinstance(runs, str) else [str(run) for run in runs]


PATTERNS = [
    f"{{arm}}{mark}{word}{{seed}}" for mark in "/-_." for word in ("seed-", "seed_", "seed", "seed=", "s")
]


@pytest.mark.parametrize("pattern", [*PATTERNS, "{arm}/{seed}"])
def test_seeds_at_the_end_of_names(pattern: str) -> None:
    names = [pattern.format(arm=arm, seed=seed) for arm in ("baseline", "fused-2") for seed in (0, 11)]
    expected = ["baseline/seed-0", "baseline/seed-11", "fused-2/seed-0", "fused-2/seed-11"]
    assert named(*names) == expected
    assert named(*(f"{name}.csv" for name in names)) == expected
    assert named(*(f"{name}/runs/Nov21_12-00-s7/x" for name in names)) == expected
    assert named(*names, f"{names[0]}-aa2") == [*expected, "baseline/seed-0-aa2"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["exp/a/seed-1", "exp/b/seed-1"], ["exp/a/seed-1", "exp/b/seed-1"]),
        (["qwen-s2-a-s0", "qwen-s2-b-s0"], ["qwen-s2-a/seed-0", "qwen-s2-b/seed-0"]),
        (["a/3/log.jsonl", "b/3/log.jsonl"], ["a/seed-3", "b/seed-3"]),
        (["<b>'\"-s1", "\\x1b-s1"], ["<b>'\"/seed-1", "\\x1b/seed-1"]),
        (["a-s007", "b-s7"], ["a/seed-7", "b/seed-7"]),
        (["a-s1", "b_seed1/x", "c/seed=1"], ["a/seed-1", "b/seed-1", "c/seed-1"]),
    ],
)
def test_odd_names(names: list[str], expected: list[str]) -> None:
    assert named(*names) == expected


def test_patterns_given_by_hand(snapshot: Snapshot) -> None:
    assert named("x_0_fast", "x_1_slow", pattern="x_{seed}_{arm}") == ["fast/seed-0", "slow/seed-1"]
    assert named("2024/a.lr0.1/run3", pattern="*/{arm}.lr*/run{seed}") == ["a/seed-3"]
    assert named("a[0]{x}", pattern="{arm}[{seed}]{{x}}") == ["a/seed-0"]
    assert named("a-1-2", pattern="{arm}-{seed}-{rerun}") == ["a/seed-1-aa2"]
    snapshot(named("a-s0", "eval", pattern="{arm}-s{seed}"))
    for pattern, lacking in (("{arm}", "seed"), ("{seed}", "arm")):
        assert f"lacks {{{lacking}}}; example" in named("a-s0", pattern=pattern)


@pytest.mark.parametrize("pattern", ["{arm}{x}{seed}", "{arm}{arm}{seed}", "{arm", "{}", "{seed:d}{arm}"])
def test_patterns_that_are_none(pattern: str) -> None:
    with pytest.raises(ComparisonError, match=r"--pattern: got '.*(allowed|example)"):
        named("a-s0", pattern=pattern)


def test_reasons_why_no_rule_names_the_runs(snapshot: Snapshot) -> None:
    snapshot(named("a-s0/x", "a-s0/y"))
    snapshot(named("one", "two", "a-s0"))
    assert "and 3 more" in named(*(f"run{letter}" for letter in "abcdefgh"))


def test_job_types_and_configs() -> None:
    logs = [
        log("x-s3-aa1", job_type="baseline"),
        log("fluffy-cloud", job_type="baseline", config={"seed": 4, "data.seed": 9}),
        log("misty-moon", job_type="fused", config={"trainer.seed": 5}),
    ]
    assert [*map(str, name_runs(logs))] == ["baseline/seed-3-aa1", "baseline/seed-4", "fused/seed-5"]
    same = [log("a-s0", job_type="train"), log("b-s0", job_type="train")]  # which says nothing about arms
    assert name_runs(same) == [RunName(arm="a", seed=0), RunName(arm="b", seed=0)]


def test_identity_beats_names() -> None:
    known = log("whatever-s9", identity=RunName(arm="b", seed=1, rerun=2))
    assert name_runs([known]) == [RunName(arm="b", seed=1, rerun=2)]
    assert name_seeds([known], "other") == [RunName(arm="other", seed=1, rerun=2)]


def test_seeds_of_a_known_arm(snapshot: Snapshot) -> None:
    def seeds(*names: str, pattern: str | None = None) -> list[int] | str:
        runs = name_seeds([log(name) for name in names], "x", pattern)
        return runs if isinstance(runs, str) else [run.seed for run in runs]

    assert seeds("seed-0", "run_seed1.csv", "a/b-s2", "3") == [0, 1, 2, 3]
    assert seeds("only") == [0]
    assert seeds("r0x", "r1x", pattern="r{seed}x") == [0, 1]
    snapshot(seeds("one", "two"))
    assert "x/seed-1: got two runs" in str(seeds("s1", "seed1"))


# --- aliases ---


def series(*values: float) -> Series:
    return Series(np.arange(len(values)), np.array(values))


def test_presets_rename_and_never_replace() -> None:
    metrics = {"critic/score/mean": series(1), "timing_s/step": series(2), "other": series(3)}
    (renamed,) = rename_all([metrics], parse_aliases(["verl"])).metrics
    assert renamed["train/reward"] is metrics["critic/score/mean"]
    assert sorted(renamed) == ["other", "timing/train/total_step_time_s", "train/reward"]
    ours = {**metrics, "train/reward": series(9)}
    left, right = rename_all(
        [ours, metrics], parse_aliases(["verl"])
    ).metrics  # alike in both, or it would compare two things
    assert (
        left["train/reward"].value_at(0) == 9 and "train/reward" not in right and "critic/score/mean" in right
    )


@pytest.mark.parametrize("preset", FRAMEWORKS)
def test_presets_name_no_metric_twice(preset: str) -> None:
    aliases = FRAMEWORKS[preset]
    assert len(set(aliases.values())) == len(aliases)
    assert not set(aliases) & set(aliases.values())


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        ("verl", "actor/pg_clipfrac"),  # without what the dual clip holds
        ("verl", "rollout_corr/rollout_is_mean"),  # before truncation
        ("verl", "actor/kl_loss"),  # by loss_agg_mode, summed over updates
        ("verl", "perf/throughput"),  # counts prompts
        ("trl", "train/sampling/importance_sampling_ratio/mean"),  # of whole sequences
        ("skyrl", "policy/policy_kl"),  # a mean of sequences' means, as the three below
        ("openrlhf", "train/kl"),
        ("slime", "train/kl_loss"),
        ("slime", "train/pg_clipfrac"),
        ("slime", "train/critic-value_loss"),  # twice ours
        ("pipelinerl", "rl/kl"),
        ("torchtitan-rl", "loss/ratio_clipped_frac"),  # whatever the advantage's sign
    ],
)
def test_metrics_of_another_definition_keep_their_names(framework: str, name: str) -> None:
    """By preset and by recognition: see docs/reference/metrics.md."""
    told_by = next(names for known, names in FRAMEWORK_MARKERS if known == framework)
    metrics = {**{told: series(0) for told in told_by}, name: series(1)}
    for chosen in ([framework], []):
        (renamed,) = rename_all([metrics], parse_aliases(chosen)).metrics
        assert renamed[name].value_at(0) == 1


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("training/train_samples_reward", "train/reward"),  # Fast-LLM, with the name of its loss in front
        ("training/gspo_train_samples_reward", "train/reward"),
        ("grpo_loss", "train/loss"),
        ("reward/all/mean", "train/reward"),  # prime-rl's orchestrator alone
        ("ppo_actor/task_reward/avg", "train/reward"),  # AReaL
        ("grpo_actor/task_reward/avg", "train/reward"),  # its earlier versions
        ("rollout/reward/mean", "train/reward"),
        ("eval-rollout/reward", None),
        ("grpo_entropy", None),  # Fast-LLM's mean over documents
    ],
)
def test_a_metric_that_is_recognised_alone(name: str, ours: str | None) -> None:
    (renamed,) = rename_all([{name: series(1)}], parse_aliases([])).metrics
    assert list(renamed) == [ours or name]


def test_explicit_aliases(snapshot: Snapshot) -> None:
    metrics = {"a": series(1), "b": series(2)}
    assert rename_metrics(metrics, {"a": "b", "b": "a"}) == {"a": metrics["b"], "b": metrics["a"]}
    assert list(rename_metrics(metrics, {"train/reward": "a", "x": "nothing"})) == ["b", "train/reward"]
    (renamed,) = rename_all(
        [{"critic/score/mean": series(1), "r": series(2)}], parse_aliases(["verl", "train/reward=r"])
    ).metrics
    assert renamed["train/reward"].value_at(0) == 2
    (renamed,) = rename_all([{"a=b": series(1)}], parse_aliases(["x=a=b"])).metrics
    assert list(renamed) == ["x"]
    with snapshot.refused(ComparisonError):
        rename_all([metrics], parse_aliases(["x=aa"]))
    assert rename_all([{}, {}], parse_aliases(["x=aa"])).metrics == [
        {},
        {},
    ]  # runs that recorded nothing are another matter


@pytest.mark.parametrize("text", ["nemo", "=x", "x=", "", "x\n"])
def test_aliases_that_are_none(text: str) -> None:
    with pytest.raises(
        ComparisonError, match=r"--alias: got .* allowed: trl, verl, nemo-rl, skyrl, .*, or NAME=LOG_NAME"
    ):
        parse_aliases([text])


def test_one_of_our_names_for_two_of_theirs() -> None:
    with pytest.raises(ComparisonError, match="--alias: got 'x' twice"):
        parse_aliases(["x=a", "x=b"])


def test_names_of_hydra_are_divided_at_commas() -> None:
    names = [
        f"2024-11-24/10-00-00/arm={arm},seed={seed}/log.csv" for arm in ("new", "old") for seed in (0, 1)
    ]
    guess = guess_runs([Log(name=name, place=name, metrics={}) for name in names])
    assert guess is not None and not isinstance(guess, str)
    assert [str(name) for name in guess.names] == [
        "arm=new/seed-0",
        "arm=new/seed-1",
        "arm=old/seed-0",
        "arm=old/seed-1",
    ]
    assert guess_baseline(["arm-new", "arm-old"]) == "arm-old"


def test_arms_of_a_sweep_are_the_settings_that_differ() -> None:
    words = ("dandy", "icy", "red", "dim")
    logs = [
        log(f"{word}-sweep-{n + 1}", config={"lr": (1e-5, 1e-6)[n % 2], "seed": n // 2, "run_name": word})
        for n, word in enumerate(words)
    ]
    guess = guess_runs(logs)
    assert guess is not None and not isinstance(guess, str) and guess.paired
    assert [str(name) for name in guess.names] == [
        "lr=1e-05/seed-0",
        "lr=1e-06/seed-0",
        "lr=1e-05/seed-1",
        "lr=1e-06/seed-1",
    ]
