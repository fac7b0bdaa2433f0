"""The paper's figures and tables, and custom experiments: ``python -m experiments fig4``.

An experiment is a YAML file (``definition``) of some kind (``kinds``). Its cases are read from the
results of jobs (``jobs``). ``runner`` runs missing jobs, and ``present`` draws and writes the
results. This program is not part of the installed package.
"""

from importlib.util import find_spec

_NEEDED = ("jsonargparse", "matplotlib", "rich", "yaml")
if _missing := [name for name in _NEEDED if find_spec(name) is None]:
    raise ModuleNotFoundError(
        "The experiments need more packages than the library: pip install -e '.[experiments]' in"
        f" the checkout ({', '.join(_missing)} missing)."
    )
