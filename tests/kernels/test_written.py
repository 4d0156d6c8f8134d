"""The texts of kernels written by hand, for the GPUs there are: they compile, spill nothing and wait for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from te_fuser.codegen.cuda_source_kernel import TextKernel
from te_fuser.kernels.attention.lengths import BlankRows
from te_fuser.kernels.attention.padding import FindTokens
from te_fuser.kernels.quantizers import FoldAmaxes, QuantizeWeights, Transposed8, measuring_weights
from tests.codegen import ptx
from tests.float8 import E4M3, E5M2, POWERS
from tests.kernels import packed_cases
from tests.kernels import test_decode_attention as caches
from tests.kernels import test_qk_norm_rope as heads
from tests.kernels import test_quantizers as quantizers
from tests.needs import needs_nvrtc

PACKED = (
    "backward with sums", "packed, turned lines", "packed and turned", "packed, turned blocks",
    "neighbours of an odd head",
)  # fmt: skip
TURNED = (
    "turned lines", "turned in other lanes", "some neighbours", "pairs that are no whole vectors", "tokens with starts",
    "many units of a thread", "normed, then turned", "normed, then turned, centered", "turned, then normed",
    "normed, then turned in lanes", "of many heads",
)  # fmt: skip
QUERIES = ("several heads", "groups", "many heads of a group", "a window")

# Name of the texts -> kernels, and the symbols that each of them has.
KERNELS: Mapping[str, tuple[Sequence[TextKernel[Any]], set[str]]] = {
    "blank_rows": ([BlankRows(dtype) for dtype in (torch.bfloat16, torch.float16)], {"blank_rows"}),
    "fold_amaxes": ([FoldAmaxes()], {"fold_amaxes"}),
    "key_value_cache": ([*caches.KERNELS.values()], {"key_value_cache"}),
    "moved_rows": ([FindTokens()], {"find_tokens", "move_rows"}),
    "one_query": ([caches.CASES[n].kernel for n in QUERIES], {"one_query_parts", "one_query_merged"}),
    "own_scales": (quantizers.BLOCKS, set()),
    "own_weights": ([measuring_weights(POWERS)], set()),
    "packed_heads": ([c.kernel for c in packed_cases.CASES if c.name in PACKED], {"packed_heads"}),
    "packed_tiles": ([case.tiles for case in packed_cases.TILES], {"packed_tiles"}),
    "packed_tiles in blocks": ([case.tiles_in_blocks for case in packed_cases.TILES[:2]], {"packed_tiles"}),
    "quantize_weights": ([QuantizeWeights(), QuantizeWeights(E5M2)], set()),
    "transposed8": ([Transposed8(E4M3)], {"transposed8"}),
    "turned_heads": ([p for c in heads.CASES if c.name in TURNED for p in c.passes()], {"turned_heads"}),
}
ARCHS = ("sm_80", "sm_90a", "sm_100a")
# Bytes of a thread that may wait in memory: on a GPU without products that read this, and of heads that are no lines.
SPILLED = {("packed_tiles", "sm_80"): 8, ("packed_tiles in blocks", "sm_90a"): 32}
# Products take blocks on Hopper alone.
COMPILED = [(name, arch) for name in KERNELS for arch in ARCHS if "blocks" not in name or arch == "sm_90a"]


@needs_nvrtc
@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_text_compiled_spills_nothing_and_waits_before_it_touches_memory(name: str, arch: str) -> None:
    kernels, symbols = KERNELS[name]
    most = SPILLED.get((name, arch), 0)
    for kernel in kernels:
        text, resources = ptx.compiled(kernel.text(), arch)
        assert {r.symbol for r in resources} - {f"{kernel.name}_finish"} == (symbols or {kernel.name})
        assert all(max(r.spilled_bytes, r.stack_bytes) <= most for r in resources), resources
        assert arch == "sm_80" or not ptx.too_early_in(text)
