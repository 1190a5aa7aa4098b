"""The verbs by which an owner keeps a machine its own: pauses, the service, settings, the key, a
report of a fault."""
