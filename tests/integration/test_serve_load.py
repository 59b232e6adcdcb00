"""Clients that come and leave at random: what is complete is what a lone client gets, and nothing is left behind."""

from __future__ import annotations

from moespeq.demo.assets import MODEL_FOLDER
from serve_load import Load, serve_and_load


def test_a_loaded_server_says_what_it_says_to_a_lone_client_and_ends_idle() -> None:
    outcome = serve_and_load(str(MODEL_FOLDER), Load(clients=6, seconds=2.0, leave=0.3, max_tokens=3))
    assert outcome.failures == []
