"""Products of NVIDIA's cuBLASLt: the kinds that there are, their algorithms as they were measured, and measuring."""
