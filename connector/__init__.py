"""kvtop's KV connector for vLLM, and its stat logger. Runs inside the engine."""

from kvtop.connector.kvtop_connector import KvtopConnector

__all__ = ["KvtopConnector"]
