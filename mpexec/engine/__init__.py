"""Requests in, outputs out: what turns an executor and a language model into a text service."""
