"""The names that the package promises, and what using them loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mpexec


def test_the_promised_names_are_sorted_and_there() -> None:
    assert list(mpexec.__all__) == sorted(mpexec.__all__)
    assert all(getattr(mpexec, name) is not None for name in mpexec.__all__)
    assert set(mpexec.__all__) <= set(dir(mpexec))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        mpexec.Nothing  # noqa: B018


def test_every_public_error_is_at_the_door() -> None:
    from mpexec import errors

    public = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert public <= set(mpexec.__all__)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, mpexec; print(len([m for m in sys.modules if m.startswith('mpexec')]), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["1", "False"]
