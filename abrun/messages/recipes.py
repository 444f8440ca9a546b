"""Sentences of refusals of recipes, overrides and options that cannot be used."""

import textwrap
from typing import Any

from abrun.messages.message import Message
from abrun.reasons import Code

MAX_NAMED = 100  # characters, of fields that are refused beside the first
# What pydantic's kinds of errors allow; its numbers are filled in.
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
_OF_NODES = (
    "it is written into scripts and shown by clusters: let the nodes have it in their own environment or "
    "files, or name it in launcher.secrets of a jobset or skypilot"
)
_INSTEAD = (
    "pass it to a command as a variable of its environment, such as trainer.env.HF_TOKEN: ${HF_TOKEN}, "
    "which is read at every start and never stored"
)


def _line(source: str, field: str, problem: str, others: list[str]) -> str:
    named = textwrap.shorten(", ".join(others), MAX_NAMED, placeholder=" ...")
    more = f" (and {len(others)} more: {named})" if others else ""
    return f"{source}: {f'{field}: ' if field else ''}{problem}{more}"


def _unknown_key(source: str, field: str, nearest: str | None, allowed: list[str], others: list[str]) -> str:
    meant = f"did you mean {nearest!r}?" if nearest else f"allowed: {', '.join(allowed)}"
    return _line(source, field, f"unknown key; {meant}", others)


def _key_of_other_type(source: str, field: str, types: list[str], others: list[str]) -> str:
    named = ", ".join(map(repr, types))
    problem = f"unknown key with this type; use type: {named}, or leave it out (null if it is inherited)"
    return _line(source, field, problem, others)


def _missing_type(source: str, field: str, allowed: list[str], others: list[str]) -> str:
    return _line(source, field, f"missing; allowed: {', '.join(map(repr, allowed))}", others)


def _unknown_type(source: str, field: str, got: str, expected: str, others: list[str]) -> str:
    return _line(source, field, f"got {got}; allowed: {expected}", others)


def _length(source: str, field: str, got: str, kind: str, limit: int, others: list[str]) -> str:
    size = f"{limit} or more: add one" if kind == "too_short" else f"{limit} or less: leave some out"
    return _line(source, field, f"got {got}; allowed: a list of {size}", others)


def _not_allowed(
    source: str,
    field: str,
    got: str,
    kind: str,
    limits: dict[str, Any],
    advice: str | None,
    others: list[str],
) -> str:
    allowed = ALLOWED.get(kind, "another kind of value").format(**limits)
    instead = f"; {advice}" if advice else ", such as [4, 8]" if kind == "number_list_type" else ""
    return _line(source, field, f"got {got}; allowed: {allowed}{instead}", others)


def _index(source: str, field: str, got: str, length: int) -> str:
    allowed = f"0 to {length - 1}" if length > 1 else "0" if length else "none, it is empty"
    return (
        f"{source}: got {got} as the index into {field}; allowed: {allowed}; or give the list whole: "
        f"{field}=[...]"
    )


def _yaml_line(source: str, line: int | None, unquoted: bool, problem: str) -> str:
    place = "" if line is None else f", line {line}"
    hint = " ('${NAME}' inside of {...} takes quotes)" if unquoted else ""
    return f"{source}{place}{hint}: not readable as YAML: {problem}"


