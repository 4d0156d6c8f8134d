"""Random draws for a part of what ranks share, on a GPU: kernels draw what one process draws, libraries apart."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from te_fuser.codegen import cuda_loader
from te_fuser.distributed.shard import own_state
from te_fuser.formula.random import RandomStream, RankPlacement, Shared
from tests.codegen.corpus import outputs
from tests.codegen.cuda_calls import FIRST_STREAM, OFFSET, SEED
from tests.distributed.test_shard import CASES, INNER, OUTER, OWN, drawing, places, whole_mask

ROWS = OUTER * OWN * INNER


@pytest.mark.parametrize("case", CASES)
def test_kernels(case: str) -> None:
    width, pieces, shared = CASES[case]
    d = drawing(width, pieces, shared)
    (kernel,) = cuda_loader.load([d], torch.device("cuda"))
    for ranks, place in places(shared):
        made = [t.cuda() for t in outputs(d, ROWS)]
        kernel.run((torch.tensor([SEED, OFFSET]), *made), ROWS, 1, 1, (FIRST_STREAM - 2**32, *place))
        assert torch.equal(torch.cat(made, -1).cpu(), whole_mask(width, shared, ranks))


def test_what_a_library_draws() -> None:
    """Each rank its own, again the same, and the generator goes on as if nothing had been drawn."""
    device = torch.device("cuda")

    def drawn(rank: int) -> torch.Tensor:
        placed = RankPlacement(Shared(columns=2), column_rank=rank)
        with own_state(lambda: dataclasses.replace(RandomStream(1, 2, 3), placed=placed), device):
            q = torch.ones(1, 2, 64, 64, device=device, dtype=torch.bfloat16)
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    torch.manual_seed(0)
    wanted = torch.rand(5, device=device)
    torch.manual_seed(0)
    found = [drawn(rank) for rank in (0, 0, 1)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(torch.rand(5, device=device), wanted)


def test_no_capture() -> None:
    graph, device = torch.cuda.CUDAGraph(), torch.device("cuda")
    x = torch.ones(1, device=device)
    with torch.cuda.graph(graph):
        x.add_(1)
        with (
            pytest.raises(RuntimeError, match="replays would draw the same on all ranks"),
            own_state(lambda: RandomStream(1, 2, 3), device),
        ):
            pass
