"""Writer of audit dumps. It needs safetensors and torch alone: copy this file into any trainer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
KEY = "abrun_audit"  # of the safetensors metadata, with the header as JSON


def write_dump(
    path: str | Path,
    tensors: Mapping[str, Any],  # torch tensors by their names in docs/how-to/audit-a-step.md; None: left out
    *,
    algorithm: str,  # grpo, dr_grpo, dapo, gspo, ppo, rloo, reinforce, cispo, sft or dpo
    settings: Mapping[str, Any],  # what the run is configured to compute, where it is not the algorithm's
    metrics: Mapping[str, float] | None = None,  # of this micro-batch
) -> None:
    """Save one micro-batch as its loss sees it: call this beside the loss, with its own tensors, uncast."""
    from safetensors.torch import save_file

    header = {"format": FORMAT, "algorithm": algorithm, "settings": settings, "metrics": metrics or {}}
    saved = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in tensors.items()
        if tensor is not None
    }
    save_file(saved, path, metadata={KEY: json.dumps(dict(header), default=float)})
