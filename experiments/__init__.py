"""The paper's figures and tables, and experiments like them: ``python -m experiments fig4``.

An experiment is a YAML file (``definition``) of some kind (``kinds``). Its cases are read from the
results of jobs (``jobs``), which ``runner`` does where they have none, by ``work``; ``present``
draws and writes what is known. It is a program beside the library, and no part of its package.
"""
