"""Train a small GPT, built from te_fuser's operations, on the Python source that this machine has.

    python examples/train_gpt.py

The parts: `gpt` (the model), `text` (the data and the bigram baseline), `trainer` (the steps), `checkpoint`,
`settings` (the command line), `report` (bar, curve, tables), `twin` (the model in torch.nn, for --compare).
"""

from __future__ import annotations

import json
import math
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import checkpoint
import torch
from checkpoint import Checkpoint
from gpt import build_gpt
from report import Curve, comparison, duration, plan_table, plot_losses, progress_bar, write_losses
from rich.console import Console
from settings import CHECKPOINT, Arguments, BadArguments, Settings, parse
from text import Bigram, Text, read_text, spread_windows
from trainer import Schedule, Trainer
from twin import build_twin, nudge

from te_fuser.recipe import DelayedScaling

OURS, TWIN, NUDGED, COMPILED = "te_fuser", "torch.nn", "torch.nn, nudged", "torch.compile"
VALIDATION_WINDOWS = 512
STEPS_AT_ONCE = 10  # between two updates of the bar
SAMPLE_BYTES = 600

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or go on training; the exit status."""
    try:
        return _main(argv)
    except KeyboardInterrupt:  # training ends in good order by itself, so this came before it or after it
        console.print("\nstopped outside training: there was nothing to save")
        return 130


def _main(argv: Sequence[str] | None) -> int:
    try:
        arguments = parse(argv)
        run = Run.resumed(arguments) if arguments.resume else Run.new(arguments)
    except (BadArguments, FileNotFoundError) as error:
        console.print(f"train_gpt.py: {error}", style="red", markup=False)
        return 2
    introduce(run)
    show_plans(run, in_full=arguments.explain)
    try:
        train(run)
    except Diverged as error:
        console.print(f"train_gpt.py: {error}", style="red", markup=False)
        return 1
    run.save_checkpoint()
    run.write_losses()
    if not run.finished:
        console.print(f"stopped after step {run.step} of {run.settings.steps}; everything is saved in {run.folder}")
        console.print(f"to go on: ./dev train --resume --out {shlex.quote(str(run.folder))}")
        return 130  # as the shell calls what Ctrl-C ended
    sample = write_sample(run, arguments.prompt, arguments.temperature)
    console.print(f"\n{sample}\n", style="cyan", markup=False)
    summarize(run)
    return 0


# ------------------------------------------------------------------------------------------------------ run


class Run:
    """A run in its folder: the model in training (and its twins, to compare them), the text, the losses."""

    def __init__(self, settings: Settings, arguments: Arguments, text: Text) -> None:
        self.settings, self.device, self.text, self.folder = settings, arguments.device, text, arguments.out
        self.windows = spread_windows(text.validation.to(self.device), VALIDATION_WINDOWS, settings.context)
        self.bigram_loss = Bigram(text.training).loss(self.windows)
        torch.manual_seed(settings.seed)
        self.model = build_gpt(settings.shape, arguments.kernels)
        models = {OURS: self.model}
        if arguments.compare:
            models[TWIN] = self._twin()
        if arguments.nudge:
            models[NUDGED] = self._twin()
            nudge(models[NUDGED], torch.Generator().manual_seed(settings.seed + 1))  # the weights are drawn from `seed`
        if arguments.compile:
            models[COMPILED] = self._twin()
            models[COMPILED].compile()  # in place: its parameters keep their names
        recipe = DelayedScaling(amax_history_len=16) if settings.precision == "fp8" else None
        self.trainers = {name: self._trainer(m, recipe if name == OURS else None) for name, m in models.items()}
        self.validations: dict[str, list[tuple[int, float]]] = {name: [] for name in models}
        self.folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def new(cls, arguments: Arguments) -> Run:
        """A run from its beginning."""
        settings = arguments.settings()
        return cls(settings, arguments, _text_for(settings))

    @classmethod
    def resumed(cls, arguments: Arguments) -> Run:
        """The run in the folder, as it was when it stopped.

        Raises:
            BadArguments: when the run had other settings, or its text has changed.
        """
        try:
            saved = checkpoint.load(arguments.out / CHECKPOINT)
        except ValueError as error:
            raise BadArguments(str(error)) from error
        settings = arguments.resumed(saved.settings)
        text = _text_for(settings)
        if text.fingerprint != saved.fingerprint:
            raise BadArguments(
                f"the files in {text.folder} are not those that the run in {arguments.out} began with, "
                "so it cannot go on as it would have: start a new run without --resume"
            )
        run = cls(settings, arguments, text)
        run._restore(saved)
        return run

    def _twin(self) -> torch.nn.Module:
        """Model of torch.nn with these weights."""
        twin = build_twin(self.settings.shape)
        twin.load_state_dict(self.model.state_dict())
        return twin

    def _trainer(self, model: torch.nn.Module, recipe: DelayedScaling | None) -> Trainer:
        settings = self.settings
        return Trainer(
            model.to(self.device),
            self.text.training.to(self.device),
            Schedule(settings.lr, settings.steps),
            batch=settings.batch,
            context=settings.context,
            seed=settings.seed,
            dtype=settings.torch_dtype,
            recipe=recipe,
        )

    def _restore(self, saved: Checkpoint) -> None:
        trainer, curve = self.ours, Curve.from_tensors(saved.curve)
        trainer.model.load_state_dict(saved.model)
        checkpoint.restore_optimizer(trainer.model, trainer.optimizer, saved.optimizer)
        trainer.set_random_states(saved.random)
        trainer.step = saved.step
        trainer.losses[: saved.step] = torch.tensor(curve.training)
        self.validations[OURS] = curve.validation

    def save_checkpoint(self) -> None:
        """Write what `resumed` reads; the twin is not in it."""
        trainer = self.ours
        checkpoint.save(
            Checkpoint(
                self.step,
                self.settings.remembered(),
                self.text.fingerprint,
                trainer.model.state_dict(),
                checkpoint.optimizer_tensors(trainer.model, trainer.optimizer),
                trainer.random_states(),
                self.curves()[OURS].tensors(),
            ),
            self.folder / CHECKPOINT,
        )

    def write_losses(self) -> None:
        """Write the losses as a table and a picture."""
        curves = self.curves()
        write_losses(curves, self.folder / "loss.csv")
        plot_losses(curves, self.bigram_loss, self.folder / "loss.png")

    @property
    def ours(self) -> Trainer:
        """The trainer of te_fuser's model."""
        return self.trainers[OURS]

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.ours.step

    @property
    def finished(self) -> bool:
        """True if all steps were taken."""
        return self.step == self.settings.steps

    def curves(self) -> dict[str, Curve]:
        """The losses so far."""
        return {
            name: Curve(trainer.losses[: trainer.step].tolist(), self.validations[name])
            for name, trainer in self.trainers.items()
        }


