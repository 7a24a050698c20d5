"""Kernels for NVIDIA GPUs in Triton: quantisers and the row-invariant block GEMM of the exact mode.

The tests run them on a CPU with Triton's interpreter and compile them for compute capability 9.0; tile sizes and numbers
of warps and stages come from reasoning about a Hopper chip and were never tuned, or run, on one.
"""
