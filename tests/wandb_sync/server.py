"""A wandb server on this machine that the real client writes to: it keeps the rows, summaries and artifacts
of runs, and tells a client that resumes one how far it came."""

import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "team"


@dataclass
class Kept:
    """A run as the server knows it."""

    settings: dict[str, Any] = field(default_factory=dict)  # what the client last said of it
    lines: dict[str, list[str]] = field(default_factory=dict)  # by file, as streamed
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    uploaded: dict[str, bytes] = field(default_factory=dict)

    @property
    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines.get("wandb-history.jsonl", [])]

    @property
    def summary(self) -> dict[str, Any]:
        lines = self.lines.get("wandb-summary.json", [])
        return json.loads(lines[-1]) if lines else {}


class Server:
    def __init__(self) -> None:
        self.runs: dict[str, Kept] = {}
        self.silent = threading.Event()  # set: it takes questions and answers none
        self.url = ""

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        named = re.match(r"\s*(?:query|mutation)\s*(\w*)", query)
        operation = named.group(1) if named else ""
        name = variables.get("name") or variables.get("run") or variables.get("runName") or ""
        project = {"id": "m", "name": "p", "entity": {"id": "e", "name": ENTITY}}
        if operation == "RunResumeStatus":
            known = self.runs.get(name)
            return {"model": {**project, "bucket": self._tail(name, known) if known else None}}
        if operation == "UpsertBucket":
            run = self.runs.setdefault(name, Kept())
            run.settings |= {key: value for key, value in variables.items() if value is not None}
            bucket = {
                "id": name,
                "name": name,
                "displayName": variables.get("displayName"),
                "sweepName": None,
            }
            project["name"] = variables["project"]
            bucket |= {"description": "", "config": "{}", "historyLineCount": 0, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [
                {"name": each, "uploadUrl": f"{self.url}/put/{name}/{each}"} for each in variables["files"]
            ]
            return {"createRunFiles": {"runID": name, "uploadHeaders": [], "files": files}}
        return self._artifact(operation, name, variables, query)

    def _tail(self, name: str, run: Kept) -> dict[str, Any]:
        history, events = (run.lines.get(f"wandb-{kind}.jsonl", []) for kind in ("history", "events"))
        counts = {"historyLineCount": len(history), "eventsLineCount": len(events), "logLineCount": 0}
        return {
            "id": name, "name": name, **counts, "historyTail": json.dumps(history[-1:]),
            "eventsTail": json.dumps(events[-1:]), "summaryMetrics": json.dumps(run.summary),
            "displayName": run.settings.get("displayName"), "config": run.settings.get("config", "{}"),
            "tags": [], "wandbConfig": "{\"t\": {}}",
        }  # fmt: skip

    def _artifact(self, operation: str, name: str, variables: dict[str, Any], query: str) -> dict[str, Any]:
        if "serverInfo" in query:
            return {"serverInfo": {"features": [], "cliVersionInfo": {"max_cli_version": "9.9"}}}
        if operation == "CreateArtifact":
            asked = variables["input"]
            self.runs[asked["runName"]].artifacts.append(asked)
            made = {
                "id": "a1",
                "digest": asked["digest"],
                "state": "PENDING",
                "artifactSequence": {"id": "s"},
            }
            return {"createArtifact": {"artifact": made}}
        if operation == "CreateArtifactManifest":
            manifest = {
                "id": "f",
                "file": {"id": "f", "uploadUrl": f"{self.url}/put/a/manifest", "uploadHeaders": []},
            }
            return {"createArtifactManifest": {"artifactManifest": manifest}}
        if operation == "CreateArtifactFiles":
            asked = variables.get("artifactFiles") or variables["input"]["artifactFiles"]
            edges = [{"node": self._file(number, each["name"])} for number, each in enumerate(asked)]
            return {"createArtifactFiles": {"files": {"edges": edges}}}
        if operation in ("CommitArtifact", "UseArtifact"):
            return {"commitArtifact": {"artifact": {"id": "a1", "digest": "d"}}}
        if operation == "ArtifactType":
            return {"project": None}
        viewer = {"id": "u", "username": "n", "entity": ENTITY, "email": "", "flags": "{}"}
        return {"viewer": {**viewer, "teams": {"edges": []}}} if "viewer" in query.lower() else {}

    def _file(self, number: int, name: str) -> dict[str, Any]:
        place = {"uploadUrl": f"{self.url}/put/a/{name}", "uploadHeaders": [], "uploadMultipartUrls": None}
        named = {"id": str(number), "name": name, "displayName": name, "storagePath": None}
        return {**named, **place, "artifact": {"id": "a1"}}

    def stream(self, path: str, content: dict[str, Any]) -> None:
        run = self.runs.setdefault(path.split("/")[-2], Kept())
        for file, part in (content.get("files") or {}).items():
            lines = run.lines.setdefault(file, [])
            lines[part.get("offset", 0) :] = part["content"]  # what is there from the offset on is replaced


@contextmanager
def serving() -> Iterator[Server]:
    kept = Server()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(kept))
    server.daemon_threads = True
    kept.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield kept
    finally:
        kept.silent.clear()
        server.shutdown()
        server.server_close()


def _handler(kept: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer({}, 404)

        def do_PUT(self) -> None:
            _, _, run, name = self.path.split("/", 3)
            kept.runs.setdefault(run, Kept()).uploaded[name] = self._body()
            self._answer({})

        def do_POST(self) -> None:
            body = self._body()
            if self.path.startswith("/graphql"):
                asked = json.loads(body)
                self._answer({"data": kept.answer(asked["query"], asked.get("variables") or {})})
            elif "file_stream" in self.path:
                kept.stream(self.path, json.loads(body))
                self._answer({"exitcode": None, "limits": {}})
            else:
                self._answer({})

        def _body(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            return gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body

        def _answer(self, content: Any, status: int = 200) -> None:
            while kept.silent.is_set():
                time.sleep(0.1)
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
