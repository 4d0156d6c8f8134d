"""Algorithms of products that were measured to be the best in a model, on disk: by GPU, library version and problem.

A choice holds for one version of cuBLASLt: another one's candidates are measured anew. What the library refuses all the
same is dropped, with its words, and the product runs by the library's first guess.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from te_fuser import _native
from te_fuser.codegen.cache_files import Entries, EntryFile
from te_fuser.dtypes import FLOAT8, text_of

_BYTES = 64  # of an algorithm


@dataclass(frozen=True)
class ProductForm:
    """A product as it is configured: what it is called, and what the native type calls so."""

    kind: str
    dtype: torch.dtype  # of a
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    transpose_a: bool = False
    transpose_b: bool = False
    epilogue: str = "none"
    add: str = "none"
    fast_accumulation: bool = False
    scales_a: str = "one"
    scales_b: str = "one"

    @property
    def in_8_bits(self) -> bool:
        """True where its factors are numbers of 8 bits, behind which their scales come."""
        return self.dtype in FLOAT8.values()

    @property
    def by_rows(self) -> bool:
        """True where each row of the result depends on no other row of the first factor."""
        return not self.transpose_a and self.scales_a == "one" and not self.epilogue.endswith("bgrad")

    def giving(self, dtype: torch.dtype) -> ProductForm:
        """Copy of the form with another dtype of the result."""
        return self if dtype == self.out_dtype else replace(self, out_dtype=dtype)

    def __str__(self) -> str:
        """Text that tells it from others, for reports and files."""
        if not self.in_8_bits:
            return f"{self.kind} {' to '.join(dict.fromkeys(map(text_of, (self.dtype, self.out_dtype))))}"
        lying = {(False, True): "", (False, False): " by rows", (True, False): " by rows of both"}
        how = lying[self.transpose_a, self.transpose_b] + (" fast" if self.fast_accumulation else "")
        blocks = f" of {self.scales_a} x {self.scales_b}" if self.scales_a != "one" else ""
        factors = f"{text_of(self.dtype)} x {text_of(self.b_dtype)}"
        return f"{self.kind} {factors}{blocks}{how} to {text_of(self.out_dtype)}"


class ProductProblem(NamedTuple):
    """A product's problem as the native runtime has it, with the device first: out[m, n] = a[m, k] b[k, n].

    Attributes:
        a_stride, b_stride, out_stride, c_stride: elements between neighbouring rows (or columns, where they lie so).
        aux_stride: of what an epilogue reads or writes beside the output; 0: there is none.
        layout: a, b transposed (bits 0, 1), TensorFloat-32 (bit 2), four bits each for the alignments of a, b, c, out.
    """

    device: int
    m: int
    n: int
    k: int
    a_stride: int
    b_stride: int
    out_stride: int
    c_stride: int
    aux_stride: int
    layout: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def flipped(self) -> tuple[bool, bool]:
        """True for each of a, b that lies transposed."""
        return bool(self.layout & 1), bool(self.layout & 2)

    def alignment(self, role: str) -> int:
        """Bytes that the address of "a", "b", "c" or "out" is a multiple of, up to 256."""
        return 1 << (self.layout >> {"a": 4, "b": 8, "c": 12, "out": 16}[role] & 15)

    def key(self, form: ProductForm) -> str:
        """Key of what an algorithm depends on, whichever of several equal GPUs it runs on."""
        strides = ",".join(map(str, self[4:9]))
        return f"cuBLASLt {_native.cublaslt_version()}: {form} {self} strides {strides} layout {self.layout:x}"


@dataclass(frozen=True)
class TunedAlgorithm:
    """Entry of a problem: the algorithm, or why it was dropped."""

    algorithm: bytes = b""
    candidate: int = 0
    dropped: str = ""

    def __str__(self) -> str:
        return f"first heuristic, since {self.dropped}" if self.dropped else f"tuned: candidate {self.candidate}"


class TunedProducts(EntryFile):
    """The algorithms for one kind of GPU in one file."""

    suffix = ".products.json"

    def find(self, key: str) -> TunedAlgorithm | None:
        """Entry of a problem, or None; a damaged one counts as none."""
        entry = self.entries().get(key, {})
        candidate, dropped = entry.get("candidate"), entry.get("dropped", "")
        with contextlib.suppress(TypeError, ValueError):
            algorithm = bytes.fromhex(entry.get("algorithm", ""))
            if isinstance(candidate, int) and isinstance(dropped, str) and (dropped or len(algorithm) == _BYTES):
                return TunedAlgorithm(algorithm, candidate, dropped)
        return None

    def put(self, key: str, algorithm: bytes, candidate: int, ratio: float) -> None:
        """Keep the algorithm of a problem, and the gain in the model's time."""
        found = {"algorithm": algorithm.hex(), "candidate": candidate, "ratio": ratio}
        self.change(lambda entries: entries.update({key: found}))

    def drop(self, key: str, why: str) -> None:
        """Keep why the algorithm of a problem is not taken any more."""
        self.change(lambda entries: entries.setdefault(key, {"candidate": 0}).update(dropped=why))

    def forget(self, key: str) -> None:
        """Keep nothing for a problem. OSError when the file cannot be written."""

        def without(entries: Entries) -> None:
            entries.pop(key, None)

        if key in self.entries():
            self.change(without)


def store_on(device: int) -> TunedProducts | None:
    """The store for the GPU of that number; None where PyTorch knows no such GPU."""
    return TunedProducts.of(torch.cuda.get_device_name(device)) if device < torch.cuda.device_count() else None


def found_for(form: ProductForm, problem: ProductProblem) -> TunedAlgorithm | None:
    """Entry of a problem of a product, or None."""
    store = store_on(problem.device)
    return store.find(problem.key(form)) if store is not None else None


def algorithm_of(form: ProductForm, problem: tuple[int, ...]) -> bytes | None:
    """The algorithm to run a problem by; None: the library's first guess."""
    found = found_for(form, ProductProblem(*problem))
    return found.algorithm if found is not None and not found.dropped else None


def drop(form: ProductForm, problem: tuple[int, ...], why: str) -> None:
    """Hear from the native runtime that the library refused what was kept."""
    met = ProductProblem(*problem)
    store = store_on(met.device)
    with contextlib.suppress(OSError):  # a folder that cannot be written costs only another refusal
        if store is not None:
            store.drop(met.key(form), f"cuBLASLt refused the tuned algorithm: {why}")
