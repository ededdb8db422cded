"""The failure signatures are sound data, and operators' own files are checked when loaded."""

import pytest

from kansoku.catalog.signatures import read_signatures, signatures
from kansoku.diagnose.lines import SUSPICIOUS
from kansoku.errors import ConfigurationError

HEADER = "id,regex,sample,category,subcategory,role,strength,generic,meaning,usual_action,source\n"


def test_the_fast_scan_lets_every_signature_through():
    missed = [
        rule.id
        for rule in signatures()
        if rule.role not in {"info", "noise"}
        and not any(word in rule.sample.lower() for word in SUSPICIOUS)
    ]
    assert missed == []


def test_every_signature_has_a_source():
    assert [rule.id for rule in signatures() if not rule.source] == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("a,(,x,host,p,root,strong,no,m,a,s", "regex"),
        ("a,x,x,space,p,root,strong,no,m,a,s", "category 'space'"),
        ("a,x,x,host,p,boss,strong,no,m,a,s", "role 'boss'"),
        ("a,x,x,host,p,root,huge,no,m,a,s", "strength 'huge'"),
        ("a,x,y,host,p,root,strong,no,m,a,s", "own sample"),
    ],
)
def test_operators_rows_are_refused_with_file_and_row(tmp_path, row, words):
    path = tmp_path / "rules.csv"
    path.write_text(HEADER + row + "\n")
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_signatures(path)
    assert "rules.csv:2" in str(caught.value)


def test_a_missing_column_is_named(tmp_path):
    path = tmp_path / "rules.csv"
    path.write_text("id,regex\n")
    with pytest.raises(ConfigurationError, match="missing column"):
        read_signatures(path)
