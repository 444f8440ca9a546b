"""Nodes of a run compare themselves with the first before they start: one line about what differs."""

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from abrun.errors import LaunchError
from abrun.experiment.command import Rendezvous, find_free_port
from abrun.launch import node
from abrun.launch.prepare import write_run_record
from abrun.recipe.experiment import BASELINE, load_recipe
from abrun.runs import launches
from abrun.runs.layout import RunName
from abrun.runs.rundir import RunDir

FOREIGN = Path(__file__).parents[1] / "external" / "foreign.yaml"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """A run of a command on two nodes, which has what it needs."""
    settings = ["cluster.nodes=2", "trainer.start=every_node", "trainer.versions_of=[trl]"]
    name = RunName(arm=BASELINE, seed=0)
    write_run_record(tmp_path / "run", "nodes", name, load_recipe(FOREIGN, settings).run_config(BASELINE))
    monkeypatch.setattr(node, "node_refusals", lambda config, machine: [])
    monkeypatch.setattr(node.os, "dup2", lambda *fds: None)  # the output of this test
    monkeypatch.setattr(node, "FIRST_NODE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(node, "query_interpreter", lambda *asked: {"versions": {"trl": "1.0"}})
    yield RunDir(tmp_path / "run")


def start(run: RunDir, port: int, *nodes: int) -> None:
    """Start nodes, one after the other, each as far as its agent's command."""
    for number in nodes:
        meeting = Rendezvous(address=f"127.0.0.1:{port}", node=number, grace_s=1)
        node.make_agent_command(run, meeting, "n1")


def test_nodes_that_are_alike_start(run: RunDir) -> None:
    port = find_free_port()
    start(run, port, 0, 1)
    start(run, port, 1)


@pytest.mark.parametrize("difference", ["package", "trainer's package", "code", "clock"])
def test_a_node_that_differs_from_the_first_is_named(
    difference: str, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, port = node.this_machine(), find_free_port()
    start(run, port, 0)
    if difference == "package":
        other = replace(machine, packages={**machine.packages, "torch": "1.0"})
        monkeypatch.setattr(node, "this_machine", lambda: other)
        words = "has torch 1.0, but .* 2"
    elif difference == "trainer's package":
        monkeypatch.setattr(node, "query_interpreter", lambda *asked: {"versions": {"trl": None}})
        words = r"has trl in .*python.* \(none\), but .* 1.0; install the same on all nodes"
    elif difference == "code":
        monkeypatch.setattr(node, "PACKAGE", tmp_path)
        words = r"has abrun's code [0-9a-f]{8}, but "
    else:
        monkeypatch.setattr(launches.time, "time", lambda clock=time.time: clock() - 7.2)
        words = r"are 7 s apart; synchronise them"
    with pytest.raises(LaunchError, match=f"^{socket.gethostname()}: .*{words}"):
        start(run, port, 1)


def test_a_node_that_does_not_see_what_the_first_writes_is_named(run: RunDir) -> None:
    start(run, port := find_free_port(), 0)
    with pytest.raises(LaunchError, match=r"does not see what 127.0.0.1 wrote to .* --runs-dir on"):
        start(run, port + 1, 1)  # of another start


def test_the_first_nodes_port_is_free(run: RunDir) -> None:
    with (
        socket.create_server(("", 0)) as taken,
        pytest.raises(LaunchError, match="where the nodes meet: Addr"),
    ):
        start(run, taken.getsockname()[1], 0)
