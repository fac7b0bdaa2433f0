"""Nothing in the model or in the process is changed by a plan, a linearization or its rows."""

import copy
import io
from collections import OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from network.dense import random, weights_of
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import _get_current_function_mode_stack
from zoo import CASES, HYPERPARAMETERS

from evigrad.errors import InputError
from evigrad.network import Linearization, plan
from evigrad.network.generic import vmap_rows
from evigrad.network.modes import _runs_only_layers, evaluation_mode, model_run
from evigrad.network.recorder import _with_gradient


def snapshot(model: nn.Module) -> list[tuple[str, str, int, str]]:
    """Every attribute of every module, and what the containers among them hold, by identity."""
    identities = []
    for name, module in model.named_modules():
        for key, value in sorted(module.__dict__.items()):
            held = ""
            if isinstance(value, dict):
                held = str([(k, id(v)) for k, v in value.items()])
            elif isinstance(value, list | set):
                held = str([id(v) for v in value])
            identities.append((name, key, id(value), held))
    return identities


def global_state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.get_default_dtype(),
        len(_get_current_function_mode_stack()),
    )


class Talkative(nn.Module):
    """Keeps what it computes: in an attribute, in a list, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.log: list[Tensor] = []
        self.names = {"a"}
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(3))
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.hidden = h
        self.log.append(h)
        self.names.add("b")
        self.calls += 1
        self.last = h.mean(0)
        if self.fail:
            raise KeyError("on the way")
        return h.tanh()


def run(model: nn.Module, x: Tensor, differentiable: bool) -> None:
    weights = weights_of(model, HYPERPARAMETERS)
    jacobian_plan = plan(model, weights, x)
    linearization = Linearization(model, weights, x, jacobian_plan, differentiable)
    parts = linearization.rows(random(len(x), 2, linearization.outputs.shape[1]))
    if differentiable:
        targets = [p for n, p in model.named_parameters() if n in HYPERPARAMETERS]
        if targets:
            value = sum(((r**2).sum() for r in parts.values()), start=torch.zeros(()))
            torch.autograd.grad(value, targets, allow_unused=True)


@pytest.mark.each(1)
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize(
    "case", ["batch-norm", "lstm", "gru", "parametrized", "transformer", "talkative"]
)
def test_model_is_as_before(case: str, differentiable: bool) -> None:
    if case == "talkative":
        model, x = Talkative().double(), random(4, 3)
    else:
        model, x = CASES[case].build(4)
    model.eval()
    for i, p in enumerate(model.parameters()):
        p.grad = random(*p.shape, seed=i)
    grads = {
        n: (p.grad, random(*p.shape, seed=i)) for i, (n, p) in enumerate(model.named_parameters())
    }
    state = {n: (t, t.detach().clone()) for n, t in model.state_dict(keep_vars=True).items()}
    handle = model.register_forward_hook(lambda *_: None)
    before, around = snapshot(model), global_state()

    run(model, x, differentiable)

    assert snapshot(model) == before
    assert global_state() == around
    for n, p in model.named_parameters():
        assert p.grad is not None
        assert p.grad is grads[n][0] and torch.equal(p.grad, grads[n][1]), n
    for n, t in model.state_dict(keep_vars=True).items():
        assert t is state[n][0] and torch.equal(t, state[n][1]), n
    handle.remove()
    again = copy.deepcopy(model)
    if case != "parametrized":  # which PyTorch itself does not pickle
        torch.save(model, io.BytesIO())
    torch.testing.assert_close(again(x), model(x))


def test_model_is_as_before_after_an_exception() -> None:
    model, x = Talkative().double().eval(), random(4, 3)
    weights = weights_of(model)
    jacobian_plan = plan(model, weights, x)
    model.fail = True
    before, around = snapshot(model), global_state()
    for call in (
        lambda: plan(model, weights, x),
        lambda: Linearization(model, weights, x, jacobian_plan, False),
        lambda: Linearization(model, weights, x, jacobian_plan, True),
    ):
        with pytest.raises(InputError, match="on the way"):
            call()
        assert snapshot(model) == before
        assert global_state() == around
    assert model.calls == 0
    copy.deepcopy(model)


class Diary:
    """Somebody's own object, in which a model writes."""

    def __init__(self) -> None:
        self.pages: list[Tensor] = []
        self.latest: Any = None
        self.owner: Any = self


