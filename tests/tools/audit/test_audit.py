import json
import math
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import StoreError
from abrun.tools.audit.audit import audit
from abrun.tools.audit.bounds import PRECISIONS, Bounded
from abrun.tools.audit.dump import FORMAT, KEY, write_dump
from abrun.tools.audit.reading import Dump, read_dump

ARCHIVE = Path(__file__).with_name("dumps.zip")
INDEX = json.loads(zipfile.ZipFile(ARCHIVE).read("index.json"))
FAULTS = {name: case for name, case in INDEX["cases"].items() if case["first"]}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked = tmp_path_factory.mktemp("dumps")
    zipfile.ZipFile(ARCHIVE).extractall(unpacked)
    return unpacked


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["audit", *map(str, words)], catch_exceptions=False)


def refusal(path: Path) -> str:
    """Return the one line of bad input, which the command line prints with exit code 2."""
    with pytest.raises(StoreError) as caught:
        run(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- other frameworks' own loss code; see make_dumps ---


def test_no_sound_step_of_a_framework_alarms(folder: Path) -> None:
    clean = [name for name, case in INDEX["cases"].items() if case["first"] is None]
    alarms = {}
    for name in clean:
        result = audit(read_dump(folder / f"{name}.safetensors"))
        if result.first is not None:
            alarms[name] = result
        assert {check.name for check in result.checks} >= {"loss"}, name
    assert alarms == {}
    assert len(clean) >= 50
    assert {INDEX["cases"][name]["framework"] for name in clean} == {
        *("trl", "verl", "skyrl", "openrlhf", "nemo", "torchtitan", "prime")
    }


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_wrong_quantity_of_a_faulty_step_is_named(name: str, folder: Path) -> None:
    result = audit(read_dump(folder / f"{name}.safetensors"))
    assert result.first == FAULTS[name]["first"]
    assert FAULTS[name]["says"] in result.fits[0]


def test_a_step_of_one_algorithm_audited_as_another_names_the_normaliser(folder: Path) -> None:
    dump = folder / "clean-3-0.safetensors"  # TRL's dr_grpo
    assert run(dump).exit_code == 0
    done = run(dump, "--as", "grpo", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 3
    assert (found["agrees"], found["first"]) == (False, "advantages")  # a std that Dr. GRPO leaves out
    assert found["checks"][-1]["name"] == "logprob_gradients"


def test_the_summary_says_what_was_not_checked(folder: Path) -> None:
    done = run(folder / "dr-grpo-normaliser.safetensors")
    assert done.exit_code == 3
    text = " ".join(done.stdout.split())  # as wide as the terminal
    assert "first difference: normaliser, seen in loss" in text
    assert "this is Dr. GRPO's sum over tokens divided by a constant; the settings say GRPO's" in text
    assert "not checked: trainer_logprobs: the dump has no logits" in text
    assert "not in the dump: baseline, ratio" in text


# --- by hand ---


def hand_made(**changes: Any) -> dict[str, Any]:
    """Two sequences of one and two tokens, rewards 1 and 0, ratios 1, 1.5 and 0.5."""
    tensors = {
        "token_mask": np.array([[1, 0], [1, 1]], np.uint8),
        "trainer_logprobs": np.log([[0.5, 1], [0.75, 0.25]]),
        "old_logprobs": np.log([[0.5, 1], [0.5, 0.5]]),
        "rewards": np.array([1.0, 0.0]),
        "group_ids": np.array([7, 7]),
    }
    return tensors | changes


def written(path: Path, tensors: dict[str, Any], algorithm: str = "grpo", **settings: Any) -> Path:
    header = {"format": FORMAT, "algorithm": algorithm, "settings": settings, "metrics": {}}
    save_file({name: np.asarray(of) for name, of in tensors.items()}, path, {KEY: json.dumps(header)})
    return path


def test_three_tokens_by_hand(tmp_path: Path) -> None:
    # A = (R - 1/2) / (sqrt(1/2) + 1e-6); losses: -A, A max(1.5, 1.2), A max(0.5, 0.8)
    advantage = 0.5 / (math.sqrt(0.5) + 1e-6)
    loss = (-advantage + (1.5 + 0.8) / 2 * advantage) / 2  # the mean over sequences of token means
    # derivative by each log-prob: A rho weight, and 0 where the ratio is beyond a bound that counts
    gradients = [[-advantage / 2, 0], [advantage * 1.5 / 4, 0]]
    tensors = hand_made(
        advantages=np.array([advantage, -advantage]), loss=loss, logprob_gradients=np.array(gradients)
    )
    result = audit(read_dump(written(tmp_path / "hand", tensors)))
    assert result.first is None
    assert all(check.bound < 2e-8 for check in result.checks)  # the 1e-8 that frameworks add to counts
    result = audit(read_dump(written(tmp_path / "off", tensors | {"loss": loss * (1 + 1e-6)})))
    assert (result.first, result.fits) == ("loss", ())


def test_losses_that_tie_by_rounding_share_the_gradient(tmp_path: Path) -> None:
    """In bfloat16 0.796875 A and the clipped 0.8 A can be one number; torch.min then halves the gradient."""
    torch = pytest.importorskip("torch")
    logprobs = torch.tensor([[-1.2265625]], dtype=torch.bfloat16, requires_grad=True)
    old, advantage = torch.tensor([[-1.0], [1.6328125]], dtype=torch.bfloat16).split(1)
    ratio = (logprobs - old).exp()
    losses = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert float(ratio) < 0.8 and float(gradient) == float(losses) / 2  # clipping concerns A < 0
    tensors = {
        "token_mask": torch.ones(1, 1, dtype=torch.bool),
        "trainer_logprobs": logprobs,
        "old_logprobs": old,
        "advantages": advantage,
        "loss": losses.sum(),
        "logprob_gradients": gradient,
    }
    write_dump(tmp_path / "tie", tensors, algorithm="ppo", settings={"clip_low": 0.2, "clip_high": 0.2})
    assert audit(read_dump(tmp_path / "tie")).first is None


def test_two_faults_at_once_are_named_together(tmp_path: Path) -> None:
    advantage = 0.5 / (math.sqrt(0.5) + 1e-6)
    loss = (-advantage * 1 + (1.5 + 0.5) * advantage) / 3  # no clipping, DAPO's mean
    tensors = hand_made(advantages=np.array([advantage, -advantage]), loss=loss)
    result = audit(read_dump(written(tmp_path / "two", tensors)))
    assert any("not clipped" in says and "DAPO's mean" in says for says in result.fits)


def test_incomplete_groups_are_not_checked_without_the_batch(tmp_path: Path) -> None:
    tensors = hand_made(advantages=np.array([0.5, -0.5]), loss=0.0)
    result = audit(read_dump(written(tmp_path / "part", tensors, group_size=4, advantage_std="none")))
    assert "so the dump needs batch_rewards" in result.not_checked["advantages"]
    tensors |= {"batch_rewards": np.array([1.0, 0, 0, 1]), "batch_group_ids": np.array([7, 7, 7, 7])}
    result = audit(read_dump(written(tmp_path / "all", tensors, group_size=4, advantage_std="none")))
    assert [check.agrees for check in result.checks if check.name == "advantages"] == [True]


# --- bounds ---

NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16}


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 300), dtype=st.sampled_from(sorted(NUMPY)))
@settings(max_examples=60, deadline=None)
def test_bounds_hold_what_a_narrower_type_computes(seed: int, count: int, dtype: str) -> None:
    of = NUMPY[dtype]
    generator = np.random.default_rng(seed)
    a, b = (generator.normal(size=count).astype(of) for _ in range(2))
    exact_a, exact_b = (Bounded.exact(values, PRECISIONS[dtype]) for values in (a, b))
    positive = (np.abs(b) + of(0.5)).astype(of)
    pairs = [
        (a * b - a, exact_a * exact_b - exact_a),
        (np.exp(a) - of(1) - a, exact_a.exp() - 1.0 - exact_a),
        (
            np.maximum(-a * b, -a * np.clip(b, of(0.8), of(1.2))),
            (-(exact_a * exact_b)).maximum(-(exact_a * exact_b.clip(0.8, 1.2))),
        ),
        (
            (a / positive).sum(dtype=max(of, np.float32, key=lambda t: np.finfo(t).bits)).astype(of),
            (exact_a / positive).sum(),
        ),
        (np.sqrt(a * a), exact_a.square().sqrt()),
    ]
    for computed, bounded in pairs:
        assert (bounded.low <= computed).all() and (computed <= bounded.high).all()


