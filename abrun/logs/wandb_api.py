"""Reader for runs on a wandb server, through its public API. It reads every row of the history."""

import http.client
import netrc
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from abrun.errors import StoreError
from abrun.logs.foreign.columns import table_of
from abrun.logs.foreign.files import read_file
from abrun.logs.log import Log, LogStatus, missing_package_error
from abrun.logs.rows import flat_cells, series_of_table
from abrun.logs.wandb_files import parse_environment
from abrun.logs.words import WORDS
from abrun.recipe.reading import dotted
from abrun.runs.redaction import printable

API_TIMEOUT_S = 60
CONNECT_TIMEOUT_S = 10
STATUS_BY_STATE: dict[str, LogStatus] = WORDS["wandb"]["status"]


def read_project(path: str, group: str | None, step_column: str | None = None) -> list[Log]:
    """Return the runs of `entity/project` (of one group), or the run `entity/project/run_id`.

    Raises StoreError without an API key or network, or if there is no run.
    """
    entity, project, *run_id = path.strip("/").split("/")
    with _wrap_errors(path):
        api = _connect(path)
        if run_id:
            runs = [api.run(f"{entity}/{project}/{run_id[0]}")]
        else:
            filters = {"group": group} if group is not None else {}
            runs = list(api.runs(f"{entity}/{project}", filters=filters, order="+created_at"))
        if not runs:
            where = f"{path}, group {group!r}" if group is not None else path
            raise StoreError(f"wandb:{printable(where)}: no runs found; check the names")
        return [_read_run(run, f"{entity}/{project}", step_column) for run in runs]


def _read_run(run: Any, project: str, step_column: str | None) -> Log:
    place = printable(f"wandb:{project}/{run.id}")
    scanned = run.scan_history() if run.lastHistoryStep >= 0 else []  # it fails for a run that logged nothing
    recorded = series_of_table(table_of((dict(flat_cells(row)) for row in scanned), place), step_column)
    status = STATUS_BY_STATE.get(run.state, "unknown")
    config = {key: value for key, value in run.config.items() if key != "_wandb"}
    environment = parse_environment(run.metadata or {}, _download_requirements(run))
    return recorded.as_log(
        name=run.name or run.id,
        place=place,
        status=status,
        failure=f"wandb says {run.state}" if status == "failed" else "",
        config={**recorded.config, **dotted(config)},
        environment=environment or None,
        group=run.group or None,
        job_type=run.job_type or None,
        run_id=run.id,
    )


def _download_requirements(run: Any) -> str:
    files = [file for file in run.files(["requirements.txt"]) if file.size]
    if not files:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        files[0].download(root=folder, replace=True)
        return read_file(Path(folder, "requirements.txt")).decode(errors="replace")


def _connect(path: str) -> Any:
    try:
        import wandb
    except ImportError:
        raise missing_package_error(f"wandb:{path}", "wandb", "'abrun[wandb]'") from None
    base_url = wandb.setup().settings.base_url
    if not _has_key(base_url):  # otherwise wandb.Api would prompt for one and block
        raise StoreError(f"wandb:{printable(path)}: no API key; set WANDB_API_KEY, or run: wandb login")
    _check_reachable(base_url, path)
    return wandb.Api(timeout=API_TIMEOUT_S)


def _check_reachable(base_url: str, path: str) -> None:
    """Raise StoreError if the server is unreachable: wandb.Api retries for 30 s and hides the cause."""
    try:
        urllib.request.urlopen(base_url, timeout=CONNECT_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return  # the server responds
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise StoreError(
            f"wandb:{printable(path)}: the server {base_url} cannot be reached: {printable(str(reason))}; "
            "check the network and WANDB_BASE_URL, or copy the run's folders to this machine"
        ) from None


def _has_key(base_url: str) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    candidates = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    for file in (Path(name).expanduser() for name in candidates if name):
        try:
            if netrc.netrc(file).authenticators(urlsplit(base_url).hostname or ""):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


@contextmanager
def _wrap_errors(path: str) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # they share no base class: wandb's, requests', GraphQL's, protobuf's
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise StoreError(
            f"wandb:{printable(path)}: {printable(text)}; check the names, WANDB_API_KEY and the network"
        ) from None
