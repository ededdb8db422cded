"""Driver statistics of a network interface by the ethtool ioctl, without starting a program."""

import array
import fcntl
import socket
import struct
from collections.abc import Mapping

__all__ = ["EthtoolSocket"]

_SIOCETHTOOL = 0x8946
_GSSET_INFO = 0x37
_GSTRINGS = 0x1B
_GSTATS = 0x1D
_SET_STATS = 1
_NAME_BYTES = 32
_MAX_COUNTERS = 20_000


class EthtoolSocket:
    """Keeps one socket, and each interface's counter names between calls."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._names: dict[str, list[str]] = {}

    def statistics(self, interface: str) -> Mapping[str, int] | None:
        """Return the counters; None where the driver has none or the interface is gone."""
        try:
            count = self._count(interface)
            if count == 0 or count > _MAX_COUNTERS:
                return None
            names = self._names.get(interface)
            if names is None or len(names) != count:
                names = self._names[interface] = self._read_names(interface, count)
            request = array.array("B", struct.pack("II", _GSTATS, count) + bytes(8 * count))
            self._ioctl(interface, request)
        except OSError:
            self._names.pop(interface, None)
            return None
        # A name may come twice (queues of some drivers); the last one stands, as in ethtool -S.
        return dict(zip(names, struct.unpack_from(f"{count}Q", request, 8), strict=True))

    def _count(self, interface: str) -> int:
        # struct ethtool_sset_info: cmd, reserved, mask of sets, then one u32 a set
        request = array.array("B", struct.pack("IIQI", _GSSET_INFO, 0, 1 << _SET_STATS, 0))
        self._ioctl(interface, request)
        _, _, mask, count = struct.unpack_from("IIQI", request)
        return int(count) if mask else 0

    def _read_names(self, interface: str, count: int) -> list[str]:
        head = struct.pack("III", _GSTRINGS, _SET_STATS, count)
        request = array.array("B", head + bytes(_NAME_BYTES * count))
        self._ioctl(interface, request)
        text = request.tobytes()[12:]
        return [
            text[i : i + _NAME_BYTES].split(b"\0", 1)[0].decode("ascii", "replace").strip()
            for i in range(0, _NAME_BYTES * count, _NAME_BYTES)
        ]

    def _ioctl(self, interface: str, request: "array.array[int]") -> None:
        address, _ = request.buffer_info()
        frame = struct.pack("16sP8x", interface.encode()[:15], address)
        fcntl.ioctl(self._socket, _SIOCETHTOOL, frame)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
