"""The paper's figures and tables, and experiments like them: ``python -m experiments fig4``.

An experiment is a YAML file (``definition``) of some kind (``kinds``). Its cases are read from the
results of jobs (``jobs``), which ``runner`` does where they have none, by ``work``; ``present``
draws and writes what is known. It is a program beside the library, and no part of its package.
"""

from importlib.util import find_spec

_NEEDED = ("jsonargparse", "matplotlib", "rich", "signac", "submitit", "yaml")
if _missing := [name for name in _NEEDED if find_spec(name) is None]:
    raise ModuleNotFoundError(
        "The experiments need more packages than the library: pip install -e '.[experiments]' in"
        f" the checkout ({', '.join(_missing)} missing)."
    )
