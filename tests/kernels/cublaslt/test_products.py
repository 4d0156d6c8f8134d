"""Products by cuBLASLt on machines without a GPU: a driver that counts, and a library that computes on the CPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.cpp_extension import CUDA_HOME

from te_fuser import _native
from te_fuser.codegen import nvrtc
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.cublaslt.tuned import ProductProblem
from te_fuser.kernels.cublaslt.tuning import example
from tests.fake_cublaslt import FakeCublasLt
from tests.fake_cuda import CXX, FakeDriver
from tests.needs import needs_compiler
from tests.threads import in_threads
from tests.twins import tensor


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to the float64 result, rounded once."""
    eps, scale = torch.finfo(got.dtype).eps, float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want, rtol=2 * eps, atol=2 * eps * scale)


ROWS, IN, OUT = 7, 24, 16
DTYPES = (torch.float32, torch.bfloat16)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(dy, x, approximate="tanh")


# ---- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(ROWS,), (2, 3), (), (0,), (2, 0)])
def test_values(cublaslt: FakeCublasLt, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    x, w, dy = (
        values(*rows, IN, dtype=dtype),
        values(OUT, IN, dtype=dtype, seed=1),
        values(*rows, OUT, dtype=dtype, seed=2),
    )
    b, other = values(OUT, dtype=dtype, seed=3), values(*rows, OUT, dtype=dtype, seed=4)
    X, W, DY, B, OTHER = (t.double() for t in (x, w, dy, b, other))
    xs, dys = X.reshape(-1, IN), DY.reshape(-1, OUT)
    close(products.multiply("forward", x, w), X @ W.T)
    close(products.multiply("forward_bias", x, w, b), X @ W.T + B)
    close(products.multiply("forward_add", x, w, other), X @ W.T + OTHER)
    close(products.multiply("forward_bias_add", x, w, other, b), X @ W.T + B + OTHER)
    close(products.multiply("forward_bias_relu", x, w, b), (X @ W.T + B).relu())
    close(products.multiply("forward_bias_gelu", x, w, b), gelu(X @ W.T + B))
    y, h = products.multiply("forward_bias_gelu_aux", x, w, b)
    close(h, X @ W.T + B)
    close(y, gelu(h.double()))
    close(products.multiply("dgrad", dy, w), DY @ W)
    before = values(*rows, IN, dtype=dtype, seed=5)
    close(products.multiply("dgrad_dgelu", dy, w, before), gelu_backward(DY @ W, before.double()))
    close(products.multiply("wgrad", dy, x), dys.T @ xs)
    dw, db = products.multiply("wgrad_sum", dy, x)
    close(dw, dys.T @ xs)
    close(db, dys.sum(0))
    if x.numel():
        assert cublaslt.products == 11


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [torch.float32, None])
def test_accumulation(cublaslt: FakeCublasLt, dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    x, dy = values(2, 5, IN, dtype=dtype), values(2, 5, OUT, dtype=dtype, seed=1)
    held = values(OUT, IN, dtype=out_dtype or dtype, seed=2)
    want = held.double() + dy.double().reshape(-1, OUT).T @ x.double().reshape(-1, IN)
    version = held._version
    products.put_weight_gradient(dy, x, held)
    close(held, want)
    assert held._version == version + 1
    before = held.clone()
    products.put_weight_gradient(dy[:0], x[:0], held)
    assert torch.equal(held, before)


def strided(t: torch.Tensor, apart: int = 5) -> dict[str, torch.Tensor]:
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + apart), torch.nan)
    wide[..., : t.shape[-1]] = t
    every_other = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan)
    every_other[..., ::2] = t
    return {
        "rows apart": wide[..., : t.shape[-1]],
        "transposed": t.mT.contiguous().mT if t.dim() > 1 else every_other[..., ::2],
        "every other column": every_other[..., ::2],
        "misaligned": torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    }


