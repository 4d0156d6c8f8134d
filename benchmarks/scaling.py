"""Predict the time of a training step on 8 to 10,000 GPUs from the records, and choose dp x tp.

python -m benchmarks.scaling                              # a table, and where each number is from
python -m benchmarks.scaling --gpus 64 --tokens 1048576   # other numbers of GPUs, other batches
python -m benchmarks.scaling --write-docs                 # into docs/scaling.md

A model of layers as the seed layer, trained by tp ranks that share each layer (tensor and sequence parallel, within one
machine) and dp replicas of these. It is arithmetic on measured times, and no simulation: see ASSUMPTIONS.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, command_parser, markdown_table, replace_between

PAGE = ROOT / "docs/scaling.md"
CARD = "nvidia-h200"
GPUS = (8, 16, 64, 256, 1024, 4096, 10_000)
MACHINE = 8  # GPUs that NVLink connects
SPLITS = (1, 2, 4, 8)  # ranks that may share a layer
HIDDEN, SEQUENCE, TOKENS = 4096, 2048, 8192  # of the seed layer, and of the call whose time is known
PARAMETERS = 12 * HIDDEN**2 + 13 * HIDDEN  # of one layer
WIDTH = 2  # bytes of a number in bfloat16
COLLECTIVES = 8  # of a shared layer, forward and backward
BYTES_A_PARAMETER = 16  # weights and gradients in bfloat16, master weights and both moments in float32
MEMORY = 0.85 * 141e9  # bytes of an H200 that a step may fill
DDP, FSDP = "DDP", "FSDP2"
TIMES_SENT = {DDP: 2, FSDP: 3}  # an all-reduce; two all-gathers and a reduce-scatter
# Measured with PyTorch alone before there was a record (2026-11-22; H200, NVLink without multicast, torch 2.11,
# NCCL 2.28). Ranks -> GB/s that a rank sends in the layer's collectives.
EARLIER_RATES = {2: 204.0, 4: 264.0}
# Ranks -> milliseconds of four layers in eager PyTorch: alone, in DDP, in FSDP2.
EARLIER_DATA = {2: (70.5, 76.2, 78.5), 4: (70.0, 78.5, 81.9)}
EARLIER_LAYERS = 4
EARLIER = "PyTorch alone, measured on 2026-11-22"
HIDES = 0.37  # of a collective beside a product, by NCCL and copy engines alike: 34% to 40%


@dataclass(frozen=True)
class Facts:
    """Numbers of one GPU kind, each with where it is from.

    Attributes:
        layer: seconds of a layer on one GPU, forward and backward, for TOKENS.
        kept: bytes that a layer keeps for backward, for TOKENS.
        rates: ranks that share a layer -> bytes a second that each sends.
        latency: seconds of a collective that sends nothing.
        shown: ranks that share a layer -> the share of its collectives that adds to its time.
        shown_data: of the sums of gradients, by wrapper.
        network: bytes a second that a GPU sends to another machine.
        sources: name -> the number in words.
    """

    layer: float
    kept: float
    rates: Mapping[int, float]
    latency: float
    shown: Mapping[int, float]
    shown_data: Mapping[str, float]
    network: float
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Training to predict: layers, and tokens of all replicas in a step."""

    layers: int = 32
    tokens: int = 4 * 1024 * 1024


JOBS = (Job(), Job(tokens=32 * 1024 * 1024))  # of the page


@dataclass(frozen=True)
class Prediction:
    """One way to place a job.

    Attributes:
        layers, shared, data: seconds of products and glue, of collectives in layers, and of sums of gradients, as
            far as they add to the step.
        efficiency: tokens of a GPU and second over those of one GPU that has all layers to itself.
    """

    dp: int
    tp: int
    wrapper: str
    micro: int
    layers: float
    shared: float
    data: float
    efficiency: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.layers + self.shared + self.data


# ------------------------------------------------------------------------------------------------- arithmetic


def collective(facts: Facts, ranks: int, tokens: int) -> float:
    """Seconds of one all-gather or reduce-scatter of a layer: latency + (n - 1) / n bytes / rate."""
    if ranks == 1:
        return 0.0
    known = max((n for n in facts.rates if n <= ranks), default=min(facts.rates))
    return facts.latency + (1 - 1 / ranks) * tokens * HIDDEN * WIDTH / facts.rates[known]


