"""A wandb server on this machine, as small as the real client allows: it answers its GraphQL queries."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REQUIREMENTS = "torch==2.9.0\nvllm==0.26.1\nleft-pad==1.0\n"
METADATA = {"python": "CPython 3.11.7", "host": "node-1", "gpu": "NVIDIA H100", "gpu_count": 2}


def run(run_id: str, **changes: Any) -> dict[str, Any]:
    """A run as the server keeps it; `rows` are its history."""
    return {
        "id": run_id,
        "name": run_id,
        "displayName": run_id,
        "projectId": "1",
        "state": "finished",
        "config": json.dumps({"seed": {"value": 0}, "_wandb": {"value": {}}, "optim": {"value": {"lr": 1}}}),
        "group": "",
        "jobType": "",
        "tags": [],
        "readOnly": False,
        "createdAt": "2026-01-01T00:00:00Z",
        "heartbeatAt": "2026-01-01T00:00:00Z",
        "systemMetrics": "{}",
        "summaryMetrics": "{}",
        "sweepName": None,
        "commit": None,
        "description": "",
        "notes": "",
        "user": {"name": "n", "username": "n"},
        "rows": [],
        **changes,
    }


@contextmanager
def serving(project: str, runs: list[dict[str, Any]]) -> Iterator[str]:
    """Serves the runs of one project; yields the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(project, {one["name"]: one for one in runs}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _handler(project: str, runs: dict[str, dict[str, Any]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            files = {"/requirements.txt": REQUIREMENTS, "/wandb-metadata.json": json.dumps(METADATA)}
            self._answer(files.get(self.path, "").encode(), 200 if self.path in files else 404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if not self.path.startswith("/graphql"):
                return self._answer(b"", 404)
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            question = json.loads(body)
            url = f"http://{self.headers['host']}"
            answer = _answer(question["query"], question.get("variables") or {}, project, runs, url)
            self._answer(json.dumps({"data": answer}).encode(), 200)

        def _answer(self, body: bytes, status: int) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _answer(
    query: str, variables: dict[str, Any], project: str, runs: dict[str, dict[str, Any]], url: str
) -> dict[str, Any]:
    if "project(" not in query:
        viewer = {"id": "u", "username": "n", "entity": "team", "email": "n@n", "flags": "{}"}
        return {"viewer": {**viewer, "teams": {"edges": []}}}
    if variables.get("project", variables.get("name")) != project:
        return {"project": None}
    if "runs(" in query:
        wanted = json.loads(variables["filters"]).get("group")
        nodes = [_node(one) for one in runs.values() if wanted in (None, one["group"])]
        edges = [{"node": node, "cursor": "c"} for node in nodes]
        page = {"endCursor": "c", "hasNextPage": False}
        found = {"edges": edges, "pageInfo": page}
        return {"project": {"internalId": "1", "runCount": len(nodes), "readOnly": False, "runs": found}}
    names = {variables.get(key) for key in ("name", "run", "runName")}
    one = next((one for name, one in runs.items() if name in names), None)
    if one is None:
        return {"project": {"run": None}}
    if "parquetHistory" in query:
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": [{"_step": 0}]}}}}
    if "history(" in query:
        first, last = variables["minStep"], variables["maxStep"]
        page = [json.dumps(row) for row in one["rows"] if first <= row["_step"] < last]
        return {"project": {"run": {"history": page}}}
    if "files(" in query:
        names = variables.get("fileNames") or variables.get("names") or []
        files = [
            {"id": name, "name": name, "url": f"{url}/{name}", "directUrl": f"{url}/{name}", "sizeBytes": 9,
             "mimetype": "", "md5": "", "updatedAt": None}
            for name in names
        ]  # fmt: skip
        edges = [{"node": file, "cursor": "c"} for file in files]
        page = {"endCursor": "c", "hasNextPage": False}
        return {"project": {"run": {"fileCount": len(files), "files": {"edges": edges, "pageInfo": page}}}}
    return {"project": {"internalId": "1", "run": _node(one)}}


def _node(one: dict[str, Any]) -> dict[str, Any]:
    rows = one["rows"]
    keys = {
        "lastStep": rows[-1]["_step"] if rows else -1,
        "sets": [],
        "keys": {name: {} for row in rows for name in row},
    }
    return {
        **{key: value for key, value in one.items() if key != "rows"},
        "historyKeys": keys,
        "historyLineCount": len(rows),
    }
