"""Likelihoods: log p(y|f), its Hessian in the outputs f, and the roots of it that make the rows.

Conventions: f is (m, C), one row of outputs for each datum; log probabilities are normalised (all
constants included), in nats, per datum, and at temperature 1 (``Evidence`` applies the
temperature). Λ = −∇²_f log p(y|f) is the Hessian of the negative log likelihood in the outputs
(Immer et al. 2023, section 2), or its mean over y, the Fisher information, where it depends on y.

A new likelihood is one class with ``log_prob`` and, where targets can be invalid, ``validate``; all
else has a default but ``sample``, for the names with ``mc``. One whose Hessian depends on the
targets overrides ``hessian``. ``LIKELIHOODS`` gives it a name; its closed forms are then trusted
and no longer compared on the user's data, so tests/likelihoods must.
"""

from evigrad.core.roots import ROOTS, RootRows
from evigrad.errors import ConfigurationError, nearest
from evigrad.likelihoods.base import Likelihood
from evigrad.likelihoods.bernoulli import Bernoulli
from evigrad.likelihoods.categorical import Categorical
from evigrad.likelihoods.gaussian import Gaussian
from evigrad.likelihoods.heteroscedastic import HeteroscedasticGaussian, NaturalGaussian
from evigrad.likelihoods.poisson import Poisson
from evigrad.likelihoods.weighted import Weighted

__all__ = [
    "LIKELIHOODS",
    "ROOTS",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "NaturalGaussian",
    "Poisson",
    "RootRows",
    "Weighted",
    "make_likelihood",
]

LIKELIHOODS: dict[str, type[Likelihood]] = {
    likelihood.name: likelihood
    for likelihood in (
        Categorical,
        Gaussian,
        HeteroscedasticGaussian,
        NaturalGaussian,
        Bernoulli,
        Poisson,
    )
}


def make_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood of a name in ``LIKELIHOODS``, with its default settings.

    An instance is returned as it is.

    Raises:
        ConfigurationError: If there is none of the name.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in LIKELIHOODS:
        raise ConfigurationError(
            f"There is no likelihood {likelihood!r}; known: {', '.join(LIKELIHOODS)}."
            f"{nearest(str(likelihood), LIKELIHOODS)}"
        )
    return LIKELIHOODS[likelihood]()
