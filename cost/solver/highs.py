"""HiGHS by its own package, or where that is not installed the copy of it that scipy has from 1.15 on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import highspy as highspy
else:
    try:
        import highspy
    except ImportError as error:
        try:
            from scipy.optimize._highspy import _core
        except ImportError:
            raise error from None
        names = ("HighsLp", "HighsModelStatus", "HighsSolution", "HighsVarType", "MatrixFormat")
        highspy = SimpleNamespace(Highs=_core._Highs, **{name: getattr(_core, name) for name in names})

__all__ = ["highspy"]
