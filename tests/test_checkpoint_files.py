"""Checkpoint files that were damaged, or made to harm: found by name, nothing changed, no code run, nothing read outside."""

import json
import math
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_files import read_tensors, rewrite
from small_run import small

from tpattn import ParallelContext
from tpattn.checkpoint import CheckpointError, CheckpointWarning, complete, load, load_latest, newest, read_about, save, set_aside
from tpattn.training import adamw

BIN = "rank_0000_000.bin"


class Sound:
    """A model with two checkpoints, of steps 1 and 2, and what its tensors were."""

    def __init__(self, folder):
        self.ctx, self.folder = ParallelContext.single(), folder
        self.model = small(self.ctx, num_heads=2, head_dim=4, ffn=5)
        self.optimizer = adamw(self.model, lr=0.1)
        for step in (1, 2):
            for p in self.model.parameters():
                p.grad = torch.full_like(p, step)
            self.optimizer.step()
            self.path = save(folder, self.model, self.optimizer, ctx=self.ctx, step=step, about={"name": "sound"})

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Sound(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def sound(made, tmp_path):
    """The same, in a folder that a test may damage."""
    shutil.copytree(made.folder, tmp_path / "checkpoints")
    other = object.__new__(Sound)
    other.__dict__ |= made.__dict__ | {"folder": tmp_path / "checkpoints", "path": tmp_path / "checkpoints" / made.path.name}
    return other


def refused(sound, told=""):
    """The newest checkpoint is refused by name and nothing has changed; `load_latest` takes the one before and says why."""
    before = sound.weights()
    states = {p: dict(state) for p, state in sound.optimizer.state.items()}
    with pytest.raises(CheckpointError, match=f"^{sound.path}: .*{told}") as error:
        load(sound.path, sound.model, sound.optimizer, ctx=sound.ctx)
    assert all(torch.equal(a, b) for a, b in zip(before, sound.model.parameters(), strict=True))
    assert {p: dict(state) for p, state in sound.optimizer.state.items()} == states
    with pytest.warns(CheckpointWarning, match="step_000001 is taken, since newer ones cannot be"):
        found = load_latest(sound.folder, sound.model, ctx=sound.ctx)
    assert (found["step"], found["skipped"]) == (1, [str(error.value)])
    load(sound.folder / "step_000001", sound.model, ctx=sound.ctx)
    return str(error.value)


def test_the_files_are_json_and_the_bytes_of_the_tensors(made):
    """Read back here without tpattn: every parameter and state once, bit for bit; no other file."""
    assert sorted(p.name for p in made.path.iterdir()) == ["manifest.json", "metadata.json", BIN]
    found = read_tensors(made.path)
    for name, p in made.model.named_parameters():
        assert torch.equal(found.pop(f"model.{name}"), p)
        for key, value in made.optimizer.state[p].items():
            assert torch.equal(found.pop(f"optimizer.{name}.{key}"), value)
    assert list(found) == ["random.cpu.0"]
    about = read_about(made.folder)
    assert (about["step"], about["about"], about["mesh"]) == (2, {"name": "sound"}, {"dp": 1, "cp": 1, "tp": 1})


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_byte_is_found(sound, seed):
    draw = random.Random(seed)
    file = sound.path / [BIN, "metadata.json", "manifest.json"][seed % 3]
    raw = bytearray(file.read_bytes())
    place = draw.randrange(len(raw))
    raw[place] ^= 1 << draw.randrange(8)
    file.write_bytes(raw)
    refused(sound)


@pytest.mark.parametrize("seed", range(9))
def test_a_file_that_was_cut_or_grew_is_found(sound, seed):
    draw = random.Random(seed)
    file = sound.path / [BIN, "metadata.json", "manifest.json"][seed % 3]
    raw = file.read_bytes()
    file.write_bytes(raw + b"\0" if seed < 3 else raw[: draw.randrange(len(raw))])
    refused(sound)


def _first(index):
    """The first tensor with a block."""
    return next(entry for name, entry in index["tensors"].items() if name.startswith("model.") and entry["blocks"])


def _state(index):
    """A state of the optimizer."""
    return next(entry for name, entry in index["tensors"].items() if name.endswith(".exp_avg"))


def _deep(path):
    text = "[" * 100_000 + "]" * 100_000
    (path / "metadata.json").write_text(text)


HOSTILE = {
    "a file above": lambda index, files: files.update({"../x.bin": files[BIN]}),
    "a file elsewhere": lambda index, files: files.update({"/etc/passwd": files[BIN]}),
    "a file in a folder": lambda index, files: files.update({"a/x.bin": files[BIN]}),
    "a block of a file that is not listed": lambda index, files: _first(index)["blocks"][0].update(file="other.bin"),
    "a block of a file above": lambda index, files: _first(index)["blocks"][0].update(file="../step_000001/" + BIN),
    "a block after the end": lambda index, files: _first(index)["blocks"][0].update(place=10**9),
    "a block before the start": lambda index, files: _first(index)["blocks"][0].update(place=-64),
    "a block at an odd place": lambda index, files: _first(index)["blocks"][0].update(place=3),
    "a block that is a word": lambda index, files: _first(index)["blocks"][0].update(place="0"),
    "a block of another shape": lambda index, files: _first(index)["blocks"][0].update(lengths=[2]),
    "two blocks on the same rows": lambda index, files: _first(index)["blocks"].append(_first(index)["blocks"][0]),
    "two tensors in the same bytes": lambda index, files: [e["blocks"][0].update(place=0) for e in index["tensors"].values()],
    "no blocks": lambda index, files: _first(index).update(blocks=[]),
    "a huge tensor": lambda index, files: _first(index).update(shape=[10**15]),
    "a huge state": lambda index, files: index["tensors"].update(
        {"optimizer.embedding.weight.huge": {"shape": [10**15], "dtype": "float32", "blocks": []}}
    ),
    "a type that is none": lambda index, files: _first(index).update(dtype="float33"),
    "a type that is code": lambda index, files: _first(index).update(dtype="__import__('os').system"),
    "a step that is none": lambda index, files: index.update(step="2"),
    "a key that is unknown": lambda index, files: index.update(run="rm"),
    "no tensors": lambda index, files: index.pop("tensors"),
    "an optimizer that is none": lambda index, files: index.update(optimizer={"class": "AdamW", "groups": [1]}),
    "an empty block": lambda index, files: _first(index)["blocks"].insert(0, {**_first(index)["blocks"][0], "lengths": [0, 1]}),
    "a shape that overflows": lambda index, files: _state(index).update(shape=[2**40, 2**40, 0], blocks=[]),
    "a shape of strange numbers": lambda index, files: _state(index).update(shape=[2**63, 0], blocks=[]),
    "another step than the folder's": lambda index, files: index.update(step=77),
    "a step below 0": lambda index, files: index.update(step=-5),
    "a step that is true": lambda index, files: index.update(step=True),
    "parameters that are no names": lambda index, files: index["optimizer"]["groups"][0].update(parameters=[[1]]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_checkpoint_made_to_harm_is_refused(sound, kind):
    """With sizes and hashes that fit, as an attacker would make it."""
    rewrite(sound.path, HOSTILE[kind])
    refused(sound, "the checkpoint is broken")


def _options(**changed):
    return lambda index, files: [group["options"].update(changed) for group in index["optimizer"]["groups"]]


UNFIT = {
    "betas that are a number": _options(betas=3),
    "betas of three": _options(betas=[0.9, 0.9, 0.9]),
    "a learning rate that is text": _options(lr="1"),
    "a learning rate that is none": _options(lr=None),
    "a learning rate that is nan": _options(lr=math.nan),
    "options named params": _options(params=[1, 2]),
    "an option that is none": _options(other=1),
}


def _numel(index):
    return math.prod(_state(index)["shape"])


@pytest.mark.parametrize("kind", UNFIT)
def test_options_made_to_harm_are_refused_before_anything_changes(sound, kind):
    """With sizes and hashes that fit: what the optimizer cannot be given is found first."""
    rewrite(sound.path, UNFIT[kind])
    before = sound.weights()
    options = [{k: v for k, v in group.items() if k != "params"} for group in sound.optimizer.param_groups]
    with pytest.raises(CheckpointError, match=f"^{sound.path}: the optimizer's "):
        load(sound.path, sound.model, sound.optimizer, ctx=sound.ctx)
    assert all(torch.equal(a, b) for a, b in zip(before, sound.model.parameters(), strict=True))
    assert [{k: v for k, v in group.items() if k != "params"} for group in sound.optimizer.param_groups] == options


def test_a_random_state_that_is_none_is_refused_before_anything_changes(sound):
    index = json.loads((sound.path / "metadata.json").read_text())
    block = index["tensors"]["random.cpu.0"]["blocks"][0]
    raw = bytearray((sound.path / BIN).read_bytes())
    raw[block["place"] : block["place"] + block["lengths"][0]] = b"\xff" * block["lengths"][0]
    (sound.path / BIN).write_bytes(raw)
    rewrite(sound.path, lambda index, files: None)
    with torch.no_grad():
        next(sound.model.parameters()).add_(1)
    changed, state = sound.weights(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match="random.cpu.0 is no state of torch's generator"):
        load(sound.path, sound.model, sound.optimizer, ctx=sound.ctx)
    assert all(torch.equal(a, b) for a, b in zip(changed, sound.model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    load(sound.path, sound.model, ctx=sound.ctx)  # the weights alone are sound
    assert not torch.equal(next(sound.model.parameters()), changed[0])


def test_state_of_another_kind_is_refused(sound):
    rewrite(sound.path, lambda index, files: _state(index).update(dtype="complex64", shape=[_numel(index) // 2], blocks=[
        {**_state(index)["blocks"][0], "starts": [0], "lengths": [_numel(index) // 2]}]))
    with pytest.raises(CheckpointError, match="the optimizer's exp_avg of .* no state of it"):
        load(sound.path, sound.model, sound.optimizer, ctx=sound.ctx)


def test_a_pickle_among_the_files_is_never_opened(sound, tmp_path):
    """As torch's own index, as a tensor's bytes, and as JSON."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    raw = pickle.dumps(Evil())
    (sound.path / ".metadata").write_bytes(raw)
    size = (sound.path / BIN).stat().st_size
    (sound.path / BIN).write_bytes(raw + bytes(size - len(raw)))
    rewrite(sound.path, lambda index, files: None)  # hashes that fit
    load(sound.path, sound.model, ctx=sound.ctx)
    (sound.path / "metadata.json").write_bytes(raw)
    rewrite(sound.path, None)
    refused(sound, "metadata.json cannot be read")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", [BIN, "metadata.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_ordinary_file_is_not_opened(sound, name, kind):
    """A link may lead out of the folder; a pipe would be waited for."""
    file = sound.path / name
    if kind == "link":
        file.rename(sound.folder / "elsewhere")
        file.symlink_to(sound.folder / "elsewhere")
    else:
        file.unlink()
        file.mkdir() if kind == "folder" else os.mkfifo(file)
    refused(sound, f"{name}.*(ordinary file|cannot be read)")


def test_json_that_is_too_deep_or_holds_strange_numbers(sound):
    _deep(sound.path)
    rewrite(sound.path, None)
    refused(sound, "metadata.json cannot be read")


# ------------------------------------------------------------------------------------------------------------ which is newest


def test_nothing_sound_is_an_error_and_nothing_at_all_is_none(sound, tmp_path):
    """A run must not silently begin anew because its checkpoints are broken."""
    for path in sound.folder.iterdir():
        (path / BIN).unlink()
    with pytest.raises(CheckpointError, match="no checkpoint in it is sound: .*step_000002.*missing.*step_000001.*missing"):
        load_latest(sound.folder, sound.model, ctx=sound.ctx)
    assert load_latest(tmp_path / "none", sound.model, ctx=sound.ctx) is None


def test_a_draft_is_named_and_not_taken(sound):
    (sound.folder / "step_000009.draft").mkdir()
    (sound.folder / "step_000001.draft").mkdir()
    with pytest.warns(CheckpointWarning, match="step_000009.draft: was not finished"):
        found = load_latest(sound.folder, sound.model, ctx=sound.ctx)
    assert (found["step"], len(found["skipped"])) == (2, 1)


def test_a_kill_between_the_two_renames_of_a_second_save_loses_nothing(sound):
    """The old folder of the step has stepped aside, the new one is not there yet."""
    aside = sound.path.with_name(sound.path.name + ".replaced")
    sound.path.rename(aside)
    assert newest(sound.folder) == aside
    assert load_latest(sound.folder, sound.model, ctx=sound.ctx)["step"] == 2
    save(sound.folder, sound.model, None, ctx=sound.ctx, step=2)
    assert [p.name for p in sorted(sound.folder.iterdir())] == ["step_000001", "step_000002"]


def test_older_ones_go_when_the_new_one_is_there(sound):
    """keep counts complete ones, and never removes the one just written."""
    for step, keep, left in ((3, 2, [2, 3]), (4, 0, [2, 3, 4]), (1, 1, [1, 4]), (5, 1, [5])):
        save(sound.folder, sound.model, None, ctx=sound.ctx, step=step, keep=keep)
        assert [int(p.name[5:]) for p in sorted(sound.folder.iterdir())] == left
    with pytest.raises(CheckpointError, match="keep=-1: needed: a whole number from 0 on"):
        save(sound.folder, sound.model, None, ctx=sound.ctx, step=6, keep=-1)


def test_checkpoints_of_a_history_that_was_left_step_aside(sound):
    assert set_aside(sound.folder, after=2) == []
    assert set_aside(sound.folder, after=1) == [sound.path.with_suffix(".left")]
    assert [p.name for p in complete(sound.folder)] == ["step_000001"]
    save(sound.folder, sound.model, None, ctx=sound.ctx, step=2)
    assert set_aside(sound.folder, after=1) == [sound.path.with_suffix(".left1")]


# ------------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("about", "told"),
    [({"x": {1, 2}}, "Object of type set"), ({"x": torch.ones(1)}, "Object of type Tensor"), ({(1,): 2}, "keys")],
)
def test_what_json_does_not_know_cannot_be_kept(sound, about, told):
    with pytest.raises(CheckpointError, match=told):
        save(sound.folder, sound.model, None, ctx=sound.ctx, step=3, about=about)
    assert len(list(sound.folder.iterdir())) == 2


def test_numbers_that_are_none_come_back(sound):
    save(sound.folder, sound.model, None, ctx=sound.ctx, step=3, about={"x": [math.inf, -math.inf, 1e-320, "\0ü"]})
    assert read_about(sound.folder)["about"] == {"x": [math.inf, -math.inf, 1e-320, "\0ü"]}


def test_a_checkpoint_of_the_old_format_is_named(tmp_path):
    (tmp_path / "step_000001").mkdir()
    (tmp_path / "step_000001" / "state.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(CheckpointError, match="in a format with pickles, which is not read"):
        read_about(Path(tmp_path))


@pytest.mark.parametrize(
    ("step", "keep"), [(4.0, 0), (1.5, 0), (10**18, 0), ("3", 0), (None, 0), (True, 0), (-1, 0), (3, 1.5), (3, None)]
)
def test_steps_and_numbers_that_are_none_are_refused(sound, step, keep):
    with pytest.raises(CheckpointError, match="(step|keep)=.*: needed: a whole number from 0 on"):
        save(sound.folder, sound.model, None, ctx=sound.ctx, step=step, keep=keep)
    assert len(list(sound.folder.iterdir())) == 2


def test_a_view_that_could_not_be_filled_again_is_refused_and_a_conjugate_one_is_saved(tmp_path):
    ctx = ParallelContext.single()
    model = small(ctx)
    model.register_buffer("shown", torch.ones(1, 3).expand(4, 3))
    with pytest.raises(CheckpointError, match="shown is an expanded view, .* make it .contiguous"):
        save(tmp_path, model, None, ctx=ctx, step=1)
    model.shown = torch.tensor([1 + 2j, 3j]).conj()
    save(tmp_path, model, None, ctx=ctx, step=1)
    other = small(ctx)
    other.register_buffer("shown", torch.zeros(2, dtype=torch.complex64))
    load(tmp_path, other, ctx=ctx)
    assert other.shown.tolist() == [1 - 2j, -3j]


def test_leftovers_of_any_kind_are_no_obstacle(sound):
    """Files and links where folders are meant; an empty folder does not hide the one that stands aside."""
    (sound.folder / "step_000003.draft").write_text("")
    (sound.folder / "step_000004.draft").symlink_to("nowhere")
    (sound.folder / "step_000001.removed").write_text("")
    for step in (3, 4):
        save(sound.folder, sound.model, None, ctx=sound.ctx, step=step, keep=2)
    assert [p.name for p in sorted(sound.folder.iterdir())] == ["step_000003", "step_000004"]
    (sound.folder / "step_000004").rename(sound.folder / "step_000004.replaced")
    (sound.folder / "step_000004").mkdir()
    assert load_latest(sound.folder, sound.model, ctx=sound.ctx)["step"] == 4
    save(sound.folder, sound.model, None, ctx=sound.ctx, step=4)
    assert [p.name for p in sorted(sound.folder.iterdir())] == ["step_000003", "step_000004"]
    (sound.folder / "step_000005").mkdir()
    with pytest.warns(CheckpointWarning, match="step_000005: was not finished"):
        assert load_latest(sound.folder, sound.model, ctx=sound.ctx)["step"] == 4
    (sound.folder / "a file").write_text("")
    with pytest.raises(CheckpointError, match="a file: is a file; needed: the folder"):
        load_latest(sound.folder / "a file", sound.model, ctx=sound.ctx)
