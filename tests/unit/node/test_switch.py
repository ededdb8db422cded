"""The switches file: what is wrong is named with switch, key and remedy."""

import pytest

from kansoku.errors import ConfigurationError
from kansoku.node.switch import read_switches


def test_a_file_of_both_kinds():
    leaf, spine = read_switches(
        '[[switch]]\nname="leaf0"\nsnmp="10.0.0.1"\n'
        '[[switch]]\nname="spine0"\ngnmi="10.0.0.2:57400"\nuser="admin"\n',
        where="f",
    )
    assert (leaf.protocol, leaf.host, leaf.port, leaf.community) == (
        "snmp",
        "10.0.0.1",
        161,
        "public",
    )
    assert (spine.protocol, spine.port, spine.community) == ("gnmi", 57400, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[switch]]\nname="leaf0"\nsnpm="h"', "f: switch leaf0: unknown key snpm; known: "),
        ('[[switch]]\nname="leaf0"', "needs name and either snmp or gnmi"),
        ('[[switch]]\nname="a"\nsnmp="h"\ngnmi="h"', "needs name and either snmp or gnmi"),
        ('[[switch]]\nname="a"\nsnmp="h:x"', "is not HOST or HOST:PORT"),
        ("switch = 3", "expected [[switch]] tables"),
        ("[[switch", "f: "),
    ],
)
def test_mistakes(text, says):
    with pytest.raises(ConfigurationError) as caught:
        read_switches(text, where="f")
    assert says in str(caught.value)
