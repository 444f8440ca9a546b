"""Preset architectures with random weights by name; the table is `presets.toml`."""

import tomllib
from pathlib import Path
from typing import Any

ARCHITECTURES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
# Preset with experts -> experts per layer
EXPERTS_BY_PRESET = {
    name: shape["num_experts"] for name, shape in ARCHITECTURES.items() if "num_experts" in shape
}
