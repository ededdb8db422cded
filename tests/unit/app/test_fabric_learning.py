"""Queue pairs seen on a node become services at the controller, and end with them."""

from kansoku.app.fabric._learning import ServiceLearning, job_of_process
from kansoku.fabric.edge.uplink import ControllerAway
from kansoku.fabric.service import QueuePair


def pair(qpn, *, device="mlx5_0", peer="::ffff:10.0.0.2", pid=7, gone=False, label=3):
    return QueuePair(
        node="a", device=device, qpn=qpn, peer_qpn=1, peer_gid=peer, flow_label=label,
        traffic_class=0, pid=pid, gone=gone,
    )  # fmt: skip


class Learner:
    source = "test"

    def __init__(self):
        self.seen = []

    def poll(self):
        seen, self.seen = self.seen, []
        return seen


class Line:
    """The controller's answers; records what is asked."""

    def __init__(self):
        self.asked = []
        self.away = False

    def request(self, method, path, body, kind):
        if self.away:
            raise ControllerAway("away")
        if path == "/fabric/rnics":
            return {"10.0.0.1": "a/mlx5_0", "10.0.0.2": "b/mlx5_0"}
        assert ("lease_s=" in path) == (method == "PUT")
        path = path.partition("?")[0]
        self.asked.append((method, path, sorted((t.source, t.target, t.port) for t in body or [])))
        return {"tuples": len(body or [])}

    def close(self):
        pass


def test_a_job_is_told_changed_and_ended():
    learner, line = Learner(), Line()
    learning = ServiceLearning("a", ["mlx5_0"], learner, line, job_of=lambda pid: f"j{pid}")
    learning.step()
    assert line.asked == []
    learner.seen = [
        pair(1),
        pair(2, label=4),
        pair(9, device="other"),
        pair(3, peer="::ffff:9.9.9.9"),
    ]
    learning.step()
    both = [("a/mlx5_0", "b/mlx5_0", 49155), ("a/mlx5_0", "b/mlx5_0", 49156)]
    assert line.asked == [("PUT", "/fabric/service/j7.a", both)]
    learning.step()  # nothing new, nothing told
    assert len(line.asked) == 1
    learner.seen = [pair(2, gone=True)]
    learning.step()
    assert line.asked[1:] == [("PUT", "/fabric/service/j7.a", both[:1])]
    learner.seen = [pair(1, gone=True)]
    learning.step()
    assert line.asked[2:] == [("DELETE", "/fabric/service/j7.a", [])]


def test_a_controller_that_was_away_is_told_later():
    learner, line = Learner(), Line()
    learning = ServiceLearning("a", ["mlx5_0"], learner, line, job_of=lambda _: "j")
    line.away, learner.seen = True, [pair(1)]
    learning.step()
    line.away = False
    learning.step()
    assert [method for method, *_ in line.asked] == ["PUT"]
    learning.stop()
    assert [method for method, *_ in line.asked] == ["PUT", "DELETE"]


def test_what_is_told_is_a_lease_and_renewed_in_time():
    learner, line, now = Learner(), Line(), [100.0]
    learning = ServiceLearning(
        "a", ["mlx5_0"], learner, line, job_of=lambda _: "j", clock=lambda: now[0]
    )
    learner.seen = [pair(1)]
    learning.step()
    now[0] += 9
    learning.step()
    assert len(line.asked) == 1
    now[0] += 1
    learning.step()
    assert line.asked[0] == line.asked[1]


def test_the_job_of_a_process(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "environ").write_bytes(b"A=1\0SLURM_JOB_ID=4711\0B=2\0")
    assert job_of_process(7, root=tmp_path) == "4711"
    assert job_of_process(8, root=tmp_path) == "pid-8"
