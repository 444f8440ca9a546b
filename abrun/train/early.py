"""What shortens a rank's way to its first step: nothing here changes what is computed.

Figures: seconds of CPU time, of 4.9 for all imports; see docs/measured.md.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import threading
from pathlib import Path
from typing import Any

DRIVER = "libcuda.so.1"


def begin() -> threading.Thread:
    """To be called before anything large is imported; `finish` takes what this returns, after it."""
    # What modules are made of stays: looking for garbage in it, again and again, took 1.3 s.
    gc.disable()
    # Comes up while Python imports, and needs none of it: a call through ctypes holds no lock.
    driver = threading.Thread(target=_open_gpu, daemon=True)
    driver.start()
    return driver


def import_transformers() -> None:
    """Import transformers, and `transformers.models` without reading its 1,700 files of families again.

    Each of the two lists what they define: here the first's list serves both, which saves 0.2 s.
    """
    import transformers
    from transformers.utils import import_utils

    folder, define = Path(transformers.__file__).parent / "models", import_utils.define_import_structure

    def defined(path: Any, prefix: str | None = None) -> dict[frozenset[str], dict[str, set[str]]]:
        if prefix is not None or Path(path).parent != folder:
            return define(path, prefix)
        return {
            needed: {
                name.removeprefix("models."): exported
                for name, exported in modules.items()
                if name.startswith("models.")
            }
            for needed, modules in define(folder, prefix="models").items()  # kept since transformers asked
        }

    import_utils.define_import_structure = defined
    try:
        import transformers.models
    finally:
        import_utils.define_import_structure = define


def finish(driver: threading.Thread) -> None:
    """Look for garbage again, but never in what has been imported."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else classes outlive the interpreter, and nanobind says so in the log
    driver.join()


def _open_gpu() -> None:
    """Initialise CUDA's driver and this rank's context, which torch then finds there.

    What goes wrong torch will meet again, and say: here it is passed over, as is a machine without a GPU.
    """
    with contextlib.suppress(OSError, ValueError):
        rank, driver = int(os.environ.get("LOCAL_RANK", 0)), ctypes.CDLL(DRIVER)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), rank) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
