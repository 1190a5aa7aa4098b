"""Between cells: the leaders of cells find the group that averages in a window.

Enters: postings under the same key, offers of other leaders.
Never: tensors, the inside of a cell.
"""
