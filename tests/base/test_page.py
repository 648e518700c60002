"""Tables of report pages: what breaks its lines, and what does not."""

import warnings

from matplotlib.figure import Figure

from pipeline.base.page import Table, markdown, png, report


def html(table: Table) -> str:
    return str(report("x", [table])["report.html"])


def test_long_cells_break_between_a_score_and_its_interval_and_short_columns_never() -> None:
    table = Table(("score", "last", "step"), [("top-1 accuracy, split test", "40.00 % [35.32, 44.87]", "1,000")])
    text = html(table)
    assert "<td>40.00\u00a0% [35.32,\u00a044.87]</td>" in text
    assert "<td class=short>1,000</td>" in text
    assert "td.short { white-space: nowrap; }" in text
    assert " nowrap" not in text.partition("@media print")[2]


def test_a_column_of_prose_is_no_short_one_whatever_its_header() -> None:
    text = html(Table(("why", "a-header-longer-than-its-cells"), [("the loss is not finite " * 3, "1")]))
    assert "<th class=text>why</th>" in text
    assert "<td>1</td>" in text


def test_columns_of_numbers_are_right_aligned_and_those_of_words_left() -> None:
    table = Table(
        ("run", "kind", "score", "why"), [("a", "finetune", "38.04 %", "-"), ("b", "pretrain", "\u2013", "-0.1")]
    )
    assert "| --- | --- | ---: | ---: |" in markdown("x", [table])
    text = html(table)
    assert "<th class=word>kind</th><th class=short>score</th>" in text
    assert "th.word, td.word" in text


def test_tables_of_many_columns_are_printed_in_small_type() -> None:
    for columns, is_small in ((8, False), (9, True)):
        text = html(Table([f"run {i}" for i in range(columns)], [["0.003"] * columns]))
        assert ("<table class=many>" in text) == is_small


def test_a_name_that_the_font_lacks_is_drawn_without_a_warning() -> None:
    (figure := Figure()).text(0, 0, "\u732b.jpg\t")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert png(figure).startswith(b"\x89PNG")
