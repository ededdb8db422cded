"""The stage of a synthetic incident bundle: a job, its nodes, clocks, logs, cascades and decoys.

A scene collects lines with their true time and writes them as tools do: each host with its own
clock error, each bundle with its own time zone, log layout, kernel log format and host names.
"""

import json
import math
import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

from tests.labs.bundle_texts import DECOYS, NOISE, SMI

DOMAINS = (
    "application",
    "framework",
    "gpu_hardware",
    "network",
    "storage",
    "scheduler",
    "host",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One bundle and the verdict that an experienced operator would give."""

    name: str
    folder: Path
    domain: str
    """One of the seven domains, "none" for a healthy job, "unknown" where nothing decides."""
    component_words: tuple[str, ...]
    """Any one of these (lower case) should occur in the component or its description; empty
    where there is none."""
    subject: str | None
    """Host name (or "rank N") of the origin; None where no single one is to blame."""
    kind: str
    """stop, hang, slow, numerics; none for a healthy job."""
    forbidden: tuple[str, ...]
    """Domains that must not come first."""
    decoys: tuple[str, ...]
    """Text of the misleading lines, as it stands in the bundle."""


ZONES = {"UTC": 0, "Asia/Tokyo": 9, "America/Los_Angeles": -8, "Europe/Berlin": 1}
HOST_STYLES = (
    "gpu-a-{:03d}",
    "c{:03d}",
    "dgx-{:02d}",
    "sk-h100-{:03d}",
    "node{:04d}",
    "hgx{:02d}b",
)
BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
NICS = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_11")
KERNEL_FORMATS = ("dmesg", "dmesg-T", "journal-iso", "syslog", "rsyslog")
LAYOUTS = ("combined", "per_rank", "per_node", "torchrun")
LABELS = ("{r}: ", "[rank{r}]: ", "[default{l}]:", "[1,{r}]<stderr>: ")
TRAINERS = ("megatron", "titan", "hf", "nemo", "nano")
NCCL_VERSIONS = ("2.18.5+cuda12.2", "2.21.5+cuda12.4", "2.23.4+cuda12.6", "2.26.2+cuda12.8")


class Scene:
    """Lines with their times, to be written as the files of one bundle."""

    def __init__(self, name, root, seed, *, nodes=None, gpus=8):
        self.name = name
        self.rng = rng = random.Random(f"{seed}:{name}")
        # the folder's name must not tell the verdict
        self.folder = Path(root) / f"incident-{rng.randrange(16**8):08x}"
        self.gpus = gpus
        self.node_count = nodes or rng.choice((2, 3, 4, 4, 8))
        style = rng.choice(HOST_STYLES)
        numbers = rng.sample(range(1, 97), self.node_count + 2)
        self.hosts = [style.format(n) for n in sorted(numbers[:-2])]
        self.strangers = [style.format(n) for n in numbers[-2:]]
        self.world = self.node_count * gpus
        self.job = rng.randint(18_000, 990_000)
        self.zone_name = rng.choice(list(ZONES))
        self.zone = timezone(timedelta(hours=ZONES[self.zone_name]))
        self.start = datetime(
            2026,
            rng.randint(1, 6),
            rng.randint(1, 27),
            rng.randint(0, 23),
            rng.randint(0, 59),
            rng.randint(0, 59),
            tzinfo=UTC,
        )
        self.skew = {h: rng.uniform(-0.4, 0.4) for h in self.hosts + self.strangers}
        self.boot = {h: self.start - timedelta(hours=rng.uniform(130, 900)) for h in self.skew}
        self.layout, self.label = rng.choice(LAYOUTS), rng.choice(LABELS)
        self.kernel_format, self.trainer = rng.choice(KERNEL_FORMATS), rng.choice(TRAINERS)
        self.nccl = rng.choice(NCCL_VERSIONS)
        self.user = rng.choice(("ytanaka", "mlops", "u10233", "kschmidt", "research1"))
        self.job_name = rng.choice(("pretrain-13b", "llm70b", "moe-8x22", "vit-g", "sft_ja"))
        self.end = 3600.0
        self.slurm = True
        self.dead: dict[str, float] = {}
        self.lines: dict[str, list[tuple[float, str]]] = {}
        self.decoys: list[str] = []
        self.pids = {r: rng.randint(9_000, 900_000) for r in range(self.world)}

    # time and places

    def when(self, at):
        return self.start + timedelta(seconds=at)

    def host(self, rank):
        return self.hosts[rank // self.gpus]

    def pick(self):
        """Return a rank that is not on the first node, its host and its local GPU."""
        rank = self.rng.randrange(self.gpus, self.world)
        return rank, self.host(rank), rank % self.gpus

    def pci(self, gpu, *, long=False):
        return f"0000{'0000' if long else ''}:{BUSES[gpu]}:00"

    def address(self, host):
        return f"10.{40 + self.job % 50}.{sum(host.encode()) % 200}.{11 + (self.hosts + self.strangers).index(host)}"

    def put(self, path, at, text):
        self.lines.setdefault(path, []).append((at, text))

    def file(self, path, text):
        """A file without times of its own."""
        self.put(path, 0.0, text.rstrip("\n"))

    # the job's own output

    def log_path(self, rank, stream="err"):
        host, local = self.host(rank), rank % self.gpus
        if self.layout == "combined":
            return f"slurm-{self.job}.out"
        if self.layout == "per_rank":
            return f"logs/rank_{rank:04d}.log"
        if self.layout == "torchrun":
            return f"logs/{host}/attempt_0/{local}/std{stream}.log"
        return f"output/{self.job_name}-{self.job}.{host}.{stream}"

    def say(self, rank, at, text, stream="err"):
        prefix = (
            ""
            if self.layout in ("per_rank", "torchrun")
            else self.label.format(r=rank, l=rank % self.gpus)
        )
        self.put(
            self.log_path(rank, stream), at, "\n".join(prefix + line for line in text.split("\n"))
        )

    def stamp(self, at):
        return self.when(at).astimezone(self.zone).strftime("%Y-%m-%d %H:%M:%S")

    def info(self, rank, at, text, level="INFO"):
        """A line of Python logging in the job's time zone."""
        self.say(rank, at, f"{self.stamp(at)},{int(at * 1000) % 1000:03d} - {level} - {text}")

    def glog(self, rank, at, text, level="E", source="ProcessGroupNCCL.cpp:629"):
        local = self.when(at).astimezone(self.zone)
        self.say(
            rank,
            at,
            f"[rank{rank}]:[{level}{local:%m%d %H:%M:%S}.{self.rng.randrange(10**9):09d} {source}] {text}",
        )

    def nccl_line(self, rank, at, text, level="INFO"):
        pid = self.pids[rank]
        self.say(
            rank,
            at,
            f"{self.host(rank)}:{pid}:{pid + 210} [{rank % self.gpus}] NCCL {level} {text}",
        )

    def startup(self, *, complete=True, net="IB"):
        for rank in range(self.world):
            at = 20 + self.rng.random() * 10
            if rank == 0:
                self.nccl_line(rank, at, f"NCCL version {self.nccl}")
            devices = " ".join(f"[{i}]{n}:1/RoCE" for i, n in enumerate(NICS[:4]))
            self.nccl_line(
                rank,
                at + 1,
                f"NET/{net} : Using {devices} [RO]; OOB bond0:{self.address(self.host(rank))}<0>",
            )
            if complete:
                self.nccl_line(
                    rank,
                    at + 9,
                    f"ncclCommInitRank comm 0x{0x55D0 + rank:x}a80 rank {rank} nranks {self.world} cudaDev {rank % self.gpus} busId {BUSES[rank % self.gpus]}000 - Init COMPLETE",
                )
        self.say(
            0,
            40,
            "/opt/venv/lib/python3.11/site-packages/torch/utils/checkpoint.py:31: FutureWarning: `torch.cpu.amp.autocast(args...)` is deprecated.",
        )

    def progress(self, until, *, since=90.0, step_s=None, changes=None, loss=None, first=None):
        """Write progress lines; `changes(step, at)` gives extra seconds, `loss(step, at)` a value."""
        step_s = step_s or self.rng.uniform(4, 11)
        rank = self.world - 1 if self.trainer == "megatron" else 0
        step, at = first or self.rng.randrange(100, 90_000, 10), since
        while True:
            took = step_s * self.rng.uniform(0.992, 1.008) + (changes(step, at) if changes else 0.0)
            if at + took >= until:
                return step
            at, step = at + took, step + 1
            value = (
                loss(step, at)
                if loss
                else 2.1 + 1.5 / (1 + step / 4000) + self.rng.uniform(-0.02, 0.02)
            )
            self.say(rank, at, self.progress_line(step, at, took, value), "out")

    def progress_line(self, step, at, took, loss):
        norm = f"{self.rng.uniform(0.2, 0.5):.3f}" if math.isfinite(loss) else "nan"
        if self.trainer == "megatron":
            return f" [{self.stamp(at)}] iteration {step:8d}/  500000 | consumed samples: {step * 1024:12d} | elapsed time per iteration (ms): {took * 1000:.1f} | learning rate: 1.5E-04 | global batch size:  1024 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {norm} | number of skipped iterations:   0 | number of nan iterations:   0 |"
        if self.trainer == "titan":
            return f"[titan] {self.stamp(at)},{int(at * 1000) % 1000:03d} - root - INFO - step: {step:6d}  loss: {loss:7.4f}  grad_norm: {norm}  memory: 61.22GiB(77.4%)  tps: {57000 / took:,.0f}  mfu: {200 / took:.2f}%"
        if self.trainer == "hf":
            return f"{self.stamp(at)} {{'loss': {loss:.4f}, 'grad_norm': {norm}, 'learning_rate': 0.00012, 'epoch': {step / 90000:.4f}, 'step': {step}, 'step_time': {took:.3f}}}"
        if self.trainer == "nemo":
            return f"[NeMo I {self.stamp(at)} logging_mixin:104] Training epoch 0, iteration {step}/999999 | lr: 0.00015 | global_batch_size: 1024 | global_step: {step} | reduced_train_loss: {loss:.4f} | train_step_timing in s: {took:.3f}"
        return f"{self.stamp(at)} iter {step}: loss {loss:.4f}, time {took * 1000:.2f}ms, mfu {180 / took:.2f}%"

    # kernel and system logs

    def kernel(self, host, at, text, unit="kernel"):
        moment = self.when(at + self.skew[host])
        local = moment.astimezone(self.zone)
        since_boot = (moment - self.boot[host]).total_seconds()
        if self.kernel_format == "dmesg" and unit == "kernel":
            return self.put(f"nodes/{host}/dmesg.txt", at, f"[{since_boot:12.6f}] {text}")
        if self.kernel_format == "dmesg-T" and unit == "kernel":
            return self.put(
                f"nodes/{host}/dmesg-T.txt",
                at,
                f"[{local:%a %b} {local.day:2d} {local:%H:%M:%S %Y}] {text}",
            )
        if self.kernel_format == "syslog":
            return self.put(
                f"nodes/{host}/messages",
                at,
                f"{local:%b} {local.day:2d} {local:%H:%M:%S} {host} {unit}: {text}",
            )
        if self.kernel_format == "rsyslog":
            extra = f"[{since_boot:.6f}] " if unit == "kernel" else ""
            return self.put(
                f"nodes/{host}/syslog",
                at,
                f"{local.isoformat(timespec='microseconds')} {host} {unit}: {extra}{text}",
            )
        return self.put(
            f"nodes/{host}/journal.txt", at, f"{local:%Y-%m-%dT%H:%M:%S%z} {host} {unit}: {text}"
        )

    def switch(self, name, at, text):
        local = self.when(at).astimezone(self.zone)
        self.put(
            f"switches/{name}.syslog",
            at,
            f"{local:%Y %b %d %H:%M:%S}.{self.rng.randrange(10**6):06d} {name} {text}",
        )

    def slurmctld(self, at, text):
        local = self.when(at).astimezone(self.zone)
        self.put(
            "slurm/slurmctld.log",
            at,
            f"[{local:%Y-%m-%dT%H:%M:%S}.{int(at * 1000) % 1000:03d}] {text}",
        )

    def sacct(self, state, exit_code="1:0", at=None):
        end = self.when(at or self.end).astimezone(self.zone)
        begin = self.start.astimezone(self.zone)
        row = f"{self.job}|{self.job_name}|{self.user}|gpu|{state}|{exit_code}|{begin:%Y-%m-%dT%H:%M:%S}|{end:%Y-%m-%dT%H:%M:%S}|{self.node_count}|{','.join(self.hosts)}"
        step = row.replace(f"{self.job}|{self.job_name}", f"{self.job}.0|python", 1)
        self.file(
            "slurm/sacct.txt",
            f"JobID|JobName|User|Partition|State|ExitCode|Start|End|NNodes|NodeList\n{row}\n{step}",
        )

    def sinfo(self, host, state, reason):
        rows = [
            f"{h:16s} gpu*      {state if h == host else 'mixed' if h in self.hosts else 'idle':10s} "
            f"{reason if h == host else 'none'}"
            for h in self.hosts + self.strangers
        ]
        self.file(
            "slurm/sinfo-N.txt", "\n".join(("NODELIST         PARTITION STATE      REASON", *rows))
        )

    # cascades

    def watchdog(self, at, seq, *, but=(), op="ALLREDUCE", timeout_s=600):
        """Every rank but some reports the collective that did not end, then aborts."""
        for rank in range(self.world):
            if rank in but:
                continue
            late = at + timeout_s + self.rng.uniform(0, 3)
            self.glog(
                rank,
                late,
                f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=16777216, NumelOut=16777216, Timeout(ms)={timeout_s * 1000}) ran for {timeout_s * 1000 + self.rng.randrange(99)} milliseconds before timing out.",
            )
            self.glog(
                rank,
                late + 0.2,
                f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Timeout at NCCL work: {seq}, last enqueued NCCL work: {seq}, last completed NCCL work: {seq - 1}.",
            )
            self.say(
                rank,
                late + 1,
                f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0(default_pg) Rank {rank}] NCCL watchdog thread terminated with exception: Collective operation timeout",
            )
        self.close(at + timeout_s + 6, code=-6, but=but)

    def remote_errors(self, at, *, but=(), peer=None):
        """Peers of a vanished rank see their connections end."""
        for rank in range(self.world):
            if rank in but or self.rng.random() < 0.3:
                continue
            late = at + self.rng.uniform(1, 12)
            where = self.address(peer or self.rng.choice(self.hosts))
            self.nccl_line(
                rank,
                late,
                f"misc/socket.cc:57 NCCL WARN socketProgress: Connection closed by remote peer {peer or where}<{self.rng.randrange(30000, 60000)}>",
                "WARN",
            )
            self.say(
                rank,
                late + 0.5,
                "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2251, remote process exited or there was a network error, NCCL version "
                + self.nccl.split("+")[0]
                + "\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            )

    def close(self, at, *, rank=None, code=1, but=()):
        """Launchers report and stop the rest; Slurm tidies up."""
        for node, host in enumerate(self.hosts):
            first = node * self.gpus
            guilty = (
                rank
                if rank is not None and self.host(rank) == host
                else first + self.rng.randrange(self.gpus)
            )
            if guilty in but and rank is None:
                continue
            late = at + (0.3 if guilty == rank else self.rng.uniform(14, 22))
            local = self.when(late).astimezone(self.zone)
            for other in range(first, first + self.gpus):
                if other != guilty:
                    self.say(
                        first,
                        late,
                        f"W{local:%m%d %H:%M:%S}.{self.rng.randrange(10**6):06d} {self.pids[first] - 7} torch/distributed/elastic/multiprocessing/api.py:897] Sending process {self.pids[other]} closing signal SIGTERM",
                    )
            shown = code if guilty == rank or rank is None else -6
            self.say(
                first,
                late + 1,
                f"E{local:%m%d %H:%M:%S}.{self.rng.randrange(10**6):06d} {self.pids[first] - 7} torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {shown}) local_rank: {guilty % self.gpus} (pid: {self.pids[guilty]}) of binary: /opt/venv/bin/python",
            )
            self.say(
                first,
                late + 2,
                f"torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n============================================================\ntrain.py FAILED\n------------------------------------------------------------\nRoot Cause (first observed failure):\n[0]:\n  time      : {local:%Y-%m-%d_%H:%M:%S}\n  host      : {host}\n  rank      : {guilty} (local_rank: {guilty % self.gpus})\n  exitcode  : {shown} (pid: {self.pids[guilty]})\n============================================================",
            )
            self.say(first, late + 4, f"srun: error: {host}: task {node}: Exited with exit code 1")
        self.say(
            0, at + 24, "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
        )
        self.end = at + 40

    def fails(self, at, rank, text, *, code=1, hang=False):
        """One rank dies with `text`; the others follow at once or by their watchdog."""
        self.say(rank, at, text)
        if hang:
            return self.watchdog(at, self.rng.randrange(9_000, 90_000), but=(rank,))
        self.remote_errors(at + 1, but=(rank,), peer=self.host(rank))
        return self.close(at + 2, rank=rank, code=code)

    # evidence of hangs and machines

    def flight(
        self, behind, *, seq=None, ops=("nccl:all_reduce",), at=0.0, frames=None, other=None
    ):
        """Dumps of every rank: those in `behind` stopped one collective before the others."""
        seq = seq or self.rng.randrange(4_000, 40_000)
        base = int(self.when(at).timestamp()) * 10**9
        for rank in range(self.world):
            last = seq - 1 if rank in behind else seq
            entries = []
            for number in range(last - 11, last + 1):
                waits = number == seq
                name = ops[number % len(ops)]
                if waits and other and rank in other:
                    name = other[rank]
                created = base - (seq - number) * 900_000_000 + rank * 1000
                entries.append(
                    {
                        "frames": frames
                        or [{"name": "train_step", "filename": "/work/train/loop.py", "line": 214}],
                        "record_id": number,
                        "pg_id": 0,
                        "process_group": ["0", "default_pg"],
                        "collective_seq_id": number,
                        "p2p_seq_id": 0,
                        "op_id": number,
                        "profiling_name": name,
                        "time_created_ns": created,
                        "input_sizes": [[16777216]],
                        "input_dtypes": ["BFloat16"],
                        "output_sizes": [[16777216]],
                        "output_dtypes": ["BFloat16"],
                        "state": "started" if waits else "completed",
                        "time_discovered_started_ns": created + 50_000,
                        "time_discovered_completed_ns": None if waits else created + 2_000_000,
                        "retired": not waits,
                        "timeout_ms": 600_000,
                        "is_p2p": False,
                    }
                )
            dump = {
                "version": "2.9",
                "entries": entries,
                "pg_config": {
                    "0": {
                        "name": "0",
                        "desc": "default_pg",
                        "ranks": json.dumps(list(range(self.world))),
                    }
                },
                "pg_status": {
                    "0": {
                        "last_enqueued_collective": last,
                        "last_started_collective": last,
                        "last_completed_collective": min(last, seq - 1),
                    }
                },
                "rank": rank,
                "world_size": self.world,
            }
            self.file(f"flight_recorder/nccl_trace_rank_{rank}.json", json.dumps(dump))
        return seq

    def stack(self, rank, frames):
        body = "\n".join(f"    {f}" for f in frames)
        self.file(
            f"stacks/py-spy-rank{rank}.txt",
            f'Process {self.pids[rank]}: /opt/venv/bin/python -u train.py --config {self.job_name}.yaml\nPython v3.11.9 (/opt/venv/bin/python3.11)\n\nThread {self.pids[rank]} (active): "MainThread"\n{body}',
        )

    def stacks_waiting(self, but=()):
        for rank in range(self.world):
            if rank not in but:
                self.stack(
                    rank,
                    (
                        "synchronize (torch/cuda/streams.py:105)",
                        "reduce_grads (train/optim.py:88)",
                        "train_step (train/loop.py:214)",
                        "main (train.py:71)",
                    ),
                )

    def smi(self, host, *, gpu=None, edit=(), gpus=None, corrected=0):
        """`nvidia-smi -q`, trimmed; `edit` replaces (old, new) for one GPU."""
        parts = []
        for n in range(gpus or self.gpus):
            text = SMI.format(
                bus=BUSES[n].upper(),
                temp=self.rng.randint(52, 64),
                watts=self.rng.randint(610, 690),
                ce=corrected if n == 2 else 0,
                serial=1650000000 + sum(host.encode()) * 8 + n,
            )
            if n == gpu:
                for old, new in edit:
                    if old not in text:
                        raise AssertionError(old)
                    text = text.replace(old, new)
            parts.append(text)
        self.file(
            f"nodes/{host}/nvidia-smi-q.txt",
            f"==============NVSMI LOG==============\n\nTimestamp                                 : {self.when(self.end).astimezone(self.zone):%a %b %d %H:%M:%S %Y}\nDriver Version                            : {self.rng.choice(('535.183.06', '550.90.07', '570.86.15'))}\nCUDA Version                              : 12.4\n\nAttached GPUs                             : {gpus or self.gpus}\n"
            + "\n".join(parts),
        )

    def metrics(
        self,
        values,
        *,
        since=0.0,
        until=None,
        every=30.0,
        names=("sm_clock_mhz", "gpu_temp_c", "power_w"),
    ):
        """One CSV of node metrics: `values(name, host, gpu, at)` gives a figure or None."""
        until = until or self.end
        at, rows = since, []
        usual = {"sm_clock_mhz": 1755, "gpu_temp_c": 58, "power_w": 655, "gpu_util": 99}
        while at < until:
            for host in self.hosts:
                for gpu in range(self.gpus):
                    given = []
                    for name in names:
                        value = values(name, host, gpu, at)
                        given.append(
                            f"{usual.get(name, 0) * self.rng.uniform(0.985, 1.01) if value is None else value:.0f}"
                        )
                    rows.append(
                        f"{self.when(at):%Y-%m-%dT%H:%M:%SZ},{host},{gpu},{','.join(given)}"
                    )
            at += every
        self.file("metrics/gpu.csv", f"time,host,gpu,{','.join(names)}\n" + "\n".join(rows))

    # decoys

    def decoy(self, kind, host=None, at=None):
        """Add a misleading line: healed, corrected, old or someone else's."""
        host = host or self.rng.choice(self.hosts)
        at = at or self.rng.uniform(200, 600)
        text, heal = DECOYS[kind]
        text = text.format(
            bus=BUSES[self.rng.randrange(8)],
            stranger=self.strangers[0],
            addr="10.9.0.21",
            pid=self.rng.randrange(2000, 90000),
        )
        if kind in ("old_xid", "stranger_xid"):
            host, at = self.strangers[1], -self.rng.uniform(90_000, 160_000)
            self.kernel(host, at, text)
        elif kind in ("caught_oom", "wandb", "grad_skip", "loader_slow"):
            self.info(self.rng.randrange(self.world), at, text, "WARNING")
        elif kind == "ctld":
            self.slurmctld(at, text)
        else:
            self.kernel(host, at, text)
        if heal:
            heal = heal.format(stranger=self.strangers[0], addr="10.9.0.21")
            where = self.slurmctld if kind == "ctld" else lambda t, x: self.kernel(host, t, x)
            where(at + self.rng.uniform(2, 6), heal)
        self.decoys.append(text)

    def noise(self):
        for host in self.hosts:
            for _ in range(self.rng.randint(4, 10)):
                unit, text = self.rng.choice(NOISE)
                line = text.format(n=self.rng.randrange(2000, 90000))
                last = self.dead.get(host, self.end)  # a dead machine writes nothing
                self.kernel(host, self.rng.uniform(-4000, last), line, unit)
        for host in self.hosts + self.strangers:
            if any(path.startswith(f"nodes/{host}/") for path in self.lines):
                boot = self.boot[host].astimezone(self.zone)
                self.put(f"nodes/{host}/uptime-s.txt", 0, f"{boot:%Y-%m-%d %H:%M:%S}")
        if not self.slurm:
            return
        if "slurm/sacct.txt" not in self.lines and self.rng.random() < 0.7:
            self.sacct("FAILED")
        for _ in range(6):
            number = self.job + self.rng.randrange(1, 90)
            self.slurmctld(
                self.rng.uniform(-900, self.end),
                f"sched/backfill: _start_job: Started JobId={number} in gpu on {self.strangers[0]}",
            )
        self.slurmctld(
            -1,
            f"sched: Allocate JobId={self.job} NodeList={','.join(self.hosts)} "
            f"#CPUs={self.node_count * 112} Partition=gpu",
        )

    def finish(self, domain, words, subject, kind, forbidden=()):
        """Write the files and return the case."""
        self.noise()
        self.file(
            "README.txt",
            f"collected for job {self.job} ({self.job_name}); hosts {' '.join(self.hosts)}; node time zone {self.zone_name}; {self.gpus} GPUs a node",
        )
        for path, lines in sorted(self.lines.items()):
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(
                "\n".join(text for _, text in sorted(lines, key=lambda pair: pair[0])) + "\n"
            )
        return Case(
            name=self.name,
            folder=self.folder,
            domain=domain,
            component_words=tuple(words),
            subject=subject,
            kind=kind,
            forbidden=tuple(forbidden),
            decoys=tuple(self.decoys),
        )
