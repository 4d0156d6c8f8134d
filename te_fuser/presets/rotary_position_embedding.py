"""RotaryPositionEmbedding: the angles of positions; and heads turned by them."""

from __future__ import annotations

import functools

import torch

from te_fuser import ops
from te_fuser.ops.checks import count
from te_fuser.ops.sharing import blocks_of, spans
from te_fuser.presets.attention_call import LAYOUTS, sequence_dim_of
from te_fuser.presets.keyword_arguments import check_choice, check_size, default_device


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles [positions, 1, 1, dim] of rotary embedding: position * base^(-2 k / dim), for each pair of features k.

    Args:
        dim: features of a head.
        rotary_percent: the share of the features that are rotated, the first ones.
        seq_len_interpolation_factor: positions are divided by it, where pretrained_max_position_embeddings is given.
        pretrained_max_position_embeddings: the positions that a model was trained with: more positions than this times
            the factor are scaled down into these.
        rotary_base: the base.
        interleaved: pairs are neighbouring features, otherwise feature n of each half of the rotated ones.
        device: where the angles are; None: torch's default if one was set, else the GPU if there is one, else the CPU.

    Raises:
        TypeError, ValueError: when an odd number of features would turn, or `dim` is no size.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021); Chen et al., "Extending
    Context Window of Large Language Models via Positional Interpolation" (2023).
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 < rotary_percent <= 1.0:
            raise ValueError(f"rotary_percent is a share of the features, above 0 and up to 1, got {rotary_percent}")
        turning = int(check_size("dim", dim) * rotary_percent)
        if turning % 2 or turning < 2:
            raise ValueError(f"features turn in pairs: dim={dim} with rotary_percent={rotary_percent} gives {turning}")
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = rotary_base, interleaved
        exponents = torch.arange(0, turning, 2, dtype=torch.float64) / turning
        self.register_buffer("inv_freq", (rotary_base**-exponents).float().to(default_device(device)))

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """[max_seq_len, 1, 1, dim] in float32, for the positions from `offset` on.

        Raises:
            TypeError, ValueError: for what is no number of positions.
        """
        count(type(self).__name__, "max_seq_len", max_seq_len, least=0)
        at = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32) + offset
        angles = (at * self._squeezed(max_seq_len))[:, None] * self.inv_freq.float()
        whole = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return whole[:, None, None]

    def _squeezed(self, positions: int) -> float:
        trained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if trained is None or factor is None:
            return 1.0
        return trained / positions if positions > trained * factor else 1.0 / factor


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Heads turned by angles, in a new tensor: see `ops.RotaryByAngles`.

    Args:
        t: [S, B, H, D], [B, S, H, D] or [T, H, D], as tensor_format says.
        freqs: angles [S or more, 1, 1, D or fewer] of `RotaryPositionEmbedding`, for whole sequences.
        tensor_format: "sbhd", "bshd" or "thd".
        start_positions: [B], the position of each sample's first row; None: 0.
        interleaved: whether neighbours are pairs, else the halves of what turns.
        fused: changes nothing.
        cu_seqlens: of "thd", where sequences begin, [sequences + 1].
        cp_size, cp_rank: how many ranks cut the sequence, and which of them has t: its blocks cp_rank and 2 cp_size - 1
            - cp_rank of 2 cp_size equal ones.

    Raises:
        TypeError, ValueError: for tensors of other shapes or kinds, and for sequences that cannot be cut so.
    """
    tensor_format = check_choice("tensor_format", tensor_format, LAYOUTS)
    if check_size("cp_size", cp_size) > 1:
        freqs = _own_angles(freqs, t, tensor_format, start_positions, cp_size, cp_rank)
    packed = tensor_format == "thd"
    if t.dim() != 4 - packed:
        raise ValueError(f"t is {4 - packed}-dimensional for tensor_format={tensor_format!r}, got {list(t.shape)}")
    if packed and cu_seqlens is None:
        raise ValueError("tensor_format='thd' takes cu_seqlens=..., [sequences + 1] whole numbers")
    heads, size = t.shape[-2:]
    op = _op(size, heads, LAYOUTS[tensor_format], "interleaved" if interleaved else "half")
    given = {"freqs": freqs, "start_positions": start_positions, "cu_seqlens": cu_seqlens if packed else None}
    return op(t.flatten(-2), **given).view(t.shape)  # type: ignore[no-any-return]


def _own_angles(
    freqs: torch.Tensor, t: torch.Tensor, tensor_format: str, starts: torch.Tensor | None, ranks: int, rank: int
) -> torch.Tensor:
    """The angles of a rank's part of the sequences."""
    if tensor_format == "thd" or starts is not None:
        given = "tensor_format='thd'" if starts is None else "start_positions"
        raise ValueError(f"{given} with cp_size={ranks}: ranks cut sequences that begin together; leave one out")
    positions = t.shape[sequence_dim_of(tensor_format)]
    if not 0 <= rank < ranks or positions % 2 or len(freqs) < ranks * positions:
        raise ValueError(
            f"cp_size={ranks}, cp_rank={rank} with {positions} positions of t and {len(freqs)} of freqs: give a rank "
            "from 0 to cp_size - 1, an even number of positions, and angles of cp_size times as many"
        )
    return blocks_of(freqs, spans(positions, ranks, rank, True))


@functools.lru_cache(maxsize=64)  # an op keeps its plans
def _op(size: int, heads: int, layout: str, style: str) -> ops.RotaryByAngles:
    starts, offsets = "start_positions", "cu_seqlens" if layout == "tokens" else None
    names = {"angles": "freqs", "starts": starts, "offsets": offsets}
    return ops.RotaryByAngles(size, heads=heads, layout=layout, style=style, **names)  # type: ignore[arg-type]
