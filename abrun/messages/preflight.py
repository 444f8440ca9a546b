"""Sentences of checks before a launch: missing requirements of a run, and settings without effect."""

from abrun.messages.codes import Code
from abrun.messages.message import Message

UNITS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "intermediate_size": "columns of its MLP",
    "num_hidden_layers": "layers",
    "num_experts": "experts",
    "num_local_experts": "experts",
}


MESSAGES: dict[Code, Message] = {
    # Packages
    Code.PACKAGE_NOT_INSTALLED: "the package {package} is missing; pip install 'abrun[{extra}]'",
    Code.PACKAGE_BROKEN: "{package} cannot be imported: {error}; {unneeded:if pip uninstall {unneeded}, "
    "which abrun does not need|pip install --force-reinstall {package}}",
    Code.IMPORT_TOO_SLOW: "importing {package} took more than {seconds} s; run abrun doctor again when the "
    "machine is idle",
    # Devices
    Code.NO_GPU: "nvidia-smi lists no GPU; use cluster.gpus_per_node: 0",
    Code.TORCH_WITHOUT_CUDA: "torch {version} is built without CUDA; {install}",
    Code.TORCH_FINDS_NO_GPU: "torch {version}, built for CUDA {cuda}, finds no GPU (is the driver too old?); "
    "see nvidia-smi",
}
