"""Every exception the project raises on purpose, in one tree.

KVFerryError
├── SpecError           a layout, model or prompt file that cannot be used as given
├── ClusterError        no cluster of that name runs, or one does already
├── StartError          a process of the cluster did not start, or died
│   └── PortInUseError  its port is taken
├── DispatchError       a request to an instance was not answered as it must be
├── GatewayError        the gateway cannot be started as told, or must answer a client with an error
├── ModelError          a model could not be prepared
├── TransferError       the data path (NIXL) could not be set up, or a peer could not be reached through it
├── ParamsError         kv_transfer_params that no producer of this protocol made
├── MessageError        bytes on the side channel that are no message of this protocol
├── SettingsError       kv_connector_extra_config with an unknown key or a bad value
├── UnsupportedError    an engine that KVFerry cannot serve
├── SideChannelError    the side channel could not be opened
└── LayoutError         two KV caches that cannot be mapped onto each other, or blocks outside one
"""


class KVFerryError(Exception):
    """Base of everything raised on purpose; its text says what was wrong and what to do about it."""


class SpecError(KVFerryError):
    """A layout, model or prompt file that cannot be used as given."""


class ClusterError(KVFerryError):
    """No cluster of that name runs, one of that name runs already, or it cannot do what it is asked to."""


class StartError(KVFerryError):
    """A process of the cluster did not become ready, or died."""


class PortInUseError(StartError):
    """The port of a process is taken by another one."""


class DispatchError(KVFerryError):
    """A request to an instance was not answered as it must be."""


class GatewayError(KVFerryError):
    """The gateway cannot be started as it was told to, or must answer a client with an error."""


class ModelError(KVFerryError):
    """A model could not be fetched, converted or generated."""


class LayoutError(KVFerryError):
    """Two KV caches cannot be mapped onto each other, or a block list does not lie in its cache."""


class TransferError(KVFerryError):
    """The data path could not be set up, or a peer could not be reached through it."""


class ParamsError(KVFerryError):
    """``kv_transfer_params`` that no producer of this protocol made."""


class MessageError(KVFerryError):
    """Bytes on the side channel that are no message of this protocol."""


class SideChannelError(KVFerryError):
    """The side channel could not be opened."""


class SettingsError(KVFerryError):
    """``kv_connector_extra_config`` has an unknown key or a value out of bounds."""


class UnsupportedError(KVFerryError):
    """This vLLM, or something about this engine, is not supported."""
