"""Checkpoints on the megatron backend: each rank reads its own part, which computes as of a whole network."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import Model, Policy
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.loop.recorder import hash_policy
from abrun.trainer.models.weights import Checkpoint, open_network
from tests.spawn import run_ranks
from tests.trainer.backends.megatron_policies import make_backend, network, weights_of
from tests.trainer.backends.policies import CPU, some_batch

SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
PIPELINE, EXPERTS = {"pipeline_parallel": 2}, {"expert_parallel": 2}
# Family, how two ranks are cut, the policy's settings, at most what share of the weights each reads.
Case = tuple[str, dict[str, Any], dict[str, Any], float]
CASES: dict[str, Case] = {
    "tensor": ("qwen3", SEQUENCE, {"dtype": "bfloat16"}, 0.51),  # norms are whole on both
    "pipeline": ("qwen2", PIPELINE, {}, 0.58),  # the tied embedding is on both
    "experts": ("qwen3_moe", EXPERTS, {}, 0.68),  # attention and vocabulary are whole on both
}
MORE: dict[str, Case] = {
    "tensor-tied": ("qwen2", {"tensor_parallel": 2}, {}, 0.51),
    "pipeline-untied": ("llama", PIPELINE, {}, 0.51),
    "experts-tensor": ("qwen3_moe", SEQUENCE | EXPERTS, {}, 0.52),
    "data": ("llama", {}, {"dtype": "bfloat16"}, 1.0),
}


def counted(read: Any, total: list[int]) -> Any:
    def counting(self: Checkpoint, name: str, part: tuple[slice, ...]) -> Tensor:
        found = read(self, name, part)
        total[0] += found.numel()
        return found

    return counting


def judged(backend: Any) -> dict[str, Tensor]:
    """What a policy, its value models and its decoder make of its weights."""
    batch = some_batch()
    share = batch[backend.ranks.data_slice(len(batch))]
    found = {"logprobs": backend.compute_logprobs(share)}
    for backbone in ("own", "shared"):
        critic = backend.make_value_model(
            Ppo.model_validate({"type": "ppo", "value_backbone": backbone}), seed=3
        )
        found[f"values of {backbone}"] = critic.compute_values(share)
    with torch.no_grad(), backend.decoding() as decoder:
        ones = torch.ones(1, 3).long()
        found["decoded"], _ = decoder(torch.tensor([[5, 6, 7]]), ones, torch.arange(3)[None], None)
    return found


def on_a_rank(rank: int, world_size: int, folder: Path, cases: dict[str, Case]) -> dict[str, Any]:
    """Of each case, the share that is read for the policy, what it computes, and whether that is right."""
    found = {}
    for case, (kind, cut, policy, _) in cases.items():
        load = partial(open_network, Model(path=str(folder / kind)), weights=None, seed=0, decodes=True)
        total = [0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoint, "read", counted(Checkpoint.read, total))
            backend = make_backend(load=load, cut=cut, **policy)
        whole = make_backend(kind, cut=cut, **policy)
        reference = make_backend(load=load, cut=cut, trainable=False, **policy)
        batch = some_batch()
        share = batch[backend.ranks.data_slice(len(batch))]
        of_parts, of_whole = judged(backend), judged(whole)
        of_parts["reference"], of_whole["reference"] = reference.compute_logprobs(share), of_whole["logprobs"]
        assert of_parts.keys() == of_whole.keys()
        found[case] = {
            "share": total[0] / sum(p.numel() for p in network(kind).parameters()),
            "hash": hash_policy(backend),
            "weights": {name: weight.clone() for name, weight in backend.gather_weights()},
            "different": [key for key, tensor in of_whole.items() if not torch.equal(of_parts[key], tensor)],
        }
    return found


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_each_rank_reads_its_own_part_of_a_checkpoint(
    cases: dict[str, Case], tmp_path: Path, group: None
) -> None:
    """And trains, judges and decodes to the bit what it would of a network that was loaded whole."""
    hashes = {}
    for kind in {kind for kind, *_ in cases.values()}:
        network(kind).save_pretrained(tmp_path / kind)
        load = partial(open_network, Model(path=str(tmp_path / kind)), weights=None, seed=0, decodes=False)
        hashes[kind] = hash_policy(DtensorBackend(load, Policy(), make_ranks(CPU, {})))
    ranks = run_ranks(on_a_rank, 2, tmp_path, cases, timeout_s=200)
    for case, (kind, _, _, most) in cases.items():
        expected = weights_of(network(kind))
        for found in (of_rank[case] for of_rank in ranks):
            assert found["different"] == [], case
            assert 0.4 < found["share"] <= most, case
            assert found["hash"] == hashes[kind], case
            assert found["weights"].keys() == expected.keys()
            assert all(torch.equal(found["weights"][name], weight) for name, weight in expected.items())
