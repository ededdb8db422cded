"""What training loops print of a step, as their public logs show it; times and numbers are made.

Each writer returns the text of step ``n`` that took ``took_s`` and ended ``at_s`` after the begin.
"""

import random
from datetime import UTC, datetime, timedelta

__all__ = ["WRITERS", "log"]

START = datetime(2026, 3, 4, 5, tzinfo=UTC)
_TOTAL = 1000


def _when(at_s, parts=True):
    moment = START + timedelta(seconds=at_s)
    return f"{moment:%Y-%m-%d %H:%M:%S}" + (f",{moment.microsecond // 1000:03d}" if parts else "")


def _clock(at_s):
    minutes, seconds = divmod(int(at_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"


def _bar(n, at_s, more=""):
    """Return tqdm's bar without smoothing, as Lightning sets it: the rate is the mean of all."""
    mean_s = at_s / n
    rate = f"{mean_s:5.2f}s/it" if mean_s > 1 else f"{1 / mean_s:5.2f}it/s"
    left = _clock((_TOTAL - n) * mean_s)
    return f"{100 * n // _TOTAL:3d}%|███       | {n}/{_TOTAL} [{_clock(at_s)}<{left}, {rate}{more}]"


def _loss(n):
    return 3 - n / 2000


def megatron(n, took_s, at_s):
    return (
        f" [{_when(at_s, parts=False)}] iteration {n:8d}/    1000 | consumed samples: {n * 128:12d}"
        f" | elapsed time per iteration (ms): {took_s * 1e3:.1f} | throughput per GPU "
        f"(TFLOP/s/GPU): {400 / took_s:.1f} | learning rate: 6.976744E-08 | global batch size:   128"
        f" | lm loss: {_loss(n):.6E} | loss scale: 1.0 | grad norm: 26.203 | number of skipped "
        "iterations:   0 | number of nan iterations:   0 |"
    )


def deepspeed(n, took_s, at_s):
    rank = f"[{_when(at_s)}] [INFO] [logging.py:96:log_dist] [Rank 0]"
    parts = f"forward: {took_s * 200:.2f} | backward: {took_s * 500:.2f} | step: {took_s * 300:.2f}"
    return (
        f"{rank} step={n}, skipped=0, lr=[5e-05, 5e-05], mom=[(0.9, 0.95), (0.9, 0.95)]\n"
        f"[{_when(at_s)}] [INFO] [timer.py:260:stop] epoch=0/micro_step={n * 4}/global_step={n}, "
        f"RunningAvgSamplesPerSec={25 * n / at_s}, CurrSamplesPerSec={25 / took_s}, "
        "MemAllocated=4.32GB, MaxMemAllocated=38.49GB\n"
        f"{rank} rank=0 time (ms) | {parts}"
    )


def deepspeed_pipeline(n, took_s, at_s):
    return (
        f"steps: {n} loss: {_loss(n):.4f} iter time (s): {took_s:.3f} "
        f"samples/sec: {25 / took_s:.3f}"
    )


def hugging_face(n, took_s, at_s):
    said = f"{{'loss': {_loss(n):.4f}, 'learning_rate': 4.9e-05, 'epoch': {n / _TOTAL:.2f}}}\n"
    return (said if n % 10 == 0 else "") + _bar(n, at_s)


def lightning(n, took_s, at_s):
    return f"Epoch 0: {_bar(n, at_s, f', v_num=0, train_loss={_loss(n):.3f}')}"


def nemo(n, took_s, at_s):
    return (
        f"Training epoch 0, iteration {n}/999 | lr: 3e-05 | consumed_samples: {n * 8} | "
        f"global_batch_size: 8 | global_step: {n} | reduced_train_loss: {_loss(n):.3f} | "
        f"train_step_timing in s: {took_s:.4g} | val_loss: 4.106"
    )


def torchtitan(n, took_s, at_s):
    return (
        f"[rank0]:[titan] {_when(at_s)} - root - INFO - step: {n:2d}  loss: {_loss(n):8.5f}  "
        f"grad_norm: 26.6250  memory: 66.91GiB(37.51%)  tps: {round(10_050 / took_s):,}  "
        f"tflops: {314.71 / took_s:.2f}  mfu: {13.99 / took_s:.2f}%"
    )


def torchtitan_in_colour(n, took_s, at_s):
    text = torchtitan(n, took_s, at_s).replace("step:", "\x1b[31mstep:")
    return text.replace("loss:", "\x1b[32mloss:").replace("tps:", "\x1b[34mtps:") + "\x1b[39m"


def torchtitan_undated(n, took_s, at_s):
    """Return the message alone: a throughput is all that tells how long the step took."""
    return torchtitan(n, took_s, at_s).partition("INFO - ")[2]


def maxtext(n, took_s, at_s):
    return (
        f"completed step: {n}, seconds: {took_s:.3f}, TFLOP/s/device: {100 / took_s:.3f}, "
        f"Tokens/s/device: {9000 / took_s:.3f}, total_weights: 65536, loss: {_loss(n):.3f}"
    )


def plain(n, took_s, at_s):
    return f"iteration {n}/1000 | elapsed {took_s:.2f} s"


WRITERS = {
    writer.__name__: writer
    for writer in (
        megatron, deepspeed, deepspeed_pipeline, hugging_face, lightning, nemo, torchtitan,
        torchtitan_in_colour, torchtitan_undated, maxtext, plain,
    )
}  # fmt: skip


def log(name, *, steps=_TOTAL, before_s=1.0, after_s=1.0, change_at=600, seed=1):
    """Return the texts of all steps; from ``change_at`` on they take ``after_s``, within 1 %."""
    noise, at_s, texts = random.Random(seed), 0.0, []
    for n in range(1, steps + 1):
        took_s = (before_s if n < change_at else after_s) * (1 + noise.gauss(0, 0.01))
        at_s += took_s
        texts.append(WRITERS[name](n, took_s, at_s))
    return texts
