"""Libraries that this machine compiles: kept for the user alone, done without where that fails."""

import shutil

import pytest

from kansoku.formats.edge import compiled


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "kansoku"
    monkeypatch.setenv("KANSOKU_CACHE_DIR", str(folder))
    monkeypatch.delenv("KANSOKU_NATIVE", raising=False)
    return folder


def test_a_temporary_library_leaves_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert compiled.temporary_library(source).answer() == 42
    assert list(tmp_path.iterdir()) == [source]


def test_a_library_is_built_once_and_found_again(source, cache, monkeypatch):
    assert compiled.kept_library(source, build=False) is None
    assert compiled.kept_library(source, build=True).answer() == 42
    assert [path.suffix for path in cache.iterdir()] == [".so"]
    assert cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(shutil, "which", lambda _: None)  # no compiler is needed any more
    assert compiled.kept_library(source, build=False).answer() == 42


def test_changed_source_is_another_library(source, cache):
    compiled.kept_library(source, build=True)
    source.write_text("int answer(void) { return 43; }\n")
    assert compiled.kept_library(source, build=False) is None
    assert compiled.kept_library(source, build=True).answer() == 43
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("which", ["folder", "file"])
def test_nothing_that_others_may_write_to_is_loaded(source, cache, which):
    compiled.kept_library(source, build=True)
    open_to_all = cache if which == "folder" else next(cache.iterdir())
    open_to_all.chmod(0o777)
    assert compiled.kept_library(source, build=False) is None


def test_switched_off(source, cache, monkeypatch):
    compiled.kept_library(source, build=True)
    monkeypatch.setenv("KANSOKU_NATIVE", "0")
    assert compiled.kept_library(source, build=True) is None


@pytest.mark.parametrize("text", ["no C at all", "#error \n"])
def test_what_does_not_compile_is_done_without(source, cache, text):
    source.write_text(text)
    assert compiled.kept_library(source, build=True) is None
    assert compiled.temporary_library(source) is None
    assert list(cache.iterdir()) == []


def test_without_a_compiler(source, cache, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert compiled.kept_library(source, build=True) is None
    assert compiled.temporary_library(source) is None


def test_a_variable_that_is_no_command_is_no_compiler(source, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", 'gcc "')
    with pytest.raises(OSError, match="CC is no command"):
        compiled.compile_c(source, tmp_path / "answer.so")
    assert compiled.kept_library(source, build=True) is None
    assert compiled.temporary_library(source) is None