def sums(facts: Facts, job: Job, dp: int, tp: int, wrapper: str) -> float:
    """Seconds in which gradients (and weights, by FSDP2) go round, were nothing else to do.

    Within a machine by NVLink; beyond by the adapters of the MACHINE / tp GPUs that replicas there have for each part.
    """
    if dp == 1:
        return 0.0
    whole = job.layers * PARAMETERS * WIDTH / tp
    inside = dp * tp <= MACHINE
    fastest = facts.rates[max(facts.rates)]
    rate = fastest if inside else min(fastest, MACHINE // tp * facts.network)
    rounds = TIMES_SENT[wrapper] * job.layers * math.ceil(math.log2(dp))
    return TIMES_SENT[wrapper] * (1 - 1 / dp) * whole / rate + rounds * facts.latency


def predict(facts: Facts, job: Job, dp: int, tp: int, wrapper: str) -> Prediction | None:
    """One way; None where it does not fit the memory, or a replica would have no sequence."""
    sequences = job.tokens // SEQUENCE
    if dp > sequences:
        return None
    own = math.ceil(sequences / dp)  # of the replica with the most
    micro = largest_micro_batch(facts, job, dp, tp, wrapper, own)
    if not micro:
        return None
    tokens = own * SEQUENCE
    layers = job.layers * facts.layer * tokens / TOKENS / tp
    known = max((n for n in facts.shown if n <= tp), default=min(facts.shown))
    calls = math.ceil(own / micro)
    shared = job.layers * COLLECTIVES * calls * collective(facts, tp, micro * SEQUENCE) * facts.shown[known]
    sent, backward = sums(facts, job, dp, tp, wrapper), 2 / 3 * layers / calls
    data = max(facts.shown_data[wrapper] * sent, sent - backward)
    if wrapper == FSDP:  # weights are gathered for each micro-batch
        data += (calls - 1) * 2 / 3 * max(facts.shown_data[wrapper] * sent, sent - layers / calls)
    alone = job.layers * facts.layer / TOKENS  # seconds of a token
    efficiency = alone * job.tokens / (dp * tp) / (layers + shared + data)
    return Prediction(dp, tp, wrapper, micro, layers, shared, data, efficiency)


def largest_micro_batch(facts: Facts, job: Job, dp: int, tp: int, wrapper: str, own: int) -> int:
    """Number of a replica's sequences that run at once: as many as memory takes; 0 where there is no room for one."""
    over = tp * (dp if wrapper == FSDP else 1)
    free = MEMORY - job.layers * PARAMETERS * BYTES_A_PARAMETER / over
    a_sequence = job.layers * facts.kept * SEQUENCE / TOKENS / tp
    return max(0, min(own, int(free // a_sequence)))


def ways(facts: Facts, job: Job, gpus: int) -> list[Prediction]:
    """All that are possible, the fastest first."""
    found = [predict(facts, job, gpus // tp, tp, wrapper) for tp in SPLITS if gpus % tp == 0 for wrapper in TIMES_SENT]
    return sorted((way for way in found if way is not None), key=lambda way: way.seconds)


# ---------------------------------------------------------------------------------------------------- records


def facts_of(folder: Path = RESULTS, network: float = 40e9) -> Facts:
    """Numbers in the records of H200s, and earlier measurements where there is none.

    Args:
        network: bytes a second that a GPU sends to another machine; no record has it.

    Raises:
        FileNotFoundError: without a record of the layer on one GPU.
    """
    sources: dict[str, str] = {}
    layer, kept = _one_gpu(folder, sources)
    shared = {n: record for n in SPLITS if (record := _read(folder / f"ranks-{n}-{CARD}.json"))}
    rates, latency = _rates(shared, sources)
    shown = _shown(shared, sources)
    data = _shown_data(shared, rates, sources)
    sources["network"] = f"{network / 1e9:.0f} GB/s a GPU to other machines: assumed, no record has it (--network)"
    return Facts(layer, kept, rates, latency, shown, data, network, sources)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}  # type: ignore[no-any-return]


def _cases(record: Mapping[str, Any], part: str) -> Iterator[Mapping[str, Any]]:
    yield from record.get("parts", {}).get(part, {}).get("cases", ())


def _commit(record: Mapping[str, Any], part: str) -> str:
    return f"record of {record['parts'][part]['commit']}"


def _one_gpu(folder: Path, sources: dict[str, str]) -> tuple[float, float]:
    record = _read(folder / f"gpu-{CARD}.json")
    for case in _cases(record, "layer"):
        if case["case"] == "seed layer bf16 dropout 0":
            ours = case["contenders"]["te_fuser"]
            where = _commit(record, "layer")
            sources["layer"] = f"{ours['ms']:.2f} ms and {ours['kept_mib']:.0f} MiB kept on one GPU: {where}"
            return 1e-3 * ours["ms"], 2**20 * ours["kept_mib"]
    raise FileNotFoundError(f"{folder} has no record of the seed layer on one GPU: make gpu-bench PART=layer")


def _rates(shared: Mapping[int, Mapping[str, Any]], sources: dict[str, str]) -> tuple[dict[int, float], float]:
    rates, latency = {n: 1e9 * rate for n, rate in EARLIER_RATES.items()}, 20e-6
    words = dict.fromkeys(rates, EARLIER)
    words_latency = "assumed"
    for n, record in shared.items():
        for case in _cases(record, "links"):
            whole = case["contenders"].get("all-gather")
            if case["case"] == f"eight of {TOKENS} x {HIDDEN}":
                rates[n], words[n] = 1e9 * case["contenders"]["NCCL"]["gbps"], _commit(record, "links")
            elif whole and case["bytes"] * 64 == TOKENS * HIDDEN * WIDTH:
                latency, words_latency = 1e-3 * whole["ms"], _commit(record, "links")
    for n, rate in sorted(rates.items()):
        sources[f"rate on {n}"] = f"{rate / 1e9:.0f} GB/s sent by each of {n} ranks that share a layer: {words[n]}"
    sources["latency"] = f"{1e6 * latency:.0f} us for a small collective: {words_latency}"
    return rates, latency


def _shown(shared: Mapping[int, Mapping[str, Any]], sources: dict[str, str]) -> dict[int, float]:
    """Of the layer's collectives, by the time of a shared layer: (t - t(one GPU) / n) / t(collectives alone)."""
    shown: dict[int, float] = {}
    for n, record in shared.items():
        single = ours = alone = None
        for case in _cases(record, "layer"):
            if "collectives alone" in case:
                ours, alone = case["contenders"].get("te_fuser"), case["collectives alone"]["ms"]
            else:
                single = case["contenders"]["te_fuser"]["ms"]
        if ours and alone and single:
            shown[n] = max(0.0, (ours["ms"] - single / n) / alone)
            words = f"{shown[n]:.2f} of the collectives of a layer on {n} GPUs adds to its time"
            sources[f"shown on {n}"] = f"{words}: {_commit(record, 'layer')}"
    if not shown:
        shown[2] = 1 - HIDES
        sources["shown"] = (
            f"{shown[2]:.2f} of a layer's collectives adds to its time: assumed, as {HIDES:.0%} of one hid beside a "
            f"product ({EARLIER}); no record of a shared layer is there"
        )
    return shown


def _shown_data(
    shared: Mapping[int, Mapping[str, Any]], rates: Mapping[int, float], sources: dict[str, str]
) -> dict[str, float]:
    """Of the sums of gradients: (t(wrapped) - t(alone)) / t(sums), on the most GPUs that were measured."""
    times, words = dict(EARLIER_DATA), dict.fromkeys(EARLIER_DATA, f"eager, {EARLIER}")
    for n, record in shared.items():
        for case in _cases(record, "data"):
            found = [case["contenders"].get(f"te_fuser {wrapper}") for wrapper in ("alone", DDP, FSDP)]
            if all(found):
                times[n] = tuple(data["ms"] for data in found)  # type: ignore[index]
                words[n] = _commit(record, "data")
    measured = [n for n in times if words[n].startswith("record")] or list(times)
    n = max(measured)
    alone, *wrapped = times[n]
    shown = {}
    for wrapper, ms in zip((DDP, FSDP), wrapped, strict=True):
        sent = TIMES_SENT[wrapper] * (1 - 1 / n) * EARLIER_LAYERS * PARAMETERS * WIDTH / rates[n]
        shown[wrapper] = min(1.0, max(0.0, 1e-3 * (ms - alone) / sent))
        sources[wrapper] = f"{shown[wrapper]:.2f} of the sums of {wrapper} adds to a step: {words[n]}, {n} GPUs"
    return shown


# -------------------------------------------------------------------------------------------------------- words

ASSUMPTIONS = (
    "All layers are the seed layer: hidden 4096, 16384 between the MLP's products, 32 heads, sequences of 2048, "
    "causal, bfloat16, dropout 0. Embeddings, the loss and the optimizer's step are left out.",
    "A layer's time goes with its tokens, and is divided by the ranks that share it: what products lose by being "
    "smaller is not in it.",
    "Ranks that share a layer are in one machine of 8 GPUs, and what the most that were measured reached holds for 8.",
    "Beyond a machine each GPU has an adapter of its own, and all of a machine send at once; networks that others use "
    "too, and GPUs that fail, are not in it.",
    "Sums of gradients run beside backward as far as they did on the GPUs that were measured, never longer than it.",
    "Memory: 16 bytes a parameter, of which with FSDP2 each replica has a part, and what layers keep for backward, in "
    "85% of 141 GB. Where a replica's batch does not fit it runs in micro-batches.",
    "The batch has so many tokens on any number of GPUs, in whole sequences: where there are fewer than replicas, "
    "ranks have to share layers.",
)


def rows(facts: Facts, job: Job, gpus: Sequence[int]) -> list[list[str]]:
    """For each number of GPUs the fastest way, and the fastest with another tp."""
    found = []
    for count in gpus:
        possible = ways(facts, job, count)
        if not possible:
            found.append([f"{count:,}", "does not fit", *[""] * 7])
            continue
        best = possible[0]
        other = next((way for way in possible if way.tp != best.tp), None)
        second = f"{other.dp} x {other.tp}: {other.seconds / best.seconds:.2f}" if other else ""
        parts = (best.layers, best.shared, best.data)
        shares = [f"{part / best.seconds:.0%}" for part in parts]
        speed = f"{job.tokens / best.seconds / 1e6:,.2f}"
        way = f"{best.dp} x {best.tp}, {best.wrapper}"
        found.append(
            [f"{count:,}", way, second, f"{1e3 * best.seconds:,.0f}", speed, f"{best.efficiency:.0%}", *shares]
        )
    return found


HEADER = (
    "GPUs", "dp x tp", "with another tp, over it", "ms a step", "million tokens/s", "efficiency",
    "products and glue", "shared layers", "gradients",
)  # fmt: skip


def text(facts: Facts, jobs: Sequence[Job], gpus: Sequence[int]) -> str:
    """The tables, the numbers that they are made of, and what is assumed."""
    tables = []
    for job in jobs:
        size = job.layers * PARAMETERS / 1e9
        tables.append(f"{job.layers} layers ({size:.1f} billion parameters), {job.tokens:,} tokens a step:")
        tables.append(markdown_table(HEADER, rows(facts, job, gpus), words=3))
    numbers = "\n".join(f"- {source}" for source in facts.sources.values())
    assumed = "\n".join(f"- {line}" for line in ASSUMPTIONS)
    return "\n\n".join((*tables, "The numbers are from:", numbers, "Assumed:", assumed))


def write_docs(path: Path = PAGE, folder: Path = RESULTS) -> None:
    """Put the table of the usual job into the page."""
    replace_between(path, "scaling", text(facts_of(folder), JOBS, GPUS))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("benchmarks.scaling", __doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--layers", type=int, default=Job.layers)
    parser.add_argument("--tokens", type=int, default=Job.tokens, help="of a step, in all replicas together")
    parser.add_argument("--network", type=float, default=40.0, help="GB/s that a GPU sends to another machine")
    parser.add_argument("--write-docs", action="store_true", help="the usual table into docs/scaling.md")
    found = parser.parse_args(arguments)
    least = {"layers": 1, "tokens": SEQUENCE, "network": 1}
    for name, bound in least.items():
        if getattr(found, name) < bound:
            parser.error(f"--{name} must be {bound} or more, got {getattr(found, name)}")
    if min(found.gpus) < 1:
        parser.error(f"--gpus must be 1 or more, got {min(found.gpus)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, or write; the exit status."""
    chosen = parse(arguments)
    if chosen.write_docs:
        write_docs()
    else:
        print(text(facts_of(network=1e9 * chosen.network), [Job(chosen.layers, chosen.tokens)], chosen.gpus))
    return 0


if __name__ == "__main__":
    sys.exit(main())
