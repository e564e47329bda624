"""Lightning's Trainer: what callbacks, hooks and other functions of a trainer keep is what they keep under DDP."""

from pathlib import Path

import pytest

from .test_frameworks import run_code

MODULES = """
import os, sys
from pathlib import Path
import lightning, torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from lightning.pytorch.callbacks import StochasticWeightAveraging
from problem import Net, optimizer_of, rows
from torch.utils.data import DataLoader, DistributedSampler
from fsdp_compile.checkpoint import CheckpointError
from fsdp_compile.integrations.lightning import TrainerStrategy

ranks = int(os.environ["WORLD_SIZE"])
folder, phase = Path(sys.argv[1]), sys.argv[2]

class Module(lightning.LightningModule):
    def __init__(self, factor=1.0):
        super().__init__()
        self.net = Net()
        self.register_buffer("scale", torch.tensor(factor))
    def training_step(self, batch, index):
        self.scale += 0.01
        return F.mse_loss(self.scale * self.net(batch[0]), batch[1])
    def validation_step(self, batch, index):
        self.log("loss", F.mse_loss(self.scale * self.net(batch[0]), batch[1]), sync_dist=True)
    test_step = validation_step
    def predict_step(self, batch, index):
        return self.net(batch[0])
    def configure_optimizers(self):
        return optimizer_of(self)
    def train_dataloader(self):
        sampler = DistributedSampler(rows(), ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(rows(), batch_size=16 // ranks, sampler=sampler)
    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

def trainer_of(strategy, epochs, callbacks=(), **more):
    if strategy == "ours":
        strategy = TrainerStrategy(process_group_backend="gloo", reshard_after_forward=True)
    return lightning.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=epochs, logger=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks), enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0, callbacks=[*callbacks])

def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value

def values(module):
    return {name: full(value).detach().clone() for name, value in module.state_dict().items()}
"""

KINDS = """
class Shadow(Callback):  # averages of its own, sharded as the parameters are
    averages = ()
    def on_train_batch_end(self, trainer, module, *_):
        params = [param.detach() for param in module.parameters()]
        self.averages = self.averages or [param.clone() for param in params]
        for average, param in zip(self.averages, params):
            average.lerp_(param, 0.5)
    def state_dict(self):
        return {"nested": [("averages", {"values": list(self.averages)})], "none": {}, "number": 3}
    def load_state_dict(self, state):
        [(name, kept)] = state["nested"]
        assert name == "averages" and state["none"] == {} and state["number"] == 3
        self.averages = kept["values"]
    def on_train_end(self, trainer, module):
        with torch.no_grad():
            for average, param in zip(self.averages, module.parameters()):
                param.copy_(average)

class Named(Shadow):
    def on_fit_start(self, trainer, module):
        self.names = [name for name, _ in module.named_parameters()]
    def state_dict(self):
        return dict(zip(self.names, self.averages))
    def load_state_dict(self, state):
        self.averages = list(state.values())

class Hooked(Module):  # writes other names, and tensors of its own
    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {name: param.detach().clone() for name, param in self.named_parameters()}
        checkpoint["state_dict"] = {f"old.{name}": value for name, value in checkpoint["state_dict"].items()}
    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"] = {name[4:]: value for name, value in checkpoint["state_dict"].items()}
        for name, param in self.named_parameters():
            torch.testing.assert_close(full(checkpoint["mine"][name]), full(state[name]))

class Partial(Module):
    strict_loading = False
    def on_save_checkpoint(self, checkpoint):
        del checkpoint["state_dict"]["scale"]

def fit(kind, strategy, epochs, saved=None, **more):
    module, callbacks = KINDS[kind][0](), [each() for each in KINDS[kind][1:]]
    saving = [ModelCheckpoint(dirpath=saved, filename="last", enable_version_counter=False)] if saved else []
    trainer_of(strategy, epochs, callbacks + saving).fit(module, **more)
    return values(module)

KINDS = {
    "exponential": (Module, lambda: EMAWeightAveraging(decay=0.9)),
    "average": (Module, WeightAveraging),
    "nested": (Module, Shadow),
    "named": (Module, Named),
    "hooked": (Hooked,),
    "partial": (Partial,),
}
for kind in KINDS:
    here = folder / kind
    if phase == "save":
        torch.testing.assert_close(fit(kind, "ours", 2), fit(kind, "ddp", 2))
        fit(kind, "ours", 1, here)
        fit(kind, "ddp", 1, here / "ddp")
        torch.save(fit(kind, "ddp", 2, ckpt_path=here / "ddp/last.ckpt"), here / "expected.pt")
    else:
        expected = torch.load(here / "expected.pt")
        torch.testing.assert_close(fit(kind, "ours", 2, ckpt_path=here / "last.ckpt"), expected, msg=lambda m: kind + m)
print("[]")
"""


@pytest.mark.nightly
def test_checkpoints_have_what_callbacks_and_hooks_keep(tmp_path: Path) -> None:
    """Averages of weights, sharded or not, in callbacks and hooks, renamed and left out weights: a run that two ranks
    saved ends, on two and on one, as the resumed run of DDP does."""
    run_code(MODULES + KINDS, "lightning", 2, str(tmp_path), "save")
    for ranks in (2, 1):
        run_code(MODULES + KINDS, "lightning", ranks, str(tmp_path), "resume")


