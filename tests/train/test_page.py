"""The page holds every figure or its reason, and nothing it was given can break out of it."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from megablocks_core.train import Mean
from megablocks_core.train.figures import FIGURES, hard_metrics
from megablocks_core.train.folder import Run
from megablocks_core.train.lines import Line
from megablocks_core.train.page import Pictures, page, shown


class Text(HTMLParser):
    """Text of a page, and whether each tag is closed."""

    void = ("meta", "img")

    def __init__(self, html):
        super().__init__()
        self.open, self.words, self.tags = [], [], []
        self.feed(html)
        assert self.open == ["html"]

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "html":
            assert self.open.pop() == tag
        elif self.open == ["html"]:
            self.open = ["html"]

    def handle_data(self, data):
        self.words.append(data)


def record(step, **fate):
    known = {"started": 0.0, "ended": 60.0, "error": None, "recovery_seconds": None}
    return {"label": "tp=2", "step": step, **known, **fate}


LOSSES = Pictures(b"\x89PNG")


def page_of(*, starts=(), summary=None, lines=None, pictures=LOSSES):
    lines = lines or [
        Line(
            step,
            0.0,
            {
                "loss": Mean(200.0, 100),
                "tokens_per_second": Mean(100, 0.5),
                "step_seconds": Mean(0.5),
                "data_seconds": Mean(0.1),
                "forward_seconds": Mean(0.3),
            },
        )
        for step in range(3)
    ]
    run = Run(Path("out/demo"), lines, list(starts), summary or {})
    present, absent = hard_metrics(run)
    html = page(run, present, absent, pictures)
    return html, " ".join(" ".join(Text(html).words).split())


def test_every_metric_stands_there_with_its_value_or_its_reason():
    _, text = page_of()
    for figures in FIGURES.values():
        for figure in figures:
            assert figure.key in text and (figure.meaning in text or figure.absent in text)
    assert "200 /s" in text and "3 steps, 300 tokens" in text
    assert "Training loss 2.00 at first, 2.00 at the end." in text


def test_the_page_stands_alone():
    html, _ = page_of()
    assert 'src="data:image/png;base64,iVBORw==' in html
    assert "http" not in html and "<script" not in html and "<link" not in html


def test_pictures_stand_there_if_they_were_drawn():
    html, text = page_of()
    assert html.count("<img") == 1 and "Layers" not in text
    html, text = page_of(pictures=Pictures(b"losses", b"speed", b"layers"))
    assert html.count("<img") == 3 and "Layers" in text


def test_the_time_of_a_step_is_divided():
    _, text = page_of()
    assert "data 100 ms, 20.0 %" in text and "forward 300 ms, 60.0 %" in text
    assert "other 100 ms, 20.0 %" in text and "optimizer" not in text


def test_what_the_summary_has_is_shown():
    summary = {"layout_distance": {"tp=2, tp=1 <float32>": 3.1e-7}, "sample": "a < b & c\n  d"}
    html, text = page_of(summary=summary)
    assert "tp=2, tp=1 <float32> 3.10e-07" in text
    assert "a &lt; b &amp; c\n  d" in html
    assert "largest 1.00e-09" in page_of(summary={"layout_distance": 1e-9})[1]
    assert "None" in page_of(summary={"layout_distance": {"a": None}})[1]


def test_starts_say_how_they_ended():
    starts = [
        record(0, ended=None),
        record(2, error="OSError: <disk>"),
        record(2, recovery_seconds=12.34),
        record(3, ended=None),
    ]
    _, text = page_of(starts=starts)
    assert "killed" in text and "OSError: <disk>" in text and "12.3 s" in text
    assert "well, after 60 s" in text and "not yet, or killed" in text


def test_names_of_a_run_cannot_break_the_page():
    html, _ = page_of(starts=[record(0, label="<script>alert(1)</script>")])
    assert "<script" not in html


def test_a_run_without_figures_has_a_page():
    _, text = page_of(lines=[Line(0, 0.0, {})])
    assert "1 steps." in text or "1 step." in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.4136, "share", "41.4 %"),
        (3.28e9, "B", "3.28 GB"),
        (12.0, "B/s", "12 B/s"),
        (18300.4, "1/s", "18,300 /s"),
        (0.13456, "s", "0.135 s"),
        (12345.6, "s", "12,346 s"),
        (2.0, "", "2"),
        (1.23e-9, "price", "1.23e-09"),
        (1.93216, "nats", "1.9322"),
        (1.5, "max/mean", "1.500"),
    ],
)
def test_numbers_for_people(value, unit, text):
    assert shown(value, unit) == text


def test_several_validation_sets_are_shown_by_name_with_their_last_loss():
    lines = [
        Line(4, 0.0, {"validation_loss/web": Mean(30.0, 10), "validation_loss/<b>": Mean(5.0)}),
        Line(9, 0.0, {"validation_loss/web": Mean(25.0, 10)}),
        Line(10, 0.0, {"loss": Mean(2.0)}),
    ]
    _, text = page_of(lines=lines)
    assert "Validation sets" in text
    assert "web 2.5000 9" in text and "<b> 5.0000 4" in text
    one = [Line(0, 0.0, {"validation_loss": Mean(2.0)})]
    assert "Validation sets" not in page_of(lines=one)[1] + page_of()[1]


def test_steps_done_again_and_skipped_are_shown():
    starts = [record(0, ended=None), record(3, repeated_steps=1200)]
    lines = [Line(step, 0.0, {"skipped": Mean(float(step == 3))}) for step in range(5)]
    _, text = page_of(starts=starts, lines=lines)
    assert "steps again" in text and "1,200" in text
    assert "skipped_steps 1 that a guard did not let through" in text
    assert "repeated_steps 1,200 written before" in text
