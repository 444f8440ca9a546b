"""`PYTHON ray_node.py HOST:PORT FOLDER COMMAND..`: this node of a run's own Ray cluster.

Runs in the trainer's interpreter, which need not have abrun. The first node starts Ray's head, waits until
all nodes have joined and becomes the command, with RAY_ADDRESS; every other node becomes a node of Ray. Ray's
files are in FOLDER, and its processes end with the process that starts them.
"""

import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

POLL_S = 0.5
PR_SET_PDEATHSIG = 1


def main() -> None:
    head, folder, *command = sys.argv[1:]
    host, _, port = head.rpartition(":")
    nodes = os.environ["ABRUN_NODE_LIST"].split(",")
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        why = f"{sys.executable} on {socket.gethostname()} cannot import ray ({error})"
        sys.exit(f"error: trainer.ray: {why}; pip install ray there, or set trainer.python")

    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--log-color=false"]
    start += ["--disable-usage-stats", f"--temp-dir={folder}", f"--num-gpus={env['ABRUN_GPUS_PER_NODE']}"]
    # Several runs may share a machine, each with its cluster
    start.append(f"--dashboard-agent-listen-port={free_port()}")
    if env["ABRUN_NODE_RANK"] != "0":
        address = wait_for_head(host, int(port))
        start += [f"--node-ip-address={address}", f"--address={socket.gethostbyname(host)}:{port}"]
        os.execve(start[0], start, env)

    address = own_address(nodes[1]) if len(nodes) > 1 else "127.0.0.1"
    start += ["--head", f"--node-ip-address={address}", f"--port={port}", "--include-dashboard=false"]
    start.append(f"--ray-client-server-port={free_port()}")
    process = subprocess.Popen(start, env=env, start_new_session=True, preexec_fn=end_with_parent)
    env["RAY_ADDRESS"] = f"{address}:{port}"
    wait_for_nodes(ray, env["RAY_ADDRESS"], int(env["ABRUN_NUM_NODES"]), process)
    os.execvpe(command[0], command, env)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def own_address(peer: str) -> str:
    """Return this machine's address in the network of another node; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return probe.getsockname()[0]


def wait_for_head(host: str, port: int) -> str:
    """Return this machine's address in the head's network, once the head accepts connections."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                return connection.getsockname()[0]
        except OSError:
            time.sleep(POLL_S)


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def wait_for_nodes(ray: Any, address: str, num_nodes: int, head: "subprocess.Popen[bytes]") -> None:
    """Return once all nodes have joined; exit if the head has ended."""
    num_alive = 0
    while num_alive < num_nodes:
        if head.poll() is not None:
            sys.exit(f"error: trainer.ray: Ray's head ended with exit code {head.returncode}; see above")
        before = num_alive
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level="error")
            num_alive = sum(member["Alive"] for member in ray.nodes())
        except ConnectionError:  # the head is starting
            pass
        if num_alive != before:
            print(f"trainer.ray: {num_alive} of {num_nodes} nodes have joined {address}", flush=True)
        time.sleep(POLL_S)
    ray.shutdown()


if __name__ == "__main__":
    del sys.path[0]  # this file's folder
    main()
