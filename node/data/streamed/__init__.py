"""Data larger than any volunteer's disk: text read in pieces, where and when it is needed.
Enters: the shards of a web server, of the Hub, or of a disk.
Never: a peer.
"""
