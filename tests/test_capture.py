"""CUDA graphs of models: what is refused without and before a device."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch.nn import Parameter

import te_fuser
from te_fuser import Sequential, ops
from te_fuser.capture import GraphedModel
from te_fuser.quantization.rerun import GraphedRegion
from tests.fake_cuda import capture_by


def graphed(model: torch.nn.Module, **samples: torch.Tensor) -> GraphedModel:
    """A model whose "graph" is the model itself, on the CPU."""
    names = list(samples)[1:]
    within = GraphedRegion(model, torch.device("cpu"))
    return GraphedModel(model, lambda x, *rest: model(x, **dict(zip(names, rest, strict=True))), samples, within)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device, and PyTorch sees none"):
        te_fuser.cuda_graph(Sequential(ops.GELU()), torch.randn(2, 4))


def test_regions_are_not_entered_in_a_capture() -> None:
    with (
        mock.patch("torch.cuda.is_initialized", lambda: True),
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: True),
        pytest.raises(NotImplementedError, match="entered while a CUDA graph is captured"),
        te_fuser.autocast(),
    ):
        raise AssertionError("it ran")


def test_the_forms_of_sample_inputs() -> None:
    model, x = Sequential(ops.GELU()), torch.randn(2, 4)
    for given in (x, (x,), (x, {"other": x})):
        with mock.patch("torch.cuda.is_available", lambda: True), pytest.raises(ValueError, match="x is on cpu"):
            te_fuser.cuda_graph(model, given)
    for wrong, words in (((x, x), "(Tensor, Tensor)"), ((), "()"), ([x], "list"), ((x, {"a": 1}), "(Tensor, dict)")):
        with pytest.raises(TypeError, match=re.escape(f"(x, {{name: tensor}}) as sample inputs, got {words}")):
            te_fuser.cuda_graph(model, wrong)  # type: ignore[arg-type]


def test_a_call_like_the_sample_runs() -> None:
    model = Sequential(ops.Linear(4, 3), ops.GELU())
    x = torch.randn(2, 4)
    torch.testing.assert_close(graphed(model, x=x)(x), model(x))
    loss, far = torch.nn.TripletMarginLoss(), torch.randn(2, 4)
    call = graphed(loss, x=x, positive=far, negative=x)
    torch.testing.assert_close(call(x, negative=x, positive=far + 1), loss(x, far + 1, x))


def test_other_tensors_modes_and_parameters_are_refused() -> None:
    model = Sequential(ops.Linear(4, 3), ops.Dropout(0.5))
    x = torch.randn(2, 4)
    call = graphed(model, x=x)
    with pytest.raises(
        ValueError, match=r"x is torch.float32 \[3, 4\] on cpu, and the graph was captured for .*\[2, 4\]"
    ):
        call(torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"x is torch.float32 \[2, 4\] on cpu with requires_grad"):
        call(torch.randn(2, 4, requires_grad=True))
    with pytest.raises(ValueError, match="captured for x, got x, mask"):
        call(x, mask=x)
    model.eval()
    with pytest.raises(ValueError, match=r"captured in train mode: call model.train\(\)"):
        call(x)
    model.train()
    model[0].weight.data = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"parameter 0.weight has other memory"):
        call(x)


def loaded_by_assigning(model: Sequential) -> None:
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)


OLD = "was replaced since the capture, and the graph reads the old one: capture again, or change values in place"
OTHER = "a module of this model was added, removed or replaced since the capture: capture again"
QUIET = r"in train mode: call its train\(\), or cuda_graph again"
CHANGES: dict[str, tuple[Callable[[Sequential], object], str]] = {
    "assigned": (lambda m: setattr(m[0], "weight", Parameter(m[0].weight.detach().clone())),
     f"parameter 0.weight {OLD}"),
    "loaded": (loaded_by_assigning, f"parameter 0.weight {OLD}"),
    "removed": (lambda m: setattr(m[0], "bias", None), f"parameter 0.bias {OLD}"),
    "replaced buffer": (lambda m: setattr(m[3], "running_mean", torch.zeros(3)), f"buffer 3.running_mean {OLD}"),
    "moved buffer": (lambda m: setattr(m[3].running_mean, "data", torch.zeros(3)),
     "buffer 3.running_mean has other memory than at capture"),
    "frozen": (lambda m: m[0].weight.requires_grad_(False),
     "parameter 0.weight has requires_grad=False, and the graph was captured with True: call req"),
    "other op": (lambda m: m.__setitem__(0, ops.Linear(4, 3)), OTHER),
    "another op": (lambda m: m.append(ops.GELU()), OTHER),
    "op in an empty branch": (lambda m: m[2].append(ops.GELU()), OTHER),
    "computed": (lambda m: torch.nn.utils.parametrizations.weight_norm(m[0], "weight"), OTHER),
    "other probability": (lambda m: setattr(m[1], "p", 0.25),
     r"an attribute of 1 \(Dropout\) was set since the capture, and the graph goes by the old one"),
    "quiet dropout": (lambda m: m[1].eval(), f"captured with 1 {QUIET}"),
    "quiet norm": (lambda m: m[3].eval(), f"captured with 3 {QUIET}"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_graph_would_not_see_is_refused(name: str) -> None:
    """The graph reads the memory of the capture, whatever the model has become."""
    change, message = CHANGES[name]
    model = Sequential(ops.Linear(4, 3), ops.Dropout(0.5), te_fuser.Residual(), torch.nn.BatchNorm1d(3))
    x = torch.randn(2, 4)
    call = graphed(model, x=x)
    call(x)
    change(model)
    with pytest.raises(ValueError, match=message):
        call(x)


def test_a_mode_that_an_op_had_at_the_capture_is_its_mode() -> None:
    model, x = Sequential(ops.Linear(4, 3), ops.Dropout(0.5)), torch.randn(2, 4)
    model[1].eval()
    call = graphed(model, x=x)
    torch.testing.assert_close(call(x), model(x))
    model.train()
    with pytest.raises(ValueError, match=r"captured with 1 in eval mode: call its eval\(\)"):
        call(x)


def test_values_may_change_in_place() -> None:
    """An optimizer's step, load_state_dict, buffers that a module writes: the graph reads them where they lie."""
    model = Sequential(ops.Linear(4, 3), torch.nn.BatchNorm1d(3))
    x = torch.randn(2, 4)
    call = graphed(model, x=x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        call(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict({name: torch.ones_like(t) for name, t in model.state_dict().items()})
    torch.testing.assert_close(call(x), model(x))


def test_the_warm_up_leaves_main_grad_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's capture does it: some calls with their backward, whose gradients nobody keeps."""

    def capture(module: torch.nn.Module, samples: tuple[torch.Tensor, ...], **options: object) -> torch.nn.Module:
        for _ in range(3):
            y = module(*samples)
            torch.autograd.grad(y.sum(), list(module.parameters()), allow_unused=True)
        return module

    capture_by(monkeypatch, capture)
    model = te_fuser.Sequential(ops.Linear(4, 3, accumulate_into_main_grad=True))
    weight = model[0].weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(3, 4), False
    held, x = weight.main_grad, torch.randn(5, 4)
    replayed = te_fuser.cuda_graph(model, x)
    assert weight.main_grad is held and torch.equal(held, torch.ones(3, 4)) and not weight.grad_added_to_main_grad
    replayed(x).sum().backward()
    assert not torch.equal(held, torch.ones(3, 4)) and weight.grad_added_to_main_grad
    weight.overwrite_main_grad = True
    with pytest.raises(ValueError, match=r"^parameter 0.weight has overwrite_main_grad=True, .* captured with False"):
        replayed(x)
    weight.overwrite_main_grad = False
    weight.main_grad = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"the main_grad of parameter 0.weight has other memory"):
        replayed(x)


def _fails(*errors: str) -> None:
    try:
        raise RuntimeError(errors[0])
    except RuntimeError:
        raise RuntimeError(errors[-1])  # noqa: B904 - as the end of a capture does


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        (("make the legacy stream depend on a capturing stream", "failed during capture"), r"delete it \(del y\)"),
        (("another", "failed during capture"), "^failed during capture$"),
    ],
)
def test_a_graph_that_is_held_is_told(errors: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = capture_by(monkeypatch, lambda *given, **how: _fails(*errors))
    with pytest.raises(RuntimeError, match=words):
        te_fuser.cuda_graph(te_fuser.Sequential(ops.Linear(3, 5)), torch.randn(2, 3))
    assert streams == ["the caller's"]
