"""Without a GPU the Triton kernels run in Triton's interpreter: said before anything imports triton, and
inherited by every process that a test starts."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

TRITON_ON_CPU = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(
    not TRITON_ON_CPU, reason="Triton runs on this machine's GPU; on its CPU with TRITON_INTERPRET=1"
)
