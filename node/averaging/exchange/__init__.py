"""One exchange over a group: contributions to owners, results back. ``machine.py`` decides,
``service.py`` and ``owner.py`` do. Never: the choice of the group, optimizer mathematics."""
