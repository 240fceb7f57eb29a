"""Why a model cannot be served: one sentence each, fit to end the process with."""

from __future__ import annotations


class ModelNotAvailable(Exception):
    """The model is not on disk and could not be fetched, or its files are incomplete."""


class UnsupportedModel(ModelNotAvailable):
    """The model is there, but this engine would not compute it as its authors do."""
