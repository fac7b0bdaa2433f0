"""Networks of Transformers and adapters of PEFT, built on the spot, against dense matrices."""

import socket
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from late import Late
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import evigrad
from evigrad import reference
from evigrad.errors import InputError
from evigrad.inputs import Tree
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

peft, transformers = Late("peft"), Late("transformers")

N, LENGTH, WORDS, CLASSES = 4, 5, 7, 3
CLOSED = {"linear", "addmm", "layer_norm", "embedding", "conv2d", "add", "expand"}
CLOSED |= {"embedding + linear"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:The model has normalization layers"),
    # Of these libraries' own code.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise AssertionError("a model was to be downloaded")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    # Other kernels have no second derivative, which dense matrices need.
    with sdpa_kernel(SDPBackend.MATH):
        yield


class LastWord(nn.Module):
    """A language model, with tied embeddings, as a classifier of the next word."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output = self.net(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=1)
        return output.logits[:, 0]


def bert(attention: str) -> nn.Module:
    settings: dict[str, Any] = {
        "attn_implementation": attention,
        "vocab_size": WORDS,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 6,
        "max_position_embeddings": LENGTH,
        "num_labels": CLASSES,
    }
    return transformers.BertForSequenceClassification(transformers.BertConfig(**settings))


def gpt(attention: str) -> nn.Module:
    settings: dict[str, Any] = {
        "attn_implementation": attention,
        "vocab_size": WORDS,
        "n_embd": 4,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))


def vit(attention: str) -> nn.Module:
    settings: dict[str, Any] = {
        "attn_implementation": attention,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 6,
        "image_size": 4,
        "patch_size": 2,
        "num_channels": 1,
        "num_labels": CLASSES,
    }
    return transformers.ViTForImageClassification(transformers.ViTConfig(**settings))


# A network, where it takes adapters, and a weight that the evidence learns.
MODELS: dict[str, tuple[Callable[[str], nn.Module], list[str], str]] = {
    "vit": (vit, ["q_proj", "fc1"], "vit.layernorm.weight"),
    "bert": (bert, ["query", "value"], "bert.embeddings.LayerNorm.weight"),
    "gpt": (gpt, ["c_attn", "c_proj"], "transformer.h.0.ln_1.weight"),
    "next word": (gpt, ["c_attn", "c_proj"], "transformer.h.0.ln_1.weight"),
}


def make(name: str, attention: str, adapted: bool) -> tuple[nn.Module, list[str]]:
    """A network in float64 with random weights, and the names of what the evidence learns."""
    torch.manual_seed(0)
    build, targets, learned = MODELS[name]
    net = build(attention)
    if adapted:
        lora = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=build is gpt)
        net = peft.get_peft_model(net, lora)
        learned = f"base_model.model.{learned}"
        net.get_parameter(learned).requires_grad_()
    if name == "gpt":
        net, learned = LastWord(net), f"net.{learned}"
    net = net.double().eval()
    for parameter in net.parameters():  # an adapter's second matrix is zero at first
        parameter.data += 0.3 * torch.randn_like(parameter)
    return net, [learned]


def data(name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Sentences of several lengths: padded behind, and in front where the last word counts."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        pixels = torch.randn(N, 1, 4, 4, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels}, torch.arange(N) % CLASSES
    ids = torch.randint(1, WORDS, (N, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.tensor([[5], [3], [1], [5]])).long()
    mask = mask.flip(1) if name == "gpt" else mask
    x = {"input_ids": ids * mask, "attention_mask": mask}
    if name == "next word":
        following = ids.masked_fill(mask == 0, -100).roll(-1, 1)
        following[:, -1] = -100
        return x, following
    return x, torch.arange(N) % (CLASSES if name == "bert" else WORDS)


def spread(x: dict[str, Tensor], y: Tensor) -> tuple[Tree, Tensor]:
    """The data of dense matrices: each position that has a target, where y is (m, T)."""
    if y.dim() == 1:
        return Tree(x), y
    n, place = (y != -100).nonzero(as_tuple=True)
    return Tree({**{name: part[n] for name, part in x.items()}, "place": place}), y[n, place]


class OfTree(nn.Module):
    """A network's outputs for a ``Tree``, which dense matrices cut into data."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tree) -> Tensor:
        value = dict(x.value)
        place = value.pop("place", None)
        output = self.net(**value)
        output = output if isinstance(output, Tensor) else output.logits
        return output if place is None else output[torch.arange(len(place)), place]


def kronecker(net: nn.Module, x: Tree, names: dict[str, nn.Module]) -> dict[str, Tensor]:
    """B ⊗ A / (number of positions) of the weights of linear layers, by hooks on the layers."""
    seen: dict[str, list[tuple[Any, Tensor]]] = {name: [] for name in names}
    handles = [
        module.register_forward_hook(lambda _, a, z, calls=seen[name]: calls.append((a[0], z)))
        for name, module in names.items()
    ]
    model = OfTree(net)
    sums: dict[str, list[Any]] = {name: [0.0, 0.0, 0] for name in names}
    for n in range(len(x)):
        f = model(x[n : n + 1])
        uses = {name: calls.pop() for name, calls in seen.items()}
        assert not any(seen.values())
        root = reference.softmax_root(f, "fisher")[0]
        for c in range(f.shape[1]):
            of_outputs = [z for _, z in uses.values()]
            gradients = torch.autograd.grad(f, of_outputs, root[None, :, c], create_graph=True)
            for name, g in zip(names, gradients, strict=True):
                g = g.flatten(0, -2)
                sums[name][1] = sums[name][1] + g.T @ g
        for name, (a, _) in uses.items():
            a = a.flatten(0, -2)
            sums[name][0] = sums[name][0] + a.T @ a
            sums[name][2] += len(a)
    for handle in handles:
        handle.remove()
    return {
        name: torch.kron(a, b) / count
        if isinstance(names[name], transformers.pytorch_utils.Conv1D)
        else torch.kron(b, a) / count
        for name, (a, b, count) in sums.items()
    }


def dense(
    evidence: evigrad.Evidence, x: Tree, y: Tensor, structure: str, words: dict[str, str]
) -> Tensor:
    """The log evidence of all data with a graph, from dense matrices."""
    weights, model = evidence.weights(), OfTree(evidence.model)
    precisions = evidence.prior.precisions()
    f = reference.outputs(model, x)  # pyright: ignore[reportArgumentType]
    jac = reference.jacobian(model, weights, x)  # pyright: ignore[reportArgumentType]
    hessian = reference.softmax_hessian(f)
    if structure == "ntk":
        h = reference.ggn(jac, hessian)
        log_det = reference.log_det(h, reference.vector(precisions, weights))
    else:
        modules = dict(evidence.model.named_modules())
        owners = {name: modules[name.rpartition(".")[0]] for name in weights}
        layers = {
            n: m for n, m in owners.items() if words[n] in ("linear", "addmm") and "bias" not in n
        }
        blocks = kronecker(evidence.model, x, layers)
        sizes = [w.numel() for w in weights.values()]
        parts = dict(zip(weights, jac.split(sizes, dim=2), strict=True))
        for name in weights.keys() - layers.keys():
            blocks[name] = reference.ggn(parts[name], hessian)
        log_det = torch.zeros((), dtype=f.dtype)
        for name, block in blocks.items():
            log_det = log_det + reference.log_det(
                block, precisions[name].expand_as(weights[name]).flatten()
            )
    decay = sum((precisions[n] * w.detach() ** 2).sum() for n, w in weights.items())
    log_likelihood = f.log_softmax(-1).gather(1, y[:, None]).sum()
    return log_likelihood - 0.5 * decay - 0.5 * log_det


@pytest.mark.each(1)
@pytest.mark.parametrize("adapted", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("name", "structure"),
    [("vit", "ntk"), *product(["bert", "gpt", "next word"], ["ntk", "kfac"])],
)
def test_value_and_gradient(name: str, attention: str, adapted: bool, structure: str) -> None:
    net, learned = make(name, attention, adapted)
    x, y = data(name)
    of_data, targets = spread(x, y)
    evidence = evigrad.Evidence(
        net,
        Categorical(),
        GaussianPrior("layerwise"),
        estimator=f"{structure}-N-C",
        num_data=len(targets),
        hyperparameters=learned,
        sharing="expand",
        generator=0,
    )
    words = {report.name: report.rows for report in evidence.describe(x)}
    assert set(words.values()) <= CLOSED
    assert adapted == all("lora" in name for name in words)
    expected = dense(evidence, of_data, targets, structure, words)
    estimate = evidence.backward(x, y)
    assert estimate.log_evidence == pytest.approx(expected.item(), rel=1e-9)
    named = evidence.hyperparameters()
    assert any(net.get_parameter(learned[0]) is p for p in named.values())
    gradients = torch.autograd.grad(-expected / len(targets), list(named.values()))
    for (key, parameter), gradient in zip(named.items(), gradients, strict=True):
        assert parameter.grad is not None
        error = (parameter.grad - gradient).norm() / gradient.norm()
        assert error < 1e-8, f"{key}: {error:.1e}"


def test_a_mask_that_leaves_nothing() -> None:
    net, learned = make("bert", "sdpa", adapted=True)
    x, y = data("bert")
    x["attention_mask"][2] = 0
    evidence = evigrad.Evidence(
        net,
        Categorical(),
        GaussianPrior("layerwise"),
        estimator="ntk-4-1",
        num_data=N,
        hyperparameters=learned,
    )
    for call in (evidence.map_loss, evidence.estimate):
        with pytest.raises(
            InputError, match="'attention_mask' .* 1 of 4 examples. The first of these .* index 2"
        ):
            call(x, y)


def test_fine_tuning_by_adapters() -> None:
    net, learned = make("bert", "sdpa", adapted=True)
    net.get_parameter(learned[0]).requires_grad_(False)
    frozen = {n: p.clone() for n, p in net.named_parameters() if "lora" not in n}
    schedule = evigrad.Schedule(epochs=3, batch_size=2, burn_in=1, steps=1)
    result = evigrad.fit(net, data("bert"), estimator="ntk-2-1", schedule=schedule, progress=False)
    assert len(result.evidence.weights()) == 4
    for name, before in frozen.items():
        assert torch.equal(net.get_parameter(name), before)
