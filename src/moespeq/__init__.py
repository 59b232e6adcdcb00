"""moespeq: mixture-of-experts models larger than the device's memory, at full bf16 fidelity, exactly.

import moespeq

with moespeq.load("MODEL", device_memory="12GiB") as engine:
    print(engine.generate("Question: ...", max_new_tokens=64).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moespeq.api import from_pretrained, load
    from moespeq.errors import MoespeqError

__all__ = ["MoespeqError", "__version__", "from_pretrained", "load"]
__version__ = "0.1.0"

_HOMES = {"load": "moespeq.api", "from_pretrained": "moespeq.api", "MoespeqError": "moespeq.errors"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import moespeq` and `moespeq --help` answer at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'moespeq' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
