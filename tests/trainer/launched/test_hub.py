"""What is said of a hub's model before anything is started, by a hub that knows four of them."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ANSWERS = {
    "there": (200, ""),
    "gated": (403, "GatedRepo"),
    "bare": (404, "EntryNotFound"),
    "busy": (503, ""),
}
ASKS = """
import json, sys
from abrun.experiment.preflight.hub import hub_refusal
print(json.dumps([hub_refusal(name) for name in sys.argv[1:]]))
"""


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        name = self.path.split("/")[2]
        status, error = ANSWERS.get(name, (404, "RepoNotFound"))
        self.send_response(status)
        self.send_header("ETag", '"x"')
        self.send_header("X-Repo-Commit", "0" * 40)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def refusals(endpoint: str, cache: Path, *names: str, **env: str) -> list[str | None]:
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", **env}
    asked = subprocess.run(
        [sys.executable, "-c", ASKS, *names], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert asked.stderr == ""
    return json.loads(asked.stdout)


def test_a_hub_is_asked_once_for_what_is_not_in_the_cache(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        answers = refusals(endpoint, tmp_path, "o/there", "o/gated", "o/bare", "o/busy", "o/none", "o/[x]")
        server.shutdown()
    assert answers == [
        None,
        "the hub model is gated: request access, then log in (hf auth login)",
        "the hub answers with status 404",
        None,  # it may answer the trainer, who asks more than once
        "the hub has no such model, or it is private (hf auth login)",
        "it is not a valid hub name",
    ]
    snapshot = tmp_path / "hub" / "models--o--here" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    here, there = refusals(endpoint, tmp_path, "o/here", "o/there")  # where nobody listens any more
    assert here is None and there and there.startswith("the hub cannot be reached")
    offline = refusals(endpoint, tmp_path, "o/here", "o/there", HF_HUB_OFFLINE="1")
    assert offline == [None, "it is not cached, and HF_HUB_OFFLINE is set"]
