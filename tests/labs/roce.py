"""Soft-RoCE in a QEMU guest: Debian's kernel, this machine's root by 9p, one script, results.

The kernel is downloaded and unpacked, never installed. Everything made here lies in ``.lab/roce``.
icount makes the guest's latencies independent of the load of the host; KVM is not needed.
"""

import fcntl
import gzip
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".lab" / "roce"
_FOLDERS = (
    "crypto", "lib", "drivers/virtio", "drivers/infiniband/core", "drivers/infiniband/sw",
    "net/9p", "net/ipv4", "net/ipv6", "net/sched", "net/core", "net/netfilter",
    "fs/9p", "fs/netfs", "fs/fscache", "fs/overlayfs", "fs/configfs", "drivers/net/veth.ko",
    "arch/x86/crypto", "net/802", "net/llc", "net/bridge", "net/dns_resolver",
)  # fmt: skip
_BOOT_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
_INIT = """#!/bin/busybox sh
B=/bin/busybox
$B mkdir -p /proc /sys /dev /low /up /root /out
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
for m in $($B cat /order); do $B insmod /m/$m || echo "insmod $m failed"; done
O=trans=virtio,version=9p2000.L,msize=512000
$B mount -t 9p -o ro,cache=loose,$O host /low || echo "no root"
$B mount -t tmpfs tmpfs /up
$B mkdir /up/u /up/w
$B mount -t overlay -o lowerdir=/low,upperdir=/up/u,workdir=/up/w overlay /root
for d in proc sys dev; do $B mount --move /$d /root/$d; done
$B mkdir -p /root/results /root/dev/shm /root/dev/pts
$B mount -t tmpfs tmpfs /root/run
$B mount -t tmpfs tmpfs /root/dev/shm
$B mount -t tracefs t /root/sys/kernel/tracing
$B mount -t debugfs d /root/sys/kernel/debug
$B mount -t 9p -o rw,access=any,$O results /root/results || echo "no results"
$B mkdir -p /root/lib/modules
$B mount -t 9p -o ro,cache=loose,$O modules /root/lib/modules || echo "no modules"
$B ip link set lo up
$B chroot /root /bin/sh $($B sed 's/.*script=\\([^ ]*\\).*/\\1/' /root/proc/cmdline) \\
    > /root/results/log 2>&1
echo $? > /root/results/rc.new
$B mv /root/results/rc.new /root/results/rc
$B sync
$B poweroff -f
"""


def _run(*words: str, **options: object) -> str:
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300, **options)
    return done.stdout


def _kernel_package() -> Path:
    """Return the unpacked guest kernel's folder; fetch the current one where none is there."""
    have = sorted(CACHE.glob("kernel/*/done"))
    if have:
        return have[-1].parent
    text = _run("apt-cache", "depends", "linux-image-amd64")
    name = re.search(r"Depends: (linux-image-\S+)", text)[1]
    folder = CACHE / "kernel" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    packages = list(CACHE.glob(f"{name}_*.deb"))
    if not packages:
        _run("apt-get", "download", name, cwd=CACHE)
        packages = list(CACHE.glob(f"{name}_*.deb"))
    version = name.removeprefix("linux-image-")
    base = f"./lib/modules/{version}"
    wanted = [f"{base}/kernel/{part}" for part in _FOLDERS]
    wanted += [f"{base}/modules.builtin*", f"{base}/modules.order", f"./boot/vmlinuz-{version}"]
    unpack = 'dpkg-deb --fsys-tarfile "$0" | tar -x --wildcards --ignore-failed-read -C "$@" 2>&1'
    subprocess.run(
        ["sh", "-c", unpack, str(packages[0]), str(folder), *wanted],
        capture_output=True, timeout=120,
    )  # fmt: skip
    _run("depmod", "-b", str(folder), version)
    packed = (folder / "boot" / f"vmlinuz-{version}").read_bytes()
    start = packed.index(b"\xfd7zXZ\x00")
    kernel = lzma.LZMADecompressor().decompress(packed[start:])
    (folder / "vmlinux").write_bytes(kernel)
    _initramfs(folder, version)
    (folder / "done").touch()
    packages[0].unlink()
    return folder


def _initramfs(folder: Path, version: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place)
        for name in ("bin", "m"):
            (tree / name).mkdir()
        shutil.copy("/bin/busybox", tree / "bin" / "busybox")
        order: list[str] = []
        for module in _BOOT_MODULES:
            text = _run("modprobe", "--show-depends", "-d", str(folder), "-S", version, module)
            for line in text.splitlines():
                if line.startswith("insmod "):
                    path = Path(line.split()[1])
                    if path.name not in order:
                        order.append(path.name)
                        shutil.copy(path, tree / "m" / path.name)
        (tree / "order").write_text("\n".join(order) + "\n")
        (tree / "init").write_text(_INIT)
        (tree / "init").chmod(0o755)
        names = "\n".join(str(p.relative_to(tree)) for p in sorted(tree.rglob("*")))
        archive = subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"], input=names.encode(), cwd=tree,
            check=True, capture_output=True, timeout=30,
        ).stdout  # fmt: skip
        (folder / "initramfs").write_bytes(gzip.compress(archive, 1))


class GuestError(AssertionError):
    """The guest did not finish its script; the message holds the end of its log."""


def run_guest(script: Path | str, results: Path, *, timeout_s: int = 150) -> None:
    """Boot, run a shell script as root with ``/results`` shared, power off.

    Raises GuestError when the script fails or the guest never gets to its end.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = _kernel_package()
    results.mkdir(parents=True, exist_ok=True)

    def share(tag: str, path: Path | str, *, readonly: bool) -> list[str]:
        words = f"local,id={tag},path={path},security_model=none,multidevs=remap"
        words += ",readonly=on" if readonly else ""
        return ["-fsdev", words, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]

    line = "console=ttyS0 quiet panic=-1 tsc=reliable mitigations=off cryptomgr.notests"
    command = [
        "qemu-system-x86_64",
        "-accel", "tcg,thread=single", "-icount", "shift=1,sleep=on", "-rtc", "clock=vm",
        "-smp", "1", "-cpu", "max", "-m", "768", "-nodefaults", "-display", "none", "-no-reboot",
        "-serial", f"file:{results}/console",
        "-kernel", str(folder / "vmlinux"), "-initrd", str(folder / "initramfs"),
        "-append", f"{line} script={script}",
        *share("host", "/", readonly=True),
        *share("results", results, readonly=False),
        *share("modules", folder / "lib" / "modules", readonly=True),
    ]  # fmt: skip
    complaint = ""
    try:  # no program in between: whatever ends this ends the guest
        complaint = subprocess.run(
            ["nice", "-n", "-5", *command], capture_output=True, text=True, timeout=timeout_s
        ).stderr
    except subprocess.TimeoutExpired:
        complaint = f"not at its end after {timeout_s} s"
    status = results / "rc"
    if not status.exists() or status.read_text().strip() != "0":
        tails = [
            (results / name).read_text("utf-8", "replace")[-3000:]
            for name in ("console", "log")
            if (results / name).exists()
        ]
        code = status.read_text().strip() if status.exists() else "none: hang, panic or time-out"
        raise GuestError(f"guest status {code}\n{complaint}\n" + "\n".join(tails))


def environment() -> dict[str, str]:
    """Return what a Python in the guest needs: this checkout, no bytecode written."""
    return {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
    }
