"""One exchange over a group: contributions to owners, results back. ``machine.py`` decides,
``service.py`` and ``owner.py`` do. Never: who is in the group, optimizer mathematics.
"""
