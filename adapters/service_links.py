"""Variables that Kubernetes sets for each Service, and that look like settings of ours."""

from __future__ import annotations


def check_port(value: object) -> object:
    """Returns a port as it was given. Raises ValueError for what Kubernetes tells of a Service in its place:
    for one named `loraplex` it sets LORAPLEX_PORT to `tcp://ADDRESS:PORT`.
    """
    if isinstance(value, str) and "://" in value:
        raise ValueError(
            f"'{value[:40]}' is what Kubernetes sets for a Service of this name; name the Service otherwise, "
            "or set enableServiceLinks: false in the pod's spec"
        )
    return value
