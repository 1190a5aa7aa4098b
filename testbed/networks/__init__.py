"""Networks in namespaces of this machine: hosts behind routers, shaped links, relays that attack.
Needs root; nothing leaves the machine."""
