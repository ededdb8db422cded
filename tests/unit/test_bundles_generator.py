"""The generator of synthetic incident bundles keeps its own promises."""

import hashlib

import pytest
from tests.labs.bundles import DOMAINS, write_bundles


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles")
    return folder, write_bundles(folder, 7)


def test_every_case_holds_its_decoys(bundles):
    for case in bundles[1]:
        text = "".join(p.read_text() for p in case.folder.rglob("*") if p.is_file())
        assert case.decoys, case.name
        for decoy in case.decoys:
            assert decoy in text, (case.name, decoy)


def test_every_domain_is_present_and_no_case_forbids_its_own(bundles):
    cases = bundles[1]
    assert {case.domain for case in cases} >= {*DOMAINS, "none", "unknown"}
    assert len({case.name for case in cases}) == len(cases) >= 40
    for case in cases:
        assert case.domain not in case.forbidden, case.name
        assert set(case.forbidden) <= set(DOMAINS), case.name
        assert case.kind in {"stop", "hang", "slow", "numerics", "none"}, case.name


def test_a_subject_occurs_in_its_bundle(bundles):
    for case in bundles[1]:
        if case.subject and not case.subject.startswith("rank "):
            assert case.subject in (case.folder / "README.txt").read_text(), case.name


def test_no_path_gives_the_verdict_away(bundles):
    assert len({case.folder for case in bundles[1]}) == len(bundles[1])
    for case in bundles[1]:
        for path in (case.folder, *case.folder.rglob("*")):
            assert case.name not in path.name


def test_the_seed_decides_everything(tmp_path, bundles):
    write_bundles(tmp_path / "again", 7)
    write_bundles(tmp_path / "other", 8)
    first = contents(bundles[0])
    assert contents(tmp_path / "again") == first
    assert contents(tmp_path / "other") != first
