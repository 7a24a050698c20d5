"""Settings of every test, made before torch is imported; processes that tests start inherit them."""

from __future__ import annotations

import os
import sys

assert "torch" not in sys.modules, "torch reads the number of threads when it is imported, which is too late to set it"

# One thread: tests start engine processes, which would otherwise fight with the learner over the cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# GPU kernels run on the CPU in Triton's interpreter, which must be chosen before triton is imported (torch imports it, too).
os.environ["TRITON_INTERPRET"] = "1"
# Tests need no network, and a test that reaches for the hub fails at once, not after retries.
os.environ["HF_HUB_OFFLINE"] = "1"

from hypothesis import settings  # noqa: E402

# How long an example takes says nothing: the machine may be busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
