"""Attention by kernels of libraries, called below autograd: each provider is a way to run it forward and backward.

Most are PyTorch's own; cuDNN's front end and FlashAttention-4 take part where they are installed.

The kernels take heads [batch, heads, positions, head_dim] by strides, so packed queries, keys and values are read where
they lie. A provider says what it can do (`conditions`) and which operators it calls (`schemas`, as it was written for
them); `providers(problem)` says which of them can compute a problem and, of the others, why not.

What decides is in `attention_problem.py` and `attention_conditions.py`, how a kernel is called in
`attention_provider.py` and `attention_views.py`; each provider has a file of its own.
"""

from __future__ import annotations

from te_fuser.kernels.attention_cpu_flash import CpuFlash
from te_fuser.kernels.attention_cudnn import CudaCudnn
from te_fuser.kernels.attention_cudnn_frontend import CudaCudnnFrontend
from te_fuser.kernels.attention_efficient import CudaEfficient
from te_fuser.kernels.attention_flash import CudaFlash
from te_fuser.kernels.attention_flash_attn_4 import CudaFlashAttn4
from te_fuser.kernels.attention_problem import AttentionProblem
from te_fuser.kernels.attention_provider import Provider, Speed

__all__ = ["PROVIDERS", "AttentionProblem", "Provider", "Speed", "choose", "providers"]

# In the order of preference where nothing was measured.
PROVIDERS: tuple[Provider, ...] = (
    CudaCudnn(),
    CudaCudnnFrontend(),
    CudaFlash(),
    CudaFlashAttn4(),
    CudaEfficient(),
    CpuFlash(),
)


def providers(problem: AttentionProblem) -> list[tuple[Provider, str | None]]:
    """Every provider, best first, each with the reason why it cannot compute the problem (None: it can)."""
    return [(provider, provider.reason_not(problem)) for provider in PROVIDERS]


def choose(problem: AttentionProblem) -> Provider | None:
    """The first provider that can compute the problem; None leaves it to the op's own explicit math."""
    return next((provider for provider, reason in providers(problem) if reason is None), None)
