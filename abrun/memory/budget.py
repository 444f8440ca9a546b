"""How much memory a measurement may take of its device: all of it, or less, as of a smaller one."""

import torch

from abrun.train.phases import LiveTensors


class Budget:
    """Of one rank. `asked` bytes; None: all that a GPU has, and no limit on CPU cores."""

    def __init__(self, device: torch.device, asked: int | None) -> None:
        self.total_bytes = asked
        if device.type == "cuda":
            whole = torch.cuda.get_device_properties(device).total_memory
            self.total_bytes = min(asked or whole, whole)
            if self.total_bytes < whole:
                torch.cuda.set_per_process_memory_fraction(self.total_bytes / whole, device)

    def hold(self, tracker: LiveTensors | None) -> None:
        """Have the tracker of a CPU, which has no allocator to refuse anything, raise OutOfMemoryError."""
        if tracker is None or self.total_bytes is None:
            return
        total_bytes = self.total_bytes

        def change(storage: int, num_bytes: int) -> None:
            if num_bytes > 0 and tracker.live_bytes > total_bytes:
                raise torch.OutOfMemoryError(f"{num_bytes} bytes more exceed the budget of {total_bytes}")

        tracker.on_change = change
