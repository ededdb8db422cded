"""What lines mean: driver codes, specific before generic, noise, words that no rule knows."""

import pytest

from kansoku.catalog.signatures import signatures
from kansoku.diagnose.recognise import progress_of, recognise


@pytest.mark.parametrize("rule", signatures(), ids=lambda rule: rule.id)
def test_a_signatures_sample_speaks_for_its_domain(rule):
    """A driver code or a more specific rule may name the part better, noise says nothing."""
    said = recognise(rule.sample)
    if rule.role == "noise":
        assert said is None
    elif rule.id not in {"gpu-xid", "net-wc-other", "gpu-sxid", "gpu-xid-nvlink5"}:
        better = [r for r in signatures() if r.id == said.rule]
        same = said.rule == rule.id or said.domain is rule.domain
        assert same or (better and better[0].pattern.search(rule.sample)) or "." in said.rule


@pytest.mark.parametrize(
    ("line", "domain", "role"),
    [
        # Xid 79 and 74 are hardware, 31 the application's first, 45 a consequence (NVIDIA's list).
        (
            "NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus",
            "gpu_hardware",
            "root",
        ),
        ("NVRM: Xid (PCI:0000:18:00): 31, pid=9, name=python, Ch 8", "application", "either"),
        ("NVRM: Xid (PCI:0000:18:00): 45, pid=9, name=python", "framework", "cascade"),
        ("NVRM: Xid (PCI:0000:4e:00): 74, NVLink: fatal error", "gpu_hardware", "root"),
        ("Memory cgroup out of memory: Killed process 12 (python)", "application", "root"),
        ("Out of memory: Killed process 12 (python) total-vm:1kB", "host", "root"),
        # A NaN that every repeat gives is the job's; one that no repeat gives is the device's.
        ("replayed on other nodes: loss is nan again", "application", "root"),
        ("replay of step 9: wrong loss, not reproducible", "gpu_hardware", "root"),
        # Words of the field that no signature holds.
        ("the HCA's optical transceiver on port 3 died", "network", "either"),
        ("scratch volume went read-only after a journal abort", "storage", "either"),
        ("DIMM A4 machine check, uncorrectable", "host", "either"),
    ],
)
def test_domains(line, domain, role):
    said = recognise(line)
    assert str(said.domain) == domain
    assert said.role == role


def test_the_device_of_an_xid_is_its_pci_address_not_a_time():
    line = "Mar  4 05:05:12 n1 kernel: NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."
    assert recognise(line).device == "0000:18:00"


def test_a_storage_line_names_its_target():
    line = (
        "LustreError: 167-0: scratch-OST0004-osc-ffff: This client was evicted by scratch-OST0004"
    )
    assert recognise(line).target.startswith("scratch-OST0004")


def test_gpfs_names_its_file_system_and_disk():
    left = "[E] File system proj: stripe group panic. Reason: Too many disks are unavailable."
    disk = "[E] Disk failure. Volume proj. rc = 5. Physical volume nsd_14."
    assert recognise(left).target == "proj"
    assert recognise(disk).target == "nsd_14"
    assert recognise("[E] file system is read-only, mount failed").target is None


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("iteration 120/ 5000 | loss 2.3", 120),
        ("global_step=77 lr=1e-4", 77),
        ("step: 5", 5),
        ("error at step 9: failed", None),
        ("nothing", None),
    ],
)
def test_progress(line, step):
    assert progress_of(line) == step


def test_what_the_watchdog_always_adds_says_nothing():
    assert recognise("subsequent GPU operations might run on corrupted/incomplete data.") is None


def test_a_loop_that_counts_skipped_steps_has_handled_nothing():
    nan = "iteration 25 | lm loss: nan | number of skipped iterations: 0"
    assert recognise(nan).strength == recognise("iteration 25 | lm loss: nan").strength


def test_a_schedulers_line_names_its_job():
    assert recognise("Time limit exhausted for JobId=661").target == "job:661"
    step = "*** STEP 661.0 ON a1 CANCELLED AT 2026-03-15T00:00:03 DUE TO TIME LIMIT ***"
    assert recognise(step).target == "job:661"


@pytest.mark.parametrize(
    "line",
    [
        "n1:22:22 [0] NCCL INFO NET/Plugin: Could not find: libx.so. Using internal plugin.",
        "2026-03-04 05:00:00,120 - root - INFO - GPU monitor: cannot read fan, skipped",
        "I0304 05:00:00.120000 77 socket.cpp:2] the rendezvous listener was missing, opened",
        "[W Utils.hpp:135] Warning: environment variable NCCL_X is deprecated; cannot be set soon",
        "x.py:7: FutureWarning: process group options that are missing will be refused",
    ],
)
def test_words_that_the_program_told_for_information_accuse_nobody(line):
    said = recognise(line)
    assert said is None or (said.role == "symptom" and said.strength < 0.2)


def test_nccls_warn_is_an_error_all_the_same():
    assert recognise("n1:22:22 [0] NCCL WARN the communicator is missing a peer").role == "either"


@pytest.mark.parametrize(
    ("line", "domain", "component"),
    [
        (
            "[rank3]: torch._inductor.exc.LoweringException: AssertionError: stride",
            "framework",
            "compiler or internals",
        ),
        (
            "triton.compiler.errors.CompilationError: at 3:4: no",
            "framework",
            "compiler or internals",
        ),
        (
            "torch._dynamo.exc.TorchRuntimeError: Dynamo failed to run FX node: bad shapes",
            "application",
            "code bug",
        ),
        ("ValueError: the config has no key lr", "application", "code bug"),
        ("[rank1]: RuntimeError: loss became inf at step 7, giving up", "application", "numerics"),
        ("[rank1]: FloatingPointError: non-finite gradient in block 3", "application", "numerics"),
    ],
)
def test_an_exception_is_of_whoever_raised_it(line, domain, component):
    said = recognise(line)
    assert (str(said.domain), said.component) == (domain, component)
