"""Errors that a user can cause. All of them are also of the built-in type that callers would expect to catch."""


class MedusaError(Exception):
    """Any error of this library that the caller can cause and mend."""


class ConfigError(MedusaError, ValueError):
    """A setting or an argument that cannot be right."""


class UnsupportedError(MedusaError, ValueError):
    """Something that exists, but that cannot be speculated; the message names it and the alternative."""


class CheckpointError(MedusaError, ValueError):
    """Heads on disk that are damaged, incomplete or made for another model."""


class DataError(MedusaError, ValueError):
    """Training data that cannot be used; the message names file and line where it can."""


class AttachError(MedusaError, RuntimeError):
    """A model that tree decoding could not be attached to without changing what it says."""
