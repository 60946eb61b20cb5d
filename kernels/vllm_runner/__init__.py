"""vLLM's worker and model runner as a backend: its models and kernels under our scheduler, blocks and sampler."""
