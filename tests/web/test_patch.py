"""Changes between documents, beside what the page makes of them."""

from hypothesis import given
from hypothesis import strategies as st

from node.web.patch import changes
from testbed.fakes.page_patch import merged

VALUES = st.one_of(st.booleans(), st.integers(), st.text(), st.lists(st.integers(), max_size=3))
KEYS = st.sampled_from(["a", "b", "c", ""])
DOCUMENTS = st.recursive(VALUES, lambda inner: st.dictionaries(KEYS, inner, max_size=3))
WHOLE = st.dictionaries(KEYS, DOCUMENTS, max_size=4)


@given(WHOLE, WHOLE)
def test_the_changes_make_the_new_document_of_the_old(old, new):
    assert merged(old, changes(old, new)) == new


@given(WHOLE)
def test_equal_documents_have_no_changes(document):
    assert changes(document, merged({}, document)) == {}


def test_only_what_differs_is_told():
    old = {"a": {"x": 1, "y": [1, 2]}, "b": 1, "c": "gone"}
    new = {"a": {"x": 1, "y": [2]}, "b": 1}
    assert changes(old, new) == {"a": {"y": [2]}, "c": None}