@pytest.mark.parametrize("how", strided(torch.zeros(2, 2)))
def test_strides(cublaslt: FakeCublasLt, how: str) -> None:
    for shape in ((ROWS, IN), (2, 3, IN)):
        x, w, b = values(*shape), values(OUT, IN, seed=1), values(OUT, seed=3)
        dy = values(*shape[:-1], OUT, seed=2)
        y = products.multiply("forward_bias_gelu_aux", x, w, b)
        dw = products.multiply("wgrad_sum", dy, x)
        dx = products.multiply("dgrad_dgelu", dy, w, x)
        sx, sw, sdy = (strided(t)[how] for t in (x, w, dy))
        sb = strided(b[None])["misaligned"][0]
        for got, want in (
            (products.multiply("forward_bias_gelu_aux", sx, sw, sb), y),
            (products.multiply("wgrad_sum", sdy, sx), dw),
            ((products.multiply("dgrad_dgelu", sdy, sw, sx),), (dx,)),
        ):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_stride_zero_and_single_rows(cublaslt: FakeCublasLt) -> None:
    w = values(OUT, IN)
    for x in (
        values(1, IN).expand(5, IN),
        torch.ones(()).expand(3, 4, IN),
        values(IN)[None, None],
        values(4, 1).expand(4, IN),
    ):
        close(products.multiply("forward", x, w), x.double() @ w.double().T)
        dy = values(*x.shape[:-1], OUT, seed=1)
        close(products.multiply("wgrad", dy, x), dy.double().reshape(-1, OUT).T @ x.double().reshape(-1, IN))
    for narrow in (values(6, 1), values(6, 2)[:, :1], values(1, 6).mT):
        close(products.multiply("forward", narrow, values(OUT, 1)), narrow.double() @ values(OUT, 1).double().T)


def test_precision_of_float32_is_pytorchs(cublaslt: FakeCublasLt) -> None:
    x, w = values(ROWS, IN), values(OUT, IN)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed, compute in ((True, 77), (False, 68)):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            products.multiply("forward", x, w)
            assert cublaslt.last_compute == compute
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# ---- problems and algorithms ------------------------------------------------------------------------------------


def test_a_problem_is_prepared_once(cublaslt: FakeCublasLt) -> None:
    product, w = products.configured("forward", torch.float32, torch.float32), values(OUT, IN)
    calls = [(values(rows, IN), w, torch.empty(rows, OUT)) for rows in (ROWS, 9)]
    for k in (0, 0, 1, 0, 1):
        product(calls[k])
    assert (cublaslt.heuristics, cublaslt.products) == (2, 5)
    product((strided(values(ROWS, IN))["rows apart"], w, calls[0][2]))
    product((calls[0][0], strided(w)["misaligned"], calls[0][2]))
    assert cublaslt.heuristics == 4


def test_algorithms_are_listed_and_chosen(cublaslt: FakeCublasLt) -> None:
    product = products.configured("dgrad", torch.float32, torch.float32)
    call = values(ROWS, OUT), values(OUT, IN), torch.empty(ROWS, IN)
    product(call)
    assert cublaslt.last_workspace == 1024
    problem = product.problem(call)
    assert product.problems() == {problem: 1} and problem[:4] == (0, ROWS, IN, OUT)
    found = product.algorithms(problem)
    assert [(len(a), w) for a, w, _ in found] == [(64, 1024), (64, 2048), (64, 3072)]
    assert product.algorithms(problem, 2) == found[:2]
    product.choose(problem, found[2][0])
    product(call)
    assert cublaslt.last_workspace == 3072
    close(call[2], call[0].double() @ call[1].double())
    with pytest.raises(ValueError, match="an algorithm is 64 bytes"):
        product.choose(problem, b"short")
    with pytest.raises(RuntimeError, match=r"a \[7, 16\] times b \[16, 24\] in float32.*does not suit"):
        product.choose(problem, bytes([9]) + bytes(63))
    with pytest.raises(RuntimeError, match=r"a \[8, 16\] times b \[16, 24\] in float32.*never met such a problem"):
        product.algorithms((0, ROWS + 1, *problem[2:]))
    with pytest.raises(TypeError, match="a problem as problems"):
        product.choose(call, found[0][0])  # type: ignore[arg-type]