FUNCTIONS = """
def results(strategy, folder):
    trainer, module = trainer_of(strategy, 1), Module()
    trainer.fit(module)
    trainer.save_checkpoint(folder / "one")
    more = {"ckpt_path": folder / "one"}
    yield "the module", trainer.validate(module, verbose=False)
    yield "another module", trainer.validate(Module(2.0), verbose=False)
    yield "another module of a checkpoint", trainer.validate(Module(2.0), verbose=False, **more)
    yield "a test", trainer.test(Module(2.0), verbose=False, **more)
    yield "a prediction", trainer.predict(Module(2.0), **more)
    trainer.save_checkpoint(folder / "evaluated")
    trainer, module = trainer_of(strategy, 2), Module()
    trainer.fit(module, **more)
    trainer.save_checkpoint(folder / "two")
    yield "a resumed run", values(module)
    yield "an older checkpoint", trainer.validate(module, verbose=False, **more)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    yield "a second fit, which goes on with the older weights", values(module)
    trainer.fit(other := Module(2.0), ckpt_path=folder / "two")
    yield "a fit of another module", values(other)
    trainer = trainer_of(strategy, 3)
    trainer.validate(Module(), verbose=False)
    trainer.fit(module)
    yield "another trainer, which has validated before", values(module)
    saving = ModelCheckpoint(dirpath=folder, filename="best", save_weights_only=True, enable_version_counter=False)
    trainer = trainer_of(strategy, 1, [saving])
    trainer.fit(Module())
    yield "the best weights", trainer.validate(ckpt_path="best", verbose=False)
    yield "weights alone", trainer.test(Module(2.0), ckpt_path=folder / "best.ckpt", verbose=False)

for (what, found), (_, expected) in zip(results("ours", folder / "ours"), results("ddp", folder / "ddp"), strict=True):
    torch.testing.assert_close(found, expected, msg=lambda message: what + message)

class Objects(Callback):
    def __init__(self, kept):
        self.kept = kept
    def state_dict(self):
        return {"kept": {"here": self.kept(self.module)}}
    def on_fit_start(self, trainer, module):
        self.module = module

def save(kept):
    trainer = trainer_of("ours", 1, [Objects(kept)])
    trainer.fit(Module())
    trainer.save_checkpoint(folder / "objects")

class Box:
    def __init__(self, module):
        self.values = [*module.parameters()]

for refused, names in (
    (lambda: save(Box), ("callbacks", "kept.here: a Box", "it has sharded tensors")),
    (lambda: save(lambda module: module.net), ("callbacks", "kept.here: a Net cannot be saved", "as state_dict() is")),
    (lambda: trainer_of("ours", 1, [StochasticWeightAveraging(1e-2)]).fit(Module()), ("use WeightAveraging",)),
    (lambda: trainer_of("ours", 2).fit(Module(), ckpt_path=folder / "ours/evaluated"), ("optimizer_0",)),
    (lambda: trainer_of("ours", 2).fit(Module(), ckpt_path=folder / "ddp/one"), ("meta.pt",)),
):
    try:
        refused()
    except (TypeError, OSError, CheckpointError) as error:
        assert all(name in str(error) for name in names), error
    else:
        raise AssertionError(names)
print("[]")
"""


@pytest.mark.nightly
def test_functions_of_a_trainer(tmp_path: Path) -> None:
    """Fits, validations, tests and predictions in turn, with other modules and checkpoints, give what DDP gives; what
    cannot be saved or loaded is refused by name."""
    run_code(MODULES + FUNCTIONS, "lightning", 2, str(tmp_path), "")


ATTACKS = """
import pickle, shutil

def fit(epochs, trust=False, **arguments):
    trainer = trainer_of(TrainerStrategy(process_group_backend="gloo", trust=trust), epochs)
    trainer.fit(Module(), **arguments)
    return trainer

class Run:
    def __reduce__(self):
        return os.mkdir, (str(mark),)

mark = folder / "mark"
fit(1).save_checkpoint(folder / "saved")

def meta(folder):
    torch.save(torch.load(folder / "meta.pt", weights_only=True) | {"more": Run()}, folder / "meta.pt")
def metadata(folder):
    (folder / ".metadata").write_bytes(pickle.dumps(Run()))
def link(folder):
    (folder / "meta.pt").rename(folder.parent / "outside.pt")
    (folder / "meta.pt").symlink_to(folder.parent / "outside.pt")
for attack in (meta, metadata, link):
    attacked = folder / attack.__name__
    shutil.copytree(folder / "saved", attacked)
    attack(attacked)
    for weights_only in (None, True):
        try:
            fit(2, ckpt_path=attacked, weights_only=weights_only)
        except CheckpointError as error:
            assert not mark.exists()
            continue
        raise AssertionError(f"{attack.__name__} was loaded")
fit(2, ckpt_path=folder / "saved")
fit(2, trust=True, ckpt_path=folder / "meta")
assert mark.exists()
print("[]")
"""


@pytest.mark.nightly
def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    """`meta.pt` and `.metadata` that call, and a link outside, are refused by default; `trust=True` allows calls."""
    run_code(MODULES + ATTACKS, "lightning", 1, str(tmp_path), "")
