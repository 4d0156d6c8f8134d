"""Layers for Hugging Face's `kernels`: as it checks and loads them, with values and gradients of what they replace."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_fuser
from te_fuser import integrations
from te_fuser.integrations.kernels import LAYERS, MAPPING, write_package
from tests.convert.models import assert_alike, model_of, results, tokens, transformers
from tests.refused import raises

kernels: Any = pytest.importorskip("kernels")
activations: Any = transformers.activations
llama: Any = transformers.models.llama.modeling_llama
gemma: Any = transformers.models.gemma.modeling_gemma
IDS = tokens()
SIZES = {"hidden_size": 13, "intermediate_size": 7, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
# A module of transformers or of torch.nn -> the layer that takes its place.
REPLACED: list[tuple[str, nn.Module]] = [
    ("RMSNorm", llama.LlamaRMSNorm(13, eps=0.1)),
    ("RMSNormZeroCentered", gemma.GemmaRMSNorm(13, eps=0.1)),
    ("LayerNorm", nn.LayerNorm(13, eps=0.1)),
    ("LayerNorm", nn.LayerNorm(13, bias=False)),
    ("LayerNorm", nn.LayerNorm(13, elementwise_affine=False)),
    ("SiLU", activations.SiLUActivation()),
    ("GeLU", activations.GELUActivation()),
    ("GeluTanh", activations.GELUTanh()),
    ("NewGELU", activations.NewGELUActivation()),
    ("FastGELU", activations.FastGELUActivation()),
    ("QuickGELU", activations.QuickGELUActivation()),
    ("SwiGLUMLP", llama.LlamaMLP(transformers.LlamaConfig(**SIZES))),
    ("GeGLUMLP", gemma.GemmaMLP(transformers.GemmaConfig(**SIZES))),
]


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes have the names of layers, as those that transformers decorates do, and lose them again."""
    for name, module in REPLACED:
        monkeypatch.setattr(type(module), "kernel_layer_name", "", raising=False)
        monkeypatch.setattr(type(module), "kernel_condition", None, raising=False)
        kernels.replace_kernel_forward_from_hub(type(module), name)


def kernelized(model: Any, mapping: Any = MAPPING, **options: Any) -> Any:
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        return kernels.kernelize(copy.deepcopy(model), mode=kernels.Mode.TRAINING, device="cpu", **options)


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.parametrize(("name", "module"), REPLACED, ids=[f"{n} {k}" for k, (n, _) in enumerate(REPLACED)])
def test_values_and_gradients(name: str, module: nn.Module) -> None:
    """No further from float64 than twice as far as the module itself in float32."""
    module = copy.deepcopy(module)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape))
    ours = kernelized(module, use_fallback=False)
    assert ours.forward.__func__ is LAYERS[name].forward
    x = 2.0 * torch.randn(3, 5, 13)
    exact = gradients(copy.deepcopy(module).double(), x.double())
    for found, plain, want in zip(gradients(ours, x), gradients(module, x), exact, strict=True):
        worst = (plain.double() - want).abs().max().item()
        assert (found.double() - want).abs().max().item() <= 2.0 * worst + 1e-6 * want.abs().max().item()


@pytest.mark.parametrize("by", ["mapping", "package"])
def test_a_model(by: str, tmp_path: Path) -> None:
    """Norms and MLPs of Llama, by what te_fuser has and by a package that it writes."""
    original, mapping = model_of("llama"), MAPPING
    if by == "package":
        found = write_package(tmp_path)
        mapping = {n: {"cpu": kernels.LocalLayerRepository(found, layer_name=n)} for n in LAYERS}  # type: ignore
    model = kernelized(original, mapping)
    replaced = {type(m).__name__ for m in model.modules() if "forward" in vars(m)}
    assert replaced == {"LlamaRMSNorm", "LlamaMLP", "SiLUActivation"}
    assert_alike(results(model, IDS), results(original, IDS))
    twin = copy.deepcopy(model)
    assert_alike(results(twin, IDS), results(original, IDS))
    with torch.no_grad():
        for m in (twin, original):
            m.model.norm.weight.mul_(2.0)
            m.model.norm.variance_epsilon = 0.5
    assert_alike(results(twin, IDS), results(original, IDS))
    assert [*model.state_dict()] == [*original.state_dict()]


