"""Products of quack-kernels, of 16 and of 8 bits, with packages that compute on the CPU."""

from __future__ import annotations

import inspect
import itertools
import operator

import pytest
import torch

from te_fuser.kernels.packages import quack
from tests.kernels.packages import fake_quack, fake_quack_float8
from tests.kernels.packages.fake_packages import behind, odd, turned
from tests.kernels.packages.fake_quack import gelu, swiglu
from tests.twins import tensor

CONFIG, EPILOGUES = quack._CONFIG, quack._EPILOGUES


@pytest.fixture
def package(monkeypatch):
    """A package in place."""
    yield fake_quack.in_place(monkeypatch)
    fake_quack.forget()


def tensors(rows, inner, outer, dtype=torch.float64):
    """x, W, b, dy, and h: of both signs, some far out in GELU's negative tail."""
    shapes = ((*rows, inner), (outer, inner), (outer,), (*rows, outer), (*rows, inner))
    x, w, b, dy, h = (tensor(*shape, grad=False, seed=seed) for seed, shape in enumerate(shapes))
    return [t.to(dtype) for t in (x, w * inner**-0.5, b, dy, 3 * h)]


def assert_close(found, exact):
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


def gradients(dy, w, h):
    """dh, gelu(h) and the sum of dh."""
    leaf = h.clone().requires_grad_()
    y = gelu(leaf)
    (dh,) = torch.autograd.grad(y, leaf, dy @ w)
    return dh, y.detach(), dh.reshape(-1, dh.shape[-1]).sum(0)


def gated_tensors(rows, inner, outer, dtype=torch.float64):
    """dy, W, and h of a gate and as many others."""
    _, w, _, dy, gate = tensors(rows, inner, outer, dtype)
    return dy, w, torch.cat((gate, tensor(*rows, inner, grad=False, seed=9).to(dtype)), -1)


def gated_gradients(dy, w, h):
    """dh and silu(gate) * up."""
    leaf = h.clone().requires_grad_()
    y = swiglu(leaf)
    return torch.autograd.grad(y, leaf, dy @ w)[0], y.detach()


SIZES = (((1,), 64, 64), ((3, 7), 136, 72), ((), 16, 24), ((129,), 8, 48), ((0, 4), 64, 128), ((2, 0), 24, 16))


def results(x, w, b, dy, h, wide):
    """Calls of each product, with the exact results."""
    exact = x @ w.t() + b
    dh, *others = gradients(dy, w, h)
    return (
        (lambda: quack.linear_bias_gelu_aux(x, w, b), (gelu(exact), exact)),
        (lambda: quack.input_gradient_dgelu_sum(dy, w, h), (dh, *others)),
        (lambda: quack.input_gradient_dswiglu(dy, w, wide), gated_gradients(dy, w, wide)),
    )


def all_tensors(*sizes):
    """x, W, b, dy, h, and h of a gate and as many others."""
    return (*tensors(*sizes), gated_tensors(*sizes)[2])


@pytest.mark.parametrize(("rows", "inner", "outer"), SIZES)
def test_products_of_any_sizes_are_right(rows, inner, outer, package):
    x, w, b, dy, h, _ = given = all_tensors(rows, inner, outer)
    assert torch.equal(quack.linear_bias_gelu(x, w, b), quack.linear_bias_gelu_aux(x, w, b)[0])
    # Backward reads W as it lies: from `outer` to `inner`.
    for make, wanted in results(*given):
        before, made = len(package.calls), make()
        for found, want in zip(made, wanted, strict=True):
            assert_close(found.double(), want)
        assert all(t.is_contiguous() for t in made) and len(package.calls) - before == bool(made[0].numel())
    if package.calls:  # the halves of dh are written where they belong
        _, parts = package.calls[-1]
        assert is_inside(parts["D"], made[0]) and is_inside(parts["up_gradient"], made[0])


