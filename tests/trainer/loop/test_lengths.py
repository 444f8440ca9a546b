"""Lines of a file that are too long for the model: found before the first step, if a step would draw them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from abrun.errors import RecipeError
from abrun.recipe.policy import Model
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.loop.data import check_example_lengths, make_data
from abrun.trainer.models.text import load_text
from tests.snapshot import Snapshot
from tests.written_runs import run_config

LONG = "7" * 1100
SFT = "algorithm={type: sft, batch_size: 2}"


class Among:
    """The first of two ranks, of which the other says something."""

    rank, size = 0, 2

    def __init__(self, other: str) -> None:
        self.other, self.own = other, ""

    def all_gather_world(self, own: str) -> list[str]:
        self.own = own
        return [own, self.other]


def refused(
    path: Path,
    rows: Sequence[dict[str, str]],
    *overrides: str,
    first: int = 1,
    template: str | None = None,
    ranks: Any = None,
) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    kind = "completions" if "completion" in rows[0] else "preferences" if "chosen" in rows[0] else "jsonl"
    config = run_config("steps=2", f"task={{type: {kind}, path: {path}}}", *overrides)
    text = load_text(Model(preset="qwen2-tiny"), weights=None)
    text.tokenizer.chat_template = template
    data = make_data(config, text, make_ranks(torch.device("cpu"), {}), seed=0)
    try:
        check_example_lengths(replace(data, ranks=ranks or data.ranks), config, first)
    except RecipeError as error:
        return str(error)
    return ""


@pytest.fixture
def path(tmp_path: Path, group: None) -> Path:
    return tmp_path / "texts.jsonl"


def completions(*texts: str) -> list[dict[str, str]]:
    return [{"prompt": f"{at}+2=", "completion": text} for at, text in enumerate(texts)]


def test_what_fills_the_model_to_its_last_token_is_trained_on(path: Path, snapshot: Snapshot) -> None:
    # With its end: 1,024 tokens, of up to 3,058 bytes
    assert not refused(path, completions("3", "7" * 1019, "\N{BULLET}" * 1019), SFT)
    said = refused(path, completions("3", "7" * 1020), SFT)
    assert said.startswith(f"task: {path}, line 2: ") and "1025 tokens; " in said and "allows 1024" in said
    pair = {"prompt": "1", "chosen": "1", "rejected": "8" * 1022}
    assert not refused(path, [pair], "algorithm={type: dpo, batch_size: 2}")
    pair["rejected"] += "8"
    snapshot(refused(path, [pair], "algorithm={type: dpo, batch_size: 2}"))


def test_of_what_is_sampled_the_prompt_counts(path: Path, snapshot: Snapshot) -> None:
    rows = [{"prompt": "7" * 1018, "answer": LONG}, {"prompt": "1", "answer": LONG}]
    assert not refused(path, rows)
    assert not refused(path, rows, "algorithm={type: ppo, prompts_per_step: 4}")
    rows[0]["prompt"] += "7"
    snapshot(refused(path, rows))


def test_new_tokens_for_which_there_is_no_room_are_not_the_lines_fault(
    path: Path, snapshot: Snapshot
) -> None:
    said = refused(path, [{"prompt": "1", "answer": "1"}], "rollout.max_new_tokens=5000")
    snapshot(said)


def test_lines_that_no_step_draws_are_nobodys_concern(path: Path, snapshot: Snapshot) -> None:
    rows = completions(*["3"] * 40, LONG)
    drawn = [first for first in (1, 2) if refused(path, rows, SFT, "steps=21", first=first)]
    assert drawn == [1, 2]  # one pass and more
    assert not refused(path, rows, SFT, "steps=2")
    assert not refused(path, rows, SFT, "steps=21", first=22)
    # A run that goes on has to draw what it would have drawn
    message = refused(path, rows, SFT, "steps=21", first=2)
    snapshot(message)
    answered = [{"prompt": "1", "answer": "1"}] * 40 + [{"prompt": LONG, "answer": "1"}]
    few = "algorithm={type: grpo, prompts_per_step: 1, group_size: 4, %s}"
    assert not refused(path, answered, few % "")
    again = "dynamic_sampling: {max_tries: 2}"
    assert "line 41" in refused(path, answered, few % again)


def test_what_is_held_out_is_looked_at(path: Path) -> None:
    validation = "validation={every: 1, num_prompts: 1}"
    assert "line 3: " in refused(path, completions("3", "4", LONG), SFT, validation)
    other = path.with_name("other.jsonl")
    other.write_text(json.dumps({"prompt": LONG, "completion": "1"}))
    validation = f"validation={{every: 1, num_prompts: 1, path: {other}}}"
    assert f"task: {other}, line 1: " in refused(path, completions("3", "4"), SFT, validation)
    assert not refused(path, completions("3", "4"), SFT)


def test_templates_see_nothing_but_the_lines(path: Path) -> None:
    strict = (
        "{% for m in messages %}{% if '=' not in m.content %}{{ raise_exception('no =') }}{% endif %}"
        "<{{ m.content | trim }}>{% endfor %}"
    )
    assert not refused(path, completions("3", "7" * 1000), SFT, template=strict)
    spaces = [*completions("3"), {"prompt": "1=" + " " * 3000, "completion": "1"}]
    assert not refused(path, spaces, SFT, template=strict)


def test_what_one_rank_finds_all_ranks_say(path: Path, snapshot: Snapshot) -> None:
    """Others would wait for it in vain, and the first, which writes down why a run failed, would say so."""
    ranks = Among("task: the other rank's")
    assert refused(path, completions("3"), SFT, ranks=ranks) == "task: the other rank's"
    ranks = Among("")
    nothing = [*completions("3"), {"prompt": " " * 2000, "completion": "7"}]
    said = refused(path, nothing, SFT, template="{{ messages[0].content | trim }}", ranks=ranks)
    assert said == ranks.own and len(said) < 200
    snapshot(said)
