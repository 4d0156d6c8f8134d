"""What the CUDA kernels of attention have in common."""

from __future__ import annotations

import torch

from te_fuser.kernels.attention.provider import Heads, Provider, Saved
from te_fuser.kernels.attention.views import Views
from te_fuser.ops.attention.dot_product_attention import hidden_positions

_ALIGNMENT = 16  # bytes: what the CUDA kernels load at a time
# Added to a masked score on CUDA: it leaves nothing of a probability, and float16 holds it.
_MASKED_SCORE = -65504.0


class CudaProvider(Provider):
    """What the CUDA kernels have in common: aligned loads, a dense bias, and rows that see nothing made zero here.

    Speeds are those measured on an H200 (torch 2.11, cuDNN 9.19): bfloat16, head_dim 64 and 128, S from 512 to 8192,
    8192 tokens of 4096 features, dropout 0 and 0.1; medians over 790e12 operations per second. The two terms fit each
    provider's times within some percent. Of other GPUs, and for other sizes of heads, the same shares are assumed.
    """

    on_cuda = True

    def _readable(self, x: torch.Tensor) -> torch.Tensor:
        size = x.element_size()
        if x.data_ptr() % _ALIGNMENT:
            return x.clone(memory_format=torch.contiguous_format)
        if x.is_contiguous() and x.shape[-1] * size % _ALIGNMENT == 0:
            return x
        if x.stride(-1) == 1 and not any(stride * size % _ALIGNMENT for stride in x.stride()[:-1]):
            return x
        return x.clone(memory_format=torch.contiguous_format)

    def _bias(self, views: Views, mask: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, bool]:
        hidden = _hidden(views, mask)
        # Rows that see nothing see everything: what comes of it is made zero, and kernels disagree on rows of nothing
        # (cuDNN 9.19 gave NaN for 64 positions of 128 features).
        hidden = hidden & ~hidden.all(-1, keepdim=True)
        # Rows of the bias start at multiples of 16 elements, as the kernels' loads need it.
        padded = -(-views.positions // 16) * 16
        bias = qkv.new_zeros((*hidden.shape[:-1], padded))[..., : views.positions]
        return bias.masked_fill_(hidden, _MASKED_SCORE), False

    def _bias_for(self, hidden: torch.Tensor, heads: Heads) -> torch.Tensor:
        keys = heads[1].shape[2]
        hidden = (hidden & ~hidden.all(-1, keepdim=True)).expand(*hidden.shape[:-1], keys)
        return self._dense(hidden, heads[0])

    def _dense(self, hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A bias; its rows start at multiples of 16 elements, as the kernels' loads need it."""
        keys = hidden.shape[-1]
        bias = like.new_zeros((*hidden.shape[:-1], -(-keys // 16) * 16))[..., :keys]
        return bias.masked_fill_(hidden, _MASKED_SCORE)

    def _blind_in(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return hidden.all(-1, keepdim=True)

    def _saved(self, logsumexp: torch.Tensor, seed: torch.Tensor | None, offset: torch.Tensor | None) -> Saved:
        """What an operator returned for backward; an empty tensor for nothing, so that there is one to keep."""
        returned = (logsumexp, seed, offset)
        kept = (logsumexp.new_empty(0) if tensor is None else tensor for tensor in returned)
        return dict(zip(self.emits, kept, strict=True))

    def _blind(self, views: Views, mask: torch.Tensor) -> torch.Tensor | None:
        heads = views.settings.heads
        blind = _hidden(views, mask).all(-1).expand(views.samples, heads.heads, views.positions)
        return blind.permute((2, 0, 1) if heads.layout == "sequence_first" else (0, 2, 1))[..., None]


def _hidden(views: Views, mask: torch.Tensor) -> torch.Tensor:
    """What is masked, later positions included: [B or 1, H or 1, S or 1, S or 1]."""
    hidden = hidden_positions(views.settings.causal, mask, views.positions, mask.device)
    assert hidden is not None
    return hidden
