"""Daemons as processes of this machine, their event files, and the accounts kept from these."""
