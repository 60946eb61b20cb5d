"""Triton kernels for NVIDIA GPUs, and the Python that launches them."""
