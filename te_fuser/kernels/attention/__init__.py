"""Attention by kernels of libraries, called below autograd: each provider is a way to run it forward and backward.

Most are PyTorch's own; cuDNN's front end and FlashAttention-4 take part where they are installed.

The kernels take heads [batch, heads, positions, head_dim] by strides, so packed queries, keys and values are read where
they lie. A provider says what it can do (`conditions`) and which operators it calls (`schemas`, as it was written for
them); `reason_not(problem)` is why it cannot compute a problem.

What decides is in `problem.py`, how a kernel is called in `provider.py` and `qkv_views.py`; each library has a file.
"""

from __future__ import annotations

from te_fuser.kernels.attention.cudnn import CudaCudnn, CudaCudnnFrontend
from te_fuser.kernels.attention.flash_attn_4 import CudaFlashAttn4
from te_fuser.kernels.attention.problem import AttentionProblem
from te_fuser.kernels.attention.provider import Provider, Speed
from te_fuser.kernels.attention.pytorch import CpuFlash, CudaEfficient, CudaFlash

__all__ = ["PROVIDERS", "AttentionProblem", "Provider", "Speed"]

# In the order of preference where nothing was measured.
PROVIDERS: tuple[Provider, ...] = (
    CudaCudnn(),
    CudaCudnnFrontend(),
    CudaFlash(),
    CudaFlashAttn4(),
    CudaEfficient(),
    CpuFlash(),
)
