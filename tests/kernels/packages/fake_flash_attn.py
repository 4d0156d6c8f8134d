"""FlashAttention-4 for a machine without a GPU: it takes tensors as the real one, and computes by PyTorch.

A test puts it in place with `in_place`.
"""

from __future__ import annotations

import functools
import types

import torch
from torch.utils._python_dispatch import _disable_current_modes

from te_fuser.kernels.packages import flash_attn_4
from tests.kernels.packages import fake_packages

VERSION = "4.0.0b36"


def check_layout(tensor, shape):
    """What its kernels need: that shape, features side by side, strides and address in steps of 16 bytes."""
    step = 16 // tensor.element_size()
    assert tensor.shape == shape and tensor.stride(-1) == 1 and 0 not in tensor.stride()
    assert all(stride % step == 0 for stride in tensor.stride()[:-1]) and tensor.data_ptr() % 16 == 0


def compiled(launch):
    """A function as the package compiles them: what it computes PyTorch does not see."""

    def run(*arguments):
        with _disable_current_modes():
            launch(*arguments)

    return run


class Package(types.ModuleType):
    """The module `flash_attn.cute.interface`.

    Attributes:
        calls: direction and tensors of each launch, by their names.
        entered: how often one of its own functions was called.
        fails: what to raise in a launch.
        copies: whether its backward makes a copy of what it is given, by PyTorch.
    """

    def __init__(self):
        super().__init__(flash_attn_4._MODULE)
        self.calls, self.entered, self.fails, self.copies = [], 0, None, False

        def _flash_attn_fwd(
            q, k, v, qv=None, softmax_scale=None, causal=False, softcap=None, return_lse=False, out=None, lse=None
        ):
            assert return_lse and not q.requires_grad and lse.is_contiguous()
            self.entered += 1
            cache, key = _flash_attn_fwd.compile_cache, (q.dtype, causal)
            if key not in cache:
                cache[key] = compiled(functools.partial(self._forward, causal))
            cache[key](q.detach(), k.detach(), v.detach(), out.detach(), lse, softmax_scale, None, (None, None))
            return out, lse, None, None, None

        def _flash_attn_bwd(
            q,
            k,
            v,
            out,
            dout,
            lse,
            softmax_scale=None,
            causal=False,
            deterministic=False,
            dq=None,
            dk=None,
            dv=None,
        ):
            assert lse.is_contiguous() and lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and not deterministic
            self.entered += 1
            dout = dout.clone() if self.copies else dout
            sums = torch.empty(lse.shape, dtype=lse.dtype, device=q.device).detach()
            added = torch.zeros(k.shape, dtype=torch.float64, device=q.device)
            _bwd_preprocess(out, dout, sums)
            cache, key = _flash_attn_bwd.compile_cache, (q.dtype, causal)
            if key not in cache:
                cache[key] = compiled(functools.partial(self._backward, causal))
            cache[key](q.detach(), k, v, out, dout, lse, sums, added, dq, dk, dv, softmax_scale)
            _bwd_postprocess_convert(added, dv)
            return dq, dk, dv

        def _bwd_preprocess(out, dout, sums):
            cache = _bwd_preprocess.compile_cache
            if out.dtype not in cache:
                cache[out.dtype] = compiled(lambda out, dout, sums: sums.copy_((out * dout).sum(-1).mT))
            cache[out.dtype](out, dout, sums)

        def _bwd_postprocess_convert(added, dv):
            cache = _bwd_postprocess_convert.compile_cache
            if dv.dtype not in cache:
                cache[dv.dtype] = compiled(lambda added, dv: dv.copy_(added))
            cache[dv.dtype](added, dv)

        for function in (_flash_attn_fwd, _flash_attn_bwd, _bwd_preprocess, _bwd_postprocess_convert):
            function.compile_cache = {}
            setattr(self, function.__name__, function)

    def _forward(self, causal, q, k, v, out, lse, scale, nothing, auxiliary):
        assert nothing is None and auxiliary == (None, None)
        self._begin("forward", q=q, k=k, v=v, out=out)
        made, logsumexp = fake_packages.attention_forward(*(part.transpose(1, 2) for part in (q, k, v)), scale, causal)
        out.copy_(made.transpose(1, 2))
        lse.copy_(logsumexp)

    def _backward(self, causal, q, k, v, out, dout, lse, sums, added, dq, dk, dv, scale):
        self._begin("backward", q=q, k=k, v=v, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
        torch.testing.assert_close(sums, (out * dout).sum(-1).mT)
        names = {"q": q, "k": k, "v": v, "o": out, "dO": dout}
        read = {name: heads.transpose(1, 2) for name, heads in names.items()} | {"stats": lse}
        gradients = fake_packages.attention_backward(read, scale, causal)
        for made, gradient in zip((dq, dk), gradients[:2], strict=True):
            made.copy_(gradient.transpose(1, 2))
        added.add_(gradients[2].transpose(1, 2))  # on zeros

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
