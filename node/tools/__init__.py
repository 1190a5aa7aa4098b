"""Offline planners and pictures: ``tutti schedule``, ``tutti partition``, repair of a plan for
peers that come and go. Enters: JSON documents. Never: a daemon, which loads none of it."""
