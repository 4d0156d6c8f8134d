"""Operators that a torch lacks, or has with another meaning."""

from __future__ import annotations

import torch

from te_fuser.kernels.attention import PROVIDERS
from te_fuser.kernels.attention.provider import fits, why_no_operator
from tests.kernels.attention.cases import CPU, H200


def test_schemas_are_compared():
    for provider in PROVIDERS:
        assert provider._unavailable is None
    known = "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key) -> Tensor"
    assert "has changed in torch" in why_no_operator(known)
    assert "has no aten::_no_such_attention" in why_no_operator("aten::_no_such_attention(Tensor q) -> Tensor")
    parse = torch._C.parse_schema
    base = parse("aten::f(Tensor q, *, float? scale=None) -> (Tensor out)")
    assert fits(parse("aten::f(Tensor q, *, float? scale=None, int? more=None) -> Tensor"), base)
    for other in (
        "aten::f(Tensor q, *, int more, float? scale=None) -> Tensor",
        "aten::f(Tensor q, float? scale=None) -> Tensor",
        "aten::f(Tensor q, *, float? scale=None) -> (Tensor, Tensor)",
        "aten::f(Tensor? q, *, float? scale=None) -> Tensor",
        "aten::f(Tensor q, Tensor? k=None, *, float? scale=None) -> Tensor",
    ):
        assert not fits(parse(other), base)


def test_an_unavailable_operator_is_a_reason():
    class Changed(type(CPU)):
        schemas = ("aten::_no_such_attention(Tensor q) -> Tensor", CPU.schemas[1])

    assert "has no aten::_no_such_attention" in Changed().reason_not(H200)
