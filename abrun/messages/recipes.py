"""Sentences of refusals of recipes, overrides and options that cannot be used."""

import textwrap

from abrun.messages.codes import Code
from abrun.messages.message import Message

MAX_NAMED = 100  # characters of the names of further invalid fields
# Allowed values by the type of pydantic's error, which supplies the numbers
ALLOWED = {
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "{ge} or more",
    "int_type": "a whole number",
    "less_than": "a number below {lt}",
    "less_than_equal": "{le} or less",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "number_list_type": "a list of numbers",
    "string_type": "text",
}
_SECRET_OF_NODES = (
    "scripts would contain it and clusters would show it; set it in the nodes' own environment or files"
)
_SECRET_BY_VARIABLE = (
    "pass it as an environment variable, such as trainer.env.HF_TOKEN: ${HF_TOKEN}, which is read at every "
    "start and never stored"
)


def _line(source: str, field: str, problem: str, others: list[str]) -> str:
    """A rule for one or several fields is broken."""
    named = textwrap.shorten(", ".join(others), MAX_NAMED, placeholder=" ...")
    more = f" (and {len(others)} more: {named})" if others else ""
    return f"{source}: {f'{field}: ' if field else ''}{problem}{more}"


def _unknown_key(source: str, field: str, nearest: str | None, allowed: list[str], others: list[str]) -> str:
    remedy = f"did you mean {nearest!r}?" if nearest else f"allowed: {', '.join(allowed)}"
    return _line(source, field, f"unknown key; {remedy}", others)


def _key_of_other_type(source: str, field: str, types: list[str], others: list[str]) -> str:
    names = ", ".join(map(repr, types))
    problem = f"not a key of this type; use type: {names}, or drop it (null if it is inherited)"
    return _line(source, field, problem, others)


def _missing_type(source: str, field: str, allowed: list[str], others: list[str]) -> str:
    return _line(source, field, f"missing; allowed: {', '.join(map(repr, allowed))}", others)


def _unknown_type(source: str, field: str, got: str, expected: str, others: list[str]) -> str:
    return _line(source, field, f"got {got}; allowed: {expected}", others)


def _length(source: str, field: str, got: str, kind: str, limit: int, others: list[str]) -> str:
    allowed = f"at least {limit}" if kind == "too_short" else f"at most {limit}"
    return _line(source, field, f"got {got}; allowed: a list of {allowed}", others)


def _not_allowed(source, field, got, kind, limits, advice, others) -> str:
    allowed = ALLOWED.get(kind, "another kind of value").format(**limits)
    instead = f"; {advice}" if advice else ", such as [4, 8]" if kind == "number_list_type" else ""
    return _line(source, field, f"got {got}; allowed: {allowed}{instead}", others)


def _index(source: str, field: str, got: str, length: int) -> str:
    allowed = f"0 to {length - 1}" if length > 1 else "0" if length else "none, it is empty"
    return f"{source}: got index {got} for {field}; allowed: {allowed}; or give the whole list: {field}=[...]"


def _yaml_line(source: str, line: int | None, unquoted: bool, problem: str) -> str:
    place = "" if line is None else f", line {line}"
    hint = " ('${NAME}' inside {...} needs quotes)" if unquoted else ""
    return f"{source}{place}{hint}: not readable as YAML: {problem}"


def _value_missing(source: str, field: str, others: list[str]) -> str:
    return _line(source, field, "missing; add it to the recipe", others)


def _secret_in_recipe(source: str, field: str, of_launcher: bool) -> str:
    return (
        f"{source}: {field}: looks like a secret; {_SECRET_OF_NODES if of_launcher else _SECRET_BY_VARIABLE}"
    )


