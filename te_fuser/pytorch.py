"""te_fuser where Transformer Engine has its modules for PyTorch: `import te_fuser.pytorch as te`."""

from typing import TYPE_CHECKING, Any

import te_fuser

if TYPE_CHECKING:
    from te_fuser import *  # noqa: F403

__all__ = te_fuser.__all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(te_fuser, name)


def __dir__() -> list[str]:
    return sorted(__all__)
