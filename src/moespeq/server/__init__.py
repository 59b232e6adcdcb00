"""The OpenAI-compatible server: HTTP on an event loop, one engine on one thread, and a bounded queue between them."""