MESSAGES: dict[Code, Message] = {
    Code.KEY_UNKNOWN: _unknown_key,
    Code.KEY_RENAMED: "{source}: {field}: was renamed; use {name}",
    Code.KEY_OF_OTHER_TYPE: _key_of_other_type,
    Code.VALUE_MISSING: _value_missing,
    Code.TYPE_MISSING: _missing_type,
    Code.TYPE_UNKNOWN: _unknown_type,
    Code.RULE_BROKEN: _line,
    Code.LENGTH_NOT_ALLOWED: _length,
    Code.VALUE_NOT_ALLOWED: _not_allowed,
    Code.WRITE_INSTEAD: "write {value}",
    Code.WRITE_UNQUOTED: "write it without quotes",
    Code.WRITE_QUOTED: "put it in quotes",
    Code.DEFAULTS_CYCLE: "{source}: defaults: recipes inherit in a cycle ({cycle:join  > }); drop one",
    Code.RECIPE_NOT_UTF8: "{source}: cannot be read as a recipe: not UTF-8 (at byte {byte}); save it as "
    "UTF-8",
    Code.OVERRIDE_INDEX_NOT_ALLOWED: _index,
    Code.YAML_LINE_INVALID: _yaml_line,
    Code.SECRET_IN_RECIPE: _secret_in_recipe,
    Code.TOO_FEW_PROBLEMS: "validation.num_prompts: got {got}, but {field} ({path}) has only {problems:count "
    "problem}; use at most that many",
    Code.TOO_FEW_PROMPTS: "validation.num_prompts: got {got}, but the task has about {prompts} different "
    "prompts and at most half can be held out; use {most}, or a larger task",
    Code.VALIDATION_TAKES_ALL: "validation: holds out every problem of {field} ({path}); use a smaller "
    "num_prompts, or another file for validation.path",
    Code.PROBLEMS_UNREADABLE: "{field}: got {path:repr}, which cannot be read: {problem}; give a JSON-lines "
    "file",
    Code.PROBLEM_TOO_DEEP: "{field}: {path}, line {line}: nested too deeply",
    Code.PROBLEM_INVALID: "{field}: {path}, line {line}: {problem}; correct or remove the line",
    Code.PROBLEMS_EMPTY: "{field}: got {path:repr}, which has no problems; give a JSON-lines file with "
    "problems",
    Code.REASONING_TASK_UNKNOWN: "task.name: got {got:repr}; reasoning-gym {version} has {allowed:list}",
    Code.REASONING_PARAMETERS_REFUSED: "task.parameters: got {got} with task.name {task:repr}, which refuses "
    "them: {error}",
    Code.REASONING_SCORER_RUNS_CODE: "task.name: got {task:repr}, whose scorer runs completions as Python; "
    "use another task, or answer: final_number",
    Code.REASONING_TASK_NOT_REPEATABLE: "task.name: got {task:repr}, which does not repeat its problems with "
    "the same seed; use another task",
    Code.REASONING_TASK_WITHOUT_ANSWER: "task.name: got {task:repr}, whose problems have no answer that its "
    "scorer accepts; use another task",
    Code.VERIFIER_RAISED: "task.verifier: {verifier:repr} raised {error} for the prompt at {prompt}; it must "
    "return a number for every completion",
    Code.VERIFIER_RETURNED: "task.verifier: {verifier:repr} returned {returned} for the prompt at {prompt}; "
    "it must return a finite number",
    Code.VERIFIER_IMPORT_FAILED: "task.verifier: got {verifier:repr}, but importing {module} raised {error}; "
    "name an installed module, or one in the directory where abrun is started",
    Code.VERIFIER_INVALID: "task.verifier: got {verifier:repr}; {problem}; name a function (prompt, "
    "completion, answer) -> number",
    Code.AUTO_NEEDS_LAUNCH: "{recipe}: {field}: got 'auto', which only abrun launch resolves; give {instead} "
    "(to see which fit: abrun launch RECIPE --dry-run --device-memory 80GiB)",
    Code.CONTROL_NEEDS_ABRUN_TRAINER: "{source}: got {fault:repr} with a foreign trainer, but faults can "
    "only be injected into abrun's own; drop it",
    Code.CONTROL_OF_FAULTY_BASELINE: "{source}: got {fault:repr}, but the baseline already has an injected "
    "fault; drop one of them",
    Code.CONTROL_NEEDS: "{source}: got {fault:repr}, which {needs}, or drop the fault",
    Code.RECIPE_TOO_DEEP: "{source}: nested too deeply; a recipe needs only a few levels",
    Code.CLAIM_LIMIT_SYNTAX: "--claim: got {got}, a limit with a colon; write '<0.9x' for a ratio to the "
    "baseline, or '<0.9' for a level",
    Code.PROFILE_INVALID: "{source}: got {got}; allowed: mappings under {allowed:list}",
    Code.DEFAULTS_TOO_MANY_FILES: "{source}: defaults: the recipe inherits from more than {max_files} files; "
    "merge some",
    Code.RECIPE_EMPTY: "{source}: the recipe is empty; create one with abrun init",
    Code.RECIPE_NOT_A_MAPPING: "{source}: got {got}; allowed: a mapping of keys to values",
    Code.DEFAULTS_INVALID: "{source}: defaults: got {got}; allowed: a path or a list of paths",
    Code.DEFAULTS_TOO_MANY: "{source}: defaults: got {got} paths; allowed: at most {max_parents}",
    Code.DEFAULTS_MISSING: "{source}: defaults: {parent}: no such recipe; give a path relative to that "
    "file's folder (to copy a built-in recipe: abrun recipes NAME > {file})",
    Code.RECIPE_UNREADABLE: "{source}: cannot be read as a recipe: {error}",
    Code.RECIPE_TOO_LARGE: "{source}: the recipe and its parents exceed {max_kib} KiB; keep data in other "
    "files",
    Code.OVERRIDE_WITHOUT_EFFECT: "--set {field}: has no effect, because every arm sets it; use "
    "arms.{arm}.{field}",
    Code.OVERRIDE_INDEX_OF_NO_LIST: "{source}: got index {index}, but {field} is {got}, not a list; give the "
    "whole list: {field}=[...]",
    Code.FOLDER_WITHOUT_RECIPE: "{source}: cannot be read as a recipe: the folder has no {file}; give a "
    "recipe file, or an experiment's folder to use the recipe it was launched with",
    Code.SECRET_IN_ENV: "{source}: {field}: looks like a secret; write ${{{variable}}} and export {variable}",
    Code.SEEDS_BACKWARDS: "--seeds: got {got:repr}, which runs backwards; write {last}-{first}",
    Code.SEEDS_TOO_MANY: "--seeds: got {got:repr}; allowed: at most {max_seeds} seeds",
    Code.SEEDS_READ_AS_COUNT: "--seeds: {got} is one seed, number {got}; for {got} seeds write 0-{last}, for "
    "that seed alone {got}-{got}",
    Code.MAX_SEEDS_BELOW_FIRST: "--max-seeds: got {got} with {first} seeds; allowed: {first} or more",
    Code.UPLOAD_NEEDS_FILE: "--wandb requires --output FOLDER, whose report it uploads; add it",
    Code.SCHEMA_OF_ONE_RECIPE: "--schema: got the recipe {got:repr}, but all recipes have one schema; "
    "drop one of them",
    Code.PLAN_FROM_AND_ASSUMED: "--from: got {got:repr} with --sigma or --correlation, which --from "
    "measures; drop them, or plan without --from: abrun power RECIPE --sigma X",
    Code.PLAN_NEEDS_RECIPE: "power: recipe missing; pass one, or --from EXPERIMENT to reuse its recipe",
    Code.SEARCHES_TWO: "--max-sequences cannot be combined with --max-seq-len; search for one at a time",
    Code.OPTION_NOT_PREDICTED: "{option} cannot be combined with --predict, which measures nothing; drop one "
    "of them (to set a device's memory: --device-memory)",
    Code.MASTER_DTYPE_UNKNOWN: "--master-dtype: got {got:repr}; allowed: {allowed}",
    Code.OPTION_OF_OTHER_KIND: "{option}: got {got:repr}, but --kind {kind} takes {takes}",
    Code.OPTIONS_NOT_ASKED: "{missing:list}: missing, and there is no terminal to ask on; give all, such as "
    "abrun init {example}",
    Code.STARTER_UNWRITABLE: "{path}: cannot be written: {problem}; choose another folder with --to",
    Code.NO_FAULT_CAN_BE_INJECTED: "{recipe}: controls.faults: no fault can be injected; see: abrun faults",
    Code.FILE_EXISTS: "{path}: already exists; choose another --name or --to",
    Code.RECIPE_NOT_FOUND: "--recipe: got {got:repr}, which is neither a file here nor a built-in recipe",
    Code.RECIPE_WITHOUT_REFERENCE: "--recipe: got {got:repr}, which has no compare.reference; make one "
    "(abrun reference save EXPERIMENT --output FILE), and add compare: {{reference: FILE}}",
    Code.NO_SUCH_RECIPE: "{got}: no such recipe, neither a file here nor built in; {hint}",
}
