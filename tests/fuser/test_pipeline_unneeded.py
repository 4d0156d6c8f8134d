"""What nobody needs is not computed: frozen parameters, inputs without gradients, no_grad."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from te_fuser import ops
from tests.fuser.models import mlp, our_mlp
from tests.twins import assert_as_meant, sequential, tensor

X = tensor(6, 8)


class Products(TorchDispatchMode):
    """Counts matrix products by the shapes of what they multiply."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")
        return func(*args, **(kwargs or {}))


def count_products(run):
    with Products() as mode:
        run()
    return mode.count


# what is frozen -> products in backward, of three Linears
FROZEN = {
    "nothing": ((), True, 6),
    "input": ((), False, 5),
    "first_weight": (("0.weight",), True, 5),
    "first_weight_and_input": (("0.weight",), False, 4),  # the first bias still needs what the second hands down
    "first_layer_and_input": (("0.weight", "0.bias"), False, 3),
    "two_layers_and_input": (("0.weight", "0.bias", "2.weight", "2.bias"), False, 1),
    "all_weights": (("0.weight", "2.weight", "4.weight"), True, 3),
    "all_but_the_last_bias": (("0.weight", "0.bias", "2.weight", "2.bias", "4.weight"), False, 0),
}


@pytest.mark.parametrize("name", FROZEN)
def test_no_product_is_computed_that_nobody_needs(name):
    frozen, input_needs, want = FROZEN[name]
    model = sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8))
    for parameter in frozen:
        model.get_parameter(parameter).requires_grad_(False)
    x = X if input_needs else X.detach()
    held = []
    assert count_products(lambda: held.append(model(x))) == 3
    assert count_products(lambda: held[0].sum().backward()) == want
    assert {n for n, p in model.named_parameters() if p.grad is None} == set(frozen)
    X.grad = None
    assert_as_meant(model, x)


def test_no_grad_builds_no_graph_and_keeps_nothing():
    model = mlp()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = model(X)
            plan = model.plan(X)
        assert not y.requires_grad and y.grad_fn is None
        assert plan.backward == () and plan.kept == ()
    assert not model.requires_grad_(False)(X.detach()).requires_grad


def test_inference_tensors_take_part():
    model = our_mlp()
    with torch.inference_mode():
        x = tensor(6, 8, grad=False) + 1.0
        y = model(x)
        assert y.is_inference()
    torch.testing.assert_close(y.clone(), model(x.clone()))
