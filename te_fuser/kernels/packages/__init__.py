"""Packages that may be installed beside PyTorch, as their kernels are found, checked and called."""
