"""Checkpoints as torch, safetensors and their users write them: whole, cut off, still written."""

import json
import os
import pickle

import pytest

from kansoku.diagnose.edge.checkpoints import find_checkpoints, set_aside

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.real


def cut(path, share=0.6):
    size = path.stat().st_size
    os.truncate(path, int(size * share))


def dated(path, second):
    """Give everything at a path one time, so that the order does not hang on the clock."""
    for one in [path, *path.rglob("*")] if path.is_dir() else [path]:
        os.utime(one, (second, second))


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"model": {"w": torch.randn(200, 200, generator=generator)}, "step": seed}


def test_files_of_torch_save(tmp_path):
    for step in (10, 20):
        path = tmp_path / f"step_{step}.pt"
        torch.save(state(step), path)
        dated(path, step)
    cut(tmp_path / "step_20.pt")
    dated(tmp_path / "step_20.pt", 20)
    torch.save(state(), tmp_path / "step_30.tmp.pt")
    torch.save(state(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "step_40.pt").touch()
    found = {c.name: c.problem for c in find_checkpoints(tmp_path)}
    assert found == {
        "old.pth": None,
        "step_10.pt": None,
        "step_20.pt": "step_20.pt: cut off: its end is missing",
        "step_30.tmp.pt": "still being written, by its name",
        "step_40.pt": "step_40.pt: empty",
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_are_whole_only_with_metadata_and_every_byte_it_names(tmp_path):
    import torch.distributed.checkpoint as dcp

    for step in (1, 2, 3, 4):
        dcp.save(state(step), checkpoint_id=str(tmp_path / f"step-{step}"), no_dist=True)
    assert {c.problem for c in find_checkpoints(tmp_path)} == {None}
    (tmp_path / "step-2" / ".metadata").unlink()
    cut(tmp_path / "step-3" / "__0_0.distcp")
    cut(tmp_path / "step-4" / ".metadata", 0.5)
    found = {c.step: (c.kind, c.problem) for c in find_checkpoints(tmp_path)}
    assert found[1] == ("distributed", None)
    assert found[2][1] == ".metadata is missing, which is written last"
    assert "__0_0.distcp is cut off" in found[3][1]
    assert found[4][1] == ".metadata is damaged"


class Evil:
    def __reduce__(self):
        return (os.mkdir, (f"{os.environ['EVIL']}",))


def test_nothing_of_a_checkpoint_is_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "executed"))
    folder = tmp_path / "step_1"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    (found,) = find_checkpoints(tmp_path)
    assert found.problem == ".metadata is damaged"
    assert not (tmp_path / "executed").exists()


def test_folders_of_hugging_faces_trainer(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    for step in (500, 1000, 1500, 2000):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for part in (1, 2):
            safetensors.save_file(
                {f"w{part}": torch.ones(100, 10)}, folder / f"model-0000{part}-of-00002.safetensors"
            )
        weight_map = {f"w{part}": f"model-0000{part}-of-00002.safetensors" for part in (1, 2)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        torch.save({"state": {}}, folder / "optimizer.pt")
        (folder / "config.json").write_text("{}")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    cut(tmp_path / "checkpoint-1000" / "model-00002-of-00002.safetensors")
    (tmp_path / "checkpoint-1500" / "model-00001-of-00002.safetensors").unlink()
    (tmp_path / "checkpoint-2000" / "trainer_state.json").unlink()
    found = {c.step: (c.kind, c.problem) for c in find_checkpoints(tmp_path)}
    assert found[500] == ("huggingface", None)
    assert "model-00002-of-00002.safetensors: cut off" in found[1000][1]
    assert found[1500][1] == "model-00001-of-00002.safetensors is missing"
    assert found[2000][1] == "trainer_state.json is missing, which is written last"


def test_folders_named_after_steps_with_a_marker_beside_them(tmp_path):
    for step in (100, 200):
        for rank in (0, 1):
            folder = tmp_path / f"iter_{step:07d}" / f"mp_rank_{rank:02d}"
            folder.mkdir(parents=True)
            torch.save(state(), folder / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    found = {c.step: (c.kind, c.problem) for c in find_checkpoints(tmp_path)}
    assert found == {
        100: ("files", None),
        200: ("files", "latest_checkpointed_iteration.txt still names step 100"),
    }


def test_what_is_set_aside_is_found_no_more(tmp_path):
    torch.save(state(), tmp_path / "step_10.pt")
    cut(tmp_path / "step_10.pt")
    (broken,) = find_checkpoints(tmp_path)
    assert set_aside(tmp_path, broken).name == "step_10.pt.incomplete"
    assert find_checkpoints(tmp_path) == []
    assert find_checkpoints(tmp_path / "none") == []
