"""What differs between versions of vLLM, with modules in its place that behave as the version does."""

import gc
import logging
import logging.config
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from abrun.errors import LaunchError
from abrun.recipe.extras import (
    MAX_VLLM,
    MIN_VLLM,
    MIN_VLLM_WHOSE_ENGINE_SETS_UP_LOG,
    MIN_VLLM_WITH_SAMPLING_MASKS,
    VLLM_VERSIONS,
    vllm_release,
)
from abrun.trainer.rollout.vllm import instance, startup
from abrun.trainer.rollout.vllm.startup import LogTail
from tests.trainer.rollout.vllm_sampling import config_of

DOCS = Path(__file__).parents[3] / "docs" / "explanation" / "rollouts-and-backends.md"
LOG = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"printed": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}},
    "loggers": {"vllm": {"handlers": ["printed"], "level": "INFO", "propagate": False}},
}


class Library:
    """Modules of a vLLM release, as far as an engine's start and end touch them."""

    def __init__(self, release: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.destroyed: list[str] = []
        self.starts = True
        self._release, self._is_log_set_up = release, False
        parallel_state = SimpleNamespace(
            destroy_model_parallel=lambda: self.destroyed.append("vllm's groups"), _WORLD=None
        )
        self.core = SimpleNamespace(cleanup_dist_env_and_memory=lambda: self.destroyed.append("all groups"))
        contents: dict[str, dict[str, Any]] = {
            "vllm": {"LLM": self._llm},
            "vllm.logger": {"configure_logging_if_needed": self._configure_log},
            "vllm.config": {},
            "vllm.config.logging": {"LoggingConfig": dict},
            "vllm.distributed": {},
        }
        for name, members in contents.items():
            module = ModuleType(name)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", self.core)
        monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", parallel_state)
        monkeypatch.setattr(startup, "vllm_refusal", lambda on_gpu: None)
        monkeypatch.setattr(startup, "installed_vllm_release", lambda: release)
        if release < MIN_VLLM_WHOSE_ENGINE_SETS_UP_LOG:
            logging.config.dictConfig(LOG)

    def _configure_log(self, config: dict[str, Any]) -> None:
        if not self._is_log_set_up:
            self._is_log_set_up = True
            logging.config.dictConfig(LOG)

    def _llm(self, **arguments: Any) -> Any:
        if self._release >= MIN_VLLM_WHOSE_ENGINE_SETS_UP_LOG:
            self._configure_log({})
        logging.getLogger("vllm.engine").info("starting with seed %s", arguments["seed"])
        if not self.starts:
            raise ValueError("no memory")
        return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=Client(self)))


class Client:
    """The engine's client, of which vLLM has a finalizer from 0.31 on."""

    def __init__(self, library: Library) -> None:
        def shut_down() -> None:
            library.core.cleanup_dist_env_and_memory()

        self._finalizer = weakref.finalize(self, shut_down)

    def shutdown(self) -> None:
        self._finalizer()


@pytest.fixture(params=(MIN_VLLM, MAX_VLLM), ids=lambda release: ".".join(map(str, release)))
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(request.param, monkeypatch)


def start(tail: LogTail) -> Any:
    return startup.start_engine(config_of(), torch.device("cpu"), 1, tail)


def test_weights_that_vllm_goes_on_without_are_heard_after_a_start(library: Library) -> None:
    tail = LogTail()
    start(tail)
    logging.getLogger("vllm.reload").warning("Following weights were not loaded: {'model.norm.weight'}")
    assert "model.norm.weight" in tail.missing_weights


def test_a_start_that_fails_quotes_the_log(library: Library) -> None:
    library.starts = False
    with pytest.raises(LaunchError, match=r"failed to start: .*no memory.* log: starting with"):
        start(LogTail())


@pytest.mark.parametrize("end", [startup.shut_down, lambda llm: None], ids=["ended", "collected"])
def test_the_trainers_process_groups_outlive_an_engine(library: Library, end: Callable[[Any], None]) -> None:
    llm = start(LogTail())
    end(llm)
    del llm
    gc.collect()
    assert library.destroyed == ["vllm's groups"]


def test_a_sleep_leaves_the_trainer_what_torch_has_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    libraries: tuple[Any, ...] = torch.cuda, torch.accelerator
    for library in libraries:
        monkeypatch.setattr(library, "empty_cache", lambda name=library.__name__: emptied.append(name))
    with instance._keeping_allocator_cache():
        for library in libraries:
            library.empty_cache()
    assert emptied == []
    for library in libraries:
        library.empty_cache()
    assert emptied == ["torch.cuda", "torch.accelerator"]


def test_a_release_has_all_its_patches_and_no_other_is_known() -> None:
    for version in ("0.28.0", "0.28.1.post1", "0.28.0+cpu"):
        assert vllm_release(version) == (0, 28)
    for version in ("0.25.1", "0.34.0", "1.28.0", "dev"):
        assert vllm_release(version) is None


def test_the_documented_versions_are_those_of_the_code() -> None:
    text = DOCS.read_text()
    lines = re.findall(r"^- (0\.\d+.*)$", text, re.MULTILINE)
    minors = sorted(int(minor) for line in lines for minor in re.findall(r"\b0\.(\d+)\b", line))
    assert minors == [*range(MIN_VLLM[1], MAX_VLLM[1] + 1)]
    assert f"- 0.{MIN_VLLM_WITH_SAMPLING_MASKS[1]} can return the kept sets" in text
    assert (
        f"- 0.{MIN_VLLM_WHOSE_ENGINE_SETS_UP_LOG[1]} replaces the log handlers when an engine starts" in text
    )
    assert VLLM_VERSIONS in text
