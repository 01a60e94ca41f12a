"""Themes from TOML files in `themes/` to Textual's themes, and the variables that kvtop adds to them."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec
from textual.theme import Theme

from kvtop.console.fleet.errors import InputError

DEFAULT_THEME = "kvtop-dark"

_FALLBACKS: dict[str, str] = {
    "kv-muted": "text-muted",
    "kv-good": "text-success",
    "kv-warn": "text-warning",
    "kv-bad": "text-error",
    "kv-accent": "text-accent",
    "kv-push": "text-primary",
    "kv-pull": "text-secondary",
    "kv-sim": "warning",
    "kv-sim-text": "background",
    "kv-header": "panel",
    "kv-cursor": "primary-muted",
}
"""kvtop's own variables and which of Textual's stands in where a theme, such as Textual's own, lacks them."""


def variable_defaults(theme: Theme) -> dict[str, str]:
    """Return kvtop's own variables for a theme that does not set them."""
    colors = theme.to_color_system().generate()
    return {name: colors[stand_in] for name, stand_in in _FALLBACKS.items()}


class ThemeFile(msgspec.Struct, forbid_unknown_fields=True):
    """What a theme file holds; colours are CSS colours. See `themes/kvtop-dark.toml`."""

    name: str
    primary: str
    dark: bool = True
    secondary: str | None = None
    warning: str | None = None
    error: str | None = None
    success: str | None = None
    accent: str | None = None
    foreground: str | None = None
    background: str | None = None
    surface: str | None = None
    panel: str | None = None
    variables: dict[str, str] = {}


def default_theme() -> Theme:
    """Return the theme that kvtop starts with."""
    return load_theme(files("kvtop.themes") / f"{DEFAULT_THEME}.toml")


def load_themes() -> list[Theme]:
    """Return the themes that come with kvtop, dark ones first."""
    folder = files("kvtop.themes")
    found = [load_theme(entry) for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return sorted(found, key=lambda theme: (theme.name != DEFAULT_THEME, not theme.dark, theme.name))


def load_theme(source: Traversable) -> Theme:
    """Return the theme of one TOML file.

    Raises:
        InputError: the file is no theme; the message names the field.
    """
    try:
        content = msgspec.convert(tomllib.loads(source.read_text("utf-8")), ThemeFile)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise InputError(f"{source.name} is no theme: {error}") from error
    return Theme(**msgspec.structs.asdict(content))
