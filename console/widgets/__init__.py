"""Widgets of the terminal UI: they draw what `kvtop.console.views` computed."""
