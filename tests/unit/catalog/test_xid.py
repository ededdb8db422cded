"""The Xid catalogue says what its sources say, and nothing of unknown codes."""

import csv
from pathlib import Path

import pytest

import kansoku.catalog
from kansoku.catalog.xid import clock_event_bits, codes, sxid, xid
from kansoku.model import Domain

FILE = Path(kansoku.catalog.__file__).parent / "data" / "xid.csv"


def test_every_code_names_its_source():
    rows = list(csv.DictReader(FILE.read_text("utf-8").splitlines()))
    assert len(rows) == len(codes()) == 241
    assert all(row["source"] for row in rows)


# NVIDIA's Xid catalogue: 79 fallen off the bus, 48 double-bit ECC, 31 MMU fault, 13 app exception.
@pytest.mark.parametrize(
    ("number", "domain", "severity"),
    [
        (79, Domain.GPU_HARDWARE, "error"),
        (48, Domain.GPU_HARDWARE, "error"),
        (13, Domain.APPLICATION, "error"),
        (31, Domain.APPLICATION, "error"),
    ],
)
def test_domains(number, domain, severity):
    code = xid(number)
    assert code is not None
    assert (code.domain, code.severity) == (domain, severity)


def test_unknown_codes_are_none():
    assert xid(9999) is None
    assert sxid(1) is None


def test_clock_event_bits_are_a_mask():
    names = {code.mnemonic for code in clock_event_bits(0x4 | 0x40)}
    assert names == {"SW_POWER_CAP", "HW_THERMAL"}
    assert clock_event_bits(0) == ()