MESSAGES = {
    Code.KEY_UNKNOWN: Message(_unknown_key, meaning="a recipe has a key that does not exist there"),
    Code.KEY_OF_OTHER_TYPE: Message(_key_of_other_type, meaning="a section of this type has no such key"),
    Code.VALUE_MISSING: Message(
        lambda source, field, others: _line(source, field, "missing; add it to the recipe", others),
        meaning="a recipe lacks a value without a default",
    ),
    Code.TYPE_MISSING: Message(_missing_type, meaning="a section does not say its type"),
    Code.TYPE_UNKNOWN: Message(_unknown_type, meaning="a section's type does not exist"),
    Code.RULE_BROKEN: Message(_line, meaning="a rule over one or several fields is broken"),
    Code.LENGTH_NOT_ALLOWED: Message(_length, meaning="a list is too short or too long"),
    Code.VALUE_NOT_ALLOWED: Message(_not_allowed, meaning="a value has the wrong kind, or is out of range"),
    Code.WRITE_INSTEAD: Message("write {value}"),
    Code.WRITE_UNQUOTED: Message("write it without quotes"),
    Code.WRITE_QUOTED: Message("put it in quotes"),
    Code.DEFAULTS_CYCLE: Message(
        lambda source, cycle: f"{source}: defaults: a cycle of recipes ({' > '.join(cycle)}); drop one link",
        meaning="recipes inherit from each other in a circle",
    ),
    Code.RECIPE_NOT_UTF8: Message(
        "{source}: cannot be read as a recipe: not UTF-8 (byte {byte} is none of it)",
        remedy="save it as UTF-8",
    ),
    Code.OVERRIDE_INDEX_NOT_ALLOWED: Message(
        _index, meaning="--set names an entry that a list does not have"
    ),
    Code.YAML_LINE_INVALID: Message(_yaml_line, meaning="a line is not readable as YAML"),
    Code.SECRET_IN_COMMAND: Message(
        lambda source, field, word: f"{source}: {field}: {word} is given a secret; {_INSTEAD}",
        meaning="a command line holds what looks like a secret",
    ),
    Code.SECRET_IN_RECIPE: Message(
        lambda source, field, of_launcher: (
            f"{source}: {field}: looks like a secret; {_OF_NODES if of_launcher else _INSTEAD}"
        ),
        meaning="a recipe holds what looks like a secret",
    ),
    Code.TOO_FEW_PROBLEMS: Message(
        "validation.num_prompts: got {got}; {field}, {path}, has {problems:count problem}: use at most that "
        "many"
    ),
    Code.TOO_FEW_PROMPTS: Message(
        "validation.num_prompts: got {got}",
        remedy="the task has about {prompts} different prompts, and at most half can be held out: use "
        "{most}, or a larger task",
    ),
    Code.VALIDATION_TAKES_ALL: Message(
        "validation: holds out every problem of {field}, {path}",
        remedy="use a smaller num_prompts, or another file for validation.path",
    ),
    Code.PROBLEMS_UNREADABLE: Message(
        "{field}: got {path:repr}, which cannot be read: {problem}", remedy="give a JSON-lines file"
    ),
    Code.PROBLEM_TOO_DEEP: Message("{field}: {path}, line {line}: nested too deeply"),
    Code.PROBLEM_INVALID: Message(
        "{field}: {path}, line {line}: {problem}", remedy="correct or remove the line"
    ),
    Code.PROBLEMS_EMPTY: Message(
        "{field}: got {path:repr}, which has no problems", remedy="give a JSON-lines file with some"
    ),
    Code.REASONING_TASK_UNKNOWN: Message(
        "task.name: got {got:repr}", remedy="reasoning-gym {version} has {allowed:list}"
    ),
    Code.REASONING_PARAMETERS_REFUSED: Message(
        "task.parameters: got {got} with task.name {task:repr}, which refuses them: {error}"
    ),
    Code.REASONING_SCORER_RUNS_CODE: Message(
        "task.name: got {task:repr}, whose scorer runs completions as Python",
        remedy="use another task, or answer: final_number",
    ),
    Code.REASONING_TASK_NOT_REPEATABLE: Message(
        "task.name: got {task:repr}, which draws another problem from the same seed",
        remedy="use another task",
    ),
    Code.REASONING_TASK_WITHOUT_ANSWER: Message(
        "task.name: got {task:repr}, whose problems have no answer that its scorer takes",
        remedy="use another task",
    ),
    Code.VERIFIER_RAISED: Message(
        "task.verifier: {verifier:repr} raised {error} for the prompt at {prompt}",
        remedy="it must return a number for every completion",
    ),
    Code.VERIFIER_RETURNED: Message(
        "task.verifier: {verifier:repr} returned {returned} for the prompt at {prompt}",
        remedy="it must return a finite number",
    ),
    Code.VERIFIER_IMPORT_FAILED: Message(
        "task.verifier: got {verifier:repr}; importing {module} raised {error}",
        remedy="name an installed module, or one in the directory where abrun is started",
    ),
    Code.VERIFIER_INVALID: Message(
        "task.verifier: got {verifier:repr}; {problem}",
        remedy="name a function (prompt, completion, answer) -> number",
    ),
    Code.AUTO_NEEDS_LAUNCH: Message(
        "{recipe}: {field}: got 'auto', which abrun launch alone decides; give {instead} (which fit: abrun "
        "launch RECIPE --dry-run --device-memory 80GiB)"
    ),
    Code.CONTROL_NEEDS_ABRUN_TRAINER: Message(
        "{source}: got {fault:repr} with a foreign trainer, which plants none", remedy="drop it"
    ),
    Code.CONTROL_OF_FAULTY_BASELINE: Message(
        "{source}: got {fault:repr} with a baseline that has a fault", remedy="drop one of them"
    ),
    Code.CONTROL_NEEDS: Message("{source}: got {fault:repr}, which {needs}, or drop it"),
    Code.RECIPE_TOO_DEEP: Message(
        "{source}: nested too deeply to be a recipe", remedy="a few levels are enough"
    ),
    Code.PRIMARY_SYNTAX: Message(
        "--primary: got {got}",
        remedy="allowed: METRIC:WINDOW:MARGIN, such as 'train/reward:last 20%:0.05', 'train/reward:all:1.5 "
        "sigma' or 'memory:all:<0.6x'",
    ),
    Code.PRIMARY_LIMIT_SYNTAX: Message(
        "--primary: got {got}, a limit with a colon in it",
        remedy="write '<0.9x' for a ratio to the baseline, and '<0.9' for a level",
    ),
    Code.COMMAND_NAMES_ABRUN_FILE: Message(
        "trainer: got {got}, a file of abrun's", remedy="choose another name"
    ),
    Code.PROFILE_UNREADABLE: Message("{source}: cannot be read: {error}"),
    Code.PROFILE_INVALID: Message("{source}: got {got}", remedy="allowed: mappings under {allowed:list}"),
    Code.DEFAULTS_TOO_MANY_FILES: Message(
        "{source}: defaults: got more than {max_files} files behind one recipe", remedy="merge some"
    ),
    Code.RECIPE_EMPTY: Message("{source}: an empty recipe", remedy="abrun init writes one to begin with"),
    Code.RECIPE_NOT_A_MAPPING: Message(
        "{source}: got {got}", remedy="a recipe is a mapping of keys to values"
    ),
    Code.DEFAULTS_INVALID: Message(
        "{source}: defaults: got {got}", remedy="allowed: a path or a list of paths"
    ),
    Code.DEFAULTS_TOO_MANY: Message(
        "{source}: defaults: got {got} paths", remedy="allowed: at most {max_parents}"
    ),
    Code.DEFAULTS_MISSING: Message(
        "{source}: defaults: {parent}: no such recipe",
        remedy="give a path from that file's folder (abrun recipes NAME > {file} writes one that ships)",
    ),
    Code.RECIPE_MISSING: Message("{source}: no such recipe", remedy="check the path"),
    Code.RECIPE_UNREADABLE: Message("{source}: cannot be read as a recipe: {error}"),
    Code.RECIPE_TOO_LARGE: Message(
        "{source}: larger than {max_kib} KiB, with all that the recipe inherits",
        remedy="a recipe states differences: keep data elsewhere",
    ),
    Code.OVERRIDE_SYNTAX: Message(
        "--set: got {got}", remedy="allowed: key=value with a dotted key, such as steps=20"
    ),
    Code.OVERRIDE_WITHOUT_EFFECT: Message(
        "--set {field}: every arm sets it", remedy="write arms.{arm}.{field}"
    ),
    Code.OVERRIDE_INDEX_OF_NO_LIST: Message(
        "{source}: got the index {index} where {field} is no list (but {got})",
        remedy="give the list whole: {field}=[...]",
    ),
    Code.YAML_TOO_DEEP: Message("{source}: not readable as YAML: nested too deeply"),
    Code.YAML_NUMBER_TOO_LONG: Message("{source}: not readable as YAML: a number of thousands of digits"),
    Code.YAML_INVALID: Message("{source}: not readable as YAML: {problem}"),
    Code.FOLDER_WITHOUT_RECIPE: Message(
        "{source}: cannot be read as a recipe: a folder without {file}",
        remedy="give a recipe's file, or an experiment's folder, for what that was launched with",
    ),
    Code.SECRET_IN_ENV: Message(
        "{source}: {field}: looks like a secret", remedy="write ${{{variable}}} and export {variable}"
    ),
    Code.OPTION_NOT_ALLOWED: Message("{option}: got {got:repr}", remedy="allowed: {allowed:list}"),
    Code.FORMATS_EMPTY: Message(
        "--format: got {got:repr}, nothing to write", remedy="allowed: {allowed:list}"
    ),
    Code.NUMBERS_SYNTAX: Message(
        "{option}: got {got:repr}", remedy="allowed: numbers of at least {least}, such as {example}"
    ),
    Code.SEEDS_SYNTAX: Message(
        "--seeds: got {got:repr}", remedy="allowed: numbers such as 0,1,2 or ranges such as 0-4"
    ),
    Code.SEEDS_BACKWARDS: Message(
        "--seeds: got {got:repr}, which runs backwards", remedy="write {last}-{first}"
    ),
    Code.SEEDS_TOO_MANY: Message("--seeds: got {got:repr}", remedy="allowed: at most {max_seeds} seeds"),
    Code.LOOKS_SYNTAX: Message("--looks: got {got}", remedy="allowed: numbers of pairs, as 3,5,8"),
    Code.SEEDS_READ_AS_COUNT: Message(
        "--seeds: {got} is one seed, number {got}",
        remedy="for {got} seeds write 0-{last}, for that seed alone {got}-{got}",
    ),
    Code.MAX_SEEDS_BELOW_FIRST: Message(
        "--max-seeds: got {got} with {first} seeds", remedy="allowed: {first} or more"
    ),
    Code.UPLOAD_NEEDS_FILE: Message(
        "--wandb: got --format {formats}, which leaves no file to upload", remedy="add html, or json"
    ),
    Code.REFERENCE_WITHOUT_LEDGER: Message(
        "{reference}: got a reference without a ledger",
        remedy="freeze one: abrun freeze SOURCE -o FILE --budget 0.05",
    ),
    Code.PLAN_FROM_AND_ASSUMED: Message(
        "--from: got {got:repr} and --sigma or --correlation, which it measures; drop them, or plan without "
        "it: abrun plan RECIPE --sigma X"
    ),
    Code.SIGMA_INVALID: Message("--sigma: got {got}", remedy="allowed: a finite number of 0 or more"),
    Code.PLAN_NEEDS_RECIPE: Message(
        "plan: got no recipe", remedy="give one, or --from EXPERIMENT, whose own it is then"
    ),
    Code.SEARCHES_TWO: Message(
        "--max-sequences: got it with --max-seq-len; search for one at a time: drop one of them"
    ),
    Code.OPTION_OF_HEAD: Message(
        "{option}: got {got} with a recipe, whose model has its own",
        remedy="drop it, or use --sweep model.shape.vocab_size=...",
    ),
    Code.OPTION_NOT_PREDICTED: Message(
        "{option}: got it with --predict, which measures nothing",
        remedy="drop one of the two (what a device has: --device-memory)",
    ),
    Code.OPTION_NEEDS_PREDICT: Message("{option} requires --predict", remedy="add it, or drop {option}"),
    Code.MASTER_DTYPE_UNKNOWN: Message("--master-dtype: got {got:repr}", remedy="use {allowed}"),
    Code.OPTION_OF_OTHER_KIND: Message("{option}: got {got:repr} with --kind {kind}, which takes {takes}"),
    Code.OPTION_NOT_ASKED: Message(
        "{option}: missing, and nobody is there to be asked",
        remedy="give one, such as {option} {example} (all: abrun init --help)",
    ),
    Code.NO_FAULT_CAN_BE_PLANTED: Message(
        "{recipe}: controls.faults: got none that can be planted", remedy="see: abrun faults"
    ),
    Code.RECIPE_NAME_INVALID: Message(
        "--name: got {got:repr}", remedy="allowed: letters, digits, '.', '_' and '-', at most 100"
    ),
    Code.FILE_EXISTS: Message("{path}: is there already", remedy="give another --name, or another --to"),
    Code.RECIPE_NOT_FOUND: Message("--recipe: got {got:repr}, neither a file here nor a recipe that ships"),
    Code.RECIPE_WITHOUT_REFERENCE: Message(
        "--recipe: got {got:repr}, which names no frozen runs; make some (abrun freeze EXPERIMENT --output "
        "FILE), and give it the line compare: {{reference: FILE}}"
    ),
    Code.NO_SUCH_RECIPE: Message("{got}: no such recipe: neither a file here nor one that ships; {hint}"),
}
