"""C++ kernels for the CPU, and the Python that records and runs their programs."""
