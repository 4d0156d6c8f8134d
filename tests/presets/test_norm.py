"""te_fuser.LayerNorm and te_fuser.RMSNorm: each argument, against plain PyTorch in float64 and against their lists."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.presets.cases import assert_same, bare_list, leaves_of, normalized
from tests.twins import randomize, tensor

KINDS = [te_fuser.LayerNorm, te_fuser.RMSNorm]
OPS = {te_fuser.LayerNorm: ops.LayerNorm, te_fuser.RMSNorm: ops.RMSNorm}
WIDTH = 7
each = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def made(kind: Any, *args: Any, **keywords: Any) -> Any:
    return randomize(kind(*args, **{"device": "cpu", "params_dtype": torch.float64, **keywords}))


def meaning(norm: Any, x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    held = dict(norm.named_parameters())
    flat = x.flatten(-len(norm.normalized_shape))
    y = normalized(flat, held["weight"].flatten(), held["bias"].flatten() if "bias" in held else None, eps)
    return y.reshape(x.shape)


@each
def test_values_and_gradients(kind: Any) -> None:
    x = tensor(3, 5, WIDTH)
    sizes: list[tuple[Any, dict[str, Any]]] = [((WIDTH,), {}), (((WIDTH,),), {}), ((), {"hidden_size": WIDTH})]
    for args, keywords in (*sizes, ((), {"normalized_shape": WIDTH})):
        norm = made(kind, *args, **keywords)
        assert_same(norm(x), meaning(norm, x), leaves_of(norm, x))
    assert list(norm.state_dict()) == (["weight", "bias"] if kind is te_fuser.LayerNorm else ["weight"])
    norm = made(kind, WIDTH, 0.1)
    assert_same(norm(x), meaning(norm, x, eps=0.1), leaves_of(norm, x))


@each
def test_several_dimensions(kind: Any) -> None:
    norm, x = made(kind, (3, 4)), tensor(5, 3, 4)
    assert norm.weight.shape == (3, 4)
    assert_same(norm(x), meaning(norm, x), leaves_of(norm, x))
    with pytest.raises(ValueError, match=rf"{kind.__name__} was made for \[..., 3, 4\], got \[5, 6, 2\]"):
        norm(tensor(5, 6, 2))
    torch.testing.assert_close(norm.to_torch()(x), norm(x))


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_its_list_bit_for_bit(kind: Any, dtype: torch.dtype) -> None:
    norm, x = made(kind, WIDTH, params_dtype=dtype), tensor(3, WIDTH, dtype=dtype)
    assert_same(norm(x), bare_list(norm, OPS[kind](WIDTH))(x), leaves_of(norm, x), tolerance=0)


@each
def test_zero_centered_gamma(kind: Any) -> None:
    assert (kind(WIDTH, zero_centered_gamma=True, device="cpu").weight == 0).all()
    assert (kind(WIDTH, device="cpu").weight == 1).all()
    norm, x = made(kind, WIDTH, zero_centered_gamma=True), tensor(3, WIDTH)
    y, plain = norm(x), norm.to_torch()
    torch.testing.assert_close(plain(x), y)
    with torch.no_grad():
        norm.weight += 1
    torch.testing.assert_close(y, meaning(norm, x))


@each
def test_to_torch_and_back(kind: Any) -> None:
    norm, x = made(kind, WIDTH), tensor(3, WIDTH)
    torch.testing.assert_close(te_fuser.from_torch(norm.to_torch())(x), norm(x))


@each
def test_marks_and_copies(kind: Any) -> None:
    norm, x = made(kind, WIDTH, sequence_parallel=True), tensor(3, WIDTH)
    for twin in (norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert twin.weight.sequence_parallel is False
        torch.testing.assert_close(twin(x), norm(x))


@each
def test_in_a_list(kind: Any) -> None:
    model, x = te_fuser.Sequential(ops.GELU(), made(kind, WIDTH), ops.SiLU()), tensor(3, WIDTH)
    assert len(model.plan(x).graph.nodes) == 3
    h = torch.nn.functional.gelu(x, approximate="tanh")
    assert_same(model(x), torch.nn.functional.silu(meaning(model[1], h)), leaves_of(model, x))


@each
def test_bad_input(kind: Any) -> None:
    for args, keywords in (((), {}), ((3,), {"hidden_size": 3})):
        with pytest.raises(TypeError, match="a norm takes its size once"):
            kind(*args, **keywords)
    with pytest.raises(TypeError, match="normalized_shape is a whole number, got 3.5"):
        kind(3.5)
    with pytest.raises(ValueError, match="normalized_shape has at least one size"):
        kind(())
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(\) takes no argument 'epss'; did you mean 'eps'"):
        kind(3, epss=1.0)
    with pytest.raises(ValueError, match="eps is a number from 0 on"):
        kind(3, eps="small")
    with pytest.raises(ValueError, match="was made for 7 features, got 3"):
        made(kind, WIDTH)(tensor(2, 3))
