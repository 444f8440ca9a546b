"""Task sections of a recipe: the prompts, how completions are scored, and validation."""

from typing import Annotated, Any, Literal

from pydantic import Field

from abrun.recipe.section import Count, NonNegative, PathText, RuleError, Section, matching, rule
from abrun.runs.redaction import shortened


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
    # Scored part of a completion: all of it, or its last number
    answer: Literal["text", "final_number"] = "text"


VERIFIER_PATTERN = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"
Verifier = Annotated[str, matching(VERIFIER_PATTERN, "module:function, such as my_rewards:judge")]


class Problems(Section):
    """Scoring of completions against a reference answer, built in (`answer`) or by a `verifier`.

    `final_number` reads the completion's last number literally and evaluates nothing: `136/2` is not 68, and
    a number inside an expression (`5x`, `12:30`) does not count. `boxed` compares the content of the last
    \\boxed{} with the reference. `math_verify` compares values using the package of that name, so any
    expression with the right value is correct. `verifier: module:function` names a function (prompt,
    completion, answer) -> reward, from an installed package or the directory in which abrun was started.
    """

    path: PathText
    answer: Literal["final_number", "boxed", "math_verify"] | None = None
    verifier: Verifier | None = None

    @rule
    def _check_single_judge(self) -> None:
        if self.answer is not None and self.verifier is not None:
            raise RuleError(
                f"task.answer: got {self.answer!r} with verifier {shortened(self.verifier)}, which replaces "
                "it; use answer: null, or verifier: null"
            )

    @property
    def judged_by(self) -> str | None:
        """Return the `answer` mode used without a verifier; None: chosen by the kind of the reference."""
        return self.answer


class Gsm8k(Problems):
    """JSON lines with `question` and an `answer` that ends in `#### 42`; default: final_number."""

    type: Literal["gsm8k"]

    @property
    def judged_by(self) -> str | None:
        return None if self.verifier else self.answer or "final_number"


class Jsonl(Problems):
    """JSON lines with a prompt and a reference answer.

    Without `answer`, numbers are compared by value with the last box or else the last number (1/2, 0.5 and
    50% are equal), and other references by math_verify.
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
    """Validation before the first step, after every `every`-th step and after the last.

    All arms and seeds have the same prompts, held out from training and warm start. Tasks that cannot score
    completions record the loss.
    """

    every: Count
    num_prompts: Count = 64
    # File in the task's format; None: hold out prompts of the task itself. The last lines are used
    path: PathText | None = None
    temperature: NonNegative = 0.0  # 0: greedy; otherwise sampled with the rollouts' filters
