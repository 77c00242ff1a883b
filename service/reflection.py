"""Server reflection, v1 and v1alpha.

The Python package registers v1alpha only. v1 has the same messages under another package name: its descriptor is
derived from v1alpha's, and the same servicer answers both.
"""

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

V1ALPHA = "grpc.reflection.v1alpha"
V1 = "grpc.reflection.v1"
_SERVICE = "ServerReflection"


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Lists ``services`` and reflection itself."""
    _register_v1_descriptor()
    names = (*services, f"{V1}.{_SERVICE}", f"{V1ALPHA}.{_SERVICE}")
    servicer = ReflectionServicer(names)
    add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(f"{V1}.{_SERVICE}", {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handler,))


def _register_v1_descriptor() -> None:
    pool = descriptor_pool.Default()
    name = "grpc/reflection/v1/reflection.proto"
    try:
        pool.FindFileByName(name)
        return
    except KeyError:
        pass
    file = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = name, V1
    for message in file.message_type:
        _rename_types(message)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(V1ALPHA, V1)
            method.output_type = method.output_type.replace(V1ALPHA, V1)
    pool.AddSerializedFile(file.SerializeToString())


def _rename_types(message: DescriptorProto) -> None:
    for field in message.field:
        if field.type_name:
            field.type_name = field.type_name.replace(V1ALPHA, V1)
    for nested in message.nested_type:
        _rename_types(nested)
