"""FlashAttention-4 for a machine without a GPU: it takes tensors as the real one, and computes by PyTorch.

A test puts it in place with `in_place`.
"""

from __future__ import annotations

import functools
import types

import torch
from torch.utils._python_dispatch import _disable_current_modes

from te_fuser.kernels.packages import flash_attn_4
from tests.kernels.attention import varlen
from tests.kernels.packages import fake_packages

VERSION = "4.0.0b36"


def check_layout(tensor, shape):
    """Needs of its kernels: that shape, features side by side, strides and address in steps of 16 bytes."""
    step = 16 // tensor.element_size()
    assert tensor.shape == shape and tensor.stride(-1) == 1 and 0 not in tensor.stride()
    assert all(stride % step == 0 for stride in tensor.stride()[:-1]) and tensor.data_ptr() % 16 == 0


def any_of(tensors):
    """True if one is given; they are whole numbers of 32 bits, side by side."""
    given = [t for t in tensors if t is not None]
    assert all(t.dtype == torch.int32 and t.is_contiguous() and t.dim() == 1 for t in given)
    return bool(given)


def spans_of(q, ragged):
    """Its sequences, by offsets or by lengths of samples."""
    offsets, key_offsets, lengths, key_lengths = ragged
    assert (offsets is None) == (key_offsets is None) == (q.dim() == 4)
    return varlen.Spans(offsets is not None, offsets, key_offsets, lengths, key_lengths)


def compiled(launch):
    """A function as the package compiles them: what it computes PyTorch does not see."""

    def run(*arguments):
        with _disable_current_modes():
            launch(*arguments)

    return run


def forward_of(package):
    """Its forward: causal calls by one kernel, all others by that of windows, caps, sinks and lengths."""

    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, softmax_scale=None,
        causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None,
        return_lse=False, out=None, lse=None,
    ):  # fmt: skip
        assert return_lse and not q.requires_grad and lse.is_contiguous()
        package.entered += 1
        ragged = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        window = (window_size_left, 0 if causal else window_size_right)
        if not causal or softcap or window_size_left is not None or learnable_sink is not None or any_of(ragged):
            cache, key = _flash_attn_fwd.compile_cache, (q.dtype, q.dim(), window, softcap, "varlen")
            cache[key] = compiled(functools.partial(package._forward_varlen, window, softcap or 0.0))
            cache[key](q.detach(), k.detach(), v.detach(), out, lse, softmax_scale, *ragged, learnable_sink)
            return out, lse, None, None, None
        cache, key = _flash_attn_fwd.compile_cache, (q.dtype, causal)
        if key not in cache:
            cache[key] = compiled(functools.partial(package._forward, causal))
        cache[key](q.detach(), k.detach(), v.detach(), out.detach(), lse, softmax_scale, None, (None, None))
        return out, lse, None, None, None

    return _flash_attn_fwd


def backward_of(package):
    """Its backward, likewise."""

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        deterministic=False, dq=None, dk=None, dv=None, learnable_sink=None,
    ):  # fmt: skip
        assert lse.is_contiguous() and not deterministic
        assert lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
        package.entered += 1
        ragged = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        window = (window_size_left, 0 if causal else window_size_right)
        if not causal or softcap or window_size_left is not None or learnable_sink is not None or any_of(ragged):
            dsink = None if learnable_sink is None else torch.empty_like(learnable_sink)
            cache, key = _flash_attn_bwd.compile_cache, (q.dtype, q.dim(), window, softcap, "varlen")
            cache[key] = compiled(functools.partial(package._backward_varlen, window, softcap))
            read = (q.detach(), k, v, out, dout, lse)
            cache[key](*read, dq, dk, dv, softmax_scale, *ragged, learnable_sink, dsink)
            return (dq, dk, dv) if dsink is None else (dq, dk, dv, dsink)
        dout = dout.clone() if package.copies else dout
        sums = torch.empty(lse.shape, dtype=lse.dtype, device=q.device).detach()
        added = torch.zeros(k.shape, dtype=torch.float64, device=q.device)
        package._bwd_preprocess(out, dout, sums)
        cache, key = _flash_attn_bwd.compile_cache, (q.dtype, causal)
        if key not in cache:
            cache[key] = compiled(functools.partial(package._backward, causal))
        cache[key](q.detach(), k, v, out, dout, lse, sums, added, dq, dk, dv, softmax_scale)
        package._bwd_postprocess_convert(added, dv)
        return dq, dk, dv

    return _flash_attn_bwd


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

        for function in (forward_of(self), backward_of(self), _bwd_preprocess, _bwd_postprocess_convert):
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

    def _forward_varlen(self, window, soft_cap, q, k, v, out, lse, scale, *others):
        self._begin("forward", q=q, k=k, v=v, out=out)
        *ragged, sink = others
        spans = spans_of(q, ragged)
        kernel = varlen.Kernel(scale, window, soft_cap, blind=-torch.inf)
        found = varlen.forward(kernel, spans, q, k, v, sink)
        for rows, _, places in spans.of(q, k):  # what is in no sequence it leaves alone
            out[rows], lse[places] = found[0][rows], found[1][places]

    def _backward_varlen(self, window, soft_cap, q, k, v, out, dout, lse, dq, dk, dv, scale, *others):
        self._begin("backward", q=q, k=k, v=v, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
        *ragged, sink, dsink = others
        spans = spans_of(q, ragged)
        kernel = varlen.Kernel(scale, window, soft_cap, blind=-torch.inf)
        made = varlen.backward(kernel, spans, q, k, v, out, dout, lse, sink)
        for rows, keys, _ in spans.of(q, k):
            dq[rows], dk[keys], dv[keys] = made[0][rows], made[1][keys], made[2][keys]
        if dsink is not None:
            dsink.copy_(made[3])

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
