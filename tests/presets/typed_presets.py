"""Presets as type checkers see them: comments stand where mypy is to find a fault, or ./dev lint fails."""

import torch

import te_fuser
import te_fuser.pytorch as te

te.Linear(8, 8, True, memory=2**20, device="cpu", tp_size=2, params_dtype=torch.bfloat16, init_method=None)
te.TransformerLayer(8, 8, 1, 1, 1e-5, 0.0, self_attn_mask_type="causal", activation_params={"limit": 7}, bias=False)
te.Linear(8, 8, params_dtyp=torch.float32)  # type: ignore[call-arg]
te.LayerNorm(8, device=1.0)  # type: ignore[arg-type]
te_fuser.RMSNorm(8, zero_centred_gamma=True)  # type: ignore[call-arg]
te_fuser.LayerNormLinear(8, 8, normalization=3)  # type: ignore[arg-type]
te_fuser.LayerNormMLP(8, 8, activatoin="gelu")  # type: ignore[call-arg]
te_fuser.MultiheadAttention(8, 1, input_layernorm="yes")  # type: ignore[arg-type]
te_fuser.DotProductAttention(8, 1, soft_cap=1.0)  # type: ignore[call-arg]
te_fuser.TransformerLayer(8, 8, 1, memory=0.5)  # type: ignore[arg-type]
