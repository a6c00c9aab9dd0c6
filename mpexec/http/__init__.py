"""The HTTP server on top of an engine: routes, bodies in the shape of OpenAI's API, metrics, and how it ends."""
