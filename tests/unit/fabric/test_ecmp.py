"""Ports, labels and the number of tuples."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kansoku.errors import InputError
from kansoku.fabric.ecmp import label_of_port, missing_probability, port_of_label, smallest_k


@pytest.mark.parametrize(("paths", "k"), [(4, 21), (8, 51), (16, 115), (32, 255)])
def test_the_papers_table(paths, k):
    assert smallest_k(paths, 0.99) == k


def test_the_sum_is_exact_where_the_rounded_formula_is_one_short():
    assert smallest_k(16, 0.9) == 79
    assert missing_probability(16, 78) > 0.1


def test_against_counting_every_outcome():
    outcomes = list(product(range(3), repeat=5))
    short = sum(len(set(outcome)) < 3 for outcome in outcomes)
    assert missing_probability(3, 5) * len(outcomes) == short


def test_one_path_needs_one_tuple():
    assert smallest_k(1) == 1


@given(st.integers(0, (1 << 20) - 1))
def test_ports_of_labels_are_roce_ports(label):
    port = port_of_label(label)
    assert 49152 <= port <= 65535
    assert port_of_label(label_of_port(port)) == port


def test_fold_by_hand():
    # 0x4001: low 14 bits 0x0001, high 6 bits 0x01; 1 ^ 1 = 0.
    assert port_of_label(0x4001) == 49152
    assert port_of_label(0x3FFF) == 65535


@pytest.mark.parametrize("bad", [-1, 1 << 20])
def test_bad_labels(bad):
    with pytest.raises(InputError):
        port_of_label(bad)


def test_bad_numbers():
    with pytest.raises(InputError):
        smallest_k(0)
    with pytest.raises(InputError):
        label_of_port(4791)
