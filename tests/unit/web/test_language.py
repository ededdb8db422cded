"""Texts: every entry is whole, figures go to their places, what is unknown stays English."""

import re

import pytest

from kansoku.app.web_page import Columns
from kansoku.catalog.metrics import metrics
from kansoku.web import _language
from kansoku.web._draw import in_language
from kansoku.web._language import languages_texts, translate


def test_every_japanese_text_has_the_figures_of_the_english_one():
    for english, japanese in languages_texts("ja").items():
        wanted = sum(english.count(place) for place in ("{}", "{#}", "{=}"))
        found = re.findall(r"\{(\d*)\}", japanese)
        assert len(found) == wanted, english
        assert all(not number or int(number) < wanted for number in found), english
        assert len({bool(number) for number in found}) < 2, english  # numbered all or none


def test_every_metric_is_explained_in_japanese():
    assert [m.meaning for m in metrics().values() if m.meaning not in languages_texts("ja")] == []


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


@pytest.mark.parametrize(
    ("english", "japanese"),
    [
        ("Readings handed to the sink", "Readings handed to the sink"),  # no range, though "to" is
        (("own work 1.15× the median of ranks 0, 1, 3 over steps 3-29, standing out in 100% of the "
         "windows; more than the peers a step: forward +7.7 ms"),
         ("自身の処理がランク 0, 1, 3 の中央値の 1.15 倍（ステップ 3–29）、区間の 100% で突出; "
         "1 ステップあたりの同役ランクとの差: forward +7.7 ms")),
        ("own work 1.15× that of rank 1 over steps 3-29, standing out in 100% of the windows",
         "自身の処理がランク 1 の 1.15 倍（ステップ 3–29）、区間の 100% で突出"),
        # Read from a list of facts, not as a range of something.
        ("so its split of the loss is not to be relied on.",
         "so its split of the loss is not to be relied on."),
        ("link:a-b at fault: 28 % of probes lost (P0); since 09:00",
         "link:a-b の障害: プローブの 28 % が損失（P0）（09:00 から）"),
        ("1. GPU hardware: gpu · gpu:c003/5 (91%)", "1. GPU ハードウェア: gpu · gpu:c003/5 (91%)"),
        ("link:a-b at fault: 28 % of probes lost (P0)", "link:a-b の障害、プローブの 28 % が損失（P0）"),
        ("1 node or more free, by Slurm's time limits",
         "1 ノード以上が空く時間（Slurm の制限時間による）"),
        ("blame 1.29 in 6 jobs, expected 0.04 (chance 0.013); 2 hardware Xids",
         "6 ジョブで起因 1.29、期待値 0.04（偶然の確率 0.013）。ハードウェアの Xid 2 件"),
        (("32 nodes: 0 failures in 4 run hours, MTTF above 1.34 h; 64 nodes: 2 failures in 17.3 run "
         "hours, MTTF 8.65 h (3.1 – 24). Independent nodes would give 2 times the failures."),
         ("32 ノード: 4 実行時間で故障 0 件、MTTF は 1.34 h より長い。64 ノード: 17.3 実行時間で故障 2 件、"
         "MTTF 8.65 h（3.1 – 24）。ノードが独立なら故障は 2 倍になります。")),
    ],
)  # fmt: skip
def test_sentences_of_the_pages_are_whole_in_japanese(english, japanese):
    assert translate(english, "ja") == japanese


def test_a_ratios_unit_stays_the_key_that_scripts_draw_as_percent():
    columns = Columns(kind="heatmap", header={"title": "Loss", "unit": "ratio"}, arrays={})
    assert in_language(columns, "ja").header["unit"] == "ratio"
    assert in_language(columns, "ja").header["title"] == "損失率"