@pytest.mark.parametrize("kibibytes", [1, 3])
def test_products_of_a_program_share_their_workspace(cublaslt: FakeCublasLt, kibibytes: int) -> None:
    """The second takes the first one's where that is large enough; the library refuses too small ones."""
    forward, dgrad = (products.configured(kind, torch.float32, torch.float32) for kind in ("forward", "dgrad"))
    x, w, places, held = values(ROWS, IN), values(OUT, IN), [], []
    problem = dgrad.problem((forward.make(x, w), w, torch.empty(ROWS, IN)))
    dgrad.choose(problem, dgrad.algorithms(problem)[kibibytes - 1][0])

    def look(slots: list[Any]) -> None:
        places.append(cublaslt.last_workspace_at)
        held.append([torch.empty(1024 * k, dtype=torch.uint8) for k in (1, 1, 3, 3)])  # where it was, if it went back

    def product(kind: Any, *slots: int) -> _native.FunctionStep:
        return _native.FunctionStep("product", kind.make, slots[:2], slots[2:])

    steps = [product(forward, 0, 1, 2), look, product(dgrad, 2, 1, 3), look, product(forward, 3, 1, 4), look]
    slots = [x, w, None, None, None]
    _native.Program([(step, []) for step in steps]).run(slots)
    close(slots[3], x.double() @ w.double().t() @ w.double())
    close(slots[4], slots[3].double() @ w.double().t())
    assert places[1] == places[2] and (kibibytes == 3 or places[0] == places[1])


def test_what_the_library_refuses_is_known_before(cublaslt: FakeCublasLt) -> None:
    cublaslt.refused = 192
    words = products.refusal("dgrad_dgelu", torch.float32, ROWS, IN, OUT, torch.device("cuda", 0))
    assert (
        words is not None and "epilogue dgelu: cuBLASLt has no algorithm for it: CUBLAS_STATUS_NOT_SUPPORTED" in words
    )
    with pytest.raises(RuntimeError, match="no algorithm for it"):
        products.multiply("dgrad_dgelu", values(ROWS, OUT), values(OUT, IN), values(ROWS, IN))
    assert cublaslt.products == 0
    for kind in products.KINDS:
        if kind != "dgrad_dgelu":
            assert products.refusal(kind, torch.float32, ROWS, IN, OUT, torch.device("cuda", 0)) is None
    assert products.refusal("dgrad_dgelu", torch.float32, 0, IN, OUT, torch.device("cuda", 0)) is None


@pytest.mark.parametrize("kind", products.KINDS)
def test_what_planning_asks_for_is_the_problem_of_the_first_call(cublaslt: FakeCublasLt, kind: str) -> None:
    """With tensors as a GPU's allocator gives them, nothing is left to be prepared in a call."""
    rows, n_in, n_out = ROWS, 128, 256
    sizes = products.product_sizes(kind, rows, n_in, n_out)
    assert products.refusal(kind, torch.float32, *sizes, torch.device("cuda", 0)) is None
    product = products.in_use[products.form_of(kind, torch.float32, torch.float32)]
    ((met, _),) = product.problems().items()
    problem = ProductProblem(*met)
    assert cublaslt.heuristics == 1
    product(example(product, products.form_of(kind, torch.float32, torch.float32), problem, torch.device("cpu")))
    assert cublaslt.heuristics == 1 and product.problems() == {met: 1}
    # Matrices without gaps, aligned as far as the library looks.
    x, w, dy = (rows, n_in), (n_out, n_in), (rows, n_out)
    a, b = {"forward": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}[kind.partition("_")[0]]
    assert (problem.a_stride, problem.b_stride) == (a[1], b[1])
    assert problem.out_stride == problem.c_stride == problem.n and problem.layout == 0x88880


def test_a_problem_that_never_ran_is_not_captured(cublaslt: FakeCublasLt, driver: FakeDriver) -> None:
    product = products.configured("forward", torch.float32, torch.float32)
    call = values(ROWS, IN), values(OUT, IN), torch.empty(ROWS, OUT)
    driver.capturing = 1
    with pytest.raises(RuntimeError, match="is being captured, and this problem never ran: run the model once"):
        product(call)
    driver.capturing = 0
    product.algorithms(product.problem(call))  # asked for, but not run
    driver.capturing = 1
    with pytest.raises(RuntimeError, match="never ran"):
        product(call)
    driver.capturing = 0
    product(call)
    want = call[2].clone()
    driver.capturing = 1
    product(call)
    assert torch.equal(call[2], want) and cublaslt.products == 2


def test_threads(cublaslt: FakeCublasLt) -> None:
    w, b = values(OUT, IN), values(OUT)
    inputs = [values(rows, IN, seed=rows) for rows in range(1, 9)]
    wrong: list[int] = []

    def work() -> None:
        for x in inputs * 5:
            if not torch.equal(
                products.multiply("forward_bias", x, w, b), products.multiply("forward_bias", x, w, b.clone())
            ):
                wrong.append(len(x))

    in_threads(*[work] * 4)
    assert not wrong and cublaslt.products == 4 * 8 * 5 * 2


