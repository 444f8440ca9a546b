"""Prints docs/models.md: model families and what a run can do with each, tried out on tiny networks.

python docs/models.py > docs/models.md      # from the repository, with the test extra: about two minutes
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from abrun.recipe.families import BIASED_HEADS, ENCODER_DECODERS, MULTIMODAL, SAMPLING_ROUTERS, SHARED_LAYERS
from tests.models.abilities import COLUMNS, FAMILIES, Family, abilities
from tests.spawn import run_ranks

HEAD = """# Models

Printed by `python docs/models.py`, which tries each family out on two CPU ranks, as a tiny network with
random weights; a test repeats some of it, and the slow tests all of it.

A model is a folder or hub name with `config.json` and safetensors weights (`model.path`), of any family that
transformers' `AutoModelForCausalLM` loads. No list decides: at load, abrun compares its log-probs with the
network's own forward pass, and streams of sequences with padded rows, and refuses a model where they differ.
Families that are not in the table are checked in the same way.

- **padded**: trains on and scores rows of one sequence each.
- **packed**, **shared prompts**, **context parallel**: `policy.packing`, `policy.share_prompts` and
  `policy.backend.context_parallel`. They put sequences into one stream, which layers with sliding windows,
  chunks, linear attention, state spaces or convolutions do not keep apart: these are refused.
- **tensor parallel**: `policy.backend.tensor_parallel` on the dtensor backend.
- **Megatron**: `policy.backend.type: megatron`.
- **torch engine**: `rollout.engine: torch` decodes from a cache what one pass computes.

What `config.json` alone shows is refused by `abrun launch` and `--dry-run` before anything starts, for models
in local folders.

An export (`checkpoint.final_weights`) is of the checkpoint's own class, with its configuration. Tensors that
the network has no place for, such as the vision tower of Qwen 3.5 or layers that predict later tokens, are
copied from the checkpoint's files unchanged. A quantized checkpoint is trained and exported unquantized;
tensors that an export then lacks are named when it is loaded.
"""


def row(family: Family, found: dict[str, bool]) -> str:
    """Return a family's line of the table."""
    examples = f"{family.examples}, {family.note}" if family.note else family.examples
    marks = ["yes" if found[column] else "no" for column in COLUMNS]
    return f"| `{family.kind}` | {examples} | {' | '.join(marks)} |"


def rows(families: tuple[Family, ...]) -> list[str]:
    """Return the lines of families, tried out on two ranks."""
    found = run_ranks(abilities, 2, families, timeout_s=600)[0]
    return [row(family, each) for family, each in zip(families, found, strict=True)]


def page() -> str:
    """Return the whole of docs/models.md."""
    titles = ("model type", "such as", *COLUMNS)
    table = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *rows(FAMILIES)]
    return "\n".join([HEAD, "## Families", "", *table, "", *refused()])


def refused() -> list[str]:
    """Return the section on families that no run can train."""
    reasons = {
        "Multimodal models that transformers has no causal LM for": MULTIMODAL,
        "Encoder-decoder models": ENCODER_DECODERS,
        "An LM head with a bias": BIASED_HEADS,
        "A router that samples experts in training": SAMPLING_ROUTERS,
        "Layers that share weights": SHARED_LAYERS,
    }
    lines = [
        f"- {reason}: {', '.join(f'`{name}`' for name in sorted(names))}."
        for reason, names in reasons.items()
    ]
    return ["## Refused", "", *lines]


if __name__ == "__main__":
    print(page())
