"""Likelihoods: log p(y|f), its Hessian with respect to the outputs f, and roots of the Hessian.

Outputs f have the shape (m, C), with one row per example. Log probabilities are normalized (all
constants included), in nats per example, and at temperature 1 (``Evidence`` applies the
temperature). Λ = −∇²_f log p(y|f) is the Hessian of the negative log likelihood with respect to the
outputs (Immer et al. 2023, section 2). If the Hessian depends on y, Λ is its mean over y, the
Fisher information.

To add a likelihood, write a class with ``log_prob`` and, if targets can be invalid, ``validate``.
All other methods have defaults, except ``sample``, which estimators with ``mc`` in their names
need. Override ``hessian`` if the Hessian depends on the targets. ``LIKELIHOODS`` lists the built-in
classes. Their closed forms are not checked on the user's data, so tests/likelihoods must check
them.
"""

from evigrad.core.roots import ROOTS, RootRows
from evigrad.errors import ConfigurationError, nearest
from evigrad.likelihoods.base import Likelihood
from evigrad.likelihoods.bernoulli import Bernoulli
from evigrad.likelihoods.categorical import Categorical
from evigrad.likelihoods.conditional import Conditional
from evigrad.likelihoods.gaussian import Gaussian
from evigrad.likelihoods.heteroscedastic import HeteroscedasticGaussian, NaturalGaussian
from evigrad.likelihoods.joint import Joint
from evigrad.likelihoods.known_noise import KnownNoise
from evigrad.likelihoods.negative_binomial import NegativeBinomial
from evigrad.likelihoods.ordinal import Ordinal
from evigrad.likelihoods.poisson import Poisson
from evigrad.likelihoods.student_t import StudentT
from evigrad.likelihoods.weighted import Weighted

__all__ = [
    "LIKELIHOODS",
    "ROOTS",
    "Bernoulli",
    "Categorical",
    "Conditional",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Joint",
    "KnownNoise",
    "Likelihood",
    "NaturalGaussian",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "RootRows",
    "StudentT",
    "Weighted",
    "make_likelihood",
]

# Names have no settings. ``Ordinal`` and ``Joint`` need some, so they have no names here.
LIKELIHOODS: dict[str, type[Likelihood]] = {
    likelihood.name: likelihood
    for likelihood in (
        Categorical,
        Gaussian,
        StudentT,
        HeteroscedasticGaussian,
        NaturalGaussian,
        Bernoulli,
        Poisson,
        NegativeBinomial,
    )
}


def make_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood of this name in ``LIKELIHOODS``, with default settings.

    A ``Likelihood`` object is returned unchanged.

    Raises:
        ConfigurationError: If there is no likelihood of this name.

    Examples:
        >>> from evigrad.likelihoods import make_likelihood
        >>> type(make_likelihood("poisson")).__name__
        'Poisson'

    See also: docs/likelihoods.md.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in LIKELIHOODS:
        raise ConfigurationError(
            f"likelihood must be one of {', '.join(LIKELIHOODS)}, got {likelihood!r}."
            f"{nearest(str(likelihood), LIKELIHOODS)}"
        )
    return LIKELIHOODS[likelihood]()