def _text_for(settings: Settings) -> Text:
    text = read_text(Path(settings.text))
    shortest = min(text.training.numel(), text.validation.numel())
    if shortest <= settings.context:
        raise BadArguments(f"--context {settings.context} is too long for a text of {shortest} bytes: see --text")
    return text


# ------------------------------------------------------------------------------------------------ beginning


def introduce(run: Run) -> None:
    """Say what will be trained on what."""
    settings, shape = run.settings, run.settings.shape
    parameters = sum(p.numel() for p in run.model.parameters())
    console.print(f"text: {run.text}, from {run.text.folder}")
    console.print(
        f"model: {parameters / 1e6:.2f} M parameters, {settings.layers} layers, {settings.hidden} features, "
        f"{settings.heads} heads of {shape.head_dim}, context {settings.context}, dropout {settings.dropout}"
    )
    dtype = settings.dtype + ", products in 8 bits" * (settings.precision == "fp8")
    console.print(
        f"run: {settings.steps} steps of {settings.batch} x {settings.context} bytes, {dtype} on {run.device}"
    )
    console.print(f"bigram model: validation loss {run.bigram_loss:.3f} nats per byte")


def show_plans(run: Run, in_full: bool) -> None:
    """Print the forward and the backward plan: of a block in its place in the model, or of all of it with the code."""
    settings = run.settings
    tokens = torch.zeros(settings.batch, settings.context, dtype=torch.long, device=run.device)
    with run.ours.autocast():
        if in_full:
            console.print(run.model.explain(tokens, source=True))
            return
        plan = run.model.plan(tokens)
    middle = settings.layers // 2
    console.print(f"\nboth plans, for block {middle + 1} of {settings.layers} (--explain shows all that is known)")
    console.print(plan_table(plan, f"blocks.{middle}."), "")


# ------------------------------------------------------------------------------------------------- training


class Diverged(Exception):
    """The loss is not a number any more."""


