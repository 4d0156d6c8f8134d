"""from_torch: the ops compute what the module does, with its own parameters, and what they cannot is named."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_fuser
from te_fuser import ops
from te_fuser.from_torch import SelfAttention, from_torch
from tests.twins import randomize

E, S, B = 12, 5, 3


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="enable_nested_tensor")
        yield


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def results(model: Callable[..., torch.Tensor], parameters: list[nn.Parameter], x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    y = model(x)
    dy = normal(*y.shape, seed=3, dtype=y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], dy)]


def assert_alike(
    module: nn.Module, x: torch.Tensor, call: Callable[..., torch.Tensor] | None = None, **given: torch.Tensor
) -> Any:
    """Values and all gradients, in float64 and float32, train and eval; the parameters are the module's own."""
    mask = given.pop("mask", "none")
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-4)):
        module.to(dtype)
        made: Any = from_torch(module, x.to(dtype), mask=mask)  # type: ignore[arg-type]
        own = dict(module.named_parameters())
        assert {n: id(p) for n, p in made.named_parameters()} == {n: id(p) for n, p in own.items()}
        assert made.state_dict().keys() == module.state_dict().keys()
        for training in (True, False):
            module.train(training), made.train(training)
            want = results(call or module, list(own.values()), x.to(dtype))
            got = results(lambda x, made=made: made(x, **given), list(own.values()), x.to(dtype))
            for mine, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * (1 + theirs.abs().max()))
    return made


SINGLE = {
    "linear": lambda: nn.Linear(E, 7),
    "linear_no_bias": lambda: nn.Linear(E, 7, bias=False),
    "layer_norm": lambda: nn.LayerNorm(E, eps=1e-3),
    "layer_norm_no_bias": lambda: nn.LayerNorm(E, bias=False),
    "layer_norm_plain": lambda: nn.LayerNorm(E, elementwise_affine=False),
    "layer_norm_of_two": lambda: nn.LayerNorm((S, E)),
    "rms_norm": lambda: nn.RMSNorm(E, eps=1e-3),
    "rms_norm_no_eps": lambda: nn.RMSNorm(E),
    "rms_norm_plain_of_two": lambda: nn.RMSNorm((S, E), eps=1e-3, elementwise_affine=False),
    "gelu": lambda: nn.GELU(),
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "relu_in_place": lambda: nn.Sequential(nn.Linear(E, E), nn.ReLU(inplace=True)),
    "silu": lambda: nn.SiLU(),
    "sigmoid": lambda: nn.Sigmoid(),
    "tanh": lambda: nn.Tanh(),
    "glu": lambda: nn.GLU(),
    "softmax": lambda: nn.Softmax(dim=-1),
    "log_softmax": lambda: nn.LogSoftmax(dim=-1),
    "dropout_0": lambda: nn.Dropout(0.0),
    "identity": lambda: nn.Identity(),
    "flatten": lambda: nn.Flatten(),
    "unflatten": lambda: nn.Unflatten(-1, (3, 4)),
}


@pytest.mark.parametrize("name", SINGLE)
def test_single_modules(name: str) -> None:
    made = assert_alike(randomize(SINGLE[name]()), normal(B, S, E))
    assert isinstance(made, (ops.FusableOperation, te_fuser.Sequential))


def test_a_list_is_one_plan_and_names_stay() -> None:
    module = nn.Sequential(
        nn.Sequential(nn.LayerNorm(E), nn.Linear(E, 4 * E), nn.GELU()), nn.Linear(4 * E, E), nn.Dropout(0.0)
    )
    made = assert_alike(randomize(module), normal(B, S, E))
    assert list(made.state_dict()) == list(module.state_dict())
    assert len(made.plan(normal(B, S, E).float()).graph.nodes) == 7


# ------------------------------------------------------------------------------------------------- attention

MASKS = ("none", "causal", "given", "causal_and_given")


def hidden(mask: str, *lead: int) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """(what the module is told, what the ops are told); every position sees itself."""
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    given = (normal(*lead, S, S, seed=8) > 0.3) & ~torch.eye(S, dtype=torch.bool)
    theirs = {"none": None, "causal": later, "given": given, "causal_and_given": given | later}[mask]
    return theirs, {"attention_mask": given} if "given" in mask else {}


