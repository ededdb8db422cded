"""The plan commands as a user calls them: flags, JSON contract, published rows."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kansoku.app.plan import PlanRequest, explain, flops, memory, search
from kansoku.cli._main import app
from kansoku.errors import ConfigurationError, InputError

DATA = Path(__file__).parents[2] / "data" / "plan"
GIB = 2**30


def run(*arguments, code=0):
    answer = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    assert answer.exit_code == code, answer.output
    return answer.output


def ask(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code))


def rows(name):
    with (DATA / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def shape_flags(row):
    names = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv_groups": "kv_heads",
             "ffn": "ffn", "seq": "seq", "vocab": "vocab"}  # fmt: skip
    return {flag: int(row[column]) for column, flag in names.items() if row.get(column)}


def request(row, gpu, **more):
    sizes = {n: int(row[n]) for n in ("tp", "pp", "dp", "cp", "gpus") if row.get(n)}
    return PlanRequest(**shape_flags(row), gpu=gpu, global_batch=int(row["gbs"]), **sizes, **more)


def mean_error(pairs):
    return float(
        np.mean([abs(explain(r).candidate.step_s / published - 1) for r, published in pairs])
    )


def test_korthikanti_rows_by_flags_alone():
    pairs = []
    for row in rows("korthikanti2022_table5.csv"):
        for recompute, key in (
            ("full", "iter_full_recompute_s"),
            ("selective", "iter_seqpar_selective_s"),
        ):
            if row[key]:
                made = request(
                    row, "a100-80gb", recompute=recompute, vp=int(row["interleave_m"]),
                    micro_batch=int(row["mbs"]),
                )  # fmt: skip
                pairs.append((made, float(row[key])))
    assert mean_error(pairs) <= 0.10


def test_dgx_cloud_rows_by_flags_alone():
    pairs = [
        (
            request(
                row, {"H100": "h100-sxm", "GB200": "gb200"}[row["gpu"]],
                micro_batch=int(row["mbs"]), vp=int(row["vp"]) if row["vp"] else None,
                precision=row["precision"].lower(),
            ),
            float(row["step_s"]),
        )
        for row in rows("dgxc_pretrain_perf.csv")
    ]  # fmt: skip
    assert mean_error(pairs) <= 0.10


def test_sc21_rows_by_flags_alone():
    pairs = [
        (request(row, "a100-80gb", recompute="full"), float(row["derived_iter_s"]))
        for row in rows("sc21_megatron_table1.csv")
    ]
    assert mean_error(pairs) <= 0.15


def test_megatron_core_rows_by_flags_alone():
    pairs = []
    for row in rows("megatron_core_h100.csv"):
        made = request(row, "h100-sxm")
        count = flops(made).flops.conventions["full_attention"]
        pairs.append((made, count / int(row["gpus"]) / float(row["tflops_per_gpu"]) / 1e12))
    assert mean_error(pairs) <= 0.15


CANDIDATE = {
    "tp", "pp", "dp", "cp", "ep", "vp", "micro_batch", "recompute", "zero", "step_s",
    "tokens_per_s_per_gpu", "mfu", "memory_gib", "breakdown", "placement",
}  # fmt: skip


def test_search_json_is_the_contract():
    answer = ask(
        "search", "--model", "llama3.1-8b", "--cluster", "sakuraone-h100", "--gpus", 64,
        "--global-batch", 256, "--top", 3, "--tokens", "1T", "--batch-sweep",
    )  # fmt: skip
    assert answer["schema"] == "kansoku.plan/1"
    assert (answer["model"], answer["cluster"], answer["gpus"]) == (
        "llama3.1-8b",
        "sakuraone-h100",
        64,
    )
    assert answer["global_batch"] == 256
    assert len(answer["candidates"]) == 3
    for candidate in answer["candidates"]:
        assert set(candidate) >= CANDIDATE
        assert set(candidate["mfu"]) == {
            "value",
            "convention",
            "peak_flops",
            "peak_source",
            "window",
        }
        assert sum(candidate["breakdown"].values()) == pytest.approx(candidate["step_s"])
        tokens = candidate["tokens_per_s_per_gpu"] * candidate["step_s"] * 64
        assert tokens == pytest.approx(256 * 8192)
    assert sum(answer["rejected"].values()) + answer["feasible"] == answer["tried"]
    budget = answer["budget"]
    assert budget["gpu_hours"] == pytest.approx(budget["total_s"] * 64 / 3600)
    assert [s["global_batch"] for s in answer["batch_sweep"]] == [64, 128, 256, 512, 1024]


def test_explain_json_has_the_step_at_top_level():
    answer = ask(
        "explain", "--model", "gpt3-175b", "--gpu", "h100-sxm", "--gpus", 128, "--tp", 4, "--pp", 8,
        "--vp", 6, "--micro-batch", 1, "--global-batch", 256, "--tokens", "300B",
        "--evaluate-every", 100, "--evaluation-sequences", 1000, "--checkpoint-every", 500,
    )  # fmt: skip
    assert set(answer) >= CANDIDATE
    assert answer["step_s"] == pytest.approx(8.309, rel=0.15)
    changes = " ".join(c["change"] for c in answer["what_if"])
    assert "one more NIC" in changes
    assert "HBM" in changes
    assert "batch twice as big" in changes
    assert answer["critical_resource"]["name"] == "tensor_cores"
    assert sum(r["share"] for r in answer["resources"]) == pytest.approx(1)
    assert answer["budget"]["evaluation_s"] > 0
    # DGX nodes have no storage figure: refused with a reason, not guessed.
    assert answer["budget"]["checkpoint_s"] is None
    assert "storage bandwidth" in " ".join(answer["budget"]["missing"])


def test_terminal_and_html(tmp_path):
    page = tmp_path / "plan.html"
    text = run(
        "explain",
        "--model",
        "22b",
        "--gpu",
        "a100-80gb",
        "--gpus",
        8,
        "--global-batch",
        4,
        "--html",
        page,
    )
    assert "Critical resource" in text
    assert "Where the step goes" in page.read_text(encoding="utf-8")


def test_memory_by_flags_equals_figure_1():
    """arXiv 2205.05198 Figure 1, GPT-3 175B: 12.3515625 GiB of activations, 45.5625 of states."""
    answer = ask(
        "memory", "--layers", 96, "--hidden", 12288, "--heads", 96, "--seq", 2048, "--vocab", 51200,
        "--gpu", "a100-80gb", "--tp", 8, "--pp", 8, "--vp", 3, "--micro-batch", 1,
        "--recompute", "selective",
    )  # fmt: skip
    assert answer["activations_gib"] == 12.3515625
    assert answer["layer_matrix_states_gib"] == 45.5625


def test_memory_states_equal_the_log():
    answer = ask("memory", "--model", "llama3.1-8b", "--gpu", "h100-sxm", "--gpus", 8, "--cp", 2)
    assert answer["states_gb"] == pytest.approx(44.27, rel=0.01)
    assert answer["memory_gib"] * GIB / 1e9 == pytest.approx(70.8, rel=0.05)
    assert any("not given" in note for note in answer["notes"])


def test_too_big_is_a_finding():
    answer = ask("memory", "--model", "gpt3-175b", "--gpu", "h100", "--gpus", 8, "--tp", 8, code=1)
    assert answer["fits"] is False
    run("search", "--model", "gpt3-175b", "--gpu", "h100", "--gpus", 8, "--global-batch", 8, code=1)


def test_flops_of_a_measured_step():
    answer = ask(
        "flops", "--model", "GPT3-175B", "--gpu", "h100", "--gpus", 128, "--global-batch", 256,
        "--step-s", 8.309, "--peak-tflops", 989,
    )  # fmt: skip
    assert answer["mfu"]["value"] * 100 == pytest.approx(53.65, abs=0.01)
    assert set(answer["conventions"]) >= {
        "6nd",
        "full_attention",
        "causal_attention",
        "palm",
        "hardware",
    }


def test_mfu_above_one_hundred_percent_is_refused():
    with pytest.raises(InputError, match="outside 0-1"):
        run(
            "flops",
            "--model",
            "gpt2",
            "--gpu",
            "h100",
            "--gpus",
            1,
            "--global-batch",
            512,
            "--step-s",
            0.001,
        )


def test_config_json_and_overrides(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 22,
        "vocab_size": 32000, "max_position_embeddings": 2048,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    answer = ask("flops", "--model", path, "--seq", 1024)
    # TinyLlama 1.1B: 1,100,048,384 parameters (its model card's safetensors count).
    assert (answer["parameters"], answer["seq"]) == (1_100_048_384, 1024)
    path.write_text("[1, 2", encoding="utf-8")
    with pytest.raises(InputError, match=r"config\.json"):
        run("flops", "--model", path)


def test_measured_links_replace_the_calibration(tmp_path):
    path = tmp_path / "links.json"
    setting = (
        "explain",
        "--model",
        "22b",
        "--gpu",
        "h100",
        "--gpus",
        64,
        "--tp",
        8,
        "--global-batch",
        64,
    )
    path.write_text(
        json.dumps({"links": {"scale_up": {"alpha_s": 1e-5, "beta_bytes_per_s": 100e9}}}),
        encoding="utf-8",
    )
    slow, plain = ask(*setting, "--links", path), ask(*setting)
    assert slow["calibration"]["constants"]["scale_up_efficiency"] == pytest.approx(100 / 450)
    assert slow["step_s"] > plain["step_s"]
    for wrong in (
        {"links": {"scale_out": {"alpha_s": 1e-5, "beta_bytes_per_s": 60e9}}},
        {"links": {}},
        [1],
    ):
        path.write_text(json.dumps(wrong), encoding="utf-8")
        with pytest.raises(InputError, match=r"line rate|links"):
            run(*setting, "--links", path)


def test_absurd_sizes_are_refused_at_the_door():
    for flags in ({"layers": 10**9, "hidden": 64, "heads": 4, "seq": 8, "vocab": 9},):
        with pytest.raises(InputError, match="is above"):
            flops(PlanRequest(**flags))
    with pytest.raises(InputError, match="--gpus must be"):
        search(PlanRequest(model="22b", gpu="h100", gpus=10**12, global_batch=8))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"global_batch": 10**20}, "--global-batch 100000000000000000000 is above"),
        ({"micro_batch": 2**63}, "--micro-batch .* is above"),
        ({"vp": 2**31}, "--vp .* is above"),
        ({"ep": 10**19}, "--ep .* is above"),
        ({"tp": 0}, "--tp must be at least 1"),
        ({"recompute": "sometimes"}, "unknown --recompute 'sometimes'"),
    ],
)
def test_every_size_has_a_bound(given, words):
    """They ended as internal errors (exit 70) before."""
    flags = {"model": "22b", "gpu": "h100", "gpus": 64, "global_batch": 64} | given
    with pytest.raises(InputError, match=words):
        search(PlanRequest(**flags))


def test_a_model_changed_by_flags_says_so():
    notes = ask("flops", "--model", "gpt3-175b", "--hidden", 8192, "--layers", 96)["notes"]
    assert any("changed by flags: hidden 8192;" in note for note in notes)
    assert not any("changed" in n for n in ask("flops", "--model", "gpt3-175b")["notes"])


def test_an_impossible_split_names_what_was_asked():
    with pytest.raises(InputError, match=r"no split of 64 GPUs has the sizes asked for \(tp 3\)"):
        search(PlanRequest(model="22b", gpu="h100", gpus=64, global_batch=64, tp=3))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tokens", "1B", "--evaluate-every", 10), "evaluation-sequences N together"),
        (("--tokens", "1B", "--evaluation-sequences", 10), "evaluate-every STEPS"),
        (("--checkpoint-every", 10), "--tokens N"),
        (("--evaluate-every", 10, "--evaluation-sequences", 8), "--tokens N"),
    ],
)
@pytest.mark.parametrize("verb", ["search", "explain"])
def test_a_cadence_is_never_left_aside_in_silence(verb, flags, words):
    with pytest.raises(InputError, match=words):
        run(verb, "--model", "22b", "--gpu", "h100", "--gpus", 8, "--global-batch", 8, *flags)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("memory", "--model", "gpt2", "--gpu", "h100", "--gpus", 8, "--tp", 3), "change --tp"),
        (("memory", "--model", "gpt2", "--gpu", "h100", "--gpus", 9, "--tp", 3), "sizes named"),
        (("memory", "--model", "gpt2", "--gpus", 9, "--tp", 2, "--dp", 2), "leave --gpus"),
        (("flops", "--model", "gpt2", "--gpu", "h100", "--gpus", 8, "--global-batch", 8,
          "--step-s", 1e-6), "or --step-s 1e-06, --global-batch 8 or --gpus 8"),
        (("search", "--model", "gpt2", "--cluster", "sakuraone", "--gpus", 9000, "--global-batch",
          8), "--gpus of at most 800"),
    ],
)  # fmt: skip
def test_a_refusal_names_what_to_change(arguments, words):
    with pytest.raises(InputError) as caught:
        run(*arguments)
    assert words in (caught.value.remedy or "")


def test_truth_values_are_no_links(tmp_path):
    path = tmp_path / "links.json"
    path.write_text('{"links": {"scale_up": {"alpha_s": true, "beta_bytes_per_s": true}}}')
    with pytest.raises(InputError, match="positive alpha_s"):
        run("search", "--model", "22b", "--gpu", "h100", "--gpus", 8, "--global-batch", 8,
            "--links", path)  # fmt: skip


def test_unreadable_configs_are_one_line_with_a_remedy(tmp_path):
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    for path, words in ((tmp_path / "none.json", "No such file"), (deep, "nested too deeply")):
        with pytest.raises(InputError, match=words) as caught:
            run("flops", "--model", path)
        assert "\n" not in str(caught.value)
        assert caught.value.remedy


def test_mixture_of_experts_by_flags():
    answer = ask(
        "explain", "--layers", 32, "--hidden", 4096, "--heads", 32, "--kv-heads", 8, "--ffn", 14336,
        "--experts", 8, "--experts-per-token", 2, "--seq", 4096, "--vocab", 32000,
        "--gpu", "h100", "--gpus", 64, "--ep", 8, "--global-batch", 256,
    )  # fmt: skip
    assert answer["ep"] == 8
    assert answer["traffic"]["ep"]["bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "h100", "gpus": 8, "global_batch": 8}, "missing --layers"),
        ({"model": "22b", "gpu": "h100", "gpus": 8}, "global batch is not given"),
        ({"model": "22b", "global_batch": 8}, "no hardware given"),
        ({"model": "22b", "gpu": "h100", "global_batch": 8}, "number of GPUs is not given"),
        ({"model": "22b", "gpu": "h100", "gpus": 8, "global_batch": 8, "tp": 7}, "must equal the number of GPUs"),
        ({"model": "22b", "gpu": "q100", "gpus": 8, "global_batch": 8}, "no peak is guessed"),
        ({"model": "22b", "cluster": "sakuraone-h100", "gpus": 9999, "global_batch": 8}, "has 800 GPUs"),
        ({"model": "22b", "gpu": "a100", "gpus": 8, "global_batch": 8, "precision": "fp8"}, "no published dense fp8"),
        ({"layers": 8, "hidden": 100, "heads": 7, "seq": 8, "vocab": 9}, "do not divide"),
    ],
)  # fmt: skip
def test_what_cannot_be_derived_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        explain(PlanRequest(**arguments))


def test_unknown_hardware_figures_are_refused():
    with pytest.raises(ConfigurationError, match="GPUs a node"):
        search(PlanRequest(model="22b", cluster="template-b200", global_batch=8))
    with pytest.raises(ConfigurationError, match="no measured point"):
        search(PlanRequest(model="22b", gpu="gb300", gpus=8, global_batch=8))


def test_pods_are_crossed_only_beyond_one_pod():
    """SAKURAONE: 50 nodes of eight GPUs a pod. 32 nodes stay inside, 96 do not."""
    tiers = {}
    for gpus in (256, 768):
        answer = explain(
            PlanRequest(
                model="gpt3-175b", cluster="sakuraone-h100", gpus=gpus, tp=8, pp=16, vp=6,
                micro_batch=1, global_batch=1536, precision="fp8",
            )
        )  # fmt: skip
        tiers[gpus] = {g.axis: g.tier for g in answer.candidate.placement.groups}
    assert tiers[256]["tp"] == tiers[768]["tp"] == "nvlink"
    assert tiers[256]["pp"] == "leaf"
    assert tiers[768]["pp"] == "pod_crossing"


def test_data_frames():
    request = PlanRequest(model="22b", gpu="a100-80gb", gpus=8, global_batch=4)
    assert explain(request).time_split["share_ratio"].sum() == pytest.approx(1)
    found = search(PlanRequest(model="22b", gpu="a100-80gb", gpus=8, global_batch=4), top=2)
    assert found.candidates.height == 2
    assert memory(PlanRequest(model="22b", tp=8)).parts["bytes"].sum() > 0
