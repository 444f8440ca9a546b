"""Questions that people asked in public, rebuilt as logs and answered by one command."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from abrun.cli.app import app
from abrun.messages.numbers import ratio_text

STEPS = 100


def write_log(path, curves):
    """Write curves {name: values} in verl's layout: `{"step": 1, "data": {...}}` in each line."""
    path.parent.mkdir(parents=True)
    curves = {name: values for name, values in curves.items() if values is not None}
    num_steps = min(map(len, curves.values()))
    rows = ({name: float(values[step]) for name, values in curves.items()} for step in range(num_steps))
    lines = (json.dumps({"step": step + 1, "data": row}) for step, row in enumerate(rows))
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def gradient_norms(tmp_path):
    """Return a function that writes one run of two backends, whose gradient norms have a ratio."""

    def write(ratio, noise=0.01):
        rng = np.random.default_rng(4710)
        norms = 0.08 * np.exp(0.2 * rng.standard_normal(STEPS))
        for backend, factor in (("megatron", 1.0), ("fsdp", ratio)):
            curves = {
                "actor/grad_norm": factor * norms * np.exp(noise * rng.standard_normal(STEPS)),
                "critic/score/mean": np.linspace(0.3, 0.6, STEPS) + 0.03 * rng.standard_normal(STEPS),
                "actor/entropy": 0.5 + 0.02 * rng.standard_normal(STEPS),
            }
            write_log(tmp_path / backend / "metrics.jsonl", curves)
        return [f"megatron={tmp_path / 'megatron'}", f"fsdp={tmp_path / 'fsdp'}"]

    return write