class Collector(nn.Module):
    """Keeps what it computes in containers of all kinds, nested, one of them in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.recent: deque[Any] = deque([1, 2], maxlen=2)
        self.nested: dict[str, Any] = {"a": [{"b": deque()}], "t": ([],)}
        self.nested["self"] = self.nested
        self.ordered: OrderedDict[str, Any] = OrderedDict(one=1)
        self.default: defaultdict[str, list[Any]] = defaultdict(list)
        self.diary = Diary()
        self.hidden = [nn.Identity()]

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.recent.append(h)
        self.nested["a"][0]["b"].append(h)
        self.nested["a"][0]["c"] = h
        self.nested["t"][0].append(h)
        self.ordered["two"] = h
        self.ordered.move_to_end("one")
        self.default["new"].append(h)
        self.diary.pages.append(h)
        self.diary.latest = h
        self.hidden[0].kept = h
        return h


def test_containers_are_as_before_however_deep() -> None:
    model, x = Collector().double(), random(4, 3)
    containers = [
        model.recent,
        model.nested["a"][0]["b"],
        model.ordered,
        model.default,
        model.diary,
    ]
    run(model, x, True)
    assert list(model.recent) == [1, 2] and model.recent.maxlen == 2
    assert model.nested["a"] == [{"b": deque()}] and model.nested["t"] == ([],)
    assert model.nested["self"] is model.nested
    assert list(model.ordered) == ["one"]
    assert model.default == {} and model.default.default_factory is list
    assert model.diary.pages == [] and model.diary.latest is None
    assert not hasattr(model.hidden[0], "kept")
    after = [model.recent, model.nested["a"][0]["b"], model.ordered, model.default, model.diary]
    assert all(a is b for a, b in zip(containers, after, strict=True))
    copy.deepcopy(model)


def test_exception_under_vmap_leaves_the_model_as_it_was() -> None:
    model, x = CASES["lstm"].build(3)
    model.eval()
    weights = weights_of(model, HYPERPARAMETERS)
    before = snapshot(model)
    with pytest.raises(RuntimeError), model_run(model):
        vmap_rows(model, weights, list(weights), x, random(3, 1, 3), False)
    assert snapshot(model) == before


def test_exception_in_the_cotangents_leaves_the_model_as_it_was() -> None:
    model, x = CASES["transposed"].build(3)
    model.eval()
    weights = weights_of(model, HYPERPARAMETERS)
    linearization = Linearization(model, weights, x, plan(model, weights, x), False)
    before = snapshot(model)
    with pytest.raises(RuntimeError):
        linearization.rows(random(3, 1, 5))
    assert snapshot(model) == before
    assert all(p.grad is None for p in model.parameters())


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))


def test_only_passes_through_plain_layers_watch_no_attributes() -> None:
    def runs_only_layers(model: nn.Module) -> bool:
        return _runs_only_layers(list(model.modules()))

    def keep_result(module: nn.Module, inputs: Any, output: Tensor) -> None:
        module.kept = output

    assert runs_only_layers(layers())
    assert not runs_only_layers(Talkative())
    assert not runs_only_layers(nn.TransformerEncoderLayer(4, 2))
    for add_hook in (nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook):
        hooked = layers()
        add_hook(hooked[1], lambda module, *_: None)
        assert not runs_only_layers(hooked)
    handle = register_module_forward_hook(keep_result)
    assert not runs_only_layers(layers())
    handle.remove()
    replaced = layers()
    vars(replaced[1])["forward"] = lambda x: x.clamp(min=0)
    assert not runs_only_layers(replaced)
    assert not runs_only_layers(weight_norm(nn.Linear(2, 2)))
    compiled = layers()
    compiled[0].compile(backend="eager")
    assert not runs_only_layers(compiled)
    hooked = layers()
    hooked[1].register_forward_hook(keep_result)
    with model_run(hooked):
        hooked(random(3, 1, 4, 4).float())
        assert hasattr(hooked[1], "kept")
    assert not hasattr(hooked[1], "kept")


class ModeFollower(nn.Module):
    """A module that adapts its rate whenever its mode is set."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.9
        self.layer = nn.Linear(2, 1)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "training":
            vars(self)["rate"] = 0.9 if value else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * (1 - self.rate))


def test_evaluation_mode_is_set_by_the_modules_own_method() -> None:
    model = ModeFollower().train()
    with evaluation_mode(model, None):
        assert model.rate == 0.0 and not model.training and not model.layer.training
    assert model.rate == 0.9 and model.training and model.layer.training


def test_a_graph_starts_at_the_first_output_without_a_copy() -> None:
    output, view = random(3, 2), random(2, 3).mT
    expected = output.clone()
    result, of_view = _with_gradient(output), _with_gradient(view)
    assert result.requires_grad and not result.is_leaf
    assert result.data_ptr() == output.data_ptr() and torch.equal(result, expected)
    assert of_view.data_ptr() != view.data_ptr() and not view.requires_grad
    edge = get_gradient_edge(result)
    changed = result.relu_().square()
    (gradient,) = torch.autograd.grad(changed.sum(), [edge])
    torch.testing.assert_close(gradient, 2 * expected.clamp(min=0))


@pytest.mark.parametrize("differentiable", [False, True])
def test_graph_goes_with_the_linearization(differentiable: bool) -> None:
    import gc
    import weakref

    model, x = CASES["conv2d"].build(3)
    model.eval()
    weights = weights_of(model, HYPERPARAMETERS)
    linearization = Linearization(model, weights, x, plan(model, weights, x), differentiable)
    linearization.rows(random(3, 2, 3))
    node = weakref.ref(linearization)
    gc.disable()  # it must not take the garbage collector to free the memory
    try:
        del linearization
        assert node() is None
    finally:
        gc.enable()