def test_hooks_and_adapters_of_a_projection_are_called() -> None:
    model, seen = kernelized(model_of("llama")), list[Any]()
    want = results(model, IDS)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, x, y: seen.append(y.shape))
    assert_alike(results(model, IDS), want)
    assert len(seen) == 1


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * x


@pytest.mark.parametrize("how", ["parametrization", "buffer", "approximate", "keyword"])
def test_a_module_is_what_it_is(how: str) -> None:
    """A weight that is no parameter, an attribute that changes the formula, arguments by their names."""
    norm, x = llama.LlamaRMSNorm(13), torch.randn(5, 13, generator=torch.Generator().manual_seed(0))
    if how == "parametrization":
        nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    elif how == "buffer":
        del norm.weight
        norm.register_buffer("weight", torch.rand(13))
    module = nn.GELU("tanh") if how == "approximate" else norm
    ours = kernelized(module)
    torch.testing.assert_close(ours(hidden_states=x) if how == "keyword" else ours(x), module(x))


def test_export_that_is_not_strict_says_what_it_cannot_take() -> None:
    with pytest.raises(Exception, match="te_fuser") as raised:
        torch.export.export(kernelized(model_of("llama")).model.norm, (torch.randn(3, 64),), strict=False)
    assert not isinstance(raised.value, RecursionError)


def test_gates_and_norms_that_no_op_has() -> None:
    model = kernelized(model_of("llama"))
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    raises(TypeError, "no gate by Tanh, .* leave SwiGLUMLP and GeGLUMLP out of the mapping", model, IDS)
    model = kernelized(model_of("llama"))
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, x, y: y)
    raises(TypeError, "no gate by SiLUActivation, or it has hooks", model, IDS)
    norm = kernelized(nn.LayerNorm((3, 5)))
    raises(TypeError, r"LayerNorm .* over one dimension, got \[3, 5\]: leave it unmapped", norm, torch.randn(2, 3, 5))


def test_lists_stay_outside_of_what_torch_compile_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where somebody compiles a model whose layers were replaced in another mode."""
    traced: list[bool] = []

    def noted(*members: nn.Module) -> Any:
        traced.append(torch.compiler.is_compiling())
        return te_fuser.Sequential(*members)

    monkeypatch.setattr(integrations, "Sequential", noted)
    original = model_of("llama", num_hidden_layers=1)
    model = kernelized(original)
    torch._dynamo.reset()
    model.compile(backend="eager")
    assert_alike(results(model, IDS), results(original, IDS))
    assert len(traced) == 4 and not any(traced)


def test_modes_with_torch_compile_keep_the_modules_own() -> None:
    norm, mode = llama.LlamaRMSNorm(4), kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping(MAPPING, inherit_mapping=False):
        kernels.kernelize(norm, mode=mode, device="cpu")
        assert norm.forward.__func__ is llama.LlamaRMSNorm.forward
        with pytest.raises(ValueError, match="does not support mode"):
            kernels.kernelize(norm, mode=mode, device="cpu", use_fallback=False)


def test_the_package_is_as_kernels_wants_it(tmp_path: Path, capsys: Any) -> None:
    """Metadata and digests are read and compared by `kernels`; `kernels info` describes the package."""
    write_package(tmp_path / "old")
    folder = write_package(tmp_path)
    for device in ("cpu", "cuda"):
        variant = folder / "build" / f"torch-{device}"
        metadata = kernels._rust.Metadata.read_from_file(variant / "metadata.json")
        sha256 = kernels._rust.DigestAlgorithm.SHA256
        metadata.digest.validate(kernels._rust.Digest.hash_variant(sha256, variant))
        assert metadata.id.isidentifier() and str(metadata.backend.backend_type) == device
    module = kernels.get_local_kernel(folder)
    assert {n for n, found in vars(module.layers).items() if inspect.isclass(found)} == {*LAYERS}
    info = pytest.importorskip("kernels.cli.info")
    info.print_kernel_info(str(folder), json_output=True)
    said = json.loads(capsys.readouterr().out)
    assert said["name"] == "te-fuser-layers" and sorted(said["backends"]) == ["cpu", "cuda"]
