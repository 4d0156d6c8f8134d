"""LayerNorm: a norm with Transformer Engine's arguments."""

from __future__ import annotations

from te_fuser.presets.norm import NormPreset


class LayerNorm(NormPreset):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, of each row.

    Args:
        normalized_shape, hidden_size: the size of the last dimension, or the sizes of the last ones, which are a row
            together; one of the two names.
        eps: added to the variance.
        zero_centered_gamma: the factor is 1 + weight, which starts at 0.
        **keywords: params_dtype, device, sequence_parallel, tp_group, tp_size, see
            `te_fuser.presets.arguments.Common`, and options of lists.
    """

    normalization = "LayerNorm"
