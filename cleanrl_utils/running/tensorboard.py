"""TensorBoard events, written with nothing of TensorBoard but its message formats.

Its own functions that write them import a stand-in for TensorFlow, and with it clients of file
systems (boto3 where it is installed), which takes longer than many a short run's first steps.
"""

import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

METRICS = ("charts/episodic_return", "charts/SPS")  # by which its plugin compares runs


class TensorBoardWriter:
    """A file of events, written without a thread that Ctrl+C could break."""

    def __init__(self, folder: Path, purge_step: int | None = None):
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self.Event = event_pb2.Event
        self.Summary = summary_pb2.Summary
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        name += f".{len(list(folder.glob('events.out.tfevents.*')))}"  # of a run, one per start
        self.file = open(folder / name, "ab")  # noqa: SIM115
        self.flushed = time.monotonic()
        self.add(file_version="brain.Event:2")
        if purge_step is not None:  # what a resumed run does again replaces what stood there
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self.add(step=purge_step, session_log=log)

    def add(self, **fields: Any) -> None:
        event = self.Event(wall_time=time.time(), **fields)
        self.file.write(as_record(event.SerializeToString()))
        if time.monotonic() - self.flushed > 5:
            self.file.flush()
            self.flushed = time.monotonic()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """All values of a step as one record: the rest of a record is longer than they are."""
        pairs = [self.Summary.Value(tag=tag, simple_value=x) for tag, x in values.items()]
        self.add(step=step, summary=self.Summary(value=pairs))

    def text(self, tag: str, text: str) -> None:
        self.add(summary=text_summary(f"{tag}/text_summary", text))

    def hyperparameters(self, args: Mapping[str, Any]) -> None:
        """Fill the plugin that compares runs by their settings."""
        plain = {name: x for name, x in args.items() if isinstance(x, bool | int | float | str)}
        self.add(summary=settings_summary(list(plain)))
        self.add(summary=values_summary(plain, time.time()))

    def close(self) -> None:
        self.file.close()


# -- messages of its plugins -----------------------------------------------------------------------


def text_summary(tag: str, text: str) -> Any:
    """The message of a text, shown as Markdown."""
    from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2, types_pb2
    from tensorboard.plugins.text import plugin_data_pb2

    scalar = tensor_shape_pb2.TensorShapeProto()
    texts = [text.encode()]
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING, tensor_shape=scalar, string_val=texts
    )
    return plugin_summary(tag, "text", plugin_data_pb2.TextPluginData(), tensor)


def settings_summary(names: list[str]) -> Any:
    """The message that names the settings and metrics by which runs are compared."""
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    settings = [api_pb2.HParamInfo(name=name) for name in names]
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in METRICS]
    experiment = api_pb2.Experiment(hparam_infos=settings, metric_infos=metrics)
    content = plugin_data_pb2.HParamsPluginData(experiment=experiment)
    return plugin_summary("_hparams_/experiment", "hparams", content, no_tensor())


def values_summary(settings: Mapping[str, Any], started: float) -> Any:
    """The message with a run's values of the settings."""
    from tensorboard.plugins.hparams import plugin_data_pb2

    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    group = hashlib.sha256(text.encode()).hexdigest()  # runs with equal settings form a group
    info = plugin_data_pb2.SessionStartInfo(group_name=group, start_time_secs=started)
    for name, value in settings.items():
        if isinstance(value, bool):
            info.hparams[name].bool_value = value
        elif isinstance(value, str):
            info.hparams[name].string_value = value
        else:
            info.hparams[name].number_value = value
    content = plugin_data_pb2.HParamsPluginData(session_start_info=info)
    return plugin_summary("_hparams_/session_start_info", "hparams", content, no_tensor())


def plugin_summary(tag: str, plugin: str, content: Any, tensor: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    data = SummaryMetadata.PluginData(plugin_name=plugin, content=content.SerializeToString())
    value = Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=data), tensor=tensor)
    return Summary(value=[value])


def no_tensor() -> Any:
    """A vector of no numbers, for messages that are all in their metadata."""
    from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2, types_pb2

    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=0)])
    return tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_shape=shape)


# -- the format of the file ------------------------------------------------------------------------


def as_record(message: bytes) -> bytes:
    """TFRecord: length, its checksum, the message, its checksum."""
    length = struct.pack("<Q", len(message))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, message)]
    return length + checksums[0] + message + checksums[1]


def masked_crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), rotated and shifted as TFRecord wants it."""
    table = crc32c_table()
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    rotated = crc >> 15 | crc << 17
    return (rotated + 0xA282EAD8) & 0xFFFFFFFF


@cache
def crc32c_table() -> list[int]:
    """What each byte does to a checksum: eight steps of division by the polynomial."""
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table
