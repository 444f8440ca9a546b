"""Protobuf messages in files of TensorBoard, wandb and SwanLab, restricted to the fields that abrun reads.

Messages are declared by field numbers, so that neither package has to be installed; undeclared fields are
skipped. Numbers are from tensorboard 2.21 (event.proto, summary.proto, tensor.proto, plugin_data.proto of
hparams), SwanLab 0.10 (record.proto, run.proto, data.proto) and wandb 0.31 (wandb_internal.proto; clients
from 0.31 on may write a history value as a number).
protobuf.toml declares them. A field is `name = [number, type]`; `*type` is repeated, `name|oneof` is of a
oneof, and a capitalised type is another message.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.message import DecodeError

PACKAGE = "abrun"
SCALARS = {"double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
SCALARS |= {"uint32": 13, "sint64": 18}
MESSAGE, OPTIONAL, REPEATED = 11, 1, 3

MESSAGES: dict[str, dict[str, tuple[int, str]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text()
)


def parse_message(name: str, content: bytes) -> Any | None:
    """Return one of MESSAGES from its bytes; None if they are damaged."""
    try:
        return _message_class(name).FromString(content)
    except DecodeError:
        return None


@cache
def _message_class(name: str) -> Any:
    return message_factory.GetMessageClass(_build_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def _build_pool() -> descriptor_pool.DescriptorPool:
    """Build a separate descriptor pool, because wandb or tensorboard may have filled the default pool."""
    file = descriptor_pb2.FileDescriptorProto(name="abrun.proto", package=PACKAGE, syntax="proto3")
    file.dependency.append("google/protobuf/struct.proto")
    for name, fields in MESSAGES.items():
        declared = file.message_type.add(name=name)
        for key, (number, kind) in fields.items():
            field_name, _, oneof = key.partition("|")
            field: Any = declared.field.add(name=field_name, number=number)
            field.label = REPEATED if kind.startswith("*") else OPTIONAL
            kind = kind.removeprefix("*")
            field.type = SCALARS.get(kind, MESSAGE)
            if kind not in SCALARS:
                field.type_name = kind if kind.startswith(".") else f".{PACKAGE}.{kind}"
            if oneof:
                if not declared.oneof_decl:
                    declared.oneof_decl.add(name=oneof)
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return pool
