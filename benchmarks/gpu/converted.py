"""A Llama of transformers as it is, by torch.compile, and converted: training steps, prompts, and single tokens.

python -m benchmarks.gpu.converted        # some five minutes; prints a table
python -m benchmarks.gpu.converted --toy  # tiny sizes on the CPU: does it run at all
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import te_fuser
from benchmarks.common import Effort, command_parser, compete

Call = Callable[[], object]
CONVERTED = "converted"


@dataclass(frozen=True)
class Sizes:
    """A model of `layers`, in bfloat16, and its calls: batch x positions, and `past` positions in a cache."""

    layers: int = 4
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    batch: int = 2
    positions: int = 4096
    past: int = 2048
    device: str = "cuda"


TOY = Sizes(2, 64, 96, 4, 2, 2, 8, 6, "cpu")


def models(sizes: Sizes) -> dict[str, Any]:
    """The contenders, with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
    )
    original = LlamaForCausalLM(config).to(sizes.device, torch.bfloat16)
    converted = copy.deepcopy(original)
    print(te_fuser.convert(converted))
    compiled = copy.deepcopy(original)
    compiled.compile(backend="eager" if sizes is TOY else "inductor")
    return {"as it is": original, "torch.compile": compiled, CONVERTED: converted}


def training(model: Any, sizes: Sizes) -> Call:
    """Forward and backward."""
    ids = torch.randint(1024, (sizes.batch, sizes.positions), device=sizes.device)

    def call() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids, use_cache=False).loss.backward()

    return call


def prompt(model: Any, sizes: Sizes) -> Call:
    """A prompt that fills a new cache."""
    from transformers import DynamicCache

    ids = torch.randint(1024, (sizes.batch, sizes.positions), device=sizes.device)
    return torch.no_grad()(lambda: model(ids, past_key_values=DynamicCache(), logits_to_keep=1))


def token(model: Any, sizes: Sizes) -> Call:
    """A token behind others; what it leaves in the cache is taken out again."""
    from transformers import DynamicCache

    cache = DynamicCache()
    ids = torch.randint(1024, (sizes.batch, sizes.past), device=sizes.device)
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)

    @torch.no_grad()
    def call() -> None:
        model(ids[:, :1], past_key_values=cache)
        cache.crop(-1)

    return call


CASES: Mapping[str, Callable[[Any, Sizes], Call]] = {"training step": training, "prompt": prompt, "token": token}


def main() -> None:
    """Print how long each contender takes."""
    parser = command_parser("benchmarks.gpu.converted", __doc__)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on the CPU")
    toy = parser.parse_args().toy
    sizes, effort = (TOY, Effort(1, 0.0, 1)) if toy else (Sizes(), Effort())
    contenders = models(sizes)
    table = Table("call", *contenders, "over torch.compile")
    for name, make in CASES.items():
        calls = {who: make(model, sizes) for who, model in contenders.items()}
        found = {}
        wait = torch.cuda.synchronize if sizes.device == "cuda" else lambda: None
        for other in ("as it is", "torch.compile"):
            outcome = compete({CONVERTED: calls[CONVERTED], other: calls[other]}, effort, wait)
            found |= {who: timing.seconds * 1e3 for who, timing in outcome.timings.items()}
        times = [f"{found[who]:.3f} ms" for who in contenders]
        table.add_row(name, *times, f"{found[CONVERTED] / found['torch.compile']:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
