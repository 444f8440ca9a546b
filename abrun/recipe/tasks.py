"""Task sections of a recipe: the prompts, how completions are scored, and validation."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from abrun.recipe.section import Count, FieldError, NonNegative, PathText, Section


class Arithmetic(Section):
    """Generated calculations with operands from 0 to `max_operand`, such as `37+58=`, verified exactly."""

    type: Literal["arithmetic"]
    operations: list[Literal["add", "subtract", "multiply"]] = Field(default=["add"], min_length=1)
    num_operands: Annotated[int, Field(ge=2, le=20)] = 2
    max_operand: Annotated[int, Field(ge=1, lt=10**9)] = 99


class WordProblems(Section):
    """Generated word problems with numbers up to `max_number`, verified by the solution's final answer."""

    type: Literal["word_problems"]
    topics: list[Literal["shopping", "ages", "travel", "sharing", "two_step"]] = Field(
        default=["shopping", "ages", "travel", "sharing", "two_step"], min_length=1
    )
    max_number: Annotated[int, Field(ge=3, lt=10**6)] = 20


class ReasoningGym(Section):
    """Task of the package reasoning-gym, scored by its own scorer (pip install 'abrun[reasoning]').

    `parameters` are passed to the task and set its difficulty, such as `{max_terms: 3}` for chain_sum.
    """

    type: Literal["reasoning_gym"]
    name: str
    parameters: dict[str, Any] = Field(default={})
    # Scored part of a completion: all of it, or its last number (see abrun.tasks.final_answers)
    answer: Literal["text", "final_number"] = "text"


def _check_module_and_function(value: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise FieldError(f"got {value[:60]!r}; allowed: module:function, such as my_rewards:judge")
    return value


Verifier = Annotated[str, AfterValidator(_check_module_and_function)]


class Problems(Section):
    """Scoring of completions against a reference answer, built in (`answer`) or by a `verifier`.

    answer: final_number reads the completion's last number literally: `$1,234.50.` is 1234.5 and `20%` is 20.
    Nothing is evaluated: if the answer is 68, neither `23 + 45` nor 136/2 is correct, and 3/4 is not 0.75. A
    number inside a longer expression (`71 or 72`, `5x`, `12:30`) does not count; abrun.tasks.final_answers
    has the rules. boxed reads the content of the last \\boxed{}: it must be exactly the reference number, or
    the reference text if that is not a number. math_verify extracts the final answer (boxed, announced, a
    formula or the last line) and compares its value using the package of that name. Any expression with the
    right value is then correct, including a repetition of the question. Choices and words are compared as
    text.

    `verifier: module:function` names a function (prompt, completion, answer) -> reward (any finite number).
    The trainer imports it from the installed packages or the directory in which abrun was started.
    """

    path: PathText
    answer: Literal["final_number", "boxed", "math_verify"] | None = None
    verifier: Verifier | None = None

    @property
    def judged_by(self) -> str | None:
        """Return the `answer` mode used without a verifier; None: chosen by the kind of the reference."""
        return self.answer


class Gsm8k(Problems):
    """JSON lines with `question` and an `answer` that ends in `#### 42`; answer: null means final_number."""

    type: Literal["gsm8k"]

    @property
    def judged_by(self) -> str | None:
        return None if self.verifier else self.answer or "final_number"


class Jsonl(Problems):
    """JSON lines with a prompt and a reference answer.

    answer: null means math_verify for references that are not numbers. For numbers it reads the last box, or
    else the last number, and compares values without evaluating operations: 1/2, 0.5 and 50% are equal.
    """

    type: Literal["jsonl"]
    prompt_field: str = "prompt"
    answer_field: str = "answer"


class CompletionsTask(Section):
    """JSON lines with a prompt and a target completion; for supervised fine-tuning."""

    type: Literal["completions"]
    path: PathText
    prompt_field: str = "prompt"
    completion_field: str = "completion"


class PreferencesTask(Section):
    """JSON lines with a prompt, a chosen and a rejected completion; for DPO, or SFT on the chosen ones."""

    type: Literal["preferences"]
    path: PathText
    prompt_field: str = "prompt"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"


GeneratedTask = Arithmetic | WordProblems | ReasoningGym  # no file needed
TaskConfig = GeneratedTask | Gsm8k | Jsonl | CompletionsTask | PreferencesTask


class Validation(Section):
    """Validation on held-out prompts before the first step, after every `every`-th step and after the last.

    Completions are sampled and scored; if the task cannot score them, the loss on held-out examples is
    recorded instead. The prompts are the same in every arm and for every seed, and no training (including the
    warm start) uses them.
    """

    every: Count
    num_prompts: Count = 64
    # File in the task's format; None: hold out prompts of the task itself. The last lines are used
    path: PathText | None = None
    temperature: NonNegative = 0.0  # 0: greedy; otherwise sampled with the rollouts' filters
