"""The compiler of an interpreter: none."""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict[str, Any]) -> object:
        return options

    def add_stages(self, stages: dict[str, Any], options: object) -> None: ...

    def load_dialects(self, context: Any) -> None: ...

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
