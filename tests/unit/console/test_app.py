"""The terminal UI, driven through Textual's pilot with a feed and a clock of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from textual.pilot import Pilot
from textual.strip import Strip

from kvtop.agents.events import PairReport
from kvtop.agents.model import Endpoint, Gap
from kvtop.console.actions import ACTIONS
from kvtop.console.app import KvtopApp
from kvtop.console.fleet.state import FleetState
from kvtop.console.screens.help import HelpScreen
from kvtop.console.screens.transfer import TransferScreen
from kvtop.console.widgets.grid import Grid
from kvtop.console.widgets.lines import Lines
from tests.unit.console.samples import (
    NODE_NOW_NS,
    FixedClock,
    ManualFeed,
    S,
    instance,
    latency,
    never_reached,
    node,
    small_fleet,
    transfer,
)

SIZES = [(80, 24), (120, 35), (200, 60)]


class Console:
    """A running app and what a person at it can see."""

    def __init__(self, app: KvtopApp, pilot: Pilot[int], feed: ManualFeed, clock: FixedClock) -> None:
        self.app = app
        self.pilot = pilot
        self.feed = feed
        self.clock = clock

    async def publish(self, fleet: FleetState) -> None:
        self.feed.publish(fleet)
        await self.pilot.pause()
        await self.pilot.pause()

    @property
    def lines(self) -> list[str]:
        strips = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip) for strip in strips]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def grid(self) -> Grid[object]:
        return self.app.screen.query_one(Grid)

    @property
    def cursor_text(self) -> str:
        line = self.grid.cursor_line
        return "" if line is None else self.grid.text_at(line)


@asynccontextmanager
async def console(fleet: FleetState, size: tuple[int, int] = (120, 35)) -> AsyncIterator[Console]:
    feed, clock = ManualFeed(fleet), FixedClock()
    app = KvtopApp(feed, clock=clock)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await pilot.pause()
        yield Console(app, pilot, feed, clock)
    assert app.failure is None
    assert feed.closed


# Screens and sizes


@pytest.mark.parametrize("size", SIZES)
async def test_the_fleet_screen_shows_instances_and_both_histograms(size: tuple[int, int]) -> None:
    async with console(small_fleet(), size) as seen:
        for part in (
            "prefill-0",
            "decode-0",
            "● serving",
            "✗ lost since",
            "TTFT · fleet",
            "ITL · fleet",
            "KvtopC",
        ):
            assert part in seen.text
        assert all(len(line) == size[0] for line in seen.lines)
        assert "q Quit" in seen.lines[-1]


@pytest.mark.parametrize("size", SIZES)
async def test_the_transfers_screen_shows_each_transfer(size: tuple[int, int]) -> None:
    async with console(small_fleet(), size) as seen:
        await seen.pilot.press("2")
        for part in (
            "▶ on_wire",
            "○ queued",
            "✓ done",
            "prefill-0→decode-0",
            "42s!",
            "blocks awaiting registration: 1",
        ):
            assert part in seen.text
        await seen.pilot.press("1")
        assert "TTFT · fleet" in seen.text


async def test_columns_drop_at_80_and_come_back_when_the_terminal_grows() -> None:
    async with console(small_fleet(), (80, 24)) as seen:
        assert "TTFT99" in seen.lines[1]
        assert "TTFT50" not in seen.lines[1]
        await seen.pilot.resize_terminal(160, 40)
        await seen.pilot.pause()
        assert "TTFT50" in seen.lines[1]


@pytest.mark.parametrize("screen", ["1", "2"])
async def test_simulated_engines_are_marked_on_every_screen(screen: str) -> None:
    fleet = small_fleet(simulated=True)
    async with console(fleet, (80, 24)) as seen:
        await seen.pilot.press(screen)
        assert " SIMULATED " in seen.lines[0]


async def test_a_gap_is_announced_above_the_footer() -> None:
    gap = Gap(NODE_NOW_NS - 20 * S, NODE_NOW_NS - 18 * S, "agent was restarted", 12)
    async with console(FleetState([node("p01", [instance(gaps=[gap])])])) as seen:
        assert "prefill-0: no data" in seen.lines[-2]
        assert "(agent was restarted), 12 events lost" in seen.lines[-2]


async def test_before_the_first_answer_the_screens_are_there() -> None:
    async with console(FleetState()) as seen:
        assert "0/0 live" in seen.lines[0]
        await seen.pilot.press("2")
        assert "no agent is connected" in seen.text


async def test_quarantine_and_failed_pairs_are_on_the_fleet_screen_of_a_small_terminal() -> None:
    pair = PairReport("decode-0-engine", "failed", NODE_NOW_NS, "handshake timed out: the peer hangs")
    troubled = instance(quarantined_blocks=3, quarantined_since_ns=NODE_NOW_NS - 5 * S, pairs=[pair])
    async with console(FleetState([node("p01", [troubled, instance("decode-0")])]), (80, 24)) as seen:
        assert "└ ▣ quarantine: 3 blocks, the oldest for 5s" in seen.text
        assert "└ ✗ pair decode-0: handshake timed out: the peer hangs (0s ago)" in seen.text
        seen.clock.advance(2)
        seen.app._advance()
        await seen.pilot.pause()
        assert "the oldest for 7s" in seen.text
        await seen.pilot.press("j", "j", "j", "j", "enter")  # fleet, node, instance, its first note
        await seen.pilot.pause()
        assert "only prefill-0 (Esc: all)" in seen.text


async def test_a_small_terminal_has_room_for_ids_and_errors() -> None:
    names = (Endpoint("p", "sim-prefill-0", "r"), Endpoint("d", "sim-decode-0", "r"))
    why = {"error_class": "transport", "error": "broken"}
    failed = transfer(123_456, "failed", 3, prefill=names[0], decode=names[1], simulated=True, **why)
    pair = [instance("sim-prefill-0", simulated=True), instance("sim-decode-0", role="decode")]
    async with console(FleetState([node("p01", pair, [failed])]), (80, 24)) as seen:
        await seen.pilot.press("2")
        await seen.pilot.pause()
        for part in ("123456 ✗ failed", "sim-prefill-0→sim-decode-0", "transpor"):
            assert part in seen.text


# The cursor


async def test_the_cursor_stays_on_its_row_when_rows_are_sorted_anew() -> None:
    rows = [transfer(n, age_s=n, bytes=100 - n) for n in range(1, 9)]
    async with console(FleetState([node("p01", [instance()], rows)])) as seen:
        await seen.pilot.press("2", "j", "j", "j")
        before = seen.cursor_text
        key, line = seen.grid.cursor, seen.grid.cursor_line
        assert "6s" in before
        await seen.pilot.press("s", "s")  # by stage, then by time in stage
        await seen.pilot.press("S")
        assert seen.grid.cursor == key
        assert seen.cursor_text == before
        assert seen.grid.cursor_line != line


async def test_the_cursor_stays_on_its_row_when_others_come_and_go() -> None:
    rows = [transfer(n, age_s=n) for n in range(1, 9)]
    async with console(FleetState([node("p01", [instance()], rows)])) as seen:
        await seen.pilot.press("2", "j", "j", "j")
        key = seen.grid.cursor
        older = [transfer(n, age_s=n) for n in range(20, 40)]
        await seen.publish(FleetState([node("p01", [instance()], [*rows, *older])]))
        assert seen.grid.cursor == key
        assert "6s" in seen.cursor_text
        await seen.publish(FleetState([node("p01", [instance()], rows[5:])]))
        assert seen.grid.cursor == key
        assert "6s" in seen.cursor_text


async def test_when_the_cursors_row_is_gone_its_neighbour_takes_over() -> None:
    rows = [transfer(n, age_s=n) for n in range(1, 4)]
    async with console(FleetState([node("p01", [instance()], rows)])) as seen:
        await seen.pilot.press("2", "G")
        await seen.publish(FleetState([node("p01", [instance()], rows[1:])]))
        assert "2s" in seen.cursor_text
        await seen.publish(FleetState([node("p01", [instance()])]))
        assert seen.grid.cursor is None


async def test_the_cursor_is_kept_in_view_in_a_long_table() -> None:
    rows = [transfer(n, age_s=n) for n in range(1, 500)]
    async with console(FleetState([node("p01", [instance()], rows)]), (80, 24)) as seen:
        await seen.pilot.press("2", "G")
        await seen.pilot.pause()
        assert "1s" in seen.cursor_text
        assert any("1s" in line for line in seen.lines)
        await seen.pilot.press("g", "pagedown", "k")
        assert seen.cursor_text


async def test_the_histograms_follow_the_cursor_and_esc_returns_to_the_fleet() -> None:
    fast = instance("decode-1", latency=latency([0.010] * 7))
    slow = instance("decode-0", latency=latency([0.500] * 5))
    async with console(FleetState([node("p01", [fast, slow])])) as seen:
        assert "TTFT · fleet · last 60 s · n=12" in seen.text
        await seen.pilot.press("G")
        assert "TTFT · decode-0 · last 60 s · n=5" in seen.text
        await seen.pilot.press("escape")
        assert "TTFT · fleet · last 60 s · n=12" in seen.text


# Mouse


async def test_a_click_chooses_a_row_and_a_double_click_opens_it() -> None:
    async with console(small_fleet()) as seen:
        await seen.pilot.press("2")
        await seen.pilot.pause()
        await seen.pilot.click(Grid, offset=(5, 2))
        await seen.pilot.pause()
        assert "▶ on_wire" in seen.cursor_text
        await seen.pilot.click(Grid, offset=(5, 2), times=2)
        await seen.pilot.pause()
        assert isinstance(seen.app.screen, TransferScreen)


async def test_a_click_on_a_title_sorts_by_it_and_another_turns_the_order() -> None:
    rows = [transfer(n, bytes=n * 1000) for n in (2, 3, 1)]
    async with console(FleetState([node("p01", [instance()], rows)])) as seen:
        await seen.pilot.press("2")
        x = seen.lines[2].index("bytes") + 1
        await seen.pilot.click(Grid, offset=(x, 0))
        assert "bytes▼" in seen.lines[2]
        assert ["3.00kB" in line for line in seen.lines[3:6]] == [True, False, False]
        await seen.pilot.click(Grid, offset=(x, 0))
        assert "bytes▲" in seen.lines[2]
        assert ["3.00kB" in line for line in seen.lines[3:6]] == [False, False, True]


async def test_a_click_on_a_key_in_the_footer_presses_it() -> None:
    async with console(small_fleet()) as seen:
        x = seen.lines[-1].index("Transfers")
        await seen.pilot.click("#keys", offset=(x, 0))
        await seen.pilot.pause()
        assert "live 2 · " in seen.lines[1]


# Detail, help, pause, theme


async def test_enter_opens_a_transfer_which_is_followed_to_its_end_and_esc_goes_back() -> None:
    live = transfer(1, "posting", times_ns={"queued": NODE_NOW_NS - 2 * S, "posting": NODE_NOW_NS - S})
    async with console(FleetState([node("p01", [instance()], [live])])) as seen:
        await seen.pilot.press("2", "j", "enter")
        assert "transfer 1 on p01" in seen.text
        assert "◕ posting" in seen.text
        times = {"queued": NODE_NOW_NS - 2 * S, "posting": NODE_NOW_NS - S, "done": NODE_NOW_NS}
        done = transfer(1, "done", 0, times_ns=times)
        await seen.publish(FleetState([node("p01", [instance()], [done])]))
        assert "✓ done" in seen.text
        await seen.publish(FleetState([node("p01", [instance()])]))
        assert "no longer in the agent's ledger" in seen.text
        assert "✓ done" in seen.text
        await seen.pilot.press("escape")
        assert seen.app.screen.query(Grid)


async def test_enter_on_an_instance_shows_its_transfers_and_esc_shows_all() -> None:
    other = Endpoint("decode-1-engine", "decode-1", "cmpl-2-d")
    rows = [transfer(1), transfer(2, decode=other)]
    pair = [instance(), instance("decode-0"), instance("decode-1")]
    async with console(FleetState([node("p01", pair, rows)])) as seen:
        await seen.pilot.press("G", "enter")
        await seen.pilot.pause()
        assert "only decode-1 (Esc: all) · live 1" in seen.text
        assert "prefill-0→decode-1" in seen.text
        assert "prefill-0→decode-0" not in seen.text
        await seen.pilot.press("escape")
        await seen.pilot.pause()
        assert "prefill-0→decode-0" in seen.text


async def test_help_opens_and_closes_and_data_goes_on_behind_it() -> None:
    async with console(small_fleet()) as seen:
        await seen.pilot.press("question_mark")
        assert isinstance(seen.app.screen, HelpScreen)
        assert "Everywhere" in seen.text
        await seen.publish(small_fleet(simulated=True))
        await seen.pilot.press("escape")
        await seen.pilot.pause()
        assert "SIMULATED" in seen.lines[0]


async def test_pause_holds_what_is_shown_until_it_is_pressed_again() -> None:
    async with console(small_fleet()) as seen:
        await seen.pilot.press("p")
        assert " PAUSED " in seen.lines[0]
        await seen.publish(FleetState([node("p77", [instance("new-one")])]))
        assert "new-one" not in seen.text
        await seen.pilot.press("p")
        await seen.pilot.pause()
        assert "new-one" in seen.text
        assert "PAUSED" not in seen.text


async def test_t_goes_through_all_of_kvtops_themes() -> None:
    async with console(small_fleet()) as seen:
        themes = [seen.app.theme]
        for _ in range(4):
            await seen.pilot.press("t")
            themes.append(seen.app.theme)
        assert set(themes) == {"kvtop-dark", "kvtop-contrast", "kvtop-cvd", "kvtop-light"}
        assert themes[0] == themes[4] == "kvtop-dark"


async def test_textuals_own_themes_work_too() -> None:
    async with console(small_fleet()) as seen:
        for theme in ("textual-light", "nord", "ansi-dark"):
            seen.app.theme = theme
            await seen.pilot.pause()
            assert "prefill-0" in seen.text


# Time and cost


async def test_a_quiet_tick_redraws_only_the_lines_whose_text_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with console(
        FleetState([node("p01", [instance()], [transfer(n, "done", 300) for n in range(9)])])
    ) as seen:
        await seen.pilot.press("2")
        await seen.pilot.pause()
        drawn: list[int] = []
        real = Grid.render_line

        def render_line(grid: Grid[object], y: int) -> Strip:
            drawn.append(y)
            return real(grid, y)

        monkeypatch.setattr(Grid, "render_line", render_line)
        seen.app._advance()
        await seen.pilot.pause()
        assert drawn == []
        seen.clock.advance(1)
        seen.app._advance()
        await seen.pilot.pause()
        assert set(drawn) == set(range(1, 10))  # the ages of nine rows; not the title, not the empty lines


async def test_states_that_pile_up_are_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console(small_fleet()) as seen:
        shown: list[FleetState] = []
        monkeypatch.setattr(seen.app, "show_fleet", lambda: shown.append(seen.app.fleet))
        states = [small_fleet() for _ in range(50)]
        for state in states:
            seen.app.post_message(KvtopApp.FleetChanged(state))
        await seen.pilot.pause()
        assert shown[-1] is states[-1]
        assert len(shown) < 10


# Leaving


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
@pytest.mark.parametrize("before", [(), ("2",), ("question_mark",), ("2", "j", "enter")])
async def test_every_way_out_leaves_from_every_screen(key: str, before: tuple[str, ...]) -> None:
    feed = ManualFeed(small_fleet())
    app = KvtopApp(feed, clock=FixedClock())
    async with app.run_test() as pilot:
        await pilot.pause()
        await pilot.press(*before, key)
        await pilot.pause()
        assert not app.is_running or app._exit
    assert app.return_code == 0
    assert feed.closed


async def test_when_no_target_could_ever_be_reached_the_app_ends_with_3_and_the_reasons() -> None:
    feed = ManualFeed(FleetState([never_reached("p10"), never_reached("p11")]))
    app = KvtopApp(feed, clock=FixedClock())
    async with app.run_test() as pilot:
        await pilot.pause()
    assert app.return_code == 3
    assert [error.target for error in app.connect_errors] == ["p10", "p11"]


async def test_one_live_target_keeps_the_app_open() -> None:
    async with console(FleetState([never_reached("p10"), node("p01", [instance()])])) as seen:
        assert "✗ no connection since" in seen.text
        assert "port 22 of p10 is closed" in seen.text


async def test_a_bug_ends_the_app_and_is_kept_for_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = ManualFeed(small_fleet())
    app = KvtopApp(feed, clock=FixedClock())

    def broken() -> None:
        raise RuntimeError("made by the test")

    async def run() -> None:
        async with app.run_test() as pilot:
            monkeypatch.setattr(app, "show_fleet", broken)
            feed.publish(small_fleet())
            await pilot.pause()

    with pytest.raises(RuntimeError, match="made by the test"):
        await run()
    assert isinstance(app.failure, RuntimeError)


# The registry


def test_every_action_has_an_id_a_description_and_a_tooltip_and_none_is_on_a_multiplexers_key() -> None:
    assert len({action.id for action in ACTIONS}) == len(ACTIONS)
    for action in ACTIONS:
        assert action.id
        assert action.label
        assert action.tooltip
        assert not {"ctrl+a", "ctrl+b"} & set(action.keys.split(","))


async def test_the_notice_lines_take_no_room_when_there_is_nothing_to_say() -> None:
    async with console(small_fleet()) as seen:
        assert seen.app.screen.query_one("#notices", Lines).size.height == 0
