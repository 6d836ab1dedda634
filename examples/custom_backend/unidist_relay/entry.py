"""How unidist finds the backend; no framework is imported here."""

from unidist.registry import Entry

ENTRY = Entry("torch", "relay", "unidist_relay.backend:Relay", requires=("torch",), install="pip install unidist-relay")
