"""Every exception the project raises on purpose, in one tree.

KVFerryError
├── SpecError           a layout, model or prompt file that cannot be used as given
├── StartError          a process of the cluster did not start, or died
│   └── PortInUseError  its port is taken
├── DispatchError       a request to an instance was not answered as it must be
└── ModelError          a model could not be prepared
"""


class KVFerryError(Exception):
    """Base of everything raised on purpose; its text says what was wrong and what to do about it."""


class SpecError(KVFerryError):
    """A layout, model or prompt file that cannot be used as given."""


class StartError(KVFerryError):
    """A process of the cluster did not become ready, or died."""


class PortInUseError(StartError):
    """The port of a process is taken by another one."""


class DispatchError(KVFerryError):
    """A request to an instance was not answered as it must be."""


class ModelError(KVFerryError):
    """A model could not be fetched, converted or generated."""
