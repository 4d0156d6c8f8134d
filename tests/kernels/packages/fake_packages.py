"""Fakes of packages that run on a GPU: their place, attention's math on the CPU, and tensors that lie otherwise."""

from __future__ import annotations

import contextlib
import sys

import torch

from te_fuser.kernels.packages import optional as optional_packages


def in_place(patch, module, modules, version):
    """A package as installed for te_fuser's `module` about it, by its own modules' names, on a CPU in place of a GPU.

    `patch` is pytest's monkeypatch.
    """
    patch.setattr(module.PACKAGE, "version", lambda: version)
    for name, made in modules.items():
        patch.setitem(sys.modules, name, made)
    if hasattr(module, "give_context"):
        patch.setattr(module, "give_context", lambda device: None)
    on_the_cpu(patch)


def on_the_cpu(patch):
    """Calls for a GPU run on a CPU, and are not captured."""
    patch.setattr(optional_packages, "give_context", lambda device: None)
    patch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def scores_of(q, k, scale, causal):
    """Of heads [b, h, S, D] in float64, [b, h, S, S]."""
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def attention_forward(q, k, v, scale, causal):
    """The output and its logsumexp in float64, of heads [b, h, S, D] and [b, g, S, D]."""
    q, k, v = (heads.double() for heads in (q, k, v))
    k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], 1) for heads in (k, v))
    scores = scores_of(q, k, scale, causal)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attention_backward(read, scale, causal):
    """dq, dk, dv of heads [b, h, S, D] and [b, g, S, D], from what forward gave."""
    q, k, v, o, dout = (read[name].double() for name in ("q", "k", "v", "o", "dO"))
    repeats, (b, g, length, dim) = q.shape[1] // k.shape[1], k.shape
    k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
    p = (scores_of(q, k, scale, causal) - read["stats"].double().view(*q.shape[:3], 1)).exp()
    ds = p * (dout @ v.mT - (dout * o).sum(-1, keepdim=True)) * scale
    dk, dv = (t.view(b, g, repeats, length, dim).sum(2) for t in (ds.mT @ q, p.mT @ dout))
    return ds @ k, dk, dv


def odd(t):
    """In rows of an odd length."""
    return torch.cat((t, t[..., :1]), -1)[..., : t.shape[-1]]


def behind(t):
    """Behind another number, so that the address is none for loads of 16 bytes."""
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


def turned(t):
    """Features apart."""
    return t.mT.contiguous().mT if t.dim() > 1 else torch.stack((t, t), -1)[:, 0]
