"""What each sacct column is: how its text is checked and which of our columns it feeds."""

from collections.abc import Callable

from kansoku.formats.slurm import values

__all__ = ["FREE_TEXT", "KNOWN", "XDMOD", "checker", "known_name"]

FREE_TEXT = frozenset({
    "JobName", "Comment", "AdminComment", "SystemComment", "SubmitLine", "WorkDir", "Container",
    "Constraints", "Extra", "Reason", "StdOut", "StdErr", "StdIn", "Licenses",
})  # fmt: skip
"""Columns whose text is the user's: they may hold delimiters and newlines, which sacct keeps."""

XDMOD = (
    "JobID", "JobIDRaw", "Cluster", "Partition", "QOS", "Account", "Group", "GID", "User", "UID",
    "Submit", "Eligible", "Start", "End", "Elapsed", "ExitCode", "State", "NNodes", "NCPUS",
    "ReqCPUS", "ReqMem", "ReqTRES", "AllocTRES", "Timelimit", "NodeList", "JobName",
)  # fmt: skip
"""Columns of the logs that Open XDMoD's shredder takes (no header line, times in UTC)."""

_INTEGER = [
    "UID",
    "GID",
    "ElapsedRaw",
    "TimelimitRaw",
    "NNodes",
    "AllocNodes",
    "ReqNodes",
    "NCPUS",
    "AllocCPUS",
    "ReqCPUS",
    "NTasks",
    "CPUTimeRAW",
    "PlannedCPURAW",
    "ResvCPURAW",
    "Restarts",
    "AssocID",
    "Priority",
    "QOSRAW",
    "DBIndex",
    "WCKeyID",
    "ReservationId",
    "MaxRSSTask",
]
_TIME = ["Submit", "Eligible", "Start", "End"]
_DURATION = [
    "Elapsed",
    "Suspended",
    "Planned",
    "Reserved",
    "TotalCPU",
    "UserCPU",
    "SystemCPU",
    "CPUTime",
    "AveCPU",
    "MinCPU",
]
_TOKEN = [
    "User",
    "Account",
    "Partition",
    "QOS",
    "Cluster",
    "Group",
    "WCKey",
    "Reservation",
    "SLUID",
    "MaxRSSNode",
    "FailedNode",
    "McsLabel",
    "Flags",
    "BlockID",
    "Layout",
    "MaxDiskReadNode",
    "MaxDiskWriteNode",
    "MaxPagesNode",
    "MaxVMSizeNode",
    "MinCPUNode",
]
_TRES = [
    "ReqTRES",
    "AllocTRES",
    "TRESUsageInAve",
    "TRESUsageInMax",
    "TRESUsageInTot",
    "TRESUsageInMin",
    "TRESUsageOutTot",
    "AllocGRES",
    "ReqGRES",
]
_SIZE = ["MaxRSS", "AveRSS", "MaxVMSize", "AveVMSize", "MaxDiskRead", "MaxDiskWrite", "ReqMem"]


def _integer(text: str) -> object:
    return None if text in {"", "Unknown", "UNLIMITED", "Partition_Limit"} else int(text)


def _token(text: str) -> object:
    if any(c.isspace() for c in text):
        raise ValueError(f"{text!r} holds a space")
    return text


def _time(text: str) -> object:
    if text in {"", "Unknown", "None", "N/A"} or text.strip("#") == "" or text.isdigit():
        return None
    if len(text) == 19 and text[4] == text[7] == "-" and text[10] == "T" and text[13] == ":":
        return text
    raise ValueError(f"{text!r} is not a time such as 2026-01-31T12:00:00")


def _limit(text: str) -> object:
    return values.parse_time_limit_s(text)


def _node_list(text: str) -> object:
    if " " in text and text != "None assigned":
        raise ValueError(f"{text!r} is not a host list")
    return text


def _tres(text: str) -> object:
    if " " in text or (text and "=" not in text and ":" not in text and not text.isalpha()):
        raise ValueError(f"{text!r} is not a list of resources")
    return text


def _job_id(text: str) -> object:
    if not text:
        raise ValueError("no job id")
    return values.parse_job_id(text)


_CHECKS: dict[str, Callable[[str], object]] = {
    "JobID": _job_id,
    "JobIDRaw": _job_id,
    "State": values.parse_state,
    "ExitCode": values.parse_exit,
    "DerivedExitCode": values.parse_exit,
    "Timelimit": _limit,
    "NodeList": _node_list,
    **dict.fromkeys(_INTEGER, _integer),
    **dict.fromkeys(_TIME, _time),
    **dict.fromkeys(_DURATION, values.parse_duration_s),
    **dict.fromkeys(_TOKEN, _token),
    **dict.fromkeys(_TRES, _tres),
    **dict.fromkeys(_SIZE, values.parse_size_bytes),
}

KNOWN: dict[str, str] = {name.lower(): name for name in (*_CHECKS, *FREE_TEXT)}
"""Lower-case column name to its spelling here."""
_ALIASES = {"jobs": "JobID", "ntask": "NTasks", "alloccpu": "AllocCPUS", "reserved": "Planned"}


def known_name(header: str) -> str:
    """Return the spelling used here for a header word; unknown words stay as they are."""
    word = header.strip().lower()
    return _ALIASES.get(word) or KNOWN.get(word, header.strip())


def checker(column: str) -> Callable[[str], object]:
    """Return the function that raises ValueError for texts the column cannot hold."""
    # Columns we know nothing of hold what a word can be; that still pins a broken row down.
    return _CHECKS.get(column, _token)
