"""Which columns fit, how rows are ordered, and that every line fills its width."""

import pytest
from rich.cells import cell_len

from kvtop.console.views import fleet_columns, transfer_columns
from kvtop.console.views.table import (
    Cell,
    Column,
    Sort,
    Table,
    fit,
    line,
    next_sort,
    ordered,
    padded,
    sort_by,
)
from tests.unit.console.samples import NOW


def column(name: str, width: int, drop: int = 0, flex: int = 0) -> Column[dict[str, float | None]]:
    return Column(
        name,
        name,
        width,
        lambda row, _: Cell(str(row[name])),
        "",
        lambda row, _: row[name],
        drop=drop,
        flex=flex,
    )


COLUMNS = (column("a", 5, flex=1), column("b", 5, drop=2), column("c", 5, drop=2), column("d", 5, drop=1))


def shown(width: int) -> dict[str, int]:
    return {each.id: each.width for each in fit(COLUMNS, width)}


def test_columns_go_by_priority_and_equals_go_together() -> None:
    assert list(shown(23)) == ["a", "b", "c", "d"]
    assert list(shown(22)) == ["a", "d"]
    assert list(shown(10)) == ["a"]


def test_spare_width_goes_to_the_flexible_column() -> None:
    assert shown(33)["a"] == 15


def test_what_is_never_dropped_stays_on_a_line_that_is_too_short() -> None:
    assert list(shown(2)) == ["a"]


@pytest.mark.parametrize("columns", [fleet_columns.COLUMNS, transfer_columns.COLUMNS])
def test_the_real_tables_fit_80_columns_and_keep_what_matters(columns: tuple[Column[object], ...]) -> None:
    chosen = fit(columns, 79)
    assert sum(each.width for each in chosen) + len(chosen) - 1 <= 79
    wanted = {"state", "ttft_p99", "itl_p99", "oldest", "failed"}
    if any(each.id == "stage" for each in columns):
        wanted = {"stage", "age", "lease", "pair", "bytes", "error"}
    assert wanted <= {each.id for each in chosen}


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("text", ["", "ab", "a longer name", "prefill–0→decode", "漢字の名前", "é́"])
def test_padded_fills_exactly_the_width(text: str, right: bool) -> None:
    for width in range(20):
        assert cell_len(padded(text, width, right=right)) == width


def test_a_line_fills_exactly_the_width() -> None:
    table = Table(COLUMNS, key=id)
    for width in range(1, 60):
        cells = line(table, fit(COLUMNS, width), {"a": 1.0, "b": 2.0, "c": None, "d": 4.0}, NOW, width)
        assert sum(cell_len(cell.text) for cell in cells) == width


def test_unknown_values_come_last_in_both_directions() -> None:
    rows: list[dict[str, float | None]] = [{"a": None}, {"a": 1.0}, {"a": 2.0}]
    down = ordered(rows, Sort("a", descending=True), COLUMNS, NOW)
    up = ordered(rows, Sort("a", descending=False), COLUMNS, NOW)
    assert [row["a"] for row in down] == [2.0, 1.0, None]
    assert [row["a"] for row in up] == [1.0, 2.0, None]


def test_s_goes_through_the_columns_and_round() -> None:
    sort = None
    seen = []
    for _ in range(5):
        sort = next_sort(sort, COLUMNS)
        assert sort is not None
        seen.append(sort.column)
    assert seen == ["a", "b", "c", "d", "a"]


def test_a_second_click_on_a_title_turns_the_order() -> None:
    once = sort_by(None, COLUMNS[0])
    assert once == Sort("a", descending=True)
    assert sort_by(once, COLUMNS[0]) == Sort("a", descending=False)
