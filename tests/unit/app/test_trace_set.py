"""Names a person can read, flags, and the choice of an executor."""

import socket
import threading

import pytest

from kansoku.app._dask_scheduler import check_scheduler
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


def _answering(content):
    """Return the address of a listener that says this to whoever comes, and then nothing."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        peers = []
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            peer.sendall(content)
            peers.append(peer)

    threading.Thread(target=serve, daemon=True).start()
    return listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}"


# The second: the first eight bytes of a Dask message count its parts, here 3.5e18.
@pytest.mark.parametrize("content", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_where_no_scheduler_talks_is_said_in_time(content):
    listener, address = _answering(content)
    with listener, pytest.raises(PlatformError, match="no Dask scheduler answers") as raised:
        check_scheduler(address, patience_s=0.5)
    assert raised.value.where == address
    assert "dask scheduler" in str(raised.value.remedy)


def test_patience_is_five_seconds_at_a_port_nobody_listens_on(monkeypatch):
    asked = []

    async def connect(_address, **more):
        asked.append(more["timeout"])
        raise OSError("Timed out trying to connect")

    monkeypatch.setattr("kansoku.app._dask_scheduler.connect", connect)
    with pytest.raises(PlatformError, match="Timed out"):
        check_scheduler("tcp://127.0.0.1:8786")
    assert asked == [5.0]
