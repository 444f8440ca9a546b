"""Where prompts come from, how completions are judged, and what is held out."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from abrun.recipe.section import Count, NonNegative, Section


class Arithmetic(Section):
    """Generated calculations with numbers from 0 to `max_operand`, such as `37+58=`, verified exactly."""

    type: Literal["arithmetic"]
    operations: list[Literal["add", "subtract", "multiply"]] = Field(default=["add"], min_length=1)
    num_operands: Annotated[int, Field(ge=2, le=20)] = 2
    max_operand: Annotated[int, Field(ge=1, lt=10**9)] = 99


class WordProblems(Section):
    """Generated stories, their numbers up to `max_number`, verified on the final answer of the solution."""

    type: Literal["word_problems"]
    topics: list[Literal["shopping", "ages", "travel", "sharing", "two_step"]] = Field(
        default=["shopping", "ages", "travel", "sharing", "two_step"], min_length=1
    )
    max_number: Annotated[int, Field(ge=3, lt=10**6)] = 20


def _module_and_function(value: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise ValueError(f"got {value[:60]!r}; allowed: module:function, such as my_rewards:judge")
    return value


Verifier = Annotated[str, AfterValidator(_module_and_function)]


class Gsm8k(Section):
    """JSON lines with `question` and an `answer` that ends in `#### 42`."""

    type: Literal["gsm8k"]
    path: str
    verifier: Verifier | None = None  # see Jsonl


class Jsonl(Section):
    """JSON lines with a prompt and a reference answer, compared mathematically or by a verifier of your own.

    `verifier: module:function` names a function (prompt, completion, answer) -> reward, any finite number.
    The trainer imports it, from the installed packages or the directory where abrun was started.
    """

    type: Literal["jsonl"]
    path: str
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    verifier: Verifier | None = None  # None: math-verify


class Completions(Section):
    """JSON lines with a prompt and the completion to imitate; for supervised fine-tuning."""

    type: Literal["completions"]
    path: str
    prompt_field: str = "prompt"
    completion_field: str = "completion"


class Preferences(Section):
    """JSON lines with a prompt, a chosen and a rejected completion; for DPO, or SFT on the chosen ones."""

    type: Literal["preferences"]
    path: str
    prompt_field: str = "prompt"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"


TaskConfig = Arithmetic | WordProblems | Gsm8k | Jsonl | Completions | Preferences


class Validation(Section):
    """Completions of held-out prompts, before the first step, after every `every`-th and after the last.

    Where the task has no verifier, the loss on the held-out examples is in their place. The prompts are the
    same in every arm and for every seed, and no training (a warm start included) sees them.
    """

    every: Count
    num_prompts: Count = 64
    path: str | None = None  # a file of the task's format; None: hold out of the task itself. The last lines
    temperature: NonNegative = 0.0  # 0: the most likely token; otherwise sampled, with the rollouts' top_p
