"""docs/works-with.md: every "yes" and every "how" of it is run here, or by the test that is named here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_fuser
from te_fuser import ops
from tests.twins import by_reference, randomize

ROOT = Path(__file__).parent.parent
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def model(dropout: float = 0.0) -> te_fuser.Sequential:
    made = te_fuser.Sequential(
        te_fuser.Residual(
            ops.LayerNorm(8),
            ops.Linear(8, 24),
            ops.DotProductAttention(2, 4, mask="causal", layout="batch_first"),
            ops.Linear(8, 8),
            ops.Dropout(dropout),
        ),
        te_fuser.Residual(ops.RMSNorm(8), ops.Linear(8, 32), ops.GELU(), ops.Linear(32, 8)),
    )
    return randomize(made)  # type: ignore[no-any-return]


def x() -> torch.Tensor:
    return X.clone().requires_grad_()


def gradients(run: Callable[[torch.Tensor], torch.Tensor], m: nn.Module) -> list[torch.Tensor]:
    given = x()
    return list(torch.autograd.grad(run(given).square().sum(), [given, *m.parameters()]))


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------------ compilers, exporters, tracers


def compiled() -> None:
    m = model()
    around = torch.compile(lambda x: torch.sin(m(torch.cos(x))), backend="eager")
    close(around(X), torch.sin(m(torch.cos(X))))
    close(gradients(around, m), gradients(lambda x: torch.sin(m(torch.cos(x))), m))


def to_onnx() -> None:
    pytest.importorskip("onnxscript")
    m = model()
    program = torch.onnx.export(by_reference(m), (X,), dynamo=True)
    assert program is not None


# ------------------------------------------------------------------------------------------------------- autograd


def transformed() -> None:
    m = model()
    close(torch.vmap(lambda x: m.reference(x[None])[0])(X), m(X))
    close(torch.func.grad(lambda x: m.reference(x).square().sum())(X), gradients(m, m)[0])
    _, tangent = torch.func.jvp(m.reference, (X,), (torch.ones_like(X),))
    assert tangent.shape == X.shape
    assert torch.func.hessian(lambda x: m.reference(x).sum())(X[:1, :1]).shape == (1, 1, 8, 1, 1, 8)
    with pytest.raises(TypeError, match=r"model\.reference"):
        torch.vmap(m)(X)


def batched() -> None:
    m, rows = model(), X[:1, :2]
    want = torch.autograd.functional.jacobian(m, rows)
    close(torch.autograd.functional.jacobian(m.reference, rows, vectorize=True), want)
    with pytest.raises(TypeError, match=r"batched gradients .* take model\.reference\(x\)"):
        torch.autograd.functional.jacobian(m, rows, vectorize=True)


def saved_elsewhere() -> None:
    m = model()
    with torch.autograd.graph.save_on_cpu():
        got = gradients(m, m)
    close(got, gradients(m, m))


# -------------------------------------------------------------------------------------------------------- training


def trained() -> None:
    m = model()
    optimizer, scaler = torch.optim.AdamW(m.parameters(), lr=1e-2), torch.amp.GradScaler("cpu")
    losses = []
    for _ in range(20):
        loss = (m(X) - X.flip(0)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def averaged() -> None:
    m = model()
    mean = torch.optim.swa_utils.AveragedModel(m)
    mean.update_parameters(m)
    close(mean(X), m(X))


def repeated() -> None:
    m = model(dropout=0.5)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            runs.append(gradients(m, m))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# ------------------------------------------------------------------------------------------------------- the page

HERE: dict[str, Callable[[], None]] = {
    "`torch.compile`": compiled,
    "ONNX": to_onnx,
    "`torch.vmap`, `torch.func.grad`, `jvp`, `hessian`": transformed,
    "batched gradients (`is_grads_batched`, `jacobian(vectorize=True)`)": batched,
    "saved tensor hooks (`save_on_cpu`)": saved_elsewhere,
    "optimizers, `clip_grad_norm_`, `GradScaler`": trained,
    "`AveragedModel` (SWA, EMA)": averaged,
    "`torch.use_deterministic_algorithms`": repeated,
}
# Tools that another test runs: (its file, its name).
ELSEWHERE = {
    "`torch.compile(fullgraph=True)`": ("fuser/run/test_call_watched.py", "test_the_reference_can_be_traced"),
    "`make_fx`": ("fuser/run/test_call_watched.py", "test_the_reference_can_be_traced"),
    "`torch.fx.symbolic_trace`": ("fuser/run/test_call_watched.py", "test_a_model_may_be_a_leaf"),
    "forward-mode derivatives (`torch.autograd.forward_ad`)": ("fuser/run/test_call_watched.py",
     "test_the_reference_has"),
    "`torch.autograd.set_detect_anomaly`": ("fuser/run/test_call_watched.py",
     "test_anomaly_mode_names_the_step_and_its_ops"),
    "`torch.profiler`": ("fuser/run/test_call_watched.py", "test_the_profiler_sees_steps_and_their_ops"),
    "global hooks (`register_module_forward_hook`)": ("fuser/run/test_call_watched.py",
     "test_global_hooks_run_for_every_op"),
    "CUDA graphs": ("gpu/test_capture.py", "test_replays_equal_calls_bit_for_bit_and_see_the_optimizer"),
    "`DistributedDataParallel`": ("parallel/test_data_parallel.py", "test_gradients"),
    "tensor parallelism by `DTensor`": ("parallel/test_parallelize.py", "test_training"),
    "threads": ("parallel/test_works_with.py", "test_threads_that_share_a_group_are_refused_at_once"),
    "gloo (PyTorch's collectives on CPUs)": ("parallel/test_collectives.py",
     "test_no_exchange_is_one_by_which_gloo_breaks_memory"),
    "accelerate, Lightning, DeepSpeed ZeRO-1, torchtitan's order of calls": ("parallel/test_engines.py",
     "test_losses_are_one_processs"),
    "transformers' `Trainer` on [converted models](how-to/convert.md)": ("convert/test_conversion_trainer.py",
     "test_losses_are_the_originals"),
    "LoRA by peft on [converted models](how-to/convert.md)": ("convert/test_conversion_trainer.py", "test_lora"),
    "Hugging Face's `kernels`": ("integrations/test_kernels.py", "test_a_model"),
    "torchtitan": ("parallel/test_torchtitan.py", "test_values_and_gradients"),
    "FSDP (`fully_shard`)": ("fuser/test_pipeline_models.py", "test_fsdp2"),
    "the meta device, `to_empty`, `reset_parameters`": ("fuser/test_pipeline_parameters.py", "test_meta_device_first"),
    "Linux on x86-64": ("codegen/test_cpp.py", ""),
    "NVIDIA GPUs from compute capability 8.0 on": ("gpu/test_generated_kernels.py", ""),
    "older NVIDIA GPUs, AMD GPUs": ("fuser/run/test_loading_targets.py", ""),
    "`torch.export`": ("fuser/run/test_call_watched.py", "test_the_reference_is_exported_for_any_number_of_rows"),
    "`torch.jit.trace`": ("fuser/run/test_call_watched.py", "test_the_reference_can_be_traced"),
    "`torch.func.functional_call`": ("fuser/test_pipeline_parameters.py", "test_functional_call"),
    "double backward (`create_graph=True`)": ("presets/test_base_reference.py", "test_twice_differentiated"),
    "`torch.utils.checkpoint`": ("fuser/run/test_segment.py", "test_checkpointing_draws_the_same_masks"),
    "`torch.inference_mode`, `torch.no_grad`": ("presets/test_base_contract.py",
     "test_preset_under_each_mode_gives_its_values"),
    "`torch.autocast`": ("fuser/graph/test_list_passes_autocast.py", "test_autocast_like_torch"),
    "`torch.nn.utils.parametrize`, `prune`": ("fuser/test_pipeline_parameters.py",
     "test_training_leaves_what_eager_leaves"),
    "`state_dict`, safetensors, `torch.save`": ("presets/test_base_contract.py",
     "test_preset_copied_or_loaded_is_trained_by_itself"),
    "`copy.deepcopy`, `pickle`": ("test_sequential.py", "test_copies"),
    "hooks of a module": ("test_sequential.py", "test_hooks_fire_in_order_and_change_nothing"),
}  # fmt: skip


@pytest.mark.parametrize("what", HERE)
def test_it_works(what: str) -> None:
    torch._dynamo.reset()
    HERE[what]()


def test_the_page_says_what_is_run() -> None:
    rows = re.findall(r"^\| (.*?) \| (yes|how) \|", (ROOT / "docs" / "works-with.md").read_text(), re.MULTILINE)
    assert [what for what, _ in rows if what not in HERE and what not in ELSEWHERE] == []
    assert {what for what, _ in rows} == {*HERE, *ELSEWHERE}
    for file, name in ELSEWHERE.values():
        assert f"def {name}" in (ROOT / "tests" / file).read_text()
