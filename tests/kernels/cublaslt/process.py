"""Processes whose products met no problem yet."""

from __future__ import annotations

from te_fuser.kernels.cublaslt import products


def a_new_process() -> None:
    """Forget all products, and with them the problems of a library before."""
    for configured in (products.configured, products.product_of):
        configured.cache_clear()
    products.in_use.clear()
