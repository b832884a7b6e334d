"""Fast paths of target passes: packed kernels on CPUs, recorded passes on CUDA devices; and what drafters share of them
(``linear``, ``norm``, ``recording``, ``uploads`` import torch only)."""
