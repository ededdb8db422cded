"""Functions of shared libraries, against the compiler's own tools and damaged files."""

import shutil
import subprocess

import pytest

from kansoku.capture.attach.elf import ElfError, Library, Ranges
from kansoku.capture.attach.probes import cheap_offset


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("cc") is None or shutil.which("nm") is None:
        pytest.skip("no C compiler or nm on PATH")
    folder = tmp_path_factory.mktemp("elf")
    source = folder / "a.c"
    source.write_text(
        "int tail(void) { return 1; }\nint curtail(void) { return 2; }\nint data = 1;\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "a.so", source], check=True)
    return folder / "a.so"


def test_addresses_are_what_nm_says(library):
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    known = {line.split()[2]: int(line.split()[0], 16) for line in lines}
    found = Library(str(library)).find(["tail$", "curtail$", "cur", "data$", "absent$"])
    assert [f.address for f in found["tail$"]] == [known["tail"]]
    assert [f.address for f in found["curtail$"]] == [known["curtail"]]
    assert [f.name for f in found["cur"]] == ["curtail"]
    assert found["data$"] == found["absent$"] == []
    assert found["tail$"][0].code == library.read_bytes()[found["tail$"][0].offset :][:32]


@pytest.mark.parametrize("cut", [0, 10, 63, 64, 200, 1000])
def test_damaged_files_are_refused_or_empty(library, tmp_path, cut):
    damaged = tmp_path / "cut.so"
    damaged.write_bytes(library.read_bytes()[:cut])
    assert functions_or_refusal(damaged) in ("refused", {"tail$": []})


def functions_or_refusal(path):
    try:
        return Library(str(path)).find(["tail$"])
    except ElfError:
        return "refused"


def test_what_is_no_library_is_said(tmp_path):
    text = tmp_path / "text"
    text.write_text("x" * 100)
    with pytest.raises(ElfError, match="not a little-endian 64-bit ELF"):
        Library(str(text))


def test_ranges():
    ranges = Ranges([(10, 20), (30, 40)])
    assert [n in ranges for n in (9, 10, 19, 20, 30, 40)] == [False, True, True, False, True, False]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (b"\x55\x48\x89\xe5", (0, True)),  # push rbp
        (b"\x41\x57\x41\x56", (0, True)),  # push r15
        (b"\xf3\x0f\x1e\xfa\x55", (4, True)),  # endbr64, push rbp
        (b"\xf3\x0f\x1e\xfa\x8b\x07", (0, False)),
        (b"\x80\x7f\x68\x00", (0, False)),  # cmpb
        (b"", (0, False)),
    ],
)
def test_where_a_probe_is_cheap(code, expected):
    assert cheap_offset(code) == expected
