"""Which names a tenant has, what each means, and which blobs anybody still needs: in Redis.

    loraplex:{adapters}:live:<tenant>               HASH  name → version that the bare name means; 0: none yet
    loraplex:{adapters}:versions:<tenant>:<name>    HASH  version → record (JSON; never changed once written)
    loraplex:{adapters}:last:<tenant>               HASH  name → highest version ever given; outlives a delete
    loraplex:{adapters}:past:<tenant>:<name>        LIST  versions that were live before, the latest first
    loraplex:{adapters}:canary:<tenant>             HASH  name → version:percent of the requests for the name
    loraplex:{adapters}:log:<tenant>:<name>         LIST  what happened to the name (JSON), the latest first
    loraplex:{adapters}:moved:<tenant>              HASH  former name → the name that its versions have now
    loraplex:{adapters}:holdings:<tenant>           HASH  digest → how many of the tenant's versions have it
    loraplex:{adapters}:bytes                       HASH  tenant → bytes of its digests, each counted once
    loraplex:{adapters}:pins                        HASH  tenant:name → digest (hex) that engines keep
    loraplex:{adapters}:grants:<tenant>:<name>      SET   tenants that may use the name as well
    loraplex:{adapters}:granted:<tenant>            SET   owner/name that this tenant may use
    loraplex:{adapters}:references                  HASH  digest → how many versions, of all tenants, have it
    loraplex:{adapters}:unreferenced                ZSET  digest → since when (Unix seconds) none has
    loraplex:{adapters}:reserved:<digest>           HASH  upload → until when its blob must not be collected
    loraplex:{adapters}:condemned                   HASH  digest → until when a collector may be deleting it
    loraplex:{adapters}:revision:<tenant>           HASH  name → counts its changes; outlives a delete
    loraplex:{adapters}:unrecorded                  SET   tenant:name whose record in the store is out of date

Each change of what a name means goes, as owner/name, over the channel loraplex:{adapters}:changes.

Each verb is one script, so that it is atomic and one round trip; the braces keep the keys in one slot of a
Redis Cluster. Blobs and records are elsewhere: `adapters.lifecycle` keeps them in step.
"""

from __future__ import annotations

from adapters.registry.errors import AdapterConflict, AdapterNotFound
from adapters.registry.names import Registry
from adapters.registry.quotas import Quota
from adapters.registry.scripts import CHANGES_CHANNEL
from adapters.registry.versions import AdapterName, AdapterVersion, Canary, Event, Resolution

__all__ = [
    "CHANGES_CHANNEL",
    "AdapterConflict",
    "AdapterName",
    "AdapterNotFound",
    "AdapterVersion",
    "Canary",
    "Event",
    "Quota",
    "Registry",
    "Resolution",
]
