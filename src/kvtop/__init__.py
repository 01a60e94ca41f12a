"""kvtop: the operations console for disaggregated LLM serving."""

__version__ = "0.1.0"