# ---- what is missing, what is wrong -----------------------------------------------------------------------------


def test_a_missing_library_is_named() -> None:
    if torch.version.cuda is None:
        assert "PyTorch has not loaded cuBLASLt" in str(products.obstacle())
        assert str(products.obstacle()) == products.refusal("forward", torch.float32, 1, 1, 1, torch.device("cuda", 0))
    try:
        _native.set_cublaslt("/nowhere/libcublasLt.so.13")
        assert "cuBLASLt cannot be loaded: /nowhere/libcublasLt.so.13" in str(_native.cublaslt_refusal())
        _native.set_cublaslt("libm.so.6")
        assert _native.cublaslt_refusal() == "this cuBLASLt has no cublasLtGetVersion: it is too old"
        assert _native.cublaslt_version() is None
    finally:
        _native.set_cublaslt("")


def test_its_arguments_are_named() -> None:
    product = products.configured("forward_bias_gelu_aux", torch.bfloat16, torch.bfloat16)
    assert product.arguments == ("a", "b", "out", "bias", "aux")
    assert repr(product) == "<CudaMatmul matmul_forward_bias_gelu_aux, bfloat16, epilogue gelu_aux_bias>"


def wrong_calls() -> dict[str, tuple[Callable[[], object], type[Exception], str]]:
    x, w, out = values(ROWS, IN), values(OUT, IN), torch.empty(ROWS, OUT)
    forward = products.configured("forward", torch.float32, torch.float32)
    bias = products.configured("forward_bias", torch.float32, torch.float32)
    add = products.configured("forward_add", torch.float32, torch.float32)
    onto = products.configured("wgrad_onto", torch.float32, torch.float32)
    return {
        "float64": (
            lambda: products.configured("forward", torch.float64, torch.float64),
            TypeError,
            "products are in bfloat16, float16, float32, got float64",
        ),
        "few": (lambda: forward((x, w)), ValueError, "takes 3 tensors, got 2"),
        "no tuple": (lambda: forward(x), TypeError, "takes one tuple of tensors, got Tensor"),
        "no tensor": (lambda: forward((x, w, None)), TypeError, "tensor 2 must be a plain torch.Tensor"),
        "dtype": (lambda: forward((x.double(), w, out)), TypeError, "tensor 0 must be float32, got float64"),
        "sizes": (lambda: forward((x, w[:, 1:], out)), ValueError, r"a \[7, 24\] times b \[23, 16\].*do not fit"),
        "out": (lambda: forward((x, w, out[1:])), ValueError, r"out is \[6, 16\] and must be \[7, 16\]"),
        "out's strides": (
            lambda: forward((x, w, out.mT.contiguous().mT)),
            ValueError,
            "out is written and must be rows",
        ),
        "bias": (
            lambda: bias((x, w, out, values(OUT + 1))),
            ValueError,
            r"bias or sums must be \[16\], got 17 numbers",
        ),
        "addend": (lambda: add((x, w, out, out[1:])), ValueError, r"c is \[6, 16\] and must be \[7, 16\]"),
        "made": (lambda: forward.make(x), ValueError, r"make\(\) takes the 2 tensors that are read, got 1"),
        "made onto": (lambda: onto.make(x, w), ValueError, "adds to what its output holds, so give that"),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_wrong_calls_raise_before_anything_runs(cublaslt: FakeCublasLt, name: str) -> None:
    call, error, message = wrong_calls()[name]
    with pytest.raises(error, match=message):
        call()
    assert cublaslt.products == 0


def test_without_a_gpu_tensors_are_refused() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="tensor 0 must be on a CUDA device"):
            products.multiply("forward", tensor(2, 8, dtype=torch.float32).detach(), values(8, 8))


