"""Names a person can read, flags, and the choice of an executor."""

import pytest

from kansoku.app._trace_set import given_ranks, open_executor, short_name
from kansoku.errors import InputError, PlatformError


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void gemm<float, 4>(int)", "gemm"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("volta_sgemm_128x32_nt", "volta_sgemm_128x32_nt"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)",
            "at::native::vectorized_elementwise_kernel CUDAFunctor_add",
        ),
        (
            "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(int)",
            "multimem_all_reduce_kernel",
        ),
    ],
)
def test_short_names(name, short):
    assert short_name(name, width=80).replace("…", "") == short


def test_rank_flags():
    assert given_ranks(["a=b.json=3", "c.json=0"]) == {"a=b.json": 3, "c.json": 0}
    with pytest.raises(InputError, match="FILE=N"):
        given_ranks(["x.json"])


def test_small_inputs_start_no_process():
    with open_executor(total_bytes=1 << 20) as executor:
        assert executor is None
    with open_executor(total_bytes=1 << 40, processes=1) as executor:
        assert executor is None


@pytest.mark.parametrize("address", ["nonsense://nowhere", "foo", "tcp://no-such-host.invalid:1"])
def test_a_scheduler_that_is_none_is_said(address):
    with (
        pytest.raises(PlatformError, match="no Dask scheduler answers"),
        open_executor(total_bytes=1, scheduler=address),
    ):
        pass
