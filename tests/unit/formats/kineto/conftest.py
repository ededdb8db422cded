"""Every test of reading runs twice: with the general reader and with the compiled one."""

import pytest

from kansoku.formats.edge.compiled import temporary_library
from kansoku.formats.kineto import _compiled, _read


@pytest.fixture(scope="session")
def compiled_reader():
    """The compiled reader; the tests' machines have a compiler."""
    found = _compiled.declared(temporary_library(_compiled.SOURCE))
    assert found is not None, "no C compiler on PATH"
    return found


@pytest.fixture(autouse=True, params=["general", "compiled"])
def reader(request, monkeypatch, compiled_reader):
    """Give the readers of this process one of the two, whatever the user's cache holds."""
    found = compiled_reader if request.param == "compiled" else None
    monkeypatch.setattr(_read, "library", lambda _: found)
    return found