class Interrupt:
    """Ctrl-C asks to stop after the step that is under way; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def train(run: Run) -> None:
    """Train until the last step or Ctrl-C.

    Raises:
        Diverged: when the loss is not a number any more; the last checkpoint is left as it is.
    """
    with Interrupt() as interrupt, progress_bar(console) as bar:
        task = bar.add_task("", total=run.settings.steps, completed=run.step, loss="", validation="", speed="")
        estimated = False
        while not run.finished and not interrupt.requested:
            steps = steps_at_once(run)
            for trainer in run.trainers.values():
                trainer.train(steps, lambda: interrupt.requested)
            loss, speed = run.ours.recent_loss(STEPS_AT_ONCE), run.ours.speed
            if not math.isfinite(loss):
                raise Diverged(f"the loss is {loss} after step {run.step}: start again with a lower --lr")
            bar.update(task, completed=run.step, loss=f"{loss:.3f}", speed=str(speed))
            if not estimated and speed.steps >= STEPS_AT_ONCE:
                estimated = True
                console.print(estimate(run))
            if run.finished or run.step % validation_interval(run) == 0:
                validate(run)
                run.save_checkpoint()
                bar.update(task, validation=f"{run.validations[OURS][-1][1]:.3f}")


def validation_interval(run: Run) -> int:
    """Steps from one validation to the next."""
    return max(1, run.settings.steps // run.settings.validations)


def steps_at_once(run: Run) -> int:
    """Steps until the bar moves or a validation is due."""
    ends = (STEPS_AT_ONCE, validation_interval(run))
    return min(run.settings.steps - run.step, *(end - run.step % end for end in ends))


def validate(run: Run) -> None:
    """Take the validation loss of each model, and print a line for it."""
    for name, trainer in run.trainers.items():
        loss = trainer.validate(run.windows)
        run.validations[name].append((trainer.step, loss))
        console.print(
            f"step {trainer.step:>5}  {name:<8}  training {trainer.recent_loss(validation_interval(run)):.3f}  "
            f"validation {loss:.3f}  {trainer.speed!s:>16}"
        )


def estimate(run: Run) -> str:
    """Time that the rest takes, from the first steps."""
    speeds = [trainer.speed for trainer in run.trainers.values()]
    rest = sum(speed.seconds_per_step for speed in speeds) * (run.settings.steps - run.step)
    first = sum(speed.first_step or 0.0 for speed in speeds)
    return f"about {duration(rest)} to go (the first step took {duration(first)}: plans and kernels were made)"


# ---------------------------------------------------------------------------------------------------- end


@torch.no_grad()
def generate(trainer: Trainer, prompt: bytes, count: int, temperature: float, generator: torch.Generator) -> bytes:
    """The prompt and `count` bytes drawn after it, one at a time.

    Each draw runs the model on a whole window, padded on the right: a causal model does not see what comes later, and
    with one shape there is one plan.
    """
    trainer.model.eval()
    text = bytearray(prompt)
    for _ in range(count):
        seen = torch.tensor(list(text[-trainer.context :]))
        window = torch.zeros(1, trainer.context, dtype=torch.long)
        window[0, : seen.numel()] = seen
        logits = trainer.logits(window.to(trainer.data.device))[0, seen.numel() - 1].float().cpu()
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        text.append(int(drawn))
    return bytes(text)


def write_sample(run: Run, prompt: str, temperature: float) -> str:
    """Let the model write, into sample.txt too."""
    generator = torch.Generator().manual_seed(run.settings.seed)
    written = generate(run.ours, prompt.encode(), SAMPLE_BYTES, temperature, generator)
    sample = written.decode(errors="replace")
    (run.folder / "sample.txt").write_text(sample)
    return sample


def summarize(run: Run) -> None:
    """Print the result, and write it into summary.json."""
    loss = run.validations[OURS][-1][1]
    summary = {
        "validation_loss": loss,
        "bigram_loss": run.bigram_loss,
        "tokens_per_second": {name: round(trainer.speed.tokens_per_second) for name, trainer in run.trainers.items()},
        "settings": run.settings.remembered(),
    }
    (run.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if len(run.trainers) > 1:
        console.print(comparison(run.curves(), {name: trainer.speed for name, trainer in run.trainers.items()}))
    console.print(
        f"validation loss {loss:.3f} nats per byte, {loss / run.bigram_loss:.2f} of the bigram model's "
        f"{run.bigram_loss:.3f}"
    )
    console.print(f"in {run.folder}: {', '.join(sorted(path.name for path in run.folder.iterdir()))}")


if __name__ == "__main__":
    sys.exit(main())
