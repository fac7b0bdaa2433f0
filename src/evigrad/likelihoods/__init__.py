"""Likelihoods: log p(y|f), its Hessian in the outputs f, and the roots of it that make the rows.

Conventions: f is (m, C), one row of outputs for each datum; log probabilities are normalised (all
constants included), in nats, per datum, and at temperature 1 (``Evidence`` applies the
temperature). Λ = −∇²_f log p(y|f) is the Hessian of the negative log likelihood in the outputs
(Immer et al. 2023, section 2).

A new likelihood is one class with ``log_prob`` and, where targets can be invalid, ``validate``; all
else has a default. Add it to ``LIKELIHOODS`` to give it a name.
"""

import inspect
from typing import Any

from evigrad.errors import ConfigurationError, nearest
from evigrad.likelihoods.base import Likelihood
from evigrad.likelihoods.bernoulli import Bernoulli
from evigrad.likelihoods.categorical import Categorical
from evigrad.likelihoods.gaussian import Gaussian
from evigrad.likelihoods.roots import ROOTS, RootRows

__all__ = [
    "LIKELIHOODS",
    "ROOTS",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "RootRows",
    "make_likelihood",
]

LIKELIHOODS: dict[str, type[Likelihood]] = {
    likelihood.name: likelihood for likelihood in (Categorical, Gaussian, Bernoulli)
}


def make_likelihood(likelihood: str | Likelihood, **settings: Any) -> Likelihood:
    """Make a likelihood by its name.

    Args:
        likelihood: A key of ``LIKELIHOODS``, or an instance, which is returned.
        **settings: Arguments of the class.

    Returns:
        The likelihood.

    Raises:
        ConfigurationError: If the name or a setting is unknown, or settings come with an instance.
    """
    if isinstance(likelihood, Likelihood):
        if settings:
            raise ConfigurationError(
                f"The settings {sorted(settings)} need the likelihood's name, not an instance."
            )
        return likelihood
    if likelihood not in LIKELIHOODS:
        raise ConfigurationError(
            f"There is no likelihood {likelihood!r}; known: {', '.join(LIKELIHOODS)}."
            f"{nearest(str(likelihood), LIKELIHOODS)}"
        )
    made = LIKELIHOODS[likelihood]
    known = inspect.signature(made).parameters
    for name in settings:
        if name not in known:
            raise ConfigurationError(
                f"The likelihood '{likelihood}' has no setting '{name}'; it has"
                f" {', '.join(known) or 'none'}.{nearest(name, known)}"
            )
    return made(**settings)
