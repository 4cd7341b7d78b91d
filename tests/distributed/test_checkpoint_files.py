"""Directories of checkpoints: nothing else is removed, nothing damaged is loaded, no process waits for another."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.processes import run_processes
from torch import nn

import lowbit as lb
from lowbit.distributed import checkpoint, load, save
from lowbit.files import DirectoryLock
from lowbit.optim.shards import whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1, seed: int = 0) -> None:
    for step in range(count):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed + step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def listing(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


# -- whose a directory is ---------------------------------------------------------------------------------------------
def _notes(out: Path) -> None:
    (out / "notes.txt").write_text("a week of notes")


def _folder(out: Path) -> None:
    (out / "src").mkdir()
    (out / "src" / "train.py").write_text("print()")


def _others_listing(out: Path) -> None:
    (out / "checkpoint.json").write_text('{"mine": 1}')


def _folder_with_our_name(out: Path) -> None:
    (out / "more.pt").mkdir()
    (out / "more.pt" / "x").write_text("x")


def _torch_checkpoint(out: Path) -> None:
    torch.distributed.checkpoint.save({"x": torch.ones(3)}, checkpoint_id=str(out))


@pytest.mark.parametrize("fill", [_notes, _folder, _others_listing, _folder_with_our_name, _torch_checkpoint])
@pytest.mark.parametrize("place", ["run", ".run.new", ".run.old"])
def test_what_no_save_has_written_is_refused_by_name_and_stays(tmp_path: Path, fill, place: str):
    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    (tmp_path / place).mkdir()
    fill(tmp_path / place)
    before = listing(tmp_path)
    for call in (lambda: save(tmp_path / "run", model, optimizer), lambda: checkpoint.remove(tmp_path / "run")):
        with pytest.raises(ValueError, match=r"expected .*run.* to be new, empty or a lowbit checkpoint, but it has"):
            call()
        assert listing(tmp_path) == before


def test_a_note_beside_a_checkpoint_is_not_lost_with_it(tmp_path: Path):
    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    save(tmp_path / "run", model, optimizer, step=1)
    (tmp_path / "run" / "notes.txt").write_text("the good one")
    with pytest.raises(ValueError, match=r"it has notes\.txt; move them away"):
        save(tmp_path / "run", model, optimizer, step=2)
    assert load(tmp_path / "run", model, optimizer) == {"step": 1}
    assert (tmp_path / "run" / "notes.txt").read_text() == "the good one"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is not a directory"):
        save(tmp_path / "file", model, optimizer)
    assert (tmp_path / "file").read_text() == "x"


def test_new_empty_linked_and_current_directories_are_saved_to(tmp_path: Path, monkeypatch):
    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("empty", "deep/er", "link"):
        for step in range(2):
            save(tmp_path / name, model, optimizer, step=step)
            assert load(tmp_path / name, model, optimizer) == {"step": step}
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / ".metadata").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save(".", model, optimizer, step=7)
    assert load(tmp_path / "here", model, optimizer) == {"step": 7}
    assert not list(tmp_path.rglob(".*.new")) and not list(tmp_path.rglob(".*.old"))


def test_two_runs_do_not_save_to_one_directory_at_once(tmp_path: Path):
    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    save(tmp_path / "run", model, optimizer, step=1)
    (tmp_path / ".run.new").mkdir()
    other = DirectoryLock(tmp_path / ".run.new", "other")
    with pytest.raises(RuntimeError, match="another run writes to this directory"):
        save(tmp_path / "run", model, optimizer, step=2)
    assert (tmp_path / ".run.new").is_dir() and load(tmp_path / "run", model, optimizer) == {"step": 1}
    other.release()
    save(tmp_path / "run", model, optimizer, step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# -- damage -----------------------------------------------------------------------------------------------------------
def _flipped(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


NAMES = ("more.pt", "process-0.pt", ".metadata", "__0_0.distcp")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("harm", ["missing", "cut", "flipped", "longer", "empty"])
def test_no_damaged_file_is_loaded_and_nothing_is_restored(tmp_path: Path, name: str, harm: str):
    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    save(tmp_path / "run", model, optimizer)
    path = tmp_path / "run" / name
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    elif harm == "flipped":
        _flipped(path, 0.5)
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "longer": content + b"x", "empty": b""}[harm])
    other = network(1)
    fresh = lb.optim.AdamW(other.parameters(), lr=0.5)
    stepped(other, fresh)
    weights = [p.detach().clone() for p in other.parameters()]
    states = [v.clone() for state in fresh.state.values() for v in state.values() if torch.is_tensor(v)]
    with pytest.raises(RuntimeError, match=rf"{path} is (missing|damaged)"):
        load(tmp_path / "run", other, fresh)
    assert all(map(same_bits, other.parameters(), weights))
    after = [v for state in fresh.state.values() for v in state.values() if torch.is_tensor(v)]
    assert all(map(torch.equal, after, states)) and len(after) == len(states) and fresh.param_groups[0]["lr"] == 0.5


def test_every_byte_of_the_tensors_counts(tmp_path: Path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(tmp_path / "run", model, optimizer)
    path = tmp_path / "run" / "__0_0.distcp"
    for place in torch.linspace(0, 1, 11).tolist():
        _flipped(path, place)
        with pytest.raises(RuntimeError, match="SHA-256"):
            load(tmp_path / "run", model, optimizer)
        _flipped(path, place)
    load(tmp_path / "run", model, optimizer)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "lowbit-checkpoint", "version": 1, "files": null}',
                                  '{"format": "lowbit-checkpoint", "files": {"../x": {}}}',
                                  '{"format": "lowbit-checkpoint", "files": {"more.pt": 3}}'])  # fmt: skip
def test_a_damaged_listing_is_said(tmp_path: Path, text: str):
    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    save(tmp_path / "run", model, optimizer)
    (tmp_path / "run" / "checkpoint.json").write_text(text)
    with pytest.raises(RuntimeError, match=r"checkpoint\.json is damaged"):
        load(tmp_path / "run", model, optimizer)


def _older(directory: Path) -> None:
    """As versions without digests have saved it."""
    (directory / "checkpoint.json").unlink()


def test_checkpoints_without_digests_load_and_are_replaced(tmp_path: Path):
    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    save(tmp_path / "run", model, optimizer, step=1)
    _older(tmp_path / "run")
    other = network(1)
    assert load(tmp_path / "run", other, lb.optim.AdamW(other.parameters())) == {"step": 1}
    assert all(map(same_bits, model.parameters(), other.parameters()))
    save(tmp_path / "run", model, optimizer, step=2)
    _older(tmp_path / "run")
    for name in NAMES:
        content = (tmp_path / "run" / name).read_bytes()
        (tmp_path / "run" / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(RuntimeError, match=f"{name} is damaged"):
            load(tmp_path / "run", other)
        (tmp_path / "run" / name).write_bytes(content)
    assert load(tmp_path / "run", other) == {"step": 2}


# -- frozen parameters ------------------------------------------------------------------------------------------------
MAKE = {
    "torch AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "torch SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "AdamW 8": lambda params: lb.optim.AdamW(params, lr=1e-2),
    "AdamW 4": lambda params: lb.optim.AdamW(params, lr=1e-2, bits=4),
    "Lion": lambda params: lb.optim.Lion(params, lr=1e-3),
}


@pytest.mark.parametrize("into", ["fresh", "stepped without it", "stepped", "frozen too"])
@pytest.mark.parametrize("name", MAKE)
def test_states_of_a_layer_that_was_frozen_go_on_when_it_thaws(tmp_path: Path, name: str, into: str):
    model = network()
    optimizer = MAKE[name](model.parameters())
    stepped(model, optimizer, 3)
    model[0].requires_grad_(False)
    stepped(model, optimizer, 2, seed=10)
    save(tmp_path / "run", model, optimizer)
    other = network(1)
    other[0].requires_grad_(into == "stepped")
    fresh = MAKE[name](other.parameters())
    if into.startswith("stepped"):
        stepped(other, fresh)
    load(tmp_path / "run", other, fresh)
    assert [p.requires_grad for p in other.parameters()] == [into == "stepped"] * 2 + [True] * 2
    for net, opt in ((model, optimizer), (other, fresh)):
        net[0].requires_grad_(True)
        stepped(net, opt, 3, seed=20)
    assert all(map(same_bits, model.parameters(), other.parameters()))


def test_states_that_the_optimizer_has_no_place_for_are_named(tmp_path: Path):
    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    save(tmp_path / "run", model, optimizer)
    with pytest.warns(
        UserWarning, match=r"states of 2 parameters that the optimizer does not have \(0\.bias, 0\.weight\)"
    ):
        load(tmp_path / "run", model, lb.optim.AdamW(model[1].parameters()))


# -- several processes ------------------------------------------------------------------------------------------------
def meet(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet{os.getppid()}", rank=rank, world_size=2)


def _sharded(strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    return lb.distributed.shard_(model, lb.optim.AdamW(model.parameters(), lr=1e-2), strategy)


def _damaged(rank: int, path: str) -> None:
    meet(rank, path)
    model, optimizer = _sharded("zero3")
    stepped(model, optimizer)
    for name in ("process-0.pt", "process-1.pt", ".metadata", "more.pt", "__0_0.distcp", "__1_0.distcp"):
        run = Path(path) / "run"
        save(run, model, optimizer)
        if rank == 0:
            _flipped(run / name, 0.5)
        dist.barrier()
        before = [p.detach().to_local().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match=rf"process \d failed: ValueError: .*{name} is damaged"):
            load(run, model, optimizer)
        assert all(torch.equal(p.detach().to_local(), b) for p, b in zip(model.parameters(), before, strict=True))
        if rank == 0:
            (run / "notes.txt").write_text("x")
        with pytest.raises(ValueError, match=r"it has notes\.txt"):  # in both
            save(run, model, optimizer)
        if rank == 0:
            (run / "notes.txt").unlink()
        dist.barrier()
    dist.destroy_process_group()


def test_all_processes_refuse_what_one_finds_damaged(tmp_path: Path):
    run_processes(_damaged, (str(tmp_path),))


def _thawed(rank: int, path: str) -> None:
    meet(rank, path)
    for strategy in ("zero1", "zero3"):
        plain = network()
        trained = lb.optim.AdamW(plain.parameters(), lr=1e-2)
        stepped(plain, trained, 2)
        expected = [state["exp_avg"].clone() for state in trained.state.values()]
        plain[0].requires_grad_(False)
        model, optimizer = lb.distributed.shard_(plain, trained, strategy)
        save(f"{path}/{strategy}", model, optimizer)
        fresh_model = network(1)
        fresh_model[0].requires_grad_(False)
        other = lb.distributed.shard_(fresh_model, lb.optim.AdamW(fresh_model.parameters(), lr=1e-2), strategy)
        load(f"{path}/{strategy}", *other)
        for one in (optimizer, other[1]):
            found = [whole(state["exp_avg"]) for state in one.state.values()]
            assert len(found) == 4 and all(map(torch.equal, found, expected)), strategy
    dist.destroy_process_group()


def test_frozen_states_of_sharded_models_go_on(tmp_path: Path):
    run_processes(_thawed, (str(tmp_path),))


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["begin", "torch.save", "write_data", "digests", "finish", "rename"])
def test_an_interrupt_while_saving_stays_one_and_leaves_nothing(tmp_path: Path, monkeypatch, where: str):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from lowbit.distributed import stored

    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    save(tmp_path / "run", model, optimizer, step=1)

    def interrupt(*args: object, **kwargs: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        if where == "write_data":
            patch.setattr(FileSystemWriter, "write_data", interrupt)
        elif where == "torch.save":
            patch.setattr(checkpoint.torch, "save", interrupt)
        elif where == "rename":
            renamed = Path.rename

            def last(self: Path, target: Path) -> Path:
                if self.name == ".run.new":
                    interrupt()
                return renamed(self, target)

            patch.setattr(Path, "rename", last)
        elif where == "begin":
            patch.setattr(stored, "write_json", interrupt)
        else:
            patch.setattr(stored.Draft, where, interrupt)
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "run", model, optimizer, step=2)
        assert time.perf_counter() - start < 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert load(tmp_path / "run", model, optimizer) == {"step": 1}
    files = json.loads((tmp_path / "run" / "checkpoint.json").read_text())["files"]
    assert files.keys() == {path.name for path in (tmp_path / "run").iterdir()} - {"checkpoint.json"}