def compare(sources, *options):
    result = CliRunner().invoke(app, ["compare", *sources, *options, "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_a_gradient_norm_three_times_as_high_at_each_step(gradient_norms):
    """verl #4710: FSDP and Megatron gradient norms 3x apart, one run each; how does one compare them?"""
    _, content = compare(gradient_norms(3.05))
    assert content["reasons"][0].startswith(
        "train/grad_norm is 3.05x as high in fsdp as in megatron at each of 100 steps"
    )
    assert "nearly constant factor" in content["reasons"][0]
    described = [item["values"] for item in content["evidence"] if item["kind"] == "description"]
    crossing = {row["metric"] for row in described if row["ratio_at_each_step"] is None}
    assert crossing == {"train/reward", "train/entropy"}


def test_the_lower_arm_is_named_last_and_curves_that_cross_have_no_ratio(gradient_norms):
    sources = gradient_norms(3.05)
    _, content = compare(sources, "--baseline", "fsdp", "--claim", "grad_norm:all:within 0.1")
    assert content["reasons"][0].startswith("train/grad_norm is 3.05x as high in fsdp as in megatron")
    assert content["verdict"] == "INCONCLUSIVE"


def test_equal_arms_have_no_ratio_at_each_step(gradient_norms):
    _, content = compare(gradient_norms(1.0))
    assert content["reason_codes"][0]["code"] == "described"


@pytest.fixture
def arms_of(tmp_path):
    """Return a function that writes four seeds of a curve and of what a treatment makes of it."""

    def write(metric, treat, level=0.5, climb=-1.2):
        for seed in range(4):
            rng = np.random.default_rng(seed)
            curve = level - climb * np.exp(-np.arange(STEPS) / 40) + 0.02 * level * rng.standard_normal(STEPS)
            for arm, values in (("old", curve), ("new", treat(curve, rng))):
                write_log(tmp_path / arm / f"seed-{seed}" / "metrics.jsonl", {metric: values})
        return [str(tmp_path / arm) for arm in ("old", "new")]

    return write


def ratio_sentences(sources, *options):
    _, content = compare(sources, *options)
    return [text for text in content["reasons"] if "as high" in text]


def with_noise(values, rng, noise=0.001):
    return values * np.exp(noise * rng.standard_normal(STEPS))


def test_a_ratio_below_one_percent_is_worth_no_sentence(arms_of):
    sources = arms_of("train/loss", lambda curve, rng: 1.0006 * with_noise(curve, rng, 1e-5))
    assert not ratio_sentences(sources)


@pytest.mark.parametrize("factor", [1.02, 1 / 1.02, 1.08, 2.0])
def test_a_factor_of_a_curve_is_explained_as_another_scale(arms_of, factor):
    (text,) = ratio_sentences(arms_of("train/loss", lambda curve, rng: factor * with_noise(curve, rng)))
    assert text.startswith(f"train/loss is {max(factor, 1 / factor):.3g}x as high in ")
    assert "as from another scale" in text


@pytest.mark.parametrize(("shift", "noise"), [(0.08, 0.02), (0.4, 0.0), (-0.08, 0.02)])
def test_a_shift_of_a_curve_is_no_other_scale(arms_of, shift, noise):
    (text,) = ratio_sentences(arms_of("train/loss", lambda curve, rng: with_noise(curve, rng, noise) + shift))
    assert "scale" not in text


@pytest.mark.parametrize(
    ("metric", "level"), [("memory/reserved_gib", 75), ("memory/max_active(GiB)", 60), ("gpu_mem", 7e4)]
)
def test_a_saving_of_memory_is_no_other_scale(arms_of, metric, level):
    sources = arms_of(metric, lambda curve, rng: 0.9 * curve, level=level, climb=-level / 2)
    (text,) = ratio_sentences(sources)
    assert text.startswith(f"{metric} is 1.11x as high in old as in new") and "scale" not in text


@pytest.mark.parametrize("metric", ["perf/tokens_per_second", "timing/step_s"])
def test_a_claimed_speed_is_no_other_scale(arms_of, metric):
    sources = arms_of(metric, lambda curve, rng: 1.3 * curve)
    sources = [f"{source}/seed-0" for source in sources]
    (text,) = ratio_sentences(sources, "--claim", f"{metric}:all:within 10%")
    assert "scale" not in text


def test_the_digits_of_a_ratio_show_its_distance_from_1():
    assert [*map(ratio_text, (1.0006, 1.0123, 1.08, 3.049, 12.34, 1.0))] == (
        ["1.0006x", "1.012x", "1.08x", "3.05x", "12.3x", "1x"]
    )


def write_arms(folder, change, num_seeds=3, num_metrics=30):
    """Write seeds of two arms with many metrics of noise, as `change(arm, seed, curves)` returns them."""
    for seed in range(num_seeds):
        for number, arm in enumerate(("old", "new")):
            rng = np.random.default_rng([seed, number])
            curves = {
                f"train/extra/{index:02d}": 1 + 0.1 * rng.standard_normal(STEPS)
                for index in range(num_metrics)
            }
            curves["train/reward"] = np.linspace(0.2, 0.8, STEPS) + 0.02 * rng.standard_normal(STEPS)
            curves["train/loss"] = np.linspace(2, 1, STEPS) + 0.02 * rng.standard_normal(STEPS)
            write_log(folder / arm / f"seed-{seed}" / "metrics.jsonl", change(arm, seed, curves))
    return [str(folder / "old"), str(folder / "new")]


def only(content, code):
    """Return the values of the one reason with a code."""
    (values,) = (row["values"] for row in content["reason_codes"] if row["code"] == code)
    return values


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_the_metrics_that_differ_are_found_among_all(tmp_path, num_seeds):
    """NeMo-RL #3412: a critic's gradient norm 6.3x as high was beyond the twelve metrics looked at."""

    def change(arm, _, curves):
        factor = 6.3 if arm == "new" else 1.0
        return curves | {"train/zz/critic_norm": factor * curves["train/extra/00"]}

    sources = write_arms(tmp_path, change, num_seeds, num_metrics=250 if num_seeds == 1 else 30)
    exit_code, content = compare(sources)
    described = [row["values"] for row in content["evidence"] if row["kind"] == "description"]
    assert [row["metric"] for row in described[:2]] == ["train/reward", "train/zz/critic_norm"]
    others = only(content, "other_metrics")
    assert (
        exit_code == 0 and next(iter(others["apart"])) == "train/zz/critic_norm" and len(others["apart"]) <= 3
    )
    assert others["num_metrics"] == (252 if num_seeds == 1 else 32)
    assert others["of_steps"] == (num_seeds == 1)
    assert len(described) == others["num_metrics"] + 1


def with_nan(curves):
    return curves | {"train/reward": np.where(np.arange(STEPS) == 95, np.nan, curves["train/reward"])}


@pytest.mark.parametrize(
    ("run", "damage", "sentence"),
    [
        (
            ("new", 2),
            lambda curves: curves | {"train/reward": None},
            "train/reward: not recorded in new/seed-2",
        ),
        (("new", 2), lambda curves: {n: v[:40] for n, v in curves.items()}, "new/seed-2 has only steps 1-40"),
        (("old", 2), with_nan, "train/reward: old/seed-2 is not finite at step 96"),
    ],
)
def test_a_description_leaves_out_what_one_run_lacks_and_says_so(tmp_path, run, damage, sentence):
    """open-instruct #614: the reward of one run in six has another name, and the reward was not described."""

    def change(arm, seed, curves):
        if arm == "new":
            curves["train/reward"] = curves["train/reward"] - 0.3
        return damage(curves) if (arm, seed) == run else curves

    exit_code, content = compare(write_arms(tmp_path, change, num_metrics=2))
    assert (exit_code, content["verdict"]) == (0, "DESCRIPTION")
    first = next(row["values"] for row in content["evidence"] if row["kind"] == "description")
    assert (first["metric"], first["num_runs"]) == ("train/reward", [2, 2])
    assert first["difference"] == pytest.approx(-0.3, abs=0.02) and first["steps"] == [81, 100]
    assert any(f"{sentence}; 2 pairs remain" in reason for reason in content["reasons"])


def test_a_claim_on_what_one_run_lacks_is_invalid_and_the_next_step_leaves_that_run_out(tmp_path):
    def change(arm, seed, curves):
        return curves | {"train/reward": None} if (arm, seed) == ("new", 2) else curves

    sources = write_arms(tmp_path, change, num_metrics=2)
    claim = ["--claim", "train/reward:last 20%:0.05"]
    assert compare(sources, *claim)[0] == 5
    shown = CliRunner().invoke(app, ["compare", *sources, *claim], env={"COLUMNS": "1000"})
    assert "--exclude new/seed-2" in shown.stdout.split("next ")[1]
    assert compare(sources, *claim, "--exclude", "new/seed-2")[0] in (0, 4)


@pytest.mark.parametrize(("claimed", "verdict"), [("train/reward", "MATCH"), ("train/loss", "MISMATCH")])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_another_definition_of_one_metric_decides_no_claim_on_another(
    tmp_path, claimed, verdict, has_gradient
):
    """A loss that one version logs as a sum; the gradients agree, so that the training is the same."""

    def change(arm, seed, curves):
        rng = np.random.default_rng(seed)
        first_norm = 1 + rng.random()
        norms = np.append(first_norm, first_norm + 0.1 * rng.random(STEPS - 1))
        shared = {"train/grad_norm": norms} if has_gradient else {"train/entropy": norms}
        reward = np.linspace(0.2, 0.8, STEPS) + 0.02 * np.random.default_rng([seed, 9]).standard_normal(STEPS)
        loss = curves["train/loss"] * (4.0 if arm == "new" else 1.0)
        return {
            "train/reward": reward + 1e-4 * (arm == "new") * np.arange(STEPS) / STEPS,
            "train/loss": loss,
        } | shared

    _, content = compare(write_arms(tmp_path, change), "--claim", f"{claimed}:last 20%:0.05")
    assert content["verdict"] == (verdict if has_gradient else "MISMATCH")
    (check,) = (
        row
        for row in content["evidence"]
        if row["kind"] == "step one" and row["result"] in ("redefined", "fail")
    )
    assert check["values"]["metric"] == "train/loss" and check["result"] == (
        "redefined" if has_gradient else "fail"
    )


def test_a_match_says_which_other_metrics_are_far_apart(tmp_path):
    def change(arm, seed, curves):
        critic = curves["train/extra/00"] * (3.0 if arm == "new" else 1.0)
        spiky = curves["train/extra/01"] + 9 * (arm == "new") * (np.arange(STEPS) == 70 + seed)
        reward = np.linspace(0.2, 0.8, STEPS) + 0.02 * np.random.default_rng([seed]).standard_normal(STEPS)
        reward += 1e-4 * np.random.default_rng([seed, arm == "new"]).standard_normal(STEPS) * np.arange(STEPS)
        return curves | {"train/reward": reward, "train/critic_norm": critic, "train/kl_spiky": spiky}

    claim = "train/reward:last 20%:0.05"
    _, content = compare(write_arms(tmp_path, change), "--claim", claim, "--no-step-one")
    far_apart = only(content, "far_apart")
    assert content["verdict"] == "MATCH"
    assert [*far_apart["levels"]] == ["train/critic_norm"] and [*far_apart["spikes"]] == ["train/kl_spiky"]


def test_twelve_arms_are_a_sorted_table_with_a_row_an_arm(tmp_path):
    """cot-transparency #320: a sweep of twelve arms was 216 lines."""
    for index in range(12):
        for seed in range(3):
            rng = np.random.default_rng([index, seed])
            reward = (
                np.linspace(0.2, 0.8, STEPS) + 0.02 * rng.standard_normal(STEPS) - 0.2 * (index in (3, 7))
            )
            write_log(
                tmp_path / f"arm-x{index:02d}" / f"seed-{seed}" / "metrics.jsonl", {"train/reward": reward}
            )
    sources = [str(tmp_path / f"arm-x{index:02d}") for index in range(12)]
    for options in ([], ["--claim", "train/reward:last 20%:0.05"]):
        shown = CliRunner().invoke(
            app, ["compare", *sources, *options, "--no-step-one"], env={"COLUMNS": "120"}
        )
        lines = shown.stdout.splitlines()
        assert len(lines) < 40
        rows = [line.split()[0] for line in lines if line.startswith("arm-x")]
        assert sorted(rows[:2]) == ["arm-x03", "arm-x07"] and len(rows) == (11 if options else 12)
        if not options:
            assert [line.split()[0] for line in lines if "stands out" in line] == rows[:2]


def test_one_run_beside_several_is_searched_in_all_metrics(tmp_path):
    def change(arm, seed, curves):
        factor = 6.3 if arm == "new" else 1.0
        return curves | {"train/zz/critic_norm": factor * curves["train/extra/00"]}

    old, new = write_arms(tmp_path, change, num_seeds=4)
    _, content = compare([old, f"{new}/seed-0"])
    assert [*only(content, "new_run_elsewhere")["apart"]] == ["train/zz/critic_norm"]
    assert only(content, "new_run_elsewhere")["num_metrics"] == 32


def test_runs_of_another_length_are_described_on_their_steps_and_the_next_claim_is_on_them(tmp_path):
    def change(arm, seed, curves):
        return {name: values[:50] for name, values in curves.items()} if arm == "new" else curves

    sources = write_arms(tmp_path, change, num_seeds=1, num_metrics=2)
    shown = CliRunner().invoke(app, ["compare", *sources], env={"COLUMNS": "1000"}).stdout
    claim = shown.split("--claim '")[1].split("'")[0]
    assert claim.startswith("train/reward:steps 41-50:") and "No claim" not in shown
    exit_code, content = compare(sources, "--claim", claim)
    assert (exit_code, content["verdict"]) == (4, "INCONCLUSIVE")


@pytest.mark.parametrize(
    ("arm", "length", "ending", "code", "said"),
    [
        ("new", 60, float("nan"), 3, "guard finished fails: new/seed-1 failed at step 60 "),
        ("old", 60, float("nan"), 5, "old/seed-1 failed (its log ends with 'train/loss' not finite, "),
        ("new", 60, 0.5, 5, "steps missing: new/seed-1 ends at step 60"),
        ("new", STEPS, float("nan"), 3, "guard finite fails: train/loss is nan in new/seed-1 from step 100"),
    ],
)
def test_a_log_that_breaks_off_with_nan_is_a_run_that_failed(tmp_path, arm, length, ending, code, said):
    """A run that diverged is no run that is still missing steps, and nobody is told to leave it out."""
    rng = np.random.default_rng(3)
    for name in ("old", "new"):
        for seed in range(4):
            loss = 1 + 0.01 * rng.standard_normal(STEPS)
            if (name, seed) == (arm, 1):
                loss = np.append(loss[: length - 1], ending)
            write_log(tmp_path / name / f"seed-{seed}" / "metrics.jsonl", {"loss": loss})
    sources = [str(tmp_path / "old"), str(tmp_path / "new")]
    exit_code, content = compare(sources, "--claim", "loss:last 50%:0.1")
    assert exit_code == code and content["reasons"][0].startswith(said)
    assert "--exclude" not in " ".join(content["next"][0]["argv"]) or not np.isnan(ending) or arm == "old"


def test_a_rate_of_divergence_counts_no_run_that_is_still_short_of_the_end(tmp_path):
    """15 of 60 logs that stop early without NaN were 0 of 60 that diverged: PASS."""
    for name in ("old", "new"):
        for seed in range(60):
            length = 20 if name == "new" and seed % 4 == 0 else STEPS
            write_log(tmp_path / name / f"seed-{seed}" / "metrics.jsonl", {"loss": np.ones(length)})
    sources = [str(tmp_path / "old"), str(tmp_path / "new")]
    exit_code, content = compare(sources, "--claim", "rate of divergence:<5%")
    assert exit_code == 5 and content["reasons"][0].startswith("steps missing: new/seed-0 ends at step 20")
    assert "--exclude" not in json.dumps(content["next"])
