"""The services of a gRPC server that can be taken away while it runs.

A server asks its handlers anew for each call, but forgets none of them. So it gets one handler for
ever, and this one asks the services that are there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc


class ServiceDesk(grpc.GenericRpcHandler):
    """Handlers of services. Generated code adds a service to it as to a server."""

    def __init__(self) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add the handlers of a service."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Do nothing: generated code adds the same methods as generic handlers too."""

    def service(self, handler_call_details: Any) -> Any:
        """See grpc.GenericRpcHandler. None, which a caller sees as UNIMPLEMENTED, for a method that
        no service has."""
        for handler in self._handlers:
            found = handler.service(handler_call_details)
            if found is not None:
                return found
        return None

    def clear(self) -> None:
        """Take all services away. Calls under way go on."""
        self._handlers.clear()
