"""Texts: every entry is whole, figures go to their places, what is unknown stays English."""

import re

import pytest

from kansoku.web import _language
from kansoku.web._language import languages_texts, translate


def test_every_japanese_text_has_the_figures_of_the_english_one():
    for english, japanese in languages_texts("ja").items():
        wanted = sum(english.count(place) for place in ("{}", "{#}", "{=}"))
        found = re.findall(r"\{(\d*)\}", japanese)
        assert len(found) == wanted, english
        assert all(not number or int(number) < wanted for number in found), english


def test_texts_with_figures_are_found_by_their_pattern(monkeypatch):
    texts = {
        "{} of {} nodes": "{1} ノード中 {0}",
        "{} nodes": "{} ノード",
        "idle": "空き",
        "Run {=}": "実行 {}",
        "{#} of {#}": "{1} 中 {0}",
    }
    monkeypatch.setattr(_language, "languages_texts", lambda language: texts)
    _language._patterns.cache_clear()
    translate.cache_clear()
    try:
        assert translate("3 of 10 nodes", "ja") == "10 ノード中 3"
        assert translate("12 nodes", "ja") == "12 ノード"
        assert translate("idle nodes", "ja") == "空き ノード"
        assert translate("Run idle", "ja") == "実行 idle"
        assert translate("3 of 10", "ja") == "10 中 3"
        assert translate("rank 3 of 10", "ja") == "rank 3 of 10"
        assert translate("no such text", "ja") == "no such text"
        assert translate("3 of 10 nodes", "en") == "3 of 10 nodes"
        assert translate("{0} nodes", "ja") == "{0} ノード"
    finally:
        _language._patterns.cache_clear()
        translate.cache_clear()


@pytest.mark.parametrize(
    ("header", "wanted"),
    [("ja,en;q=0.8", "ja"), ("en-GB,ja;q=0.3", "en"), ("fr;q=0.9, ja;q=0.5", "ja"), ("", "en"),
     ("de", "en"), ("ja;q=x", "en")],
)  # fmt: skip
def test_the_browsers_preferred_language_is_heard(header, wanted):
    from kansoku.web._settings import _preferred

    assert _preferred(header) == wanted
