"""The node agent: what it hears from engines, what it tells consoles."""
