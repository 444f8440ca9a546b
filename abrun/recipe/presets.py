"""Architectures with random weights, by the name of their preset; the table is `presets.toml`."""

import tomllib
from pathlib import Path
from typing import Any

ARCHITECTURES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
# The presets with experts: how many a layer has.
PRESET_EXPERTS = {
    name: shape["num_experts"] for name, shape in ARCHITECTURES.items() if "num_experts" in shape
}
