"""FlashAttention-4 for a machine without a GPU: it takes tensors as the real one, and computes by PyTorch.

A test puts it in place with `in_place`.
"""

from __future__ import annotations

import types

import torch

from te_fuser.kernels.packages import flash_attn_4
from tests.kernels.packages import fake_packages

VERSION = "4.0.0b36"


def check_layout(tensor, shape):
    """What its kernels need: that shape, features side by side, strides and address in steps of 16 bytes."""
    step = 16 // tensor.element_size()
    assert tensor.shape == shape and tensor.stride(-1) == 1 and 0 not in tensor.stride()
    assert all(stride % step == 0 for stride in tensor.stride()[:-1]) and tensor.data_ptr() % 16 == 0


class Package(types.ModuleType):
    """The module `flash_attn.cute.interface`.

    Attributes:
        calls: direction and tensors of each call, by their names.
        fails: what to raise in a call.
    """

    def __init__(self):
        super().__init__(flash_attn_4._MODULE)
        self.calls, self.fails = [], None

    def _flash_attn_fwd(
        self, q, k, v, qv=None, softmax_scale=None, causal=False, softcap=None, return_lse=False, out=None, lse=None
    ):
        self._begin("forward", q=q, k=k, v=v, out=out)
        assert return_lse and not q.requires_grad
        heads = (part.transpose(1, 2) for part in (q, k, v))
        made, logsumexp = fake_packages.attention_forward(*heads, softmax_scale, causal)
        out.copy_(made.transpose(1, 2))
        exact = q.dtype == torch.float64  # of float64 in tests
        return out, logsumexp.to(torch.float64 if exact else torch.float32), None, None, None

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, deterministic=False, dq=None, dk=None, dv=None
    ):
        self._begin("backward", q=q, k=k, v=v, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
        assert lse.is_contiguous() and lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and not deterministic
        names = {"q": q, "k": k, "v": v, "o": out, "dO": dout}
        read = {name: heads.transpose(1, 2) for name, heads in names.items()} | {"stats": lse}
        gradients = fake_packages.attention_backward(read, softmax_scale, causal)
        for made, gradient in zip((dq, dk, dv), gradients, strict=True):
            made.copy_(gradient.transpose(1, 2))
        return dq, dk, dv

    def _begin(self, direction, **tensors):
        if self.fails is not None:
            raise self.fails
        for name, tensor in tensors.items():
            shape = tensors["k" if name in ("k", "v", "dk", "dv") else "q"].shape
            check_layout(tensor, shape)
        self.calls.append((direction, tensors))


def in_place(patch):
    """The package as installed, on a CPU in place of a GPU; `patch` is pytest's monkeypatch."""
    package = Package()
    forget()
    fake_packages.in_place(patch, flash_attn_4, {flash_attn_4._MODULE: package}, VERSION)
    return package


def forget():
    """Drop what was kept of another package."""
    flash_attn_4._module.cache_clear()
    flash_attn_4.unusable.cache_clear()
    flash_attn_4.runs.forget()
