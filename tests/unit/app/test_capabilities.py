"""Rights, from the text of a status file."""

from kansoku.app._capabilities import capabilities


def test_capabilities_of_a_mask():
    # 1 << 39 | 1 << 12
    assert capabilities("Name:\tx\nCapEff:\t0000008000001000\n") == {"CAP_BPF", "CAP_NET_ADMIN"}
    assert capabilities("") == set()
