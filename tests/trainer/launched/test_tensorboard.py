"""TensorBoard: files of torch's writer."""

import math
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from abrun.logs import read_logs


def test_every_point_is_read_not_a_sample(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path / "baseline-s0"))
    for step in range(1500):
        writer.add_scalar("train/reward", step / 8, step)
        writer.add_scalar("train/loss", math.nan if step == 7 else -step, step)
    writer.add_text("args", "{}")
    writer.add_histogram("weights", np.arange(9.0), 3)
    writer.close()
    (log,) = read_logs(str(tmp_path))
    assert (log.name, log.status, log.config, log.notes) == ("baseline-s0", "unknown", None, ())
    assert sorted(log.metrics) == ["train/loss", "train/reward"]
    assert log.metrics["train/reward"].steps.tolist() == list(range(1500))
    assert log.metrics["train/reward"].values.tolist() == [step / 8 for step in range(1500)]
    assert math.isnan(log.metrics["train/loss"].values[7])


def test_hyperparameters_are_the_configuration(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path / "run"))
    writer.add_scalar("loss", 1.5, 1)
    writer.add_hparams({"seed": 3, "optim/lr": 0.5, "name": "x", "flag": True}, {})
    writer.close()
    (log,) = read_logs(str(tmp_path))
    assert log.config == {"seed": 3.0, "optim.lr": 0.5, "name": "x", "flag": True}
    assert list(log.metrics) == ["loss"]


def test_folders_of_add_scalars_are_of_their_run(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "s0")) as writer:
        for step in (1, 2):
            writer.add_scalar("train/reward", step, step)
            writer.add_scalars("losses/all", {"policy": 2 * step, "value": 3 * step}, step)
    (log,) = read_logs(str(tmp_path))
    assert log.metrics["losses/all/policy"].values.tolist() == [2, 4]
    assert log.metrics["losses/all/value"].values.tolist() == [3, 6]
