"""The benchmark's parts by name. A part gives entries (see contest.entries), one for each of its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.contest.entries import Entry
from benchmarks.gpu.parts.cached import cached
from benchmarks.gpu.parts.converted import LLAMA_LAYERS, converted
from benchmarks.gpu.parts.first_call import first_call
from benchmarks.gpu.parts.glue import glue
from benchmarks.gpu.parts.host import HOST_HIDDEN, HOST_TOKENS, host
from benchmarks.gpu.parts.models import STACKED, growth, layer, layer_fp16, llama, mlp, stack
from benchmarks.gpu.parts.presets import presets
from benchmarks.gpu.parts.small import DECODING_LAYERS, decoding, small
from benchmarks.gpu.parts.train import train, train_exact, train_fp8


@dataclass(frozen=True)
class Part:
    """One run's worth: ends within five minutes on an H200, in about so many seconds."""

    meaning: str
    run: Callable[[Bench], Iterator[Entry]]
    seconds: int


# What the host costs comes first: once the profiler has run in a process, launches take longer.
PARTS: dict[str, Part] = {
    "host": Part(f"what a call costs at {HOST_TOKENS} x {HOST_HIDDEN}", host, 60),
    "small": Part("a Linear, four ops, layers of 128 to 2048 tokens, a narrow layer; forward too", small, 240),
    "decoding": Part(f"a step of decoding: 1 to 64 rows through {DECODING_LAYERS} layers", decoding, 200),
    "cached": Part(f"a token behind others whose keys and values are kept, {DECODING_LAYERS} layers", cached, 40),
    "layer": Part("the seed layer, bf16, dropout 0.1 and 0, and its plan", layer, 150),
    "layer-fp16": Part("the seed layer, fp16, dropout 0.1 and 0", layer_fp16, 130),
    "mlp": Part("LayerNorm-GELU and RMSNorm-SwiGLU MLPs, Linear + bias + residual", mlp, 260),
    "llama": Part("a Llama layer: RMSNorm, RoPE, 32 query and 8 key/value heads, SwiGLU", llama, 75),
    "stack": Part(f"{STACKED} seed layers in one Sequential and apart", stack, 70),
    "presets": Part(
        "presets beside the lists of their ops, time and memory, and the host at small sizes", presets, 190
    ),
    "converted": Part(
        f"{LLAMA_LAYERS} layers of a Llama of transformers, as it is and converted: training, forward, decoding",
        converted,
        120,
    ),
    "glue": Part("what stands between products, in GB/s and share of a copy", glue, 150),
    "growth": Part("time and memory with the tokens and with the hidden size", growth, 130),
    "first-call": Part("the first call in a new process, empty and warm kernel cache", first_call, 100),
    "train": Part("a GPT of 100 M parameters beside its twin in eager PyTorch and by torch.compile", train, 290),
    "train-exact": Part("the same without dropout: both losses, and what nudged weights change", train_exact, 130),
    "train-fp8": Part("the same in FP8 and in bfloat16: both losses", train_fp8, 180),
}
