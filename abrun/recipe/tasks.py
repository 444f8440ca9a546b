"""Where prompts come from, how completions are judged, and what is held out."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from abrun.recipe.section import Count, FieldError, NonNegative, PathText, Section


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


class ReasoningGym(Section):
    """Problems of a task of the package reasoning-gym, judged by its scorer (pip install 'abrun[reasoning]').

    `parameters` are the task's own, such as `{max_terms: 3}` of chain_sum: its difficulty.
    """

    type: Literal["reasoning_gym"]
    name: str
    parameters: dict[str, Any] = Field(default={})
    # What of a completion is scored: all of it, or its last number (see abrun.tasks.final_answers)
    answer: Literal["text", "final_number"] = "text"


def _module_and_function(value: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise FieldError(f"got {value[:60]!r}; allowed: module:function, such as my_rewards:judge")
    return value


Verifier = Annotated[str, AfterValidator(_module_and_function)]


class Problems(Section):
    """Judge of completions against a reference answer: one of abrun's own, or a verifier.

    answer: final_number takes the completion's last number, literally: `$1,234.50.` is 1234.5 and `20%` is
    20, but nothing is computed, so `23 + 45` is no answer to a question of 68, nor is 136/2, and 3/4 is not
    0.75. A number inside of something longer (`71 or 72`, `5x`, `12:30`) does not count;
    abrun.tasks.final_answers has the rules. boxed takes what the last \\boxed{} holds: the same number and
    nothing else, or where the reference is no number the same text. math_verify takes the final answer
    (boxed, announced, a formula or the last line) and compares its value with the package of that name. Any
    expression that computes to it is an answer then, the question itself included. Choices and words are
    compared as texts.

    `verifier: module:function` names a function (prompt, completion, answer) -> reward, any finite number.
    The trainer imports it, from the installed packages or the directory where abrun was started.
    """

    path: PathText
    answer: Literal["final_number", "boxed", "math_verify"] | None = None
    verifier: Verifier | None = None

    @property
    def judged_by(self) -> str | None:
        """How completions are judged without a verifier; None: by the kind of their reference."""
        return self.answer


class Gsm8k(Problems):
    """JSON lines with `question` and an `answer` that ends in `#### 42`; answer: null is final_number."""

    type: Literal["gsm8k"]

    @property
    def judged_by(self) -> str | None:
        return None if self.verifier else self.answer or "final_number"


class Jsonl(Problems):
    """JSON lines with a prompt and a reference answer.

    answer: null is math_verify for references that are no numbers. Of a number it takes the last box, or else
    the last number, and compares values with no operation left to do: 1/2, 0.5 and 50% are equal.
    """

    type: Literal["jsonl"]
    prompt_field: str = "prompt"
    answer_field: str = "answer"


class Completions(Section):
    """JSON lines with a prompt and the completion to imitate; for supervised fine-tuning."""

    type: Literal["completions"]
    path: PathText
    prompt_field: str = "prompt"
    completion_field: str = "completion"


class Preferences(Section):
    """JSON lines with a prompt, a chosen and a rejected completion; for DPO, or SFT on the chosen ones."""

    type: Literal["preferences"]
    path: PathText
    prompt_field: str = "prompt"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"


GENERATED = Arithmetic | WordProblems | ReasoningGym  # without a file
TaskConfig = GENERATED | Gsm8k | Jsonl | Completions | Preferences


class Validation(Section):
    """Completions of held-out prompts, before the first step, after every `every`-th and after the last.

    Where the task has no verifier, the loss on the held-out examples is in their place. The prompts are the
    same in every arm and for every seed, and no training (a warm start included) sees them.
    """

    every: Count
    num_prompts: Count = 64
    path: PathText | None = (
        None  # a file of the task's format; None: hold out of the task itself. The last lines
    )
    temperature: NonNegative = 0.0  # 0: the most likely token; otherwise sampled, with the rollouts' filters
