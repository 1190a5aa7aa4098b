"""The leader: its view of the members, the choice of the next plan, the end of an attempt. Also the
service that carries its decisions out. Never: a member's side."""
