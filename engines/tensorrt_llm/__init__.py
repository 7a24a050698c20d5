"""TensorRT-LLM as rollout engine. Written against its sources and those of frameworks that drive it; never executed so far.

::

    versions.py    which versions, and what to do when they are not there; imports nothing of TensorRT-LLM
    arguments.py   the arguments of its AsyncLLM and of each completion, as plain dicts
    imports.py     the only place that knows its import paths
    engine.py      TensorrtLlmEngine: the RolloutEngine, in the engine's own process
    driver.py      AsyncLLM on its event loop; samples.py: what it generates and what waits
    refit.py       the driver's side of a refit: one version on all ranks, or the version before on all
    worker.py      what runs inside its workers: receives a version, loads it, reads it back; extension.py gives it to them
    layout.py      where a checkpoint's tensor lies in its modules

Faults of TensorRT-LLM and of its users that are known, and what guards against each here:

=================================================  =====================================================================
fault (issue of NVIDIA/TensorRT-LLM, if no other)  guard
=================================================  =====================================================================
the loader takes wrong tensors silently            ``refit/validate.py`` before sending; every tensor is read back from
                                                   the modules after loading, before any relayout (``worker.py``)
#14330 FP8 refit doubles weight memory             every refit reports the growth of allocated memory; layers are loaded one
                                                   at a time; above a tenth of it the run is told
#16642 mixed weights after a failed update         whole versions are staged on the host and checked before a module is
                                                   touched; a failure loads the version before again, on all ranks, and if
                                                   that fails too nothing is generated until a whole refit succeeds
#10456 FP8 pre-reload against CUDA graphs          fixed by #11267, before 1.3.0rc26; and where parameters move at a refit
                                                   while graphs are in use, the refit fails
#13784 pausing does not drain                      after a pause the workers are waited for (``wait_for_engine_idle``)
NeMo-RL #4122 refit hooks missing in a commit      hooks are looked for at start: begin, finalise and abort, or the older
                                                   ``update_weights(None)``; with neither the start fails
verl #5042 out of memory in a refit                one layer at a time; nothing of a version is kept on the GPU beside it
#19501 kernels are not batch-invariant             logprobs are measured against the trainer's, never assumed equal
#10050 the package on PyPI hangs without           ``versions.py`` names the install line, with NVIDIA's index
NVIDIA's index
stale keys and values after a refit                the prefix cache is reset with every version, and ``cache_salt`` names
                                                   the version, so that no prompt meets blocks of another
workers join any Ray cluster that is found         ``TLLM_RAY_FORCE_LOCAL_CLUSTER``: one for each engine, with its own GPUs
(``executor/ray/executor.py``)
``max_tokens`` defaults to 32, ``max_input_len``   both are always set
to 1,024
logprobs without the temperature                   ``logprobs_mode="processed"``; a version without it gives none
=================================================  =====================================================================
"""