def test_bounds_are_a_few_roundings_wide() -> None:
    values = np.linspace(-2, 2, 100)
    for name, precision in PRECISIONS.items():
        exact = Bounded.exact(values, precision)
        bounded = (exact.exp() * exact - 1.0).sum()
        assert (bounded.high - bounded.low) / 2 < 1e5 * precision.unit, name


# --- dumps that are none ---


def broken_dumps(folder: Path) -> dict[str, Path]:
    """Return files that are no sound dumps, by words of their refusal."""
    sound = written(folder / "sound", hand_made(loss=0.0))
    content = sound.read_bytes()
    made = {"no such file": folder / "nowhere", "no such": folder}
    files = {
        "not a readable safetensors file": [
            *(b"", b"{}", b"\x80\x04]" * 20, content[:-3], content[:60], b"\xff" * 4096),
            (2**62).to_bytes(8, "little") + content[8:],
            (90_000_000).to_bytes(8, "little") + b"[" * 4096,
        ],
    }
    for words, contents in files.items():
        for index, raw in enumerate(contents):
            path = folder / f"broken-{index}"
            path.write_bytes(raw)
            made[f"{words} ({index}"] = path
    save_file({"loss": np.zeros(1)}, folder / "bare")
    made["no abrun_audit in its metadata"] = folder / "bare"
    for index, header in enumerate(('"x"', "[1]", '{"format": 2}', "{}", "null", "[" * 200_000, "not json")):
        path = folder / f"header-{index}"
        save_file({"loss": np.zeros(1)}, path, {KEY: header})
        made[("format", "not a readable")[index >= 5] + " " * index] = path
    return made