@pytest.mark.parametrize(("bias", "batch_first"), [(False, True), (True, False)])
@pytest.mark.parametrize("mask", MASKS)
def test_attention(bias: bool, batch_first: bool, mask: str) -> None:
    mha = randomize(nn.MultiheadAttention(E, 3, bias=bias, batch_first=batch_first))
    theirs, ours = hidden(mask)
    x = normal(B, S, E) if batch_first else normal(S, B, E)
    call = lambda x: mha(x, x, x, attn_mask=theirs, need_weights=False)[0]  # noqa: E731
    made = assert_alike(mha, x, call, mask=mask, **ours)  # type: ignore[arg-type]
    assert isinstance(made, SelfAttention)


def test_masks_of_samples_and_of_heads() -> None:
    """torch: [batch * heads, queries, keys], and [batch, keys] for padding; the op: [batch, heads, queries, keys]."""
    mha = randomize(nn.MultiheadAttention(E, 3, batch_first=True)).double()
    made, x = from_torch(mha, mask="given"), normal(B, S, E)
    by_head = (normal(B * 3, S, S, seed=8) > 0.3) & ~torch.eye(S, dtype=torch.bool)
    padding = torch.arange(S) >= torch.tensor([[5], [3], [1]])
    want = mha(x, x, x, attn_mask=by_head, need_weights=False)[0]
    torch.testing.assert_close(made(x, attention_mask=by_head.view(B, 3, S, S)), want)
    want = mha(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(made(x, attention_mask=padding[:, None, None, :]), want)


@pytest.mark.parametrize(("norm_first", "batch_first"), [(False, False), (True, True)])
@pytest.mark.parametrize("mask", MASKS)
def test_encoder_layer(norm_first: bool, batch_first: bool, mask: str) -> None:
    layer = nn.TransformerEncoderLayer(E, 3, 20, dropout=0.0, norm_first=norm_first, batch_first=batch_first)
    theirs, ours = hidden(mask)
    x = normal(B, S, E) if batch_first else normal(S, B, E)
    assert_alike(randomize(layer), x, lambda x: layer(x, src_mask=theirs), mask=mask, **ours)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "activation",
    [F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, "gelu", nn.GELU("tanh")],
    ids=lambda a: getattr(a, "__name__", str(a)),
)
def test_activations_of_an_encoder_layer(activation: Any) -> None:
    layer = nn.TransformerEncoderLayer(E, 3, 20, dropout=0.0, activation=activation, bias=False)
    made = assert_alike(randomize(layer), normal(S, B, E))
    assert len(made.plan(normal(S, B, E).float()).graph.nodes) == 15


@pytest.mark.parametrize("norm", [False, True])
def test_encoder(norm: bool) -> None:
    layer = nn.TransformerEncoderLayer(E, 3, 20, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(E) if norm else None)
    theirs, ours = hidden("given")
    made = assert_alike(
        randomize(encoder),
        normal(B, S, E),
        lambda x: encoder(x, mask=theirs),
        mask="given",
        **ours,  # type: ignore[arg-type]
    )
    x = normal(B, S, E).float().requires_grad_()
    assert len(made.plan(x, **ours).graph.nodes) == 2 * 19 + norm  # one plan


def test_what_is_dropped_and_when() -> None:
    layer = nn.TransformerEncoderLayer(E, 3, 20, dropout=0.5).eval()
    made: Any = from_torch(layer)
    assert not made.training and not made.self_attn.attention.training and made.self_attn.attention.dropout == 0.5
    assert [made.get_submodule(n).p for n in ("dropout", "dropout1", "dropout2")] == [0.5] * 3
    x = normal(S, B, E).float()
    torch.testing.assert_close(made(x), layer(x), rtol=1e-4, atol=1e-5)
    made.train()
    assert not torch.equal(made(x), made(x))
    assert not layer.training


# ------------------------------------------------------------------------------------------ whose parameters


def test_parameters_are_shared_and_the_module_goes_on() -> None:
    module = nn.Sequential(nn.Linear(E, E), nn.TransformerEncoderLayer(E, 3, 20, dropout=0.0, batch_first=True))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    made, x = from_torch(module), normal(B, S, E).float()
    before = made(x)
    before.square().sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    optimizer.step()
    assert not torch.allclose(made(x), before)
    torch.testing.assert_close(made(x), module(x), rtol=1e-4, atol=1e-5)
    for p in module.parameters():
        p.requires_grad_(False)
    assert not made(x).requires_grad
    module.double()
    torch.testing.assert_close(made(x.double()), module(x.double()))


