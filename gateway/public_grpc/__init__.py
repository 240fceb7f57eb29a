"""The gRPC service for clients, `protos/loraplex.proto`: the HTTP API's inference in other clothes."""
