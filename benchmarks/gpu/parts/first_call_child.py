"""One first call of the seed layer in this process, timed; prints JSON. The benchmark's part first-call runs it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import time
from pathlib import Path

START = time.perf_counter()

import torch  # noqa: E402

import te_fuser  # noqa: E402
from benchmarks import models  # noqa: E402
from benchmarks.models import Attention  # noqa: E402


def main() -> None:
    """Make the layer and its input, then take the time of its first two steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels")
    parser.add_argument("--eager", action="store_true", help="the twin in torch.nn instead")
    parser.add_argument("--without", nargs="*", default=(), metavar="FUSION", help="plan without these")
    chosen = parser.parse_args()
    te_fuser.config.cache_dir = chosen.cache
    imported = time.perf_counter() - START
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # as backward(dy) does, whatever the model
    attention = Attention(128, chosen.positions, dropout=0.1)
    with torch.device(chosen.device):
        fallback = "error" if chosen.device == "cuda" else "warn"  # PyTorch's operations are not what is timed
        pair = models.gpt(0.1, attention)(chosen.tokens, chosen.hidden, fallback=fallback)
        model = (pair.eager if chosen.eager else pair.fused).to(torch.bfloat16)
        x = torch.randn(pair.shape, dtype=torch.bfloat16).requires_grad_()
        dy = torch.randn_like(x)
    _wait(x)
    made = time.perf_counter() - START
    seconds = []
    with te_fuser.fusions.disabled(*chosen.without) if chosen.without else contextlib.nullcontext():
        for _ in range(2):
            start = time.perf_counter()
            model(x).backward(dy)
            _wait(x)
            seconds.append(time.perf_counter() - start)
    times = {"seconds": seconds[0], "second_call": seconds[1], "imports": imported, "until_made": made}
    print(json.dumps({"times": times, "optional": not chosen.eager and _takes_packages(model, x)}))


def _takes_packages(model: torch.nn.Module, x: torch.Tensor) -> bool:
    from benchmarks.gpu.parts.cases import optional_fusions  # not before the calls are timed

    return bool(optional_fusions(model, x))


def _wait(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
