"""A FAKE of TensorRT-LLM: as much of its interface as trtl_rl uses, over the embedded engine, on a CPU.

What is like the original: names, argument checks, life cycles of a refit, fused modules split over ranks, and a loader that
takes wrong tensors without a word. What is not: the arithmetic, which is that of the embedded engine, on the weights that lie in
the fake's own fused modules. So where everything is right its logprobs are the trainer's, bit for bit, and where the loader
was fed with something wrong they are not.

The environment variable FAKE_TENSORRT_LLM chooses variants, by commas: ``old`` (no hooks on the loader, control actions that
always drain), ``compiled`` (the compiled operators of the cache), ``forget:N`` (the N-th sweep leaves out a tensor), ``raise:N``
(the N-th sweep fails in the middle), ``stuck:N`` (every sweep from the N-th on does), ``moves`` (refits put parameters
elsewhere), ``no_gpu`` (the import fails as without a driver).
"""

import os

if "no_gpu" in os.environ.get("FAKE_TENSORRT_LLM", ""):
    raise RuntimeError("FAKE: Failed to initialize NVML: libcuda.so.1: cannot open shared object file")

from tensorrt_llm.fake_llm import AsyncLLM
from tensorrt_llm.sampling_params import SamplingParams

__version__ = "1.3.0rc26+fake"
__all__ = ["AsyncLLM", "SamplingParams"]
