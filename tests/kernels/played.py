"""PyTorch's operators for attention on a GPU, played by plain math."""

from __future__ import annotations

import torch


class Played:
    """Stands for one operator: takes arguments as its schema says, and computes in PyTorch."""

    def __init__(self, provider, index):
        self.schema = torch._C.parse_schema(provider.schemas[index])
        self.grouped = provider.name != "cuda_efficient"

    def __call__(self, *args, **kwargs):
        positional = [a for a in self.schema.arguments if not a.kwarg_only]
        assert len(args) <= len(positional)
        given = {a.name: value for a, value in zip(positional, args, strict=False)} | kwargs
        for a in self.schema.arguments:
            assert a.name in given or a.has_default_value(), a.name
            value = given.setdefault(a.name, a.default_value)
            kind = {"Tensor": torch.Tensor, "float": float, "bool": bool, "int": int}.get(str(a.type), object)
            may_be_nothing = a.name in ("cum_seq_q", "cum_seq_k", "attn_bias")
            assert isinstance(value, kind) or (value is None and may_be_nothing), (a.name, value)
        return self.computed(given)

    def heads(self, given):
        q, k, v, bias = given["query"], given["key"], given["value"], given.get("attn_bias")
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert self.grouped or q.shape[1] == k.shape[1] == v.shape[1]
        if bias is not None:
            assert bias.dtype == q.dtype and bias.dim() == 4 and bias.shape[-1] == q.shape[2] and bias.stride(-1) == 1
            assert bias.isfinite().all() and all(
                s % 16 == 0 for s, n in zip(bias.stride()[:3], bias.shape, strict=False)
            )
            assert self.grouped or bias.shape == (*q.shape[:3], q.shape[2])
        q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
        with torch.enable_grad():
            repeats = q.shape[1] // k.shape[1]
            scores = q @ k.repeat_interleave(repeats, 1).mT * given["scale"]
            if bias is not None:
                scores = scores + bias
            if given["is_causal"]:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
            return (q, k, v), scores.softmax(-1) @ v.repeat_interleave(repeats, 1), scores.logsumexp(-1)

    def computed(self, given):
        parts, out, logsumexp = self.heads(given)
        names = [r.name for r in self.schema.returns]
        if "philox_seed" not in given:
            seeds = {"philox_seed": torch.tensor(7), "rng_state": torch.tensor(7), "philox_offset": torch.tensor(9)}
            seeds["unused"] = torch.tensor(9)
            sums = {"output": out.detach(), "logsumexp": logsumexp.detach(), "log_sumexp": logsumexp.detach()}
            lengths = {"max_q": out.shape[2], "max_k": out.shape[2]}
            return tuple({**sums, **seeds, **lengths}.get(name) for name in names)
        assert given["philox_seed"] == 7 and given["philox_offset"] == 9
        torch.testing.assert_close(given["logsumexp"], logsumexp.detach())
        dout = given.get("grad_out", given.get("grad_out_"))
        hidden_anyway = given.get("attn_bias") is not None
        assert hidden_anyway or torch.equal(given["out"], out.detach())
        assert self.grouped or given["out"].transpose(1, 2).is_contiguous()
        return (*torch.autograd.grad(out, parts, dout), *(None for _ in names[3:]))