def test_bfloat16_is_rounded_once_and_the_sum_is_in_float32(package):
    x, w, b, dy, h = tensors((5, 3), 64, 48, torch.bfloat16)
    y, before = quack.linear_bias_gelu_aux(x, w, b)
    exact = x.double() @ w.double().t() + b.double()
    assert torch.equal(before, exact.bfloat16()) and torch.equal(y, gelu(exact).bfloat16())
    dh, y, total = quack.input_gradient_dgelu_sum(dy, w, h)
    want, activated, sums = gradients(dy.double(), w.double(), h.double())
    assert torch.equal(dh, want.bfloat16()) and torch.equal(y, activated.bfloat16())
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, sums.float())
    dy, w, h = gated_tensors((5, 3), 64, 48, torch.bfloat16)
    found = quack.input_gradient_dswiglu(dy, w, h)
    for ours, want in zip(found, gated_gradients(dy.double(), w.double(), h.double()), strict=True):
        assert torch.equal(ours, want.bfloat16())


# ---- where tensors lie ------------------------------------------------------------------------------------------


def aligned(t):
    """Rows of a wider tensor with equal numbers, which loads can still read."""
    return torch.cat((t, t[..., :8]), -1)[..., : t.shape[-1]] if t.dim() > 1 else t


def overlapping(t):
    """Each row, and each number of a bias, is the first one."""
    return t[..., :1, :].expand(t.shape) if t.dim() > 1 else t[:1].expand(t.shape)


def is_inside(part, whole):
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def reads(package):
    """Tensors that the last call read, by their names here."""
    name, given = package.calls[-1]
    if name == "gelu_of_sum":
        return {"x": given["A"], "w": given["B"], "b": given["bias"]}
    return {"w": given["A"], "dy": given["B"], "h": given["C"]}


@pytest.mark.parametrize("change", [aligned, odd, behind, turned, overlapping])
@pytest.mark.parametrize("rows", [(1,), (48, 3)])
def test_what_loads_can_read_is_read_where_it_lies_and_the_rest_is_copied(rows, change, package):
    given = dict(zip(("x", "w", "b", "dy", "h", "wide"), all_tensors(rows, 136, 72), strict=True))
    for name in given:
        changed = given | {name: change(given[name])}
        before = {other: t.clone() for other, t in changed.items()}
        for k, (make, wanted) in enumerate(results(*changed.values())):
            for ours, want in zip(make(), wanted, strict=True):
                assert_close(ours.double(), want)
            for other, read in reads(package).items():
                other = "wide" if (other, k) == ("h", 2) else other
                if other != name or change is aligned:
                    assert is_inside(read, changed[other]), other
        assert is_inside(package.calls[-1][1]["up"], reads(package)["h"])
        assert all(torch.equal(t, before[other]) for other, t in changed.items())


def test_one_row_of_an_odd_stride(package):
    """PyTorch calls it contiguous, whatever the stride of its one row; loads do not."""
    x, w, b, dy, h = tensors((1,), 136, 72)
    *_, wide = gated_tensors((1,), 136, 72)

    def results(x, dy, h, wide):
        backward = quack.input_gradient_dgelu_sum(dy, w, h), quack.input_gradient_dswiglu(dy, w, wide)
        return quack.linear_bias_gelu_aux(x, w, b), *backward

    want = results(x, dy, h, wide)
    for stride in (0, 1, 8, 137):
        strided = [torch.cat((t, t), -1).as_strided(t.shape, (stride, 1)) for t in (x, dy, h, wide)]
        assert all(t.is_contiguous() for t in strided)
        found = results(*strided)
        assert all(torch.equal(a, c) for a, c in zip(itertools.chain(*found), itertools.chain(*want), strict=True))


# ---- the package ------------------------------------------------------------------------------------------------


def test_the_package_in_place_is_usable(package):
    assert quack.PACKAGE.missing() is None and quack.unusable() is None and package.calls == []


def test_functions_that_changed_are_a_reason(package, monkeypatch):
    class Other:
        def plan(self, A, B, C=None, *, out, tuned=True, **operands):  # noqa: N803
            raise AssertionError

    monkeypatch.setattr(package.modules[EPILOGUES], "gelu_of_sum", Other())
    monkeypatch.setattr(package.modules[EPILOGUES], "dgelu_with_sum", lambda A, B: None)  # noqa: N803
    monkeypatch.delattr(package.modules[CONFIG], "GemmConfig")
    assert quack.unusable() == (
        "quack-kernels 0.6.5 is not as it was in 0.6.5: it has no GemmConfig; gelu_of_sum.plan takes no config; "
        "it has no dgelu_with_sum.plan"
    )


