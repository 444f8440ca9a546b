"""What shortens a rank's way to its first step, and the others: nothing here changes what is computed.

Figures: seconds of CPU time, of 4.9 for all imports; see docs/measured.md.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import threading

DRIVER = "libcuda.so.1"


def begin() -> threading.Thread:
    """To be called before anything large is imported; `finish` takes what this returns, after it."""
    # What modules are made of stays: looking for garbage in it, again and again, took 1.3 s.
    gc.disable()
    # Comes up while Python imports, and needs none of it: a call through ctypes holds no lock.
    driver = threading.Thread(target=_open_gpu, daemon=True)
    driver.start()
    return driver


def finish(driver: threading.Thread) -> None:
    """Look for garbage again, but never in what has been imported."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else classes outlive the interpreter, and nanobind says so in the log
    driver.join()


def freeze_survivors() -> None:
    """Look for garbage never again in what there is: after a first step compiled code, graphs and engines,
    through which every search for a step's own garbage would go (vLLM's sleep begins one)."""
    gc.collect()
    gc.freeze()


def _open_gpu() -> None:
    """Initialise CUDA's driver and this rank's context, which torch then finds there.

    What goes wrong torch will meet again, and say: here it is passed over, as is a machine without a GPU.
    """
    with contextlib.suppress(OSError, ValueError):
        rank, driver = int(os.environ.get("LOCAL_RANK", 0)), ctypes.CDLL(DRIVER)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), rank) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
