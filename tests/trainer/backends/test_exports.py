"""What a policy saves, on both backends: a whole checkpoint, with the tensors that the network never read."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from abrun.recipe.policy import Model, Policy
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.models.weights import open_network
from tests.trainer.backends.megatron_policies import make_backend, network
from tests.trainer.backends.policies import CPU


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_a_saved_policy_has_the_tensors_that_its_network_has_no_place_for(
    backend: str, tmp_path: Path, group: None
) -> None:
    network("qwen3").save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "model.safetensors"
    before = load_file(path) | {"mtp.fc.weight": torch.randn(3, 5).bfloat16()}
    save_file(before, path, metadata={"format": "pt"})
    load = partial(open_network, Model(path=str(tmp_path / "in")), weights=None, seed=0, decodes=False)
    policy = (
        make_backend(load=load)
        if backend == "megatron"
        else DtensorBackend(load, Policy(), make_ranks(CPU, {}))
    )
    policy.save(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
