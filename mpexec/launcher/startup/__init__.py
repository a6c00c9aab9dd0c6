"""A folder that a rank has in its PYTHONPATH, where Python finds `sitecustomize` before it runs the script."""

from __future__ import annotations

import os

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def add_to(environ: dict[str, str]) -> None:
    """Have a Python that is started with `environ` import our `sitecustomize`, which takes the entry out again.

    Changes nothing if this folder's path has a colon, which PYTHONPATH has no way to write.
    """
    if os.pathsep in _FOLDER:
        return
    before = environ.get("PYTHONPATH")  # empty is the same as absent, for Python
    environ["PYTHONPATH"] = f"{_FOLDER}{os.pathsep}{before}" if before else _FOLDER
