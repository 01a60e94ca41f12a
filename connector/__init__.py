"""kvtop's KV connector for vLLM, and its stat logger. Runs inside the engine.

`KvtopConnector` is what vLLM looks up here; it is loaded on first use, so that the parts that need no engine
can be imported without one.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtop.connector.kvtop_connector import KvtopConnector

__all__ = ["KvtopConnector"]


def __getattr__(name: str) -> Any:
    """Load the connector when vLLM asks for it."""
    if name == "KvtopConnector":
        from kvtop.connector.kvtop_connector import KvtopConnector  # noqa: PLC0415

        return KvtopConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
