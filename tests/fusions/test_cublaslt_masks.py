"""ReLU's slope, and the bias's gradient, in the epilogue of the gradient's product, by the mask that forward wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.plan.planner import make_plan
from te_fuser.fuser.plan.problem import Options
from te_fuser.fuser.plan.tuned import ON
from te_fuser.kernels.cublaslt import products
from te_fuser.ops.base import FusableOperation
from tests.fake_cublaslt import FakeCublasLt
from tests.fusions.products import covered, free, library_on_the_cpu, plan, reasons
from tests.twins import tensor

NAME, WITH_BIAS = "relu_matmul_by_mask", "bias_relu_matmul_by_mask"
MASK_OF_8192 = 8192 * 16384 // 8


def mlp(inner: int = 16384) -> tuple[FusableOperation, ...]:
    return ops.Linear(4096, inner, device="meta"), ops.ReLU(), ops.Linear(inner, 4096, device="meta")


def forced(*parts: FusableOperation, name: str = NAME, **options: object) -> Plan:
    """The plan where the fusion costs nothing, with products and kernels as ever."""
    others = [n for n in fusions.names() if "by_mask" not in n]
    with fusions.only(free(fusions.get(name)), *others):
        return plan(*parts, **options)  # type: ignore[arg-type]


def test_forward_writes_the_mask_and_backward_reads_it() -> None:
    p = forced(*mlp())
    assert covered(p.forward) == [(NAME, 0, 3), ("matmul_bias", 3, 5)]
    assert [n for n, _ in p.forward[0].outputs] == ["output", "mask"]
    dgrad, wgrad = (s for s in p.backward if s.name == NAME)
    assert (dgrad.start, dgrad.stop) == (2, 4)
    assert [n for n, _ in dgrad.inputs] == ["dy", "1.weight", "mask"] and dgrad.chain
    assert [n for n, _ in wgrad.inputs] == ["dy", "0.output"] and not wgrad.chain
    assert dgrad.inputs[2][1] == p.forward[0].outputs[1][1]


def test_the_bias_alone_has_a_kernel_of_its_own() -> None:
    with fusions.only(free(fusions.get(NAME)), fusions.STRETCH):
        assert ("bias_bwd", 1, 2) in covered(plan(*mlp()).backward)


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
def test_the_mask_is_kept_with_relus_output_and_not_what_relu_read(memory: str) -> None:
    p = forced(*mlp(), memory=memory)
    kept = {k.name: k.bytes for k in p.kept if k.owner == "activation"}
    assert kept == {"relu.output": 8192 * 16384 * 2, f"{NAME}: mask": MASK_OF_8192}


@pytest.mark.parametrize(("inner", "row"), [(128, 16), (129, 32), (1, 16), (16384, 2048)])
def test_rows_of_the_mask_are_whole_128_bits(inner: int, row: int) -> None:
    assert products.mask_bytes(inner) == row
    (mask,) = (k for k in forced(*mlp(inner), rows=7).kept if k.name.endswith("mask"))
    assert mask.bytes == 7 * row


def test_the_cost_of_a_mask_is_a_bit_for_each_element() -> None:
    h, bits, w = 8192 * 16384 * 2, MASK_OF_8192, 4096 * 16384 * 2
    x = 8192 * 4096 * 2
    p = tuned()
    forward, dgrad = (s.cost for s in (*p.forward, *p.backward) if s.name == NAME and s.chain)
    assert (forward.read, forward.written) == (x + w, h + bits)
    assert (dgrad.read, dgrad.written) == (x + w + bits, h)


def tuned() -> Plan:
    """The plan where tune() found the fusion to be faster, at its own cost."""
    parts = mlp()  # a graph does not keep them
    found = plan(*parts, memory="fast")
    assert NAME not in {s.name for s in (*found.forward, *found.backward)}
    options = Options(found.device, found.target, "fast", found.device.capability, {f"{NAME} 4096>4096": ON})
    return make_plan(found.graph, options)


def test_what_tune_found_is_taken() -> None:
    p = tuned()
    assert [s.name for s in (*p.forward, *p.backward)].count(NAME) == 3


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
@pytest.mark.parametrize("rows", [16, 8192])
@pytest.mark.parametrize("name", [NAME, WITH_BIAS])
def test_never_measured_it_is_left_to_tune(name: str, memory: str, rows: int) -> None:
    p = plan(*mlp(), memory=memory, rows=rows)
    assert any("us more than" in r for r in reasons(p, name))
    assert not {k.name for k in p.kept if "mask" in k.name}


def test_its_reason_is_explained() -> None:
    model = te_fuser.Sequential(*mlp()).to("meta", torch.bfloat16)
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert f"{NAME} (backward; ops 2-3): predicted" in str(model.explain(x, device="h200"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": None, "rows": 8}, "cuBLASLt runs on cuda, the input is on cpu"),
        ({"grad": False}, "there is no backward to read the mask"),
        ({"dtype": torch.float64}, "in bfloat16, float16 and float32, and this one is in float64"),
        ({"kernels": "reference"}, "this plan is one of PyTorch's operations alone"),
    ],
)
def test_reasons(options: dict[str, object], reason: str) -> None:
    (why,) = reasons(plan(*mlp(64), **options), NAME)  # type: ignore[arg-type]
    assert reason in why


def test_where_relus_output_is_read_elsewhere_too() -> None:
    p = forced(ops.Linear(64, 64), ops.ReLU(), ops.Fork("h"), ops.Linear(64, 64), ops.Add("h"), features=64, rows=64)
    assert NAME not in {s.name for s in (*p.forward, *p.backward)}


def test_main_grad_has_its_own() -> None:
    last = ops.Linear(16384, 4096, accumulate_into_main_grad=True, device="meta")
    assert reasons(plan(*mlp()[:2], last), NAME) == {"the weight's gradient goes to its main_grad"}


def test_a_stack_of_them() -> None:
    p = forced(ops.Linear(256, 512), ops.ReLU(), ops.Linear(512, 512), ops.ReLU(), ops.Linear(512, 256), features=256)
    assert [(a, b) for name, a, b in covered(p.forward) if name == NAME] == [(0, 3), (3, 6)]
    chain = [(s.start, s.stop) for s in p.backward if s.name == NAME and s.chain]
    assert chain == [(5, 7), (2, 4)]


# ---- with the bias's gradient ---------------------------------------------------------------------------------------


def test_one_product_gives_the_gradients_of_input_and_bias() -> None:
    p = forced(*mlp(), name=WITH_BIAS, memory="fast")
    assert covered(p.forward) == [(WITH_BIAS, 0, 3), ("matmul_bias", 3, 5)]
    dgrad, wgrad = (s for s in p.backward if s.name == WITH_BIAS)
    assert (dgrad.start, dgrad.stop) == (1, 4)
    assert [n for n, _ in dgrad.inputs] == ["dy", "2.weight", "mask"] and dgrad.chain
    assert [n for n, _ in dgrad.outputs] == ["input", "0.bias"]
    assert [n for n, _ in wgrad.inputs] == ["dy", "1.output"] and not wgrad.chain
    assert {k.name for k in p.kept if k.owner == "activation"} == {"relu.output", f"{WITH_BIAS}: mask"}


def test_a_frozen_bias_needs_no_sum() -> None:
    first = ops.Linear(4096, 16384, device="meta")
    model = te_fuser.Sequential(first, *mlp()[1:]).to("meta", torch.bfloat16)
    first.bias.requires_grad_(False)
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    p = model.plan(x, device="h200")
    assert reasons(p, WITH_BIAS) == {"nobody needs the gradient of 0.bias, which it makes with input"}


def test_a_bias_of_another_dtype() -> None:
    first = ops.Linear(64, 64)
    model = te_fuser.Sequential(first, ops.ReLU(), ops.Linear(64, 64)).to("meta", torch.bfloat16)
    first.bias = torch.nn.Parameter(torch.empty(64, device="meta"))
    p = model.plan(torch.empty(16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True), device="h200")
    assert reasons(p, WITH_BIAS) == {"the bias is in torch.float32, the product in torch.bfloat16"}


# ---- values, by a library on the CPU -------------------------------------------------------------------------------


@pytest.fixture
def library() -> Iterator[FakeCublasLt]:
    with library_on_the_cpu() as fake:
        yield fake


@pytest.mark.parametrize("rows", [(7,), (2, 3), (0,), ()])
def test_the_products(library: FakeCublasLt, rows: tuple[int, ...]) -> None:
    x, w, b, dy, w2 = (tensor(*s, dtype=torch.float32) for s in ((*rows, 9), (130, 9), (130,), (*rows, 5), (5, 130)))
    y, mask = products.multiply("forward_bias_relu_mask", x, w, b)
    h = x.double() @ w.double().T + b.double()
    torch.testing.assert_close(y.double(), h.relu(), rtol=1e-6, atol=1e-5)
    assert mask.shape == (*rows, 32) and mask.dtype == torch.uint8
    dh = torch.where(h > 0, dy.double() @ w2.double(), 0.0)
    alone, (with_sums, sums) = (products.multiply(kind, dy, w2, mask) for kind in ("dgrad_drelu", "dgrad_drelu_sum"))
    torch.testing.assert_close(alone.double(), dh, rtol=1e-6, atol=1e-5)
    assert torch.equal(alone, with_sums)
    torch.testing.assert_close(sums.double(), dh.reshape(-1, 130).sum(0), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", [NAME, WITH_BIAS])
def test_it_is_what_the_ops_mean(name: str, library: FakeCublasLt) -> None:
    lists = [[ops.MatMul(19, 131), ops.Bias(131), ops.ReLU(), ops.MatMul(131, 6)]]
    entry = dataclasses.replace(fusions.get(name), when=lambda m: m.needs_grad or "no backward")
    report = te_fuser.verify(entry, ops=lists, dtypes=[torch.bfloat16], device="cpu", kernels="reference")
    assert report.passed and len(report.rows) > 100
    assert library.products


def test_a_wrong_mask_is_found(library: FakeCublasLt) -> None:
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, mask = products.multiply("forward_bias_relu_mask", x, weight, bias)
        mask[-1, 0] ^= 1
        return y, mask

    right = fusions.get(NAME)
    assert right.choose is not None
    wrong = dataclasses.replace(
        right, when=None, choose=lambda m, method: forward if method == "forward" else right.choose(m, method)
    )
    lists = [[ops.MatMul(8, 8), ops.Bias(8), ops.ReLU(), ops.MatMul(8, 8)]]
    with pytest.raises(te_fuser.VerificationError, match="gradient"):
        te_fuser.verify(wrong, ops=lists, dtypes=[torch.float32], device="cpu", kernels="reference")
