"""Sentences of refusals that all packages share: a value, a path or a file that cannot be used."""

from abrun.messages.codes import Code
from abrun.messages.message import Message

_REFUSED = {
    "--faults": "; allowed: NAME or NAME:SIZE, such as misgrouped:2",
    "--interim": "; allowed: numbers of pairs, such as 3,5,8",
    "--name": "; allowed: letters, digits, '.', '_' and '-', at most 100",
    "--package": "; allowed: a name such as torch",
    "--claim": "; allowed: METRIC:WINDOW:MARGIN, such as 'train/reward:last 20%:0.05', "
    "'train/reward:all:1.5 sigma' or 'memory:all:<0.6x'",
    "--repo": ", which is not a git repository; give the trainer's",
    "--seeds": "; allowed: numbers such as 0,1,2 or ranges such as 0-4",
    "--set": "; allowed: key=value with a dotted key, such as steps=20",
    "--sigma": "; allowed: a finite number of 0 or more",
    "--sweep": "; allowed: KEY=VALUE,VALUE with a dotted key, such as policy.backend.tensor_parallel=1,2",
    "--versions": "; allowed: such as 2.10.0,2.11.0,2.12.0",
    "CUDA_VISIBLE_DEVICES": ", which hides every GPU; unset CUDA_VISIBLE_DEVICES",
    "RAY_ADDRESS": "; allowed: http://HEAD:8265 or HEAD:6379; or set launcher.address",
    "cluster.nodes": ", but the local launcher has only this machine; use nodes: 1",
    "compare.reference": ", which is not a file here; make one with abrun reference save",
    "model.path": ", which is not a folder here; give a checkpoint's folder, or a hub name",
    "trainer": ", which is reserved for abrun; choose another name",
    "trainer.argv.0": ", which is not on PATH; install it, or give the path of an executable file",
}


def _refused(field: str, got: str) -> str:
    """A setting, an option or an environment variable has a value that cannot be used."""
    return f"{field}: got {got}{_REFUSED[field]}"


MESSAGES: dict[Code, Message] = {
    Code.SETTING_REFUSED: _refused,
}
