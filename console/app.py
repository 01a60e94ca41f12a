"""The terminal UI's application: it owns what is shown and when, and nothing of how.

A feed publishes one `FleetState` per tick for all nodes; a 1 Hz timer moves the clock and the ages. The
screen on top shows both; other screens catch up when they come on top.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, cast

from textual.app import App
from textual.message import Message

from kvtop.console import theming
from kvtop.console.actions import bindings
from kvtop.console.clock import Clock, Moment, SystemClock
from kvtop.console.fleet.errors import ConnectError, InputError
from kvtop.console.fleet.feed import Feed
from kvtop.console.fleet.state import FleetState
from kvtop.console.screens.fleet import FleetScreen
from kvtop.console.screens.live import LiveScreen
from kvtop.console.theming import DEFAULT_THEME

if TYPE_CHECKING:
    from kvtop.console.screens.transfers import TransfersScreen


def _transfers_screen() -> TransfersScreen:
    from kvtop.console.screens.transfers import TransfersScreen  # noqa: PLC0415 - behind the first frame

    return TransfersScreen()


class KvtopApp(App[int]):
    """kvtop's screens on one feed. Exits with kvtop's exit code."""

    TITLE = "kvtop"
    CSS_PATH = [f"screens/{name}.tcss" for name in ("live", "fleet", "transfers", "help")]  # noqa: RUF012
    """All at once: a stylesheet that a screen brings along has the whole of it read again."""
    BINDINGS = bindings("app")
    MODES = {"fleet": FleetScreen, "transfers": _transfers_screen}  # noqa: RUF012 - textual's class variable
    DEFAULT_MODE = "fleet"

    class FleetChanged(Message):
        """The feed has a new state; a newer one that waits behind it replaces it."""

        def __init__(self, fleet: FleetState) -> None:
            super().__init__()
            self.fleet = fleet

        def can_replace(self, message: Message) -> bool:
            """Let only the newest state be handled."""
            return isinstance(message, KvtopApp.FleetChanged)

    def __init__(
        self,
        feed: Feed,
        *,
        clock: Clock | None = None,
        theme: str = DEFAULT_THEME,
        start_mode: str = "fleet",
    ) -> None:
        super().__init__()
        self._theme_names: list[str] = []
        self._begin_with(theme)
        self.feed = feed
        self.clock = clock or SystemClock()
        self.fleet = self._newest = FleetState()
        self.paused_at: Moment | None = None
        self.failure: Exception | None = None
        """What ended the app, where that was a bug."""
        self.connect_errors: list[ConnectError] = []
        """Why the app gave up, where no target could be reached."""
        self._start_mode = start_mode
        self.animation_level = "none"

    def _begin_with(self, theme: str) -> None:
        """Set the theme before the stylesheet is read, so that it is read once.

        kvtop's other themes are registered behind the first frame, unless one of them is wanted.
        """
        if theme == DEFAULT_THEME:
            self.register_theme(theming.default_theme())
        else:
            self._register_themes()
        if theme not in self.available_themes:
            names = ", ".join(sorted(self.available_themes))
            raise InputError(f"there is no theme {theme!r}; there are {names}")
        self.set_reactive(KvtopApp.theme, theme)
        self.stylesheet.set_variables(self.get_css_variables())

    def _register_themes(self) -> None:
        themes = theming.load_themes()
        self._theme_names = [theme.name for theme in themes]
        for theme in themes:
            if theme.name not in self.available_themes:
                self.register_theme(theme)

    # Life

    def on_mount(self) -> None:
        """Show the first frame; connecting starts behind it."""
        if self._start_mode != self.current_mode:
            self.switch_mode(self._start_mode)
        self.call_after_refresh(self._start)

    def _start(self) -> None:
        gc.freeze()
        gc.enable()
        if not self._theme_names:
            self._register_themes()
        self.run_worker(self._follow(), group="feed", exit_on_error=True)
        self.set_interval(1.0, self._advance)

    async def _follow(self) -> None:
        async for fleet in self.feed.states():
            self.post_message(self.FleetChanged(fleet))

    async def on_unmount(self) -> None:
        """Close the connections."""
        await self.feed.aclose()

    def _handle_exception(self, error: Exception) -> None:
        """Keep the error for the command line, which reports it in one line, instead of printing it here."""
        super()._handle_exception(error)
        self.failure = self.failure or error
        self._exit_renderables.clear()

    # What is shown

    def on_kvtop_app_fleet_changed(self, message: FleetChanged) -> None:
        """Take over a new state, or give up when there is nothing to wait for."""
        if message.fleet.hopeless:
            self.connect_errors = [n.link.error for n in message.fleet.nodes if n.link.error]
            self.exit(ConnectError.exit_code, return_code=ConnectError.exit_code)
            return
        self._newest = message.fleet
        if self.paused_at is None:
            self.fleet = message.fleet
            self.show_fleet()

    def show_fleet(self) -> None:
        """Show the present state on the screen on top."""
        if (screen := self._top()) is not None:
            screen.show(self.fleet, self._now(), paused=self.paused_at is not None)

    def on_live_screen_came_up(self) -> None:
        """Bring the screen that came on top up to date."""
        self.show_fleet()

    def _advance(self) -> None:
        if (screen := self._top()) is not None:
            screen.advance(self.fleet, self._now(), paused=self.paused_at is not None)

    def _top(self) -> LiveScreen | None:
        """Return the screen on top if it shows the fleet; None also while the app begins or ends."""
        stack = self.screen_stack
        top = stack[-1] if stack else None
        return top if isinstance(top, LiveScreen) and top.is_mounted else None

    def _now(self) -> Moment:
        return self.paused_at or self.clock.now()

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Return kvtop's own variables for themes that do not set them."""
        return theming.variable_defaults(self.current_theme)

    # Actions

    async def action_mode(self, mode: str) -> None:
        """Go to one of the numbered screens."""
        while len(self.screen_stack) > 1:
            await self.pop_screen()
        if mode != self.current_mode:
            await self.switch_mode(mode)

    async def on_fleet_screen_drilled(self, message: FleetScreen.Drilled) -> None:
        """Show the transfers of the row that was opened."""
        await self.action_mode("transfers")
        cast("TransfersScreen", self.screen).show_only(message.limit)

    async def action_back(self) -> None:
        """Undo the latest step on the screen on top."""
        back = getattr(self.screen, "back", None)
        if back is not None:
            back()

    def action_help(self) -> None:
        """Open the help, or close it."""
        from kvtop.console.screens.help import HelpScreen  # noqa: PLC0415 - not needed for the first frame

        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss()
        else:
            self.push_screen(HelpScreen())

    def action_pause(self) -> None:
        """Hold what is shown, or go on."""
        self.paused_at = None if self.paused_at else self.clock.now()
        if self.paused_at is None:
            self.fleet = self._newest
        self.show_fleet()

    def action_next_theme(self) -> None:
        """Take the next of kvtop's own themes."""
        names = self._theme_names
        present = names.index(self.theme) if self.theme in names else -1
        self.theme = names[(present + 1) % len(names)]
