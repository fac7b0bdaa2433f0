"""Determine which parameters of a model are weights and which are hyperparameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.parameter import is_lazy

from evigrad.errors import (
    ConfigurationError,
    NotFiniteError,
    NotPositiveDefiniteError,
    listed,
    nearest,
)
from evigrad.inputs import named_parameters
from evigrad.priors import matches


@contextmanager
def held_constant(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Freeze these parameters inside the context.

    The parameters are not replaced, because ``torch.func.functional_call`` would leave plain
    tensors instead of parameters in modules that are registered under two names.
    """
    marked = [p for p in parameters if p.requires_grad]
    try:
        for parameter in marked:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in marked:
            parameter.requires_grad_(True)


@contextmanager
def named_in_errors(hyperparameters: Callable[[], Mapping[str, nn.Parameter]]) -> Iterator[None]:
    """Add the values of the model's hyperparameters to errors about divergence.

    The most likely cause of divergence is a transform with a huge range, which no other message
    reports.

    Raises:
        NotFiniteError: If a NotFiniteError was raised inside the context.
        NotPositiveDefiniteError: If a NotPositiveDefiniteError was raised inside the context.
    """
    try:
        yield
    except (NotFiniteError, NotPositiveDefiniteError) as error:
        named = (f"{n} {_in_words(p)}" for n, p in hyperparameters().items() if n[:6] == "model.")
        words = f"Hyperparameters of the model: {', '.join(named)}."
        if words.endswith(": .") or words in str(error):
            raise
        raise type(error)(f"{error} {words}") from error


def _in_words(parameter: nn.Parameter) -> str:
    """Return the value of a parameter, or its smallest and largest entry."""
    least, most = (float(value) for value in parameter.detach().aminmax())
    return f"= {least:.4g}" if parameter.numel() == 1 else f"from {least:.4g} to {most:.4g}"


def trainable(model: nn.Module, excluded: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the model's trainable parameters by name, without duplicates or excluded parameters.

    Raises:
        ConfigurationError: If no parameter is left, if a lazy module has not seen its first inputs,
            or if a parameter or buffer is on the meta device. Also if a parameter was created in
            inference mode.
    """
    lazy = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]
    if lazy:
        raise ConfigurationError(
            f"The model has lazy parameters or buffers without a shape: {listed(lazy)}. Call"
            " model(x) on one batch before you create the Evidence."
        )
    empty = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if empty:
        raise ConfigurationError(
            f"The model has {listed(empty)} on the meta device, where tensors have no values."
            " Create the model on the CPU or on a GPU, for example inside torch.device('cpu')."
        )
    untracked = [name for name, p in model.named_parameters() if p.is_inference()]
    if untracked:
        raise ConfigurationError(
            f"{listed(untracked)} cannot have gradients, because the model was created or loaded"
            " inside torch.inference_mode(). Create it outside of this context."
        )
    ids = {id(p) for p in excluded.values()}
    weights = {
        n: p for n, p in named_parameters(model).items() if p.requires_grad and id(p) not in ids
    }
    if not weights:
        raise ConfigurationError(
            "The model has no trainable weights except hyperparameters. Call requires_grad_(True)"
            " on some of its other parameters."
        )
    return weights


def select(model: nn.Module, prefixes: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that match the names or prefixes, without duplicates.

    Raises:
        ConfigurationError: If a prefix matches no trainable parameter.
    """
    if isinstance(prefixes, str) or not isinstance(prefixes, Sequence):
        raise ConfigurationError(
            f"hyperparameters must be a list of names, such as ['invariance'], got {prefixes!r}."
        )
    named = named_parameters(model, remove_duplicate=False)
    chosen: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix in prefixes:
        parameters = {n: p for n, p in named.items() if matches(prefix, n)}
        if not parameters:
            names = [*named, *sorted({n.split(".")[0] for n in named})]
            raise ConfigurationError(
                f"hyperparameters: no parameter of the model matches '{prefix}'."
                f"{nearest(prefix, names)}"
            )
        if not any(p.requires_grad for p in parameters.values()):
            raise ConfigurationError(
                f"hyperparameters: the parameters that match '{prefix}' do not require a gradient."
                " Call requires_grad_() on these parameters."
            )
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                chosen.setdefault(id(parameter), (name, parameter))
    return dict(chosen.values())


def check_unchanged(
    model: nn.Module, weights: Mapping[str, nn.Parameter], others: Mapping[str, nn.Parameter]
) -> None:
    """Raise an error if a trainable parameter was added, removed, frozen, unfrozen or replaced."""
    ids = {id(p) for p in (*weights.values(), *others.values())}
    if ids != {id(p) for p in model.parameters() if p.requires_grad}:
        now = {id(p): name for name, p in named_parameters(model).items() if p.requires_grad}
        new = [name for key, name in now.items() if key not in ids]
        gone = [name for name, p in (*weights.items(), *others.items()) if id(p) not in now]
        raise ConfigurationError(
            "The model's trainable parameters have changed since the evidence was created"
            f" (new: {listed(new) or 'none'}, removed or frozen: {listed(gone) or 'none'})."
            " Create a new Evidence."
        )


def divided(
    hyperparameters: Mapping[str, nn.Parameter], wrt: str | Sequence[str] | None
) -> tuple[dict[str, nn.Parameter], list[nn.Parameter]]:
    """Return the hyperparameters that match ``wrt``, by name, and a list of all others.

    ``wrt`` contains names, prefixes such as the name of a module, or wildcards. None matches all
    hyperparameters.

    Raises:
        ConfigurationError: If a name matches no learnable hyperparameter.
    """
    if wrt is None:
        return dict(hyperparameters), []
    patterns = [wrt] if isinstance(wrt, str) else list(wrt)
    for pattern in patterns:
        if not any(matches(pattern, name) for name in hyperparameters):
            names = [*hyperparameters, *sorted({n.split(".")[0] for n in hyperparameters})]
            raise ConfigurationError(
                f"wrt: no learnable hyperparameter matches '{pattern}'.{nearest(pattern, names)}"
                f" Learnable hyperparameters: {', '.join(hyperparameters) or 'none'}."
            )
    asked = {n: p for n, p in hyperparameters.items() if any(matches(w, n) for w in patterns)}
    return asked, [p for name, p in hyperparameters.items() if name not in asked]
