"""Keys of earlier versions in stored files: renamed, removed, or with another spelling of their values.

Stored experiments, configurations and references are migrated where they are read. A key that changes gets a
line in one of the tables below, so that what earlier versions wrote stays readable and resumable.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

LEVEL = "level "  # before a negative limit, which was a number before the word was required

# Old and new dotted key; both are in the same section
RENAMED = {
    "compare.primary": "compare.claims",
    "compare.looks": "compare.interim",
    "compare.looks_spending": "compare.alpha_spending",
    "planted_fault": "injected_fault",
}
# Dotted key -> its default. Recipes and configurations with the key are read without it. A comparison still
# shows a value other than the default, by which arms may differ.
REMOVED: dict[str, Any] = {
    "keep_samples.every": 10,
    "policy.backend.distributed_optimizer": True,
    "policy.logprobs.memory_budget_mib": None,
}
# Removed key -> the only type of its section that had it
TYPES_OF_REMOVED = {"policy.backend.distributed_optimizer": "megatron"}
# Types of `launcher` that only exported manifests; stored recipes are read without that section
REMOVED_LAUNCHERS = ("jobset", "skypilot")


def migrate(tree: Any) -> Any:
    """Return a stored recipe, configuration or `{"compare": ...}` with today's keys and spellings.

    A tree of any other shape is returned as it is, for validation to refuse.
    """
    for old, new in RENAMED.items():
        tree = _rename(tree, old.split("."), new.rpartition(".")[2])
    tree = _convert_limits(tree, _level_as_text)
    return _convert_arms(tree, migrate_dotted)


def _convert_arms(tree: Any, convert: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """Return the tree with the changes of its arms, which have dotted keys, converted."""
    arms = tree.get("arms") if isinstance(tree, Mapping) else None
    if not isinstance(arms, Mapping):
        return tree
    changes = {arm: convert(keys) if isinstance(keys, Mapping) else keys for arm, keys in arms.items()}
    return {**tree, "arms": changes}


def migrate_dotted(values: Any) -> Any:
    """Return values by dotted key with today's keys, without removed keys that have their default."""
    if not isinstance(values, Mapping):
        return values
    values = {key: value for key, value in values.items() if key not in REMOVED or REMOVED[key] != value}
    migrated: dict[Any, Any] = {}
    for key, value in values.items():
        olds = (old for old in RENAMED if isinstance(key, str) and f"{key}.".startswith(f"{old}."))
        old = next(olds, None)
        migrated[key if old is None else RENAMED[old] + key[len(old) :]] = value
    return migrated


def migrate_ledger(ledger: Any) -> Any:
    """Return the ledger of a reference, whose entries had the keys of a recipe's comparison."""
    entries = ledger.get("entries") if isinstance(ledger, Mapping) else None
    if not isinstance(entries, list):
        return ledger
    migrated = [migrate({"compare": entry})["compare"] for entry in entries]
    for index, entry in enumerate(migrated):
        if isinstance(entry, Mapping) and entry.get("treatment") is not None:
            migrated[index] = {**entry, "treatment": migrate_dotted(entry["treatment"])}
    return {**ledger, "entries": migrated}


def drop_removed(tree: Any) -> Any:
    """Return a recipe or configuration without removed keys, which no section has."""
    for key in REMOVED:
        tree = _rename(tree, key.split("."), None)
    sections = tree if isinstance(tree, Mapping) else {}
    launcher, cluster = sections.get("launcher"), sections.get("cluster")
    if isinstance(launcher, Mapping) and launcher.get("type") in REMOVED_LAUNCHERS:
        tree = {**tree, "launcher": None}
    if isinstance(cluster, Mapping) and cluster.get("runs_per_gpu") == "auto":  # decided by earlier versions
        tree = _rename(tree, ["cluster", "runs_per_gpu"], None)
    return _convert_arms(
        tree, lambda change: {key: value for key, value in change.items() if key not in REMOVED}
    )


def with_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the defaults of removed keys, so that its hash stays what it was."""
    restored: dict[str, Any] = {**tree}
    for key, default in REMOVED.items():
        restored = _restore(restored, key.split("."), default, TYPES_OF_REMOVED.get(key))
    return restored


def _restore(tree: Any, path: list[str], default: Any, section_type: str | None) -> Any:
    key, *inner = path
    if not isinstance(tree, Mapping):
        return tree
    if inner:
        return {**tree, key: _restore(tree[key], inner, default, section_type)} if key in tree else tree
    return tree if section_type not in (None, tree.get("type")) else {**tree, key: default}


def earlier_forms(compare: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a declared comparison as earlier versions spelled and hashed it, the newest form first."""
    if compare.get("alpha_spending") == "equal":  # it was the default, which is not part of the hash
        compare = {key: value for key, value in compare.items() if key != "alpha_spending"}
        yield compare
    tree: Any = _convert_limits({"compare": dict(compare)}, _level_as_number)
    yield tree["compare"]
    for old, new in RENAMED.items():
        tree = _rename(tree, new.split("."), old.rpartition(".")[2])
    yield tree["compare"]


def _rename(tree: Any, path: list[str], name: str | None) -> Any:
    """Return the tree with the key at `path` renamed, or dropped if `name` is None."""
    key, *inner = path
    if not isinstance(tree, Mapping) or key not in tree or name in tree:
        return tree
    if inner:
        return {**tree, key: _rename(tree[key], inner, name)}
    remaining_keys = {tree_key: value for tree_key, value in tree.items() if tree_key != key}
    return remaining_keys if name is None else {name: tree[key], **remaining_keys}


def _convert_limits(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """Return the tree with the limits of its claims converted."""
    compare = tree.get("compare") if isinstance(tree, Mapping) else None
    if not isinstance(compare, Mapping) or not isinstance(claims := compare.get("claims"), list):
        return tree
    converted = []
    for claim in claims:
        limits = {key for key in ("below", "above") if isinstance(claim, Mapping) and key in claim}
        converted.append({**claim, **{key: convert(claim[key]) for key in limits}} if limits else claim)
    return {**tree, "compare": {**compare, "claims": converted}}


def _level_as_text(limit: Any) -> Any:
    """Return a negative limit as a level: -0.5 as `level -0.5`, exactly."""
    if type(limit) not in (int, float) or not -math.inf < limit < 0:
        return limit
    text = format(Decimal(repr(limit)), "f")
    return f"{LEVEL}{text}{'' if '.' in text or isinstance(limit, int) else '.0'}"


def _level_as_number(limit: Any) -> Any:
    is_negative = isinstance(limit, str) and limit.startswith(f"{LEVEL}-")
    return json.loads(limit.removeprefix(LEVEL)) if is_negative else limit
