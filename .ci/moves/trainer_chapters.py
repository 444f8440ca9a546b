"""Merge modules of abrun/trainer that are chapters of one story. Run once, from the root.

MERGES: a module -> the modules whose contents it gets, in this order. Their docstrings become comments,
except its own, and every dotted name and path of them in the repository follows, as do imports of names in
HOMES. `ruff check --fix` and `ruff format` then join the imports. Run again, it only follows: for branches.
"""

import ast
import re
import subprocess
import textwrap
from pathlib import Path

MERGES = {
    "kernels.head": ["kernels.head", "kernels.softmax", "kernels.torch_tiles"],
    "kernels.linear": ["kernels.grid", "kernels.linear"],
    "backends.megatron.network": ["backends.megatron.groups", "backends.megatron.network"],
    "loop.checkpoint": ["loop.checkpoint", "loop.branch"],
    "loop.grpo": ["loop.rollouts", "loop.grpo"],
    "models.weights": ["models.parts", "models.weights"],
    "rollout.vllm.engines": ["rollout.vllm.colocated", "rollout.vllm.hosted", "rollout.vllm.separate"],
    "tasks.problems": ["tasks.values", "tasks.problems"],
}
ROOM = "abrun.trainer."
HOMES = {  # an old module -> the modules that define its names now
    "backends": {"backends.head": "Decoder"},
    "models": {
        "models.checks": "InPlaceCache attention_in_place check_decoding check_network holds_all_tokens",
        "models.families": "Facts attends_to_all cache_name experts_of facts_of max_positions_of"
        " persistent_buffers routers_of takes_weight_decay",
        "models.weights": "read_slice small_twin config_of content_of load_network open_network published"
        " save_network sketch_of weights_hash",
        "models.sources": "EOS PAD UNKNOWN CharacterTokenizer character_tokenizer",
        "models.text": "Text load_text",
    },
    "rl.dpo": {
        "rl.losses": "PreferenceLoss dpo_loss spread_over_tokens",
        "rl.metrics": "preference_metrics",
    },
}
TARGETS = {source: target for target, sources in MERGES.items() for source in sources if source != target}
LONGEST_FIRST = sorted(TARGETS, key=len, reverse=True)
DOTTED = re.compile(rf"(?<=abrun\.trainer\.)({'|'.join(map(re.escape, LONGEST_FIRST))})(?!\w)")
SLASHED = re.compile(rf"(?<=abrun/trainer/)({'|'.join(LONGEST_FIRST).replace('.', '/')})(?=\.py)")
NAMES = re.compile(r"^( *)from abrun\.trainer\.([\w.]+) import (\([^)]*\)|[^\n]*)$", re.MULTILINE)
MEMBER = re.compile(r"^( *from abrun\.trainer\.([\w.]+) import )(\w+)$", re.MULTILINE)


def path_of(module: str) -> Path:
    return Path((ROOM + module).replace(".", "/") + ".py")


def split_module(module: str) -> tuple[str, str, str]:
    """Return a module's docstring, its imports and the rest, as source."""
    source = path_of(module).read_text(encoding="utf-8")
    body = ast.parse(source).body
    last_import = max(i for i, node in enumerate(body) if isinstance(node, ast.Import | ast.ImportFrom))
    lines = source.splitlines(keepends=True)
    stop = body[last_import].end_lineno or 0
    docstring = "".join(lines[: body[0].end_lineno])
    return docstring, "".join(lines[body[0].end_lineno : stop]), "".join(lines[stop:])


def merge(target: str, sources: list[str]) -> None:
    """Write the merged module; imports of one source from another vanish."""
    parts = {source: split_module(source) for source in sources}
    docstring = parts.get(target, parts[sources[0]])[0]
    names = "|".join(re.escape(source) for source in sources)
    short_names = "|".join(source.rpartition(".")[2] for source in sources)
    between = re.compile(
        rf"^from (?:abrun\.trainer\.(?:{names})|\.(?:{short_names})) import (?:\([^)]*\)|.*)\n", re.MULTILINE
    )
    imports = "".join(between.sub("", part[1]) for part in parts.values())
    bodies = ""
    for own_docstring, _, body in parts.values():
        is_own = own_docstring == docstring
        paragraphs = own_docstring.strip().strip('"').strip().split("\n\n")
        comments = [
            textwrap.fill(text, 100, initial_indent="# ", subsequent_indent="# ") for text in paragraphs
        ]
        heading = "" if is_own else "\n\n" + "\n#\n".join(comments) + "\n"
        bodies += heading + "\n" + body.strip("\n") + "\n"
    for source in sources:
        if source != target:
            subprocess.run(["git", "rm", "--quiet", str(path_of(source))], check=True)
    path_of(target).write_text(f"{docstring}{imports}{bodies}", encoding="utf-8")
    subprocess.run(["git", "add", str(path_of(target))], check=True)


def follow(text: str) -> str:
    """Return a text in which the names of merged modules are those of their targets."""

    def rename_member(match: re.Match[str]) -> str:
        target = TARGETS.get(f"{match[2]}.{match[3]}")
        if target is None:
            return match[0]
        package, _, name = target.rpartition(".")
        start = match[1].replace(f"{ROOM}{match[2]} ", f"{ROOM}{package} ")
        return f"{start}{name}" if name == match[3] else f"{start}{name} as {match[3]}"

    def find_homes(match: re.Match[str]) -> str:
        homes = {name: home for home, names in HOMES.get(match[2], {}).items() for name in names.split()}
        names = [name.strip() for name in re.split(r"[,\n]", match[3].strip("()")) if name.strip()]
        if homes.keys().isdisjoint(names):
            return match[0]
        by_home: dict[str, list[str]] = {}
        for name in names:
            by_home.setdefault(homes.get(name, match[2]), []).append(name)
        return "\n".join(
            f"{match[1]}from {ROOM}{home} import {', '.join(found)}" for home, found in by_home.items()
        )

    text = NAMES.sub(find_homes, MEMBER.sub(rename_member, text))
    text = DOTTED.sub(lambda match: TARGETS[match[1]], text)
    return SLASHED.sub(lambda match: TARGETS[match[1].replace("/", ".")].replace(".", "/"), text)


def main() -> None:
    for target, sources in MERGES.items():
        if all(path_of(source).exists() for source in sources):
            merge(target, sources)
    texts = ["abrun/*.py", "tests/*.py", "docs/*.md", "*.md", "*.toml"]
    listed = subprocess.run(["git", "ls-files", *texts], capture_output=True, text=True, check=True).stdout
    for path in map(Path, listed.splitlines()):
        text = path.read_text(encoding="utf-8")
        if path.is_relative_to("abrun/trainer/kernels"):
            for source, target in TARGETS.items():
                text = text.replace(f"from .{source[8:]} import", f"from .{target[8:]} import")
        if follow(text) != path.read_text(encoding="utf-8") and path.name != "changelog.md":
            path.write_text(follow(text), encoding="utf-8")


if __name__ == "__main__":
    main()
