"""Exchanges by copies between ranks, each with streams that take their time, against what ranks know of one another."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from te_fuser import _native
from te_fuser.distributed import consistency
from te_fuser.distributed.consistency import RankMismatchError
from te_fuser.distributed.group import Group
from te_fuser.kernels import peers as peers_module
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.peers import ByCopies, Peers, closed, peers_of
from tests import fake_cublaslt
from tests.parallel.ranks import Ranks, RanksFailedError, on_ranks
from tests.peers import standing_in

CPU = torch.device("cpu")


def world() -> tuple[Peers, int, int]:
    group = Group.of("test", dist.group.WORLD)
    return peers_of(group, CPU), group.rank, group.size


def given(number: int, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Tensor of a rank in an exchange."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(97 * number + rank)).to(dtype)


@pytest.mark.parametrize("delay", [0, 60])
@on_ranks
def test_many_exchanges_of_any_size_in_any_order(delay: int) -> None:
    """Some are under way at once, more than there are buffers, and are waited for in an order of their own."""
    generator = random.Random(3)
    with standing_in(delay):
        peers, rank, ranks = world()
        under_way = []
        for number in range(300 if delay else 3_000):
            rows, features, kind = generator.randrange(1, 9), generator.randrange(1, 9), generator.choice("gbs")
            shape = (rows if kind == "g" else ranks * rows, *(2,) * generator.randrange(2), features)
            x = given(number, rank, *shape)
            buffers = peers.buffers(x.nbytes if kind == "g" else x.nbytes // ranks)
            out = x.new_full((ranks * rows, *shape[1:]), torch.nan)
            taken = buffers.scatter(x) if kind == "s" else buffers.gather(x, out, kind == "g")
            under_way.append((number, kind, shape, buffers, taken, x, out, peers.blocks(taken, x[:rows])))
            if len(under_way) > generator.randrange(9):
                number, kind, shape, buffers, taken, x, out, blocks = under_way.pop(generator.randrange(len(under_way)))
                if kind == "s":
                    buffers.wait(taken)
                    out = torch.cat(blocks[:-1])
                    assert torch.equal(blocks[-1], torch.stack(blocks[:-1])), number
                buffers.close(taken)
                all_given = [given(number, r, *shape) for r in range(ranks)]
                wanted = all_given if kind == "g" else [t.chunk(ranks)[rank] for t in all_given]
                assert torch.equal(out, torch.cat(wanted)), number
        for _, kind, _, buffers, taken, *_ in under_way:
            if kind == "s":
                buffers.wait(taken)
            buffers.close(taken)


@pytest.mark.parametrize("gives", [False, True])
@on_ranks
def test_a_product_of_gathered_rows(gives: bool) -> None:
    with standing_in():
        peers, rank, ranks = world()
        w = given(9, 0, 6, 5)
        for kind, others in (("forward", ()), ("forward_bias", (given(8, 0, 6),))):
            make = products.configured(kind, torch.float32, torch.float32).make
            product = _native.GatherMatmul(make, peers, gives)
            found = product(given(0, rank, 4, 3, 5), w, *others)
            x = torch.cat([given(0, r, 4, 3, 5) for r in range(ranks)])
            y = found[0] if gives else found
            torch.testing.assert_close(y, torch.nn.functional.linear(x, w, *others))
            assert not gives or torch.equal(found[1], x)


@on_ranks
def test_a_product_that_is_scattered() -> None:
    with standing_in():
        peers, rank, ranks = world()
        product = _native.MatmulScatter(products.configured("forward", torch.float32, torch.float32).make, peers)
        for number in range(4):
            xs = [given(2 * number, r, ranks * 3, 2, 5) for r in range(ranks)]
            ws = [given(2 * number + 1, r, 6, 5) for r in range(ranks)]
            whole = sum(torch.nn.functional.linear(x.double(), w.double()) for x, w in zip(xs, ws, strict=True))
            y = product(xs[rank], ws[rank])
            torch.testing.assert_close(y.double(), whole.chunk(ranks)[rank], rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]


@on_ranks
def test_products_of_nothing() -> None:
    """No rows, no columns, and nothing to add up, which gives zeros."""
    with standing_in():
        peers, _, ranks = world()
        make = products.configured("forward", torch.float32, torch.float32).make
        for rows, features, out in ((0, 5, 6), (4, 0, 6), (4, 5, 0)):
            x, w = torch.ones(rows, features), torch.ones(out, features)
            y, gathered = _native.GatherMatmul(make, peers, True)(x, w)
            assert torch.equal(y, torch.full((ranks * rows, out), float(features)))
            assert torch.equal(gathered, torch.ones(ranks * rows, features))
            assert torch.equal(_native.GatherMatmul(make, peers)(x, w), y)
            whole = _native.MatmulScatter(make, peers)(torch.ones(ranks * rows, features), w)
            assert torch.equal(whole, torch.full((rows, out), float(ranks * features)))


@pytest.mark.parametrize("kind", ["forward_bias_add", "forward_bias_gelu_aux", "dgrad_dgelu"])
@on_ranks
def test_products_with_what_belongs_to_rows(kind: str) -> None:
    """Addends, and what epilogues read or give for each row, are those of the rows that are multiplied."""
    with standing_in():
        peers, rank, ranks = world()
        make = products.configured(kind, torch.float32, torch.float32).make
        rows, features, out = 4, 16, 8
        xs = [given(1, r, rows, features) for r in range(ranks)]
        w, bias = given(2, 0, out, features), given(3, 0, out)
        if kind.startswith("dgrad"):
            w = w.t().contiguous()
        add, h = given(4, 0, ranks * rows, out), given(5, 0, ranks * rows, out)
        others = {"forward_bias_add": (add, bias), "forward_bias_gelu_aux": (bias,), "dgrad_dgelu": (h,)}[kind]
        whole = make(torch.cat(xs), w, *others)
        whole = whole if isinstance(whole, tuple) else (whole,)
        for gives in (False, True):
            found = _native.GatherMatmul(make, peers, gives)(xs[rank], w, *others)
            found = found if isinstance(found, tuple) else (found,)
            for a, b in zip(found[: len(whole)], whole, strict=True):
                assert torch.equal(a, b)
        if len(whole) > 1:
            with pytest.raises(ValueError, match="'matmul_forward_bias_gelu_aux' gives 2 tensors, of which none alone"):
                _native.MatmulScatter(make, peers)(torch.cat(xs), w, *others)
        else:
            y = _native.MatmulScatter(make, peers)(torch.cat(xs), w, *others)
            torch.testing.assert_close(y, ranks * whole[0].chunk(ranks)[rank])


@on_ranks
def test_buffers_that_grow_while_one_is_open() -> None:
    """Buffers left open stay where they were, and are given back there."""
    with standing_in():
        peers, rank, ranks = world()
        make = products.configured("forward", torch.float32, torch.float32).make
        w = given(7, 0, 6, 5)
        for number in range(3):
            xs = [given(number, r, ranks * 3, 5) for r in range(ranks)]
            *parts, opened = _native.MatmulScatter(make, peers, True)(xs[rank], w)
            x = given(number, rank, 3 * 10**number, 40)
            out = x.new_empty(ranks * len(x), 40)
            buffers = peers.buffers(x.nbytes)
            buffers.close(buffers.gather(x, out))
            for r, part in enumerate(parts):
                torch.testing.assert_close(part, (xs[r] @ w.t()).chunk(ranks)[rank])
            del parts, part
            assert closed(opened) == ()
            assert torch.equal(out, torch.cat([given(number, r, len(x), 40) for r in range(ranks)]))


@pytest.mark.parametrize("kind", [_native.GatherMatmul, _native.MatmulScatter])
@on_ranks
def test_a_product_that_fails_in_between(kind: Any) -> None:
    """Transfers under way are waited for, and nothing is exchanged any more, since others may be elsewhere."""
    library = fake_cublaslt.FakeCublasLt.in_dll(ctypes.CDLL(str(fake_cublaslt.compile_library())), "fake")
    with standing_in():
        peers, rank, ranks = world()
        x, w = given(0, rank, 3 * ranks, 11), given(1, 0, 7, 11)  # which no other test multiplies
        product = kind(products.configured("forward", torch.float32, torch.float32).make, peers)
        library.refused = 1
        with pytest.raises(RuntimeError, match="cuBLASLt|no algorithm|NOT_SUPPORTED"):
            product(x, w)
        library.refused = 0
        with pytest.raises(RuntimeError, match="of world: nothing is exchanged any more, as ranks may differ"):
            product(x, w)


@on_ranks
def test_an_exchange_that_nobody_waits_for() -> None:
    """The exchange is waited for when the holder of its tensors goes, and the next ones go on."""
    with standing_in():
        peers, rank, ranks = world()
        for number in range(6):
            x = given(number, rank, 2 * ranks, 5)
            ByCopies(peers).gather(x, x.new_empty(2 * ranks * ranks, 5))
            ByCopies(peers).scatter(x, x.new_empty(2, 5))
        assert peers._native is not None and peers._native.under_way == 0


@pytest.mark.parametrize("waits", ["each at once", "both twice"])
@pytest.mark.parametrize("captures", [False, True])
@on_ranks
def test_works_may_be_waited_for_again(waits: str, captures: bool) -> None:
    """As those of torch.distributed: what was scattered is added up once.

    While streams are captured, nothing waits for an event that nobody has recorded.
    """
    with standing_in() as driver:
        peers, rank, ranks = world()
        for number in range(8):
            driver.capturing = captures and number % 2
            xs = [given(number, r, ranks * 3, 5) for r in range(ranks)]
            out, made = torch.cat(xs).zero_(), xs[rank].new_empty(3, 5)
            works = []
            for start, result in ((ByCopies(peers).gather, out), (ByCopies(peers).scatter, made)):
                works.append(start(xs[rank], result))
                if waits == "each at once":
                    works.pop().wait()
            for work in 2 * works:
                work.wait()
            assert torch.equal(out, torch.cat(xs))
            torch.testing.assert_close(made, torch.stack(xs).sum(0).chunk(ranks)[rank])
        driver.capturing = 0


@on_ranks
def one_is_gone() -> None:
    """Not a test: the body of the next one."""
    with standing_in(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(consistency, "timeout", lambda group: 1.0)
        patch.setattr(peers_module, "_LOOK", 0.1)
        peers, rank, ranks = world()
        x = given(0, rank, 3, 5)
        out = x.new_empty(ranks * 3, 5)
        for _ in range(3):
            buffers = peers.buffers(x.nbytes)
            buffers.close(buffers.gather(x, out))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        buffers = peers.buffers(x.nbytes)
        buffers.close(buffers.gather(x, out))
        until = time.monotonic() + 20.0
        while not peers.is_done():  # released, so what it gave is void
            assert time.monotonic() < until
            time.sleep(0.01)
        words = "waited in an exchange by copy engines for 1 s, .* and rank 1 of group 'world' did not come"
        with pytest.raises(RankMismatchError, match=words):
            peers.buffers(x.nbytes)
        print("heard of it")


def test_a_rank_that_is_gone(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The wait of the other one ends, and its next exchange raises."""
    ranks = Ranks(tmp_path, request.config.getoption("--cpu"), deadline=30)
    with pytest.raises(RanksFailedError) as error:
        ranks.run(vars(one_is_gone)["body"], {})
    ranks.stop()
    assert "rank 1 ended by SIGKILL" in str(error.value) and "heard of it" in str(error.value)