def test_what_is_asked_of_a_function_is_what_it_is_given(package, monkeypatch):
    x, w, b, dy, h = tensors((3,), 16, 24)
    taken = quack._TAKEN | quack._TAKEN_BY_GATES
    given = {}

    def noted(key, owner, name):
        call = getattr(owner, name)
        signature = inspect.signature(call)

        def called(*args, **named):
            given.setdefault(key, set()).update(set(signature.bind(*args, **named).arguments) - {"self"})
            return call(*args, **named)

        monkeypatch.setattr(owner, name, called)

    for module, name in taken:
        *owners, last = name.split(".")
        noted(
            (module, name),
            operator.attrgetter(*owners)(package.modules[module]) if owners else package.modules[module],
            last,
        )
    quack.linear_bias_gelu_aux(x, w, b)
    quack.input_gradient_dgelu_sum(dy, w, h)
    quack.input_gradient_dswiglu(*gated_tensors((3,), 16, 24))
    given[EPILOGUES, "gelu_of_sum.plan"].add("C")  # None
    given[EPILOGUES, "dgelu_with_sum.plan"].add("operands")  # there are none
    assert given == {key: set(names) for key, names in taken.items()}


def test_a_form_is_planned_once_and_its_scratch_is_new_in_each_call(package, monkeypatch):
    _, w, _, dy, h = tensors((3,), 16, 24)
    seen = []
    run = fake_quack.EpiPlan.run

    def watched(plan, *args, scratch, **named):
        assert plan.scratch == {}
        seen.append(scratch["total"])
        run(plan, *args, scratch=scratch, **named)

    monkeypatch.setattr(fake_quack.EpiPlan, "run", watched)
    for _ in range(3):
        quack.input_gradient_dgelu_sum(dy, w, h)
    assert package.plans == ["dgelu_with_sum"] and len({t.data_ptr() for t in seen}) == 3
    for _, w, _, dy, h in (tensors((4,), 16, 24), tensors((3,), 16, 24, torch.bfloat16)):
        quack.input_gradient_dgelu_sum(dy, w, h)
    assert package.plans == ["dgelu_with_sum"] * 3 and len(quack.runs) == 3


def test_what_fails_in_a_run_is_raised_in_words(package):
    x, w, b, dy, h = tensors((3, 2), 16, 24)
    for run, words in (
        (lambda: quack.linear_bias_gelu(x, w, b), r"x W\^T \+ b failed for \[6, 16\] and \[24, 16\]"),
        (
            lambda: quack.input_gradient_dgelu_sum(dy, w, h),
            r"\(dy W\) \* gelu'\(h\) failed for \[6, 24\] and \[24, 16\]",
        ),
        (
            lambda: quack.input_gradient_dswiglu(*gated_tensors((3, 2), 16, 24)),
            r"\(dy W\) \* swiglu'\(h\) failed for \[6, 24\] and \[24, 16\]",
        ),
    ):
        package.fails = ValueError("no such tile")
        names = rf"disabled\({quack._FUSIONS}\) plans without it"
        with pytest.raises(
            RuntimeError, match=rf"quack-kernels's product {words}, .*ValueError: no such tile; .*{names}"
        ):
            run()
        package.fails = torch.OutOfMemoryError("full")
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            run()
    assert not len(quack.runs)


E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SIZES_8 = (((1,), 64, 64), ((3, 7), 144, 80), ((), 16, 32), ((129,), 16, 48), ((0, 4), 64, 128), ((2, 0), 32, 16))


@pytest.fixture
def package_8(monkeypatch):
    """A package in place."""
    yield fake_quack_float8.in_place(monkeypatch)
    fake_quack_float8.forget()


def tensors_8(rows, inner, outer):
    """x, W, what they are multiplied by, and b."""
    rng = torch.Generator().manual_seed(3)
    x, w, b = (torch.randn(*shape, generator=rng) for shape in ((*rows, inner), (outer, inner), (outer,)))
    a = torch.tensor(1 / 90)
    return (x * 90).to(E4M3), (w * 90).to(E4M3), a, a * inner**-0.5, b.to(BF16)


