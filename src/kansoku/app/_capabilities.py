"""Which of the rights that kansoku asks for a process has."""

__all__ = ["CAPABILITIES", "capabilities"]

CAPABILITIES = {
    "CAP_NET_ADMIN": 12, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_SYSLOG": 34,
    "CAP_PERFMON": 38, "CAP_BPF": 39,
}  # fmt: skip
"""Their bits, as in linux/capability.h."""


def capabilities(status: str) -> set[str]:
    """Return the capabilities in the text of /proc/self/status."""
    mask = 0
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            mask = int(line.split()[1], 16)
    return {name for name, bit in CAPABILITIES.items() if mask >> bit & 1}