def test_a_module_in_two_places_stays_one() -> None:
    shared = nn.Linear(E, E)
    module = nn.Sequential(shared, nn.Tanh(), shared)
    made = assert_alike(module, normal(B, E))
    assert made[0] is made[2] and made.state_dict().keys() == module.state_dict().keys()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_have_parameters_of_their_own(again: Callable[[Any], Any]) -> None:
    made = from_torch(randomize(nn.TransformerEncoderLayer(E, 3, 20, dropout=0.0)))
    x = normal(S, B, E).float()
    want = made(x)
    twin = again(made)
    assert torch.equal(twin(x), want)
    twin.self_attn.in_proj_weight.data.zero_()
    assert torch.equal(made(x), want) and not torch.equal(twin(x), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    layer = nn.TransformerEncoderLayer(E, 3, 20, dropout=0.0, dtype=dtype)
    made, x = from_torch(layer), normal(S, B, E).to(dtype)
    exact = copy.deepcopy(layer).double()(x.double())
    assert made(x).dtype == dtype
    torch.testing.assert_close(made(x).double(), exact, rtol=0.05, atol=0.05)


def test_looking_leaves_everything_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(E, E), nn.BatchNorm1d(S), nn.Dropout(0.5), nn.Linear(E, E).eval())
    state = copy.deepcopy(module.state_dict())
    random, modes = torch.get_rng_state(), [m.training for m in module.modules()]
    with pytest.warns(UserWarning, match=r"'1' \(BatchNorm1d\)"):
        made = from_torch(module, normal(B, S, E).float())
    assert torch.equal(torch.get_rng_state(), random) and [m.training for m in module.modules()] == modes
    assert all(torch.equal(t, state[n]) for n, t in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert [m.training for m in made] == [m.training for m in module]  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------- what it cannot


class OwnLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


class WithBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(E, E)
        self.register_buffer("seen", torch.zeros(()))


def hooked(m: nn.Module) -> nn.Module:
    m.register_forward_hook(lambda m, args, y: 3.0 * y)
    return m


def patched() -> nn.Module:
    m = nn.Linear(E, E)
    m.forward = lambda x: x  # type: ignore[method-assign]
    return m


def to_nothing() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is nothing to initialize
        return nn.Linear(E, 0)


CANNOT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "conv": (lambda: nn.Conv1d(S, S, 1), "te_fuser has no op for it"),
    "subclass": (lambda: OwnLinear(E, E), "a Linear with a forward of its own"),
    "buffer": (WithBuffer, "parameters or buffers that the op has not: seen"),
    "hook": (lambda: hooked(nn.Linear(E, E)), "it has hooks"),
    "patched": (patched, "it has a forward of its own"),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(E, E)), "parametrize the op in its place"),
    "softmax": (lambda: nn.Softmax(dim=1), r"works over dim=1, the op over the features"),
    "eps": (lambda: nn.RMSNorm(E, elementwise_affine=False), "its eps follows the dtype of x"),
    "own_block": (lambda: Louder(E, 3, 20, batch_first=True), "a TransformerEncoderLayer with a _ff_block of its own"),
    "own_layer": (lambda: OwnLayer(E, 3, 20, batch_first=True), "a TransformerEncoderLayer with a forward of its own"),
    "no_features": (to_nothing, "it gives 0 features"),
    "hooked_list": (lambda: hooked(nn.Sequential(nn.Linear(E, E))), "it has hooks"),
    "activation": (
        lambda: nn.TransformerEncoderLayer(E, 3, 20, batch_first=True, activation=F.mish),
        "its activation is the function 'mish'",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_it_cannot_is_left_and_named(name: str) -> None:
    make, why = CANNOT[name]
    module = nn.Sequential(nn.Sequential(nn.GELU(), make())).double().eval()
    with pytest.warns(UserWarning, match=rf"'0\.1' \({type(module[0][1]).__name__}\): .*{why}"):
        made = from_torch(module, normal(B, S, E))
    assert made[0][1] is module[0][1]  # type: ignore[index]
    torch.testing.assert_close(made(normal(B, S, E)), module(normal(B, S, E)))
    with pytest.raises(TypeError, match=rf"cannot turn {type(module[0][1]).__name__} into ops: .*{why}"):
        from_torch(module[0][1])


class Louder(nn.TransformerEncoderLayer):
    def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super()._ff_block(x)


class OwnLayer(nn.TransformerEncoderLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2.0 * super().forward(x)


ATTENTION = {
    "decoder_layer": (lambda: nn.TransformerDecoderLayer(E, 3), "keys and values of another tensor"),
    "decoder": (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(E, 3), 1), "keys and values of another"),
    "transformer": (lambda: nn.Transformer(E, 3, 1, 1), "keys and values of another tensor"),
    "other_sizes": (lambda: nn.MultiheadAttention(E, 3, kdim=8, vdim=8), "kdim=8 and vdim=8"),
    "own_keys": (lambda: nn.MultiheadAttention(E, 3, add_bias_kv=True), "add_bias_kv, add_zero_attn"),
    "zero_keys": (lambda: nn.MultiheadAttention(E, 3, add_zero_attn=True), "add_bias_kv, add_zero_attn"),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_that_it_cannot(name: str) -> None:
    make, why = ATTENTION[name]
    with pytest.raises(TypeError, match=f"into ops: .*{why}"):
        from_torch(make())


def test_no_attention_runs_without_the_mask_that_is_wanted() -> None:
    odd = nn.TransformerEncoderLayer(E, 3, 20, activation=F.mish)
    with pytest.raises(TypeError, match=r"'1' \(TransformerEncoderLayer\), which would run without its mask: .*mish"):
        from_torch(nn.Sequential(nn.Linear(E, E), odd), mask="causal")
    with pytest.raises(ValueError, match="there is no attention in this Linear to take mask='causal'"):
        from_torch(nn.Linear(E, E), mask="causal")
    with pytest.raises(ValueError, match="mask='padding' is unknown"):
        from_torch(odd, mask="padding")


def test_an_embedding_in_front() -> None:
    layer = nn.TransformerEncoderLayer(E, 3, 20, dropout=0.0, batch_first=True)
    module = nn.Sequential(nn.Embedding(10, E), layer, nn.Linear(E, 10))
    with pytest.warns(UserWarning, match=r"'0' \(Embedding\): te_fuser has no op for it"):
        made = from_torch(module)
    ids = torch.randint(10, (B, S))
    torch.testing.assert_close(made(ids), module(ids), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ the check


def test_the_check_finds_what_a_class_does_not_say() -> None:
    class Louder(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)
            return 2.0 * found if name == "weight" else found

    with pytest.raises(RuntimeError, match=r"the output of the ops lies .* from the module's, whose largest is"):
        from_torch(randomize(Louder(E, E)))
    from_torch(randomize(Louder(E, E)), check=False)


def test_an_input_that_the_module_does_not_take() -> None:
    module = nn.Sequential(nn.Flatten(1, 2), nn.Linear(S * E, 4))
    with pytest.raises(ValueError, match=r"does not take random numbers \[4, 4, 60\] or \[4, 60\]: give x"):
        from_torch(module)
    assert_alike(module, normal(B, S, E))
    with pytest.raises(ValueError, match=r"the module does not take x \[3\]: give x"):
        from_torch(module, normal(3))
    with pytest.raises(TypeError, match=r"^from_torch\(module, x\) takes a torch.Tensor, got str"):
        from_torch(module, "x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="with an x on the meta device: give one with values, or check=False"):
        from_torch(module, torch.empty(B, S, E, device="meta"))
    layer = nn.TransformerEncoderLayer(E, 4, 20, batch_first=True)
    layer.norm1 = nn.RMSNorm(E, eps=1e-5)  # type: ignore[assignment]  # torch's own layer asks for its bias, in eval mode
    with pytest.raises(ValueError, match=r"does not take random numbers \[4, 4, 12\]: .*has no attribute 'bias'"):
        from_torch(layer)
    with pytest.raises(TypeError, match="compares tensors, and the module gives a tuple: give check=False"):
        from_torch(nn.Sequential(nn.LSTM(E, E)), normal(B, S, E).float())


def test_rows_alone_where_the_module_takes_no_more() -> None:
    assert from_torch(nn.Sequential(nn.Flatten(), nn.Linear(E, 4), nn.LogSoftmax(dim=-1)))
    with pytest.warns(UserWarning, match=r"'1' \(BatchNorm1d\)"):
        from_torch(nn.Sequential(nn.Linear(E, E), nn.BatchNorm1d(E)))


def test_a_module_that_writes_over_its_input() -> None:
    module, x = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(E, E)), normal(B, E).float()
    torch.testing.assert_close(from_torch(module)(x), module(x.clone()))


def test_on_the_meta_device_nothing_is_checked() -> None:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(E, 3, 20)
    with pytest.raises(ValueError, match="on the meta device: give check=False"):
        from_torch(layer)
    made: Any = from_torch(layer, check=False)
    x = torch.empty(S, B, E, device="meta", requires_grad=True)
    assert "Plan" in str(made.explain(x, device="h200", details=True))


def test_ops_are_taken_as_they_are() -> None:
    norm = ops.RMSNorm(E).eval()
    assert from_torch(norm) is norm
    made: Any = from_torch(nn.Sequential(nn.Linear(E, E), norm))
    assert made[1] is norm and not norm.training and made.training


def test_it_is_converted_wherever_that_happens() -> None:
    layer, x = nn.TransformerEncoderLayer(E, 3, 20, dropout=0.0), normal(S, B, E).float()
    for scope in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.device("meta"),
    ):
        with scope:
            made = from_torch(layer)
        torch.testing.assert_close(made(x), layer(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got the class Linear"):
        from_torch(nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot turn ModuleList into ops: te_fuser has no op for it"):
        from_torch(nn.ModuleList([nn.Linear(E, E)]))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.conv = nn.LayerNorm(E), nn.MultiheadAttention(E, 3), nn.Conv1d(E, E, 1)
        self.mlp = nn.Sequential(nn.Linear(E, 2 * E), nn.GELU(), nn.Linear(2 * E, E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.mlp(y) + self.attention(y, y, y)[0] + self.conv(y.mT).mT


class Stack(nn.Module):
    """A model with a forward of its own, and parts in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.heads = nn.ModuleList([Block(), Block()]), nn.ModuleDict({"a": nn.Linear(E, E)})
        self.ours = ops.Linear(E, E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.ours(self.heads["a"](x))


@pytest.mark.parametrize("of_whom", [from_torch, te_fuser.convert])
def test_a_model_with_a_forward_of_its_own_is_told_the_lines_for_its_parts(of_whom: Callable[[Any], Any]) -> None:
    model, x = Stack().double(), normal(B, S, E)
    wanted, found = model(x), list[str]()
    while True:  # a few are told at a time
        try:
            of_whom(model)
        except TypeError as error:
            lines = re.findall(r"(model\S+) = te_fuser.from_torch\(\1\)", str(error))
        if not lines:
            break
        found += lines
        for line in lines:
            exec(f"{line} = te_fuser.from_torch({line})", {"model": model, "te_fuser": te_fuser})
    assert found == [*(f"model.layers[{k}].{part}" for k in (0, 1) for part in ("norm", "mlp")), "model.heads.a"]
    assert isinstance(model.layers[0].mlp, te_fuser.Sequential) and isinstance(model.heads["a"], ops.Linear)
    torch.testing.assert_close(model(x), wanted)
    of_one = model.layers[1]
    of_one.mlp[0].weight.grad = None
    model(x).sum().backward()
    assert of_one.mlp[0].weight.grad is not None


@pytest.mark.parametrize("module", [nn.Embedding(3, 4), nn.Conv1d(2, 2, 1)])
def test_what_no_op_means_is_told_to_stand_in_a_list_as_it_is(module: nn.Module) -> None:
    with pytest.raises(TypeError, match="te_fuser has no op for it; in a te_fuser.Sequential it runs by itself, as it"):
        from_torch(module)
    with pytest.raises(TypeError, match=f"{type(module).__name__} has none of them$"):
        te_fuser.convert(module)


def test_a_linear_that_was_pruned_by_its_weight_alone() -> None:
    module = nn.Sequential(nn.Linear(E, 20), nn.GELU(), nn.Linear(20, 3))
    first, last = module[0], module[2]
    first.weight, first.bias = nn.Parameter(first.weight[:7].detach()), nn.Parameter(first.bias[:7].detach())
    last.weight = nn.Parameter(last.weight[:, :7].detach())
    x = normal(S, E).float()
    torch.testing.assert_close(from_torch(module)(x), module(x))
