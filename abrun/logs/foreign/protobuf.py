"""Protobuf messages in files of TensorBoard, wandb and SwanLab, restricted to the fields that abrun reads.

Messages are declared by field numbers, so that neither package has to be installed; undeclared fields are
skipped. Numbers are from tensorboard 2.21 (event.proto, summary.proto, tensor.proto, plugin_data.proto of
hparams), SwanLab 0.10 (record.proto, run.proto, data.proto) and wandb 0.31 (wandb_internal.proto; clients
from 0.31 on may write a history value as a number).
A field is `name: (number, type)`; `*type` is repeated, `name|oneof` belongs to a oneof, and a capitalised
type is another message in this module.
"""

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.message import DecodeError

PACKAGE = "abrun"
STRUCT = ".google.protobuf.Value"
SCALARS = {"double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
SCALARS |= {"uint32": 13, "sint64": 18}
MESSAGE, OPTIONAL, REPEATED = 11, 1, 3

MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    # TensorBoard
    "Event": {"wall_time": (1, "double"), "step": (2, "int64"), "summary": (5, "Summary")},
    "Summary": {"value": (1, "*Value")},
    "Value": {
        "tag": (1, "string"),
        "simple_value|value": (2, "float"),
        "tensor|value": (8, "Tensor"),
        "metadata": (9, "Metadata"),
    },
    "Metadata": {"plugin_data": (1, "PluginData")},
    "PluginData": {"plugin_name": (1, "string"), "content": (2, "bytes")},
    "Tensor": {
        "dtype": (1, "int32"),
        "tensor_shape": (2, "Shape"),
        "tensor_content": (4, "bytes"),
        "float_val": (5, "*float"),
        "double_val": (6, "*double"),
        "int_val": (7, "*int32"),
        "string_val": (8, "*bytes"),
        "int64_val": (10, "*int64"),
        "half_val": (13, "*int32"),
        "uint32_val": (16, "*uint32"),
        "uint64_val": (17, "*uint64"),
    },
    "Shape": {"dim": (2, "*Dim")},
    "Dim": {"size": (1, "int64")},
    "HParams": {"session_start_info": (3, "SessionStart")},
    "SessionStart": {"hparams": (1, "*HParam")},
    "HParam": {"key": (1, "string"), "value": (2, STRUCT)},  # an entry of map<string, Value>
    # SwanLab
    "SwanLabRecord": {
        "start|record_type": (10, "SwanLabStart"),
        "finish|record_type": (11, "SwanLabFinish"),
        "scalar|record_type": (13, "SwanLabScalar"),
    },
    "SwanLabStart": {
        "project": (1, "string"),
        "name": (4, "string"),
        "group": (7, "string"),
        "job_type": (8, "string"),
        "id": (10, "string"),
    },
    "SwanLabFinish": {"state": (1, "int32"), "error": (2, "string")},
    "SwanLabScalar": {"key": (1, "string"), "step": (2, "int64"), "value": (5, "SwanLabValue")},
    "SwanLabValue": {"number": (1, "double")},
    # wandb
    "Record": {
        "history|record_type": (2, "History"),
        "config|record_type": (5, "Config"),
        "run|record_type": (17, "Run"),
        "exit|record_type": (18, "Exit"),
        "environment|record_type": (26, "Environment"),
        "metric|record_type": (12, "Metric"),
    },
    "History": {"item": (1, "*HistoryItem"), "step": (2, "HistoryStep")},
    "HistoryItem": {
        "key": (1, "string"),
        "nested_key": (2, "*string"),
        "integer|value": (5, "sint64"),
        "number|value": (6, "double"),
        "value_json": (16, "string"),
    },
    "HistoryStep": {"num": (1, "int64")},
    "Config": {"update": (1, "*ConfigItem"), "remove": (2, "*ConfigItem")},
    "ConfigItem": {"key": (1, "string"), "nested_key": (2, "*string"), "value_json": (16, "string")},
    "Run": {
        "run_id": (1, "string"),
        "config": (4, "Config"),
        "run_group": (6, "string"),
        "job_type": (7, "string"),
        "display_name": (8, "string"),
    },
    "Exit": {"exit_code": (1, "int32")},
    "Environment": {
        "python": (2, "string"),
        "host": (12, "string"),
        "gpu_type": (18, "string"),
        "gpu_count": (19, "uint32"),
        "gpu_nvidia": (24, "*Gpu"),
    },
    "Gpu": {"name": (1, "string")},
    "Metric": {"name": (1, "string"), "glob_name": (2, "string"), "step_metric": (4, "string")},
}


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