def test_files_that_are_no_dump_are_refused_in_one_line(tmp_path: Path) -> None:
    for words, path in broken_dumps(tmp_path).items():
        assert words.split(" (")[0].strip() in refusal(path), words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer_logprobs": np.zeros((2, 3))}, "give [B, T]"),
        ({"token_mask": np.zeros(4, np.uint8)}, "token_mask: shape [4]; give [B, T]"),
        ({"rewards": np.zeros(3)}, "rewards: shape [3]; give [B]"),
        ({"loss": np.zeros((2, 2))}, "loss: shape [2, 2]; give []"),
        ({"trainer_logprobs": np.zeros((0, 2))}, "give [B, T]"),
        ({"old_logprobs": np.array([[np.nan, 0], [0, 0.0]])}, "old_logprobs: nan at [0, 0]"),
        ({"rewards": np.array([np.inf, 0])}, "rewards: inf at [0]"),
        ({"token_mask": np.array([[2, 0], [1, 1]], np.uint8)}, "other values than 0 and 1"),
        ({"group_ids": np.array([np.nan, 1.0])}, "group_ids: nan at [0]"),
    ],
)
def test_unsound_tensors_are_refused_with_their_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refusal(written(tmp_path / "dump", hand_made(loss=0.0) | changes))


@pytest.mark.parametrize(
    ("algorithm", "chosen", "words"),
    [
        ("grpoo", {}, "algorithm: got 'grpoo'; allowed: grpo, dr_grpo"),
        ("grpo", {"kl_coeficient": 0.1}, "kl_coeficient"),
        ("grpo", {"clip_low": -1}, "clip_low: got -1"),
        ("grpo", {"aggregation": "mean"}, "aggregation: got 'mean'"),
        ("grpo", {"gradient_accumulation": 0}, "gradient_accumulation: got 0"),
    ],
)
def test_unsound_settings_are_refused_with_their_name(
    algorithm: str, chosen: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refusal(written(tmp_path / "dump", hand_made(loss=0.0), algorithm, **chosen))


def test_masked_tokens_may_be_anything_and_a_loss_of_nan_differs(tmp_path: Path) -> None:
    old = np.array([[0, np.nan], [0, 0.0]])
    tensors = hand_made(old_logprobs=old, trainer_logprobs=old, advantages=np.array([0.5, -0.5]), loss=0.0)
    assert run(written(tmp_path / "masked", tensors, advantage_std="none")).exit_code == 0
    done = run(written(tmp_path / "nan", tensors | {"loss": math.nan}, advantage_std="none"))
    assert done.exit_code == 3 and "first difference: loss" in done.stdout


def test_a_dump_with_nothing_to_check_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nothing to check"):
        audit(read_dump(written(tmp_path / "dump", hand_made())))


def test_the_writer_keeps_types_and_leaves_out_what_is_none(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    logprobs = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    tensors = {"trainer_logprobs": logprobs[:, :2], "kl": None, "loss": torch.tensor(0.5)}
    write_dump(tmp_path / "dump", tensors, algorithm="sft", settings={"num_tokens": torch.tensor(4.0)})
    dump = read_dump(tmp_path / "dump")
    assert isinstance(dump, Dump) and dump.stored["trainer_logprobs"] is PRECISIONS["bfloat16"]
    assert dump.tensors.keys() == {"trainer_logprobs", "loss"} and dump.settings.num_tokens == 4
    assert replace(dump, tensors={}).tensors == {}
