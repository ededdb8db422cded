"""Ask switches over the network: SNMP v2c with pysnmp, gNMI Get with grpcio.

The gNMI client speaks the wire format of openconfig's gnmi.proto (field numbers below are its);
it was tested at wire level against messages built by another implementation, not against a
SONiC switch.
"""

import asyncio
import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

from kansoku.errors import DependencyError
from kansoku.node.switch import SNMP_COLUMNS, SwitchTarget

__all__ = ["NetworkSwitchClient"]

_TIMEOUT_S = 3.0
_MAX_ROWS = 20_000
# SONiC's virtual paths in COUNTERS_DB.
_SONIC_PATHS = {
    "ports": ("COUNTERS", "Ethernet*"),
    "queues": ("COUNTERS", "Ethernet*", "Queues"),
    "watermarks": ("USER_WATERMARKS", "Ethernet*", "Queues"),
    # Not seen on a switch yet; one without this path says NOT_FOUND, as one without queues does.
    "group_watermarks": ("USER_WATERMARKS", "Ethernet*", "PriorityGroups"),
}
_log = logging.getLogger(__name__)


class NetworkSwitchClient:
    """One client for all switches."""

    def __init__(self) -> None:
        self._channels: dict[str, Any] = {}

    def snmp(self, target: SwitchTarget) -> dict[str, dict[str, int | str]]:
        """Walk the columns; raise OSError where the switch does not answer."""
        try:
            import pysnmp.hlapi.v3arch.asyncio as snmp
        except ImportError:
            raise DependencyError.missing("SNMP", "pysnmp", "agent") from None
        return asyncio.run(_walk_all(snmp, target))

    def gnmi(self, target: SwitchTarget) -> dict[str, Any]:
        """Get SONiC's counter tables; raise OSError where the switch does not answer."""
        try:
            import grpc
        except ImportError:
            raise DependencyError.missing("gNMI", "grpcio", "otlp") from None
        request_type, response_type = _gnmi_messages()
        call = self._channel(grpc, target).unary_unary(
            "/gnmi.gNMI/Get",
            request_serializer=request_type.SerializeToString,
            response_deserializer=response_type.FromString,
        )
        metadata = []
        if target.user:
            secret = Path(target.password_file).read_text("utf-8") if target.password_file else ""
            metadata = [("username", target.user), ("password", secret.strip())]
        found: dict[str, Any] = {}
        for kind, path in _SONIC_PATHS.items():
            request = request_type(encoding=4)  # JSON_IETF
            request.prefix.target = "COUNTERS_DB"
            one = request.path.add()
            for name in path:
                one.elem.add().name = name
            try:
                answer = call(request, timeout=_TIMEOUT_S, metadata=metadata)
            except grpc.RpcError as error:
                code = error.code()
                # NOT_FOUND: a switch without this table (no queue counters switched on)
                if code == grpc.StatusCode.NOT_FOUND:
                    continue
                raise OSError(f"gNMI {target.host}: {code.name}: {error.details()}") from None
            found[kind] = _merge(answer)
        return found

    def _channel(self, grpc: Any, target: SwitchTarget) -> Any:
        address = f"{target.host}:{target.port}"
        if address not in self._channels:
            if target.ca_file:
                credentials = grpc.ssl_channel_credentials(Path(target.ca_file).read_bytes())
                self._channels[address] = grpc.secure_channel(address, credentials)
            else:
                self._channels[address] = grpc.insecure_channel(address)
        return self._channels[address]


async def _walk_all(snmp: Any, target: SwitchTarget) -> dict[str, dict[str, int | str]]:
    engine = snmp.SnmpEngine()
    try:
        transport = await snmp.UdpTransportTarget.create(
            (target.host, target.port), timeout=_TIMEOUT_S, retries=1
        )
        community = snmp.CommunityData(target.community, mpModel=1)
        columns: dict[str, dict[str, int | str]] = {}
        for name, oid in SNMP_COLUMNS.items():
            columns[name] = await _walk(snmp, (engine, community, transport), oid)
        return columns
    finally:
        engine.close_dispatcher()


async def _walk(snmp: Any, session: tuple[Any, Any, Any], oid: str) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    variable = snmp.ObjectType(snmp.ObjectIdentity(oid))
    walk = snmp.bulk_walk_cmd(
        *session, snmp.ContextData(), 0, 40, variable, lexicographicMode=False, lookupMib=False
    )
    async for error, status, _, rows in walk:
        if error:
            raise OSError(f"SNMP: {error}")
        if status:
            raise OSError(f"SNMP: {status.prettyPrint()}")
        for name, value in rows:
            index = str(name).removeprefix(f"{oid}.")
            try:
                found[index] = int(value)
            except (TypeError, ValueError):
                found[index] = bytes(value).decode("utf-8", "replace")
        if len(found) > _MAX_ROWS:
            raise OSError(f"SNMP: more than {_MAX_ROWS} rows under {oid}")
    return found


def _merge(answer: Any) -> dict[str, Any]:
    """Join the JSON of all updates; a key may be in the path instead of the value."""
    found: dict[str, Any] = {}
    for notification in answer.notification:
        for update in notification.update:
            text = update.val.json_ietf_val or update.val.json_val
            try:
                value = json.loads(text)
            except ValueError:
                _log.debug("a gNMI update without JSON was left out")
                continue
            if not isinstance(value, dict):
                continue
            if value and not all(isinstance(entry, dict) for entry in value.values()):
                names = [elem.name for elem in update.path.elem if "*" not in elem.name]
                value = {names[-1] if names else "": value}
            found.update(value)
    return found


@cache
def _gnmi_messages() -> tuple[Any, Any]:
    """Make the messages of gnmi.proto that Get needs, without a code generator."""
    from google.protobuf import (
        descriptor_pb2,
        descriptor_pool,
        message_factory,
    )

    field = descriptor_pb2.FieldDescriptorProto
    text, data, number, inner, whole = (
        field.TYPE_STRING, field.TYPE_BYTES, field.TYPE_INT64, field.TYPE_MESSAGE, field.TYPE_INT32,
    )  # fmt: skip
    shapes: dict[str, list[tuple[str, int, int, str | None, bool]]] = {
        "PathElem": [("name", 1, text, None, False)],
        "Path": [("elem", 3, inner, "PathElem", True), ("target", 4, text, None, False)],
        "TypedValue": [
            ("json_val", 10, data, None, False),
            ("json_ietf_val", 11, data, None, False),
        ],
        "Update": [("path", 1, inner, "Path", False), ("val", 3, inner, "TypedValue", False)],
        "Notification": [
            ("timestamp", 1, number, None, False),
            ("update", 4, inner, "Update", True),
        ],
        "GetRequest": [
            ("prefix", 1, inner, "Path", False),
            ("path", 2, inner, "Path", True),
            ("encoding", 5, whole, None, False),
        ],
        "GetResponse": [("notification", 1, inner, "Notification", True)],
    }
    # A package of our own: another library may have registered the real one in this process.
    file = descriptor_pb2.FileDescriptorProto(
        name="kansoku/gnmi.proto", package="kansoku.gnmi", syntax="proto3"
    )
    for name, fields in shapes.items():
        message = file.message_type.add(name=name)
        for label, tag, kind, of, repeated in fields:
            message.field.add(
                name=label,
                number=tag,
                type=kind,
                label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL,
                type_name=f".kansoku.gnmi.{of}" if of else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)

    def message_class(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"kansoku.gnmi.{name}"))

    return message_class("GetRequest"), message_class("GetResponse")