# Names here -> in the header.
FUNCTIONS = {
    "get_version": "GetVersion", "create": "Create",
    "description_create": "MatmulDescCreate", "description_destroy": "MatmulDescDestroy",
    "description_set": "MatmulDescSetAttribute", "layout_create": "MatrixLayoutCreate",
    "layout_destroy": "MatrixLayoutDestroy", "preference_create": "MatmulPreferenceCreate",
    "preference_destroy": "MatmulPreferenceDestroy", "preference_set": "MatmulPreferenceSetAttribute",
    "get_heuristic": "MatmulAlgoGetHeuristic", "check_algorithm": "MatmulAlgoCheck", "matmul": "Matmul",
}  # fmt: skip
NUMBERS = {
    "success": "CUBLAS_STATUS_SUCCESS", "not_supported": "CUBLAS_STATUS_NOT_SUPPORTED",
    "compute_32f": "CUBLAS_COMPUTE_32F", "compute_32f_fast_tf32": "CUBLAS_COMPUTE_32F_FAST_TF32",
    "r_32f": "CUDA_R_32F", "r_16f": "CUDA_R_16F", "r_16bf": "CUDA_R_16BF",
    "r_8f_e4m3": "CUDA_R_8F_E4M3", "r_8f_e5m2": "CUDA_R_8F_E5M2",
    "desc_a_scale_pointer": "CUBLASLT_MATMUL_DESC_A_SCALE_POINTER",
    "desc_b_scale_pointer": "CUBLASLT_MATMUL_DESC_B_SCALE_POINTER",
    "desc_fast_accum": "CUBLASLT_MATMUL_DESC_FAST_ACCUM",
    "op_n": "CUBLAS_OP_N", "op_t": "CUBLAS_OP_T",
    **{f"desc_{n}": f"CUBLASLT_MATMUL_DESC_{n.upper()}" for n in ("transa", "transb", "epilogue", "bias_pointer")},
    "desc_aux_pointer": "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER",
    "desc_aux_ld": "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD",
    **{f"pref_{n}": f"CUBLASLT_MATMUL_PREF_{n.upper()}" for n in (
        "max_workspace_bytes", *(f"min_alignment_{t}_bytes" for t in "abcd"))},
    **{f"epilogue_{n}": f"CUBLASLT_EPILOGUE_{n.upper()}" for n in (
        "default", "bias", "relu_bias", "gelu_bias", "gelu_aux_bias", "dgelu", "bgrada", "bgradb")},
}  # fmt: skip


@needs_compiler
def test_the_declarations_are_the_librarys(tmp_path: Path) -> None:
    """The hand-written numbers and argument lists are those of NVIDIA's own header."""
    toolkit = [Path(CUDA_HOME) / "include"] if CUDA_HOME else []
    folders = [Path(f) for f in (*nvrtc.cuda_include_folders(), *toolkit)]
    for header in ("cublasLt.h", "crt/host_defines.h"):  # some packages have the one without the other
        if not any((f / header).exists() for f in folders):
            pytest.skip(f"no {header}")
    checks = [f"static_assert(same(&cublasLt{theirs}, te::CublasLt{{}}.{ours}));" for ours, theirs in FUNCTIONS.items()]
    checks += [f"static_assert((int)te::CublasLt::{ours} == (int){theirs});" for ours, theirs in NUMBERS.items()]
    source = tmp_path / "declarations.cpp"
    source.write_text(
        """
        #include <cublasLt.h>
        #include <cstddef>
        #include <type_traits>
        #include "cublaslt.h"
        template <class T> struct Plain {
          using type = std::conditional_t<std::is_enum_v<T>, int, T>;
        };
        template <class T> struct Plain<T*> { using type = void*; };
        template <class T> using plain = typename Plain<T>::type;
        template <class R, class S, class... A, class... B>
        constexpr bool same(R (*)(A...), S (*)(B...)) {
          return std::is_same_v<plain<R>, plain<S>> && (std::is_same_v<plain<A>, plain<B>> && ...);
        }
        static_assert(sizeof(te::CublasLt::Algorithm) == sizeof(cublasLtMatmulAlgo_t));
        static_assert(sizeof(te::CublasLt::Candidate) == sizeof(cublasLtMatmulHeuristicResult_t));
        static_assert(offsetof(te::CublasLt::Candidate, workspace) ==
                      offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
        static_assert(offsetof(te::CublasLt::Candidate, waves) ==
                      offsetof(cublasLtMatmulHeuristicResult_t, wavesCount));
        """
        + "\n".join(checks)
    )
    ours = Path(__file__).parents[3] / "csrc"
    includes = [f"-I{f}" for f in (*folders, ours)]
    done = subprocess.run(
        [str(CXX), "-std=c++17", "-fsyntax-only", *includes, str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:3000]
