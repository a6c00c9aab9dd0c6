"""Coverage inside a rank: measured as in the driver, and saved where pytest-cov looks for data of other processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any


def coverage_options(*, forced: bool) -> dict[str, Any] | None:
    """How the driver measures coverage, as options of `coverage.Coverage`; None where ranks are not to.

    Args:
        forced: Somebody is going to combine the data. Otherwise the driver's own settings must say that data files of
            several processes are wanted.
    """
    coverage = sys.modules.get("coverage")
    current = None if coverage is None else coverage.Coverage.current()
    if current is None or not (forced or current.config.parallel):
        return None
    config = current.config
    return {
        "data_file": os.path.abspath(config.data_file),
        "data_suffix": True,
        "config_file": config.config_file or False,
        "source": config.source,
        "branch": config.branch,
    }


class Measuring:
    """Measures from its construction until `save`, unless the rank does so already or there is nothing to do."""

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self._coverage: Any = None
        if options is None:
            return
        import coverage

        if coverage.Coverage.current() is None:
            self._coverage = coverage.Coverage(**options)
            for warning in ("_warn_no_data", "_warn_unimported_source", "_warn_preimported_source"):
                setattr(self._coverage, warning, False)
            self._coverage.start()

    def save(self) -> None:
        """Stop and write the data file."""
        if self._coverage is not None:
            self._coverage.stop()
            self._coverage.save()
            self._coverage = None
