"""Figures of report pages."""

import warnings

from matplotlib.figure import Figure

from pipeline.base.page import png


def test_a_name_that_the_font_lacks_is_drawn_without_a_warning() -> None:
    (figure := Figure()).text(0, 0, "\u732b.jpg\t")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert png(figure).startswith(b"\x89PNG")
