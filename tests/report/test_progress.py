"""Progress lines: on a terminal one that is cleared at the end, elsewhere one now and then."""

from __future__ import annotations

import sys

from specdiff.report.progress import teller


def test_elsewhere_a_line_only_when_it_is_time(capsys):
    tell = teller(every=0.0)
    tell("prompts", 1, 4)
    quiet = teller(every=3600.0)
    quiet("prompts", 2, 4)
    assert capsys.readouterr() == ("", "prompts: 1 of 4\n")


def test_on_a_terminal_the_line_is_cleared(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tell = teller()
    tell("prompts", 1, 2)
    tell("prompts", 2, 2)
    err = capsys.readouterr().err
    assert "prompts: 1 of 2" in err and err.endswith("\r\x1b[K") and "\n" not in err