@pytest.mark.parametrize(("rows", "inner", "outer"), SIZES_8)
def test_values_of_8_bits(rows, inner, outer, package_8):
    given, scale, amax = tensors_8(rows, inner, outer), torch.tensor(300.0), torch.tensor(0.5)
    x, w, a, b, bias = (t.double() for t in given)
    exact = x @ w.t() * (a * b) + bias
    h = quack.linear_bias_8(*given)
    assert h.dtype == BF16 and torch.equal(h, exact.bfloat16())
    addend = 10 * torch.randn(h.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    total = quack.linear_bias_add_8(*given, addend)
    assert total.dtype == BF16 and torch.equal(total, (exact + addend.double()).bfloat16())
    y, before = quack.linear_bias_gelu_aux_8(*given, scale, amax)
    assert torch.equal(before, h) and y.dtype == E4M3 and y.shape == h.shape
    wanted = gelu(h.double())
    assert torch.equal(y.float(), (wanted * scale).float().clamp(-448, 448).to(E4M3).float())
    assert torch.equal(quack.linear_bias_gelu_8(*given, scale).float(), y.float())
    assert amax == max([0.5, *wanted.abs().flatten().tolist()]) or torch.isclose(amax.double(), wanted.abs().max())
    assert all(t.is_contiguous() for t in (h, total, y, before)) and len(package_8.calls) == (4 if h.numel() else 0)


def test_a_form_of_8_bits_is_planned_once_whatever_lies_in_it(package_8):
    given, scale = tensors_8((5, 3), 64, 48), torch.tensor(1.0)
    for _ in range(2):
        quack.linear_bias_8(*given)
        quack.linear_bias_add_8(*given, torch.zeros(5, 3, 48, dtype=BF16))
        quack.linear_bias_gelu_8(*given, scale)
        quack.linear_bias_gelu_aux_8(*given, scale, torch.zeros(()))
    first = ["sum_with_bias", "sum_with_bias_and_addend", "gelu_in_8_bits_alone", "gelu_in_8_bits"]
    assert package_8.plans == first
    quack.linear_bias_8(*tensors_8((5, 4), 64, 48))
    assert len(package_8.plans) == 5


@pytest.mark.parametrize("change", [odd, behind, turned])
def test_what_loads_of_8_bits_cannot_read_is_copied(change, package_8):
    x, w, a, b, bias = tensors_8((48, 3), 144, 80)
    want = quack.linear_bias_8(x, w, a, b, bias)
    for given in ((change(x), w, bias), (x, change(w), bias), (x, w, change(bias))):
        assert torch.equal(quack.linear_bias_8(*given[:2], a, b, given[2]), want)
    assert len(package_8.calls) == 4
    addend = torch.randn(48, 3, 80).bfloat16()
    both = quack.linear_bias_add_8(x, w, a, b, bias, addend)
    assert torch.equal(quack.linear_bias_add_8(x, w, a, b, bias, change(addend)), both)


def test_an_error_in_8_bits_says_what_plans_without_it(package_8):
    package_8.fails = ValueError("no such kernel")
    with pytest.raises(RuntimeError, match=r"product x W\^T \+ b failed for .*float8_matmul_bias_quack"):
        quack.linear_bias_8(*tensors_8((2,), 16, 16))


def test_a_package_of_8_bits_that_has_changed_is_refused(package_8, monkeypatch):
    assert quack.unusable_8() is None
    host = package_8.modules[quack._HOST]
    for change, words in (
        (lambda: monkeypatch.delattr(host, "run_gemm_epi_plan"), "it has no run_gemm_epi_plan"),
        (lambda: setattr(host, "run_gemm_epi_plan", lambda plan, A, B, D, C: None), "takes no epi_values"),  # noqa: N803
    ):
        change()
        quack.unusable_8.cache_clear()
        assert words in quack.unusable_8()
    host.run_gemm_epi_plan = package_8.run_gemm_epi_plan

    class Kernels:
        def __init__(self, fp8_fast_accum=False):
            self.fast = fp8_fast_accum

    package_8.modules[quack._HOPPER].GemmSm90 = Kernels
    quack.unusable_8.cache_clear()
    assert "has no fp8_slow_accum" in quack.unusable_8()
